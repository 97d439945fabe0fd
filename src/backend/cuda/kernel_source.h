// Lines that the sources of kernels have in common.
#pragma once

#include <cstdint>
#include <string>

#include "backend/cuda/pair_features.h"
#include "fattn/types.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {

// The first line of a kernel's source, which `fattn cache list` shows: "// bf16, headdim 128, causal, tile 128 x 64, level 80". `block_m` 0: no tile.
template <class Key>
std::string comment_of(const Key& key, int block_m = 0, int block_n = 0) {
  std::string line = text("// ", name_of(static_cast<DType>(key.dtype)), ", headdim ", key.headdim);
  if (key.headdim_v != key.headdim) line += text(" and ", key.headdim_v);
  if (key.causal) line += ", causal";
  if constexpr (requires { key.window; }) {
    if (key.window) line += ", window";
    if (key.capped) line += ", softcap";
  }
  if constexpr (requires { key.pair; }) line += names_of_pair(key.pair);
  if constexpr (requires { key.deterministic; })
    if (key.deterministic) line += ", deterministic";
  if constexpr (requires { key.own_bits; })
    if (key.own_bits) line += ", batch invariant";
  if (!key.aligned) line += ", unaligned";
  if (block_m > 0) line += text(", tile ", block_m, " x ", block_n);
  return line + text(", level ", key.level, "\n");
}

// What a specialisation's kernel takes: the longer parameters only where it reads what they have more, so that the others are as they were.
inline const char* params_of(bool features, int32_t pair = 0) {
  return pair_features_of(pair).paged ? "PagedParams" : pair != 0 ? "PairParams" : features ? "FeatureParams" : "AttentionParams";
}

}  // namespace fattn::core::cuda
