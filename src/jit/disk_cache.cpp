#include "jit/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <thread>

#include "shared/env.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr std::string_view kTemporary = ".new-";
constexpr const char* kLockFile = ".lock";
constexpr time_t kStaleTemporarySeconds = 3600;  // a writer that takes longer has died

std::string error_text(int error) { return std::strerror(error); }

// Every folder down to `path` that is not there yet.
bool make_folders(const std::string& path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
    if (mkdir(path.substr(0, at).c_str(), 0700) != 0 && errno != EEXIST) return false;
  return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST;
}

bool read_whole(int fd, size_t bytes, std::string& to) {
  to.resize(bytes);
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = read(fd, to.data() + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool write_whole(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// A regular file of our own, not a link; nothing, and why, otherwise.
Descriptor open_own(int folder, const std::string& name, int64_t max_bytes, struct stat& info, std::string& why) {
  Descriptor file(openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file || fstat(file.get(), &info) != 0) {
    why = text("it cannot be opened: ", error_text(errno));
    return Descriptor();
  }
  if (S_ISREG(info.st_mode) && info.st_uid == geteuid() && info.st_nlink == 1 && (info.st_mode & 022) == 0 && info.st_size <= max_bytes) return file;
  why = "it belongs to another user, is a link or is too large";
  return Descriptor();
}

struct File {
  std::string name;
  int64_t bytes = 0;
  time_t used = 0;
};

// The plain files of the folder, but for the lock.
std::vector<File> files_of(int folder) {
  std::vector<File> files;
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // of its own position
  if (copy < 0) return files;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(fdopendir(copy), closedir);
  if (!stream) {
    close(copy);
    return files;
  }
  while (const dirent* item = readdir(stream.get())) {
    struct stat info {};
    if (std::strcmp(item->d_name, kLockFile) == 0 || fstatat(folder, item->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(info.st_mode)) files.push_back({item->d_name, info.st_size, info.st_mtime});
  }
  return files;
}

bool is_temporary(const File& file) { return file.name.rfind(kTemporary, 0) == 0; }

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

DiskCache::DiskCache(std::string folder, std::string reason, int64_t limit_bytes)
    : folder_(std::move(folder)), reason_(std::move(reason)), limit_bytes_(limit_bytes) {}

Descriptor DiskCache::open_folder(bool make, std::string& why) const {
  if (folder_.empty()) {
    why = reason_;
    return Descriptor();
  }
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  Descriptor folder(open(folder_.c_str(), kFlags));
  if (!folder && errno == ENOENT && make && make_folders(folder_)) folder = Descriptor(open(folder_.c_str(), kFlags));
  if (!folder) {
    why = text("the folder ", folder_, " cannot be ",
               make ? "made or opened: " : "opened: ", errno == ELOOP || errno == ENOTDIR ? "it is a link or no folder" : error_text(errno));
    return Descriptor();
  }
  struct stat info {};
  if (fstat(folder.get(), &info) != 0) {
    why = text("the folder ", folder_, " cannot be examined: ", error_text(errno));
  } else if (info.st_uid != geteuid()) {
    why = text("the folder ", folder_, " belongs to user ", info.st_uid, ", not to user ", geteuid(),
               " who runs this; name another in FATTN_CACHE_DIR");
  } else if ((info.st_mode & 077) != 0) {
    why = text("the folder ", folder_, " is open to other users; make it private (chmod 700) or name another in FATTN_CACHE_DIR");
  } else {
    return folder;
  }
  return Descriptor();
}

std::string DiskCache::problem() const {
  std::string why;
  const Descriptor folder = open_folder(true, why);
  if (folder && faccessat(folder.get(), ".", W_OK | X_OK, 0) != 0) why = text("the folder ", folder_, " cannot be written: ", error_text(errno));
  return why;
}

std::optional<Entry> DiskCache::load(const Digest& key, std::optional<NvrtcVersion> version) const {
  std::string why;
  const Descriptor folder = open_folder(false, why);
  if (!folder) return std::nullopt;
  std::vector<std::string> names;
  if (version) {
    names = {entry_file_name(key, *version)};
  } else {
    std::vector<NvrtcVersion> versions;
    for (const File& file : files_of(folder.get()))
      if (const auto name = parse_entry_file_name(file.name); name && name->key_hex == hex(key)) versions.push_back(name->version);
    std::sort(versions.begin(), versions.end(),
              [](NvrtcVersion a, NvrtcVersion b) { return a.major != b.major ? a.major > b.major : a.minor > b.minor; });
    for (const NvrtcVersion v : versions) names.push_back(entry_file_name(key, v));
  }
  for (const std::string& name : names) {
    struct stat info {};
    const Descriptor file = open_own(folder.get(), name, kMaxEntryFileBytes, info, why);
    std::string bytes;
    // What cannot be opened or read stays where it is: it may be whole, and this process out of descriptors. What is no entry (a
    // link, a pipe, another's file) gives way when the new one is renamed into its place.
    if (!file || !read_whole(file.get(), static_cast<size_t>(info.st_size), bytes)) continue;
    std::optional<Entry> entry = decode(bytes, why);
    // A whole entry under another's name is as wrong as a damaged one.
    if (!entry || name != entry_file_name(entry->key, entry->version)) {
      unlinkat(folder.get(), name.c_str(), 0);
      continue;
    }
    if (std::time(nullptr) - info.st_mtime > 60) futimens(file.get(), nullptr);  // used now
    return entry;
  }
  return std::nullopt;
}

bool DiskCache::publish(int folder, const std::string& name, std::string_view bytes, std::string& why) const {
  static std::atomic<unsigned> counter{0};
  const std::string temporary =
      text(kTemporary, getpid(), "-", counter.fetch_add(1), "-", std::chrono::steady_clock::now().time_since_epoch().count());
  const Descriptor file(openat(folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) {
    why = text("a file cannot be made in ", folder_, ": ", error_text(errno));
    return false;
  }
  if (!write_whole(file.get(), bytes) || fsync(file.get()) != 0 || renameat(folder, temporary.c_str(), folder, name.c_str()) != 0) {
    why = text(folder_, "/", name, " cannot be written: ", error_text(errno));
    unlinkat(folder, temporary.c_str(), 0);
    return false;
  }
  fsync(folder);  // the name, too; what is lost is compiled again
  return true;
}

bool DiskCache::store(const Entry& entry, std::string& why) const {
  const std::string bytes = encode(entry);
  if (static_cast<int64_t>(bytes.size()) > std::min(kMaxEntryFileBytes, limit_bytes_)) {
    why = text("the entry has ", bytes.size(), " bytes; at most ", std::min(kMaxEntryFileBytes, limit_bytes_), " are kept");
    return false;
  }
  const Descriptor folder = open_folder(true, why);
  if (!folder || !publish(folder.get(), entry_file_name(entry.key, entry.version), bytes, why)) return false;
  evict(folder.get());
  return true;
}

void DiskCache::remove(const Digest& key) const {
  std::string why;
  const Descriptor folder = open_folder(false, why);
  if (!folder) return;
  for (const File& file : files_of(folder.get()))
    if (file.name.rfind(hex(key), 0) == 0) unlinkat(folder.get(), file.name.c_str(), 0);
}

// Down to the limit, what was used longest ago first. Several processes may do so at once: a file that is gone is no error.
void DiskCache::evict(int folder) const {
  std::vector<File> files = files_of(folder);
  const time_t now = std::time(nullptr);
  std::erase_if(files, [&](const File& file) {
    if (!is_temporary(file)) return false;
    if (now - file.used > kStaleTemporarySeconds) unlinkat(folder, file.name.c_str(), 0);
    return true;
  });
  int64_t bytes = 0;
  for (const File& file : files) bytes += file.bytes;
  auto count = static_cast<int64_t>(files.size());
  if (bytes <= limit_bytes_ && count <= kLimitFiles) return;
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
  // Some room beyond, so that not every store has to look for more.
  for (const File& file : files) {
    if (bytes <= limit_bytes_ / 10 * 9 && count <= kLimitFiles / 10 * 9) return;
    if (unlinkat(folder, file.name.c_str(), 0) == 0) bytes -= file.bytes, --count;
  }
}

std::vector<CacheItem> DiskCache::list() const {
  std::vector<CacheItem> items;
  std::string why;
  const Descriptor folder = open_folder(false, why);
  if (!folder) return items;
  std::vector<File> files = files_of(folder.get());
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used != b.used ? a.used > b.used : a.name < b.name; });
  for (const File& f : files) {
    const auto name = parse_entry_file_name(f.name);
    if (!name) continue;
    CacheItem item{f.name, f.bytes, f.used, std::nullopt, ""};
    struct stat info {};
    std::string bytes;
    if (const Descriptor file = open_own(folder.get(), f.name, kMaxEntryFileBytes, info, item.why)) {
      if (read_whole(file.get(), static_cast<size_t>(info.st_size), bytes))
        item.entry = decode(bytes, item.why);
      else
        item.why = "it cannot be read";
      if (item.entry && f.name != entry_file_name(item.entry->key, item.entry->version)) {
        item.entry.reset();
        item.why = "it is another kernel's";
      }
    }
    if (item.entry) item.why.clear();
    items.push_back(std::move(item));
  }
  return items;
}

CacheUse DiskCache::use() const {
  CacheUse use;
  std::string why;
  const Descriptor folder = open_folder(false, why);
  if (!folder) return use;
  for (const File& file : files_of(folder.get())) use.entries += parse_entry_file_name(file.name) ? 1 : 0, use.bytes += file.bytes;
  return use;
}

CacheUse DiskCache::clear() const {
  CacheUse gone;
  std::string why;
  const Descriptor folder = open_folder(false, why);
  if (!folder) return gone;
  for (const File& file : files_of(folder.get())) {
    if (is_temporary(file) && std::time(nullptr) - file.used <= kStaleTemporarySeconds) continue;  // somebody is writing it
    if (unlinkat(folder.get(), file.name.c_str(), 0) != 0) continue;
    gone.entries += parse_entry_file_name(file.name) ? 1 : 0;
    gone.bytes += file.bytes;
  }
  return gone;
}

bool DiskCache::write_text(const std::string& name, std::string_view content, std::string& why) const {
  const Descriptor folder = open_folder(true, why);
  return folder && publish(folder.get(), name, content, why);
}

std::string DiskCache::read_text(const std::string& name) const {
  std::string why, bytes;
  struct stat info {};
  const Descriptor folder = open_folder(false, why);
  if (!folder) return "";
  const Descriptor file = open_own(folder.get(), name, 1 << 20, info, why);
  return file && read_whole(file.get(), static_cast<size_t>(info.st_size), bytes) ? bytes : "";
}

Descriptor DiskCache::lock(const Digest& key, double seconds) const {
  std::string why;
  const Descriptor folder = open_folder(true, why);
  if (!folder) return Descriptor();
  Descriptor file(openat(folder.get(), kLockFile, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return file;
  // One byte of the file a key, at a place that the key decides: no file a key is left behind, and the lock of a process that
  // dies is gone. The lock belongs to the open file, so threads exclude each other too.
  uint64_t place = 0;
  std::memcpy(&place, key.data(), sizeof place);
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(place >> 2);
  range.l_len = 1;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  auto pause = std::chrono::milliseconds(1);
  while (fcntl(file.get(), F_OFD_SETLK, &range) != 0) {
    if ((errno != EAGAIN && errno != EACCES && errno != EINTR) || std::chrono::steady_clock::now() >= end) return Descriptor();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
  return file;
}

DiskCache default_disk_cache() {
  const auto below = [](const std::string& folder) { return DiskCache(folder + (folder.back() == '/' ? "kernels" : "/kernels")); };
  const auto absolute = [](const char* value) { return std::string(value && value[0] == '/' ? value : ""); };
  const std::string wanted = env_value(kEnvCacheDir);
  if (!wanted.empty() && wanted[0] != '/') return DiskCache("", text("FATTN_CACHE_DIR is '", wanted, "'; it must be an absolute path"));
  if (!wanted.empty()) return below(wanted);
  if (const std::string cache = absolute(std::getenv("XDG_CACHE_HOME")); !cache.empty()) return below(cache + "/fattn");
  std::string home = absolute(std::getenv("HOME"));
  if (home.empty()) {
    passwd entry{}, *found = nullptr;
    std::vector<char> buffer(16384);
    if (getpwuid_r(geteuid(), &entry, buffer.data(), buffer.size(), &found) == 0 && found) home = absolute(found->pw_dir);
  }
  if (home.empty()) return DiskCache("", "no folder: neither FATTN_CACHE_DIR nor XDG_CACHE_HOME nor HOME is set to an absolute path");
  return below(home + "/.cache/fattn");
}

}  // namespace fattn::core::jit
