// Checks a problem, and hands it to its backend.
#include <cmath>
#include <type_traits>

#include "fattn/error.hpp"
#include "ops/backends.h"
#include "ops/norm_linear.h"
#include "shared/text.h"

namespace fattn::ops {
namespace {

using core::text;

constexpr int64_t kMost = int64_t{1} << 31;  // of a size; products of three with 4 bytes each fit 64 bits only below it, and are checked

void check_size(const char* name, int64_t n, int64_t least = 1) {
  if (n < least || n >= kMost) throw Error(ErrorCode::kInvalidArgument, text(name, " is ", n, "; allowed: ", least, " to 2^31 - 1"));
}
void check_product(const char* what, int64_t a, int64_t b) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(a, b, &bytes) || __builtin_mul_overflow(bytes, int64_t{8}, &bytes))
    throw Error(ErrorCode::kOutOfMemory, text(what, " of ", a, " x ", b, " exceeds 2^63 - 1 bytes; use smaller sizes"));
}
void check_dtype(DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16)
    throw Error(ErrorCode::kUnsupported, text("operations take fp32, fp16 and bf16, not ", name_of(dtype)));
}

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

template <class Problem>
int64_t rows_of(const Problem& problem) {
  return problem.rows;
}
int64_t rows_of(const NormLinear& problem) { return problem.linear.rows; }

template <class Problem>
std::unique_ptr<const Kernel<Problem>> made(const Problem& problem, const Device& device) {
  check_size("rows", rows_of(problem));
  check(problem);
  switch (device.place) {
    case Place::kReference: return reference::make(problem, device);
    case Place::kCuda: return cuda::make(problem, device);
    case Place::kCpu: break;
  }
  return cpu::make(problem, device);
}

}  // namespace

template <class Problem>
Plan<Problem>::Plan(const Problem& problem, const Device& device) : problem_(problem), kernel_(made(problem, device)) {}

template <class Problem>
void Plan<Problem>::execute(const typename Problem::Buffers& buffers, void* workspace, void* stream) const {
  if (buffers.rows < 0 || buffers.rows > rows_of(problem_))
    throw Error(ErrorCode::kInvalidArgument, text("a call has ", buffers.rows, " rows; this plan is for at most ", rows_of(problem_)));
  if (buffers.rows > 0) kernel_->execute(buffers, workspace, stream);
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

void check_rows(const Embedding& p, const Embedding::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r) {
    if (b.ids[r] < 0 || b.ids[r] >= p.vocab)
      throw Error(ErrorCode::kInvalidArgument, text("token ", b.ids[r], " of row ", r, " is not in the vocabulary; allowed: 0 to ", p.vocab - 1));
    if (p.positions > 0 && (b.position[r] < 0 || b.position[r] >= p.positions))
      throw Error(ErrorCode::kInvalidArgument,
                  text("position ", b.position[r], " of row ", r, " is beyond the model's; allowed: 0 to ", p.positions - 1));
  }
}
void check_targets(const CrossEntropy& p, const CrossEntropy::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r)
    if (b.target[r] < -1 || b.target[r] >= p.vocab)
      throw Error(ErrorCode::kInvalidArgument, text("target ", b.target[r], " of row ", r, " is not in the vocabulary; allowed: 0 to ", p.vocab - 1));
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
