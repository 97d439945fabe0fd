// One attention problem to measure: sizes, sizes in bytes, and what it costs.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

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

// Over which of batch, heads and queries a bias or a mask has numbers of its own; over keys it always has.
enum class PairShape { kNone, kAll, kHeads, kBatch, kOne, kKeys };

constexpr const char* name_of(PairShape shape) {
  switch (shape) {
    case PairShape::kNone: return "none";
    case PairShape::kAll: return "all";      // (batch, nheads, seqlen_q, seqlen_k)
    case PairShape::kHeads: return "heads";  // (1, nheads, seqlen_q, seqlen_k)
    case PairShape::kBatch: return "batch";  // (batch, 1, seqlen_q, seqlen_k)
    case PairShape::kOne: return "one";      // (1, 1, seqlen_q, seqlen_k)
    case PairShape::kKeys: return "keys";    // (batch, 1, 1, seqlen_k)
  }
  return "unknown";
}
constexpr PairShape kPairShapes[] = {PairShape::kAll, PairShape::kHeads, PairShape::kBatch, PairShape::kOne, PairShape::kKeys};

struct ProblemSpec {
  int64_t batch = 1, seqlen_q = 1024, seqlen_k = 1024, nheads = 8, nheads_k = 8, headdim = 64, headdim_v = 64;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  double softcap = 0;                           // 0: none
  // What else a score depends on, by name; measure/score_terms.h makes the tensors.
  double p_dropout = 0;
  bool alibi = false;
  PairShape bias = PairShape::kNone, mask = PairShape::kNone;
  bool bias_f32 = false;        // else of `dtype`
  bool dbias = false;           // the backward pass returns the gradient of the bias
  int64_t least_seqused_k = 0;  // > 0: batch entries have from so many keys, the first, to seqlen_k, the last
  int64_t least_packed = 0;     // > 0: packed sequences of from so many rows, the first, to seqlen, the last
  int64_t documents = 0;        // > 0: as many in every batch entry, whose lengths differ by one at most
  int64_t page_size = 0;        // > 0: k and v are a paged cache of pages of so many keys, which divide seqlen_k; forward only
  DType dtype = DType::kF32;
  uint64_t seed = 1;

  bool operator==(const ProblemSpec&) const = default;

  // All throw Failure(kOutOfMemory) if the product does not fit in 64 bits.
  int64_t q_bytes() const;
  int64_t k_bytes() const;
  int64_t v_bytes() const;
  int64_t o_bytes() const;
  int64_t lse_bytes() const;
  int64_t bias_bytes() const;             // of the bias, and so of its gradient
  int64_t input_bytes(bool grad) const;   // q, k, v, what scores depend on and, for gradients, dout
  int64_t output_bytes(bool grad) const;  // o, lse and, for gradients, dq, dk, dv and dbias

  bool windowed() const { return window_left >= 0 || window_right >= 0; }
  // Whether a score depends on more than q, k, positions and softcap.
  bool has_terms() const;
  bool packed() const { return least_packed > 0; }
  DType bias_dtype() const { return bias_f32 ? DType::kF32 : dtype; }
  // Queries and keys of a batch entry; of packed sequences alone less than all.
  int64_t rows_of(int64_t entry) const;
  int64_t keys_of(int64_t entry) const;
  int64_t rows_before(int64_t entry) const;  // packed: where it begins; `batch`: all rows
  int64_t document_begin(int64_t document) const { return (document * seqlen_q + documents - 1) / documents; }
  // The mask and the score, as the library is told of them.
  void apply_to(Options& options) const;
};

// Tensor views of contiguous memory in the library's layout.
// Packed sequences have the rows of all entries in one dimension instead of two; k and v of a paged cache have pages instead of batch entries.
Tensor q_view(const ProblemSpec& spec, const void* data);    // also dq
Tensor k_view(const ProblemSpec& spec, const void* data);    // also dk
Tensor v_view(const ProblemSpec& spec, const void* data);    // also dv
Tensor o_view(const ProblemSpec& spec, const void* data);    // also dout
Tensor lse_view(const ProblemSpec& spec, const void* data);  // fp32, fp64 for fp64 problems
std::array<int64_t, 4> pair_sizes(const ProblemSpec& spec, PairShape shape);
Tensor pair_view(const ProblemSpec& spec, PairShape shape, DType dtype, const void* data);  // a bias, its gradient, a mask; absent of kNone

// Bytes of a tensor; throws Failure(kOutOfMemory) if they do not fit in 64 bits, naming it.
int64_t tensor_bytes(const char* name, std::initializer_list<int64_t> shape, DType dtype);

struct Cost {
  double flops = 0;          // visible (query, key) pairs; a mask and a bias hide none
  double flops_nominal = 0;  // every pair, halved if causal
  double bytes = 0;          // compulsory traffic
};

// From the library's own plan, so that there is one definition. Throws fattn::Error if the problem is no problem at all, and
// Failure(kOutOfMemory) if its sizes overflow.
Cost cost_of(const ProblemSpec& spec, Pass pass);

nlohmann::ordered_json to_json(const ProblemSpec& spec);
std::string describe(const ProblemSpec& spec);          // "B8 S1024 H12 D64 fp32 causal" and describe_options() behind it
std::string describe_options(const ProblemSpec& spec);  // " window 512,0 softcap 30 dropout 0.1": what is there, each with a blank before it

}  // namespace fattn::measure
