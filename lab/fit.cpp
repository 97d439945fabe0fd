#include "lab/fit.h"

#include <algorithm>
#include <cmath>

namespace fattn::lab {
namespace {

constexpr double kLogStep = 1e-4;
constexpr double kLeast = 1e-6;     // so that the equations can be solved
constexpr double kTolerance = 0.1;  // relative error from which on a sample counts less and less: it may have been disturbed
constexpr double kFarthest = 30;    // of a constant's logarithm from its start

// x of a x = b, a symmetric and positive definite, by Cholesky's method; nothing where it is not.
bool solve(std::vector<double> a, std::vector<double> b, std::vector<double>& x) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j <= i; ++j) {
      double sum = a[i * n + j];
      for (size_t k = 0; k < j; ++k) sum -= a[i * n + k] * a[j * n + k];
      if (i == j && !(sum > 0)) return false;
      a[i * n + j] = i == j ? std::sqrt(sum) : sum / a[j * n + j];
    }
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < i; ++k) b[i] -= a[i * n + k] * b[k];
    b[i] /= a[i * n + i];
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t k = i + 1; k < n; ++k) b[i] -= a[k * n + i] * b[k];
    b[i] /= a[i * n + i];
  }
  x = std::move(b);
  return true;
}

// What an error costs: its square while it is small, about its size beyond.
double cost_of(double error) { return kTolerance * kTolerance * 2 * (std::sqrt(1 + error * error / kTolerance / kTolerance) - 1); }
double weight_of(double error) { return 1 / std::sqrt(1 + error * error / kTolerance / kTolerance); }

}  // namespace

std::vector<double> fit(const Model& model, const std::vector<double>& seconds, std::vector<double> start, const std::vector<double>& held) {
  const size_t n = start.size(), samples = seconds.size();
  std::vector<double> logs(n), first(n);
  for (size_t j = 0; j < n; ++j) first[j] = logs[j] = std::log(start[j]);
  const auto errors_of = [&](const std::vector<double>& at) {
    std::vector<double> constants(n), errors(samples);
    for (size_t j = 0; j < n; ++j) constants[j] = std::exp(at[j]);
    for (size_t i = 0; i < samples; ++i) errors[i] = std::log(std::max(model(i, constants), 1e-300) / seconds[i]);
    return errors;
  };
  const auto total = [&](const std::vector<double>& errors, const std::vector<double>& at) {
    double sum = 0;
    for (const double e : errors) sum += cost_of(e);
    for (size_t j = 0; j < n; ++j) sum += held[j] * (at[j] - first[j]) * (at[j] - first[j]);
    return sum;
  };
  std::vector<double> errors = errors_of(logs);
  double cost = total(errors, logs), damping = 1e-2;
  for (int round = 0; round < 300 && damping < 1e9; ++round) {
    std::vector<double> slopes(samples * n);
    for (size_t j = 0; j < n; ++j) {
      std::vector<double> moved = logs;
      moved[j] += kLogStep;
      const std::vector<double> there = errors_of(moved);
      for (size_t i = 0; i < samples; ++i) slopes[i * n + j] = (there[i] - errors[i]) / kLogStep;
    }
    std::vector<double> normal(n * n, 0.0), right(n, 0.0);
    for (size_t i = 0; i < samples; ++i) {
      const double w = weight_of(errors[i]);
      for (size_t j = 0; j < n; ++j) {
        right[j] -= w * slopes[i * n + j] * errors[i];
        for (size_t k = 0; k < n; ++k) normal[j * n + k] += w * slopes[i * n + j] * slopes[i * n + k];
      }
    }
    for (size_t j = 0; j < n; ++j) {
      right[j] -= held[j] * (logs[j] - first[j]);
      normal[j * n + j] += held[j];
    }
    bool better = false;
    const double before = cost;
    for (; damping < 1e9 && !better; damping *= 4) {
      std::vector<double> damped = normal, step;
      for (size_t j = 0; j < n; ++j) damped[j * n + j] += damping * (normal[j * n + j] + kLeast);
      if (!solve(damped, right, step)) continue;
      std::vector<double> moved(n);
      for (size_t j = 0; j < n; ++j) moved[j] = std::clamp(logs[j] + std::clamp(step[j], -2.0, 2.0), first[j] - kFarthest, first[j] + kFarthest);
      std::vector<double> there = errors_of(moved);
      const double cost_there = total(there, moved);
      if (!(cost_there < cost)) continue;
      logs = std::move(moved);
      errors = std::move(there);
      cost = cost_there;
      better = true;
    }
    if (better) damping /= 32;
    if (!better || before - cost < 1e-9 * before) break;
  }
  for (size_t j = 0; j < n; ++j) start[j] = std::exp(logs[j]);
  return start;
}

}  // namespace fattn::lab
