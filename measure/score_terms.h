// The tensors that scores depend on beside q and k, made of what a ProblemSpec says of them.
#pragma once

#include <array>

#include "fattn/problem.hpp"
#include "measure/memory.h"
#include "measure/problem.h"

namespace fattn::measure {

enum ScoreInput { kSequsedK, kAlibiSlopes, kBias, kMask, kDropoutState, kCuSeqlens, kDocuments, kBlockTable, kScoreInputs };

using ScorePages = std::array<Pages, kScoreInputs>;  // without pages: absent
using ScoreAddresses = std::array<const void*, kScoreInputs>;

// 0: the problem has none. Throws Failure(kOutOfMemory) if a size does not fit in 64 bits.
int64_t bytes_of(const ProblemSpec& spec, ScoreInput input);

//   seqused_k, cu_seqlens   as ProblemSpec::keys_of and rows_before say
//   alibi_slopes            2^(-8 (h + 1) / nheads), head h from 0 (Press, Smith, Lewis: Train short, test long. ICLR 2022)
//   bias                    N(0, 1)
//   mask                    three of four pairs are visible, at random
//   dropout_state           the spec's seed, offset 0
//   documents               ids 0, 1, ...
//   block_table             every page once, in random order
ScorePages make_score_pages(const ProblemSpec& spec);

// Queries and keys have the same cu_seqlens and documents.
ScoreTensors score_views(const ProblemSpec& spec, const ScoreAddresses& at);
ScoreAddresses addresses_of(const ScorePages& pages);

}  // namespace fattn::measure
