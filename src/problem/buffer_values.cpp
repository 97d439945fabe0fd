// What an execution brings: pointers, and the numbers in memory that the host can read.
#include <algorithm>
#include <array>

#include "device_abi/dropout.h"
#include "problem/overlap.h"
#include "problem/problem.h"
#include "problem/tensor_checks.h"
#include "shared/text.h"

namespace fattn::core {

void validate_buffers(const Problem& p, const fattn_buffers& b) {
  std::array<const void*, kTensorCount> data{};
  std::array<size_t, kTensorCount> touched{};
  size_t n = 0;
  for (size_t i = 0; i < kTensorCount; ++i) {
    if (p.bytes[i] == 0) continue;
    const char* const name = kTensors[i].name;
    const int64_t element = p.extents[i].element_size;
    data[i] = kTensors[i].pointer.get(b);
    if (!data[i]) invalid(text(name, " is a null pointer, but its shape has elements; pass its memory"));
    if (reinterpret_cast<uintptr_t>(data[i]) % static_cast<uintptr_t>(element) != 0)
      invalid(text(name, " points to ", data[i], ", which is not aligned to its element size of ", element, " bytes"));
    touched[n++] = i;
  }
  for (size_t first = 0; first < n; ++first)
    for (size_t second = first + 1; second < n; ++second) {
      const size_t i = touched[first], j = touched[second];
      const bool written = kTensors[i].written(p.backward);
      if ((written || kTensors[j].written(p.backward)) && may_overlap(data[i], p.extents[i], data[j], p.extents[j]))
        invalid(text(kTensors[written ? i : j].name, " overlaps ", kTensors[written ? j : i].name, " in memory; an output needs memory of its own"));
    }
}

namespace {

// One of cu_seqlens_q and cu_seqlens_k, for tensors of `total` rows. `letter`: of which of them.
void check_sequence_values(char letter, const Problem& p, const fattn_buffers& b, int64_t (*first_of)(const Problem&, const fattn_buffers&, int64_t),
                           int64_t most, int64_t total) {
  if (const int64_t first = first_of(p, b, 0); first != 0) invalid(text("cu_seqlens_", letter, "[0] is ", first, "; it must be 0"));
  for (int64_t n = 0; n < p.batch; ++n) {
    const int64_t begin = first_of(p, b, n), end = first_of(p, b, n + 1);
    if (end < begin || end > total)
      invalid(
          text("cu_seqlens_", letter, "[", n + 1, "] is ", end, "; allowed: ", begin, ", where its sequence begins, to total_", letter, ", ", total));
    if (end - begin > most)
      invalid(text("cu_seqlens_", letter, "[", n, "] and [", n + 1, "] are ", begin, " and ", end, ", a sequence of ", end - begin,
                   "; allowed: up to max_seqlen_", letter, ", ", most, ". Plan with a larger one"));
  }
}

// With seqused_k: where the keys of each packed sequence begin, and how many it uses. Of gradients no two may use the same.
void check_used_keys(const Problem& p, const fattn_buffers& b) {
  bool in_order = true;
  for (int64_t n = 0, end = 0; n < p.batch; ++n) {
    const Sequence s = sequence_of(p, b, n);
    if (s.k_begin < 0 || s.k_begin > p.total_k)
      invalid(text("cu_seqlens_k[", n, "] is ", s.k_begin, "; allowed: 0 to total_k, ", p.total_k, ", with seqused_k in any order"));
    if (const int64_t there = p.total_k - s.k_begin; s.keys < 0 || s.keys > std::min(p.seqlen_k, there))
      invalid(text("seqused_k[", n, "] is ", s.keys, "; allowed: 0 to ",
                   there < p.seqlen_k ? text(there, ", the rows of k from cu_seqlens_k[", n, "] on") : text("max_seqlen_k, ", p.seqlen_k)));
    if (s.keys > 0) {
      in_order = in_order && s.k_begin >= end;
      end = s.k_begin + s.keys;
    }
  }
  if (!p.backward || in_order) return;
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t m = 0; m < n; ++m) {
      const Sequence one = sequence_of(p, b, m), other = sequence_of(p, b, n);
      if (one.keys > 0 && other.keys > 0 && one.k_begin < other.k_begin + other.keys && other.k_begin < one.k_begin + one.keys)
        invalid(text("sequences ", m, " and ", n, " use the same keys, from cu_seqlens_k ", one.k_begin, " and ", other.k_begin, " on seqused_k ",
                     one.keys, " and ", other.keys, ", which the forward pass alone computes; for gradients give each keys of its own"));
    }
}

// How many keys each batch entry has.
void check_lengths_of_entries(const Problem& p, const fattn_buffers& b) {
  for (int64_t n = 0; n < p.batch; ++n)
    if (const Sequence s = sequence_of(p, b, n); s.keys < 0 || s.keys > p.seqlen_k)
      invalid(text(
          "seqused_k[", n, "] is ", s.keys, "; allowed: 0 to ",
          p.paged ? text(p.seqlen_k, ", the keys of ", p.seqlen_k / p.page_size, " pages of ", p.page_size, ", which block_table has columns for")
                  : text("seqlen_k, ", p.seqlen_k)));
}

// The pages of the keys that batch entries have.
void check_pages(const Problem& p, const fattn_buffers& b) {
  if (p.empty()) return;
  for (int64_t n = 0; n < p.batch; ++n) {
    const int32_t* const pages = pages_of(p, b, n);
    const int64_t keys = sequence_of(p, b, n).keys, used = (keys + p.page_size - 1) / p.page_size;
    for (int64_t i = 0; i < used; ++i)
      if (pages[i] < 0 || pages[i] >= p.pages)
        invalid(text("block_table[", n, ", ", i, "] is ", pages[i], ", of ", keys,
                     " keys; allowed: ", p.pages == 0 ? "none, as k has no pages" : text("0 to ", p.pages - 1, ", the last page of k")));
  }
}

// Of a part of a matrix, where its first row and key are.
void check_places(const Problem& p, const fattn_buffers& b) {
  const auto* const state = static_cast<const int64_t*>(b.dropout_state);
  const auto check = [](int index, const char* first, int64_t place, int64_t unit, int64_t length) {
    const int64_t most = (int64_t{1} << 31) - length;
    if (place < 0 || place % unit != 0 || place > most)
      invalid(text("dropout_state[", index, "] is ", place, ", the place of the first ", first, "; allowed: 0 to 2^31 - ", length, ", a multiple of ",
                   unit, ", where a block of random numbers begins. Begin the part there, and hide what is before it"));
  };
  check(2, "row", state[2], kDropoutRows, p.seqlen_q);
  check(3, "key", state[3], kDropoutBlock, p.seqlen_k);
}

}  // namespace

void validate_host_values(const Problem& p, const fattn_buffers& b) {
  if (p.dropout_places) check_places(p, b);
  if (p.packed) {
    check_sequence_values('q', p, b, first_query_of, p.seqlen_q, p.total_q);
    if (!p.paged) {
      if (p.has_seqused_k) return check_used_keys(p, b);
      check_sequence_values('k', p, b, first_key_of, p.seqlen_k, p.total_k);
    }
  }
  if (p.uses_lengths()) check_lengths_of_entries(p, b);
  if (p.paged) check_pages(p, b);
}

}  // namespace fattn::core
