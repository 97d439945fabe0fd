#include "device/affinity.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace fattn::core {
namespace {
constexpr int kWordBytes = static_cast<int>(sizeof(unsigned long)), kWordBits = 8 * kWordBytes;  // the kernel's sets are made of these
}

// The system call itself and not sched_getaffinity(): it says how many bytes it wrote, so comparing and counting touch a
// few words instead of the largest possible set.
CpuMask CpuMask::current() noexcept {
  CpuMask mask;
  const long n = ::syscall(SYS_sched_getaffinity, 0, sizeof mask.bits_, mask.bits_);
  mask.bytes_ = n > 0 ? static_cast<int>(n) : 0;
  return mask;
}

CpuMask CpuMask::of(const std::vector<int>& cpus) {
  CpuMask mask;
  int last = -1;
  for (int cpu : cpus) {
    if (cpu < 0 || cpu >= kMaxBytes * 8) return CpuMask();
    last = std::max(last, cpu);
  }
  mask.bytes_ = (last + kWordBits) / kWordBits * kWordBytes;
  std::memset(mask.bits_, 0, static_cast<size_t>(mask.bytes_));
  for (int cpu : cpus) {
    unsigned long word;
    unsigned char* at = mask.bits_ + cpu / kWordBits * kWordBytes;
    std::memcpy(&word, at, sizeof word);
    word |= 1ul << (cpu % kWordBits);
    std::memcpy(at, &word, sizeof word);
  }
  return mask;
}

int CpuMask::count() const noexcept {
  int total = 0;
  for (int i = 0; i < bytes_; i += kWordBytes) {
    unsigned long word;
    std::memcpy(&word, bits_ + i, sizeof word);
    total += std::popcount(word);
  }
  return total;
}

bool CpuMask::operator==(const CpuMask& other) const noexcept {
  return bytes_ == other.bytes_ && std::memcmp(bits_, other.bits_, static_cast<size_t>(bytes_)) == 0;
}

CpuMask& CpuMask::operator=(const CpuMask& other) noexcept {
  if (this == &other) return *this;
  bytes_ = other.bytes_;
  std::memcpy(bits_, other.bits_, static_cast<size_t>(bytes_));
  return *this;
}

bool CpuMask::apply() const noexcept { return ::syscall(SYS_sched_setaffinity, 0, static_cast<size_t>(bytes_), bits_) == 0; }

}  // namespace fattn::core
