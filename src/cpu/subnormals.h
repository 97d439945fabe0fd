// Numbers below 2^-126 in fp32 count as 0 while a worker computes: on some processors an instruction that meets one takes a hundred times as long.
// Matrix instructions of 16 bits (AMX, VDPBF16PS) do so whatever is set. Numbers in fp16 are all normal in fp32, and conversions keep them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fattn::core {

// On this thread, for as long as this lives; what was set before comes back.
class SubnormalsAreZero {
 public:
#if defined(__x86_64__)
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kInputs | kResults); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  SubnormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    set(before_ | kBoth);
  }
  ~SubnormalsAreZero() { set(before_); }
#else
  SubnormalsAreZero() {}
  ~SubnormalsAreZero() {}
#endif
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint32_t kInputs = 1u << 6, kResults = 1u << 15;  // DAZ and FTZ of MXCSR
  const uint32_t before_;
#elif defined(__aarch64__)
  static constexpr uint64_t kBoth = uint64_t{1} << 24;  // FZ of FPCR
  static void set(uint64_t fpcr) { asm volatile("msr fpcr, %0" : : "r"(fpcr)); }
  uint64_t before_ = 0;
#endif
};

}  // namespace fattn::core
