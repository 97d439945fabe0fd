// What a CTA has of a sequence, and where the part goes that it finds.
#pragma once

#include "kernels/decode/place.h"
#include "kernels/decode/shares.h"

namespace fattn::decode {

// Where the parts of a row are, of which there is room for `all`, and number `part` of them.
struct PartPlace {
  long long unit;  // of (batch, key head); where sequences are shared by their lengths the key head
  int all, part;
  __device__ __forceinline__ float* sums(const DecodeWork& work, int row, int width) const {
    return work.part_o + ((unit * all + part) * work.rows + row) * width;
  }
  __device__ __forceinline__ float2* stats(const DecodeWork& work, int row) const {
    return reinterpret_cast<float2*>(work.part_stats) + (unit * work.rows + row) * all + part;
  }
};

// Steps of keys.
struct Steps {
  int first, end;
};

struct Visit {
  Place place;
  PartPlace part;
  Length length;  // of the sequence
  Steps share;    // where sequences are shared by their lengths
  bool last;      // of the CTA
};

// The only one of a CTA.
template <class Spec>
__device__ __forceinline__ Visit visit_of(const AttentionParams& p, const DecodeWork& work, const Place& place) {
  const PartPlace part{static_cast<long long>(place.batch) * p.nheads_k + place.head_k, place.splits, place.split};
  return {place, part, length_of(p, work, place.batch), {}, true};
}

// That of a CTA that is on its way.
template <class Spec>
__device__ __forceinline__ Visit visit_of(const AttentionParams& p, const DecodeWork& work, const Walk& at) {
  Place place = place_of<Spec>(p, work);
  const int cta = place.split;
  const auto [share, next, length] = share_at<Spec::kBlockN>(p, work, cta, at);
  place.batch = at.batch, place.split = share.split, place.splits = share.splits;
  const PartPlace part{place.head_k, static_cast<int>(decode_parts(work.splits, p.batch)), cta + at.batch};
  return {place, part, length, {share.first, share.end}, !next.has_share(p, cta)};
}

// Of the `steps` that the rows of the place see those that are its.
template <class Spec>
__device__ __forceinline__ Steps steps_of(const DecodeWork& work, const Visit& visit, int steps) {
  if constexpr (kShares<Spec>) return {visit.share.first, min(visit.share.end, steps)};
  const int per_split = (steps + work.splits - 1) / work.splits, first = visit.place.split * per_split;
  return {first, min(steps, first + per_split)};
}

}  // namespace fattn::decode
