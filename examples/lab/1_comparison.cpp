// Chapter 1 in C++: attention with its matrix, the loops of FlashAttention v1 and v2 without it, the library, and masks.
#include <limits>
#include <utility>

#include "lab.h"

using course::Matrix;
using course::Values;

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Stores a matrix of q.rows x k.rows weights.
Matrix standard(const Matrix& q, const Matrix& k, const Matrix& v) {
  Matrix weights(q.rows, k.rows), o(q.rows, v.width);
  const float scale = 1 / std::sqrt(static_cast<float>(q.width));
  for (int64_t i = 0; i < q.rows; ++i) {
    float* p = weights.row(i);
    float greatest = kNothing, sum = 0;
    for (int64_t j = 0; j < k.rows; ++j) greatest = std::max(greatest, p[j] = scale * dot(q.row(i), k.row(j), q.width));
    for (int64_t j = 0; j < k.rows; ++j) sum += p[j] = std::exp(p[j] - greatest);
    for (int64_t j = 0; j < k.rows; ++j)
      for (int64_t c = 0; c < v.width; ++c) o.row(i)[c] += p[j] / sum * v.row(j)[c];
  }
  return o;
}

// What is kept of a row of queries: the largest score, the sum of exp(score - m), and in o the same with the values as weights.
struct Kept {
  float m = kNothing, l = 0;
};

// One tile: rows [i, i + block) meet keys [j, j + block).
void tile(const Matrix& q, const Matrix& k, const Matrix& v, int64_t i, int64_t j, int64_t block, std::vector<Kept>& kept, Matrix& o) {
  const float scale = 1 / std::sqrt(static_cast<float>(q.width));
  const int64_t last_row = std::min(i + block, q.rows), last_key = std::min(j + block, k.rows);
  Values scores(static_cast<size_t>(block));
  for (int64_t row = i; row < last_row; ++row) {
    Kept& r = kept[static_cast<size_t>(row)];
    float m = r.m;
    for (int64_t key = j; key < last_key; ++key) m = std::max(m, scores[static_cast<size_t>(key - j)] = scale * dot(q.row(row), k.row(key), q.width));
    const float factor = std::exp(r.m - m);  // what was summed up so far had another maximum
    r.l *= factor;
    for (int64_t c = 0; c < v.width; ++c) o.row(row)[c] *= factor;
    for (int64_t key = j; key < last_key; ++key) {
      const float p = std::exp(scores[static_cast<size_t>(key - j)] - m);
      r.l += p;
      for (int64_t c = 0; c < v.width; ++c) o.row(row)[c] += p * v.row(key)[c];
    }
    r.m = m;
  }
}

// v1: blocks of keys outside. v2: blocks of queries outside, each independent of the others.
Matrix flash(const Matrix& q, const Matrix& k, const Matrix& v, bool keys_outside, int64_t block = 32) {
  Matrix o(q.rows, v.width);
  std::vector<Kept> kept(static_cast<size_t>(q.rows));
  const int64_t outer = keys_outside ? k.rows : q.rows, inner = keys_outside ? q.rows : k.rows;
  for (int64_t a = 0; a < outer; a += block)
    for (int64_t b = 0; b < inner; b += block) tile(q, k, v, keys_outside ? b : a, keys_outside ? a : b, block, kept, o);
  for (int64_t i = 0; i < q.rows; ++i)
    for (int64_t c = 0; c < v.width; ++c) o.row(i)[c] /= kept[static_cast<size_t>(i)].l;
  return o;
}

}  // namespace

int main() {
  return course::run([] {
    bool right = true;
    const Matrix q = course::random_matrix(300, 64, 1), k = course::random_matrix(300, 64, 2), v = course::random_matrix(300, 64, 3);
    const Matrix exact = standard(q, k, v);
    Matrix library(300, 64);
    course::attention(q, k, v, library);
    const Matrix v1 = flash(q, k, v, true), v2 = flash(q, k, v, false);
    for (const auto& [name, o] : {std::pair{"v1", &v1}, {"v2", &v2}, {"fattn", &library}}) {
      const double d = course::difference(o->values, exact.values);
      std::printf("%-6s differs from standard attention by %.1e\n", name, d);
      right = right && d <= 1e-5;
    }

    // A mask is no number: the queries are the last of the keys, and a row that sees nothing is 0.
    fattn::Options causal;
    causal.causal = true;
    Matrix whole(300, 64), last(10, 64), some(10, 64);
    course::attention(q, k, v, whole, causal);
    std::copy_n(q.row(290), some.values.size(), some.values.begin());
    course::attention(some, k, v, last, causal);
    std::copy_n(whole.row(290), some.values.size(), some.values.begin());
    std::printf("the last ten queries alone: differ by %.1e from the rows of all\n", course::difference(last.values, some.values));
    right = right && course::difference(last.values, some.values) <= 1e-5;
    Matrix nothing(20, 64), few = course::random_matrix(10, 64, 4);
    course::attention(course::random_matrix(20, 64, 5), few, few, nothing, causal);  // ten queries before the first key
    std::printf("a row that sees no key: o = %g\n", nothing.row(0)[0]);
    right = right && nothing.row(0)[0] == 0;

    std::printf("\n%7s %14s %16s\n", "N", "fattn", "matrix of a head");
    for (const int64_t n : {512, 1024, 2048, 4096}) {
      const Matrix x = course::random_matrix(n, 64, 6);
      Matrix o(n, 64);
      std::printf("%7lld %11.3f ms %12.1f MiB\n", static_cast<long long>(n), 1e3 * course::seconds_of([&] { course::attention(x, x, x, o); }),
                  static_cast<double>(n * n * 4) / (1 << 20));
    }
    return right;
  });
}
