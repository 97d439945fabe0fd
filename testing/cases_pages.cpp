// Cases of paged caches.
#include "testing/case_table.h"
#include "testing/pages.h"

namespace fattn::testing {

// Pages of one key, of sizes that fit no step of a kernel, and of many; prefill, a few queries behind a long past, one query; in every layout, with
// lengths, packed queries, all else that a score depends on, and numbers that are not finite.
void add_pages(Table& table) {
  const auto add = [&](int64_t page_size, Case c) { table.add(*in_pages(c, page_size)); };
  for (const int64_t page_size : {1, 2, 7, 16, 24, 64, 100, 128, 256, 512}) {
    Case c = shape(3, 70, 300, 4, 2, 64);
    c.causal = c.key_lengths = true;
    add(page_size, c);
    c = decoding(1, 700, 8, 2, 64);
    c.batch = 4;
    c.key_lengths = true;
    add(page_size, c);
  }
  for (const int headdim : {40, 72, 128, 192, 256})
    for (const int64_t page_size : {5, 16, 128}) {
      Case c = shape(2, 150, 400, 4, 1, headdim);
      add(page_size, c);
      c = decoding(3, 1100, 4, 1, headdim);
      c.causal = true;
      add(page_size, c);
    }
  for (Layout layout : {Layout::kBhsd, Layout::kPadded, Layout::kExpanded})
    for (const int64_t page_size : {1, 16, 33}) {
      Case c = shape(3, 65, 200, 4, 2, 32);
      c.layout = layout;
      c.key_lengths = true;
      add(page_size, c);
      c.seqlen_q = 2;
      add(page_size, c);
    }
  for (const int64_t seqlen_q : {4, 90})
    for (const int64_t page_size : {1, 16, 48}) {
      Case c = shape(4, seqlen_q, 200, 4, 2, 64);
      c.key_lengths = c.sinks = true;
      c.window_left = 40;
      c.window_right = 9;
      add(page_size, c);
      c.softcap = 4;
      c.alibi = Alibi::kHeads;
      add(page_size, c);
      c.softmax_scale = -0.2;
      c.p_dropout = 0.2;
      c.bias = Pairs::kHeads;
      c.mask = Pairs::kOne;
      c.documents = Documents::kSorted;
      add(page_size, c);
      c.varlen = true;
      add(page_size, c);
    }
  for (const int64_t seqlen_q : {6, 130})
    for (const bool causal : {false, true}) {
      Case c = shape(5, seqlen_q, 310, 4, 2, 64);
      c.varlen = c.key_lengths = true;
      c.causal = causal;
      add(16, c);
      add(1, c);
    }
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kRising, Inputs::kNanValue, Inputs::kInfKey, Inputs::kSpoiltValues, Inputs::kManyNonfinite})
    for (const int64_t seqlen_q : {3, 100}) {
      Case c = shape(2, seqlen_q, 260, 2, 1, 64);
      c.inputs = inputs;
      c.causal = true;
      add(12, c);
      c.mask = Pairs::kHeads;
      add(16, c);
    }
  add(16, shape(2, 5, 0, 2, 1, 16));
  add(16, shape(2, 0, 48, 2, 1, 16));
}

}  // namespace fattn::testing
