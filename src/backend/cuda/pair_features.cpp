#include "backend/cuda/pair_features.h"

#include "shared/text.h"

namespace fattn::core::cuda {

PairFeatures pair_features(const Problem& problem) {
  PairFeatures pair;
  pair.lengths = problem.has_seqused_k || problem.paged;
  pair.alibi = problem.has_alibi;
  pair.bias = !problem.bias.given ? 0 : problem.bias.dtype == DType::kF32 ? 2 : 1;
  pair.mask = problem.pair_mask.given;
  pair.dropout = problem.dropout_below > 0;
  pair.dbias = problem.backward && problem.dbias.given;
  pair.packed = problem.packed;
  pair.documents = problem.has_documents;
  pair.sinks = problem.has_sinks && !problem.backward;
  pair.paged = problem.paged;
  pair.fp32_out = problem.fp32_out;
  pair.places = problem.dropout_places && pair.dropout;
  return pair;
}

int32_t pair_bits(const PairFeatures& pair) {
  return (pair.lengths ? 1 : 0) | (pair.alibi ? 2 : 0) | pair.bias << 2 | (pair.mask ? 16 : 0) | (pair.dropout ? 32 : 0) | (pair.dbias ? 64 : 0) |
         (pair.packed ? 128 : 0) | (pair.documents ? 256 : 0) | (pair.dlse ? 512 : 0) | (pair.sinks ? 1024 : 0) | (pair.paged ? 2048 : 0) |
         (pair.fp32_out ? 4096 : 0) | (pair.places ? 8192 : 0);
}

PairFeatures pair_features_of(int32_t bits) {
  return {(bits & 1) != 0,   (bits & 2) != 0,   bits >> 2 & 3,      (bits & 16) != 0,   (bits & 32) != 0,   (bits & 64) != 0,  (bits & 128) != 0,
          (bits & 256) != 0, (bits & 512) != 0, (bits & 1024) != 0, (bits & 2048) != 0, (bits & 4096) != 0, (bits & 8192) != 0};
}

std::string pair_line(int32_t bits) {
  if (bits == 0) return {};
  const PairFeatures pair = pair_features_of(bits);
  const auto flag = [](bool x) { return x ? "true" : "false"; };
  return text("  static constexpr fattn::PairFeatures kPair = {.lengths = ", flag(pair.lengths), ", .alibi = ", flag(pair.alibi),
              ", .bias = ", pair.bias, ", .mask = ", flag(pair.mask), ", .dropout = ", flag(pair.dropout), ", .dbias = ", flag(pair.dbias),
              pair.packed ? ", .packed = true" : "", pair.documents ? ", .documents = true" : "", pair.dlse ? ", .dlse = true" : "",
              pair.sinks ? ", .sinks = true" : "", pair.paged ? ", .paged = true" : "", pair.fp32_out ? ", .fp32_out = true" : "",
              pair.places ? ", .places = true" : "", "};\n");
}

std::string names_of_pair(int32_t bits) {
  const PairFeatures pair = pair_features_of(bits);
  std::string names;
  if (pair.lengths) names += ", lengths";
  if (pair.alibi) names += ", ALiBi";
  if (pair.bias != 0) names += pair.bias == 2 ? ", fp32 bias" : ", bias";
  if (pair.mask) names += ", mask";
  if (pair.dropout) names += pair.places ? ", dropout of a part" : ", dropout";
  if (pair.dbias) names += ", dbias";
  if (pair.packed) names += ", packed";
  if (pair.documents) names += ", documents";
  if (pair.dlse) names += ", dlse";
  if (pair.sinks) names += ", sinks";
  if (pair.paged) names += ", pages";
  if (pair.fp32_out) names += ", fp32 outputs";
  return names;
}

}  // namespace fattn::core::cuda
