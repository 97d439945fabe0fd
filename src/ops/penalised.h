// What every backend's sampling does alike: the repetition penalty, a token's share.
#pragma once

#include <cmath>

#include "fattn/error.hpp"
#include "ops/ops.h"
#include "shared/text.h"

namespace fattn::ops {

[[noreturn]] inline void refuse_nan(int64_t token) {
  throw Error(ErrorCode::kInvalidArgument, core::text("the logit of token ", token, " is NaN, so no token can be drawn; look at the weights"));
}

// at(token) holds its logit. A token that was there several times counts once: what is computed is of the logit as it was.
template <class At>
void penalise(const Choice& c, int64_t vocab, const At& at, const float* logits) {
  if (c.repetition_penalty == 1) return;
  for (int64_t i = 0; i < c.seen_count; ++i) {
    const int32_t token = c.seen[i];
    if (token < 0 || token >= vocab)
      throw Error(ErrorCode::kInvalidArgument, core::text("token ", token, " that was there is not in the vocabulary; allowed: 0 to ", vocab - 1));
    const double logit = logits[token];
    at(token) = logit < 0 ? logit * c.repetition_penalty : logit / c.repetition_penalty;
  }
}

inline double share_of(double logit, double largest, double temperature) { return std::exp((logit - largest) / temperature); }

}  // namespace fattn::ops
