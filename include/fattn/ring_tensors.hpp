// The tensors of a pass of ring attention (fattn/ring.hpp), whichever pass it is, and slices of them.
#pragma once

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
  Tensor q, k, v, o, lse, document_q, document_k, sinks;
  Tensor dout, dq, dk, dv, dlse, dsinks;

  explicit RingTensors(const ForwardTensors& t)
      : is_forward(true),
        q(t.q),
        k(t.k),
        v(t.v),
        o(t.o),
        lse(t.lse),
        document_q(t.scores.document_q),
        document_k(t.scores.document_k),
        sinks(t.scores.sinks) {
    refuse(t.weights, "weights");
    refuse(t.scores);
  }
  explicit RingTensors(const BackwardTensors& t)
      : is_forward(false),
        q(t.q),
        k(t.k),
        v(t.v),
        o(t.o),
        lse(t.lse),
        document_q(t.scores.document_q),
        document_k(t.scores.document_k),
        sinks(t.scores.sinks),
        dout(t.dout),
        dq(t.dq),
        dk(t.dk),
        dv(t.dv),
        dlse(t.dlse),
        dsinks(t.dsinks) {
    refuse(t.dbias, "dbias");
    refuse(t.scores);
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
    const Named travel[] = {{&k, "k"}, {&v, "v"}, {&document_k, "document_k"}};
    for (const Named& x : travel) {
      int64_t stride = 1;
      for (int i = x.tensor->ndim(); rows_k > 0 && i-- > 1; stride *= x.tensor->shape(i))
        if (x.tensor->shape(i) > 1 && x.tensor->stride(i) != stride)
          invalid(std::string(x.name) + " has a stride of " + std::to_string(x.tensor->stride(i)) + " in dimension " + std::to_string(i) +
                  "; its rows travel, and must lie behind each other without gaps (" + std::to_string(stride) + ")");
    }
  }

 private:
  struct Named {
    const Tensor* tensor;
    const char* name;
  };
  [[noreturn]] static void invalid(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }
  static void refuse(const Tensor& t, const char* name) {
    if (!t) return;
    throw Error(ErrorCode::kUnsupported,
                std::string("ring attention in C++ has no ") + name +
                    "; it has causal masks, windows, softcap, documents, sinks and packed sequences (fattn.distributed of the "
                    "Python package has more)");
  }
  static void refuse(const ScoreTensors& s) {
    refuse(s.seqused_k, "lengths of keys (seqused_k)");
    refuse(s.alibi_slopes, "ALiBi");
    refuse(s.bias, "bias");
    refuse(s.mask, "mask of pairs");
    refuse(s.dropout_state, "dropout");
    refuse(s.block_table, "pages (block_table)");
    refuse(s.cu_seqlens_q, "cu_seqlens among its tensors: RingSequence has them");
    refuse(s.status, "status");
  }
};

}  // namespace fattn::detail
