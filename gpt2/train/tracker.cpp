#include "gpt2/train/tracker.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "files/json.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

const char* name_of(Violation kind) {
  constexpr const char* kNames[] = {"overflow", "nan", "underflow", "statistics", "logits"};
  return kNames[static_cast<int>(kind)];
}

PrecisionTracker::PrecisionTracker(const std::string& path, int64_t after, DType network, double layer_norm_epsilon)
    : network_(network),
      epsilon_(layer_norm_epsilon),
      file_(path, after, "is no track of a training run's precision; name another file", [](const nlohmann::json&) {}) {}

void PrecisionTracker::begin(int64_t step, double loss_scale) {
  step_ = step;
  loss_scale_ = loss_scale;
  entries_.clear();
}

void PrecisionTracker::note(Violation kind, const std::string& tensor, std::vector<int64_t> shape, DType stored, int64_t count, int64_t elements,
                            double value, double limit) {
  Entry& entry = entries_[{kind, tensor}];
  entry.shape = std::move(shape);
  entry.stored = stored;
  entry.count += count;
  entry.elements += elements;
  entry.value = std::max(entry.value, value);
  entry.limit = limit;
}

void PrecisionTracker::see(const SeenTensor& tensor) {
  ++tensors_;
  const bool lse = tensor.kind == SeenTensor::Kind::kLogSumExp;
  int64_t infinite = 0, nan = 0;
  double largest = 0;
  for (int64_t r = 0; r < tensor.rows; ++r) {
    const float* row = tensor.row(r, buffer_);
    for (int64_t i = 0; i < tensor.width; ++i) {
      const float x = row[i];
      if (std::isnan(x)) {
        ++nan;
      } else if (std::isinf(x)) {
        if (!lse || x > 0) ++infinite;  // -Inf is a row that sees no key
      } else {
        largest = std::max(largest, std::fabs(static_cast<double>(x)));
      }
    }
  }
  const std::vector<int64_t> shape{tensor.rows, tensor.width};
  const auto all = static_cast<double>(tensor.size());
  if (infinite > 0) note(Violation::kOverflow, tensor.name, shape, tensor.dtype, infinite, tensor.size(), static_cast<double>(infinite) / all, 0);
  if (nan > 0) note(Violation::kNaN, tensor.name, shape, tensor.dtype, nan, tensor.size(), static_cast<double>(nan) / all, 0);
  if (lse && largest > largest_safe_logit(network_))
    note(Violation::kLogits, tensor.name, shape, tensor.dtype, 1, tensor.size(), largest, largest_safe_logit(network_));
  if (tensor.dtype != DType::kF32 && tensor.kind == SeenTensor::Kind::kGradient) see_underflow(tensor);
  if (tensor.kind == SeenTensor::Kind::kResidual) see_statistics(tensor);
}

void PrecisionTracker::see_underflow(const SeenTensor& tensor) {
  int64_t small = 0, elements = 0;
  for (int64_t r = 0; r < tensor.rows; ++r) {
    int64_t of_row = 0;
    bool zeros = true;
    const float* row = tensor.row(r, buffer_);
    for (int64_t i = 0; i < tensor.width; ++i) {
      const double x = std::fabs(static_cast<double>(row[i]));
      of_row += x < smallest_normal(tensor.dtype) ? 1 : 0;
      zeros = zeros && x == 0;
    }
    if (zeros) continue;  // what is filled up, or has no part in the loss
    small += of_row;
    elements += tensor.width;
  }
  if (elements == 0) small = elements = tensor.size();
  const double share = static_cast<double>(small) / static_cast<double>(elements);
  if (share > kMostUnderflow)
    note(Violation::kUnderflow, tensor.name, {tensor.rows, tensor.width}, tensor.dtype, small, elements, share, kMostUnderflow);
}

void PrecisionTracker::see_statistics(const SeenTensor& tensor) {
  int64_t bad = 0;
  for (int64_t r = 0; r < tensor.rows; ++r) {
    double sum = 0, squares = 0;
    const float* row = tensor.row(r, buffer_);
    for (int64_t i = 0; i < tensor.width; ++i) sum += static_cast<double>(row[i]);
    const double mean = sum / static_cast<double>(tensor.width);
    for (int64_t i = 0; i < tensor.width; ++i) squares += std::pow(static_cast<double>(row[i]) - mean, 2);
    const double variance = squares / static_cast<double>(tensor.width);
    bad += !(variance >= epsilon_ && static_cast<float>(variance) <= 3.0e38f) ? 1 : 0;
  }
  if (bad > 0)
    note(Violation::kStatistics, tensor.name, {tensor.rows, tensor.width}, tensor.dtype, bad, tensor.rows,
         static_cast<double>(bad) / static_cast<double>(tensor.rows), epsilon_);
}

void PrecisionTracker::see_gradients(Network& network) {
  const float* gradients = network.flat(Flat::kGradient);
  for (const Parameter& p : network.parameters()) {
    const int64_t width = p.shape.empty() ? p.size : p.shape.back();
    see({"gradient of " + p.name, SeenTensor::Kind::kGradient, DType::kF32, p.size / std::max<int64_t>(width, 1), width, gradients + p.offset});
  }
}

void PrecisionTracker::see_logits(double largest, int64_t rows, int64_t vocab) {
  ++tensors_;
  if (std::isnan(largest)) note(Violation::kNaN, "logits", {rows, vocab}, DType::kF32, 1, rows * vocab, 1 / static_cast<double>(rows * vocab), 0);
  if (largest > largest_safe_logit(network_))
    note(Violation::kLogits, "logits", {rows, vocab}, DType::kF32, 1, rows * vocab, largest, largest_safe_logit(network_));
}

void PrecisionTracker::end() {
  ++steps_;
  std::string text;
  for (const auto& [key, entry] : entries_) {
    const auto& [kind, tensor] = key;
    const auto [at, first] = found_.try_emplace(key, Found{kind, tensor, 0, step_, step_, entry.value});
    Found& found = at->second;
    ++found.steps;
    if (entry.value > found.worst) found.worst = entry.value, found.worst_step = step_;
    if (++lines_ > kMostLines) continue;
    const Json line = {{"step", step_},
                       {"kind", name_of(kind)},
                       {"tensor", tensor},
                       {"shape", entry.shape},
                       {"dtypes", {{"stored", name_of(entry.stored)}, {"network", name_of(network_)}}},
                       {"loss_scale", loss_scale_},
                       {"count", entry.count},
                       {"elements", entry.elements},
                       {"value", files::number_or_null(entry.value)},
                       {"limit", entry.limit}};
    text += line.dump() + "\n";
  }
  file_.append(text);
}

std::vector<PrecisionTracker::Found> PrecisionTracker::found() const {
  std::vector<Found> all;
  for (const auto& [key, found] : found_) all.push_back(found);
  return all;
}

}  // namespace fattn::gpt2
