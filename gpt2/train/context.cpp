#include "gpt2/train/context.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "gpt2/error.h"

namespace fattn::gpt2 {

ContextRows::ContextRows(const Config& config, int64_t seqlen, const Context& context) {
  if (context.ranks < 1 || context.rank < 0 || context.rank >= context.ranks)
    throw Error("rank " + std::to_string(context.rank) + " of " + std::to_string(context.ranks) +
                " processes that share a sequence; ranks count from 0");
  sequence_.seqlen_q = sequence_.seqlen_k = seqlen;
  sequence_.layout = config.causal ? RingLayout::kZigzag : RingLayout::kContiguous;
  sequence_.agree = false;                      // a run's processes have compared their options
  const int64_t parts = config.causal ? 2 : 1;  // that each has
  if (context.ranks > 1 && seqlen < parts * context.ranks)
    throw Error("sequences of " + std::to_string(seqlen) + " tokens are too short for " + std::to_string(context.ranks) +
                " processes (--context-parallel), of which each has at least " + std::to_string(parts) + "; give at most " +
                std::to_string(std::max<int64_t>(seqlen / parts, 1)) + ", or longer sequences (--seqlen)");
  const RingSchedule schedule = ring_schedule(sequence_, context.rank, context.ranks, config.causal);
  held_ = schedule.held_q;
  count_ = schedule.rows_q;
}

void ContextRows::take(const int32_t* from, int64_t sequences, int32_t* to) const {
  for (int64_t s = 0; s < sequences; ++s, from += sequence_.seqlen_q)
    for (const fattn_ring_range& range : held_) to = std::copy_n(from + range.first, range.count, to);
}

void ContextRows::places(int64_t sequences, int32_t* to) const {
  for (int64_t s = 0; s < sequences; ++s)
    for (const fattn_ring_range& range : held_) {
      std::iota(to, to + range.count, static_cast<int32_t>(s * sequence_.seqlen_q + range.first));
      to += range.count;
    }
}

int64_t ContextRows::targets(const int32_t* from, int64_t sequences) const {
  int64_t count = 0;
  for (int64_t s = 0; s < sequences; ++s, from += sequence_.seqlen_q)
    for (const fattn_ring_range& range : held_)
      count += std::count_if(from + range.first, from + range.first + range.count, [](int32_t target) { return target >= 0; });
  return count;
}

RingTransport& ContextTransport::real() const {
  if (!context_.transport) throw Error("a pass over sequences that several processes share needs what carries rows between them");
  return *context_.transport;
}

}  // namespace fattn::gpt2
