// The tensors of a pass of ring attention (fattn/ring.hpp), whichever pass it is, and slices of them.
#pragma once

#include <array>
#include <string>

#include "fattn/tensors.hpp"

namespace fattn::detail {

// Rows [first, first + count) of a dimension.
inline Tensor slice(const Tensor& t, int dim, int64_t first, int64_t count) {
  char* const data = static_cast<char*>(t.data());
  const void* from = data ? data + first * t.stride(dim) * static_cast<int64_t>(size_of(t.dtype())) : nullptr;
  const auto shape = [&](int i) { return i == dim ? count : t.shape(i); };
  const Tensor view = t.ndim() == 4
                          ? Tensor(from, t.dtype(), {shape(0), shape(1), shape(2), shape(3)}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)})
                      : t.ndim() == 3 ? Tensor(from, t.dtype(), {shape(0), shape(1), shape(2)}, {t.stride(0), t.stride(1), t.stride(2)})
                                      : Tensor(from, t.dtype(), {shape(0), shape(1)}, {t.stride(0), t.stride(1)});
  return view.on(t.device(), t.device_index(), from);
}

// Keys of one rank: own ones, or those of a hop.
struct RingPart {
  Tensor k, v, ids;
};

struct RingTensors {
  bool is_forward;
  Tensor q, k, v, o, lse, document_q, document_k, sinks, slopes, bias, mask, dropout_state;
  Tensor dout, dq, dk, dv, dlse, dsinks, dbias;

  explicit RingTensors(const ForwardTensors& t) : RingTensors(t, true) { refuse(t.weights, "weights"); }
  explicit RingTensors(const BackwardTensors& t) : RingTensors(t, false) {
    dout = t.dout;
    dq = t.dq;
    dk = t.dk;
    dv = t.dv;
    dlse = t.dlse;
    dsinks = t.dsinks;
    dbias = t.dbias;
  }

  // That shapes are those of a rank which holds so many rows. Throws Error. (Heads and widths are checked as in any call.)
  void check(int rank, int ranks, int64_t rows_q, int64_t rows_k) const {
    const auto wants = [&](const Tensor& t, const char* name, int ndim, int dim, int64_t rows) {
      if (!t) return;
      if (t.ndim() != ndim)
        invalid(std::string(name) + " has " + std::to_string(t.ndim()) + " dimensions; ring attention takes " + std::to_string(ndim) +
                ", of packed sequences too, with a batch of 1");
      if (t.shape(dim) != rows)
        invalid(std::string(name) + " has " + std::to_string(t.shape(dim)) + " rows; rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                " holds " + std::to_string(rows) + " (ring_schedule() says which)");
    };
    if (refused_)
      throw Error(ErrorCode::kUnsupported,
                  std::string("ring attention in C++ has no ") + refused_ +
                      "; it has causal masks, windows, softcap, documents, sinks, ALiBi, biases, masks, dropout and packed sequences");
    if (!q || !k || !v || (!is_forward && (!lse || !dout || !dq || !dk || !dv)) || !o)
      invalid(is_forward ? "q, k, v or o is absent; ring attention needs all four"
                         : "q, k, v, o, lse, dout, dq, dk or dv is absent; the backward pass of ring attention needs all nine");
    if (static_cast<bool>(document_q) != static_cast<bool>(document_k)) invalid("document_q and document_k belong together; give both or neither");
    const Named of_queries[] = {{&q, "q"}, {&o, "o"}, {&dout, "dout"}, {&dq, "dq"}}, of_keys[] = {{&k, "k"}, {&v, "v"}, {&dk, "dk"}, {&dv, "dv"}};
    for (const Named& x : of_queries) wants(*x.tensor, x.name, 4, 1, rows_q);
    for (const Named& x : of_keys) wants(*x.tensor, x.name, 4, 1, rows_k);
    wants(lse, "lse", 3, 2, rows_q);
    wants(dlse, "dlse", 3, 2, rows_q);
    wants(document_q, "document_q", 2, 1, rows_q);
    wants(document_k, "document_k", 2, 1, rows_k);
    for (const Named& x : {Named{&document_q, "document_q"}, Named{&document_k, "document_k"}}) {
      const Tensor& t = *x.tensor;
      if (t && (t.dtype() != DType::kI32 || t.shape(0) != q.shape(0) || (t.shape(1) > 1 && t.stride(1) != 1)))
        invalid(std::string(x.name) + " is not int32 (batch, rows), here a batch of " + std::to_string(q.shape(0)) + ", with rows side by side");
    }
    check_kinds();
    const Named travel[] = {{&k, "k"}, {&v, "v"}, {&document_k, "document_k"}};
    for (const Named& x : travel) {
      int64_t stride = 1;
      for (int i = x.tensor->ndim(); rows_k > 0 && i-- > 1; stride *= x.tensor->shape(i))
        if (x.tensor->shape(i) > 1 && x.tensor->stride(i) != stride)
          invalid(std::string(x.name) + " has a stride of " + std::to_string(x.tensor->stride(i)) + " in dimension " + std::to_string(i) +
                  "; its rows travel, and must lie behind each other without gaps (" + std::to_string(stride) + ")");
    }
  }

  // What scores depend on: rows of this rank, keys of all ranks.
  void check_scores(int64_t rows_q, int64_t seqlen_k, bool packed, double p_dropout) const {
    for (const Named& x : {Named{&bias, "bias"}, Named{&mask, "mask"}, Named{&dbias, "dbias"}}) {
      if (!*x.tensor) continue;
      if (packed)
        throw Error(ErrorCode::kUnsupported, std::string(x.name) +
                                                 " is given with packed sequences (cu_seqlens_q), which ring attention in C++ has not; "
                                                 "give document_q and document_k in place of cu_seqlens_q");
      const Tensor& t = *x.tensor;
      const auto fits = [&](int dim, int64_t whole) { return t.shape(dim) == 1 || t.shape(dim) == whole; };
      if (t.ndim() != 4 || !fits(0, q.shape(0)) || !fits(1, q.shape(2)) || !fits(2, rows_q) || t.shape(3) != seqlen_k || t.stride(3) != 1)
        invalid(std::string(x.name) + " is not (batch or 1, nheads or 1, rows or 1, keys of all ranks), here " + std::to_string(q.shape(0)) + ", " +
                std::to_string(q.shape(2)) + ", " + std::to_string(rows_q) + " and " + std::to_string(seqlen_k) + ", with keys side by side");
      const bool is_mask = x.tensor == &mask;
      if (is_mask ? t.dtype() != DType::kU8 : t.dtype() != DType::kF32 && t.dtype() != q.dtype())
        invalid(std::string(x.name) + " is " + name_of(t.dtype()) + "; allowed: " + (is_mask ? "u8" : "fp32 or q's dtype"));
    }
    if (slopes && (slopes.dtype() != DType::kF32 || slopes.ndim() > 2 || slopes.shape(slopes.ndim() - 1) != q.shape(2) ||
                   (slopes.ndim() == 2 && slopes.shape(0) != q.shape(0))))
      invalid("alibi_slopes is not fp32 (nheads) or (batch, nheads); q has " + std::to_string(q.shape(2)) + " heads");
    for (const Named& x : {Named{&slopes, "alibi_slopes"}, Named{&bias, "bias"}, Named{&mask, "mask"}, Named{&dbias, "dbias"}})
      for (int i = 0; i < x.tensor->ndim(); ++i)
        if (x.tensor->stride(i) < 0)
          invalid(std::string(x.name) + " has the stride " + std::to_string(x.tensor->stride(i)) + " in dimension " + std::to_string(i) +
                  "; strides must be at least 0. Copy the tensor first");
    if (!(p_dropout > 0)) return;
    if (!dropout_state)
      invalid("p_dropout is " + std::to_string(p_dropout) + ", and dropout_state is absent; it has the seed and the offset, two int64");
    if (dropout_state.dtype() != DType::kI64 || dropout_state.ndim() != 1 || dropout_state.shape(0) != 2 || dropout_state.stride(0) != 1)
      invalid("dropout_state is not two int64 side by side, the seed and the offset of the whole matrix");
  }

  // That there is memory behind what a plan itself reads; calls of blocks look at the rest.
  void check_memory() const {
    for (const Named& x : {Named{&document_q, "document_q"}, Named{&document_k, "document_k"}, Named{&slopes, "alibi_slopes"}, Named{&bias, "bias"},
                           Named{&mask, "mask"}, Named{&dropout_state, "dropout_state"}})
      if (*x.tensor && x.tensor->size() > 0 && !x.tensor->data())
        invalid(std::string(x.name) + " has elements and no memory (its data is null); a tensor of execute has some");
  }

  // Whether all but the memory is the same.
  bool same_kind(const RingTensors& other) const {
    if (is_forward != other.is_forward) return false;
    const auto all = [](const RingTensors& t) {
      return std::array{&t.q,    &t.k,    &t.v,  &t.o,  &t.lse, &t.document_q, &t.document_k, &t.sinks, &t.slopes,       &t.bias,
                        &t.mask, &t.dout, &t.dq, &t.dk, &t.dv,  &t.dlse,       &t.dsinks,     &t.dbias, &t.dropout_state};
    };
    const auto mine = all(*this), others = all(other);
    for (size_t i = 0; i < mine.size(); ++i) {
      const Tensor &a = *mine[i], &b = *others[i];
      if (a.ndim() != b.ndim() || (a && (a.dtype() != b.dtype() || a.device() != b.device() || a.device_index() != b.device_index()))) return false;
      for (int d = 0; d < a.ndim(); ++d)
        if (a.shape(d) != b.shape(d) || a.stride(d) != b.stride(d)) return false;
    }
    return true;
  }

 private:
  template <class Tensors>  // of either pass: what both have
  RingTensors(const Tensors& t, bool forward)
      : is_forward(forward),
        q(t.q),
        k(t.k),
        v(t.v),
        o(t.o),
        lse(t.lse),
        document_q(t.scores.document_q),
        document_k(t.scores.document_k),
        sinks(t.scores.sinks),
        slopes(t.scores.alibi_slopes),
        bias(t.scores.bias),
        mask(t.scores.mask),
        dropout_state(t.scores.dropout_state) {
    refuse(t.scores);
  }
  struct Named {
    const Tensor* tensor;
    const char* name;
  };
  [[noreturn]] static void invalid(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }
  // Kept until check(), which all ranks are told of.
  void refuse(const Tensor& t, const char* name) {
    if (t && !refused_) refused_ = name;
  }
  void refuse(const ScoreTensors& s) {
    refuse(s.seqused_k, "lengths of keys (seqused_k)");
    refuse(s.block_table, "pages (block_table)");
    refuse(s.cu_seqlens_q, "cu_seqlens among its tensors: RingSequence has them");
    refuse(s.status, "status");
  }
  // Of a plan's own checks blocks see too little: they have parts of these tensors, or others in their place.
  void check_kinds() const {
    const bool short_dtype = q.dtype() == DType::kF16 || q.dtype() == DType::kBF16;
    const auto wants_shape = [](const Named& x, const Named& of, int64_t heads, int64_t width, const char* which) {
      if (!*x.tensor || (x.tensor->shape(0) == of.tensor->shape(0) && x.tensor->shape(2) == heads && x.tensor->shape(3) == width)) return;
      const auto three = [](int64_t batch, int64_t n, int64_t w) {
        return "batch " + std::to_string(batch) + ", " + std::to_string(n) + " heads of " + std::to_string(w);
      };
      invalid(std::string(x.name) + " has " + three(x.tensor->shape(0), x.tensor->shape(2), x.tensor->shape(3)) + "; expected " +
              three(of.tensor->shape(0), heads, width) + ", from " + which);
    };
    const Named q_{&q, "q"};
    for (const Named& x : {Named{&o, "o"}, Named{&dout, "dout"}}) wants_shape(x, q_, q.shape(2), v.shape(3), "q and v");
    wants_shape({&dq, "dq"}, q_, q.shape(2), q.shape(3), "q");
    wants_shape({&k, "k"}, q_, k.shape(2), q.shape(3), "q");
    wants_shape({&v, "v"}, q_, k.shape(2), v.shape(3), "q and k");
    wants_shape({&dk, "dk"}, q_, k.shape(2), k.shape(3), "k");
    wants_shape({&dv, "dv"}, q_, v.shape(2), v.shape(3), "v");
    for (const Named& x : {Named{&o, "o"}, Named{&dq, "dq"}, Named{&dk, "dk"}, Named{&dv, "dv"}}) {
      if (!*x.tensor || x.tensor->dtype() == q.dtype() || (short_dtype && (x.tensor != &o || is_forward) && x.tensor->dtype() == DType::kF32))
        continue;
      invalid(std::string(x.name) + " is " + name_of(x.tensor->dtype()) + " and q " + name_of(q.dtype()) + "; allowed: q's dtype" +
              (short_dtype && (x.tensor != &o || is_forward) ? ", or fp32" : ""));
    }
    for (const Named& x : {Named{&lse, "lse"}, Named{&dlse, "dlse"}}) {
      if (!*x.tensor) continue;
      if (x.tensor->dtype() != DType::kF32 || x.tensor->shape(0) != q.shape(0) || x.tensor->shape(1) != q.shape(2))
        invalid(std::string(x.name) + " is not fp32 (batch, nheads, rows) as q has them: " + std::to_string(q.shape(0)) + " and " +
                std::to_string(q.shape(2)));
    }
    for (const Named& x : {Named{&sinks, "sinks"}, Named{&dsinks, "dsinks"}}) {
      if (!*x.tensor) continue;
      if (x.tensor->dtype() != DType::kF32 || x.tensor->ndim() != 1 || x.tensor->shape(0) != q.shape(2))
        invalid(std::string(x.name) + " is not fp32 (nheads); q has " + std::to_string(q.shape(2)) + " heads");
    }
    if (dsinks && !sinks) invalid("dsinks is given and sinks is absent; give both, or neither");
    for (const Named& x : {Named{&k, "k"}, Named{&v, "v"}, Named{&o, "o"}, Named{&lse, "lse"}, Named{&dout, "dout"}, Named{&dq, "dq"},
                           Named{&dk, "dk"}, Named{&dv, "dv"}, Named{&dlse, "dlse"}, Named{&sinks, "sinks"}, Named{&dsinks, "dsinks"},
                           Named{&document_q, "document_q"}, Named{&document_k, "document_k"}, Named{&slopes, "alibi_slopes"}, Named{&bias, "bias"},
                           Named{&mask, "mask"}, Named{&dropout_state, "dropout_state"}, Named{&dbias, "dbias"}})
      if (*x.tensor && (x.tensor->device() != q.device() || x.tensor->device_index() != q.device_index()))
        invalid(std::string(x.name) + " and q are on different devices; all tensors of a rank are on one");
  }
  const char* refused_ = nullptr;
};

}  // namespace fattn::detail
