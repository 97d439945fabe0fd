// The operations of training in float64, written to be read.
#include "ops/training.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "device_abi/dropout.h"
#include "ops/backends.h"
#include "ops/reference/numbers.h"

namespace fattn::ops::reference {
namespace {

void product(const Product& p, const Product::Buffers& b) {
  const int64_t inner = b.inner > 0 ? b.inner : p.inner;
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t c = 0; c < p.columns; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < inner; ++i)
        sum += read(b.a, p.a, p.a_turned ? i * p.rows + r : r * p.inner + i) * read(b.b, p.b, p.b_turned ? c * p.inner + i : i * p.columns + c);
      sum *= p.alpha;
      if (b.bias) sum += read(b.bias, p.b, c);
      if (b.add) sum += b.add[r * p.columns + c];
      write(b.c, p.c, r * p.columns + c, sum);
    }
}

void column_sums(const ColumnSums& p, const ColumnSums::Buffers& b) {
  for (int64_t c = 0; c < p.columns; ++c) {
    double sum = b.to[c];
    for (int64_t r = 0; r < b.rows; ++r) sum += read(b.x, p.x, r * p.columns + c);
    b.to[c] = static_cast<float>(sum);
  }
}

void activate(const Activate& p, const Activate::Buffers& b) {
  for (int64_t i = 0; i < b.rows * p.width; ++i) write(b.y, p.dtype, i, activated(p.activation, read(b.x, p.dtype, i)));
}

double slope(Activation activation, double x) {
  if (activation == Activation::kGelu) return std::erfc(-x / std::sqrt(2.0)) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

void activation_gradient(const ActivationGradient& p, const ActivationGradient::Buffers& b) {
  for (int64_t i = 0; i < b.rows * p.width; ++i) {
    const double x = read(b.x, p.dtype, i);
    write(b.dx, p.dtype, i, read(b.dy, p.dtype, i) * slope(p.activation, x));
    if (b.y) write(b.y, p.dtype, i, activated(p.activation, x));
  }
}

// With n = (x - mean) / deviation: y = n w + b, dn = dy w, dx = (dn - mean(dn) - n mean(dn n)) / deviation.
void layer_norm_gradient(const LayerNormGradient& p, const LayerNormGradient::Buffers& b) {
  const auto width = static_cast<size_t>(p.width);
  const auto count = static_cast<double>(p.width);
  std::vector<double> normal(width), dnormal(width), dweight(b.dweight, b.dweight + p.width), dbias(b.dbias, b.dbias + p.width);
  for (int64_t r = 0; r < b.rows; ++r) {
    const float *x = b.x + r * p.width, *dy = b.dy + r * p.width;
    double mean = 0, variance = 0, dmean = 0, dot = 0;
    for (size_t i = 0; i < width; ++i) mean += x[i] / count;
    for (size_t i = 0; i < width; ++i) variance += (x[i] - mean) * (x[i] - mean) / count;
    const double deviation = std::sqrt(variance + p.epsilon);
    for (size_t i = 0; i < width; ++i) {
      normal[i] = (x[i] - mean) / deviation;
      dnormal[i] = dy[i] * read(b.weight, p.dtype, static_cast<int64_t>(i));
      dmean += dnormal[i] / count;
      dot += dnormal[i] * normal[i] / count;
      dweight[i] += dy[i] * normal[i];
      dbias[i] += dy[i];
    }
    for (size_t i = 0; i < width; ++i) {
      float& dx = b.dx[r * p.width + static_cast<int64_t>(i)];
      dx = static_cast<float>(dx + (dnormal[i] - dmean - normal[i] * dot) / deviation);
      if (b.rounded) write(b.rounded, p.dtype, r * p.width + static_cast<int64_t>(i), dx);
    }
  }
  for (size_t i = 0; i < width; ++i) b.dweight[i] = static_cast<float>(dweight[i]), b.dbias[i] = static_cast<float>(dbias[i]);
}

void embedding_gradient(const EmbeddingGradient& p, const EmbeddingGradient::Buffers& b) {
  check_rows(p, b);
  const auto add = [&](const int32_t* places, int64_t count, float* to) {
    std::vector<double> sums(to, to + count * p.width);
    for (int64_t r = 0; r < b.rows; ++r)
      for (int64_t i = 0; i < p.width; ++i) sums[static_cast<size_t>(places[r] * p.width + i)] += b.dx[r * p.width + i];
    for (int64_t i = 0; i < count * p.width; ++i) to[i] = static_cast<float>(sums[static_cast<size_t>(i)]);
  };
  add(b.ids, p.vocab, b.dtokens);
  if (p.positions > 0) add(b.position, p.positions, b.dpositions);
}

void rotary(const Rotary& p, const Rotary::Buffers& b) {
  const int64_t half = p.headdim / 2;
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t h = 0; h < p.nheads; ++h)
      for (int64_t d = 0; d < half; ++d) {
        const double angle = (p.back ? -1 : 1) * b.position[r] * std::pow(p.theta, -2.0 * static_cast<double>(d) / static_cast<double>(p.headdim));
        const int64_t i = r * p.stride + h * p.headdim + d;
        const double x = read(b.x, p.dtype, i), y = read(b.x, p.dtype, i + half);
        write(b.x, p.dtype, i, x * std::cos(angle) - y * std::sin(angle));
        write(b.x, p.dtype, i + half, y * std::cos(angle) + x * std::sin(angle));
      }
}

void dropout(const Dropout& p, const Dropout::Buffers& given) {
  const Dropout::Buffers b = with_changing(given);
  const auto below = static_cast<int>(std::round(p.p * 65536));
  const double scale = 65536.0 / (65536 - below);
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t c = 0; c < p.width; ++c) {
      const int64_t i = r * p.width + c;
      const bool stays = core::dropout_number(b.seed, b.stream, b.place ? b.place[r] : r, c) >= below;
      b.out[i] = static_cast<float>((stays ? b.x[i] * scale : 0.0) + (b.add ? b.add[i] : 0.0f));
    }
}

void cross_entropy_gradient(const CrossEntropyGradient& p, const CrossEntropyGradient::Buffers& given) {
  const CrossEntropyGradient::Buffers b = with_changing(given);
  check_targets(p, b);
  const auto vocab = static_cast<size_t>(p.vocab);
  std::vector<double> logits(vocab), dweight;
  if (b.dx) dweight.assign(b.dweight, b.dweight + p.vocab * p.width);
  for (int64_t r = 0; r < b.rows; ++r) {
    double largest = 0, top = -INFINITY, sum = 0;
    for (int64_t v = 0; v < p.vocab; ++v) {
      double logit = 0;
      for (int64_t i = 0; i < p.width; ++i) logit += read(b.x, p.dtype, r * p.width + i) * read(b.weight, p.dtype, v * p.width + i);
      logits[static_cast<size_t>(v)] = logit;
      largest = std::isfinite(logit) ? std::max(largest, std::abs(logit)) : NAN;
      top = std::max(top, logit);
    }
    for (const double logit : logits) sum += std::exp(logit - top);
    const double lse = top + std::log(sum);
    const int64_t target = b.target[r];
    b.loss[r] = target < 0 ? 0.0f : static_cast<float>(lse - logits[static_cast<size_t>(target)]);
    if (b.largest) b.largest[r] = static_cast<float>(largest);
    if (!b.dx) continue;
    std::vector<double> dx(static_cast<size_t>(p.width));
    for (int64_t v = 0; target >= 0 && v < p.vocab; ++v) {
      const double dlogit = b.scale * (std::exp(logits[static_cast<size_t>(v)] - lse) - (v == target ? 1 : 0));
      for (int64_t i = 0; i < p.width; ++i) {
        dx[static_cast<size_t>(i)] += dlogit * read(b.weight, p.dtype, v * p.width + i);
        dweight[static_cast<size_t>(v * p.width + i)] += dlogit * read(b.x, p.dtype, r * p.width + i);
      }
    }
    for (int64_t i = 0; i < p.width; ++i) b.dx[r * p.width + i] = static_cast<float>(dx[static_cast<size_t>(i)]);
  }
  for (size_t i = 0; i < dweight.size(); ++i) b.dweight[i] = static_cast<float>(dweight[i]);
}

void loss_sums(const LossSums&, const LossSums::Buffers& b) { add_losses(b); }

void square_sum(const SquareSum&, const SquareSum::Buffers& b) {
  *b.sum = 0;
  for (int64_t i = 0; i < b.rows; ++i) *b.sum += static_cast<double>(b.x[i]) * b.x[i];
  if (b.finite && !std::isfinite(*b.finite)) *b.sum = NAN;
}

void adamw_step(const AdamWStep& p, const AdamWStep::Buffers& given) {
  const AdamWStep::Buffers b = with_changing(given);
  const double whole_m = 1 - std::pow(b.beta1, b.step), whole_v = 1 - std::pow(b.beta2, b.step);
  for (int64_t i = 0; i < b.rows; ++i) {
    const double g = b.scale * b.gradient[i];
    const double m = b.m[i] + (1 - b.beta1) * (g - b.m[i]), v = b.v[i] + (1 - b.beta2) * (g * g - b.v[i]);
    const double change = m / whole_m / (std::sqrt(v / whole_v) + b.epsilon) + b.weight_decay * b.master[i];
    b.m[i] = static_cast<float>(m);
    b.v[i] = static_cast<float>(v);
    b.master[i] = static_cast<float>(b.master[i] - b.learning_rate * change);
    if (b.weight) write(b.weight, p.dtype, i, b.master[i]);
  }
}

}  // namespace

#define FATTN_OPS_COMPUTED(Problem, compute) \
  std::unique_ptr<const Kernel<Problem>> make(const Problem& p, const Device&) { return std::make_unique<Computed<Problem, compute>>(p); }
FATTN_OPS_COMPUTED(Product, product)
FATTN_OPS_COMPUTED(ColumnSums, column_sums)
FATTN_OPS_COMPUTED(Activate, activate)
FATTN_OPS_COMPUTED(ActivationGradient, activation_gradient)
FATTN_OPS_COMPUTED(LayerNormGradient, layer_norm_gradient)
FATTN_OPS_COMPUTED(EmbeddingGradient, embedding_gradient)
FATTN_OPS_COMPUTED(Rotary, rotary)
FATTN_OPS_COMPUTED(Dropout, dropout)
FATTN_OPS_COMPUTED(CrossEntropyGradient, cross_entropy_gradient)
FATTN_OPS_COMPUTED(LossSums, loss_sums)
FATTN_OPS_COMPUTED(SquareSum, square_sum)
FATTN_OPS_COMPUTED(AdamWStep, adamw_step)
#undef FATTN_OPS_COMPUTED

}  // namespace fattn::ops::reference
