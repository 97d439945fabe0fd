// Which rows of the table of v3 forward problems have registers for, what no row has any for, and which rows are faster for some.
#pragma once

#include "backend/cuda/spills.h"
#include "backend/cuda/v3_forward.h"

namespace fattn::core::cuda {

// A set of kinds of rows.
constexpr uint32_t one_of(V3RowScores scores) { return uint32_t{1} << static_cast<int>(scores); }
constexpr uint32_t kAnyScores = one_of(V3RowScores::kAny), kUncappedScores = kAnyScores | one_of(V3RowScores::kUncapped),
                   kCappedScores = kAnyScores | one_of(V3RowScores::kCapped), kOrdinaryScores = kUncappedScores | kCappedScores;

// Rows of the table: all that is said holds.
struct V3ForwardRowsOf {
  uint32_t scores = kOrdinaryScores;
  int groups_to = 4, groups_to_wide = 4, groups_to_capped = 4;  // in all; with blocks of more than 64 keys; in rows for softcap
  int groups_not = 0, block_n = 0, block_of = 1;                // not so many; blocks of so many keys, and of a multiple of so many

  constexpr bool has(const V3ForwardRow& row) const {
    const V3ForwardTile& tile = row.tile;
    return (scores & one_of(row.scores)) != 0 && tile.groups <= groups_to && (tile.block_n <= 64 || tile.groups <= groups_to_wide) &&
           (row.scores != V3RowScores::kCapped || tile.groups <= groups_to_capped) && tile.groups != groups_not &&
           (block_n == 0 || tile.block_n == block_n) && tile.block_n % block_of == 0;
  }
};

// The rows for a set of problems: of several the first that has the problem. The others spill, unless it is there `for_speed`.
struct V3ForwardRowsFor {
  std::string_view name;
  Where where;
  V3ForwardRowsOf rows;
  SpillBytes bytes = {};
  bool for_speed = false;
};

constexpr uint32_t kEntries = with::kLengths | with::kPacked;
// clang-format off
inline constexpr V3ForwardRowsFor kV3ForwardRowsFor[] = {
    {.name = "fp32 outputs",
     .where = {.all = with::kFp32Out}, .rows = {.groups_to = 2}, .bytes = {}},
    {.name = "bias",
     .where = {.all = with::kBias}, .rows = {.scores = one_of(V3RowScores::kTerms)}, .for_speed = true},
    // A mask alone: its words are of 64 keys.
    {.name = "mask beside lengths or packed sequences",
     .where = {.all = with::kMask, .any = kEntries}, .rows = {.groups_to = 2, .block_of = 64}, .bytes = {}},
    {.name = "mask up to 64",
     .where = {.up_to = 64, .all = with::kMask}, .rows = {.scores = one_of(V3RowScores::kMask)}, .bytes = {40, 40}},
    {.name = "mask at 97 to 128 without another mask",
     .where = {.above = 96, .up_to = 128, .all = with::kMask, .none = with::kCausal | with::kWindow}, .rows = {.groups_to = 2, .block_of = 64},
     .for_speed = true},
    {.name = "mask",
     .where = {.all = with::kMask}, .rows = {.block_of = 64}, .for_speed = true},
    // Documents: in blocks of 128 keys they spill in windows and beside more features. Three warpgroups have registers at 64, causal, without these,
    // and are faster.
    {.name = "documents with softcap or dropout above 192, causal",
     .where = {.above = 192, .all = with::kDocuments | with::kCausal, .none = with::kPacked, .any = with::kSoftcap | with::kDropout},
     .rows = {.scores = one_of(V3RowScores::kTightDocuments)}, .bytes = {24, 24}},
    {.name = "documents with softcap or dropout above 192, window",
     .where = {.above = 192, .all = with::kDocuments | with::kWindow, .none = with::kPacked, .any = with::kSoftcap | with::kDropout},
     .rows = {.scores = one_of(V3RowScores::kTightDocuments)}, .bytes = {24, 24}},
    {.name = "documents up to 64, causal",
     .where = {.up_to = 64, .all = with::kDocuments | with::kCausal,
               .none = kEntries | with::kAlibi | with::kDropout | with::kSoftcap | with::kWindow},
     .rows = {.scores = one_of(V3RowScores::kDocuments), .groups_not = 2}, .for_speed = true},
    {.name = "documents in a window or beside others",
     .where = {.all = with::kDocuments, .any = kEntries | with::kAlibi | with::kDropout | with::kSoftcap | with::kWindow},
     .rows = {.scores = kOrdinaryScores | one_of(V3RowScores::kDocuments), .groups_to = 2, .block_n = 64}, .bytes = {12, 12}},
    {.name = "documents",
     .where = {.all = with::kDocuments}, .rows = {.groups_to = 2}, .bytes = {}},
    // Dropout: random numbers come in blocks of 64 keys, and want registers, the more the less regular the mask is.
    {.name = "dropout up to 64, causal",
     .where = {.up_to = 64, .all = with::kDropout | with::kCausal, .none = kEntries | with::kAlibi | with::kWindow},
     .rows = {.scores = one_of(V3RowScores::kDropout)}, .bytes = {}},
    {.name = "dropout beside others",
     .where = {.all = with::kDropout, .any = kEntries | with::kAlibi}, .rows = {.groups_to = 2, .block_of = 64}, .bytes = {}},
    {.name = "dropout without a mask",
     .where = {.all = with::kDropout, .none = with::kCausal | with::kWindow}, .rows = {.groups_to_wide = 2, .block_of = 64}, .bytes = {}},
    {.name = "dropout",
     .where = {.all = with::kDropout}, .rows = {.groups_to = 3, .groups_to_wide = 2, .block_of = 64}, .bytes = {}},
    {.name = "lengths with softcap or ALiBi",
     .where = {.all = with::kLengths, .any = with::kSoftcap | with::kAlibi}, .rows = {.groups_to = 2}, .bytes = {}},
    {.name = "packed sequences with softcap or ALiBi",
     .where = {.all = with::kPacked, .any = with::kSoftcap | with::kAlibi}, .rows = {.groups_to = 2}, .bytes = {12, 12}},
    {.name = "packed sequences in a window up to 64",
     .where = {.up_to = 64, .all = with::kPacked | with::kWindow}, .rows = {.groups_to = 2}, .bytes = {}},
    {.name = "lengths up to 64, causal",
     .where = {.up_to = 64, .all = with::kLengths | with::kCausal, .none = with::kWindow}, .rows = {.groups_to_capped = 2, .groups_not = 3},
     .bytes = {}},
    {.name = "lengths or packed sequences",
     .where = {.any = kEntries}, .rows = {.scores = kUncappedScores}, .for_speed = true},
    {.name = "softcap",
     .where = {.all = with::kSoftcap}, .rows = {.scores = kCappedScores}, .bytes = {}},
    {.name = "plain",
     .where = {}, .rows = {.scores = kUncappedScores | one_of(V3RowScores::kPlain)}, .for_speed = true},
};

// Asked about before whether softcap is too small.
inline constexpr RefusalRule kV3ForwardScoreRefusals[] = {
    {.name = "lengths and softcap",
     .where = {.all = with::kLengths | with::kSoftcap},
     .why = "algorithm v3's forward pass has no registers for lengths of the batch's entries (seqused_k) with softcap; algorithm v2 does both",
     .bytes = {}},
    {.name = "ALiBi and softcap",
     .where = {.all = with::kAlibi | with::kSoftcap},
     .why = "algorithm v3's forward pass has no registers for ALiBi with softcap; algorithm v2 does both",
     .bytes = {}},
    {.name = "dropout and softcap",
     .where = {.all = with::kDropout | with::kSoftcap},
     .why = "algorithm v3's forward pass has no registers for dropout with softcap; algorithm v2 does both",
     .bytes = {}},
    {.name = "mask and sinks",
     .where = {.all = with::kMask | with::kSinks},
     .why = "algorithm v3's forward pass has no registers for a mask of pairs with sinks; algorithm v2 does both",
     .bytes = {}},
    {.name = "softcap and sinks above 192",
     .where = {.above = 192, .all = with::kSoftcap | with::kSinks},
     .why = "{headdims}; algorithm v3's forward pass has registers for softcap with sinks up to {most}; algorithm v2 does both",
     .bytes = {}},
};

// Biases and masks have none of these besides in any case.
constexpr uint32_t kTermsOfPairs = with::kBias | with::kMask;
inline constexpr RefusalRule kV3ForwardRefusals[] = {
    {.name = "fp32 outputs in a window above 192",
     .where = {.above = 192, .all = with::kFp32Out | with::kWindow},
     .why = "{headdims}; algorithm v3's forward pass has registers for outputs in fp32 in a window up to {most}; algorithm v2 has them for wider "
            "ones",
     .bytes = {8, 8}},
    {.name = "ALiBi and dropout with lengths",
     .where = {.all = with::kAlibi | with::kDropout | with::kLengths, .none = kTermsOfPairs},
     .why = "{headdims}; algorithm v3's forward pass has registers for ALiBi and dropout together up to 192, and none for lengths (seqused_k) "
            "besides",
     .bytes = {}},
    {.name = "ALiBi and dropout above 192",
     .where = {.above = 192, .all = with::kAlibi | with::kDropout, .none = kTermsOfPairs},
     .why = "{headdims}; algorithm v3's forward pass has registers for ALiBi and dropout together up to {most}, and none for lengths (seqused_k) "
            "besides",
     .bytes = {}},
    {.name = "dropout in a window with lengths above 192",
     .where = {.above = 192, .all = with::kDropout | with::kWindow | with::kLengths, .none = kTermsOfPairs},
     .why = "{headdims}; algorithm v3's forward pass has registers for dropout in a window with lengths (seqused_k) up to {most}",
     .bytes = {}},
};
// clang-format on

}  // namespace fattn::core::cuda
