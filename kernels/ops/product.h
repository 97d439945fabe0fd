// y = activation(norm(x) weight^T + bias) of few rows: the time is that of reading the weight. A warp has 8 outputs and a share of the inputs; it
// asks for its weights, 16 bytes a lane, before it waits for the kernel before, which does not write them. Lanes 4 o .. 4 o + 3 have neighbouring
// inputs of output o, which is how m16n8k16 wants its second operand if the inputs are numbered anew; x is numbered likewise. Rows beyond those of a
// CTA are those of others, along y of the grid.
//
// Spec: Element, kIn, kRows (of a CTA: 8, 16 or 32; fp32: 1, 4, 8 or 16), kWarps, kShares (warps that share outputs), kHeld (loads of a lane that
// registers hold), kCtas (of a multiprocessor, which registers are enough for; 0: as many as they are), kNorm, kActivation, kY (what y is),
// kKeysValues, kSeveral (a CTA has more than one tile of outputs), kDependent.
#pragma once

#include "kernels/ops/activation.h"
#include "kernels/ops/norm.h"
#include "kernels/ptx/mma.h"

namespace fattn::ops {

enum class Y { kElement, kSingle, kAdded };  // in the dtype of x, in fp32, added to what is there in fp32

template <class Spec>
struct ProductShape {
  using Element = typename Spec::Element;
  static constexpr bool kSingle = is_same<Element, float>;
  static constexpr int kBytes = sizeof(Bits<Element>);
  static constexpr int kWarps = Spec::kWarps, kThreads = 32 * kWarps, kTiles = kWarps / Spec::kShares;  // tiles of 8 outputs side by side
  static constexpr int kUnit = 16 / kBytes, kChunk = 4 * kUnit;                                         // inputs of a lane's load, of a warp's
  static constexpr int kStride = (Spec::kIn + 31) / 32 * 32, kChunks = kStride / kChunk;
  static constexpr int kLoads = (kChunks + Spec::kShares - 1) / Spec::kShares;  // of a lane, for one tile
  // In stages of as many as registers hold, twice where the next ones are under way meanwhile.
  static constexpr int kStages = (kLoads + Spec::kHeld - 1) / Spec::kHeld, kHeld = (kLoads + kStages - 1) / kStages;
  static constexpr int kRowBytes = kStride * kBytes + (kSingle ? 0 : 64);  // rows of x in shared memory; not on the same banks
  static constexpr int kPart = 8 * Spec::kRows;                            // sums of a warp
  // LayerNorm's weights are read ahead where registers hold them beside x and the weight.
  static constexpr int kRegisters = 2048 / ((kWarps + 1) / 2 * 2 * (Spec::kCtas > 0 ? Spec::kCtas : 1));
  static constexpr bool kNormEarly = !Spec::kSeveral && 4 * kHeld + 8 * ((Spec::kIn + 127) / 128) <= kRegisters - 44;
};

// 16 bytes that nobody reads again, and not later than here.
__device__ __forceinline__ uint4 load_weight(const void* p) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p));
  return d;
}

template <class Spec>
class Product {
  using Shape = ProductShape<Spec>;
  using Element = typename Spec::Element;
  // The two steps of 16 inputs that a load has are summed apart, where registers suffice: neither waits for the other.
  static constexpr int kHeld = Shape::kHeld, kRowTiles = (Spec::kRows + 15) / 16, kSets = Spec::kDependent ? 2 : 1;
  static constexpr int kSums = Shape::kSingle ? Spec::kRows : kRowTiles * kSets * 4;

  const ProductParams& p_;
  const int warp_, lane_, share_, side_;  // side_: which of the CTA's tiles
  const int first_, rows_;                // rows of the CTA
  unsigned char* const x_;                // rows in shared memory
  float* const parts_;

  __device__ int first_output(int tile) const { return (tile * Shape::kTiles + side_) * 8; }

  // Behind the last output and the last input something else is read, and multiplied with 0 or not written.
  __device__ void load(int tile, int stage, uint4 (&w)[kHeld]) const {
    const int output = min(first_output(tile) + lane_ / 4, (p_.out + 7) / 8 * 8 - 1);
    const char* row = static_cast<const char*>(p_.weight) + static_cast<long long>(output) * (Shape::kStride * Shape::kBytes) + lane_ % 4 * 16;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int chunk = (stage * kHeld + i) * Spec::kShares + share_;
      if (Shape::kChunks % (Spec::kShares * kHeld) == 0 || chunk < Shape::kChunks)
        w[i] = load_weight(row + chunk * 64);
      else
        w[i] = uint4{0, 0, 0, 0};
    }
  }

  __device__ void multiply(int stage, const uint4 (&w)[kHeld], float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int chunk = (stage * kHeld + i) * Spec::kShares + share_;
      if (Shape::kChunks % (Spec::kShares * kHeld) != 0 && chunk >= Shape::kChunks) break;
      multiply_chunk(chunk, w[i], sums);
    }
  }
  __device__ __forceinline__ void multiply_chunk(int chunk, const uint4& w, float (&sums)[kSums]) const {
    const int g = lane_ / 4, t = lane_ % 4;
    const unsigned char* x = x_ + chunk * 64 + t * 16;
    if constexpr (Shape::kSingle) {
      const float4 b{__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
      for (int r = 0; r < Spec::kRows; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(x + r * Shape::kRowBytes);
        sums[r] = fmaf(a.x, b.x, sums[r]);
        sums[r] = fmaf(a.y, b.y, sums[r]);
        sums[r] = fmaf(a.z, b.z, sums[r]);
        sums[r] = fmaf(a.w, b.w, sums[r]);
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int row = tile * 16 + g;
        uint4 low{0, 0, 0, 0}, high{0, 0, 0, 0};
        if (row < rows_) low = *reinterpret_cast<const uint4*>(x + row * Shape::kRowBytes);
        if constexpr (Spec::kRows > 8)
          if (row + 8 < rows_) high = *reinterpret_cast<const uint4*>(x + (row + 8) * Shape::kRowBytes);
        float* const to = sums + tile * kSets * 4;
        mma(to, low.x, high.x, low.y, high.y, w.x, w.y);
        mma(to + (kSets - 1) * 4, low.z, high.z, low.w, high.w, w.z, w.w);
      }
    }
  }

  __device__ __forceinline__ static void mma(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned a[4] = {a0, a1, a2, a3};
    float(&d)[4] = *reinterpret_cast<float(*)[4]>(sums);
    if constexpr (is_same<Element, bf16>)
      ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    else if constexpr (is_same<Element, f16>)
      ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }

  __device__ void zero_behind(int row) const {  // what fills a row up
    for (int i = Spec::kIn + lane_; i < Shape::kStride; i += 32) write<Element>(x_ + row * Shape::kRowBytes, i, 0);
  }

  // Rows of x to shared memory.
  template <class Norm>
  __device__ void stage_rows(const Norm& norm) const {
    for (int row = warp_; row < (Shape::kSingle ? Spec::kRows : rows_); row += Shape::kWarps) {
      unsigned char* to = x_ + row * Shape::kRowBytes;
      if (row >= rows_) {
        for (int i = lane_ * 16; i < Shape::kRowBytes; i += 512) *reinterpret_cast<uint4*>(to + i) = uint4{0, 0, 0, 0};
        continue;
      }
      if constexpr (Shape::kStride != Spec::kIn) zero_behind(row);
      if constexpr (Spec::kNorm) {  // a warp a row
        const float* x = static_cast<const float*>(p_.x) + static_cast<long long>(p_.select ? p_.select[first_ + row] : first_ + row) * Spec::kIn;
        normalise_row<Element, Spec::kIn>(lane_, p_.epsilon, norm, reader_of<Spec::kIn>(x), [&](int at, auto y) { put<Element>(to, at, y); });
      }
    }
    if constexpr (!Spec::kNorm) {
      constexpr int kUnit = Spec::kIn % Shape::kUnit == 0 ? Shape::kUnit : 1, kUnits = Spec::kIn / kUnit;
      const Bits<Element>* x = static_cast<const Bits<Element>*>(p_.x) + static_cast<long long>(first_) * Spec::kIn;
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < rows_ * kUnits; i += Shape::kThreads) {
        const int row = i / kUnits, at = i % kUnits * kUnit;
        Bits<Element>* to = reinterpret_cast<Bits<Element>*>(x_ + row * Shape::kRowBytes) + at;
        if constexpr (kUnit > 1)
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(x + row * Spec::kIn + at);
        else
          *to = x[row * Spec::kIn + at];
      }
    }
  }

  // The sums of a warp's 8 outputs, row by row.
  __device__ void keep(float (&sums)[kSums]) const {
    const int g = lane_ / 4, t = lane_ % 4;
    float* part = parts_ + warp_ * Shape::kPart;
    if constexpr (Shape::kSingle) {
#pragma unroll
      for (int r = 0; r < Spec::kRows; ++r) {
        sums[r] += ptx::shfl_xor(sums[r], 1);
        sums[r] += ptx::shfl_xor(sums[r], 2);
        if (t == 0) part[r * 8 + g] = sums[r];
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const float* s = sums + tile * kSets * 4;
        const auto sum = [&](int i) { return kSets == 1 ? s[i] : s[i] + s[i + kSets * 4 - 4]; };
        float* to = part + (tile * 16 + g) * 8 + 2 * t;
        to[0] = sum(0);
        to[1] = sum(1);
        if constexpr (Spec::kRows > 8) {
          to[64] = sum(2);
          to[65] = sum(3);
        }
      }
    }
  }

  // What a thread finishes: an output of a row, with what it can read before the sums are there.
  struct Item {
    int row, output;
    float bias, before;
    long long slot;
  };
  static constexpr int kItems = (Shape::kTiles * Shape::kPart + Shape::kThreads - 1) / Shape::kThreads;

  // The bias may be read before the kernel before has ended, what that writes afterwards.
  __device__ void look_ahead(int tile, Item (&items)[kItems]) const {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const int i = n * Shape::kThreads + static_cast<int>(threadIdx.x);
      Item& item = items[n];
      item.row = i < Shape::kTiles * Shape::kPart ? i % Shape::kPart / 8 : rows_;
      item.output = (tile * Shape::kTiles + i / Shape::kPart) * 8 + i % 8;
      if (item.output >= p_.out) item.row = rows_;
      item.bias = item.row < rows_ && p_.bias ? read<Element>(p_.bias, item.output) : 0;
    }
  }
  __device__ void look(Item (&items)[kItems]) const {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      Item& item = items[n];
      if (item.row >= rows_) continue;
      if constexpr (Spec::kY == Y::kAdded) item.before = static_cast<const float*>(p_.y)[place_of(item)];
      if constexpr (Spec::kKeysValues) item.slot = p_.slot ? p_.slot[first_ + item.row] : first_ + item.row;
    }
  }
  __device__ long long place_of(const Item& item) const { return static_cast<long long>(first_ + item.row) * p_.out + item.output; }

  __device__ void finish(const Item (&items)[kItems]) const {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const int i = n * Shape::kThreads + static_cast<int>(threadIdx.x);
      if (items[n].row >= rows_) continue;
      const float* part = parts_ + i / Shape::kPart * Spec::kShares * Shape::kPart + i % Shape::kPart;
      float sum = 0;
#pragma unroll
      for (int s = 0; s < Spec::kShares; ++s) sum += part[s * Shape::kPart];
      store(items[n], activated<Spec::kActivation>(sum + items[n].bias));
    }
  }

  __device__ void store(const Item& item, float y) const {
    if constexpr (Spec::kKeysValues) {
      if (item.output >= p_.q_width) {
        const bool is_v = item.output >= p_.q_width + p_.kv_width;
        const int at = item.output - p_.q_width - (is_v ? p_.kv_width : 0);
        if (item.slot >= 0) write<Element>(is_v ? p_.v : p_.k, item.slot * p_.kv_width + at, y);
        return;
      }
    }
    if constexpr (Spec::kY == Y::kElement)
      write<Element>(p_.y, place_of(item), y);
    else if constexpr (Spec::kY == Y::kAdded)
      static_cast<float*>(p_.y)[place_of(item)] = item.before + y;
    else
      static_cast<float*>(p_.y)[place_of(item)] = y;
  }

 public:
  __device__ Product(const ProductParams& p, unsigned char* shared, float* parts)
      : p_(p),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        share_(warp_ % Spec::kShares),
        side_(warp_ / Spec::kShares),
        first_(static_cast<int>(blockIdx.y) * Spec::kRows),
        rows_(min(Spec::kRows, p.rows - first_)),
        x_(shared),
        parts_(parts) {}

  __device__ void run() const {
    const int tiles = (p_.out + 8 * Shape::kTiles - 1) / (8 * Shape::kTiles);
    int tile = static_cast<int>(blockIdx.x);
    uint4 now[kHeld];
    load(tile, 0, now);
    Item items[kItems];
    look_ahead(tile, items);
    const auto norm = [&] {
      if constexpr (Spec::kNorm)
        return NormWeights<Element, Spec::kIn, Shape::kNormEarly>(lane_, p_.norm_weight, p_.norm_bias);
      else
        return 0;
    }();
    if constexpr (Spec::kDependent) {
      ptx::let_kernel_after_come_up();
      ptx::wait_for_kernel_before();
    }
    look(items);
    stage_rows(norm);
    __syncthreads();
    constexpr bool kAhead = Spec::kSeveral || Shape::kStages > 1;
    uint4 next[kAhead ? kHeld : 1];
    for (; tile < tiles; tile += static_cast<int>(gridDim.x)) {
      float sums[kSums] = {};
#pragma unroll 1
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        const bool last = stage + 1 == Shape::kStages;
        const int next_tile = last ? tile + static_cast<int>(gridDim.x) : tile;
        if constexpr (kAhead)
          if (!last || (Spec::kSeveral && next_tile < tiles)) load(next_tile, last ? 0 : stage + 1, next);
        multiply(stage, now, sums);
        if constexpr (kAhead) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) now[i] = next[i];
        }
      }
      keep(sums);
      __syncthreads();
      finish(items);
      if constexpr (!Spec::kSeveral) break;
      look_ahead(tile + static_cast<int>(gridDim.x), items);
      look(items);
      __syncthreads();
    }
  }
};

template <class Spec>
__device__ __forceinline__ void product(const ProductParams& p) {
  extern __shared__ __align__(16) unsigned char fattn_product_shared[];
  __shared__ float parts[ProductShape<Spec>::kWarps * ProductShape<Spec>::kPart];
  Product<Spec>(p, fattn_product_shared, parts).run();
}

}  // namespace fattn::ops
