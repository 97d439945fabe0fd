// Softmax over numbers that come in blocks: the three values that are kept, and how a block changes them.
#pragma once

#include <cstddef>
#include <vector>

namespace fattn::lab {

// After one block: `greatest` of the scores so far, `sum` of exp(score - greatest), `weighted` the same with their values.
struct SoftmaxStep {
  size_t begin = 0, end = 0;  // of the block
  double greatest = 0, factor = 0, sum = 0, weighted = 0;
  double exact = 0;  // softmax over all scores so far at once, times their values
  double result() const { return weighted / sum; }
};

// `scores` and `values` are of one length; `block` is above 0.
std::vector<SoftmaxStep> online_softmax(const std::vector<double>& scores, const std::vector<double>& values, size_t block);

}  // namespace fattn::lab
