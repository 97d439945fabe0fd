// Mask geometry: which keys a query sees. Include-free, so that device code can use it too.
#pragma once

namespace fattn::core {

// Row i sees the keys [0, visible_end(i)). `diagonal` = 1 + seqlen_k - seqlen_q for a causal mask (bottom-right aligned).
struct Mask {
  long long seqlen_q;
  long long seqlen_k;
  bool causal;

  constexpr long long diagonal() const { return 1 + seqlen_k - seqlen_q; }
  constexpr long long visible_end(long long row) const {
    if (!causal) return seqlen_k;
    const long long end = row + diagonal();
    return end < 0 ? 0 : (end > seqlen_k ? seqlen_k : end);
  }
  // The first row that sees key `key`; seqlen_q or more if none does.
  constexpr long long first_row(long long key) const {
    if (!causal) return 0;
    const long long row = key - diagonal() + 1;
    return row < 0 ? 0 : row;
  }
  // Visible (query, key) pairs of one head; a double, because the product may exceed 2^63.
  constexpr double visible_pairs() const {
    if (!causal) return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
    const long long first = first_row(0);  // the first row that sees anything
    if (first >= seqlen_q) return 0;
    // Rows first .. seqlen_q - 1 see visible_end(first) .. seqlen_k keys, one more each.
    const double rows = static_cast<double>(seqlen_q - first);
    return rows * (static_cast<double>(visible_end(first)) + static_cast<double>(seqlen_k)) / 2;
  }
};

}  // namespace fattn::core
