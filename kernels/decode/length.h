// How many keys a sequence has.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/decode_work.h"

namespace fattn::decode {

// Nothing is read by a length out of range, and what it would give is NaN.
struct Length {
  int keys;
  bool valid;
};
__device__ __forceinline__ Length length_of(const AttentionParams& p, const DecodeWork& work, int batch) {
  const int keys = work.lengths == nullptr ? p.seqlen_k : work.lengths[batch * work.length_stride];
  const bool valid = 0 <= keys && keys <= p.seqlen_k;
  return {valid ? keys : 0, valid};
}

}  // namespace fattn::decode
