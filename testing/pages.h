// A paged cache as keys side by side, and the other way round: what paged attention must be is what it is without pages.
#pragma once

#include <optional>
#include <vector>

#include "testing/tensors.h"

namespace fattn::testing {

// k and v of a paged cache (ScoreTensors::block_table), entry by entry, and what scores depend on beside them. Rows behind an entry's keys are NaN.
class Unpaged {
 public:
  Unpaged(const Tensor& k, const Tensor& v, const ScoreTensors& scores);
  const Tensor& k() const { return k_; }
  const Tensor& v() const { return v_; }
  const ScoreTensors& scores() const { return scores_; }

 private:
  Tensor gathered(const Tensor& pages, std::vector<unsigned char>& memory) const;

  const Tensor table_, lengths_;
  int64_t page_size_, keys_;  // of a page, of an entry at most
  std::vector<unsigned char> k_memory_, v_memory_;
  std::vector<int32_t> first_keys_;
  Tensor k_, v_;
  ScoreTensors scores_;
};

// The case with its keys in pages: at least as many, in whole pages, forward only; packed sequences with lengths. Nothing if its layout has q, k and
// v in one tensor.
std::optional<Case> in_pages(Case c, int64_t page_size);

// How the keys of a case with page_size > 0 lie in pages: in no order, some of them one behind the other, the first ones of all entries shared. What
// nobody may read is -1 or a number that is too large.
struct PageTable {
  int64_t pages, columns;
  std::vector<int32_t> numbers;  // (batch, columns)
};
// `keys`: of each batch entry.
PageTable page_table(const Case& c, const std::vector<int64_t>& keys);

}  // namespace fattn::testing
