// Mask geometry: which keys a query sees. Include-free, so that device code can use it too.
#pragma once

namespace fattn::core {

// Every mask is a range of keys a row, and its ends never fall from row to row: row i sees the keys [visible_begin(i), visible_end(i)), those with
// i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right (bottom-right aligned). -1 is no limit on that side; causal is
// a window_right of 0, whatever window_right says. Limits are below the lengths, or 2^30 at most (src/problem), so that no sum overflows.
template <class Int>
struct BasicMask {
  Int seqlen_q;
  Int seqlen_k;
  bool causal;
  Int window_left = -1;
  Int window_right = -1;

  constexpr bool ends() const { return causal || window_right >= 0; }  // some row may not see the last key
  constexpr bool begins() const { return window_left >= 0; }           // some row may not see the first key
  // Row i sees keys below i + diagonal() where the mask ends, and from i + left_diagonal() on where it begins.
  constexpr Int diagonal() const { return 1 + seqlen_k - seqlen_q + (causal ? 0 : window_right); }
  constexpr Int left_diagonal() const { return seqlen_k - seqlen_q - window_left; }

  constexpr Int visible_begin(Int row) const {
    if (!begins()) return 0;
    const Int begin = row + left_diagonal();  // below seqlen_k for every row below seqlen_q
    return begin < 0 ? 0 : begin;
  }
  constexpr Int visible_end(Int row) const {
    if (!ends()) return seqlen_k;
    const Int end = row + diagonal();
    return end < 0 ? 0 : (end > seqlen_k ? seqlen_k : end);
  }
  // The rows [first_row(key), row_end(key)) see key `key`; none does if first_row is row_end or more.
  constexpr Int first_row(Int key) const {
    if (!ends()) return 0;
    const Int row = key - diagonal() + 1;
    return row < 0 ? 0 : row;
  }
  constexpr Int row_end(Int key) const {
    if (!begins()) return seqlen_q;
    const Int row = key - left_diagonal() + 1;
    return row < 0 ? 0 : (row > seqlen_q ? seqlen_q : row);
  }
  // Visible (query, key) pairs of one head; a double, because the product may exceed 2^63.
  constexpr double visible_pairs() const {
    const double ended = ends() ? below(diagonal()) : static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
    return begins() ? ended - below(left_diagonal()) : ended;
  }

 private:
  // Pairs with key < row + edge: rows that meet the edge inside the keys have one pair more each, those behind all of them.
  constexpr double below(Int edge) const {
    const Int first = clamp(1 - edge), full = clamp(seqlen_k - edge);  // the first row with a pair, the first with all
    const double rows = static_cast<double>(full - first), all = static_cast<double>(seqlen_q - full) * static_cast<double>(seqlen_k);
    return rows > 0 ? rows * (2 * static_cast<double>(first + edge) + rows - 1) / 2 + all : all;
  }
  constexpr Int clamp(Int row) const { return row < 0 ? 0 : (row > seqlen_q ? seqlen_q : row); }
};

using Mask = BasicMask<long long>;
using Mask32 = BasicMask<int>;  // where sizes are known to be below 2^30: in kernels, whose registers are few

}  // namespace fattn::core
