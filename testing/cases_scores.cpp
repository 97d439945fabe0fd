// Cases of masks and of what scores and weights depend on beside q k.
#include <cmath>
#include <utility>

#include "testing/case_table.h"

namespace fattn::testing {

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
  // A last tile of one row: what its unit of keys has before the window is seen by none of its rows.
  c = shape(1, 145, 210, 2, 1, 64);
  c.window_left = 100;
  c.inputs = Inputs::kNanValue;
  table.add(c);
}

// Caps far above, around and far below the scores, which reach about 5, and in decode; and over so many keys, of scores that reach 4, 10 and 16, that
// most weights are those of blocks without a maximum, where the forward pass of algorithm v3 has polynomials for some part of softcap.
void add_softcaps(Table& table) {
  for (double deviation : {1.0, 3.0, 5.0})
    for (int64_t headdim : {64, 96, 128}) {
      Case c = shape(1, 200, 640, 2, 1, headdim);
      c.softcap = 50;
      c.softmax_scale = deviation / std::sqrt(static_cast<double>(headdim));
      table.add_both_masks(c);
      if (deviation != 3) continue;
      c.causal = false;
      c.seqlen_q = c.seqlen_k = 800;
      c.window_left = 500;
      c.window_right = 0;
      table.add(c);
    }
  for (const auto& [softcap, scale] : {std::pair{30.0, 1e-13}, {1e20, 0.3}}) {  // what polynomials are made of is 0 in fp32, or nearly
    Case c = shape(1, 100, 640, 2, 1, 64);
    c.softcap = softcap;
    c.softmax_scale = scale;
    table.add(c);
  }
  {
    Case c = shape(2, 150, 190, 2, 2, 128);
    c.softcap = 6;
    c.window_left = 100;
    c.alibi = Alibi::kHeads;
    c.key_lengths = true;
    table.add(c);
  }
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
    for (Case c : {shape(2, 100, 130, 4, 2, 64), shape(2, 97, 61, 2, 2, 40), shape(1, 33, 1023, 2, 1, 32), shape(1, 420, 523, 2, 1, 64),
                   decoding(3, 1300, 4, 2, 72)}) {
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
  // Inf and NaN in values that some rows see and others do not, in several blocks, for each way to hide a pair.
  for (int headdim : {64, 128, 256}) {
    Case c = shape(2, 300, 420, 2, 1, headdim);
    c.inputs = Inputs::kSpoiltValues;
    c.backward = false;
    table.add_both_masks(c);
    Case other = c;
    other.window_left = 70;
    other.window_right = 10;
    table.add(other);
    other = c;
    other.key_lengths = true;
    table.add_both_masks(other);
    other = c;
    other.documents = Documents::kSorted;
    table.add(other);
    other = c;
    other.mask = Pairs::kHeads;
    table.add_both_masks(other);
    other = c;
    other.bias = Pairs::kHeads;
    table.add(other);
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
  // Scores that the norms of q and k bound until a key of the second thousand, in rows that have seen keys until then and in rows that have not.
  for (bool by_mask : {true, false}) {
    Case c = shape(1, 140, 2200, 2, 1, 64);
    c.inputs = Inputs::kDominantKey;
    c.softmax_scale = 0.2;  // that key's score is 48, whose weight without a maximum is beyond 2^60; the others' bound is below 2^40
    c.documents = by_mask ? Documents::kNone : Documents::kLong;
    c.mask = by_mask ? Pairs::kOne : Pairs::kNone;
    c.mask_blocks = by_mask;
    table.add(c);
    c.p_dropout = 0.2;
    table.add(c);
  }
  for (Pairs pairs : {Pairs::kKeys, Pairs::kHeads}) {  // wide heads, whose kernels on a GPU are others
    Case c = shape(2, 130, 190, 4, 2, pairs == Pairs::kKeys ? 160 : 256);
    c.bias = pairs;
    c.bias_fp32 = true;
    table.add_both_masks(c);
  }
  // Finite biases that are meant to hide: what torch.finfo(dtype).min makes of a mask, whole rows of it, too.
  for (Pairs pairs : {Pairs::kAll, Pairs::kHeads, Pairs::kKeys})
    for (const int headdim : {64, 128, 256}) {
      if (headdim == 256 && pairs == Pairs::kKeys) continue;
      for (const bool fp32 : {false, true}) {
        Case c = shape(2, 130, 200, 4, 2, headdim);
        c.bias = pairs;
        c.bias_fp32 = fp32;
        c.low_bias = LowBias::kLowest;
        table.add_both_masks(c);
        if (headdim == 256) continue;
        c = decoding(2, 700, 4, 2, headdim);
        c.bias = pairs;
        c.bias_fp32 = fp32;
        c.low_bias = LowBias::kLowest;
        table.add(c);
      }
    }
  // The same beside all else that scores depend on, and with a NaN in dlse, or in dout of the middle row, where rows have no gradient.
  Case low = shape(1, 132, 200, 2, 1, 64);
  low.bias = Pairs::kHeads;
  low.bias_fp32 = true;
  low.low_bias = LowBias::kLowest;
  const auto add_low = [&](const auto& change) {
    Case c = low;
    change(c);
    table.add(c);
  };
  add_low([](Case& c) { c.window_left = 60, c.window_right = 20; });
  add_low([](Case& c) { c.alibi = Alibi::kHeads; });
  add_low([](Case& c) { c.p_dropout = 0.2; });
  add_low([](Case& c) { c.documents = Documents::kSorted; });
  add_low([](Case& c) { c.mask = Pairs::kOne; });
  add_low([](Case& c) { c.causal = true, c.window_left = 77, c.alibi = Alibi::kHeads, c.mask = Pairs::kKeys, c.p_dropout = 0.2; });
  Case nan = low;
  nan.dlse = true;
  table.add_both_masks(nan);
  nan.dlse = false;
  nan.inputs = Inputs::kNanGradient;
  table.add_both_masks(nan);
  nan.bias_fp32 = false;
  table.add(nan);
  // -1e9, beside which float64 has digits left for scores: these are alike.
  for (const int headdim : {64, 128}) {
    Case c = shape(1, 132, 200, 2, 1, headdim);
    c.bias = Pairs::kHeads;
    c.bias_fp32 = true;
    c.low_bias = LowBias::kBillion;
    c.inputs = Inputs::kConstant;
    table.add_both_masks(c);
    c.seqlen_q = 2;
    c.backward = false;
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
  for (Case c : {shape(2, 70, 150, 4, 2, 64), shape(1, 200, 330, 2, 1, 128), shape(2, 97, 61, 2, 1, 40), shape(1, 130, 70, 2, 2, 256),
                 decoding(3, 1300, 4, 2, 72)}) {
    c.p_dropout = 0.3;
    c.dropout_part = true;
    table.add_both_masks(c);
    c.mask = Pairs::kKeys;  // of keys before those that are asked for
    table.add(c);
  }
  Case part = shape(2, 150, 200, 4, 2, 64);
  part.p_dropout = 0.3;
  part.dropout_part = true;
  part.documents = Documents::kSorted;
  table.add(part);
  part.documents = Documents::kNone;
  part.varlen = part.causal = true;
  table.add(part);
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
  c = shape(6, 100, 130, 2, 1, 64);  // a NaN that a mask hides goes through the slope of tanh and stays hidden
  c.inputs = Inputs::kNanQuery;
  c.mask = Pairs::kHeads;
  c.softcap = 4;
  c.p_dropout = 0.25;
  table.add(c);
}

namespace {

template <class Add>
void add_layouts(const Add& add) {
  for (Layout layout : {Layout::kBhsd, Layout::kPacked, Layout::kExpanded, Layout::kPadded}) {
    Case c = shape(3, 65, 65, 4, 2, 32);
    c.layout = layout;
    add(c);
  }
}

// Adds `c` with a window, and with capped scores; the result has all else that a score depends on, too.
template <class Add>
Case with_all_else(const Add& add, Case c) {
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
  return c;
}

}  // namespace

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
  add_layouts(add);
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kNanQuery, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    Case c = shape(1, 100, 130, 2, 1, 64);
    c.inputs = inputs;
    add(c);
  }
  add(with_all_else(add, shape(3, 90, 130, 4, 2, 64)));
}

// Sinks: in every layout, with rows that see nothing, with all else that a score depends on, with scores that are far above them, and with NaN.
void add_sinks(Table& table) {
  const auto add = [&](Case c) {
    c.sinks = true;
    table.add_both_masks(c);
  };
  for (const int headdim : {64, 128, 256}) add(shape(2, 150, 197, 4, 2, headdim));
  add(shape(1, 70, 150, 6, 2, 40));
  add(shape(1, 600, 700, 2, 1, 96));
  add(shape(2, 5, 0, 3, 1, 16));
  add(shape(2, 150, 97, 2, 2, 72));
  for (const int headdim : {64, 128}) {
    Case c = decoding(2, 1700, 4, 2, headdim);
    add(c);
    c.key_lengths = true;
    add(c);
  }
  add_layouts(add);
  for (Inputs inputs : {Inputs::kHugeLogits, Inputs::kTiny, Inputs::kNanQuery, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
    // Of huge scores so many rows that some have a key near the sink: the errors of two rows say little.
    Case c = shape(1, inputs == Inputs::kHugeLogits ? 600 : 100, 130, 2, 1, 64);
    c.inputs = inputs;
    add(c);
  }
  Case c = shape(3, 90, 130, 4, 2, 64);
  c.varlen = true;
  add(c);
  c.varlen = false;
  c.dlse = true;
  c = with_all_else(add, c);
  c.documents = Documents::kSorted;
  add(c);
}

}  // namespace fattn::testing
