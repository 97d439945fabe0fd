#include "testing/cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <utility>

#include "testing/random.h"

namespace fattn::testing {
namespace {

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

Case shape(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim) {
  Case c;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = nheads;
  c.nheads_k = nheads_k;
  c.headdim = c.headdim_v = headdim;
  return c;
}

// Lengths around block sizes, in every combination: tails of queries and keys, and causal masks with seqlen_q below,
// at and above seqlen_k, where the first seqlen_q - seqlen_k rows see nothing.
void add_lengths(Table& table) {
  for (int64_t seqlen_q : {1, 7, 63, 65, 127})
    for (int64_t seqlen_k : {1, 7, 63, 65, 127}) table.add_both_masks(shape(1, seqlen_q, seqlen_k, 2, 2, 32));
  table.add_both_masks(shape(1, 1023, 1023, 1, 1, 64));
  table.add_both_masks(shape(1, 1023, 65, 1, 1, 32));
  table.add_both_masks(shape(1, 127, 1023, 1, 1, 64));
  table.add_both_masks(shape(1, 7, 1023, 2, 1, 64));
  table.add_both_masks(shape(1, 192, 256, 2, 2, 64));  // whole blocks
  table.add_both_masks(shape(1, 256, 192, 1, 1, 128));
}

// Every headdim from 1 to 576 works; odd ones leave tails in vectors, pairs and tiles. V may have its own.
void add_headdims(Table& table) {
  bool causal = false;
  for (int64_t headdim : {1, 3, 8, 17, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 576}) {
    Case c = shape(2, 65, 97, 2, 1, headdim);
    c.causal = causal = !causal;
    table.add(c);
  }
  const int64_t unequal[][2] = {{192, 128}, {576, 512}, {64, 80}, {80, 64}, {1, 3}, {40, 256}};
  for (const auto& [headdim, headdim_v] : unequal) {
    Case c = shape(1, 67, 65, 2, 2, headdim);
    c.headdim_v = headdim_v;
    table.add_both_masks(c);
  }
}

// Several query heads share a key head: grouped-query and multi-query attention. dk and dv are sums over the group.
void add_groups(Table& table) {
  table.add_both_masks(shape(1, 65, 97, 8, 2, 64));
  table.add_both_masks(shape(2, 33, 33, 6, 3, 40));
  table.add_both_masks(shape(1, 63, 31, 8, 1, 32));
  table.add_both_masks(shape(3, 40, 40, 5, 5, 16));
}

// Few queries against a long cache, where the keys are split over workers.
void add_decode(Table& table) {
  for (int64_t seqlen_q : {1, 2, 4, 8})
    for (int64_t seqlen_k : {1000, 2049}) {
      Case c = shape(2, seqlen_q, seqlen_k, 8, seqlen_q == 2 ? 1 : 2, seqlen_q == 4 ? 128 : 64);
      c.backward = false;
      table.add_both_masks(c);
    }
  Case longest = shape(1, 1, 5000, 4, 1, 128);
  longest.backward = false;
  table.add(longest);
  longest.seqlen_q = 3;
  longest.nheads_k = 4;
  longest.headdim_v = 80;
  table.add_both_masks(longest);
  table.add_both_masks(shape(1, 3, 1500, 4, 2, 64));
  // Key heads that no number of tasks divides evenly, and rows of K and V that end inside a vector.
  for (const auto& [seqlen_q, headdim, headdim_v] : {std::array{1, 72, 17}, std::array{3, 33, 72}, std::array{7, 100, 100}}) {
    Case odd = shape(1, seqlen_q, 790, 10, 5, headdim);
    odd.headdim_v = headdim_v;
    odd.backward = false;
    table.add_both_masks(odd);
  }
  // Rows of a key head up to 32, up to 64 and beyond; scales that turn the order of the scores round; Inf and NaN in values that some rows see.
  const auto add = [&](Case c) {
    c.backward = false;
    table.add_both_masks(c);
  };
  add(shape(2, 5, 700, 12, 2, 128));
  add(shape(1, 16, 1100, 8, 2, 128));
  add(shape(1, 3, 1030, 20, 2, 256));
  add(shape(2, 9, 900, 6, 1, 256));
  add(shape(1, 5, 600, 8, 2, 192));
  add(shape(1, 11, 1025, 8, 1, 64));
  for (double scale : {0.0, -0.3}) {
    Case c = shape(1, 2, 530, 6, 2, 128);
    c.softmax_scale = scale;
    add(c);
  }
  for (Inputs inputs : {Inputs::kNanValue, Inputs::kInfKey}) {
    Case c = shape(1, 16, 700, 8, 2, 128);
    c.inputs = inputs;
    add(c);
  }
  for (Case c : {shape(5, 16, 700, 8, 2, 128), shape(6, 1, 2100, 8, 2, 64), shape(3, 2, 900, 4, 1, 256), shape(4, 70, 150, 2, 1, 64)}) {
    c.key_lengths = true;
    add(c);
    c.inputs = Inputs::kNanValue;
    add(c);
  }
}

// Nothing to attend to: o = 0 and lse = -inf where there are rows, and zero gradients.
void add_empty(Table& table) {
  table.add_both_masks(shape(0, 5, 7, 2, 1, 16));
  table.add_both_masks(shape(2, 0, 7, 2, 1, 16));
  table.add_both_masks(shape(2, 5, 0, 2, 1, 16));
  table.add(shape(0, 0, 0, 1, 1, 64));
}

void add_layouts(Table& table) {
  for (Layout layout : {Layout::kBhsd, Layout::kPacked, Layout::kExpanded, Layout::kPadded}) {
    Case c = shape(3, 65, 65, 4, 2, 64);
    c.layout = layout;
    table.add_both_masks(c);
    c = shape(2, 33, 33, 3, 1, 17);
    c.layout = layout;
    c.causal = true;
    table.add(c);
    if (layout == Layout::kPacked) continue;
    c = shape(2, 2, 1100, 4, 1, 80);
    c.layout = layout;
    c.backward = false;
    table.add(c);
  }
}

void add_inputs(Table& table) {
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kConstant, Inputs::kDominantKey, Inputs::kRising, Inputs::kTiny, Inputs::kOffset,
                        Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    Case c = shape(1, 150, 210, 2, 1, 64);
    c.inputs = inputs;
    table.add_both_masks(c);
    c = shape(1, 2, 1300, 4, 1, 64);
    c.inputs = inputs;
    c.causal = true;
    c.backward = false;
    if (inputs != Inputs::kNanGradient) table.add(c);
  }
}

void add_options(Table& table) {
  for (double scale : {0.0, -0.3, 1.0}) {
    Case c = shape(1, 70, 90, 2, 2, 48);
    c.softmax_scale = scale;
    table.add_both_masks(c);
  }
  Case c = shape(2, 65, 70, 2, 1, 64);
  c.want_lse = false;
  c.backward = false;
  table.add_both_masks(c);
  c = shape(1, 1, 1200, 8, 2, 64);
  c.want_lse = false;
  c.backward = false;
  table.add(c);
}

// Sliding windows: narrower and wider than blocks of keys, open on one side, with causal masks, with rows that see nothing, in decode.
void add_windows(Table& table) {
  struct Window {
    int64_t left, right;
  };
  for (const auto& [left, right] : {Window{0, 0}, Window{5, -1}, Window{-1, 9}, Window{17, 30}, Window{100, 3}, Window{130, 150}}) {
    Case c = shape(1, 150, 210, 2, 1, 64);
    c.window_left = left;
    c.window_right = right;
    table.add_both_masks(c);
    c = shape(2, 97, 61, 2, 2, 40);  // the first rows see nothing
    c.window_left = left;
    c.window_right = right;
    table.add(c);
    c = shape(1, 3, 1300, 4, 2, 72);  // decode
    c.window_left = left < 0 ? -1 : 11 * left;
    c.window_right = right > 1 ? 1 : right;
    c.backward = false;
    table.add(c);
  }
  Case c = shape(1, 1000, 1000, 1, 1, 32);  // several blocks of rows and keys that are skipped, several that are whole
  c.window_left = 300;
  c.window_right = 150;
  table.add(c);
  c = shape(1, 2, 3000, 8, 2, 128);  // several chunks of keys inside the window
  c.window_left = 1500;
  c.causal = true;
  c.backward = false;
  table.add(c);
  for (int64_t headdim : {128, 256}) {  // wider heads, whose kernels on a GPU are others
    c = shape(1, 420, 470, 4, 2, headdim);
    c.window_left = 150;
    c.window_right = headdim == 128 ? 40 : 0;
    table.add(c);
  }
  for (Layout layout : {Layout::kBhsd, Layout::kPacked, Layout::kPadded}) {
    c = shape(2, 65, 65, 4, 2, 32);
    c.window_left = 20;
    c.window_right = 7;
    c.layout = layout;
    table.add(c);
  }
  for (Inputs inputs :
       {Inputs::kHugeLogits, Inputs::kRising, Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    c = shape(1, 150, 210, 2, 1, 64);
    c.window_left = 40;
    c.window_right = 25;
    c.inputs = inputs;
    table.add(c);
    if (inputs == Inputs::kNanGradient) continue;
    c = shape(1, 3, 1300, 4, 1, 64);
    c.window_left = 700;
    c.inputs = inputs;
    c.backward = false;
    table.add(c);
  }
}

// Caps far above, around and far below the scores, which reach about 5, and in decode.
void add_softcaps(Table& table) {
  for (double softcap : {0.5, 3.0, 50.0, 1e4}) {
    Case c = shape(1, 90, 130, 2, 1, 64);
    c.softcap = softcap;
    table.add_both_masks(c);
    c = shape(1, 2, 1100, 4, 2, 64);
    c.softcap = softcap;
    c.backward = false;
    table.add(c);
  }
  for (double scale : {0.0, -0.3, 1.0}) {
    Case c = shape(1, 70, 90, 2, 2, 40);
    c.softcap = 5;
    c.softmax_scale = scale;
    table.add(c);
  }
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kRising, Inputs::kTiny, Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey,
                        Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    Case c = shape(1, 100, 130, 2, 1, 32);
    c.softcap = 20;
    c.inputs = inputs;
    c.causal = true;
    table.add(c);
    if (inputs == Inputs::kNanGradient) continue;
    c = shape(1, 3, 1300, 4, 1, 64);
    c.softcap = 20;
    c.inputs = inputs;
    c.backward = false;
    table.add(c);
  }
  for (int64_t headdim : {128, 256}) {
    Case c = shape(1, 300, 330, 4, 2, headdim);
    c.softcap = 10;
    c.causal = headdim == 128;
    table.add(c);
  }
  Case c = shape(1, 400, 400, 4, 2, 64);
  c.softcap = 10;
  c.window_left = 120;
  c.window_right = 60;
  table.add(c);
  c = shape(2, 97, 130, 4, 2, 80);
  c.softcap = 15;
  c.window_left = 33;
  c.window_right = 20;
  table.add(c);
}

// What a score depends on beside q k, and dropout: where blocks end, in decode, in every layout of the inputs, with NaN and Inf in hidden pairs.
Case decoding(int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim) {
  Case c = shape(2, seqlen_q, seqlen_k, nheads, nheads_k, headdim);
  c.backward = false;
  return c;
}

void add_key_lengths(Table& table) {
  for (Case c : {shape(5, 70, 150, 2, 1, 64), shape(4, 130, 61, 2, 2, 40), shape(6, 3, 1300, 4, 2, 64), shape(3, 192, 256, 1, 1, 128)}) {
    c.key_lengths = true;
    c.backward = c.seqlen_q != 3;
    table.add_both_masks(c);
    c.window_left = 30;
    c.window_right = 11;
    table.add(c);
  }
  Case chunk = shape(6, 1, 1312, 4, 2, 64);  // a window of as many keys as a chunk of decode, at any place among the blocks of random numbers
  chunk.backward = false;
  chunk.key_lengths = true;
  chunk.window_left = 255;
  chunk.p_dropout = 0.1;
  table.add(chunk);
  for (Inputs inputs : {Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanQuery, Inputs::kMinusInfKeys}) {
    Case c = shape(4, 70, 150, 2, 1, 64);
    c.key_lengths = true;
    c.inputs = inputs;
    c.causal = inputs == Inputs::kNanValue;
    table.add(c);
  }
  Case c = shape(3, 65, 97, 4, 2, 64);
  c.key_lengths = true;
  c.softcap = 10;
  c.layout = Layout::kPadded;
  table.add(c);
}

void add_alibi(Table& table) {
  for (Alibi alibi : {Alibi::kHeads, Alibi::kBatchHeads})
    for (Case c : {shape(2, 100, 130, 4, 2, 64), shape(2, 97, 61, 2, 2, 40), shape(1, 33, 1023, 2, 1, 32), decoding(3, 1300, 4, 2, 72)}) {
      c.alibi = alibi;
      table.add_both_masks(c);
    }
  Case c = shape(3, 65, 97, 4, 2, 64);
  c.alibi = Alibi::kHeads;
  for (double scale : {0.0, -0.3}) {
    c.softmax_scale = scale;
    table.add(c);
  }
  c.softcap = 2;
  c.window_left = 40;
  c.key_lengths = true;
  table.add(c);
}

void add_pairs(Table& table) {
  for (Pairs pairs : {Pairs::kAll, Pairs::kHeads, Pairs::kOne, Pairs::kKeys, Pairs::kExpanded}) {
    for (Case c : {shape(2, 70, 150, 4, 2, 64), shape(2, 130, 61, 2, 2, 40), decoding(3, 790, 4, 2, 72)}) {
      c.bias = pairs;
      c.bias_fp32 = pairs == Pairs::kHeads || pairs == Pairs::kKeys;
      table.add_both_masks(c);
      c.bias = Pairs::kNone;
      c.bias_fp32 = false;
      c.mask = pairs;
      table.add(c);
    }
    Case both = shape(2, 65, 97, 4, 2, 32);
    both.bias = both.mask = pairs;
    both.layout = Layout::kPadded;
    both.softcap = pairs == Pairs::kAll ? 3 : 0;
    both.softmax_scale = pairs == Pairs::kOne ? 0.0 : -0.2;
    table.add(both);
  }
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    Case c = shape(1, 100, 130, 2, 1, 64);
    c.inputs = inputs;
    c.mask = Pairs::kHeads;
    table.add(c);
    c.bias = Pairs::kAll;
    c.softcap = inputs == Inputs::kInfKey ? 8 : 0;
    table.add(c);
    if (inputs == Inputs::kNanGradient) continue;
    c = decoding(2, 700, 4, 2, 64);
    c.inputs = inputs;
    c.mask = Pairs::kAll;
    table.add(c);
  }
  // Rows of whole 16 bytes, which GPUs copy at once, in several blocks of queries and keys.
  for (int headdim : {64, 128}) {
    Case c = shape(2, 150, 336, 4, 2, headdim);
    c.bias = Pairs::kHeads;
    table.add_both_masks(c);
    c.key_lengths = c.bias_fp32 = true;
    c.mask = Pairs::kAll;
    table.add(c);
    c = shape(1, 150, 336, 2, 1, headdim);
    c.inputs = Inputs::kNanValue;
    c.mask = Pairs::kHeads;
    table.add(c);
    c.inputs = Inputs::kInfKey;
    c.bias = Pairs::kAll;
    table.add(c);
  }
  // Tiles that a mask leaves whole or hides; gradients of biases in tiles that the mask, a window or documents leave out.
  for (Pairs pairs : {Pairs::kOne, Pairs::kKeys}) {
    Case c = shape(1, 400, 800, 2, 1, 40);
    c.mask = pairs;
    c.mask_blocks = true;
    table.add_both_masks(c);
    c.softcap = 3;
    c.bias = Pairs::kHeads;
    c.p_dropout = 0.2;
    table.add(c);
    c.softcap = 0;
    c.bias_fp32 = true;
    c.window_left = 70;
    table.add_both_masks(c);
    c.documents = Documents::kSorted;
    table.add(c);
  }
  Case summed = shape(3, 64, 700, 6, 3, 32);  // several super-blocks of keys that add to one gradient, in one order
  summed.bias = Pairs::kOne;
  summed.bias_fp32 = true;
  table.add(summed);
}

void add_dropout(Table& table) {
  for (double p : {0.1, 0.5, 0.9375}) {
    for (Case c : {shape(2, 70, 150, 4, 2, 64), shape(2, 97, 61, 2, 1, 40), decoding(3, 1300, 4, 2, 72)}) {
      c.p_dropout = p;
      table.add_both_masks(c);
      c.window_left = 45;
      table.add(c);
    }
  }
  Case c = shape(2, 100, 130, 4, 2, 64);
  c.p_dropout = 0.2;
  c.key_lengths = true;
  c.alibi = Alibi::kHeads;
  c.bias = Pairs::kAll;
  c.mask = Pairs::kKeys;
  c.softcap = 6;
  c.causal = true;
  c.window_left = 77;
  table.add(c);
  c = shape(1, 40, 577, 2, 2, 160);
  c.p_dropout = 0.3;
  table.add(c);
  for (Inputs inputs : {Inputs::kNanQuery, Inputs::kInfKey, Inputs::kMinusInfKeys}) {
    c = shape(6, 100, 130, 2, 1, 32);  // of each entry few gradients of keys are finite, one weight the only one in some: the bound is of several
    c.p_dropout = 0.25;
    c.inputs = inputs;
    c.causal = true;
    table.add(c);
  }
}

// A gradient of lse: with rows that see nothing, in every layout, with everything else that a score depends on, and with NaN and Inf.
void add_lse_gradients(Table& table) {
  const auto add = [&](Case c) {
    c.dlse = true;
    table.add_both_masks(c);
  };
  add(shape(2, 70, 150, 4, 2, 64));
  add(shape(2, 150, 97, 2, 2, 40));
  add(shape(1, 3, 700, 4, 1, 32));
  add(shape(1, 65, 1300, 2, 1, 128));
  add(shape(2, 5, 0, 2, 1, 16));
  for (Layout layout : {Layout::kBhsd, Layout::kPacked, Layout::kExpanded, Layout::kPadded}) {
    Case c = shape(3, 65, 65, 4, 2, 32);
    c.layout = layout;
    add(c);
  }
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kNanQuery, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    Case c = shape(1, 100, 130, 2, 1, 64);
    c.inputs = inputs;
    add(c);
  }
  Case c = shape(3, 90, 130, 4, 2, 64);
  c.window_left = 40;
  c.window_right = 9;
  add(c);
  c.softcap = 4;
  c.softmax_scale = -0.2;
  add(c);
  c.key_lengths = true;
  c.p_dropout = 0.2;
  c.alibi = Alibi::kHeads;
  c.bias = Pairs::kHeads;
  c.mask = Pairs::kOne;
  add(c);
}

// Documents: blocks of one, of several and without a common one; in decode; with NaN and Inf in other documents.
void add_documents(Table& table) {
  for (Documents documents : {Documents::kSorted, Documents::kAny}) {
    const auto add = [&](Case c) {
      c.documents = documents;
      table.add_both_masks(c);
    };
    for (Case c : {shape(3, 70, 150, 2, 1, 64), shape(2, 400, 400, 2, 2, 40), shape(1, 65, 1300, 2, 1, 64), shape(2, 257, 96, 2, 2, 128)}) add(c);
    add(decoding(1, 1300, 8, 2, 64));
    add(decoding(5, 700, 4, 1, 72));
    Case c = shape(5, 120, 190, 4, 2, 32);
    c.varlen = true;
    add(c);
    c.window_left = 40;
    c.window_right = 9;
    c.key_lengths = true;
    add(c);
    c.softcap = 4;
    c.dlse = true;
    add(c);
    c.p_dropout = 0.2;
    add(c);
    c.alibi = Alibi::kHeads;
    c.bias = Pairs::kHeads;
    c.mask = Pairs::kOne;
    add(c);
    c.backward = false;
    c.seqlen_q = 3;
    add(c);
    for (Inputs inputs : {Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
      c = shape(2, 150, 210, 2, 1, 64);
      c.inputs = inputs;
      add(c);
      if (inputs == Inputs::kNanGradient) continue;
      c.seqlen_q = 4;
      c.backward = false;
      add(c);
    }
  }
}

// Packed sequences: empty ones, with everything else that a score depends on, in decode, with NaN and Inf that belong to other sequences.
void add_packed_sequences(Table& table) {
  const auto add = [&](Case c) {
    c.varlen = true;
    table.add_both_masks(c);
  };
  for (Case c : {shape(5, 70, 150, 2, 1, 64), shape(6, 300, 130, 2, 2, 40), shape(9, 97, 97, 4, 2, 32), shape(1, 65, 65, 2, 2, 128)}) add(c);
  add(shape(3, 20, 1300, 4, 2, 64));  // several super-blocks of keys
  add(shape(0, 5, 7, 2, 1, 16));
  for (Case c : {shape(7, 1, 1300, 8, 2, 64), shape(5, 6, 700, 4, 1, 72), shape(6, 3, 900, 6, 3, 40)}) {  // decode
    c.backward = false;
    add(c);
    c.window_left = 255;
    c.p_dropout = 0.3;
    add(c);
    c.key_lengths = true;
    c.alibi = Alibi::kBatchHeads;
    c.bias = Pairs::kAll;
    add(c);
  }
  for (Layout layout : {Layout::kBhsd, Layout::kPadded}) {
    Case c = shape(5, 65, 97, 4, 2, 32);
    c.layout = layout;
    c.dlse = true;
    add(c);
  }
  for (Pairs pairs : {Pairs::kAll, Pairs::kHeads, Pairs::kOne, Pairs::kKeys, Pairs::kExpanded}) {
    Case c = shape(5, 90, 130, 4, 2, 32);
    c.bias = pairs;
    c.bias_fp32 = pairs == Pairs::kOne;
    c.mask = pairs;
    add(c);
  }
  Case c = shape(6, 120, 190, 4, 2, 64);
  c.window_left = 40;
  c.window_right = 9;
  add(c);
  c.key_lengths = true;
  c.softcap = 4;
  c.alibi = Alibi::kHeads;
  c.p_dropout = 0.2;
  c.dlse = true;
  add(c);
  for (Inputs inputs : {Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient}) {
    c = shape(5, 100, 130, 2, 1, 64);
    c.inputs = inputs;
    add(c);
    c.key_lengths = true;
    add(c);
  }
}

}  // namespace

double Case::scale() const { return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(headdim))); }

bool Case::has_scores() const {
  return varlen || documents != Documents::kNone || key_lengths || alibi != Alibi::kNone || bias != Pairs::kNone || mask != Pairs::kNone ||
         p_dropout > 0;
}

bool Case::meant_nonfinite() const {
  return inputs == Inputs::kNanQuery || inputs == Inputs::kNanValue || inputs == Inputs::kInfKey || inputs == Inputs::kNanGradient ||
         inputs == Inputs::kMinusInfKeys;
}

double Case::flops() const {
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const int64_t own = i + seqlen_k - seqlen_q, right = causal ? 0 : window_right;  // the key that the query is aligned with
    const int64_t begin = window_left < 0 ? 0 : std::clamp<int64_t>(own - window_left, 0, seqlen_k);
    pairs += static_cast<double>((right < 0 ? seqlen_k : std::clamp<int64_t>(own + right + 1, 0, seqlen_k)) - begin);
  }
  return pairs * static_cast<double>(batch * nheads) * 2 * static_cast<double>(headdim + headdim_v) * (backward ? 3.5 : 1.0);
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all;
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Table table(dtype);
      add_lengths(table);
      add_headdims(table);
      add_groups(table);
      add_decode(table);
      add_empty(table);
      add_layouts(table);
      add_inputs(table);
      add_options(table);
      add_windows(table);
      add_softcaps(table);
      add_key_lengths(table);
      add_alibi(table);
      add_pairs(table);
      add_dropout(table);
      add_lse_gradients(table);
      add_packed_sequences(table);
      add_documents(table);
      const std::vector<Case> some = table.take();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return cases;
}

std::vector<int64_t> cu_seqlens(const Case& c, bool keys) {
  const Random random(c.seed, keys ? 11 : 10);
  const int64_t longest = keys ? c.seqlen_k : c.seqlen_q;
  std::vector<int64_t> first{0};
  for (int64_t n = 0; n < c.batch; ++n) {
    const auto some = static_cast<int64_t>(random.uniform(static_cast<uint64_t>(n)) * static_cast<double>(longest + 1));
    first.push_back(first.back() + (n == 0 ? longest : n == (keys ? 3 : 2) ? 0 : some));
  }
  return first;
}

std::string name_of(const Case& c) {
  std::ostringstream name;
  name << fattn::name_of(c.dtype) << "-b" << c.batch << "-q" << c.seqlen_q << "-k" << c.seqlen_k << "-h" << c.nheads;
  if (c.nheads_k != c.nheads) name << "_" << c.nheads_k;
  name << "-d" << c.headdim;
  if (c.headdim_v != c.headdim) name << "_" << c.headdim_v;
  if (c.causal) name << "-causal";
  if (c.window_left != -1 || c.window_right != -1) name << "-window" << c.window_left << "_" << c.window_right;
  if (c.softcap != 0) name << "-softcap" << c.softcap;
  if (c.varlen) name << "-varlen";
  if (c.key_lengths) name << "-lengths";
  if (c.alibi != Alibi::kNone) name << (c.alibi == Alibi::kHeads ? "-alibi" : "-alibi_batch");
  if (c.documents != Documents::kNone) name << (c.documents == Documents::kSorted ? "-documents" : "-documents_any");
  if (c.bias != Pairs::kNone) name << "-bias_" << name_of(c.bias) << (c.bias_fp32 ? "_fp32" : "");
  if (c.mask != Pairs::kNone) name << "-mask_" << name_of(c.mask) << (c.mask_blocks ? "_blocks" : "");
  if (c.p_dropout > 0) name << "-dropout" << c.p_dropout;
  if (c.softmax_scale) name << "-scale" << *c.softmax_scale;
  if (c.layout != Layout::kBshd) name << "-" << name_of(c.layout);
  if (c.inputs != Inputs::kNormal) name << "-" << name_of(c.inputs);
  if (!c.want_lse) name << "-nolse";
  if (c.dlse) name << "-dlse";
  if (!c.backward) name << "-fwd";
  return name.str();
}

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kBshd: return "bshd";
    case Layout::kBhsd: return "bhsd";
    case Layout::kPacked: return "packed";
    case Layout::kExpanded: return "expanded";
    case Layout::kPadded: return "padded";
  }
  return "unknown";
}

const char* name_of(Pairs pairs) {
  switch (pairs) {
    case Pairs::kNone: return "none";
    case Pairs::kAll: return "all";
    case Pairs::kHeads: return "heads";
    case Pairs::kOne: return "one";
    case Pairs::kKeys: return "keys";
    case Pairs::kExpanded: return "expanded";
  }
  return "unknown";
}

const char* name_of(Inputs inputs) {
  switch (inputs) {
    case Inputs::kNormal: return "normal";
    case Inputs::kHugeLogits: return "huge_logits";
    case Inputs::kConstant: return "constant";
    case Inputs::kDominantKey: return "dominant_key";
    case Inputs::kRising: return "rising";
    case Inputs::kTiny: return "tiny";
    case Inputs::kOffset: return "offset";
    case Inputs::kNanQuery: return "nan_query";
    case Inputs::kNanValue: return "nan_value";
    case Inputs::kInfKey: return "inf_key";
    case Inputs::kNanGradient: return "nan_gradient";
    case Inputs::kMinusInfKeys: return "minus_inf_keys";
  }
  return "unknown";
}

}  // namespace fattn::testing
