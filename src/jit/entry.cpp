#include "jit/entry.h"

#include <cstring>
#include <type_traits>

namespace fattn::core::jit {
namespace {

// Numbers are in the order of this machine's bytes; the magic number is one of them, so another order is refused.
constexpr uint64_t kMagic = 0x32304b4e54544146;  // "FATTNK02"
constexpr size_t kHeadBytes = sizeof kMagic + sizeof(Digest);

class Writer {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void string(std::string_view text) {
    number(uint64_t{text.size()});
    bytes_ += text;
  }
  void raw(const Digest& digest) { bytes_.append(reinterpret_cast<const char*>(digest.data()), digest.size()); }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <class T>
  void number(T& value) {
    static_assert(std::is_arithmetic_v<T>);
    take(&value, sizeof value);
  }
  void string(std::string& text) {
    uint64_t size = 0;
    number(size);
    if (size > rest_.size()) good_ = false;
    if (!good_) return;
    text = rest_.substr(0, size);
    rest_.remove_prefix(size);
  }
  void raw(Digest& digest) { take(digest.data(), digest.size()); }
  bool whole() const { return good_ && rest_.empty(); }

 private:
  void take(void* to, size_t size) {
    if (size > rest_.size()) good_ = false;
    if (!good_) return;
    std::memcpy(to, rest_.data(), size);
    rest_.remove_prefix(size);
  }

  std::string_view rest_;
  bool good_ = true;
};

// One list of the fields for both ways.
template <class Archive, class EntryRef>
void fields(Archive& a, EntryRef& e, int32_t& specific, int32_t& known, int32_t& degraded) {
  a.raw(e.key);
  a.number(e.version.major);
  a.number(e.version.minor);
  a.number(e.arch);
  a.number(specific);
  a.string(e.name);
  a.string(e.description);
  a.number(e.resources.registers);
  a.number(e.resources.stack_bytes);
  a.number(e.resources.spill_store_bytes);
  a.number(e.resources.spill_load_bytes);
  a.number(e.resources.shared_bytes);
  a.number(e.resources.barriers);
  a.number(known);
  a.number(degraded);
  a.number(e.seconds);
  a.string(e.log);
  a.string(e.image);
}

}  // namespace

std::string encode(const Entry& entry) {
  Writer payload;
  int32_t specific = entry.arch_specific, known = entry.resources.known, degraded = entry.resources.degraded;
  fields(payload, entry, specific, known, degraded);
  Writer whole;
  whole.number(kMagic);
  whole.raw(sha256(payload.bytes()));
  whole.bytes() += payload.bytes();
  return std::move(whole.bytes());
}

std::optional<Entry> decode(std::string_view bytes, std::string& why) {
  const auto refuse = [&](const char* reason) {
    why = reason;
    return std::nullopt;
  };
  if (bytes.size() < kHeadBytes) return refuse("it is cut off");
  uint64_t magic = 0;
  Digest checksum{};
  std::memcpy(&magic, bytes.data(), sizeof magic);
  std::memcpy(checksum.data(), bytes.data() + sizeof magic, checksum.size());
  if (magic != kMagic) return refuse("it is not a compiled kernel of this version of fattn");
  bytes.remove_prefix(kHeadBytes);
  if (sha256(bytes) != checksum) return refuse("its checksum is wrong");
  Entry entry;
  int32_t specific = 0, known = 0, degraded = 0;
  Reader payload(bytes);
  fields(payload, entry, specific, known, degraded);
  if (!payload.whole()) return refuse("its fields do not fit");
  entry.arch_specific = specific != 0;
  entry.resources.known = known != 0;
  entry.resources.degraded = degraded != 0;
  return entry;
}

}  // namespace fattn::core::jit
