// The set of CPUs that a thread may run on.
#pragma once

#include <vector>

namespace fattn::core {

class CpuMask {
 public:
  CpuMask() {}  // unknown; the bits stay uninitialised, because one is made in every call

  // Of the calling thread; unknown if the kernel does not tell.
  static CpuMask current() noexcept;
  // Of the CPUs with these numbers; unknown if there are none or one is out of range.
  static CpuMask of(const std::vector<int>& cpus);

  bool known() const noexcept { return bytes_ > 0; }
  int count() const noexcept;  // 0 if unknown
  bool operator==(const CpuMask& other) const noexcept;
  bool operator!=(const CpuMask& other) const noexcept { return !(*this == other); }

  // Confines the calling thread to this set; false if the kernel refuses.
  bool apply() const noexcept;

  CpuMask(const CpuMask& other) noexcept { *this = other; }
  CpuMask& operator=(const CpuMask& other) noexcept;

 private:
  static constexpr int kMaxBytes = 1024;  // 8192 CPUs, the most that Linux can be built for
  alignas(8) unsigned char bits_[kMaxBytes];
  int bytes_ = 0;  // how many the kernel uses
};

}  // namespace fattn::core
