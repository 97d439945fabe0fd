// In place of kernels/ptx/dependent_launch.h where the host runs device code.
#pragma once

namespace fattn::emulated {
inline long long waited = 0;  // threads that waited for the kernel before
}

namespace fattn::ptx {

inline void wait_for_kernel_before() { ++emulated::waited; }
inline void let_kernel_after_come_up() {}

}  // namespace fattn::ptx
