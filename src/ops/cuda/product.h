// Products of up to 16 rows by a kernel of our own, which reads the weight once (kernels/ops/product.h).
#pragma once

#include <vector>

#include "device_abi/ops_params.h"
#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {

inline constexpr int64_t kStrideUnit = 32, kOutputsUnit = 8;  // what rows of a packed weight, and their number, are filled up to
inline int64_t packed_stride(const Linear& p) { return (p.in + kStrideUnit - 1) / kStrideUnit * kStrideUnit; }
inline int64_t packed_rows(const Linear& p) { return (p.out + kOutputsUnit - 1) / kOutputsUnit * kOutputsUnit; }

// What a product has besides: LayerNorm before it, a cache that takes k and v.
struct ProductOptions {
  bool norm = false, keys_values = false;
};
// How a product is divided over a GPU.
struct ProductSplit {
  int rows = 0;      // of a CTA
  int tiles = 0;     // of 8 outputs, that a CTA has at once
  int shares = 0;    // warps that share a tile
  int held = 0;      // loads of a lane, 16 bytes each, that are under way at once
  int ctas = 0;      // of a multiprocessor, which registers are to suffice for; 0: as many as they do
  int64_t grid = 0;  // CTAs that take tiles of outputs in turn; 0: each has one
};
// The kernel, of which a CTA has up to key.rows rows.
struct ProductVariant {
  KernelKey key;
  int64_t grid = 0;
  int shared_bytes = 0;  // of a row
  int threads() const { return 32 * key.warps; }
  int shared_for(int64_t rows) const { return static_cast<int>(rows) * shared_bytes; }
  // All shared memory of a CTA: of its rows, and of what its warps sum up.
  int64_t shared_in_all() const { return shared_for(key.rows) + int64_t{4} * key.warps * 8 * key.rows; }
  // Of params.rows rows, those beyond a CTA's by others.
  void launch(const Gpu& gpu, const ProductParams& params, void* stream) const;
};
struct ProductTarget {
  int arch = 0, multiprocessors = 0, shared_bytes = 0;
};
ProductVariant product_variant(const Linear& problem, const ProductOptions& options, const ProductTarget& target, const ProductSplit& split);
// By rows, ascending; for up to `rows` of the problem, or as far as shared memory holds them.
std::vector<ProductVariant> product_variants(const Linear& problem, const ProductOptions& options, const ProductTarget& target);

class Product {
 public:
  // For calls of up to most_rows(), or of none: then all are somebody else's.
  Product(const Gpu& gpu, const Linear& problem, const ProductOptions& options);

  int64_t most_rows() const { return variants_.empty() ? 0 : variants_.back().key.rows; }
  void launch(const ProductParams& params, void* stream) const;

 private:
  const Gpu& gpu_;
  std::vector<ProductVariant> variants_;
};

}  // namespace fattn::ops::cuda
