// Decode of the CPU backend: few query rows (the heads of a group times a few queries) against a long range of keys, one
// chunk of a split-KV pass (Flash-Decoding, Dao et al. 2023). Vectors run along headdim; all rows share each read of K
// and V, so the kernel moves at the speed of memory.
#pragma once

#include "backend/cpu/kernels.h"

namespace fattn::core::FATTN_ISA {

constexpr int64_t kDecodeBlock = 64;  // keys of one inner step
static_assert(kDecodeBlock % kLanes == 0);
// Keys whose V are weighed at once: few where V is widened first, so that the copy stays in the L1 cache.
template <class T>
constexpr int64_t kValueKeys = sizeof(T) == sizeof(float) ? kDecodeBlock : kLanes;

template <class T>
struct DecodeScratch {
  float* q;       // [rows][headdim rounded up]
  float* k;       // [kLanes][headdim rounded up], where K cannot be read in place
  float* v;       // [kValueKeys][headdim_v rounded up], likewise
  float* scores;  // [rows][kDecodeBlock]
  float* acc;     // [rows][headdim_v rounded up]

  size_t lay_out(char* base, int64_t rows, int headdim, int headdim_v) {
    Scratch s{base};
    const int64_t width = round_up(headdim, kLanes), width_v = round_up(headdim_v, kLanes);
    q = s.take<float>(rows * width);
    k = s.take<float>(kLanes * width);
    v = s.take<float>(kValueKeys<T> * width_v);
    scores = s.take<float>(rows * kDecodeBlock);
    acc = s.take<float>(rows * width_v);
    return s.used;
  }
};

// Rows [0, n) of `from` as fp32 with a padded width: in place where possible, else through the buffer.
FATTN_INLINE const float* widened(const float* from, int64_t stride, int64_t n, int64_t headdim, float* buffer, int64_t& out_stride) {
  if (headdim % kLanes == 0) {
    out_stride = stride;
    return from;
  }
  out_stride = round_up(headdim, kLanes);
  copy_rows(from, stride, n, headdim, buffer, out_stride);
  return buffer;
}
template <class T>
FATTN_INLINE const float* widened(const T* from, int64_t stride, int64_t n, int64_t headdim, float* buffer, int64_t& out_stride) {
  out_stride = round_up(headdim, kLanes);
  copy_rows(from, stride, n, headdim, buffer, out_stride);
  return buffer;
}

// scores[0, kLanes) = q . k[0, kLanes): one accumulator a key, then the sums of all by one transposition.
FATTN_INLINE F32 dot_keys(const float* q, const float* k, int64_t k_stride, int64_t width) {
  F32 acc[kLanes];
  FATTN_UNROLL
  for (int j = 0; j < kLanes; ++j) acc[j] = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    const F32 x = load(q + d);
    FATTN_UNROLL
    for (int j = 0; j < kLanes; ++j) acc[j] = fma(x, load(k + j * k_stride + d), acc[j]);
  }
  transpose(acc);
  F32 total = acc[0];
  FATTN_UNROLL
  for (int j = 1; j < kLanes; ++j) total = add(total, acc[j]);
  return total;
}

template <class T>
void prefetch_rows(const T* from, int64_t stride, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < n; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + r * stride + d);
}

template <class T>
void decode_task(const DecodeTask& task) {
  DecodeScratch<T> s;
  s.lay_out(static_cast<char*>(task.scratch), task.rows, task.headdim, task.headdim_v);
  const int64_t width = round_up(task.headdim, kLanes), width_v = round_up(task.headdim_v, kLanes);
  const F32 hidden = set1(minus_infinity());
  const Scale scaling(task.scale);
  const F32 sign = set1(scaling.sign), factor = set1(scaling.factor);
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* q = static_cast<const T*>(task.q) + r / task.seqlen_q * task.q_head_stride + r % task.seqlen_q * task.q_stride;
    for (int64_t d = 0; d < width; d += kLanes) store(s.q + r * width + d, mul(load_n(q + d, task.headdim - d), sign));
    for (int64_t d = 0; d < width_v; d += kLanes) store(s.acc + r * width_v + d, zero());
    task.max[r] = minus_infinity();
    task.sum[r] = 0.0f;
  }

  const T* k_all = static_cast<const T*>(task.k);
  const T* v_all = static_cast<const T*>(task.v);
  for (int64_t key0 = task.key_begin; key0 < task.key_end; key0 += kDecodeBlock) {
    const int64_t keys = task.key_end - key0 < kDecodeBlock ? task.key_end - key0 : kDecodeBlock;
    // Scores, kLanes keys at a time; V of these keys is on its way meanwhile.
    for (int64_t j = 0; j < keys; j += kLanes) {
      const int64_t n = keys - j < kLanes ? keys - j : kLanes;
      prefetch_rows(v_all + (key0 + j) * task.v_stride, task.v_stride, n, task.headdim_v);
      const int64_t next = key0 + j + kLanes, left = task.key_end - next;
      if (left > 0) prefetch_rows(k_all + next * task.k_stride, task.k_stride, left < kLanes ? left : kLanes, task.headdim);
      const T* k_rows = k_all + (key0 + j) * task.k_stride;
      int64_t k_stride = 0;
      const float* k = nullptr;
      if (n == kLanes) {
        k = widened(k_rows, task.k_stride, n, task.headdim, s.k, k_stride);
      } else {  // the last keys: rows beyond them are 0, their scores are hidden below
        k_stride = width;
        k = s.k;
        copy_rows(k_rows, task.k_stride, n, task.headdim, s.k, width);
        for (int64_t i = n * width; i < kLanes * width; i += kLanes) store(s.k + i, zero());
      }
      for (int64_t r = 0; r < task.rows; ++r) {
        // Row r sees the keys below its own end; lanes beyond it, and beyond the chunk, are hidden.
        const int64_t end = r % task.seqlen_q + task.diagonal;
        const int64_t limit = (end < task.key_end ? end : task.key_end) - (key0 + j);
        F32 x = dot_keys(s.q + r * width, k, k_stride, width);
        if (limit < kLanes) x = limit <= 0 ? hidden : keep_below(x, static_cast<int>(limit), hidden);
        store(s.scores + r * kDecodeBlock + j, x);
      }
    }
    const int64_t padded = round_up(keys, kLanes);
    for (int64_t r = 0; r < task.rows; ++r) {
      float* score = s.scores + r * kDecodeBlock;
      float largest = task.max[r];
      for (int64_t j = 0; j < keys; ++j) largest = largest > score[j] ? largest : score[j];
      const float safe = largest == minus_infinity() ? 0.0f : largest;
      float lanes[kLanes];
      store(lanes, exp2(mul(set1(task.max[r] - safe), factor)));
      const float alpha = lanes[0];
      F32 total = zero();
      for (int64_t j = 0; j < padded; j += kLanes) {
        const F32 p = exp2(mul(sub(load(score + j), set1(safe)), factor));
        total = add(total, p);
        store(score + j, p);
      }
      task.max[r] = largest;
      task.sum[r] = task.sum[r] * alpha + sum(total);
      if (alpha != 1.0f)
        for (int64_t d = 0; d < width_v; d += kLanes) store(s.acc + r * width_v + d, mul(load(s.acc + r * width_v + d), set1(alpha)));
    }
    // O += P V for the keys that every row sees; the few at the diagonal row by row, so that hidden ones meet no V.
    const int64_t whole_end = task.diagonal < task.key_end ? task.diagonal : task.key_end;
    const int64_t whole = whole_end - key0 < 0 ? 0 : whole_end - key0 < keys ? whole_end - key0 : keys;
    for (int64_t first = 0; first < keys; first += kValueKeys<T>) {
      const int64_t n = keys - first < kValueKeys<T> ? keys - first : kValueKeys<T>;
      int64_t v_stride = 0;
      const float* v = widened(v_all + (key0 + first) * task.v_stride, task.v_stride, n, task.headdim_v, s.v, v_stride);
      const int64_t shared = whole - first < 0 ? 0 : whole - first < n ? whole - first : n;
      if (shared > 0)
        product_into_wide_rows<OpsF32>(Scalars{reinterpret_cast<const char*>(s.scores + first), kDecodeBlock * 4}, task.rows, v, v_stride, shared,
                                       s.acc, width_v, width_v / kLanes);
      for (int64_t j = shared; j < n; ++j)
        for (int64_t r = 0; r < task.rows; ++r) {
          if (key0 + first + j >= r % task.seqlen_q + task.diagonal) continue;
          const F32 p = set1(s.scores[r * kDecodeBlock + first + j]);
          for (int64_t d = 0; d < width_v; d += kLanes) {
            float* at = s.acc + r * width_v + d;
            store(at, fma(p, load(v + j * v_stride + d), load(at)));
          }
        }
    }
  }
  for (int64_t r = 0; r < task.rows; ++r)
    for (int64_t d = 0; d < task.headdim_v; d += kLanes)
      store_n(task.acc + r * task.headdim_v + d, load(s.acc + r * width_v + d), task.headdim_v - d);
}

template <class T>
size_t decode_scratch_bytes(const KernelShape& shape) {
  DecodeScratch<T> s;
  return s.lay_out(nullptr, shape.rows, shape.headdim, shape.headdim_v);
}

}  // namespace fattn::core::FATTN_ISA
