// Checks a problem, and hands it to its backend.
#include <cmath>

#include "ops/norm_linear.h"
#include "ops/plan_of.h"

namespace fattn::ops {
void check(const Embedding& p) {
  check_size("width", p.width);
  check_size("vocab", p.vocab);
  check_size("positions", p.positions, 0);
  check_product("activations", p.rows, p.width);
  check_dtype(p.dtype);
}
void check(const LayerNorm& p) {
  check_size("width", p.width);
  check_product("activations", p.rows, p.width);
  check_dtype(p.dtype);
  if (!(p.epsilon > 0)) throw Error(ErrorCode::kInvalidArgument, text("epsilon is ", p.epsilon, "; allowed: above 0"));
}
void check(const Linear& p) {
  check_size("in", p.in);
  check_size("out", p.out);
  check_product("activations", p.rows, p.in);
  check_product("activations", p.rows, p.out);
  check_product("a weight", p.in, p.out);
  check_dtype(p.dtype);
  if (p.y != DType::kF32 && p.y != p.dtype)
    throw Error(ErrorCode::kUnsupported, text("y is ", name_of(p.y), "; allowed: fp32, and the dtype of x, ", name_of(p.dtype)));
  if (p.accumulate && p.y != DType::kF32) throw Error(ErrorCode::kUnsupported, text("what is added to is fp32, not ", name_of(p.y)));
}
void check(const KeysValues& p) {
  check_size("nheads", p.nheads);
  check_size("nheads_k", p.nheads_k);
  check_size("headdim", p.headdim);
  check_product("q", p.rows, p.nheads * p.headdim);
  check_product("k", p.rows, p.nheads_k * p.headdim);
  check_dtype(p.dtype);
  if (p.rotary && p.headdim % 2 != 0) throw Error(ErrorCode::kInvalidArgument, text("headdim is ", p.headdim, "; rotary positions need an even one"));
  if (p.rotary && !(p.theta > 0)) throw Error(ErrorCode::kInvalidArgument, text("theta is ", p.theta, "; allowed: above 0"));
}
void check(const NormLinear& p) {
  check(p.linear);
  if (!(p.epsilon > 0)) throw Error(ErrorCode::kInvalidArgument, text("epsilon is ", p.epsilon, "; allowed: above 0"));
  if (p.linear.accumulate) throw Error(ErrorCode::kUnsupported, "a product behind LayerNorm does not add to its output");
  if (p.nheads == 0) return;
  check(keys_values_of(p));
  if (p.linear.out != (p.nheads + 2 * p.nheads_k) * p.headdim)
    throw Error(ErrorCode::kInvalidArgument,
                text("q, k and v have ", (p.nheads + 2 * p.nheads_k) * p.headdim, " columns, the product ", p.linear.out, "; they must be as many"));
  if (p.linear.y != p.linear.dtype) throw Error(ErrorCode::kUnsupported, "q, k and v are in the dtype of the weights");
}
void check(const CrossEntropy& p) {
  check_size("width", p.width);
  check_size("vocab", p.vocab);
  check_product("a weight", p.vocab, p.width);
  check_product("activations", p.rows, p.width);
  check_dtype(p.dtype);
}
void check(const Sampling& p) {
  check_size("vocab", p.vocab);
  check_size("stride", p.stride, p.vocab);
  check_product("logits", p.rows, p.stride);
}

template class Plan<Embedding>;
template class Plan<LayerNorm>;
template class Plan<Linear>;
template class Plan<KeysValues>;
template class Plan<NormLinear>;
template class Plan<CrossEntropy>;
template class Plan<Sampling>;

size_t packed_bytes(const Linear& problem, const Device& device) {
  check(problem);
  switch (device.place) {
    case Place::kReference: return reference::packed_bytes(problem, device);
    case Place::kCuda: return cuda::packed_bytes(problem, device);
    case Place::kCpu: break;
  }
  return cpu::packed_bytes(problem, device);
}
void pack(const Linear& problem, const Device& device, const void* weight, bool in_by_out, int64_t given, void* packed) {
  check(problem);
  if (given < 1 || given > problem.out)
    throw Error(ErrorCode::kInvalidArgument, text("a weight of ", given, " rows; allowed: 1 to the ", problem.out, " that are packed"));
  switch (device.place) {
    case Place::kReference: return reference::pack(problem, device, weight, in_by_out, given, packed);
    case Place::kCuda: return cuda::pack(problem, device, weight, in_by_out, given, packed);
    case Place::kCpu: break;
  }
  cpu::pack(problem, device, weight, in_by_out, given, packed);
}
int64_t rows_alike(const Linear& problem, const Device& device) {
  check(problem);
  return device.place == Place::kCuda ? cuda::rows_alike(problem, device) : problem.rows;
}

void check_choice(const Choice& c) {
  if (!(c.temperature >= 0) || !std::isfinite(c.temperature))
    throw Error(ErrorCode::kInvalidArgument, text("temperature is ", c.temperature, "; allowed: 0 (the most likely token) and above"));
  if (c.top_k < 0) throw Error(ErrorCode::kInvalidArgument, text("top_k is ", c.top_k, "; allowed: 0 (all) and above"));
  if (!(c.top_p > 0 && c.top_p <= 1)) throw Error(ErrorCode::kInvalidArgument, text("top_p is ", c.top_p, "; allowed: above 0 to 1"));
  if (!(c.repetition_penalty > 0) || !std::isfinite(c.repetition_penalty))
    throw Error(ErrorCode::kInvalidArgument, text("the repetition penalty is ", c.repetition_penalty, "; allowed: above 0; 1 is none"));
}

// splitmix64's finaliser (Steele, Lea, Flood 2014) over the three numbers, one after the other.
double uniform_number(uint64_t seed, uint64_t request, uint64_t position) {
  uint64_t x = 0;
  for (const uint64_t part : {seed, request, position}) {
    x += part + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

}  // namespace fattn::ops
