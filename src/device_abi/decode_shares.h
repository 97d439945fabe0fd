// How decode shares sequences of different lengths among CTAs. Include-free: the device divides the work, tests of the host look at the rule.
//
// Time is counted in units: a step of keys is one, and a sequence begins with kDecodeStart of them, which it takes besides. All sequences of the call
// stand one behind the other, and CTA i has the units [i, i + 1) * quantum, whatever sequences they are of:
//
//   sequence 0  . s s s s s s s s s | . s s | . s s s s s s s      . start   s step      an empty sequence has a step, which reads nothing
//   CTA         0 0 0 0 1 1 1 1 2 2   2 2 3   3 3 3 4 4 4 4 5
//
// What CTAs that share a sequence find is put together; the part of CTA i of sequence b is number i + b, which no other has: one of both grows from
// part to part.
#pragma once

namespace fattn {

inline constexpr int kDecodeStart = 4;
inline constexpr int kDecodeWalkBytes = 16;  // of shared memory, for each warp: where it is on its way

constexpr int decode_steps(int keys, int block_n) { return keys > block_n ? (keys + block_n - 1) / block_n : 1; }

// Units of each CTA. At least a step for each team, so that none is there for a few keys.
constexpr int decode_quantum(int units, int ctas, int teams) {
  const int even = (units + ctas - 1) / ctas, least = kDecodeStart + teams;
  return even > least ? even : least;
}

// What a CTA has of a sequence whose first step is unit `begin`.
struct DecodeShare {
  int first, end;     // its steps
  int split, splits;  // which of the CTAs that share the sequence it is, and how many these are
};
constexpr DecodeShare decode_share(int quantum, int cta, int begin, int steps) {
  const int first_cta = begin / quantum, lower = cta * quantum - begin, upper = lower + quantum;
  return {lower > 0 ? lower : 0, upper < steps ? upper : steps, cta - first_cta, (begin + steps - 1) / quantum - first_cta + 1};
}

// Parts that a key head's rows have room for.
constexpr long long decode_parts(long long ctas, long long batch) { return ctas + batch; }

}  // namespace fattn
