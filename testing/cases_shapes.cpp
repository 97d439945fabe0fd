// Cases of shapes, layouts, inputs and plain options.
#include <array>

#include "testing/case_table.h"

namespace fattn::testing {

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
  // A number so far from those of other keys of its block that fp32 made of two fp16 has hardly a digit left for them.
  for (int64_t headdim : {64, 128, 192}) {
    Case c = shape(1, 150, 210, 2, 1, headdim);
    c.inputs = Inputs::kFarKeys;
    table.add_both_masks(c);
  }
}

// Numbers at which few keys have most of a row's weight, in enough rows that the RMS error tells one way to round weights from another (check.h).
void add_sigmas(Table& table) {
  for (Inputs inputs : {Inputs::kSigma2, Inputs::kSigma3}) {
    const auto add = [&](Case c) {
      c.inputs = inputs;
      table.add(c);
    };
    for (int64_t headdim : {64, 128}) {
      Case c = shape(1, 512, 640, 4, 2, headdim);
      c.backward = headdim == 64;
      add(c);
      c.causal = true;
      add(c);
    }
    Case c = shape(1, 384, 512, 4, 2, 256);
    c.causal = inputs == Inputs::kSigma3;
    c.backward = false;
    add(c);
    c = shape(1, 512, 512, 4, 2, 64);
    c.backward = false;
    c.bias = Pairs::kOne;
    c.bias_fp32 = true;
    add(c);
    c.bias = Pairs::kNone;
    c.window_left = 300;
    c.window_right = 0;
    add(c);
    c = shape(8, 8, 1024, 16, 2, 128);  // decode
    c.backward = false;
    add(c);
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

// Of every way to store them (fp32 has no other): tiles and their ends, widths that fill no vector, groups, decode, packed sequences with rows behind
// the last.
void add_fp32_outputs(Table& table) {
  const auto add = [&](Case c) {
    c.fp32_outputs = true;
    table.add(c);
  };
  for (const int64_t headdim : {64, 128, 256}) {
    Case c = shape(2, 130, 200, 2, 1, headdim);
    c.causal = headdim != 128;
    add(c);
  }
  Case c = shape(2, 70, 90, 4, 2, 40);
  c.headdim_v = 72;
  c.layout = Layout::kPadded;
  add(c);
  c = shape(1, 65, 70, 2, 2, 9);
  c.headdim_v = 13;
  add(c);
  c = shape(2, 129, 129, 2, 2, 64);
  c.layout = Layout::kPacked;
  add(c);
  c.layout = Layout::kBhsd;
  c.softcap = 20;
  c.inputs = Inputs::kManyNonfinite;
  add(c);
  c = shape(5, 100, 150, 2, 1, 128);
  c.varlen = true;
  c.causal = true;
  add(c);
  c.key_lengths = true;
  c.window_left = 40;
  add(c);
  c = shape(3, 90, 100, 4, 2, 64);
  c.key_lengths = true;
  c.bias = Pairs::kHeads;
  c.sinks = true;
  c.p_dropout = 0.2;
  add(c);
  add(decoding(1, 700, 8, 2, 128));
  add(decoding(3, 1500, 8, 1, 64));
  c = decoding(1, 640, 4, 4, 80);
  c.key_lengths = true;
  c.page_size = 16;
  c.sinks = true;
  add(c);
}

}  // namespace fattn::testing
