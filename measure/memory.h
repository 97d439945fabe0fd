// Memory for measurements: fresh pages, sizes that are checked before anything is allocated, and the resident set's peak.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fattn::measure {

// Zeroed pages of their own (mmap), so that none were touched before and all go back when it ends. Move-only.
class Pages {
 public:
  enum class Kind {
    kPrivate,  // this process only
    kShared,   // an anonymous file (memfd) that child processes inherit; nothing is left behind, however the process ends
  };
  Pages() = default;
  // Throws Failure(kOutOfMemory).
  explicit Pages(size_t bytes, Kind kind = Kind::kPrivate);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  void* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // -1 unless shared

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  int descriptor_ = -1;
};

// a * b; throws Failure(kOutOfMemory) if it does not fit, naming `what`.
int64_t checked_product(int64_t a, int64_t b, const std::string& what);

// What may be allocated now: the memory available, or the limit if that is lower (0: no limit).
int64_t memory_allowed(int64_t limit_bytes);

// Throws Failure(kOutOfMemory), naming both sizes, if `bytes` is more than memory_allowed.
void require_memory(int64_t bytes, int64_t limit_bytes, const std::string& what);

// The resident set's high-water mark since the last reset.
class ResidentPeak {
 public:
  // Lets the allocator return what it holds, resets the mark where the kernel permits, and notes the resident set.
  ResidentPeak();
  bool measurable() const { return measurable_; }
  int64_t bytes_added() const;  // peak since construction minus the resident set then; 0 if not measurable

 private:
  bool measurable_ = false;
  int64_t resident_before_ = 0;
};

std::string mebibytes(double bytes);  // "12.5 MiB"; from 1 TiB on "1.500 TiB", and so on

}  // namespace fattn::measure
