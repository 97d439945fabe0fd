// The next token of each row: the most likely one, or one that a random number picks. A CTA a row.
//
// What is drawn from is never sorted. A token's distance from the most likely one, in bits, says how likely it is; tokens are counted by distance in
// buckets, with their shares as whole numbers of 2^-42, so that sums do not depend on their order. The token at which the sum from the most likely on
// reaches a threshold is then looked for in one bucket. That is how top_k (each counts 1), top_p and the random number (shares) find their ends.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/constants.h"
#include "kernels/ops/cta.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/math.h"

namespace fattn::ops {

inline constexpr int kShareBits = 42, kPartBits = 14, kParts = kShareBits / kPartBits;
#if __CUDA_ARCH__ >= 900
inline constexpr int kAtOnce = 2;  // looked at by a thread
#else
inline constexpr int kAtOnce = 1;  // ptxas has no registers for more
#endif
inline constexpr int kBuckets = 2 * kDrawThreads, kGathered = 512;

struct DrawShared {
  unsigned count[kBuckets], share[kParts][kBuckets];
  double distance[kGathered];
  Count own[kGathered];
  int token[kGathered];
  Count warps[kDrawThreads / 32];
  double warps_double[kDrawThreads / 32];
  // What a search found.
  int bucket, found_token;
  unsigned gathered;
  Count counts_before, shares_before, found_share;
  double greatest, bits, buckets, less;  // bits of a distance of 1, buckets of it, 1 / repetition_penalty
};

// As ops::uniform_number().
__device__ __forceinline__ double uniform_number(Count seed, Count request, Count position) {
  const Count parts[3] = {seed, request, position};
  Count x = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    x += parts[i] + 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

class Draw {
  const DrawParams& p_;
  const DrawChoice& choice_;
  DrawShared& s_;
  const float* const logits_;
  unsigned* const seen_;
  const int thread_ = static_cast<int>(threadIdx.x);
  const bool penalised_;
  Count counts_before_ = 0, shares_before_ = 0;  // of this thread's buckets

  // The buckets of a thread.
  static constexpr int kOwn = kBuckets / kDrawThreads;

  __device__ double logit(int token, float given) const {
    if (!penalised_ || (seen_[token / 32] >> token % 32 & 1) == 0) return given;
    return given * (given < 0 ? choice_.repetition_penalty : s_.less);
  }
  __device__ double distance(int token) const {
    const double x = logit(token, logits_[token]);
    return x == s_.greatest ? 0 : s_.greatest - x;
  }
  __device__ Count share_of(double distance) const {
    const double bits = distance * s_.bits;
    if (!(bits < kShareBits)) return 0;
    const int whole = static_cast<int>(bits);
    return static_cast<Count>(ptx::ex2(static_cast<float>(whole - bits)) * (1ll << kShareBits)) >> whole;
  }
  __device__ int bucket_of(double distance) const {
    const double at = distance * s_.buckets;
    return at < kBuckets - 1 ? static_cast<int>(at) : kBuckets - 1;
  }
  template <class Body>
  __device__ void each(const Body& body) const {
#pragma unroll(kAtOnce)
    for (int i = thread_; i < p_.vocab; i += kDrawThreads) body(i);
  }
  __device__ Count sum(Count x) const {
    return joined<kDrawThreads>(x, s_.warps, [](Count a, Count b) { return a + b; });
  }

  __device__ void mark_seen() const {
    const int words = (p_.vocab + 31) / 32;
    if (thread_ == 0) s_.less = 1 / choice_.repetition_penalty;
    for (int i = thread_; i < words; i += kDrawThreads) seen_[i] = 0;
    __syncthreads();
    for (long long i = thread_; i < choice_.seen_count; i += kDrawThreads) {
      const int token = choice_.seen[i];
      if (token >= 0 && token < p_.vocab) atomicOr(seen_ + token / 32, 1u << token % 32);
    }
    __syncthreads();
  }

  // The most likely token, of equal ones the first; -1 if a logit is NaN. `least` is the least logit that is no -Inf.
  __device__ int most_likely(double& least) {
    double most = -static_cast<double>(kInfinity), low = kInfinity;
    int first = p_.vocab;
    bool nan = false;
    const auto look = [&](int i, float given) {
      nan = nan || given != given;
      const double x = logit(i, given);
      if (x > most || first == p_.vocab) {
        most = x;
        first = i;
      }
      if (x > -static_cast<double>(kInfinity)) low = fmin(low, x);
    };
    // In fours where rows begin at their multiples: one multiprocessor reads a row, and has much under way.
    const bool fours = p_.stride % 4 == 0 && reinterpret_cast<unsigned long long>(p_.logits) % 16 == 0;
    const int in_fours = fours ? p_.vocab / 4 * 4 : 0;
#pragma unroll(kAtOnce)
    for (int i = thread_ * 4; i < in_fours; i += kDrawThreads * 4) {
      const float4 x = *reinterpret_cast<const float4*>(logits_ + i);
      look(i, x.x);
      look(i + 1, x.y);
      look(i + 2, x.z);
      look(i + 3, x.w);
    }
    for (int i = in_fours + thread_; i < p_.vocab; i += kDrawThreads) look(i, logits_[i]);
    const double greatest = joined<kDrawThreads>(most, s_.warps_double, [](double a, double b) { return fmax(a, b); });
    least = joined<kDrawThreads>(low, s_.warps_double, [](double a, double b) { return fmin(a, b); });
    const Count found =
        joined<kDrawThreads>(static_cast<Count>(nan                ? -1
                                                : most == greatest ? first
                                                                   : p_.vocab),
                             s_.warps, [](Count a, Count b) { return static_cast<long long>(a) < static_cast<long long>(b) ? a : b; });
    if (thread_ == 0) s_.greatest = greatest;
    return static_cast<int>(found);
  }

  __device__ void fill_buckets(double least) {
    if (thread_ == 0) {
      const double range = fmin(static_cast<double>(kShareBits), (s_.greatest - least) * s_.bits);
      s_.buckets = range > 0 ? s_.bits * (kBuckets - 1) / range : 0;
    }
    for (int i = thread_; i < kBuckets; i += kDrawThreads) {
      s_.count[i] = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) s_.share[part][i] = 0;
    }
    __syncthreads();
    each([&](int i) {
      const double d = distance(i);
      const int bucket = bucket_of(d);
      const Count share = share_of(d);
      atomicAdd(&s_.count[bucket], 1u);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const unsigned of_part = static_cast<unsigned>(share >> part * kPartBits) & ((1u << kPartBits) - 1);
        // A share of 1 has a bit more than its parts: it goes to the last.
        const unsigned more = part == kParts - 1 ? static_cast<unsigned>(share >> kShareBits) << kPartBits : 0;
        if (of_part + more > 0) atomicAdd(&s_.share[part][bucket], of_part + more);
      }
    });
    __syncthreads();
    Count counts = 0, shares = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      counts += s_.count[thread_ * kOwn + i];
      shares += share_of_bucket(thread_ * kOwn + i);
    }
    counts_before_ = sum_before(counts, s_.warps);
    shares_before_ = sum_before(shares, s_.warps);
  }
  __device__ Count share_of_bucket(int bucket) const {
    Count share = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) share += static_cast<Count>(s_.share[part][bucket]) << part * kPartBits;
    return share;
  }

  // The token at which the sum from the most likely one on, of ones or of shares, reaches `threshold`, which is at least 1 and not above the sum of
  // all: found_token, with found_share, the sum of shares up to it.
  __device__ void search(bool by_count, Count threshold) {
    Count counts = counts_before_, shares = shares_before_;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int bucket = thread_ * kOwn + i;
      const Count count = s_.count[bucket], share = share_of_bucket(bucket);
      const Count before = by_count ? counts : shares, own = by_count ? count : share;
      if (before < threshold && threshold <= before + own) {
        s_.bucket = bucket;
        s_.counts_before = counts;
        s_.shares_before = shares;
        s_.gathered = 0;
      }
      counts += count;
      shares += share;
    }
    __syncthreads();
    const int bucket = s_.bucket;
    if (s_.count[bucket] > kGathered) return search_all(by_count, threshold);
    each([&](int i) {
      const double d = distance(i);
      if (bucket_of(d) != bucket) return;
      const unsigned at = atomicAdd(&s_.gathered, 1u);
      s_.distance[at] = d;
      s_.own[at] = share_of(d);
      s_.token[at] = i;
    });
    __syncthreads();
    const auto n = static_cast<int>(s_.gathered);
    if (thread_ < n) {
      const double d = s_.distance[thread_];
      const int token = s_.token[thread_];
      Count count = s_.counts_before, share = s_.shares_before;
      for (int i = 0; i < n; ++i) {
        if (s_.distance[i] > d || (s_.distance[i] == d && s_.token[i] > token)) continue;
        ++count;
        share += s_.own[i];
      }
      const Count here = by_count ? count : share, own = by_count ? 1 : s_.own[thread_];
      if (here >= threshold && here - own < threshold) found(token, share);
    }
    __syncthreads();
  }
  __device__ void found(int token, Count share) const {
    s_.found_token = token;
    s_.found_share = share;
  }

  // The same where many tokens are alike: by halves of what their distances may be. Bits of doubles that are not negative are in their order.
  __device__ void search_all(bool by_count, Count threshold) {
    const auto bits_of = [&](int i) { return static_cast<Count>(__double_as_longlong(distance(i))); };
    const auto up_to = [&](Count limit, bool counts) {
      Count own = 0;
      each([&](int i) {
        if (bits_of(i) <= limit) own += counts ? 1 : share_of(distance(i));
      });
      return sum(own);
    };
    Count low = 0, high = 0x7ff0000000000000ull;
    while (low < high) {
      const Count middle = low + (high - low) / 2;
      if (up_to(middle, by_count) >= threshold)
        high = middle;
      else
        low = middle + 1;
    }
    const Count before = low == 0 ? 0 : up_to(low - 1, by_count), shares = low == 0 ? 0 : up_to(low - 1, false);
    in_order(threshold - before, [&](int i) -> Count { return bits_of(i) != low ? 0 : by_count ? 1 : share_of(distance(i)); });
    Count own = 0;
    each([&](int i) {
      if (bits_of(i) == low && i <= s_.found_token) own += share_of(distance(i));
    });
    own = sum(own);
    if (thread_ == 0) s_.found_share = shares + own;
    __syncthreads();
  }

  // The first token at which the sum of weight(token), in the order of tokens, reaches the threshold: found_token.
  template <class Weight>
  __device__ void in_order(Count threshold, const Weight& weight) {
    const int each_has = (p_.vocab + kDrawThreads - 1) / kDrawThreads;
    const int begin = min(thread_ * each_has, p_.vocab), end = min(begin + each_has, p_.vocab);
    Count own = 0;
    for (int i = begin; i < end; ++i) own += weight(i);
    Count before = sum_before(own, s_.warps);
    if (before < threshold && threshold <= before + own)
      for (int i = begin; i < end; ++i) {
        before += weight(i);
        if (before >= threshold) {
          found(i, 0);
          break;
        }
      }
    __syncthreads();
  }

 public:
  __device__ Draw(const DrawParams& p, DrawShared& shared)
      : p_(p),
        choice_(p.choice[blockIdx.x]),
        s_(shared),
        logits_(p.logits + static_cast<long long>(blockIdx.x) * p.stride),
        seen_(p.seen_bits + static_cast<long long>(blockIdx.x) * ((p.vocab + 31) / 32)),
        penalised_(choice_.repetition_penalty != 1) {}

  __device__ int token() {
    if (penalised_) mark_seen();
    double least = 0;
    const int most = most_likely(least);
    if (most < 0 || choice_.temperature == 0) return most;
    const double number = uniform_number(choice_.seed, choice_.request, choice_.position);
    const bool sorted = choice_.top_k > 0 || choice_.top_p < 1;
    if (thread_ == 0) s_.bits = 1.4426950408889634 / choice_.temperature;
    __syncthreads();
    if (!sorted) {
      Count own = 0;
      each([&](int i) { own += share_of(distance(i)); });
      const Count all = sum(own);
      in_order(static_cast<Count>(number * static_cast<double>(all)) + 1, [&](int i) { return share_of(distance(i)); });
      return s_.found_token;
    }
    fill_buckets(least);
    // Of all threads the last knows all.
    Count own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += share_of_bucket(thread_ * kOwn + i);
    Count kept = sum(own);
    // top_k, top_p, the number.
#pragma unroll 1
    for (int end = 0; end < 3; ++end) {
      Count threshold = static_cast<Count>(choice_.top_k);
      if (end == 0 && (choice_.top_k == 0 || choice_.top_k >= p_.vocab)) continue;
      if (end == 1 && !(choice_.top_p < 1)) continue;
      if (end == 1) threshold = min(max(static_cast<Count>(ceil(choice_.top_p * static_cast<double>(kept))), Count{1}), kept);
      if (end == 2) threshold = min(static_cast<Count>(number * static_cast<double>(kept)) + 1, kept);
      search(end == 0, threshold);
      kept = s_.found_share;
      __syncthreads();
    }
    return s_.found_token;
  }
};

// Spec: kDependent.
template <class Spec>
__device__ __forceinline__ void draw(const DrawParams& p) {
  __shared__ DrawShared shared;
  if constexpr (Spec::kDependent) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
  const int token = Draw(p, shared).token();
  if (threadIdx.x != 0) return;
  const int row = static_cast<int>(blockIdx.x);
  p.token[row] = token;
  const DrawAdvance& a = p.advance;
  if (!a.ids || a.slot[row] < 0) return;
  a.ids[row] = token;
  ++a.position[row];
  ++a.used[row];
  ++a.slot[row];
  DrawChoice& choice = p.choice[row];
  if (choice.seen_count < a.seen_stride) a.seen[row * a.seen_stride + choice.seen_count++] = token;
  ++choice.position;
}

}  // namespace fattn::ops
