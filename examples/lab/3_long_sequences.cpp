// Chapter 3 in C++: the backward pass that computes the scores again, work that masks save, and parts that lse merges.
#include "lab.h"

using course::Matrix;
using course::Values;

namespace {

// dq, dk and dv from q, k, v, o, lse and dout alone: no matrix was kept. `delta` is what the sum over a whole row of dP would be.
void backward(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& o, const Values& lse, const Matrix& dout, Matrix& dq, Matrix& dk,
              Matrix& dv) {
  const float scale = 1 / std::sqrt(static_cast<float>(q.width));
  for (int64_t i = 0; i < q.rows; ++i) {
    float delta = 0;
    for (int64_t c = 0; c < v.width; ++c) delta += dout.row(i)[c] * o.row(i)[c];
    for (int64_t j = 0; j < k.rows; ++j) {
      float score = 0, dp = 0;
      for (int64_t c = 0; c < q.width; ++c) score += scale * q.row(i)[c] * k.row(j)[c];  // 1: again
      for (int64_t c = 0; c < v.width; ++c) dp += dout.row(i)[c] * v.row(j)[c];          // 2
      const float p = std::exp(score - lse[static_cast<size_t>(i)]), ds = p * (dp - delta) * scale;
      for (int64_t c = 0; c < v.width; ++c) dv.row(j)[c] += p * dout.row(i)[c];  // 3
      for (int64_t c = 0; c < q.width; ++c) dk.row(j)[c] += ds * q.row(i)[c];    // 4
      for (int64_t c = 0; c < q.width; ++c) dq.row(i)[c] += ds * k.row(j)[c];    // 5
    }
  }
}

bool gradients() {
  const int64_t n = 200, d = 32;
  const Matrix q = course::random_matrix(n, d, 1), k = course::random_matrix(n, d, 2), v = course::random_matrix(n, d, 3),
               dout = course::random_matrix(n, d, 4);
  Matrix o(n, d), dq(n, d), dk(n, d), dv(n, d), our_dq(n, d), our_dk(n, d), our_dv(n, d);
  Values lse;
  course::attention(q, k, v, o, {}, &lse);
  fattn::BackwardTensors t;
  t.q = q.tensor(), t.k = k.tensor(), t.v = v.tensor(), t.o = o.tensor(), t.dout = dout.tensor();
  t.dq = dq.tensor(), t.dk = dk.tensor(), t.dv = dv.tensor();
  t.lse = fattn::Tensor(lse.data(), fattn::DType::kF32, {1, 1, n});
  fattn::backward(t);
  backward(q, k, v, o, lse, dout, our_dq, our_dk, our_dv);
  const double worst = std::max(
      {course::difference(dq.values, our_dq.values), course::difference(dk.values, our_dk.values), course::difference(dv.values, our_dv.values)});
  std::printf("gradients of the loop above beside fattn's: differ by %.1e\n", worst);
  std::printf("kept for them: %lld numbers of lse, where the weights would be %lld\n", static_cast<long long>(n), static_cast<long long>(n * n));
  return worst <= 1e-5;
}

bool masks() {
  const int64_t n = 2048;
  const Matrix x = course::random_matrix(n, 64, 5);
  Matrix o(n, 64);
  fattn::Options causal, window;
  causal.causal = window.causal = true;
  window.window_left = 128;
  const auto time = [&](const fattn::Options& options) { return 1e3 * course::seconds_of([&] { course::attention(x, x, x, o, options); }); };
  std::printf("N = %lld: no mask %.3f ms, causal %.3f ms, a window of 128 %.3f ms\n", static_cast<long long>(n), time({}), time(causal),
              time(window));
  return true;
}

// Attention over two halves of the keys, each weighted by its exp(lse): what split caches and rings of GPUs do.
bool merging() {
  const Matrix q = course::random_matrix(1, 64, 6), k = course::random_matrix(3000, 64, 7), v = course::random_matrix(3000, 64, 8);
  Matrix whole(1, 64), merged(1, 64);
  course::attention(q, k, v, whole);
  double sum = 0;
  for (const int64_t begin : {0, 1000, 2000}) {
    Matrix part_k(1000, 64), part_v(1000, 64), o(1, 64);
    std::copy_n(k.row(begin), part_k.values.size(), part_k.values.begin());
    std::copy_n(v.row(begin), part_v.values.size(), part_v.values.begin());
    Values lse;
    course::attention(q, part_k, part_v, o, {}, &lse);
    const double weight = std::exp(static_cast<double>(lse[0]));  // of N(0, 1) small; else subtract the largest lse first
    sum += weight;
    for (size_t c = 0; c < o.values.size(); ++c) merged.values[c] += static_cast<float>(weight * o.values[c]);
  }
  for (float& x : merged.values) x = static_cast<float>(x / sum);
  std::printf("three parts of 1000 keys, merged, beside all 3000: differ by %.1e\n", course::difference(merged.values, whole.values));
  return course::difference(merged.values, whole.values) <= 1e-5;
}

}  // namespace

int main() {
  return course::run([] { return gradients() && masks() && merging(); });
}
