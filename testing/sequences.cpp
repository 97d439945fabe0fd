#include "testing/sequences.h"

#include "testing/numbers.h"

namespace fattn::testing {
namespace {

const void* at(const Tensor& t, int64_t element) { return static_cast<const char*>(t.data()) + element * static_cast<int64_t>(size_of(t.dtype())); }

Tensor rows_of(const Tensor& t, int64_t begin, int64_t rows) {
  if (!t) return {};
  return Tensor(at(t, begin * t.stride(0)), t.dtype(), {1, rows, t.shape(1), t.shape(2)},
                {rows * t.stride(0), t.stride(0), t.stride(1), t.stride(2)});
}

}  // namespace

std::vector<OneSequence> sequences_of(const ScoreTensors& s) {
  const auto first = [](const Tensor& t, int64_t n) { return static_cast<int64_t>(load(DType::kI32, t.data(), n * t.stride(0))); };
  std::vector<OneSequence> all;
  for (int64_t n = 0; n + 1 < s.cu_seqlens_q.shape(0); ++n) {
    const int64_t q = first(s.cu_seqlens_q, n), k = first(s.cu_seqlens_k, n);
    const int64_t keys = s.seqused_k ? first(s.seqused_k, n) : first(s.cu_seqlens_k, n + 1) - k;
    all.push_back({n, q, first(s.cu_seqlens_q, n + 1) - q, k, keys});
  }
  return all;
}

Tensor queries_of(const Tensor& t, const OneSequence& one) { return rows_of(t, one.q_begin, one.seqlen_q); }
Tensor keys_of(const Tensor& t, const OneSequence& one) { return rows_of(t, one.k_begin, one.seqlen_k); }
Tensor lse_of(const Tensor& t, const OneSequence& one) {
  if (!t) return {};
  return Tensor(at(t, one.q_begin * t.stride(1)), t.dtype(), {1, t.shape(0), one.seqlen_q}, {t.shape(0) * t.stride(0), t.stride(0), t.stride(1)});
}
Tensor pairs_of(const Tensor& t, const OneSequence& one) {
  if (!t) return {};
  const int64_t offset = t.shape(0) > 1 ? one.index * t.stride(0) : 0, rows = t.shape(2) > 1 ? one.seqlen_q : 1;
  return Tensor(at(t, offset), t.dtype(), {1, t.shape(1), rows, one.seqlen_k}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
}

ScoreTensors scores_of(const ScoreTensors& s, const OneSequence& one, int64_t nheads, int64_t (&state)[4]) {
  ScoreTensors of_one;
  if (s.seqused_k) of_one.seqused_k = Tensor(at(s.seqused_k, one.index * s.seqused_k.stride(0)), DType::kI32, {1});
  of_one.alibi_slopes = s.alibi_slopes;
  of_one.sinks = s.sinks;
  if (const Tensor& t = s.alibi_slopes; t.ndim() == 2)
    of_one.alibi_slopes = Tensor(at(t, one.index * t.stride(0)), DType::kF32, {1, t.shape(1)}, {t.stride(0), t.stride(1)});
  of_one.bias = pairs_of(s.bias, one);
  of_one.mask = pairs_of(s.mask, one);
  const auto ids_of = [](const Tensor& t, int64_t begin, int64_t rows) {
    return t ? Tensor(at(t, begin * t.stride(0)), DType::kI32, {1, rows}) : Tensor();
  };
  of_one.document_q = ids_of(s.document_q, one.q_begin, one.seqlen_q);
  of_one.document_k = ids_of(s.document_k, one.k_begin, one.seqlen_k);
  if (s.dropout_state) {
    const auto* given = static_cast<const int64_t*>(s.dropout_state.data());
    state[0] = given[0];
    state[1] = static_cast<int64_t>(static_cast<uint64_t>(given[1]) + static_cast<uint64_t>(one.index * nheads));
    const int64_t numbers = s.dropout_state.shape(0);
    for (int64_t i = 2; i < numbers; ++i) state[i] = given[i];
    of_one.dropout_state = Tensor(state, DType::kI64, {numbers});
  }
  return of_one;
}

}  // namespace fattn::testing
