// One attention problem to measure: sizes, sizes in bytes, and what it costs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "fattn/problem.hpp"

namespace fattn::measure {

enum class Pass { kForward, kBackward, kForwardBackward };

constexpr const char* name_of(Pass pass) {
  switch (pass) {
    case Pass::kForward: return "fwd";
    case Pass::kBackward: return "bwd";
    case Pass::kForwardBackward: return "fwdbwd";
  }
  return "unknown";
}

struct ProblemSpec {
  int64_t batch = 1, seqlen_q = 1024, seqlen_k = 1024, nheads = 8, nheads_k = 8, headdim = 64, headdim_v = 64;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  double softcap = 0;                           // 0: none
  DType dtype = DType::kF32;
  uint64_t seed = 1;

  // All throw Failure(kOutOfMemory) if the product does not fit in 64 bits.
  int64_t q_bytes() const;
  int64_t k_bytes() const;
  int64_t v_bytes() const;
  int64_t o_bytes() const;
  int64_t lse_bytes() const;
  int64_t input_bytes(bool grad) const;   // q, k, v and, for gradients, dout
  int64_t output_bytes(bool grad) const;  // o, lse and, for gradients, dq, dk, dv

  bool windowed() const { return window_left >= 0 || window_right >= 0; }
  // The mask and the score, as the library is told of them.
  void apply_to(Options& options) const;
};

// Tensor views of contiguous memory in the library's layout.
Tensor q_view(const ProblemSpec& spec, const void* data);    // also dq
Tensor k_view(const ProblemSpec& spec, const void* data);    // also dk
Tensor v_view(const ProblemSpec& spec, const void* data);    // also dv
Tensor o_view(const ProblemSpec& spec, const void* data);    // also dout
Tensor lse_view(const ProblemSpec& spec, const void* data);  // fp32, fp64 for fp64 problems

struct Cost {
  double flops = 0;          // visible (query, key) pairs
  double flops_nominal = 0;  // every pair, halved if causal
  double bytes = 0;          // compulsory traffic
};

// From the library's own plan, so that there is one definition. Throws fattn::Error if the problem is no problem at all, and
// Failure(kOutOfMemory) if its sizes overflow.
Cost cost_of(const ProblemSpec& spec, Pass pass);

nlohmann::ordered_json to_json(const ProblemSpec& spec);
std::string describe(const ProblemSpec& spec);  // "B8 S1024 H12 D64 fp32 causal", with "window 512,0" and "softcap 30" behind it where there are

}  // namespace fattn::measure
