// How a product of few rows may be divided over a GPU, for the search among all ways (tune_products.cpp).
#pragma once

#include <algorithm>
#include <vector>

#include "ops/cuda/product.h"

namespace fattn::test {

// All that may be good.
inline std::vector<ops::cuda::ProductSplit> product_splits(const ops::Linear& p, const ops::cuda::ProductTarget& target) {
  using ops::cuda::ProductSplit;
  std::vector<ProductSplit> all;
  const int64_t chunks = (p.in + 31) / 32, outputs = p.out / 8;
  for (const int rows : p.rows <= 8 ? std::vector<int>{8} : p.rows <= 16 ? std::vector<int>{16} : std::vector<int>{16, 32}) {
    const int64_t groups = (p.rows + rows - 1) / rows;
    for (const int shares : {1, 2, 4, 8}) {
      const int64_t loads = (chunks + shares - 1) / shares;
      if (loads > 64 || 8 / shares * rows > 128) continue;
      int64_t before = 0;
      for (const int most : {13, 9, 7, 5}) {
        const int64_t stages = (loads + most - 1) / most, held = (loads + stages - 1) / stages;
        if (held == before || stages > 12) continue;
        before = held;
        for (const int ctas : {1, 2, 3}) {
          const int64_t tiles = (outputs * shares + 7) / 8, each = std::max<int64_t>(1, ctas * target.multiprocessors / groups);
          if (ctas == 1 && held < 9) continue;
          const ProductSplit split{rows, 8 / shares, shares, static_cast<int>(held), ctas, 0};
          all.push_back(split);
          if (tiles > each) all.push_back({rows, 8 / shares, shares, static_cast<int>(held), ctas, each});
        }
      }
    }
  }
  return all;
}

}  // namespace fattn::test
