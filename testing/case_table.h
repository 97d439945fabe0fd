// What the table of cases is made of: groups of cases, each for one dtype. testing/cases.cpp puts them together.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "testing/cases.h"
#include "testing/random.h"

namespace fattn::testing {

// Collects the cases of one dtype; every group below says what it is after.
class Table {
 public:
  explicit Table(DType dtype) : dtype_(dtype) {}

  void add(Case c) {
    c.dtype = dtype_;
    c.name = fattn::testing::name_of(c);
    c.seed = 1;
    for (char letter : c.name) c.seed = mix(c.seed ^ static_cast<unsigned char>(letter));
    cases_.push_back(c);
  }
  void add_both_masks(Case c) {
    for (bool causal : {false, true}) {
      c.causal = causal;
      add(c);
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  DType dtype_;
  std::vector<Case> cases_;
};

inline Case shape(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim) {
  Case c;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = nheads;
  c.nheads_k = nheads_k;
  c.headdim = c.headdim_v = headdim;
  return c;
}

// Few queries, forward: what decodes.
inline Case decoding(int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim) {
  Case c = shape(2, seqlen_q, seqlen_k, nheads, nheads_k, headdim);
  c.backward = false;
  return c;
}

// testing/cases_shapes.cpp
void add_lengths(Table& table);
void add_headdims(Table& table);
void add_groups(Table& table);
void add_decode(Table& table);
void add_empty(Table& table);
void add_layouts(Table& table);
void add_inputs(Table& table);
void add_sigmas(Table& table);
void add_options(Table& table);
void add_fp32_outputs(Table& table);
// testing/cases_scores.cpp
void add_windows(Table& table);
void add_softcaps(Table& table);
void add_key_lengths(Table& table);
void add_alibi(Table& table);
void add_pairs(Table& table);
void add_dropout(Table& table);
void add_lse_gradients(Table& table);
void add_sinks(Table& table);
// testing/cases_pages.cpp
void add_pages(Table& table);
// testing/cases_sequences.cpp
void add_packed_sequences(Table& table);
void add_documents(Table& table);

// testing/cases_nonfinite.cpp
void add_many_nonfinite(Table& table);

}  // namespace fattn::testing
