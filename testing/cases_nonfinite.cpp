// Cases of many Inf and NaN that some rows see and others do not, by each thing that hides.
#include "testing/case_table.h"

namespace fattn::testing {

void add_many_nonfinite(Table& table) {
  for (int64_t headdim : {64, 96, 128, 192, 256}) {
    Case c = shape(1, 300, 330, 2, 1, headdim);
    c.inputs = Inputs::kManyNonfinite;
    table.add_both_masks(c);
    c.window_left = 60;
    c.window_right = 20;
    table.add(c);
    c.window_left = c.window_right = -1;
    c.documents = Documents::kSorted;
    table.add(c);
    c.documents = Documents::kNone;
    for (Pairs pairs : {Pairs::kAll, Pairs::kKeys}) {
      c.mask = pairs;
      table.add(c);
      c.mask = Pairs::kNone;
      c.bias = pairs;
      table.add(c);
      c.bias = Pairs::kNone;
    }
  }
  Case c = shape(2, 270, 300, 2, 1, 128);
  c.inputs = Inputs::kManyNonfinite;
  c.causal = true;
  Case other = c;
  other.softcap = 5;
  table.add(other);
  other = c;
  other.p_dropout = 0.3;
  table.add(other);
  other = c;
  other.key_lengths = true;
  table.add(other);
  other = c;
  other.alibi = Alibi::kHeads;
  table.add(other);
  other = c;
  other.varlen = true;
  table.add_both_masks(other);
  other.documents = Documents::kSorted;
  table.add(other);
  other = c;
  other.headdim = other.headdim_v = 256;
  other.p_dropout = 0.3;
  table.add(other);
}

}  // namespace fattn::testing
