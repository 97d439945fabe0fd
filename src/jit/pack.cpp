#include "jit/pack.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <filesystem>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

// Magic number, number of entries, checksum of the table; the table (key, offset, bytes); the entries, each with a checksum of its own.
constexpr uint64_t kMagic = 0x31305041504b5446;  // "FTKPAP01"
constexpr uint64_t kMaxEntries = 65536;
constexpr size_t kHeadBytes = 16 + sizeof(Digest), kItemBytes = sizeof(Digest) + 16;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, text("the pack file ", path, " ", why));
}

bool read_at(int fd, void* to, size_t bytes, uint64_t offset) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

void append(std::string& to, const void* from, size_t bytes) { to.append(static_cast<const char*>(from), bytes); }

}  // namespace

void write_pack(const std::string& path, std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
  entries.erase(std::unique(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.key == b.key; }), entries.end());
  if (entries.size() > kMaxEntries) refuse(path, text("would have ", entries.size(), " kernels; allowed: ", kMaxEntries));
  std::string table, bodies;
  for (const Entry& entry : entries) {
    const std::string bytes = encode(entry);
    const uint64_t offset = kHeadBytes + entries.size() * kItemBytes + bodies.size(), size = bytes.size();
    append(table, entry.key.data(), entry.key.size());
    append(table, &offset, sizeof offset);
    append(table, &size, sizeof size);
    bodies += bytes;
  }
  const uint64_t count = entries.size();
  const Digest checksum = sha256(table);
  std::string head;
  append(head, &kMagic, sizeof kMagic);
  append(head, &count, sizeof count);
  append(head, checksum.data(), checksum.size());

  const std::string temporary = text(path, ".new-", getpid(), "-", std::chrono::steady_clock::now().time_since_epoch().count());
  const Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!file) refuse(path, text("cannot be written: ", std::strerror(errno)));
  for (const std::string* part : {&head, &table, &bodies}) {
    for (size_t done = 0; done < part->size();) {
      const ssize_t n = ::write(file.get(), part->data() + done, part->size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        const int error = errno;
        unlink(temporary.c_str());
        refuse(path, text("cannot be written: ", std::strerror(error)));
      }
      done += static_cast<size_t>(n);
    }
  }
  if (fsync(file.get()) == 0 && rename(temporary.c_str(), path.c_str()) == 0) return;
  const int error = errno;
  unlink(temporary.c_str());
  refuse(path, text("cannot be written: ", std::strerror(error)));
}

Pack::Pack(const std::string& path) : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!file_) refuse(path, text("cannot be opened: ", std::strerror(errno)));
  struct stat info {};
  if (fstat(file_.get(), &info) != 0 || !S_ISREG(info.st_mode)) refuse(path, "is no file");
  // Whoever can write it decides what runs on the GPU.
  if (info.st_uid != 0 && info.st_uid != geteuid()) refuse(path, text("belongs to user ", info.st_uid, "; allowed: root and the user who runs this"));
  if ((info.st_mode & 002) != 0) refuse(path, "can be written by every user; take that right away (chmod o-w)");
  uint64_t magic = 0, count = 0;
  Digest checksum{};
  if (!read_at(file_.get(), &magic, sizeof magic, 0) || !read_at(file_.get(), &count, sizeof count, 8) ||
      !read_at(file_.get(), checksum.data(), checksum.size(), 16) || magic != kMagic || count > kMaxEntries)
    refuse(path, "is no pack of kernels of this version of fattn; make it anew with `fattn cache pack`");
  std::string table(count * kItemBytes, '\0');
  if (!read_at(file_.get(), table.data(), table.size(), kHeadBytes) || sha256(table) != checksum)
    refuse(path, "is damaged; make it anew with `fattn cache pack`");
  contents_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    Item& item = contents_[i];
    const char* from = table.data() + i * kItemBytes;
    std::memcpy(item.key.data(), from, sizeof item.key);
    std::memcpy(&item.offset, from + sizeof item.key, sizeof item.offset);
    std::memcpy(&item.bytes, from + sizeof item.key + sizeof item.offset, sizeof item.bytes);
    const auto size = static_cast<uint64_t>(info.st_size);
    if (item.offset > size || item.bytes > size - item.offset) refuse(path, "is cut off; copy it again");
  }
}

std::optional<Entry> Pack::read(const Item& item) const {
  if (item.bytes > static_cast<uint64_t>(kMaxEntryFileBytes)) return std::nullopt;
  std::string bytes(item.bytes, '\0'), why;
  if (!read_at(file_.get(), bytes.data(), bytes.size(), item.offset)) return std::nullopt;
  auto entry = decode(bytes, why);
  if (entry && entry->key != item.key) entry.reset();
  return entry;
}

std::optional<Entry> Pack::find(const Digest& key) const {
  const auto at = std::lower_bound(contents_.begin(), contents_.end(), key, [](const Item& item, const Digest& k) { return item.key < k; });
  return at != contents_.end() && at->key == key ? read(*at) : std::nullopt;
}

std::vector<Entry> Pack::all() const {
  std::vector<Entry> entries;
  for (const Item& item : contents_)
    if (auto entry = read(item)) entries.push_back(std::move(*entry));
  return entries;
}

namespace {

struct Packs {
  std::mutex mutex;
  bool looked_for_installed = false;
  std::vector<std::shared_ptr<const Pack>> added;  // asked from the back
  std::shared_ptr<const Pack> installed;
};
Packs& packs() {
  static Packs& all = *new Packs;  // never destroyed: threads may outlive static destruction
  return all;
}

}  // namespace

std::string installed_pack_path() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&packs), &info) || !info.dli_fname) return "";
  const std::unique_ptr<char, void (*)(void*)> real(realpath(info.dli_fname, nullptr), std::free);
  const std::string library = real ? real.get() : "";
  if (library.empty()) return "";
  const std::string folder = library.substr(0, library.rfind('/'));
  // The command line has the library in it, and the library's folder is beside its own.
  const std::unique_ptr<char, void (*)(void*)> program(realpath("/proc/self/exe", nullptr), std::free);
  const bool is_program = program && library == program.get();
  const std::string beside = is_program && folder.ends_with("/bin") ? folder + "/" FATTN_BIN_TO_LIB : folder;
  return std::filesystem::path(beside + "/fattn/kernels.pack").lexically_normal().string();
}

void add_pack(const std::string& path) {
  if (path.empty() || path[0] != '/') refuse(path, "is named by a relative path; give an absolute one");
  auto pack = std::make_shared<const Pack>(path);
  const std::lock_guard lock(packs().mutex);
  packs().added.push_back(std::move(pack));
}

std::optional<Entry> find_in_packs(const Digest& key) {
  std::vector<std::shared_ptr<const Pack>> asked;
  {
    const std::lock_guard lock(packs().mutex);
    if (!packs().looked_for_installed) {
      packs().looked_for_installed = true;
      const std::string path = installed_pack_path();
      try {
        if (!path.empty() && access(path.c_str(), F_OK) == 0) packs().installed = std::make_shared<const Pack>(path);
      } catch (const Error&) {  // a damaged one is as good as none: NVRTC is asked next
      }
    }
    asked.assign(packs().added.rbegin(), packs().added.rend());
    if (packs().installed) asked.push_back(packs().installed);
  }
  for (const auto& pack : asked)
    if (auto entry = pack->find(key)) return entry;
  return std::nullopt;
}

}  // namespace fattn::core::jit
