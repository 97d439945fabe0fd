// Host side of kernels/v3/mask_words.h: a mask of pairs as bits in the workspace of algorithm v3's passes.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "device_abi/v3_mask_words.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// The words of a problem's mask, of either pass, and before them which blocks show anything: what all share they have once.
struct V3MaskWords {
  int64_t blocks = 0, bytes = 0;
  int64_t before = 0;  // bytes of them before the words
  int64_t grid = 0;    // CTAs that make them
  int threads = 0;     // of each
};
V3MaskWords v3_mask_words(const Problem& problem);
// Why there are too many; empty: there are not.
std::string v3_mask_words_refusal(const Problem& problem);

// The kernel that makes them; 64 bytes without padding.
struct V3MaskWordsKey {
  KernelKind kind = KernelKind::kV3MaskWords;
  int32_t forward = 0, causal = 0;
  std::array<int32_t, 13> reserved{};
};
static_assert(sizeof(V3MaskWordsKey) == 64);
V3MaskWordsKey v3_mask_words_key(const Problem& problem);
jit::Request v3_mask_words_request(const V3MaskWordsKey& key);

}  // namespace fattn::core::cuda
