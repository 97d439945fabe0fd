// Chapter 2 in C++: a layer of GPT-2 whose attention is a parameter: the same weights, a prompt at once, then tokens with a cache.
// examples/gpt2 has the whole model.
#include <functional>
#include <utility>

#include "lab.h"

using course::Matrix;
using course::Values;

namespace {

constexpr int64_t kHeads = 4, kHeaddim = 32, kWidth = kHeads * kHeaddim;

// x w, w being (in, out), as GPT-2's Conv1D keeps it.
Matrix times(const Matrix& x, const Matrix& w) {
  Matrix y(x.rows, w.width);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t c = 0; c < x.width; ++c)
      for (int64_t j = 0; j < w.width; ++j) y.row(i)[j] += x.row(i)[c] * w.row(c)[j];
  return y;
}

// q, k and v are columns of the packed product (rows, 3 width): views, no copies.
fattn::Tensor part_of(const Matrix& qkv, int64_t part) {
  return {qkv.values.data() + part * kWidth, fattn::DType::kF32, {1, qkv.rows, kHeads, kHeaddim}, {0, 3 * kWidth, kHeaddim, 1}};
}

using Attention = std::function<void(const fattn::ForwardTensors&)>;

Attention by(fattn::Algorithm algorithm) {
  return [algorithm](const fattn::ForwardTensors& tensors) {
    fattn::Options options;
    options.algorithm = algorithm;
    options.causal = true;  // aligned to the last key: with a cache the queries are the last tokens
    fattn::forward(tensors, options);
  };
}

struct Layer {
  Matrix c_attn = course::random_matrix(kWidth, 3 * kWidth, 1), c_proj = course::random_matrix(kWidth, kWidth, 2);
  Attention attention;

  explicit Layer(Attention a) : attention(std::move(a)) {
    for (Matrix* w : {&c_attn, &c_proj})
      for (float& x : w->values) x *= 0.05F;
  }

  // All tokens at once.
  Matrix prompt(const Matrix& x, Matrix& cache) const {
    cache = times(x, c_attn);
    Matrix o(x.rows, kWidth);
    fattn::ForwardTensors t;
    t.q = part_of(cache, 0), t.k = part_of(cache, 1), t.v = part_of(cache, 2);
    t.o = fattn::Tensor(o.values.data(), fattn::DType::kF32, {1, x.rows, kHeads, kHeaddim});
    attention(t);
    return times(o, c_proj);
  }

  // One token more: its k and v go behind the cache, its q sees all of them.
  Matrix token(const Matrix& x, Matrix& cache) const {
    const Matrix qkv = times(x, c_attn);
    cache.values.insert(cache.values.end(), qkv.values.begin(), qkv.values.end());
    ++cache.rows;
    Matrix o(1, kWidth);
    fattn::ForwardTensors t;
    t.q = part_of(qkv, 0), t.k = part_of(cache, 1), t.v = part_of(cache, 2);
    t.o = fattn::Tensor(o.values.data(), fattn::DType::kF32, {1, 1, kHeads, kHeaddim});
    attention(t);
    return times(o, c_proj);
  }
};

}  // namespace

int main() {
  return course::run([] {
    const Matrix x = course::random_matrix(65, kWidth, 3);
    Matrix first(64, kWidth), next(1, kWidth);
    std::copy_n(x.values.begin(), first.values.size(), first.values.begin());
    std::copy_n(x.row(64), kWidth, next.values.begin());
    bool right = true;
    Values before;
    for (const fattn::Algorithm algorithm : {fattn::Algorithm::kV2, fattn::Algorithm::kV1}) {
      const Layer layer(by(algorithm));
      Matrix cache(0, 3 * kWidth), other(0, 3 * kWidth);
      const Matrix all = layer.prompt(x, other);
      layer.prompt(first, cache);
      const Matrix last = layer.token(next, cache);
      const Values last_of_all(all.row(64), all.row(64) + kWidth);
      const double by_cache = course::difference(last.values, last_of_all);
      std::printf("%s: token 65 with a cache of 64, beside 65 tokens at once: differs by %.1e\n", name_of(algorithm), by_cache);
      right = right && by_cache <= 1e-5;
      if (!before.empty()) {
        std::printf("the layer with one attention beside the other: differs by %.1e\n", course::difference(all.values, before));
        right = right && course::difference(all.values, before) <= 1e-5;
      }
      before = all.values;
    }
    return right;
  });
}
