// The way of a CTA through sequences of different lengths (device_abi/decode_shares.h): where it begins follows from the lengths of all, which each
// warp adds up by itself.
#pragma once

#include "device_abi/decode_shares.h"
#include "kernels/decode/length.h"
#include "kernels/ptx/warp.h"

namespace fattn::decode {

template <int kBlockN>
__device__ __forceinline__ int steps_of(const AttentionParams& p, const DecodeWork& work, int batch) {
  return decode_steps(length_of(p, work, batch).keys, kBlockN);
}

// Units of a CTA.
template <int kBlockN, int kTeams>
__device__ __forceinline__ int quantum_of(const AttentionParams& p, const DecodeWork& work, int lane) {
  int units = 0;
#pragma unroll 4
  for (int batch = lane; batch < p.batch; batch += 32) units += kDecodeStart + steps_of<kBlockN>(p, work, batch);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) units += static_cast<int>(ptx::shfl_xor(static_cast<unsigned>(units), mask));
  return decode_quantum(units, work.splits, kTeams);
}

// Where a CTA is on its way.
struct Walk {
  int batch;  // the sequence
  int begin;  // the unit that is its first step
  int quantum;

  __device__ __forceinline__ bool has_share(const AttentionParams& p, int cta) const { return batch < p.batch && begin < (cta + 1) * quantum; }
};

// The first sequence with a step behind `unit`; batch p.batch: there is none.
template <int kBlockN>
__device__ __forceinline__ Walk walk_from(const AttentionParams& p, const DecodeWork& work, int unit, int quantum, int lane) {
  int before = 0;  // units of the sequences that were looked at
#pragma unroll 1
  for (int from = 0; from < p.batch; from += 32) {
    const int steps = from + lane < p.batch ? steps_of<kBlockN>(p, work, from + lane) : -kDecodeStart;
    int end = kDecodeStart + steps;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = ptx::shfl(static_cast<unsigned>(end), (lane - distance) & 31);
      if (lane >= distance) end += static_cast<int>(other);
    }
    end += before;
    if (const unsigned behind = ptx::ballot(end > unit); behind != 0) {
      const int first = __ffs(static_cast<int>(behind)) - 1;
      return {from + first, static_cast<int>(ptx::shfl(static_cast<unsigned>(end - steps), first)), quantum};
    }
    before = static_cast<int>(ptx::shfl(static_cast<unsigned>(end), 31));
  }
  return {p.batch, before, quantum};
}

// The first share of a CTA. All lanes of a warp.
template <int kBlockN, int kTeams>
__device__ __forceinline__ Walk first_of(const AttentionParams& p, const DecodeWork& work, int cta, int lane) {
  const int quantum = quantum_of<kBlockN, kTeams>(p, work, lane);
  return walk_from<kBlockN>(p, work, cta * quantum, quantum, lane);
}

// The share that the walk is at, and the walk behind it.
struct WalkedShare {
  DecodeShare share;
  Walk next;
  Length length;  // of the sequence
};
template <int kBlockN>
__device__ __forceinline__ WalkedShare share_at(const AttentionParams& p, const DecodeWork& work, int cta, const Walk& at) {
  const Length length = length_of(p, work, at.batch);
  const int steps = decode_steps(length.keys, kBlockN);
  return {decode_share(at.quantum, cta, at.begin, steps), {at.batch + 1, at.begin + steps + kDecodeStart, at.quantum}, length};
}

}  // namespace fattn::decode
