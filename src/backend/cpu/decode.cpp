// Decode: a task a chunk of keys, whose parts are merged afterwards.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/call.h"

namespace fattn::core {
namespace {

// The sum of a row's weights, in units of exp(reference), with what its head's sink adds, and lse.
struct SinkedRow {
  float sum, lse;
  SinkedRow(const float* sink, double reference, float weights) : sum(weights) {
    if (weights == 0.0f) {
      lse = sink ? *sink : -std::numeric_limits<float>::infinity();
      return;
    }
    const double added = sink ? std::exp(static_cast<double>(*sink) - reference) : 0.0, all = static_cast<double>(weights) + added;
    sum = static_cast<float>(all);
    lse = std::isinf(added) && !std::isnan(weights) ? *sink : static_cast<float>(reference + std::log(all));
  }
};

// Merges the chunks of one row, with m the largest of the chunks' maxima m_c and a_c = exp((m_c - m) |scale|), of whole scores exp(m_c - m):
// o = sum(a_c acc_c) / sum(a_c sum_c), with dropout times its scale, lse = m |scale| (whole: m) + log(sum(a_c sum_c)).
// Chunk c of the row is the part first + c * step.
void merge_row(const CpuCall& call, int64_t first, int64_t step, const float* sink, void* o, float* lse) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t chunks = call.c.splits, dv = call.p.headdim_v;
  const float* largest = call.floats(call.w.largest);
  const float* sum = call.floats(call.w.sum);
  float* acc = call.floats(call.w.acc);
  const auto index = [&](int64_t chunk) { return first + chunk * step; };
  float m = kNone;
  for (int64_t c = 0; c < chunks; ++c) m = std::max(m, largest[index(c)]);
  const float safe = m == kNone ? 0.0f : m;
  const bool whole = call.p.softmax_scale == 0 || call.p.softcap > 0 || call.p.has_alibi || call.p.bias.given;
  const float scale = whole ? 1.0f : static_cast<float>(std::fabs(call.p.softmax_scale));
  const auto factor_of = [&](int64_t chunk) { return std::exp((largest[index(chunk)] - safe) * scale); };
  float total = 0;
  for (int64_t c = 0; c < chunks; ++c) total += factor_of(c) * sum[index(c)];
  const SinkedRow row(sink, static_cast<double>(m) * static_cast<double>(scale), total);
  const float inverse = total == 0.0f ? 0.0f : static_cast<float>(call.p.dropout_scale()) / row.sum;
  float* merged = acc + index(0) * dv;
  for (int64_t c = 0; c < chunks; ++c) {
    const float factor = factor_of(c) * inverse;
    const float* part = acc + index(c) * dv;
    for (int64_t d = 0; d < dv; ++d) merged[d] = c == 0 ? factor * part[d] : merged[d] + factor * part[d];
  }
  call.kernels.sum_rows(call.out_dtype, merged, 0, 1, dv, o);
  if (lse) *lse = row.lse;
}

}  // namespace

void cpu_decode(const CpuCall& call) {
  const Problem& p = call.p;
  const int64_t chunks = call.c.splits, sets = (p.nheads_k + call.c.heads - 1) / call.c.heads;
  // The part that key head hk's first row of a chunk is in. A batch entry has memory for the most rows; its own lie one behind the other.
  const auto part_of = [&](int64_t n, int64_t hk, int64_t chunk, int64_t rows) {
    return n * p.nheads_k * chunks * call.c.rows + (hk * chunks + chunk) * rows;
  };
  run_tasks(call.plan, "chunks of keys", p.batch * sets * chunks, [&](int64_t i, int worker) {
    const int64_t chunk = i % chunks, n = i / chunks / sets, hk = i / chunks % sets * call.c.heads;
    const Sequence s = sequence_of(p, call.b, n);
    if (s.seqlen_q == 0) return;
    const int64_t rows = p.group() * s.seqlen_q, part = part_of(n, hk, chunk, rows);
    DecodeTask t{};
    t.q = at(call.b.q, place(p.q, n, s.q_begin, hk * p.group()), call.element);
    t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
    t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
    t.q_stride = p.q.row;
    t.q_head_stride = p.q.head;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.heads = std::min(call.c.heads, p.nheads_k - hk);
    t.q_group_stride = p.group() * p.q.head;
    t.k_head_stride = p.k.head;
    t.v_head_stride = p.v.head;
    t.part_stride = chunks;
    t.rows = rows;
    t.seqlen_q = s.seqlen_q;
    t.key_begin = first_key_of_decode(p.mask(s), p) + chunk * call.c.task_k;
    t.key_end = std::min(s.keys, t.key_begin + call.c.task_k);
    t.diagonal = call.diagonal(s);
    t.left_diagonal = call.left_diagonal(s);
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.softcap = static_cast<float>(p.softcap);
    t.pages = call.pages(n);
    t.inputs = call.inputs(n, hk * p.group(), s);
    t.max = call.floats(call.w.largest) + part;
    t.sum = call.floats(call.w.sum) + part;
    t.acc = call.floats(call.w.acc) + part * p.headdim_v;
    t.scratch = call.scratch(worker);
    call.kernels.decode(call.dtype, t);
  });
  run_tasks(call.plan, "merge chunks", p.batch * p.nheads_k, [&](int64_t i, int) {
    const int64_t n = i / p.nheads_k, hk = i % p.nheads_k;
    const Sequence s = sequence_of(p, call.b, n);
    const int64_t rows = p.group() * s.seqlen_q;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t h = hk * p.group() + row / s.seqlen_q, q = s.q_begin + row % s.seqlen_q;
      float* lse = p.want_lse ? at(static_cast<float*>(call.b.lse), place(p.lse, n, q, h)) : nullptr;
      merge_row(call, part_of(n, hk, 0, rows) + row, rows, call.sink_of(h), at(call.b.o, place(p.o, n, q, h), call.out_element), lse);
    }
  });
  if (p.packed) finish_packed_rows(call);
}

}  // namespace fattn::core
