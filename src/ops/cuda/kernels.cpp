#include "ops/cuda/kernels.h"

#include <string>

#include "device_abi/ops_params.h"
#include "device_abi/training_params.h"
#include "fattn/error.hpp"
#include "jit/kernel_table.h"
#include "jit/planned.h"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

using core::text;

constexpr int kArchitectures[] = {80, 86, 87, 89, 90, 100, 120};  // a cubin runs on later minor versions of its major one
constexpr int kDependent = 90;                                    // from here on a kernel comes up while the one before it ends

int arch_of(const core::CudaDeviceInfo& info) {
  int found = 0;
  for (const int arch : kArchitectures)
    if (arch / 10 == info.major && arch <= info.capability()) found = arch;
  if (found == 0)
    throw Error(ErrorCode::kUnsupported, text("cuda:", info.index, " (", info.name, ") has compute capability ", info.major, ".", info.minor,
                                              "; operations have kernels for 8.0 to 9.0, 10.x and 12.x: use the CPU"));
  return found;
}

const char* element_of(int32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16: return "fattn::f16";
    case DType::kBF16: return "fattn::bf16";
    default: return "float";
  }
}

const char* activation_of(int32_t activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kGeluTanh: return "kGeluTanh";
    case Activation::kGelu: return "kGelu";
    default: return "kNone";
  }
}

const char* y_of(ProductY y) { return y == ProductY::kElement ? "kElement" : y == ProductY::kSingle ? "kSingle" : "kAdded"; }

struct Source {
  const char *name, *header, *params, *function;
  int threads;
};
Source source_of(KernelKind kind) {
  switch (kind) {
    case KernelKind::kEmbedding: return {"fattn_ops_embedding", "rows", "EmbeddingParams", "embedding", kOpsThreads};
    case KernelKind::kNorm: return {"fattn_ops_norm", "norm", "NormParams", "norm", kOpsThreads};
    case KernelKind::kKeysValues: return {"fattn_ops_keys_values", "rows", "KeysValuesParams", "keys_values", kOpsThreads};
    case KernelKind::kProduct: return {"fattn_ops_product", "product", "ProductParams", "product", kOpsThreads};
    case KernelKind::kBias: return {"fattn_ops_bias", "rows", "BiasParams", "add_bias", kOpsThreads};
    case KernelKind::kLoss: return {"fattn_ops_loss", "loss", "LossParams", "loss", kOpsThreads};
    case KernelKind::kConvert: return {"fattn_ops_convert", "elementwise", "ConvertParams", "convert", kOpsThreads};
    case KernelKind::kColumnSums: return {"fattn_ops_column_sums", "column_sums", "ColumnSumsParams", "column_sums", kOpsThreads};
    case KernelKind::kJoinSums: return {"fattn_ops_join_sums", "column_sums", "JoinSumsParams", "join_sums", kOpsThreads};
    case KernelKind::kActivate: return {"fattn_ops_activate", "elementwise", "ActivateParams", "activate", kOpsThreads};
    case KernelKind::kNormGradient: return {"fattn_ops_norm_gradient", "norm_gradient", "NormGradientParams", "norm_gradient", kOpsThreads};
    case KernelKind::kEmbeddingGradient:
      return {"fattn_ops_embedding_gradient", "embedding_gradient", "EmbeddingGradientParams", "embedding_gradient", kOpsThreads};
    case KernelKind::kRotary: return {"fattn_ops_rotary", "rotary", "RotaryParams", "rotary", kOpsThreads};
    case KernelKind::kDropout: return {"fattn_ops_dropout", "dropout", "DropoutParams", "dropout", kOpsThreads};
    case KernelKind::kLossGradient: return {"fattn_ops_loss_gradient", "loss_gradient", "LogitGradientParams", "loss_gradient", kLogitThreads};
    case KernelKind::kLossSums: return {"fattn_ops_loss_sums", "loss_sums", "LossSumsParams", "loss_sums", kLogitThreads};
    case KernelKind::kSquareSum: return {"fattn_ops_square_sum", "square_sum", "SquareSumParams", "square_sum", kOpsThreads};
    case KernelKind::kJoinSquares: return {"fattn_ops_join_squares", "square_sum", "JoinSquaresParams", "join_squares", kOpsThreads};
    case KernelKind::kAdamW: return {"fattn_ops_adamw", "elementwise", "AdamWParams", "adamw", kOpsThreads};
    case KernelKind::kDraw: break;
  }
  return {"fattn_ops_draw", "draw", "DrawParams", "draw", kDrawThreads};
}

// The members of a specialisation.
std::string spec_of(const KernelKey& key) {
  std::string spec;
  const auto number = [&](const char* name, int64_t value) { spec += text("  static constexpr int ", name, " = ", value, ";\n"); };
  const auto flag = [&](const char* name, bool value) { spec += text("  static constexpr bool ", name, " = ", value ? "true" : "false", ";\n"); };
  if (has_element(key.kind)) spec += text("  using Element = ", element_of(key.dtype), ";\n");
  switch (key.kind) {
    case KernelKind::kProduct:
      number("kIn", key.in);
      number("kRows", key.rows);
      number("kShares", key.shares);
      number("kWarps", key.warps);
      number("kHeld", key.held);
      number("kCtas", key.ctas);
      flag("kNorm", key.norm != 0);
      flag("kKeysValues", key.keys_values != 0);
      flag("kSeveral", key.several != 0);
      spec += text("  static constexpr fattn::ops::Y kY = fattn::ops::Y::", y_of(key.y), ";\n");
      break;
    case KernelKind::kNorm:
      number("kIn", key.in);
      flag("kAdd", key.add != 0);
      break;
    case KernelKind::kKeysValues:
      flag("kRotary", key.rotary != 0);
      flag("kWide", key.wide != 0);
      break;
    case KernelKind::kBias: spec += text("  using Y = ", key.y == ProductY::kElement ? element_of(key.dtype) : "float", ";\n"); break;
    case KernelKind::kConvert: spec += text("  using To = ", element_of(key.to), ";\n"); break;
    case KernelKind::kActivate: flag("kGradient", key.gradient != 0); break;
    case KernelKind::kNormGradient:
      number("kIn", key.in);
      flag("kWide", key.wide != 0);
      break;
    default: break;
  }
  if (key.kind == KernelKind::kProduct || key.kind == KernelKind::kBias || key.kind == KernelKind::kActivate)
    spec += text("  static constexpr fattn::ops::Activation kActivation = fattn::ops::Activation::", activation_of(key.activation), ";\n");
  flag("kDependent", key.arch >= kDependent);
  return spec;
}

// What `fattn cache list` shows.
std::string comment_of(const KernelKey& key) {
  std::string line = text("// ", has_element(key.kind) ? name_of(static_cast<DType>(key.dtype)) : "fp32");
  if (key.kind == KernelKind::kConvert) line += text(" to ", name_of(static_cast<DType>(key.to)));
  if (key.in > 0) line += text(", width ", key.in);
  if (key.rows > 0) line += text(", up to ", key.rows, " rows, ", key.shares, " of ", key.warps, " warps an output, ", key.held, " loads");
  if (key.ctas > 0) line += text(", ", key.ctas, " CTAs");
  if (key.norm != 0) line += ", LayerNorm";
  if (key.keys_values != 0) line += ", keys and values";
  if (key.activation != 0) line += ", GELU";
  if (key.add != 0 || key.y == ProductY::kAdded) line += ", added";
  if (key.rotary != 0) line += ", rotary";
  if (key.gradient != 0) line += ", gradient";
  if (key.several != 0) line += ", many outputs";
  return line + "\n";
}

core::jit::Request make_request(const core::jit::KernelKey& key) { return request_of(core::jit::pod_of_key<KernelKey>(key)); }

}  // namespace

bool has_element(KernelKind kind) {
  switch (kind) {
    case KernelKind::kDraw:
    case KernelKind::kLoss:
    case KernelKind::kJoinSums:
    case KernelKind::kEmbeddingGradient:
    case KernelKind::kDropout:
    case KernelKind::kLossSums:
    case KernelKind::kSquareSum:
    case KernelKind::kJoinSquares: return false;
    default: return true;
  }
}

core::jit::Request request_of(const KernelKey& key) {
  Source s = source_of(key.kind);
  if (key.warps > 0) s.threads = 32 * key.warps;
  const bool plain = key.kind == KernelKind::kLoss;
  std::string source = text(comment_of(key), "#include \"kernels/ops/", s.header, ".h\"\n");
  if (!plain) source += text("struct Spec {\n", spec_of(key), "};\n");
  source += text("extern \"C\" __global__ void __launch_bounds__(", s.threads, key.ctas > 0 ? text(", ", key.ctas) : "", ") ", s.name,
                 "(const __grid_constant__ fattn::", s.params, " p) {\n  fattn::ops::", s.function, plain ? "" : "<Spec>", "(p);\n}\n");
  return {.entry = s.name, .source = source, .arch = key.arch, .arch_specific = false, .sources = embedded_sources};
}

}  // namespace fattn::ops::cuda

// What packs and `fattn cache warm` have besides, wherever operations are linked.
namespace fattn::core::jit {
PlannedList further_planned() { return {ops::cuda::embedded_planned, ops::cuda::embedded_sources}; }
}  // namespace fattn::core::jit

namespace fattn::ops::cuda {

Gpu::Gpu(const Device& device) : device_(core::cuda_device(device.gpu)), arch_(arch_of(device_.info())) { device_.require_usable(); }

KernelKey Gpu::key_of(KernelKind kind, DType dtype) const {
  KernelKey key;
  key.kind = kind;
  key.arch = arch_;
  if (has_element(kind)) key.dtype = static_cast<int32_t>(dtype);
  return key;
}

void Gpu::load(const KernelKey& key) const { core::jit::kernel_table().get(device_, core::jit::key_of_pod(key), make_request); }

void Gpu::launch(const KernelKey& key, int64_t grid, int threads, int shared_bytes, const void* params, void* stream, int64_t grid_y) const {
  const core::jit::Loaded& loaded = core::jit::kernel_table().get(device_, core::jit::key_of_pod(key), make_request);
  core::CudaLaunch shape;
  shape.grid_x = static_cast<unsigned>(grid);
  shape.grid_y = static_cast<unsigned>(grid_y);
  shape.block_x = static_cast<unsigned>(threads);
  shape.shared_bytes = static_cast<unsigned>(shared_bytes);
  shape.early = key.arch >= kDependent && key.kind != KernelKind::kBias && key.kind != KernelKind::kLoss;
  void* parameters[] = {const_cast<void*>(params)};
  device_.launch(loaded.function, shape, stream_of(stream), parameters, loaded.name.c_str());
}

}  // namespace fattn::ops::cuda
