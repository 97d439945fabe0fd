// Results over parts of the keys become that over all of them, and the gradients of that, for a tile of rows at a time.
#pragma once

#include <math.h>
#include <string.h>

#include "rows/cpu/elements.h"

namespace fattn::core::FATTN_ISA::rows {

using fattn::core::rows::kMostHeaddim;
using fattn::core::rows::MergeTask;
using fattn::core::rows::Row;

constexpr int kTileRows = 16;  // a multiple of all kLanes; 64 KiB of sums at most
static_assert(kTileRows % kLanes == 0);

constexpr float kMinusInfinity = -__builtin_inff();

// Rows of the tile, and of each the greatest lse and the sum of exponentials relative to that. Rows behind the last see nothing.
struct MergeTile {
  Row row[kTileRows];
  int count;
  double top[kTileRows];                   // 0 where every part has -inf
  float total[kTileRows], lse[kTileRows];  // lse: of the part that was read last, less the greatest

  void read_part(const fattn_tensor& t) {
    if (t.ndim == 0) return;  // of a sum: all weights are 1
    double whole[kTileRows];
    read_whole(t, whole);
    constexpr double kLeast = -3.4e38;  // what is as far off has a weight of 0, but is there: its NaN counts
    for (int r = 0; r < count; ++r) {
      const double away = whole[r] - top[r];
      lse[r] = static_cast<float>(away < kLeast && whole[r] != static_cast<double>(kMinusInfinity) ? kLeast : away);
    }
  }
  void read_whole(const fattn_tensor& t, double* to) const {
    const auto places = fattn::core::rows::places_of_lse(t);
    if (t.dtype == FATTN_F64)
      for (int r = 0; r < count; ++r) to[r] = static_cast<const double*>(t.data)[offset_of(places, row[r])];
    else
      for (int r = 0; r < count; ++r) to[r] = static_cast<const float*>(t.data)[offset_of(places, row[r])];
  }
  // exp(lse - top) of the vector at row r.
  F32 exponential(int r) const { return exp2(mul(load(lse + r), set1(1.44269504f))); }

  void read_rows(const MergeTask& t, int64_t first) {
    count = static_cast<int>(t.end - first < kTileRows ? t.end - first : kTileRows);
    for (int r = 0; r < count; ++r) row[r] = fattn::core::rows::row_of(t.sizes, first + r);
    const fattn_merge_problem& p = *t.problem;
    const bool sums = p.parts[0].lse.ndim == 0;
    for (int r = 0; r < kTileRows; ++r) {
      lse[r] = sums ? 0.0f : kMinusInfinity;
      top[r] = sums ? 0.0 : static_cast<double>(kMinusInfinity);
      total[r] = sums ? 1.0f : 0.0f;
    }
    if (sums) return;
    for (int i = 0; i < p.nparts; ++i) {
      double whole[kTileRows];
      read_whole(p.parts[i].lse, whole);
      for (int r = 0; r < count; ++r) top[r] = whole[r] > top[r] ? whole[r] : top[r];
    }
    for (int r = 0; r < kTileRows; ++r) top[r] = top[r] == static_cast<double>(kMinusInfinity) ? 0 : top[r];
    for (int i = 0; i < p.nparts; ++i) {
      read_part(p.parts[i].lse);
      for (int r = 0; r < kTileRows; r += kLanes) store(total + r, add(load(total + r), exponential(r)));
    }
  }
  bool empty(int r) const { return total[r] == 0; }
  bool hidden(int r) const { return lse[r] == kMinusInfinity; }
  // Shares of the part that was read last.
  void weights(float* to) const {
    for (int r = 0; r < kTileRows; r += kLanes) {
      const F32 sums = load(total + r);
      store(to + r, div(exponential(r), where_equal(sums, zero(), set1(1.0f), sums)));
    }
  }
};

static void merge_rows(const MergeTask& t) {
  const fattn_merge_problem& p = *t.problem;
  const int n = t.sizes.headdim;
  MergeTile tile;
  float weight[kTileRows];
  float sums[kTileRows * kMostHeaddim];
  for (int64_t first = t.begin; first < t.end; first += kTileRows) {
    tile.read_rows(t, first);
    memset(sums, 0, static_cast<size_t>(tile.count * n) * sizeof(float));
    for (int i = 0; i < p.nparts; ++i) {
      const fattn_tensor& o = p.parts[i].o;
      const auto places = fattn::core::rows::places_of_rows(o);
      tile.read_part(p.parts[i].lse);
      tile.weights(weight);
      for (int r = 0; r < tile.count; ++r)
        if (!tile.hidden(r))
          with_elements(o.data, o.dtype, offset_of(places, tile.row[r]), [&](auto* x) { add_weighted(x, weight[r], n, sums + r * n); });
    }
    const auto places = fattn::core::rows::places_of_rows(p.o);
    for (int r = 0; r < tile.count; ++r)
      with_elements(p.o.data, p.o.dtype, offset_of(places, tile.row[r]), [&](auto* o) { narrow(sums + r * n, 1.0f, n, o); });
    if (p.lse.ndim == 0) continue;
    const auto lse_places = fattn::core::rows::places_of_lse(p.lse);
    for (int r = 0; r < tile.count; ++r) {
      const int64_t at = offset_of(lse_places, tile.row[r]);
      const double lse = tile.empty(r) ? static_cast<double>(kMinusInfinity) : tile.top[r] + static_cast<double>(logf(tile.total[r]));
      if (p.lse.dtype == FATTN_F64)
        static_cast<double*>(p.lse.data)[at] = lse;
      else
        static_cast<float*>(p.lse.data)[at] = static_cast<float>(lse);
    }
  }
}

// dout and o_i of the rows of the tile, for the part that was read last.
static float dot_with_part(const MergeTile& tile, int r, const fattn_tensor& o, const float* dout, int n) {
  float dot = 0;
  with_elements(static_cast<const void*>(o.data), o.dtype, offset_of(fattn::core::rows::places_of_rows(o), tile.row[r]),
                [&](auto* x) { dot = dot_of(x, dout, n); });
  return dot;
}

// The gradient of lse_i is weight_i (dlse + dout o_i - sum(weight_j dout o_j)): of o that is the sum, unrounded.
static void merge_backward_rows(const MergeTask& t) {
  const fattn_merge_problem& p = *t.problem;
  const int n = t.sizes.headdim;
  MergeTile tile;
  float weight[kTileRows], mean[kTileRows];
  float dout[kTileRows * kMostHeaddim];
  bool want_dlse = false;
  for (int i = 0; i < p.nparts; ++i) want_dlse = want_dlse || p.parts[i].dlse.ndim > 0;
  for (int64_t first = t.begin; first < t.end; first += kTileRows) {
    tile.read_rows(t, first);
    for (int r = 0; r < tile.count; ++r) {
      with_elements(static_cast<const void*>(p.dout.data), p.dout.dtype, offset_of(fattn::core::rows::places_of_rows(p.dout), tile.row[r]),
                    [&](auto* x) { widen(x, n, dout + r * n); });
      mean[r] = 0;
    }
    for (int i = 0; want_dlse && i < p.nparts; ++i) {
      tile.read_part(p.parts[i].lse);
      tile.weights(weight);
      for (int r = 0; r < tile.count; ++r)
        if (!tile.hidden(r)) mean[r] += weight[r] * dot_with_part(tile, r, p.parts[i].o, dout + r * n, n);
    }
    for (int i = 0; i < p.nparts; ++i) {
      const fattn_merge_part& part = p.parts[i];
      tile.read_part(part.lse);
      tile.weights(weight);
      for (int r = 0; r < tile.count; ++r) {
        const bool hidden = tile.hidden(r);
        if (part.dout.ndim > 0)
          with_elements(part.dout.data, part.dout.dtype, offset_of(fattn::core::rows::places_of_rows(part.dout), tile.row[r]), [&](auto* to) {
            if (hidden)
              memset(to, 0, static_cast<size_t>(n) * sizeof *to);
            else
              narrow(dout + r * n, weight[r], n, to);
          });
        if (part.dlse.ndim == 0) continue;
        float dlse = 0;
        if (!hidden) {
          if (p.dlse.ndim > 0) dlse = static_cast<const float*>(p.dlse.data)[offset_of(fattn::core::rows::places_of_lse(p.dlse), tile.row[r])];
          dlse = weight[r] * (dlse + (dot_with_part(tile, r, part.o, dout + r * n, n) - mean[r]));
        }
        static_cast<float*>(part.dlse.data)[offset_of(fattn::core::rows::places_of_lse(part.dlse), tile.row[r])] = dlse;
      }
    }
  }
}

}  // namespace fattn::core::FATTN_ISA::rows
