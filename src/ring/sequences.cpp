// Which keys which queries see, in positions.
#include "ring/sequences.h"

#include <algorithm>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::ring {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 60;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

void check_length(const char* name, int64_t length) {
  if (length < 0 || length > kMostPositions) refuse(text(name, " is ", length, "; allowed: 0 to 2^60"));
}

void check_bounds(const char* name, const int64_t* bounds, int64_t count, int64_t length) {
  if (bounds[0] != 0) refuse(text(name, "[0] is ", bounds[0], "; it must be 0, where the first sequence begins"));
  for (int64_t i = 0; i < count; ++i)
    if (bounds[i + 1] < bounds[i])
      refuse(text(name, "[", i + 1, "] is ", bounds[i + 1], " and the one before it ", bounds[i], "; a sequence cannot end before it begins"));
  if (bounds[count] > length) refuse(text(name, "[", count, "] is ", bounds[count], "; there are ", length, " positions"));
}

int64_t limit(const char* name, int64_t window, int64_t most) {
  if (window < -1) refuse(text(name, " is ", window, "; allowed: -1 (no limit), or 0 and more"));
  return window < 0 ? most : std::min(window, most);
}

}  // namespace

Sequences::Sequences(const fattn_ring_problem& p) {
  check_length("seqlen_q", p.seqlen_q);
  check_length("seqlen_k", p.seqlen_k);
  const int64_t most = p.seqlen_q + p.seqlen_k;
  left_ = p.has_window ? limit("window_left", p.window_left, most) : most;
  right_ = p.has_window ? limit("window_right", p.window_right, most) : most;
  if (p.causal) right_ = 0;
  if (!p.cu_seqlens_q != !p.cu_seqlens_k) refuse("one of cu_seqlens_q and cu_seqlens_k is null; give both, or neither");
  if (!p.cu_seqlens_q) {
    if (p.nsequences != 0) refuse(text("nsequences is ", p.nsequences, " and cu_seqlens_q is null; set it to 0, or give both lists"));
    all_.push_back({0, p.seqlen_q, 0, p.seqlen_k});
    return;
  }
  if (p.nsequences < 0) refuse(text("nsequences is ", p.nsequences, "; allowed: 0 and more"));
  check_bounds("cu_seqlens_q", p.cu_seqlens_q, p.nsequences, p.seqlen_q);
  check_bounds("cu_seqlens_k", p.cu_seqlens_k, p.nsequences, p.seqlen_k);
  for (int32_t i = 0; i < p.nsequences; ++i) all_.push_back({p.cu_seqlens_q[i], p.cu_seqlens_q[i + 1], p.cu_seqlens_k[i], p.cu_seqlens_k[i + 1]});
}

Rectangle Sequences::trimmed(Rectangle x) const {
  if (x.empty()) return x;
  const int64_t shift = (*this)[x.sequence].shift();
  x.k_begin = std::max(x.k_begin, x.q_begin + shift - left_);
  x.k_end = std::min(x.k_end, x.q_end + shift + right_);
  x.q_begin = std::max(x.q_begin, x.k_begin - shift - right_);
  x.q_end = std::min(x.q_end, x.k_end - shift + left_);
  return x;
}

std::vector<Rectangle> Sequences::seen(const fattn_ring_range& queries, const fattn_ring_range& keys) const {
  std::vector<Rectangle> all;
  const int64_t q_end = queries.first + queries.count, k_end = keys.first + keys.count;
  // The first that may reach into both; later ones begin later in both.
  auto at = std::partition_point(all_.begin(), all_.end(), [&](const Sequence& s) { return s.q_end <= queries.first || s.k_end <= keys.first; });
  for (; at != all_.end() && at->q_begin < q_end && at->k_begin < k_end; ++at) {
    const Rectangle seen = trimmed({std::max(at->q_begin, queries.first), std::min(at->q_end, q_end), std::max(at->k_begin, keys.first),
                                    std::min(at->k_end, k_end), static_cast<int32_t>(at - all_.begin())});
    if (!seen.empty()) all.push_back(seen);
  }
  return all;
}

}  // namespace fattn::core::ring
