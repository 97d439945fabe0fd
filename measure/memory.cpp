// Fresh pages, size checks and the resident set's peak (Linux: /proc/self).
#include "measure/memory.h"

#include <fcntl.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "fattn/system.hpp"
#include "measure/failure.h"

namespace fattn::measure {
namespace {

// A line of /proc/self/status in bytes ("VmHWM:     1234 kB"), or -1.
int64_t status_bytes(const char* key) {
  std::ifstream file("/proc/self/status");
  const size_t length = std::strlen(key);
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, length, key) == 0 && line.size() > length && line[length] == ':')
      return std::strtoll(line.c_str() + length + 1, nullptr, 10) * 1024;
  return -1;
}

}  // namespace

Pages::Pages(size_t bytes, Kind kind) : size_(bytes) {
  if (bytes == 0) return;
  if (kind == Kind::kShared) {
    descriptor_ = memfd_create("fattn", 0);  // inherited by child processes on purpose
    if (descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
      close(descriptor_);
      descriptor_ = -1;
    }
    if (descriptor_ < 0)
      throw Failure(Status::kOutOfMemory,
                    "cannot make a shared memory file of " + mebibytes(static_cast<double>(bytes)) + ": " + std::strerror(errno));
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  } else {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    const int error = errno;
    if (descriptor_ >= 0) close(descriptor_);
    throw Failure(Status::kOutOfMemory, "cannot map " + mebibytes(static_cast<double>(bytes)) + ": " + std::strerror(error));
  }
}

Pages::~Pages() {
  if (data_) munmap(data_, size_);
  if (descriptor_ >= 0) close(descriptor_);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), descriptor_(std::exchange(other.descriptor_, -1)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

int64_t checked_product(int64_t a, int64_t b, const std::string& what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product))
    throw Failure(Status::kOutOfMemory, what + ": more bytes than any machine can address; choose smaller sizes");
  return product;
}

int64_t memory_allowed(int64_t limit_bytes) {
  const int64_t available = cpu_info().memory_available_bytes;
  const int64_t known = available > 0 ? available : std::numeric_limits<int64_t>::max();
  return limit_bytes > 0 ? std::min(limit_bytes, known) : known;
}

void require_memory(int64_t bytes, int64_t limit_bytes, const std::string& what) {
  const int64_t allowed = memory_allowed(limit_bytes);
  if (bytes <= allowed) return;
  const bool by_limit = limit_bytes > 0 && allowed == limit_bytes;
  throw Failure(Status::kOutOfMemory, what + " needs " + mebibytes(static_cast<double>(bytes)) + "; " +
                                          (by_limit ? "--memory-limit allows " : "available are ") + mebibytes(static_cast<double>(allowed)) +
                                          "; choose smaller sizes");
}

ResidentPeak::ResidentPeak() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  // "5" resets VmHWM (proc(5)); refused in some containers.
  const int descriptor = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  if (descriptor >= 0) {
    measurable_ = write(descriptor, "5", 1) == 1;
    close(descriptor);
  }
  resident_before_ = status_bytes("VmRSS");
  measurable_ = measurable_ && resident_before_ >= 0;
}

int64_t ResidentPeak::bytes_added() const {
  if (!measurable_) return 0;
  return std::max<int64_t>(0, status_bytes("VmHWM") - resident_before_);
}

std::string mebibytes(double bytes) {
  char text[48];
  double number = bytes / (1024.0 * 1024.0);
  const char* unit = "MiB";
  if (number >= 1024.0 * 1024.0)
    for (const char* larger : {"GiB", "TiB", "PiB", "EiB"})
      if (number >= 1024) number /= 1024, unit = larger;
  std::snprintf(text, sizeof text, number > 0 && number < 10 ? "%.3f %s" : "%.1f %s", number, unit);
  return text;
}

}  // namespace fattn::measure
