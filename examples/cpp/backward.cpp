// Gradients: forward with the log-sum-exp kept, backward, and one directional derivative checked by a difference quotient.
#include <fattn/fattn.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 1, kSeqlen = 24, kNheads = 2, kHeaddim = 32, kElements = kBatch * kSeqlen * kNheads * kHeaddim;
using Values = std::vector<float>;

fattn::Tensor tensor(const Values& values) { return {values.data(), fattn::DType::kF32, {kBatch, kSeqlen, kNheads, kHeaddim}}; }
fattn::Tensor rows(const Values& values) { return {values.data(), fattn::DType::kF32, {kBatch, kNheads, kSeqlen}}; }

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// a + step * b
Values moved(const Values& a, double step, const Values& b) {
  Values c(a);
  for (size_t i = 0; i < a.size(); ++i) c[i] += static_cast<float>(step * b[i]);
  return c;
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&] {
    Values values(kElements);
    for (float& x : values) x = normal(generator);
    return values;
  };
  const Values q = random(), k = random(), v = random(), dout = random(), direction = random();
  Values o(kElements), lse(kBatch * kNheads * kSeqlen), dq(kElements), dk(kElements), dv(kElements);
  fattn::Options options;
  options.causal = true;

  // The loss is sum(o * dout); `moved_q` and so on stand in for q, k, v.
  const auto loss = [&](const Values& moved_q, const Values& moved_k, const Values& moved_v) {
    fattn::ForwardTensors t;
    t.q = tensor(moved_q);
    t.k = tensor(moved_k);
    t.v = tensor(moved_v);
    t.o = tensor(o);
    t.lse = rows(lse);
    fattn::forward(t, options);
    return dot(o, dout);
  };

  try {
    // Along `direction` in q, k and v at once the loss must change as the gradients say.
    constexpr double step = 1e-2;
    const double difference = (loss(moved(q, step, direction), moved(k, step, direction), moved(v, step, direction)) -
                               loss(moved(q, -step, direction), moved(k, -step, direction), moved(v, -step, direction))) /
                              (2 * step);

    loss(q, k, v);  // o and lse of the point itself, for the backward pass
    fattn::BackwardTensors t;
    t.q = tensor(q);
    t.k = tensor(k);
    t.v = tensor(v);
    t.o = tensor(o);
    t.lse = rows(lse);
    t.dout = tensor(dout);
    t.dq = tensor(dq);
    t.dk = tensor(dk);
    t.dv = tensor(dv);
    fattn::backward(t, options);

    const double derivative = dot(dq, direction) + dot(dk, direction) + dot(dv, direction);
    const double error = std::fabs(difference - derivative) / (1 + std::fabs(derivative));
    std::printf("derivative %.5f, difference quotient %.5f\n", derivative, difference);
    return error <= 1e-2 ? 0 : 1;
  } catch (const fattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
