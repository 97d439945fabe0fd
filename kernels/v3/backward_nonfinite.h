// Inf and NaN of q and dout in dk and dv of the v3 backward kernel. A tile that meets some was multiplied without them (v3/backward_careful.h); when
// it is done, blocks that have some are read again, and elements that see one become NaN: one product for each block, however many there are.
//
// The operands are made in registers: a lane reads several columns of a row at once, which go to as many products side by side. So of 64 columns
// (8 at once) product e has columns e, e + 8, ...
#pragma once

#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_careful.h"
#include "kernels/v3/backward_documents.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_terms.h"
#include "kernels/v3/backward_watch.h"

namespace fattn::v3 {

// Row `in_tile` of a tile in shared memory, swizzled.
template <class Tile>
__device__ __forceinline__ unsigned element_place(unsigned tile, int in_tile, int column) {
  return tile + static_cast<unsigned>(column / 64 * Tile::kColumnBytes + in_tile * 128 + (((column / 8 % 8) ^ (in_tile % 8)) * 16) + column % 8 * 2);
}

// One of a block's operands: its 64 rows from `first` on, of which `rows` are in memory.
struct BlockRows {
  const unsigned short* first;
  long long stride;
  int rows, columns;

  template <class Element>
  __device__ __forceinline__ uint4 marks(int row, int column) const {
    if (row >= rows || column >= columns) return {0, 0, 0, 0};
    const uint4 x = *reinterpret_cast<const uint4*>(first + row * stride + column);
    return {marks_of_nonfinite<Element>(x.x), marks_of_nonfinite<Element>(x.y), marks_of_nonfinite<Element>(x.z), marks_of_nonfinite<Element>(x.w)};
  }
};

// is_dk: of dk, else of dv; the warp's 16 keys are rows of a tile in shared memory from `in_tile` on, and the warpgroup's 64 begin with `key`.
template <class Spec>
struct NonfiniteSums {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Shape = BackwardShape<Spec>;
  static constexpr int kAtOnce = 8, kColumns = 8 * kAtOnce;  // by a lane, by a warp

  const BackwardCall& p;
  const TilePlace tile;
  const bool is_dk;

  __device__ __forceinline__ BlockRows rows_of_block(int head, int row) const {
    const TensorStrides& s = is_dk ? p.call.q_strides : p.call.dout_strides;
    const auto entry = tile.template entry<Shape::kPacked>();
    const auto* const first = static_cast<const unsigned short*>(is_dk ? p.call.q : p.call.dout) + entry.in_tensor() * s.batch + head * s.head;
    return {first + (entry.first_query() + row) * s.row, s.row, entry.queries_behind(p.call) - row, is_dk ? p.work.columns : p.work.columns_v};
  }
  // kHiddenWeight for hidden pairs, 1 for the others.
  __device__ __forceinline__ void weigh(float (&s)[32], int head, int row, int key) const {
    const auto keys = tile.template keys<Shape::kLengths, Shape::kPacked>();
#pragma unroll
    for (float& x : s) x = 1;
    if constexpr (Shape::kDocuments) {
      hide<typename Mask::Pairs>(s, p, keys, key, row);
      hide_other_documents<Spec>(s, p, tile.template entry<Shape::kPacked>(), key, row);
    } else {
      hide<Mask>(s, p, keys, key, row);
    }
    if constexpr (Shape::kMask) {
      MaskWord<Spec, true> mask;
      mask.read(p, tile.batch(), head, row, key);
      mask.hide(s);
    }
    if constexpr (Shape::kBias != 0) hide_infinite_biases<Spec>(s, p, tile, head, row, key);
    const float* const lse = p.work.lse_log2 + first_workspace_row(p, tile.template entry<Shape::kPacked>(), head) + row + own_lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (lse[i / 4 * 8 + i % 2] == kInfinity) s[i] = kHiddenWeight;  // a row without a gradient
  }
  // Adds up what the keys see of kColumns columns of a block.
  __device__ __forceinline__ void add(float (&sum)[kAtOnce][4], const float (&s)[32], const BlockRows& rows, int first_column) const {
    const int lane = static_cast<int>(own_lane()), column = first_column + lane / 4 * kAtOnce;
    ptx::warp_sync();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = s[8 * step + 2 * i], high = s[8 * step + 2 * i + 1];
        a[i] = ptx::pack2<bf16>(low > 0 ? 0x1p127f : 0.0f, high > 0 ? 0x1p127f : 0.0f);
      }
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * step + lane % 4 * 2 + i / 2 * 8 + i % 2;
        x[i] = rows.template marks<Element>(row, column);
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        const auto word = [&](const uint4& of) { return e / 2 == 0 ? of.x : e / 2 == 1 ? of.y : e / 2 == 2 ? of.z : of.w; };
        const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
        ptx::mma_m16n8k16_bf16(sum[e], a, __byte_perm(word(x[0]), word(x[1]), halves), __byte_perm(word(x[2]), word(x[3]), halves));
      }
    }
  }
  // All of the warp together.
  __device__ __forceinline__ void take(unsigned in_shared, int in_tile, int key) const {
    const Watch<Spec> watch{tile};
    ptx::wait_for_kernel_before();  // which wrote the flags
    ptx::warp_sync();
    const int blocks = tile.blocks(), lane = static_cast<int>(own_lane());
#pragma unroll 1
    for (int first_column = 0; first_column < 64 * (is_dk ? Shape::TileK::kColumns : Shape::TileV::kColumns); first_column += kColumns) {
      float sum[kAtOnce][4] = {};
#pragma unroll 1
      for (int i = 0; i < blocks * p.call.group; ++i) {
        const int head = i / blocks, row = tile.first_row() + (i - head * blocks) * Shape::kBlockM, of_group = tile.head_k() * p.call.group;
        if ((watch.block_flags(p, head, i - head * blocks) & (is_dk ? kQueriesNonfinite : kDoutNonfinite)) == 0) continue;
        float s[32];
        weigh(s, of_group + head, row, key);
        add(sum, s, rows_of_block(of_group + head, row), first_column);
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = first_column + (lane % 4 * 2 + i % 2) * kAtOnce + e;
          if (sum[e][i] != 0) ptx::st_shared_2(element_place<typename Shape::TileK>(in_shared, in_tile + lane / 4 + i / 2 * 8, column), 0x7fff);
        }
    }
    ptx::warp_sync();
  }
};

}  // namespace fattn::v3
