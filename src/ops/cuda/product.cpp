#include "ops/cuda/product.h"

#include <algorithm>

namespace fattn::ops::cuda {
namespace {

constexpr int kWarps = kOpsThreads / 32;
constexpr int64_t kMostIn = 1 << 15;
constexpr int kLoads = 8;  // of 16 bytes that a lane has under way at most, where there are warps enough

// Rows of a kernel: matrix instructions have 8 or 16.
std::vector<int> rows_of(DType dtype) { return dtype == DType::kF32 ? std::vector<int>{1, 4, 8, 16} : std::vector<int>{8, 16}; }

// Bytes of a row of x in shared memory (ProductShape::kRowBytes).
int64_t row_bytes(const Linear& p) { return packed_stride(p) * static_cast<int64_t>(size_of(p.dtype)) + (p.dtype == DType::kF32 ? 0 : 64); }

int64_t ctas_of(const Linear& p, int tiles) { return (packed_rows(p) / kOutputsUnit + tiles - 1) / tiles; }

// As few warps an output as give every multiprocessor a CTA, and no lane more to wait for than it holds.
int shares_of(const Linear& p, int multiprocessors) {
  const int64_t chunks = packed_stride(p) * static_cast<int64_t>(size_of(p.dtype)) / 64;
  int shares = 1;
  while (shares < kWarps && (ctas_of(p, kWarps / shares) < multiprocessors || (chunks + shares - 1) / shares > kLoads)) shares *= 2;
  return shares;
}

// Weights that are many outputs wide: each warp has 8 outputs of its own, and CTAs take the next ones in turn.
ProductSplit split_of_many(const Linear& p, const ProductTarget& target) {
  constexpr int64_t kShort = 768;  // inputs: of as many a CTA is soon done, and the next one comes up meanwhile
  if (p.in <= kShort) return {.tiles = kWarps, .shares = 1, .held = 6, .ctas = 2};
  return {.tiles = kWarps, .shares = 1, .held = 13, .ctas = 1, .grid = target.multiprocessors};
}

// Measured on one H200 by tests/tune_products.
ProductSplit split_of(const Linear& p, const ProductTarget& target) {
  const bool hopper = target.arch == 90 && p.dtype != DType::kF32;
  ProductSplit split;
  split.shares = shares_of(p, target.multiprocessors);
  split.tiles = kWarps / split.shares;
  const int64_t ctas = ctas_of(p, split.tiles), together = 2 * target.multiprocessors;
  if (hopper && ctas_of(p, kWarps) > together) return split_of_many(p, target);
  // Each warp has 8 outputs of its own, where these are of many inputs: nothing is put together that others wait for.
  constexpr int64_t kLong = 1600;
  if (hopper && p.in >= kLong && 2 * ctas_of(p, kWarps) > target.multiprocessors) return {.tiles = kWarps, .shares = 1, .held = 13, .ctas = 1};
  const int64_t chunks = packed_stride(p) * static_cast<int64_t>(size_of(p.dtype)) / 64;
  const int64_t loads = (chunks + split.shares - 1) / split.shares;
  // In kernels for 8.x ptxas gives a thread half of its registers.
  const bool wide = target.arch >= 90 && p.dtype != DType::kF32;
  if (ctas > 2 * together) split.grid = together;
  split.held = wide ? 12 : split.grid > 0 && p.in > 768 ? 4 : loads <= 8 ? 8 : 5;
  split.ctas = hopper ? 2 : 0;
  return split;
}

}  // namespace

ProductVariant product_variant(const Linear& p, const ProductOptions& options, const ProductTarget& target, const ProductSplit& split) {
  ProductVariant v;
  v.key.kind = KernelKind::kProduct;
  v.key.arch = target.arch;
  v.key.dtype = static_cast<int32_t>(p.dtype);
  v.key.in = static_cast<int32_t>(p.in);
  v.key.rows = split.rows;
  v.key.shares = split.shares;
  v.key.warps = static_cast<int16_t>(split.tiles * split.shares);
  v.key.held = static_cast<int16_t>(split.held);
  v.key.ctas = static_cast<int16_t>(split.ctas);
  v.key.y = p.accumulate ? ProductY::kAdded : p.y == DType::kF32 ? ProductY::kSingle : ProductY::kElement;
  v.key.activation = static_cast<int32_t>(p.activation);
  v.key.norm = options.norm ? 1 : 0;
  v.key.keys_values = options.keys_values ? 1 : 0;
  v.key.several = split.grid > 0 ? 1 : 0;
  v.grid = split.grid > 0 ? split.grid : ctas_of(p, split.tiles);
  v.shared_bytes = static_cast<int>(row_bytes(p));
  return v;
}

void ProductVariant::launch(const Gpu& gpu, const ProductParams& params, void* stream) const {
  const int rows = static_cast<DType>(key.dtype) == DType::kF32 ? key.rows : std::min(params.rows, key.rows);  // in shared memory
  gpu.launch(key, grid, threads(), shared_for(rows), &params, stream, (params.rows + key.rows - 1) / key.rows);
}

std::vector<ProductVariant> product_variants(const Linear& p, const ProductOptions& options, const ProductTarget& target) {
  std::vector<ProductVariant> variants;
  if (p.in > kMostIn || p.out >= int64_t{1} << 31) return variants;
  const ProductSplit planned = split_of(p, target);
  int before = 0;
  for (const int rows : rows_of(p.dtype)) {
    ProductSplit split = planned;
    split.rows = rows;
    const ProductVariant v = product_variant(p, options, target, split);
    if (v.shared_in_all() > target.shared_bytes || before >= p.rows) break;
    variants.push_back(v);
    before = rows;
  }
  return variants;
}

Product::Product(const Gpu& gpu, const Linear& p, const ProductOptions& options)
    : gpu_(gpu), variants_(product_variants(p, options, {gpu.arch(), gpu.multiprocessors(), gpu.shared_bytes()})) {
  for (const ProductVariant& v : variants_) gpu.load(v.key);
}

void Product::launch(const ProductParams& params, void* stream) const {
  std::find_if(variants_.begin(), variants_.end(), [&](const ProductVariant& v) { return params.rows <= v.key.rows; })->launch(gpu_, params, stream);
}

}  // namespace fattn::ops::cuda
