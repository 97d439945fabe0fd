// Cases of packed sequences and documents.
#include "testing/case_table.h"

#include <utility>

namespace fattn::testing {

// Documents: blocks of one, of several and without a common one; in decode; with NaN and Inf in other documents.
void add_documents(Table& table) {
  for (Documents documents : {Documents::kSorted, Documents::kAny}) {
    const auto add = [&](Case c) {
      c.documents = documents;
      table.add_both_masks(c);
    };
    for (const Case& c : {shape(3, 70, 150, 2, 1, 64), shape(2, 400, 400, 2, 2, 40), shape(1, 65, 1300, 2, 1, 64), shape(2, 257, 96, 2, 2, 128)})
      add(c);
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
    for (Case packed : {shape(4, 200, 260, 2, 1, 64), shape(4, 130, 290, 2, 1, 128), shape(3, 70, 190, 2, 2, 256)}) {
      packed.varlen = true;
      add(packed);
      packed.window_left = 90;
      packed.window_right = 30;
      add(packed);
      packed.key_lengths = true;
      packed.inputs = Inputs::kNanValue;
      add(packed);
      packed.scattered = true;
      packed.inputs = Inputs::kNormal;
      add(packed);
    }
    for (Inputs inputs : {Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient, Inputs::kMinusInfKeys}) {
      c = shape(2, 150, 210, 2, 1, 64);
      c.inputs = inputs;
      c.varlen = true;
      add(c);
      c.varlen = false;
      add(c);
      if (inputs == Inputs::kNanGradient) continue;
      c.seqlen_q = 4;
      c.backward = false;
      add(c);
    }
  }
  // Beside what leaves the widest heads of a GPU few registers, which have tiles of their own for it.
  for (const int window : {-1, 70}) {
    Case c = shape(2, 150, 260, 1, 1, 256);
    c.documents = Documents::kSorted;
    c.window_left = window;
    c.backward = false;
    c.softcap = 5;
    table.add_both_masks(c);
    c.softcap = 0;
    c.p_dropout = 0.2;
    table.add_both_masks(c);
    c.key_lengths = true;
    table.add_both_masks(c);
  }
  for (const auto& [headdim, inputs] : {std::pair{64, Inputs::kNormal}, {64, Inputs::kNanValue}, {128, Inputs::kNormal}}) {
    Case c = shape(1, 200, 900, 2, 1, headdim);
    c.documents = Documents::kLong;
    c.inputs = inputs;
    table.add_both_masks(c);
  }
}

// Packed sequences: empty ones, with everything else that a score depends on, in decode, with NaN and Inf that belong to other sequences.
void add_packed_sequences(Table& table) {
  const auto add = [&](Case c) {
    c.varlen = true;
    table.add_both_masks(c);
  };
  for (const Case& c : {shape(5, 70, 150, 2, 1, 64), shape(6, 300, 130, 2, 2, 40), shape(9, 97, 97, 4, 2, 32), shape(1, 65, 65, 2, 2, 128)}) add(c);
  add(shape(3, 20, 1300, 4, 2, 64));  // several super-blocks of keys
  add(shape(4, 130, 200, 2, 1, 192));
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
  for (Case c : {shape(4, 200, 260, 2, 1, 64), shape(4, 130, 290, 2, 1, 128), shape(4, 70, 200, 2, 1, 192), shape(4, 70, 190, 2, 1, 256)}) {
    c.key_lengths = true;
    add(c);
    c.scattered = true;
    add(c);
    c.scattered = false;
    c.window_left = 90;
    c.window_right = 30;
    add(c);
    if (c.headdim > 64) continue;
    c.p_dropout = 0.2;
    c.dlse = true;
    add(c);
    c.p_dropout = 0;
    c.softcap = 4;
    add(c);
    c.softcap = 0;
    c.alibi = Alibi::kHeads;
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
  c.scattered = true;
  add(c);
  c.documents = Documents::kSorted;
  c.bias = Pairs::kHeads;
  c.mask = Pairs::kOne;
  add(c);
  c.backward = false;
  c.seqlen_q = 3;
  add(c);
  for (Inputs inputs : {Inputs::kNanQuery, Inputs::kNanValue, Inputs::kInfKey, Inputs::kNanGradient}) {
    c = shape(5, 100, 130, 2, 1, 64);
    c.inputs = inputs;
    add(c);
    c.key_lengths = true;
    add(c);
    c.scattered = true;
    add(c);
  }
}

}  // namespace fattn::testing
