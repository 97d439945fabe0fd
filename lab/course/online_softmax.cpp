#include "lab/course/online_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fattn::lab {
namespace {

double softmax_at_once(const std::vector<double>& scores, const std::vector<double>& values, size_t count) {
  const double greatest = *std::max_element(scores.begin(), scores.begin() + static_cast<ptrdiff_t>(count));
  double sum = 0, weighted = 0;
  for (size_t j = 0; j < count; ++j) {
    const double weight = std::exp(scores[j] - greatest);
    sum += weight;
    weighted += weight * values[j];
  }
  return weighted / sum;
}

}  // namespace

std::vector<SoftmaxStep> online_softmax(const std::vector<double>& scores, const std::vector<double>& values, size_t block) {
  std::vector<SoftmaxStep> steps;
  double greatest = -std::numeric_limits<double>::infinity(), sum = 0, weighted = 0;
  for (size_t begin = 0; begin < scores.size(); begin += block) {
    SoftmaxStep step;
    step.begin = begin;
    step.end = std::min(begin + block, scores.size());
    step.greatest = greatest;
    for (size_t j = begin; j < step.end; ++j) step.greatest = std::max(step.greatest, scores[j]);
    step.factor = std::exp(greatest - step.greatest);
    greatest = step.greatest;
    sum *= step.factor;
    weighted *= step.factor;
    for (size_t j = begin; j < step.end; ++j) {
      const double weight = std::exp(scores[j] - greatest);
      sum += weight;
      weighted += weight * values[j];
    }
    step.sum = sum;
    step.weighted = weighted;
    step.exact = softmax_at_once(scores, values, step.end);
    steps.push_back(step);
  }
  return steps;
}

}  // namespace fattn::lab
