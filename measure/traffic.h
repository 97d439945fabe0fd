// What an algorithm of the library moves between the memory of a GPU and its multiprocessors, counted from the algorithm and its tiles, not measured:
// so that standard attention and the versions of FlashAttention can be told apart by what they were made for. Caches serve a part of it.
#pragma once

#include <optional>
#include <string>

#include "measure/problem.h"

namespace fattn::measure {

// `algorithm`: "standard", "v1", "v2", "v3"; nothing for others, nor for problems with a window or with terms (ProblemSpec::has_terms).
//   standard  matrices of (seqlen_q, seqlen_k): forward written and read twice each, as scores and as weights; backward nine times
//   v1        forward: queries, and o in fp32 read and written, for every block of 128 keys that a tile of 16 queries meets
//   v2, v3    forward: keys and values for every tile of 128 queries
//   backward of v1, v2 and v3: queries and dout, and dq in fp32 read and written, for every block of 128 keys that a block of 64 queries meets
std::optional<double> moved_bytes(const std::string& algorithm, const ProblemSpec& spec, Pass pass);

}  // namespace fattn::measure
