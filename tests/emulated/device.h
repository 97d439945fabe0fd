// Device code as the host runs it, thread by thread: what NVRTC knows by itself. Before any header of kernels/.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

// NOLINTBEGIN(bugprone-reserved-identifier): they are the names of CUDA C++
#define __device__
#define __forceinline__ inline

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct EmulatedIndex {
  unsigned x = 0;
};
inline EmulatedIndex blockIdx, threadIdx;

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
// NOLINTEND(bugprone-reserved-identifier)

namespace fattn::emulated {

// The threads of a warp, which take turns: each runs from one place where all meet to the next.
struct Warp {
  static constexpr int kLanes = 32;
  ucontext_t caller, of_lane[kLanes];
  bool done[kLanes] = {};
  int lane = 0;
  float exchanged[kLanes] = {};

  void meet() { swapcontext(&of_lane[lane], &caller); }
};
inline Warp* warp = nullptr;
inline void (*body_of_lane)(const void*) = nullptr;
inline const void* body_argument = nullptr;

inline void run_lane() {
  body_of_lane(body_argument);
  warp->done[warp->lane] = true;
}

[[gnu::noinline]] inline void begin(ucontext_t& lane, ucontext_t& caller, char* stack, size_t bytes) {
  getcontext(&lane);
  lane.uc_stack.ss_sp = stack;
  lane.uc_stack.ss_size = bytes;
  lane.uc_link = &caller;
  makecontext(&lane, run_lane, 0);
}

// Runs body() as every thread of `ctas` CTAs.
template <class Body>
void run(long long ctas, int threads, const Body& body) {
  constexpr size_t kStack = 128 * 1024;
  std::vector<char> stacks(kStack * Warp::kLanes);
  body_of_lane = [](const void* argument) { (*static_cast<const Body*>(argument))(); };
  body_argument = &body;
  for (long long cta = 0; cta < ctas; ++cta)
    for (int first = 0; first < threads; first += Warp::kLanes) {
      Warp own;
      warp = &own;
      for (int lane = 0; lane < Warp::kLanes; ++lane)
        begin(own.of_lane[lane], own.caller, stacks.data() + kStack * static_cast<size_t>(lane), kStack);
      for (bool running = true; running;) {
        running = false;
        for (own.lane = 0; own.lane < Warp::kLanes; ++own.lane) {
          if (own.done[own.lane]) continue;
          blockIdx.x = static_cast<unsigned>(cta);
          threadIdx.x = static_cast<unsigned>(first + own.lane);
          swapcontext(&own.caller, &own.of_lane[own.lane]);
          running = running || !own.done[own.lane];
        }
      }
    }
  warp = nullptr;
  body_argument = nullptr;
}

}  // namespace fattn::emulated
