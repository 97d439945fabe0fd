// The table of cases: one list of attention problems that the tests of every backend and `fattn check` share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fattn/types.hpp"

namespace fattn::testing {

// How the tensors lie in memory. Gradients lie as the tensors that they belong to.
enum class Layout {
  kBshd,      // (batch, seqlen, heads, headdim), contiguous
  kBhsd,      // (batch, heads, seqlen, headdim), contiguous, seen through a view
  kPacked,    // q, k, v in one (batch, seqlen, nheads + 2 nheads_k, headdim) tensor; dq, dk, dv in another
  kExpanded,  // k and v have one batch entry, repeated with a stride of 0; dk and dv are kBshd
  kPadded,    // odd strides: one element of padding after every head, three after every row, five after every batch entry
};

// What the numbers are. v and dout are N(0, 1) unless said otherwise.
enum class Inputs {
  kNormal,         // N(0, 1)
  kHugeLogits,     // scaled scores of about +-2000
  kConstant,       // all of q and k is one number: every weight is the same
  kDominantKey,    // one key in the middle takes nearly all the weight of every row
  kRising,         // scores grow along the keys: the running maximum of an online softmax changes in every block
  kSigma2,         // q, k and v are 2 N(0, 1): some keys of a row have most of its weight
  kSigma3,         // 3 N(0, 1)
  kFarKeys,        // some keys hold 1e10 (fp16: 3e4) where all of q is 0: their scores are like those of the keys of 1 beside them
  kTiny,           // 1e-5 N(0, 1), v and dout too: subnormal in fp16
  kOffset,         // v and dout are 3 + N(0, 1): sums do not cancel
  kNanQuery,       // one row of q holds a NaN
  kNanValue,       // v holds a NaN at one key
  kInfKey,         // k holds +Inf at one key
  kNanGradient,    // one row of dout holds a NaN
  kSpoiltValues,   // v holds NaN, Inf and -Inf at many keys, of all blocks, in many columns
  kMinusInfKeys,   // the first half of k makes scores of -Inf: a row that sees nothing else is empty
  kManyNonfinite,  // NaN, Inf and -Inf in most columns of some of the first rows of q and dout and of some of the last keys of k and v
};

// The shape of a bias or of a mask, (batch, nheads, seqlen_q, seqlen_k) but for what it is the same for.
enum class Pairs {
  kNone,      // there is none
  kAll,       // nothing
  kHeads,     // batch entries
  kOne,       // batch entries and heads
  kKeys,      // heads and queries
  kExpanded,  // batch entries and heads, by strides of 0
};

enum class Alibi { kNone, kHeads, kBatchHeads };  // slopes of (nheads), of (batch, nheads)

// A finite bias that is meant to hide, in a third of the bias and in whole rows of it: none; its dtype's lowest number; -1e9, of fp32 alone.
enum class LowBias { kNone, kLowest, kBillion };

// Ids of documents: none; runs of rows, as packed documents have them; any, of a few; long runs, of which some blocks of keys are one document's.
enum class Documents { kNone, kSorted, kAny, kLong };

struct Case {
  std::string name;  // unique; made from what follows
  int64_t batch = 1, seqlen_q = 64, seqlen_k = 64, nheads = 1, nheads_k = 1, headdim = 64, headdim_v = 64;
  DType dtype = DType::kF32;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  double softcap = 0;                           // 0: none
  bool varlen = false;                          // packed sequences, of which seqlen_q and seqlen_k are the longest; not with kPacked or kExpanded
  bool scattered = false;                       // varlen and key_lengths: the keys of sequences lie in another order than their queries
  bool key_lengths = false;                     // batch entries have fewer keys: none, all, and numbers between
  Alibi alibi = Alibi::kNone;
  Documents documents = Documents::kNone;
  Pairs bias = Pairs::kNone, mask = Pairs::kNone;  // some of the bias is -Inf; the mask hides all keys of one row
  bool mask_blocks = false;                        // or all, some or none of the pairs of 128 rows and 192 keys
  bool bias_fp32 = false;                          // else of dtype
  LowBias low_bias = LowBias::kNone;               // not with varlen
  bool sinks = false;                              // a logit of each head, which is -Inf in the third
  int64_t page_size = 0;  // > 0: k and v are a paged cache; seqlen_k is a multiple of it; forward only, not with kPacked, varlen with key_lengths
  double p_dropout = 0;
  bool dropout_part = false;  // of a matrix whose query 48 and key 320 are the first ones here
  std::optional<double> softmax_scale;
  Layout layout = Layout::kBshd;
  Inputs inputs = Inputs::kNormal;
  bool want_lse = true;
  bool fp32_outputs = false;  // o, dq, dk and dv in fp32, whatever the dtype, which o has in the backward pass
  bool dlse = false;          // backward with a gradient of lse; NaN in rows that have none
  bool backward = true;       // false: forward only
  uint64_t seed = 1;

  DType out_dtype() const { return fp32_outputs ? DType::kF32 : dtype; }
  double scale() const;                         // softmax_scale or its default
  bool has_scores() const;                      // a score depends on more than q k, mask and softcap; or dropout
  bool meant_nonfinite() const;                 // NaN or Inf among the inputs, so NaN and Inf are allowed in the outputs
  double flops() const;                         // of the passes that run
  bool small() const { return flops() < 1e7; }  // quick enough for the float64 oracle under a sanitizer
};

// Where each of a case's packed sequences begins and the last one ends: in q, or in k and v. The first has the full length, among the others are
// empty ones; their tensors have `kRowsBehind` rows more.
constexpr int64_t kRowsBehind = 3;
std::vector<int64_t> cu_seqlens(const Case& c, bool keys);
// What the library is given for keys: the same, or of `scattered` cases where each sequence begins in the order from the last to the first, and
// something that nobody may read behind.
std::vector<int64_t> given_cu_seqlens_k(const Case& c);

// A few hundred cases. The order is by dtype, then by what a case is about.
const std::vector<Case>& all_cases();

// "bf16-b2-q127-k65-h8_2-d64-causal-packed": what differs from the defaults, in a fixed order.
std::string name_of(const Case& c);

const char* name_of(Layout layout);
const char* name_of(Inputs inputs);
const char* name_of(Pairs pairs);

}  // namespace fattn::testing
