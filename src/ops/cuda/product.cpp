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

int64_t ctas_of(const Linear& p, int shares) {
  const int64_t tiles = kWarps / shares;  // of 8 outputs that a CTA has
  return (packed_rows(p) / kOutputsUnit + tiles - 1) / tiles;
}

// As few warps an output as give every multiprocessor a CTA, and no lane more to wait for than it holds.
int shares_of(const Linear& p, int multiprocessors) {
  const int64_t chunks = packed_stride(p) * static_cast<int64_t>(size_of(p.dtype)) / 64;
  int shares = 1;
  while (shares < kWarps && (ctas_of(p, shares) < multiprocessors || (chunks + shares - 1) / shares > kLoads)) shares *= 2;
  return shares;
}

}  // namespace

std::vector<ProductVariant> product_variants(const Linear& p, const ProductOptions& options, const ProductTarget& target) {
  std::vector<ProductVariant> variants;
  if (p.in > kMostIn || p.out >= int64_t{1} << 31) return variants;
  const int shares = shares_of(p, target.multiprocessors);
  const int64_t ctas = ctas_of(p, shares), together = 2 * target.multiprocessors;
  const bool several = ctas > 2 * together;
  int before = 0;
  for (const int rows : rows_of(p.dtype)) {
    const int64_t parts = int64_t{4} * kWarps * 8 * rows, shared = row_bytes(p) * rows;
    if (shared + parts > target.shared_bytes || before >= p.rows) break;
    ProductVariant v;
    v.key.kind = KernelKind::kProduct;
    v.key.arch = target.arch;
    v.key.dtype = static_cast<int32_t>(p.dtype);
    v.key.in = static_cast<int32_t>(p.in);
    v.key.rows = rows;
    v.key.shares = shares;
    v.key.y = p.accumulate ? ProductY::kAdded : p.y == DType::kF32 ? ProductY::kSingle : ProductY::kElement;
    v.key.activation = static_cast<int32_t>(p.activation);
    v.key.norm = options.norm ? 1 : 0;
    v.key.keys_values = options.keys_values ? 1 : 0;
    v.key.several = several ? 1 : 0;
    v.grid = several ? together : ctas;
    v.shared_bytes = static_cast<int>(row_bytes(p));
    variants.push_back(v);
    before = rows;
  }
  return variants;
}

Product::Product(const Gpu& gpu, const Linear& p, const ProductOptions& options)
    : gpu_(gpu), problem_(p), variants_(product_variants(p, options, {gpu.arch(), gpu.multiprocessors(), gpu.shared_bytes()})) {
  for (const ProductVariant& v : variants_) gpu.load(v.key);
}

void Product::launch(const ProductParams& params, void* stream) const {
  const auto found = std::find_if(variants_.begin(), variants_.end(), [&](const ProductVariant& v) { return params.rows <= v.key.rows; });
  const int rows = problem_.dtype == DType::kF32 ? found->key.rows : params.rows;  // in shared memory
  gpu_.launch(found->key, found->grid, kOpsThreads, rows * found->shared_bytes, &params, stream);
}

}  // namespace fattn::ops::cuda
