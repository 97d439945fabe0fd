// Mask geometry: which keys a query sees. Include-free, so that device code can use it too.
#pragma once

namespace fattn::core {

// Row i sees the keys [0, visible_end(i)). `diagonal` = 1 + seqlen_k - seqlen_q for a causal mask (bottom-right aligned).
template <class Int>
struct BasicMask {
  Int seqlen_q;
  Int seqlen_k;
  bool causal;

  constexpr Int diagonal() const { return 1 + seqlen_k - seqlen_q; }
  constexpr Int visible_end(Int row) const {
    if (!causal) return seqlen_k;
    const Int end = row + diagonal();
    return end < 0 ? 0 : (end > seqlen_k ? seqlen_k : end);
  }
  // The first row that sees key `key`; seqlen_q or more if none does.
  constexpr Int first_row(Int key) const {
    if (!causal) return 0;
    const Int row = key - diagonal() + 1;
    return row < 0 ? 0 : row;
  }
  // Visible (query, key) pairs of one head; a double, because the product may exceed 2^63.
  constexpr double visible_pairs() const {
    if (!causal) return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
    const Int first = first_row(0);  // the first row that sees anything
    if (first >= seqlen_q) return 0;
    // Rows first .. seqlen_q - 1 see visible_end(first) .. seqlen_k keys, one more each.
    const double rows = static_cast<double>(seqlen_q - first);
    return rows * (static_cast<double>(visible_end(first)) + static_cast<double>(seqlen_k)) / 2;
  }
};

using Mask = BasicMask<long long>;
using Mask32 = BasicMask<int>;  // where sizes are known to be below 2^30: in kernels, whose registers are few

}  // namespace fattn::core
