// How products of few rows are divided over a GPU. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "ops/cuda/product.h"

namespace fattn::ops::cuda {
namespace {

constexpr ProductTarget kTargets[] = {{80, 108, 163 << 10}, {86, 84, 99 << 10}, {90, 132, 227 << 10}, {100, 148, 227 << 10}, {120, 170, 99 << 10}};

template <class Body>
void each_product(const Body& body) {
  for (const ProductTarget& target : kTargets)
    for (const DType dtype : {DType::kBF16, DType::kF32})
      for (const int64_t in : {1, 33, 100, 768, 1024, 1280, 1600, 3072, 6400, 20000})
        for (const int64_t out : {1, 64, 768, 1600, 2304, 4800, 6400, 50304})
          for (const int64_t rows : {1, 3, 16, 17, 64, 65, 1000})
            for (const bool norm : {false, true}) {
              SCOPED_TRACE(std::to_string(target.arch) + ": " + std::to_string(rows) + " x " + std::to_string(in) + " x " + std::to_string(out));
              body(Linear{rows, in, out, dtype, dtype}, ProductOptions{norm, false}, target);
            }
}

TEST(OpsProductsSmall, EveryOutputIsSomebodys) {
  each_product([](const Linear& p, const ProductOptions& options, const ProductTarget& target) {
    int64_t before = 0;
    for (const ProductVariant& v : product_variants(p, options, target)) {
      EXPECT_GT(v.key.rows, before);
      before = v.key.rows;
      EXPECT_EQ(v.key.warps % v.key.shares, 0);
      EXPECT_LE(v.shared_for(v.key.rows) + int64_t{4} * v.key.warps * 8 * v.key.rows, target.shared_bytes);
      const int64_t each = int64_t{8} * (v.key.warps / v.key.shares), tiles = (p.out + each - 1) / each;
      EXPECT_GE(v.grid, 1);
      EXPECT_LE(v.grid, tiles);
      if (v.key.several == 0) {
        EXPECT_EQ(v.grid, tiles) << "each CTA has one";
      }
      EXPECT_GE(v.key.held, 1);
    }
  });
}

// Up to 16 rows no row's sums depend on how many there are: warps share inputs in the same way.
TEST(OpsProductsSmall, FewRowsAreSummedAlike) {
  each_product([](const Linear& p, const ProductOptions& options, const ProductTarget& target) {
    Linear one = p;
    one.rows = 1;
    const auto of_one = product_variants(one, options, target);
    for (const ProductVariant& v : product_variants(p, options, target)) {
      ASSERT_FALSE(of_one.empty());
      EXPECT_EQ(v.key.shares, of_one.front().key.shares);
    }
  });
}

}  // namespace
}  // namespace fattn::ops::cuda
