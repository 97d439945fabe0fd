#include "problem/problem.h"

#include <algorithm>

namespace fattn::core {

Cost cost_of(const Problem& p) {
  // Of packed sequences the lengths are not known: as if there were as many of the longest as their tensors have room for, which is the most.
  const auto room = [](int64_t total, int64_t most) { return most > 0 ? static_cast<double>(total) / static_cast<double>(most) : 0.0; };
  double entries = static_cast<double>(p.batch);
  if (p.packed) entries = std::min({entries, room(p.total_q, p.seqlen_q), room(p.total_k, p.seqlen_k)});
  const double heads = entries * static_cast<double>(p.nheads);
  const double per_pair = 2.0 * static_cast<double>(p.headdim + p.headdim_v) * (p.backward ? 2.5 : 1.0);
  const double all_pairs = static_cast<double>(p.seqlen_q) * static_cast<double>(p.seqlen_k);
  Cost cost;
  cost.flops = heads * p.mask().visible_pairs() * per_pair;
  cost.flops_nominal = p.windowed() ? cost.flops : heads * all_pairs * per_pair * (p.causal ? 0.5 : 1.0);

  const double element = static_cast<double>(size_of(p.dtype));
  const double rows_q = static_cast<double>(p.nheads) * (p.packed ? static_cast<double>(p.total_q) : entries * static_cast<double>(p.seqlen_q));
  double rows_k = static_cast<double>(p.nheads_k) * (p.packed ? static_cast<double>(p.total_k) : entries * static_cast<double>(p.seqlen_k));
  if (p.paged)  // pages that are shared are read once
    rows_k = std::min(rows_k, static_cast<double>(p.nheads_k) * static_cast<double>(p.pages) * static_cast<double>(p.page_size));
  const double q = rows_q * static_cast<double>(p.headdim) * element, o = rows_q * static_cast<double>(p.headdim_v) * element;
  const double k = rows_k * static_cast<double>(p.headdim) * element, v = rows_k * static_cast<double>(p.headdim_v) * element;
  const double lse = rows_q * (p.dtype == DType::kF64 ? 8.0 : 4.0);
  cost.bytes = p.backward ? 2 * (q + k + v + o) + (p.has_dlse ? 2 * lse : lse) : q + k + v + o + (p.want_lse ? lse : 0.0);
  if (p.want_weights) cost.bytes += heads * all_pairs * element;
  for (const PairTensor* t : {&p.bias, &p.pair_mask, &p.dbias})
    cost.bytes += static_cast<double>(t->batch) * static_cast<double>(t->heads) * static_cast<double>(t->rows) * static_cast<double>(p.seqlen_k) *
                  static_cast<double>(size_of(t->dtype));
  return cost;
}

}  // namespace fattn::core
