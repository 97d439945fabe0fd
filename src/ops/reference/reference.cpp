// The operations in float64, written to be read: what the others are held against.
#include <algorithm>
#include <cmath>
#include <vector>

#include "fattn/error.hpp"
#include "ops/backends.h"
#include "ops/norm_linear.h"
#include "ops/penalised.h"
#include "ops/reference/numbers.h"

namespace fattn::ops::reference {

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kGeluTanh: return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu: return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kNone: break;
  }
  return x;
}

namespace {

void embedding(const Embedding& p, const Embedding::Buffers& b) {
  check_rows(p, b);
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t i = 0; i < p.width; ++i) {
      double x = read(b.token_table, p.dtype, b.ids[r] * p.width + i);
      if (p.positions > 0) x += read(b.position_table, p.dtype, b.position[r] * p.width + i);
      b.out[r * p.width + i] = static_cast<float>(x);
    }
}

void layer_norm(const LayerNorm& p, const LayerNorm::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r) {
    float* x = b.x + (b.select ? b.select[r] : r) * p.width;
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < p.width; ++i) {
      if (p.add) x[i] = static_cast<float>(x[i] + read(b.delta, p.dtype, r * p.width + i));
      mean += x[i] / static_cast<double>(p.width);
    }
    for (int64_t i = 0; i < p.width; ++i) variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(p.width);
    for (int64_t i = 0; i < p.width; ++i)
      write(b.y, p.dtype, r * p.width + i, (x[i] - mean) / std::sqrt(variance + p.epsilon) * read(b.weight, p.dtype, i) + read(b.bias, p.dtype, i));
  }
}

double dot(const void* x, int64_t row, const void* weight, int64_t output, int64_t width, DType dtype) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += read(x, dtype, row * width + i) * read(weight, dtype, output * width + i);
  return sum;
}

void linear(const Linear& p, const Linear::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t o = 0; o < p.out; ++o) {
      const double y = activated(p.activation, dot(b.x, r, b.weight, o, p.in, p.dtype) + (b.bias ? read(b.bias, p.dtype, o) : 0));
      write(b.y, p.y, r * p.out + o, p.accumulate ? read(b.y, p.y, r * p.out + o) + y : y);
    }
}

void keys_values(const KeysValues& p, const KeysValues::Buffers& b) {
  const int64_t q_width = p.nheads * p.headdim, width = p.nheads_k * p.headdim, half = p.headdim / 2;
  for (int64_t r = 0; r < b.rows; ++r) {
    const int64_t at = r * (q_width + 2 * width), slot = b.slot ? b.slot[r] : r;
    for (int64_t h = 0; p.rotary && h < p.nheads + p.nheads_k; ++h)
      for (int64_t d = 0; d < half; ++d) {
        const double angle = b.position[r] * std::pow(p.theta, -2.0 * static_cast<double>(d) / static_cast<double>(p.headdim));
        const int64_t i = at + h * p.headdim + d;
        const double x = read(b.qkv, p.dtype, i), y = read(b.qkv, p.dtype, i + half);
        write(b.qkv, p.dtype, i, x * std::cos(angle) - y * std::sin(angle));
        write(b.qkv, p.dtype, i + half, y * std::cos(angle) + x * std::sin(angle));
      }
    for (int64_t i = 0; i < width; ++i) {
      write(b.k, p.dtype, slot * width + i, read(b.qkv, p.dtype, at + q_width + i));
      write(b.v, p.dtype, slot * width + i, read(b.qkv, p.dtype, at + q_width + width + i));
    }
  }
}

void cross_entropy(const CrossEntropy& p, const CrossEntropy::Buffers& b) {
  check_targets(p, b);
  std::vector<double> logits(static_cast<size_t>(p.vocab));
  for (int64_t r = 0; r < b.rows; ++r) {
    for (int64_t o = 0; o < p.vocab; ++o) logits[static_cast<size_t>(o)] = dot(b.x, r, b.weight, o, p.width, p.dtype);
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double x : logits) sum += std::exp(x - largest);
    const double lse = largest + std::log(sum);
    if (b.lse) b.lse[r] = static_cast<float>(lse);
    if (b.loss) b.loss[r] = b.target[r] < 0 ? 0.0f : static_cast<float>(lse - logits[static_cast<size_t>(b.target[r])]);
  }
}

void sampling(const Sampling& p, const Sampling::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r) {
    const Choice& choice = b.choice[r];
    check_choice(choice);
    const float* given = b.logits + r * p.stride;
    std::vector<double> logits(given, given + p.vocab);
    std::vector<int32_t> order;
    for (int64_t i = 0; i < p.vocab; ++i) {
      if (std::isnan(given[i])) refuse_nan(i);
      order.push_back(static_cast<int32_t>(i));
    }
    const auto logit = [&](int32_t token) -> double& { return logits[static_cast<size_t>(token)]; };
    penalise(choice, p.vocab, logit, given);
    const double largest = *std::max_element(logits.begin(), logits.end());
    if (choice.temperature == 0) {
      b.token[r] = static_cast<int32_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
      continue;
    }
    // Where nothing is left out, tokens keep their order; it matters to which of them a random number belongs.
    if (choice.top_k > 0 || choice.top_p < 1) std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return logit(x) > logit(y); });
    if (choice.top_k > 0) order.resize(static_cast<size_t>(std::min(choice.top_k, p.vocab)));
    double total = 0;
    for (const int32_t token : order) total += share_of(logit(token), largest, choice.temperature);
    std::vector<int32_t> kept;
    double sum = 0;
    for (const int32_t token : order) {
      if (!kept.empty() && choice.top_p < 1 && !(sum < choice.top_p * total)) break;
      kept.push_back(token);
      sum += share_of(logit(token), largest, choice.temperature);
    }
    if (choice.top_p < 1) total = sum;
    const double wanted = uniform_number(choice.seed, choice.request, choice.position) * total;
    sum = 0;
    b.token[r] = -1;
    int32_t last = kept[0];
    for (const int32_t token : kept) {
      const double share = share_of(logit(token), largest, choice.temperature);
      sum += share;
      if (share > 0) last = token;
      if (wanted < sum) {
        b.token[r] = token;
        break;
      }
    }
    if (b.token[r] < 0) b.token[r] = last;
  }
}

}  // namespace

std::unique_ptr<const Kernel<Embedding>> make(const Embedding& p, const Device&) { return std::make_unique<Computed<Embedding, embedding>>(p); }
std::unique_ptr<const Kernel<LayerNorm>> make(const LayerNorm& p, const Device&) { return std::make_unique<Computed<LayerNorm, layer_norm>>(p); }
std::unique_ptr<const Kernel<Linear>> make(const Linear& p, const Device&) { return std::make_unique<Computed<Linear, linear>>(p); }
std::unique_ptr<const Kernel<KeysValues>> make(const KeysValues& p, const Device&) { return std::make_unique<Computed<KeysValues, keys_values>>(p); }
std::unique_ptr<const Kernel<CrossEntropy>> make(const CrossEntropy& p, const Device&) {
  return std::make_unique<Computed<CrossEntropy, cross_entropy>>(p);
}
std::unique_ptr<const Kernel<Sampling>> make(const Sampling& p, const Device&) { return std::make_unique<Computed<Sampling, sampling>>(p); }
std::unique_ptr<const Kernel<NormLinear>> make(const NormLinear& p, const Device& device) {
  return std::make_unique<NormThenLinear>(make(norm_of(p), device), make(p.linear, device), p.nheads > 0 ? make(keys_values_of(p), device) : nullptr);
}

// (out, in), in its dtype.
size_t packed_bytes(const Linear& p, const Device&) { return static_cast<size_t>(p.out * p.in) * size_of(p.dtype); }
void pack(const Linear& p, const Device&, const void* weight, bool in_by_out, int64_t given, void* packed) {
  for (int64_t o = 0; o < p.out; ++o)
    for (int64_t i = 0; i < p.in; ++i)
      write(packed, p.dtype, o * p.in + i, o < given ? read(weight, p.dtype, in_by_out ? i * given + o : o * p.in + i) : 0.0);
}

}  // namespace fattn::ops::reference
