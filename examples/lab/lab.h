// What the programs of the course share: one head of random numbers, calls of the library on it, and the median time of a call.
#pragma once

#include <fattn/fattn.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace course {

using Values = std::vector<float>;

// A matrix of `rows` of `width` numbers, row by row: q, k, v or o of one head.
struct Matrix {
  int64_t rows = 0, width = 0;
  Values values;

  Matrix(int64_t r, int64_t w) : rows(r), width(w), values(static_cast<size_t>(r * w)) {}
  float* row(int64_t i) { return values.data() + i * width; }
  const float* row(int64_t i) const { return values.data() + i * width; }
  fattn::Tensor tensor() const { return {values.data(), fattn::DType::kF32, {1, rows, 1, width}}; }
};

inline Matrix random_matrix(int64_t rows, int64_t width, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Matrix m(rows, width);
  for (float& x : m.values) x = normal(generator);
  return m;
}

// The largest difference; a NaN on either side is infinitely far.
inline double difference(const Values& a, const Values& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= worst)) worst = std::isnan(d) ? HUGE_VAL : d;
  }
  return worst;
}

// o, and lse where it is asked for.
inline void attention(const Matrix& q, const Matrix& k, const Matrix& v, Matrix& o, const fattn::Options& options = {}, Values* lse = nullptr) {
  fattn::ForwardTensors t;
  t.q = q.tensor(), t.k = k.tensor(), t.v = v.tensor(), t.o = o.tensor();
  if (lse) {
    lse->resize(static_cast<size_t>(q.rows));
    t.lse = fattn::Tensor(lse->data(), fattn::DType::kF32, {1, 1, q.rows});
  }
  fattn::forward(t, options);
}

// Median seconds of a call, the first one left out.
template <class Call>
double seconds_of(const Call& call, int repeats = 7) {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[static_cast<size_t>(repeats / 2)];
}

// Runs `body`, which returns whether all was as it should be; the exit status of a program.
template <class Body>
int run(const Body& body) {
  try {
    return body() ? 0 : 1;
  } catch (const fattn::Error& error) {  // says what was given, what is allowed and what to do
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace course
