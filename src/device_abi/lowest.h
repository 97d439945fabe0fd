// Numbers so low that fp32 has no digits left beside them: a finite bias that is meant to hide, and what lse is of a row of such keys alone.
// Include-free, compiled by the host and by NVRTC.
#pragma once

namespace fattn {

// On a GPU a finite bias that is as low as this takes the place of the score: all such pairs are alike. (Between 2^24 and here a score keeps the
// digits above its unit, and a weight that should be 1 is at most 2^4, which fp16 has room for.)
inline constexpr float kLowestBias = -67108864.0f;  // -2^26

// A row whose lse is lower has no gradient, nor has one with an lse of -inf, which sees nothing: lse does not say any more how much of the weight
// each of its keys has.
inline constexpr float kLowestLse = -33554432.0f;  // -2^25

}  // namespace fattn
