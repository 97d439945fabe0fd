#include "ops/cuda/planned.h"

#include <algorithm>

#include "ops/cuda/product.h"

namespace fattn::ops::cuda {
namespace {

struct Size {
  int64_t width, vocab;
};
constexpr Size kSizes[] = {{768, 50304}, {1024, 50304}, {1280, 50304}, {1600, 50304}};  // gpt2, -medium, -large, -xl

// The one that decides how a product is split: others of an architecture have other numbers, and compile what they need.
ProductTarget target_of(int arch) {
  switch (arch) {
    case 80: return {arch, 108, 163 << 10};
    case 86: return {arch, 84, 99 << 10};
    case 89: return {arch, 128, 99 << 10};
    case 100: return {arch, 148, 227 << 10};
    case 120: return {arch, 170, 99 << 10};
    default: return {arch, 132, 227 << 10};
  }
}

class List {
 public:
  explicit List(int arch) : arch_(arch) {}
  void add(const KernelKey& key, bool quick) {
    const auto found = std::find_if(all_.begin(), all_.end(), [&](const PlannedKernel& k) { return k.key == key; });
    if (found == all_.end())
      all_.push_back({key, quick});
    else
      found->quick = found->quick || quick;
  }
  void add(KernelKind kind, DType dtype, bool quick, int64_t width = 0) {
    KernelKey key;
    key.kind = kind;
    key.arch = arch_;
    if (has_element(kind)) key.dtype = static_cast<int32_t>(dtype);
    key.in = static_cast<int32_t>(width);
    if (kind == KernelKind::kKeysValues) key.wide = 1;
    add(key, quick);
  }
  void add(const Linear& p, const ProductOptions& options, bool quick) {
    for (const ProductVariant& v : product_variants(p, options, target_of(arch_))) add(v.key, quick);
  }
  // What training has besides.
  void add_training(DType dtype, bool quick) {
    for (const KernelKind kind : {KernelKind::kColumnSums, KernelKind::kLossGradient, KernelKind::kAdamW, KernelKind::kRotary})
      add(kind, dtype, quick);
    KernelKey key;
    key.arch = arch_;
    key.kind = KernelKind::kActivate;
    key.dtype = static_cast<int32_t>(dtype);
    for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu})
      for (const int32_t gradient : {0, 1}) {
        key.activation = static_cast<int32_t>(activation);
        key.gradient = gradient;
        add(key, quick && activation == Activation::kGeluTanh);
      }
    key = {};
    key.arch = arch_;
    key.kind = KernelKind::kConvert;
    for (const auto& [from, to] : {std::pair(dtype, DType::kF32), std::pair(DType::kF32, dtype)}) {
      key.dtype = static_cast<int32_t>(from);
      key.to = static_cast<int32_t>(to);
      add(key, quick);
    }
  }
  void add_norm_gradient(DType dtype, int64_t width, bool quick) {
    KernelKey key;
    key.arch = arch_;
    key.kind = KernelKind::kNormGradient;
    key.dtype = static_cast<int32_t>(dtype);
    key.in = static_cast<int32_t>(width);
    key.wide = width % 4 == 0 ? 1 : 0;
    add(key, quick);
  }
  std::vector<PlannedKernel> all() && { return std::move(all_); }

 private:
  const int arch_;
  std::vector<PlannedKernel> all_;
};

}  // namespace

std::vector<PlannedKernel> planned_kernels(int arch) {
  List list(arch);
  for (const KernelKind kind : {KernelKind::kDraw, KernelKind::kLoss, KernelKind::kJoinSums, KernelKind::kEmbeddingGradient, KernelKind::kDropout,
                                KernelKind::kLossSums, KernelKind::kSquareSum, KernelKind::kJoinSquares})
    list.add(kind, DType::kF32, true);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const bool common = dtype != DType::kF16;
    list.add(KernelKind::kEmbedding, dtype, common);
    list.add(KernelKind::kKeysValues, dtype, common);
    list.add_training(dtype, common);
    for (const Size& size : kSizes) {
      const int64_t n = size.width;
      const bool quick = common && n == 768;
      list.add(KernelKind::kNorm, dtype, quick, n);
      list.add_norm_gradient(dtype, n, quick);
      list.add(Linear{16, n, 3 * n, dtype, dtype}, {true, true}, quick);
      list.add(Linear{16, n, n, dtype, DType::kF32, Activation::kNone, true}, {}, quick);
      list.add(Linear{16, n, 4 * n, dtype, dtype, Activation::kGeluTanh}, {true, false}, quick);
      list.add(Linear{16, 4 * n, n, dtype, DType::kF32, Activation::kNone, true}, {}, quick);
      list.add(Linear{16, n, size.vocab, dtype, DType::kF32}, {true, false}, quick);
    }
  }
  return std::move(list).all();
}

}  // namespace fattn::ops::cuda
