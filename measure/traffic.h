// What an algorithm of the library moves between memory and what computes, counted from the algorithm and its tiles, not measured: so that standard
// attention and the versions of FlashAttention can be told apart by what they were made for. Caches serve a part of it: on a GPU those between memory
// and multiprocessors, on the CPU the last-level cache.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "measure/problem.h"

namespace fattn::measure {

// One thing that is moved.
struct MovedTerm {
  std::string what;        // "k and v read by every tile of 128 queries"
  std::string arithmetic;  // "96 heads * 136 blocks * 128 * 256 bytes": its product is `bytes`
  double bytes = 0;
  // Of that what has to come from or go to memory however large the caches are: each input and output once. Over all terms the compulsory traffic.
  double once = 0;
  // What one head (of queries, if not said otherwise) touches before it touches the same bytes again: a cache that holds it for all heads at work
  // serves all but `once`. 0: nothing is touched again.
  double reused_of_head = 0;
  bool all_heads = false;     // every head is touched before the first is again
  double dram_of_missed = 1;  // bytes at DRAM for each that a cache does not hold: 2 where it is added to, as its line comes and goes
};

// What a CTA of a GPU's plan takes at a time: queries and keys, forward and backward. These are the usual ones; lab::cuda_tiles reads a plan's own.
struct CudaTiles {
  int64_t forward_rows = 128, forward_keys = 128;
  int64_t backward_rows = 64, backward_keys = 128;
  friend bool operator==(const CudaTiles&, const CudaTiles&) = default;
};

// `algorithm`: "standard", "v1", "v2", "v3"; nothing for others, nor for problems with a window or with terms (ProblemSpec::has_terms).
//   standard  matrices of (seqlen_q, seqlen_k): forward written and read twice each, as scores and as weights; backward nine times. Products read
//             their factors for every tile: of 256 x 128 scores, of 256 rows of an output, as cuBLASLt cuts them on Hopper
//   v1        forward: queries, and o in fp32 read and written, for every block of 128 keys that a tile of 16 queries meets
//   v2, v3    forward: keys and values for every tile of queries
//   backward  queries and dout for every block of keys that a block of queries meets; dq in fp32 by v1 read and written, by v2 and v3 added to in L2
std::optional<double> moved_bytes(const std::string& algorithm, const ProblemSpec& spec, Pass pass, const CudaTiles& tiles = {});
// Its parts; of forward and backward together those of both.
std::optional<std::vector<MovedTerm>> moved_terms(const std::string& algorithm, const ProblemSpec& spec, Pass pass, const CudaTiles& tiles = {});

// The same on the CPU, between a core with its L1 and L2 cache and the rest, for backend cpu and algorithms v1 and v2; nothing for others, whose
// blocking is OpenBLAS's in part. `isa`: of the plan. What a task reads again is in its L2 cache, which tasks are made for:
//   forward   q read and o and lse written once; keys and values that a task of up to 256 queries (AMX in bf16: 512) sees, once for each task
//   decode    (up to 8 queries) keys and values once for all heads that share them; q once, and the partial results written and read, for each chunk
//   backward  keys and values read and dk and dv written once; for each super-block of keys the q, dout, lse and delta of the rows that see it, and
//             their dq read and written in fp32; o, dout and dq once more before, in 16 bits dq once more behind
//   v1        forward: keys and values once; for each block of keys the q of the rows that see it, in whole blocks, and their o, m and l in fp32 read
//             and written; these set before, and behind lse made of m and l, in 16 bits o rounded. Backward: keys, values, dk and dv once; for each
//             block of keys q, o, dout and lse of the rows that see it, and their dq in fp32 read and written; dq set to 0 before, in 16 bits rounded
//             behind
// Queries, keys and tasks are those of src/plan/plan.cpp.
std::optional<double> moved_bytes_cpu(const std::string& algorithm, Isa isa, const ProblemSpec& spec, Pass pass);
std::optional<std::vector<MovedTerm>> moved_terms_cpu(const std::string& algorithm, Isa isa, const ProblemSpec& spec, Pass pass);

}  // namespace fattn::measure
