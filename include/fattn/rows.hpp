// What is done to rows of heads beside attention: results over parts of the keys merged, rotary embeddings.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "fattn/types.hpp"

namespace fattn {

// Who computes a call. Results do not depend on threads.
struct RowOptions {
  Backend backend = Backend::kAuto;
  Isa cpu_isa = Isa::kAuto;
  int num_threads = 0;                       // 0: as many as the work is worth, of those that affinity and the control group allow
  const fattn_executor* executor = nullptr;  // the host's own threads; null: the library's pool
  void* stream = nullptr;                    // CUDA: the stream to work on, null: the default stream; the call returns before the work is done
};

// What attention over a part of the keys gave, of any strides; packed sequences: (total_q, nheads, headdim_v) and (nheads, total_q).
struct MergePart {
  Tensor o;  // (batch, seqlen_q, nheads, headdim_v): fp32, fp16 or bf16, each part its own
  // (batch, nheads, seqlen_q), fp32, or in the forward pass fp64; natural log; -inf: the row sees no key of the part. Absent from all parts: they are
  // added.
  Tensor lse;
  // Backward: outputs of the same shapes, the gradients of o (fp32, fp16 or bf16) and of lse. Either may be absent.
  Tensor dout, dlse;
};

namespace detail {
template <class Problem>
Problem row_problem(const RowOptions& options) {
  Problem p{};
  p.struct_size = sizeof p;
  p.abi_version = FATTN_ABI_VERSION;
  p.backend = static_cast<int32_t>(options.backend);
  p.cpu_isa = static_cast<int32_t>(options.cpu_isa);
  p.num_threads = options.num_threads;
  p.executor = options.executor;
  p.stream = options.stream;
  return p;
}

// Parts as the C ABI wants them; few of them allocate nothing.
class MergeParts {
 public:
  MergeParts(const MergePart* parts, size_t count) : many_(count > kFew ? count : 0) {
    fattn_merge_part* to = many_.empty() ? few_ : many_.data();
    for (size_t i = 0; parts && i < count; ++i) to[i] = {parts[i].o.raw(), parts[i].lse.raw(), parts[i].dout.raw(), parts[i].dlse.raw()};
  }
  const fattn_merge_part* data() const { return many_.empty() ? few_ : many_.data(); }

 private:
  static constexpr size_t kFew = 8;
  fattn_merge_part few_[kFew] = {};
  std::vector<fattn_merge_part> many_;
};

inline fattn_merge_problem merge_problem(const MergePart* parts, size_t count, const MergeParts& raw, const RowOptions& options) {
  auto p = row_problem<fattn_merge_problem>(options);
  constexpr size_t kMost = 1u << 20;  // more than the library takes, which then says so
  p.nparts = static_cast<int32_t>(count < kMost ? count : kMost);
  p.parts = parts ? raw.data() : nullptr;
  return p;
}
}  // namespace detail

// o = sum(exp(lse_i - lse) o_i) with lse = log(sum(exp(lse_i))), of every row, summed in fp32: attention over all keys from attention over parts of
// them (Dao 2023, section 3.1). `o` is of the parts' shape, fp32, fp16 or bf16, `lse` (may be absent) fp32. A row that no part sees has o = 0 and lse
// = -inf. o and lse may be those of a part. Allocates nothing for up to 8 parts. Throws Error.
inline void merge(const MergePart* parts, size_t count, const Tensor& o, const Tensor& lse = {}, const RowOptions& options = {}) {
  const detail::MergeParts raw(parts, count);
  fattn_merge_problem p = detail::merge_problem(parts, count, raw, options);
  p.o = o.raw();
  p.lse = lse.raw();
  check(fattn_merge(&p));
}
inline void merge(std::initializer_list<MergePart> parts, const Tensor& o, const Tensor& lse = {}, const RowOptions& options = {}) {
  merge(parts.begin(), parts.size(), o, lse, options);
}
inline void merge(const std::vector<MergePart>& parts, const Tensor& o, const Tensor& lse = {}, const RowOptions& options = {}) {
  merge(parts.data(), parts.size(), o, lse, options);
}

// o = the sum of tensors (batch, seqlen, heads, width), of any strides and of fp32, fp16 or bf16 each; added in fp32, rounded once. `o` may be one of
// them. Of one tensor: a copy in another dtype. Throws Error.
inline void sum(std::initializer_list<Tensor> parts, const Tensor& o, const RowOptions& options = {}) {
  std::vector<MergePart> all;
  for (const Tensor& part : parts) all.push_back({part, {}, {}, {}});
  merge(all, o, {}, options);
}

// The gradients of the parts, into their dout and dlse, from `dout` and `dlse` (may be absent: 0), those of the merged o and lse. Throws Error.
inline void merge_backward(const MergePart* parts, size_t count, const Tensor& dout, const Tensor& dlse = {}, const RowOptions& options = {}) {
  const detail::MergeParts raw(parts, count);
  fattn_merge_problem p = detail::merge_problem(parts, count, raw, options);
  p.dout = dout.raw();
  p.dlse = dlse.raw();
  check(fattn_merge_backward(&p));
}
inline void merge_backward(std::initializer_list<MergePart> parts, const Tensor& dout, const Tensor& dlse = {}, const RowOptions& options = {}) {
  merge_backward(parts.begin(), parts.size(), dout, dlse, options);
}
inline void merge_backward(const std::vector<MergePart>& parts, const Tensor& dout, const Tensor& dlse = {}, const RowOptions& options = {}) {
  merge_backward(parts.data(), parts.size(), dout, dlse, options);
}

struct RotaryOptions : RowOptions {
  bool interleaved = false;  // pairs are neighbours (GPT-J); else dimensions d and d + rotary_dim / 2 (GPT-NeoX, Llama)
  bool inverse = false;      // turns back: the gradient of x from that of the result
  int64_t offset = 0;        // the position of every sequence's first row, without `offsets`
  Tensor offsets;            // (batch), int32 or int64: that of each sequence
  Tensor cu_seqlens;         // (batch + 1), int32: x is packed, and sequences begin there
};

// y = x with the pairs of the first rotary_dim dimensions of each head turned by the angles of the row's position: (a, b) becomes (a cos - b sin,
// a sin + b cos), in fp32 (Su et al. 2021). x and y (batch, seqlen, nheads, headdim), packed (total, nheads, headdim), of one dtype; y may be x. cos
// and sin (positions, rotary_dim / 2), fp32 or x's dtype, scaled as the model wants them. Throws Error, also where a position has no row of cos; in
// lists in memory of a GPU that is not looked at, and such rows are NaN.
inline void rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y, const RotaryOptions& options = {}) {
  auto p = detail::row_problem<fattn_rotary_problem>(options);
  p.interleaved = options.interleaved ? 1 : 0;
  p.inverse = options.inverse ? 1 : 0;
  p.offset = options.offset;
  p.x = x.raw();
  p.y = y.raw();
  p.cos = cos.raw();
  p.sin = sin.raw();
  p.offsets = options.offsets.raw();
  p.cu_seqlens = options.cu_seqlens.raw();
  check(fattn_rotary(&p));
}

}  // namespace fattn
