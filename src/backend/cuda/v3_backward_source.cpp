// The sources of v3's backward kernels.
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/v3_backward.h"
#include "device_abi/v3_packed_tiles.h"
#include "shared/text.h"

namespace fattn::core::cuda {

jit::Request v3_packed_key_tiles_request(const V3PackedKeyTilesKey& key) {
  const std::string entry = "fattn_v3_packed_key_tiles";
  return {
      .entry = entry,
      .source = text(
          "// tiles of ", key.block_n, " keys of packed sequences", key.lengths != 0 ? " with lengths" : "",
          "\n#include \"kernels/v3/packed_key_tiles.h\"\nextern \"C\" __global__ void __launch_bounds__(", kV3PackThreads, ", 1)\n", entry,
          "(const __grid_constant__ fattn::PairParams call, const __grid_constant__ fattn::V3BackwardWork work) {\n  fattn::v3::packed_key_tiles<",
          key.block_n, key.lengths != 0 ? ", true" : ", false", ">(call, work);\n}\n"),
      .arch = kV3Arch,
      .arch_specific = true};
}

jit::Request v3_backward_request(const V3BackwardKey& key) { return v3_backward_request(key, v3_backward_rows()[static_cast<size_t>(key.row)].tile); }

jit::Request v3_backward_request(const V3BackwardKey& key, const V3BackwardTile& tile) {
  const bool prepare = key.kind == KernelKind::kV3BackwardPrepare, finish = key.kind == KernelKind::kV3BackwardFinish;
  const bool dbias = key.kind == KernelKind::kV3BackwardDbias, main = !prepare && !finish && !dbias;
  const char* const function = prepare ? "backward_prepare" : finish ? "backward_finish" : dbias ? "backward_dbias" : "backward";
  const std::string entry = prepare ? "fattn_v3_bwd_prepare" : finish ? "fattn_v3_bwd_finish" : dbias ? "fattn_v3_bwd_dbias" : "fattn_v3_bwd";
  V3Source source(key.dtype, key.width, key.width_v);
  source.comment_on(key.mask, key.score);
  if (key.deterministic != 0) source.add(", deterministic");
  if (key.ring != 0) source.add(", many heads");
  source.add(names_of_pair(key.pair));
  if (main) source.add(", tile ", kV3BackwardRows, " x ", tile.block_n());
  source.add("\n#include \"kernels/v3/", function, ".h\"\n#include \"kernels/v3/mask.h\"\n#include \"kernels/v3/score.h\"\n\nstruct Spec {\n");
  source.add_element(key.dtype);
  source.add_int("kHeaddim", key.width);
  if (!finish) source.add_int("kHeaddimV", key.width_v);
  if (!finish) source.add_bool("kDeterministic", key.deterministic != 0);
  const PairFeatures its = pair_features_of(key.pair);
  if (!prepare && its.documents)
    source.add_type("Mask", text("v3::DocumentMask<fattn::", kV3MaskTypes[static_cast<int>(key.mask)], ">").c_str());
  else if (main && its.mask)
    source.add_type(
        "Mask", text("v3::PairsMask<fattn::", key.mask == V3Mask::kFull ? "v3::EntryMask" : kV3MaskTypes[static_cast<int>(key.mask)], ">").c_str());
  else if (!prepare && key.mask == V3Mask::kFull && (its.packed || its.mask || its.bias != 0))
    source.add_type("Mask", "v3::EntryMask");  // rows of other sequences are hidden, or any pairs
  else if (!prepare)
    source.add_mask(key.mask);
  if (!prepare) source.add_score(key.score);
  if (key.ring != 0) source.add_bool("kRing", true);
  if (finish) source.add_int("kBlockN", tile.block_n());
  if (main) {
    source.add_bool("kByRole", tile.by_role);
    source.add_int("kGroups", tile.groups);
    source.add_int("kStages", tile.stages);
    source.add_int("kStagings", tile.stagings);
    source.add_bool("kOwnLoader", tile.own_loader);
    source.add_int("kMainRegisters", tile.main_registers);
    source.add_int("kDqRegisters", tile.dq_registers);
    source.add_int("kLoaderRegisters", tile.loader_registers);
  }
  source.add(pair_line(key.pair), "};\n");
  if (main)  // what the host counted on
    source.add("static_assert(fattn::v3::BackwardShape<Spec>::kThreads == ", tile.threads(),
               " && fattn::v3::BackwardShape<Spec>::kSharedBytes == ", tile.shared_bytes(key.width, key.width_v, pair_features_of(key.pair)), ");\n");
  if (dbias)
    source.add("static_assert(fattn::v3::DbiasShape<Spec>::kThreads == ", kV3DbiasThreads,
               " && fattn::v3::DbiasShape<Spec>::kSharedBytes == ", dbias_shared_bytes(key), ");\n");
  const int threads = prepare ? kV3PrepareThreads : finish ? kV3FinishThreads : dbias ? kV3DbiasThreads : tile.threads();
  source.add("\nextern \"C\" __global__ void __launch_bounds__(", threads, ", 1)\n", entry,
             "(const __grid_constant__ fattn::", params_of(has_features(key.mask, key.score), key.pair),
             " call, const __grid_constant__ fattn::V3BackwardWork work");
  if (prepare) {
    source.add(") {\n  fattn::v3::backward_prepare<Spec>(call, work);\n}\n");
  } else {
    for (const char* name : {"q", "k", "v", "dout", "dk", "dv"}) source.add(",\n    const __grid_constant__ fattn::TensorMap ", name);
    source.add(") {\n  fattn::v3::", function, "<Spec>({call, work, q, k, v, dout, dk, dv});\n}\n");
  }
  return {.entry = entry, .source = source.text(), .arch = kV3Arch, .arch_specific = true};
}

}  // namespace fattn::core::cuda
