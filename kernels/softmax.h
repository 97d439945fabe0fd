// Online softmax in base 2 of the rows that a warp owns, with a reference that is seldom renewed.
//
// A weight is exp2(score * scale - reference). Any reference gives the same quotients; it only has to keep the weights inside the range of
// their type. But the rounding of a weight that makes up most of its row is the error of o, unless the reference makes that weight 1. So the maximum
// of the scores is taken where it is needed to find a first reference (the first keys of a row, masked keys), and afterwards where a step's weights
// dominate: their sums, which are needed anyway, tell. That saves the comparisons, the exchange between lanes and the rescaling of o for most blocks
// of keys. docs/NUMERICS.md has the consequences.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"

namespace fattn {

// No row is seen in the bits of another, which may see what it does not: each has its reference by its own scores alone.
//
// The weights of 16 keys dominate a row if those that a lane has of them sum to more than what all keys before gave it, and 1, the greatest weight.
// What is below may round the greatest weight of a row that is at most some half of it.
//
// No more than this counts of the weights before: where each block has some more than the last, weights would leave the range of their type.
template <class Element>
inline constexpr float kMostBefore = is_same<Element, bf16> ? 0x1p24f : 0x1p13f;

// References from here on are rounded by as much as weights are.
inline constexpr float kGreatReference = 512;

// What great references that were raised lack of the greatest scores; 0 of others. The weights of the same keys are made without it, so that the
// greatest is 1. Sums and o are then in a unit that lacks it, and wait for Softmax::give_back() before weights of other keys are added.
template <int kRowTiles>
struct Rest {
  float of[kRowTiles][2];

  // What is given back: nothing of scores so great that the weights' scale is lost (docs/NUMERICS.md).
  static __device__ __forceinline__ float given(float rest) { return fabsf(rest) <= 16 ? rest : 0.0f; }
  // In one register: of the four lanes of a row each has what belongs to one of its rows.
  __device__ __forceinline__ float packed() const {
    static_assert(kRowTiles <= 2);
    const int place = ptx::opaque(static_cast<int>(threadIdx.x)) % 4;  // found again, not kept in a register
    float mine = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Of what is opaque the compiler does not make an element by its number, for which it would put them into local memory.
        const float its = __uint_as_float(ptx::opaque(__float_as_uint(of[i][half])));
        if (place == 2 * i + half) mine = given(its);
      }
    }
    return mine;
  }
};

// State of kRowTiles tiles of 16 rows; a lane holds rows lane / 4 and lane / 4 + 8 of each, the same in the four lanes of a row.
template <int kRowTiles>
struct Softmax {
  float shift[kRowTiles][2];  // minus the reference; inf: no key seen yet
  float sum[kRowTiles][2];    // of this lane's weights alone

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[i][half] = kInfinity;
        sum[i][half] = 0;
      }
    }
  }

  // Every row is NaN, if no key follows.
  __device__ __forceinline__ void spoil() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) sum[i][0] = sum[i][1] = kNan;
  }

  // What a row has so far, times `factor`.
  template <int kOutTiles>
  __device__ __forceinline__ void rescale(int i, int half, float factor, float (&o)[kRowTiles][kOutTiles][4]) {
    sum[i][half] *= factor;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      o[i][n][2 * half] *= factor;
      o[i][n][2 * half + 1] *= factor;
    }
  }

  // Raises the references to the maximum of score tiles [first, first + count) of 8 keys, rescaling sums and o. The result, with kRest, is for
  // Weights::weigh(), and then for give_back().
  template <bool kRest, int kKeyTiles, int kOutTiles>
  __device__ __forceinline__ Rest<kRowTiles> raise(const float (&s)[kRowTiles][kKeyTiles][4], int first, int count, float scale,
                                                   float (&o)[kRowTiles][kOutTiles][4]) {
    Rest<kRowTiles> rest;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float greatest = s[i][first][2 * half];
#pragma unroll
        for (int n = first; n < first + count; ++n) greatest = fmaxf(greatest, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 1));
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 2));
        const float before = shift[i][half];
        const float now = fminf(before, -(greatest * scale));
        rest.of[i][half] = kRest && now < before && fabsf(now) >= kGreatReference ? fmaf(greatest, scale, now) : 0.0f;
        // A row that has seen nothing has o = 0, or what non-finite v left there, which no factor may touch.
        const float factor = before == kInfinity ? 1.0f : ptx::ex2((now - before) - rest.given(rest.of[i][half]));
        shift[i][half] = now;
        rescale(i, half, factor, o);
      }
    }
    return rest;
  }

  // The same for the rows with a bit, 2 i + half, in `rows`; the others stay as they are, bit by bit. A great reference is raised to the first 16
  // keys' alone, because its rest is for their weights.
  template <int kKeyTiles, int kOutTiles>
  __device__ __forceinline__ Rest<kRowTiles> raise_some(unsigned rows, const float (&s)[kRowTiles][kKeyTiles][4], int first, int count, float scale,
                                                        float (&o)[kRowTiles][kOutTiles][4]) {
    Rest<kRowTiles> rest;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = shift[i][half];
        const bool all = fabsf(before) < kGreatReference;
        float greatest = s[i][first][2 * half];
#pragma unroll
        for (int n = first; n < first + count; ++n) {
          const float next = fmaxf(greatest, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
          greatest = n < first + 2 || all ? next : greatest;
        }
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 1));
        greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 2));
        const float now = (rows >> (2 * i + half) & 1) != 0 ? fminf(before, -(greatest * scale)) : before;
        rest.of[i][half] = now < before && fabsf(now) >= kGreatReference ? fmaf(greatest, scale, now) : 0.0f;
        const float factor = now < before && before != kInfinity ? ptx::ex2((now - before) - rest.given(rest.of[i][half])) : 1.0f;  // see raise()
        shift[i][half] = now;
        rescale(i, half, factor, o);
      }
    }
    return rest;
  }

  // Brings sums and o back to the unit of the references, from the one that lacks Rest::packed(). Rows that lack nothing keep their bits.
  template <int kOutTiles>
  __device__ __forceinline__ void give_back(float packed, float (&o)[kRowTiles][kOutTiles][4]) {
    const int first = ptx::opaque(static_cast<int>(threadIdx.x)) % 32 / 4 * 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = ptx::ex2(ptx::shfl(packed, first + 2 * i + half));
        rescale(i, half, factor, o);
      }
    }
  }
};

// The weights of 16 keys: the A operand of p v, and their sums by row.
template <int kRowTiles>
struct Weights {
  unsigned p[kRowTiles][4];
  float sum[kRowTiles][2];

  // Weighs score tile n (0 or 1 of the 16 keys) of row tile i. kGuarded: rows without a reference get weights of 0; otherwise they get inf
  // or NaN, so that are_minor fails for them. `rest`: of references just raised, guarded alone.
  template <class Element, bool kGuarded>
  __device__ __forceinline__ void weigh(const float (&s)[4], int i, int n, const Softmax<kRowTiles>& softmax, float scale,
                                        const Rest<kRowTiles>& rest = {}) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = kGuarded && softmax.shift[i][half] == kInfinity ? 0.0f : softmax.shift[i][half];
      const auto exponent = [&](float score) { return kGuarded ? fmaf(score, scale, shift) - rest.of[i][half] : fmaf(score, scale, shift); };
      const float p0 = ptx::ex2(exponent(s[2 * half]));
      const float p1 = ptx::ex2(exponent(s[2 * half + 1]));
      p[i][2 * n + half] = ptx::pack2<Element>(p0, p1);
      sum[i][half] = n == 0 ? p0 + p1 : sum[i][half] + (p0 + p1);
    }
  }

  // The same with something added that grows by `slope` from one key to the next, of which `steps` are those of s[0] and s[2] (and of s[1] and s[3]
  // one less), and `shift` is minus the reference with the rest of it.
  template <class Element>
  __device__ __forceinline__ void weigh_sloped(const float (&s)[4], int i, int n, const float (&shift)[2], float scale, float slope,
                                               const float (&steps)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float p0 = ptx::ex2(fmaf(s[2 * half], scale, fmaf(slope, steps[half], shift[half])));
      const float p1 = ptx::ex2(fmaf(s[2 * half + 1], scale, fmaf(slope, steps[half] - 1.0f, shift[half])));
      p[i][2 * n + half] = ptx::pack2<Element>(p0, p1);
      sum[i][half] = n == 0 ? p0 + p1 : sum[i][half] + (p0 + p1);
    }
  }

  // Weighs score tile n (0 or 1) of row tile i again, for its rows with a bit in `rows`, whose references raise_some() has raised.
  template <class Element>
  __device__ __forceinline__ void weigh_some(unsigned rows, const float (&s)[4], int i, int n, const Softmax<kRowTiles>& softmax, float scale,
                                             const Rest<kRowTiles>& rest) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool again = (rows >> (2 * i + half) & 1) != 0;
      const float shift = softmax.shift[i][half] == kInfinity ? 0.0f : softmax.shift[i][half];
      const float p0 = ptx::ex2(fmaf(s[2 * half], scale, shift) - rest.of[i][half]);
      const float p1 = ptx::ex2(fmaf(s[2 * half + 1], scale, shift) - rest.of[i][half]);
      const unsigned pair = ptx::pack2<Element>(p0, p1);
      const float both = n == 0 ? p0 + p1 : sum[i][half] + (p0 + p1);
      p[i][2 * n + half] = again ? pair : p[i][2 * n + half];
      sum[i][half] = again ? both : sum[i][half];
    }
  }

  template <class Element>
  __device__ __forceinline__ bool dominates(const Softmax<kRowTiles>& softmax, int i, int half) const {
    return sum[i][half] > fminf(softmax.sum[i][half], kMostBefore<Element>) + 1.0f;
  }
  // Whether they dominate no rows of the warp, and no row lacks anything of Rest::packed(). False for NaN too: of rows without a reference it may
  // be, and of scores that a term hides.
  template <class Element>
  __device__ __forceinline__ bool are_minor(const Softmax<kRowTiles>& softmax, float packed) const {
    bool minor = packed == 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) minor = minor && sum[i][half] <= fminf(softmax.sum[i][half], kMostBefore<Element>) + 1.0f;
    }
    return ptx::vote_all(minor);
  }
  // The rows that they dominate, or that have no reference yet, or one as `low` says; as raise_some() takes them. Rows with a NaN are none.
  template <class Element, class Low>
  __device__ __forceinline__ unsigned dominated(const Softmax<kRowTiles>& softmax, const Low& low) const {
    unsigned rows = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = softmax.shift[i][half];
        if (dominates<Element>(softmax, i, half) || shift == kInfinity || low(shift)) rows |= 1u << (2 * i + half);
      }
    }
    rows |= ptx::shfl_xor(rows, 1);  // the four lanes of a row
    rows |= ptx::shfl_xor(rows, 2);
    return rows;
  }

  // kAlone: never in one operation with what the sum was multiplied by before, which is the compiler's choice in each specialisation.
  template <bool kAlone = false>
  __device__ __forceinline__ void add_to(Softmax<kRowTiles>& softmax) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        softmax.sum[i][half] = kAlone ? __fadd_rn(softmax.sum[i][half], sum[i][half]) : softmax.sum[i][half] + sum[i][half];
    }
  }
};

}  // namespace fattn
