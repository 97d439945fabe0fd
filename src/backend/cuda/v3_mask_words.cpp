#include "backend/cuda/v3_mask_words.h"

#include "backend/cuda/limits.h"
#include "backend/cuda/v3_common.h"
#include "shared/text.h"

namespace fattn::core::cuda {

V3MaskWords v3_mask_words(const Problem& p) {
  const Strides& of = p.pair_mask.strides;
  const int64_t rows = (of.batch != 0 ? p.batch : 1) * (of.head != 0 ? p.nheads : 1) * v3_mask_blocks(of.row != 0 ? p.seqlen_q : 1);
  const int64_t blocks = rows * v3_mask_key_blocks(p.seqlen_k, !p.backward);
  const int64_t grid = rows * v3_mask_ctas(p.seqlen_k, !p.backward);
  const int64_t before = ceil_div(p.backward ? blocks : grid * 4, kV3MaskBytes) * kV3MaskBytes;
  return {blocks, before + blocks * kV3MaskBytes, before, grid, kV3MaskThreads * v3_mask_teams(!p.backward)};
}

std::string v3_mask_words_refusal(const Problem& p) {
  constexpr int64_t kMostForward = int64_t{1} << 25;  // whose words forward kernels count in 32 bits
  if (!p.backward && ceil_div(p.seqlen_k, kV3MaskSide) > kV3MaskMostBlocks)
    return text("seqlen_k is ", p.seqlen_k, "; with a mask of pairs algorithm v3's forward pass takes up to ",
                int64_t{kV3MaskMostBlocks} * kV3MaskSide);
  const int64_t blocks = v3_mask_words(p).blocks, most = p.backward ? kMaxGrid : kMostForward;
  if (blocks <= most) return {};
  return text("the mask of pairs has ", blocks, " blocks of ", kV3MaskSide, " x ", kV3MaskSide, ", which is more than ", most, "; split the batch");
}

V3MaskWordsKey v3_mask_words_key(const Problem& p) { return {.forward = !p.backward, .causal = p.causal}; }

jit::Request v3_mask_words_request(const V3MaskWordsKey& key) {
  const std::string entry = "fattn_v3_mask_words";
  return {.entry = entry,
          .source = text("// words of a mask of pairs, ", key.forward != 0 ? "forward" : "backward", key.causal != 0 ? ", causal" : "",
                         "\n#include \"kernels/v3/mask_words.h\"\nextern \"C\" __global__ void __launch_bounds__(",
                         kV3MaskThreads * v3_mask_teams(key.forward != 0), ", 1)\n", entry,
                         "(const __grid_constant__ fattn::PairParams call) {\n  fattn::v3::mask_words<", key.forward != 0 ? "true, " : "false, ",
                         key.causal != 0 ? "true" : "false", ">(call);\n}\n"),
          .arch = kV3Arch,
          .arch_specific = true};
}

}  // namespace fattn::core::cuda
