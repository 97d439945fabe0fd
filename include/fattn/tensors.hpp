// The one list of the tensors of a problem: what each is called, where the structs of the C ABI and of the C++ API have it, its dtype and dimensions,
// what it is for. What treats tensors alike goes over this list: descriptions, checks, copies to a device, operators, files.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fattn/types.hpp"

namespace fattn {

// What a score depends on beside q and k; every tensor may be absent. fattn.h (fattn_problem) has their shapes.
struct ScoreTensors {
  Tensor seqused_k;     // (batch) of kI32: keys that each batch entry has
  Tensor alibi_slopes;  // (nheads) or (batch, nheads) of kF32
  // Added to scores, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k); -Inf hides. A row whose keys all have a finite one that is meant to hide (an
  // lse below -2^25) has no gradient, though its o depends on v.
  Tensor bias;
  Tensor mask;           // the same shape, kU8: 0 hides
  Tensor dropout_state;  // (2) of kI64: seed and offset, (4): and places of the first row and key; with Options::p_dropout
  // (batch + 1) of kI32: where each of the packed sequences begins; with Options::max_seqlen_q and max_seqlen_k. q is (total_q, nheads, headdim)
  // then, k and v (total_k, ...), o (total_q, ...), lse (nheads, total_q).
  Tensor cu_seqlens_q, cu_seqlens_k;
  // (batch, seqlen_q) and (batch, seqlen_k), or (total_q) and (total_k), of kI32: a query sees the keys of its own document's id only.
  Tensor document_q, document_k;
  // Output, (2) of kI32: FATTN_LISTS_GOOD and 0, or which of seqused_k and cu_seqlens is out of range, and its first batch entry or sequence that is.
  Tensor status = {};
  Tensor sinks = {};  // (nheads) of kF32, kF64 where q is: a logit of each head that joins the softmax's sum and has no value; lse counts it
  // (batch, columns) of kI32, forward only: k and v are pages, (pages, page_size, nheads_k, ...), and key j of batch entry b is row j % page_size of
  // page block_table[b, j / page_size]. seqused_k says how many keys an entry has.
  Tensor block_table = {};
};

// q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v),
// o (batch, seqlen_q, nheads, headdim_v) of q's dtype or kF32, lse (batch, nheads, seqlen_q) or absent,
// weights (batch, nheads, seqlen_q, seqlen_k) with Algorithm::kStandard only, or absent.
struct ForwardTensors {
  Tensor q, k, v, o, lse, weights;
  ScoreTensors scores = {};
};

// o, in q's dtype, and lse as the forward pass returned them; dout has o's shape, dq, dk, dv those of q, k, v, all three in q's dtype or kF32. dbias,
// the gradient of a bias, may be absent; it is summed over each of batch, heads and queries where its shape is 1. dlse, the gradient of lse, of its
// shape and dtype, may be absent, which is 0. dsinks, the gradient of sinks, of their shape and dtype, may be absent too.
struct BackwardTensors {
  Tensor q, k, v, o, lse, dout, dq, dk, dv;
  ScoreTensors scores = {};
  Tensor dbias = {}, dlse = {}, dsinks = {};
};

enum class TensorDType {
  kOfQ,       // as q
  kOfQOrF32,  // as q, or kF32
  kOfLse,     // kF32, kF64 where q is
  kF32,
  kI32,
  kU8,
  kI64
};

// Dimensions; behind the semicolon those of packed sequences.
enum class TensorDims {
  kRows,     // (batch, seqlen, heads, headdim); (total, heads, headdim)
  kLse,      // (batch, nheads, seqlen_q); (nheads, total_q)
  kPairs,    // (batch, nheads, seqlen_q, seqlen_k), all but the last perhaps 1
  kIds,      // (batch, seqlen); (total)
  kEntries,  // (batch)
  kBounds,   // (batch + 1)
  kHeads,    // (nheads) or (batch, nheads)
  kTable,    // (batch, columns)
  kTwo       // (2)
};

enum class TensorRole {
  kInput,   // q, k, v; backward the gradients of results
  kResult,  // o, lse: written by the forward pass, read by the backward pass
  kOutput,
  kList,  // an input whose numbers say what is read of others: lengths, beginnings
  kTerm,  // an input that each pair of a query and a key depends on, and nothing else
  kRow    // an input that each row depends on, whatever it sees
};

enum class TensorPass { kForward, kBackward, kBoth };

// Where fattn_buffers has a pointer: inputs are const there.
class BufferMember {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a row of the list names a member and no type
  constexpr BufferMember(const void* fattn_buffers::*input) : input_(input) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a row of the list names a member and no type
  constexpr BufferMember(void* fattn_buffers::*output) : output_(output) {}
  constexpr const void* get(const fattn_buffers& b) const { return output_ ? b.*output_ : b.*input_; }
  constexpr void set(fattn_buffers& b, void* data) const {
    if (output_)
      b.*output_ = data;
    else
      b.*input_ = data;
  }

 private:
  const void* fattn_buffers::*input_ = nullptr;
  void* fattn_buffers::*output_ = nullptr;
};

// Where the C++ API has a view: in ScoreTensors, or in what a pass takes.
class ViewMember {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a row of the list names a member and no type
  constexpr ViewMember(Tensor ScoreTensors::*score) : score_(score) {}
  constexpr ViewMember(Tensor ForwardTensors::*forward, Tensor BackwardTensors::*backward) : forward_(forward), backward_(backward) {}
  constexpr bool of_scores() const { return score_ != nullptr; }
  // A pointer to the view in a ScoreTensors, ForwardTensors or BackwardTensors; null: it has no such tensor.
  template <class Tensors>
  constexpr auto in(Tensors& tensors) const -> std::conditional_t<std::is_const_v<Tensors>, const Tensor*, Tensor*> {
    using Struct = std::remove_const_t<Tensors>;
    if constexpr (std::is_same_v<Struct, ScoreTensors>)
      return score_ ? &(tensors.*score_) : nullptr;
    else if constexpr (std::is_same_v<Struct, ForwardTensors>)
      return score_ ? &(tensors.scores.*score_) : forward_ ? &(tensors.*forward_) : nullptr;
    else
      return score_ ? &(tensors.scores.*score_) : backward_ ? &(tensors.*backward_) : nullptr;
  }

 private:
  Tensor ScoreTensors::*score_ = nullptr;
  Tensor ForwardTensors::*forward_ = nullptr;
  Tensor BackwardTensors::*backward_ = nullptr;
};

struct TensorRow {
  const char* name;
  fattn_tensor fattn_problem::*described;
  BufferMember pointer;
  ViewMember view;
  TensorDType dtype;
  TensorDims dims;
  TensorRole role;
  TensorPass pass;

  constexpr bool in(bool backward) const { return pass == TensorPass::kBoth || (pass == TensorPass::kBackward) == backward; }
  constexpr bool written(bool backward) const { return role == TensorRole::kOutput || (role == TensorRole::kResult && !backward); }
};

namespace detail {
using F = ForwardTensors;
using B = BackwardTensors;
using S = ScoreTensors;
using P = fattn_problem;
using Pointers = fattn_buffers;
using D = TensorDType;
using Dims = TensorDims;
using Role = TensorRole;
using Pass = TensorPass;
inline constexpr Tensor F::*kNotForward = nullptr;
inline constexpr Tensor B::*kNotBackward = nullptr;

// In the order of fattn_problem.
inline constexpr TensorRow kTensorRows[] = {
    {"q", &P::q, &Pointers::q, {&F::q, &B::q}, D::kOfQ, Dims::kRows, Role::kInput, Pass::kBoth},
    {"k", &P::k, &Pointers::k, {&F::k, &B::k}, D::kOfQ, Dims::kRows, Role::kInput, Pass::kBoth},
    {"v", &P::v, &Pointers::v, {&F::v, &B::v}, D::kOfQ, Dims::kRows, Role::kInput, Pass::kBoth},
    {"o", &P::o, &Pointers::o, {&F::o, &B::o}, D::kOfQOrF32, Dims::kRows, Role::kResult, Pass::kBoth},
    {"lse", &P::lse, &Pointers::lse, {&F::lse, &B::lse}, D::kOfLse, Dims::kLse, Role::kResult, Pass::kBoth},
    {"weights", &P::weights, &Pointers::weights, {&F::weights, kNotBackward}, D::kOfQ, Dims::kPairs, Role::kOutput, Pass::kForward},
    {"dout", &P::dout, &Pointers::dout, {kNotForward, &B::dout}, D::kOfQ, Dims::kRows, Role::kInput, Pass::kBackward},
    {"dq", &P::dq, &Pointers::dq, {kNotForward, &B::dq}, D::kOfQOrF32, Dims::kRows, Role::kOutput, Pass::kBackward},
    {"dk", &P::dk, &Pointers::dk, {kNotForward, &B::dk}, D::kOfQOrF32, Dims::kRows, Role::kOutput, Pass::kBackward},
    {"dv", &P::dv, &Pointers::dv, {kNotForward, &B::dv}, D::kOfQOrF32, Dims::kRows, Role::kOutput, Pass::kBackward},
    {"seqused_k", &P::seqused_k, &Pointers::seqused_k, &S::seqused_k, D::kI32, Dims::kEntries, Role::kList, Pass::kBoth},
    {"alibi_slopes", &P::alibi_slopes, &Pointers::alibi_slopes, &S::alibi_slopes, D::kF32, Dims::kHeads, Role::kTerm, Pass::kBoth},
    {"bias", &P::bias, &Pointers::bias, &S::bias, D::kOfQOrF32, Dims::kPairs, Role::kTerm, Pass::kBoth},
    {"mask", &P::mask, &Pointers::mask, &S::mask, D::kU8, Dims::kPairs, Role::kTerm, Pass::kBoth},
    {"dropout_state", &P::dropout_state, &Pointers::dropout_state, &S::dropout_state, D::kI64, Dims::kTwo, Role::kTerm, Pass::kBoth},
    {"dbias", &P::dbias, &Pointers::dbias, {kNotForward, &B::dbias}, D::kOfQOrF32, Dims::kPairs, Role::kOutput, Pass::kBackward},
    {"dlse", &P::dlse, &Pointers::dlse, {kNotForward, &B::dlse}, D::kOfLse, Dims::kLse, Role::kInput, Pass::kBackward},
    {"cu_seqlens_q", &P::cu_seqlens_q, &Pointers::cu_seqlens_q, &S::cu_seqlens_q, D::kI32, Dims::kBounds, Role::kList, Pass::kBoth},
    {"cu_seqlens_k", &P::cu_seqlens_k, &Pointers::cu_seqlens_k, &S::cu_seqlens_k, D::kI32, Dims::kBounds, Role::kList, Pass::kBoth},
    {"document_q", &P::document_q, &Pointers::document_q, &S::document_q, D::kI32, Dims::kIds, Role::kTerm, Pass::kBoth},
    {"document_k", &P::document_k, &Pointers::document_k, &S::document_k, D::kI32, Dims::kIds, Role::kTerm, Pass::kBoth},
    {"status", &P::status, &Pointers::status, &S::status, D::kI32, Dims::kTwo, Role::kOutput, Pass::kBoth},
    {"sinks", &P::sinks, &Pointers::sinks, &S::sinks, D::kOfLse, Dims::kHeads, Role::kRow, Pass::kBoth},
    {"dsinks", &P::dsinks, &Pointers::dsinks, {kNotForward, &B::dsinks}, D::kOfLse, Dims::kHeads, Role::kOutput, Pass::kBackward},
    {"block_table", &P::block_table, &Pointers::block_table, &S::block_table, D::kI32, Dims::kTable, Role::kList, Pass::kBoth},
};
}  // namespace detail

inline constexpr auto& kTensors = detail::kTensorRows;
inline constexpr size_t kTensorCount = sizeof(kTensors) / sizeof(kTensors[0]);

// The place of a row in the list; as a constant, a name that there is not is an error of the compiler.
constexpr size_t tensor_index(std::string_view name) {
  for (size_t i = 0; i < kTensorCount; ++i)
    if (name == kTensors[i].name) return i;
  throw Error(ErrorCode::kInternal, "tensor_index: there is no such tensor");
}

namespace detail {
template <class Call, size_t... i>
constexpr void for_rows(const Call& call, std::index_sequence<i...>) {
  (call(kTensors[i]), ...);
}
}  // namespace detail

// call(row) for each. Written out by the compiler, row by row: a call of the library does this, and loses nothing by it.
template <class Call>
constexpr void for_each_tensor(const Call& call) {
  detail::for_rows(call, std::make_index_sequence<kTensorCount>());
}
// call(row, view) for each that a ScoreTensors, ForwardTensors or BackwardTensors has, absent ones too.
template <class Tensors, class Call>
constexpr void for_each_tensor(Tensors& tensors, const Call& call) {
  for_each_tensor([&](const TensorRow& row) {
    if (auto* view = row.view.in(tensors)) call(row, *view);
  });
}
// The same tensors, each of which is what change(view) says: where a copy of it lies, say.
template <class Tensors, class Change>
constexpr Tensors each_tensor(Tensors tensors, const Change& change) {
  for_each_tensor(tensors, [&](const TensorRow&, Tensor& view) { view = change(view); });
  return tensors;
}

}  // namespace fattn
