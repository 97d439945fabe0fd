// Attention forward for few queries and many keys: a CTA holds the queries of a key head and streams a share of its keys and values, as fast as
// memory gives them. Shares of one sequence are put together by combine.h. shape.h says how the work is divided in a CTA. Level 80.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/decode_work.h"
#include "kernels/decode/merge.h"
#include "kernels/decode/place.h"
#include "kernels/decode/shape.h"
#include "kernels/decode/step.h"
#include "kernels/decode/visit.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v2/nonfinite.h"
#include "kernels/v2/seen_nonfinite.h"

namespace fattn::decode {

// Copies the queries to shared memory, zeros where there are none. A scale that is negative or 0 goes into them, so that the maximum of the scores
// is that of the logits.
template <class Spec>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const Place& place, unsigned tile_q) {
  using TileQ = typename Shape<Spec>::TileQ;
  const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
  const unsigned factor = ptx::pack2<typename Spec::Element>(sign, sign);
#pragma unroll 2
  for (int index = static_cast<int>(threadIdx.x); index < TileQ::kRows * TileQ::kUnits; index += Shape<Spec>::kThreads) {
    const int row = index / TileQ::kUnits, unit = index % TileQ::kUnits;
    uint4 x{0, 0, 0, 0};
    if (row < place.rows && unit * 8 < Spec::kHeaddim) {
      const auto* from =
          static_cast<const unsigned short*>(p.q) + row_offset(p, p.q_strides, place.batch, place.head_k, place.first_row + row) + unit * 8;
      x = *reinterpret_cast<const uint4*>(from);
      if (sign != 1.0f) {
        const auto scale = [=](unsigned pair) { return ptx::fma2<typename Spec::Element>(pair, factor, 0x80008000u); };  // + -0 keeps the sign of 0
        x = uint4{scale(x.x), scale(x.y), scale(x.z), scale(x.w)};
      }
    }
    ptx::st_shared_16(tile_q + TileQ::offset(row, unit), x);
  }
}

// Writes the warp's sums to its team's part.
template <class Spec>
__device__ __forceinline__ void store_part(WarpState<Spec>& w, unsigned part, unsigned stats, int first_row, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < Spec::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.softmax.sum[i][half];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      const int row = first_row + i * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      const unsigned to = part + static_cast<unsigned>(row * Shape<Spec>::kPartPitch + lane % 4 * 8);
#pragma unroll
      for (int n = 0; n < 2 * Shape<Spec>::kDepthO; ++n) ptx::st_shared_f32x2(to + 32 * n, w.o[i][n][2 * half], w.o[i][n][2 * half + 1]);
      if (lane % 4 == 0) ptx::st_shared_f32x2(stats + 8 * row, w.softmax.shift[i][half], sum);
    }
  }
}

// Adds up the teams' parts, and writes the rows, or this split's part of them.
template <class Spec>
__device__ __forceinline__ void finish(const AttentionParams& p, const DecodeWork& work, const Visit& visit, unsigned parts, unsigned stats,
                                       bool valid) {
  const Place& place = visit.place;
  const PartPlace& at = visit.part;
  using S = Shape<Spec>;
  constexpr int kFours = Spec::kHeaddimV / 4;
  if constexpr (kShares<Spec>) {  // said once
    if (threadIdx.x == 0 && place.split == 0 && place.head_k == 0 && place.first_row == 0 && work.parts != nullptr)
      work.parts[place.batch] = DecodeParts{at.part, place.splits};
  }
  for (int index = static_cast<int>(threadIdx.x); index < place.rows * kFours; index += S::kThreads) {
    const int row = index / kFours, column = index % kFours * 4;
    float shift = kInfinity, sum = valid ? 0 : kNan, o[4] = {0, 0, 0, 0};
#pragma unroll
    for (int team = 0; team < Spec::kTeams; ++team) shift = fminf(shift, ptx::ld_shared_f32(stats + team * S::kStatsBytes + 8 * row));
#pragma unroll
    for (int team = 0; team < Spec::kTeams; ++team) {
      const float2 its = ptx::ld_shared_f32x2(stats + team * S::kStatsBytes + 8 * row);
      const uint4 x = ptx::ld_shared_16(parts + static_cast<unsigned>(team * S::kPartBytes + row * S::kPartPitch + column * 4));
      const float factor = factor_of(its.x, shift);
      sum = fmaf(its.y, factor, sum);
      o[0] = fmaf(__uint_as_float(x.x), factor, o[0]);
      o[1] = fmaf(__uint_as_float(x.y), factor, o[1]);
      o[2] = fmaf(__uint_as_float(x.z), factor, o[2]);
      o[3] = fmaf(__uint_as_float(x.w), factor, o[3]);
    }
    const int in_head = place.first_row + row;
    if (place.splits > 1) {
      *reinterpret_cast<float4*>(at.sums(work, in_head, Spec::kHeaddimV) + column) = float4{o[0], o[1], o[2], o[3]};
      if (column == 0) *at.stats(work, in_head) = float2{shift, sum};
    } else {
      store_row<Spec>(p, work, place.batch, place.head_k, in_head, column, o, shift, sum);
    }
  }
}

// Attention over a share of a sequence. `where` tells which, and is asked again in the end, so that nothing of it need be kept.
template <class Spec, class PagesOf, class Where>
__device__ __forceinline__ void attend(const AttentionParams& p, const DecodeWork& work, [[maybe_unused]] const PagesOf& pages, const Where& where) {
  constexpr bool kPaged = !is_same<PagesOf, NoPages>;
  // Numbers of pages are asked for before the steps that are loaded first, and later while the step before is loaded, so that copies wait for none:
  // not where a warp has two tiles of rows, which leave no registers.
  constexpr bool kLooksAhead = kPaged && Spec::kRowTiles == 1;
  using S = Shape<Spec>;
  using TileK = typename S::TileK;
  using TileV = typename S::TileV;
  static_assert(!kLooksAhead || (Spec::kBlockN <= 32 && S::CopyK::kUnitsInAll % 32 == 0 && S::CopyV::kUnitsInAll % 32 == 0),
                "a key a lane, and all lanes ask for places");
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tile_q = ptx::shared_address(shared);
  const unsigned rings = tile_q + S::TileQ::kBytes;
  const auto [warp, lane] = ptx::thread_place();
  const int team = warp / Spec::kRowWarps, warp_row = warp % Spec::kRowWarps * S::kWarpRows;
  const auto team_sync = [&] {
    if constexpr (Spec::kRowWarps == 1)
      ptx::warp_sync();
    else
      ptx::bar_sync(1 + team, S::kTeamThreads);
  };

  // Steps [first, end) of the sequence are this split's, end - 1 - team and each kTeams-th before it this team's.
  const Visit visit = where();
  const Place& place = visit.place;
  const Length& length = visit.length;
  const core::Mask32 mask{p.seqlen_q, length.keys, work.causal != 0};
  const int first_end = mask.visible_end(place.first_row / p.group);
  const int last_end = mask.visible_end((place.first_row + place.rows - 1) / p.group);
  const int steps = (last_end + Spec::kBlockN - 1) / Spec::kBlockN;
  const auto [first, end] = steps_of<Spec>(work, visit, steps);

  const auto* k = static_cast<const unsigned short*>(p.k) + place.batch * p.k_strides.batch + place.head_k * p.k_strides.head;
  const auto* v = static_cast<const unsigned short*>(p.v) + place.batch * p.v_strides.batch + place.head_k * p.v_strides.head;
  const unsigned ring = rings + static_cast<unsigned>(team) * S::kRingBytes;
  // Of a step's keys lane i has the place of key i.
  const auto look_up = [&](int at) {
    EntryPages::Row found{0, 0};
    if constexpr (kLooksAhead) {
      const int key = at * Spec::kBlockN;
      found = EntryPages(pages, place.batch)(key + min(lane % Spec::kBlockN, last_end - key - 1));
    }
    return found;
  };
  const auto load = [&](int at, unsigned stage, [[maybe_unused]] const EntryPages::Row& of_lane) {
    const int key = at * Spec::kBlockN, keys = last_end - key;
    if constexpr (kPaged) {
      const EntryPages of_entry(pages, place.batch);
      const auto row_of = [&](const unsigned short* first, int row, long long page_stride, long long row_stride) {
        EntryPages::Row found;
        if constexpr (kLooksAhead) {
          const auto of_row = [row](int x) { return static_cast<int>(ptx::shfl(static_cast<unsigned>(x), row)); };
          found = {of_row(of_lane.page), of_row(of_lane.row)};
        } else {
          found = of_entry(key + row);
        }
        return of_entry.has(found.page) ? first + found.offset(page_stride, row_stride) : nullptr;
      };
      const auto row_k = [&](int row) { return row_of(k, row, pages.k_stride, p.k_strides.row); };
      const auto row_v = [&](int row) { return row_of(v, row, pages.v_stride, p.v_strides.row); };
      S::CopyK::template copy_rows<true, true>(stage, keys, row_k);
      S::CopyV::template copy_rows<true, true>(stage + TileK::kBytes, keys, row_v);
    } else {
      const auto* from_k = k + key * p.k_strides.row;
      const auto* from_v = v + key * p.v_strides.row;
      if (keys >= Spec::kBlockN) {
        S::CopyK::template copy<false>(stage, from_k, p.k_strides.row, keys);
        S::CopyV::template copy<false>(stage + TileK::kBytes, from_v, p.v_strides.row, keys);
      } else {
        S::CopyK::template copy<true>(stage, from_k, p.k_strides.row, keys);
        S::CopyV::template copy<true>(stage + TileK::kBytes, from_v, p.v_strides.row, keys);
      }
    }
  };

  constexpr int kAhead = Spec::kStages * Spec::kTeams;  // a step is loaded as many before it is computed
  EntryPages::Row places[kLooksAhead ? Spec::kStages + 1 : 1] = {};
  if constexpr (kLooksAhead) {
#pragma unroll
    for (int i = 0; i <= Spec::kStages; ++i)
      if (const int at = end - 1 - team - i * Spec::kTeams; at >= first) places[i] = look_up(at);
  }
  EntryPages::Row& next = places[kLooksAhead ? Spec::kStages : 0];
  unsigned stage = ring;
#pragma unroll(kLooksAhead ? Spec::kStages : 1)
  for (int i = 0; i < Spec::kStages; ++i) {
    const int at = end - 1 - team - i * Spec::kTeams;
    if (at >= first) load(at, stage, places[kLooksAhead ? i : 0]);
    ptx::cp_async_commit();
    stage = ptx::opaque(stage + S::kStageBytes);
  }
  load_queries<Spec>(p, place, tile_q);
  __syncthreads();
  [[maybe_unused]] bool good = length.valid;
  if constexpr (kPaged) {  // of all numbers of pages each split looks at its share, whether it reads by them or not
    const EntryPages of_entry(pages, place.batch);
    const int columns = of_entry.columns_of(length.keys), share = (columns + place.splits - 1) / place.splits;
    good = good && of_entry.are_pages(place.split * share, min(columns, (place.split + 1) * share), static_cast<int>(threadIdx.x), S::kThreads);
  }

  WarpState<Spec> w;
  w.start(tile::fragment_address<typename S::TileQ>(tile_q, warp_row, lane), p.softmax_scale_log2);
  const unsigned lane_k = tile::fragment_address_n<TileK>(0, 0, lane), lane_v = tile::fragment_address<TileV>(TileK::kBytes, 0, lane);
  int row_end[Spec::kRowTiles][2];
#pragma unroll
  for (int i = 0; i < Spec::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(warp_row + i * 16 + half * 8 + lane / 4, place.rows - 1);
      row_end[i][half] = mask.visible_end((place.first_row + row) / p.group);
    }
  }

  stage = ring;
#pragma unroll 1
  for (int at = end - 1 - team; at >= first; at -= Spec::kTeams) {
    ptx::cp_async_wait<Spec::kStages - 1>();
    team_sync();
    const int key = at * Spec::kBlockN;
    const auto visible_from = [&](int column) {
      VisibleKeys<Spec::kRowTiles, false> visible;
#pragma unroll
      for (int i = 0; i < Spec::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) visible.end[i][half] = row_end[i][half] - key - column;
      }
      return visible;
    };
    // Hidden keys have weight 0, but 0 * inf is NaN: what is not finite in v goes to the rows that see it, and is cleared.
    const unsigned tile_v = stage + TileK::kBytes;
    const bool hides = key + Spec::kBlockN > first_end && first_end != last_end;  // of all: the team is of one mind
    if (hides && !ptx::vote_all(!v2::share_nonfinite<typename Spec::Element>(tile_v, TileV::kBytes, lane, 32))) [[unlikely]] {
      const VisibleKeys<Spec::kRowTiles, false> visible = visible_from(lane % 4 * 2);
      const auto sees = [&](float(&term)[2][4], int i, int chunk) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) term[n][e] = visible(i, e / 2, 2 * chunk + n, e % 2) ? 0.0f : -kInfinity;
        }
      };
      v2::add_seen_nonfinite<TileV, typename Spec::Element, 80>(w.o, tile_v, stage + lane_v, sees);
      team_sync();
      v2::clear_copied_nonfinite<typename S::CopyV, TileV, typename Spec::Element>(tile_v);
      team_sync();
    }
    step<Spec>(w, stage + lane_k, stage + lane_v, visible_from(lane % 4 * 2));
    team_sync();
    if (at - kAhead >= first) load(at - kAhead, stage, next);
    if constexpr (kLooksAhead) {
      if (const int behind = at - kAhead - Spec::kTeams; behind >= first) next = look_up(behind);
    }
    ptx::cp_async_commit();
    stage = stage + S::kStageBytes == ring + S::kRingBytes ? ring : stage + S::kStageBytes;
  }

  const Visit found = where();
  if constexpr (Spec::kDependent) {
    if (found.last) ptx::let_kernel_after_come_up();
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  const unsigned parts = tile_q, stats = parts + Spec::kTeams * S::kPartBytes;
  ptx::ThreadPlace thread{warp, lane};
  if constexpr (kShares<Spec>) thread = ptx::thread_place();  // the steps have no registers to keep it in
  const int its_team = thread.warp / Spec::kRowWarps, its_row = thread.warp % Spec::kRowWarps * S::kWarpRows;
  store_part<Spec>(w, parts + static_cast<unsigned>(its_team) * S::kPartBytes, stats + static_cast<unsigned>(its_team) * S::kStatsBytes, its_row,
                   found.place.rows, thread.lane);
  if constexpr (kPaged) {
    finish<Spec>(p, work, found, parts, stats, __syncthreads_and(good) != 0);
  } else {
    __syncthreads();
    finish<Spec>(p, work, found, parts, stats, found.length.valid);
  }
}

// `pages`: NoPages or, of specialisations that have them, Pages.
template <class Spec, class PagesOf = NoPages>
__device__ __forceinline__ void forward(const AttentionParams& p, const DecodeWork& work, const PagesOf& pages = {}) {
  const Place place = place_of<Spec>(p, work);
  if constexpr (Spec::kDependent) ptx::wait_for_kernel_before();  // whatever it was: it may have written what is read here
  if constexpr (kShares<Spec>) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // Found again each time, so that nothing but the shared memory keeps it.
    const auto kept = [] {
      return ptx::shared_address(shared) + Shape<Spec>::kWalksAt + static_cast<unsigned>(ptx::thread_place().warp) * kDecodeWalkBytes;
    };
    const auto walk = [kept] {
      const uint4 x = ptx::ld_shared_16(kept());
      return Walk{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z)};
    };
    Walk now = first_of<Spec::kBlockN, Spec::kTeams>(p, work, place.split, ptx::thread_place().lane);
#pragma unroll 1
    while (now.has_share(p, place_of<Spec>(p, work).split)) {
      const unsigned to = kept();  // of all lanes: it is a shuffle
      if (ptx::thread_place().lane == 0)
        ptx::st_shared_16(to, uint4{static_cast<unsigned>(now.batch), static_cast<unsigned>(now.begin), static_cast<unsigned>(now.quantum), 0});
      ptx::warp_sync();
      attend<Spec>(p, work, pages, [&] { return visit_of<Spec>(p, work, walk()); });
      now = share_at<Spec::kBlockN>(p, work, place_of<Spec>(p, work).split, walk()).next;
      __syncthreads();  // the teams' sums were where the next queries and keys go
    }
  } else {
    const Visit only = visit_of<Spec>(p, work, place);
    attend<Spec>(p, work, pages, [&] { return only; });
  }
}

}  // namespace fattn::decode
