// Attention in one call, on a (batch, nheads, seqlen, headdim) tensor without a copy, checked against the float64 reference.
#include <fattn/fattn.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() {
  constexpr int64_t batch = 2, seqlen = 200, nheads = 8, nheads_k = 2, headdim = 64;
  std::mt19937 generator(1);
  std::normal_distribution<double> normal;
  const auto random = [&](int64_t n) {
    std::vector<double> values(static_cast<size_t>(n));
    for (double& x : values) x = static_cast<float>(normal(generator));  // the same values in fp32 and fp64
    return values;
  };
  const auto q = random(batch * nheads * seqlen * headdim), k = random(batch * nheads_k * seqlen * headdim),
             v = random(batch * nheads_k * seqlen * headdim);
  const std::vector<float> q32(q.begin(), q.end()), k32(k.begin(), k.end()), v32(v.begin(), v.end());
  std::vector<float> o32(q.size()), lse(static_cast<size_t>(batch * nheads * seqlen));
  std::vector<double> o(q.size());

  // fattn's layout is (batch, seqlen, nheads, headdim); a transposed view needs no copy.
  const auto view = [&](const void* data, fattn::DType dtype, int64_t heads) {
    return fattn::Tensor(data, dtype, {batch, heads, seqlen, headdim}).transposed(1, 2);
  };
  try {
    fattn::ForwardTensors tensors;
    tensors.q = view(q32.data(), fattn::DType::kF32, nheads);
    tensors.k = view(k32.data(), fattn::DType::kF32, nheads_k);
    tensors.v = view(v32.data(), fattn::DType::kF32, nheads_k);
    tensors.o = view(o32.data(), fattn::DType::kF32, nheads);
    tensors.lse = fattn::Tensor(lse.data(), fattn::DType::kF32, {batch, nheads, seqlen});
    fattn::Options options;
    options.causal = true;
    fattn::forward(tensors, options);

    fattn::ForwardTensors exact;
    exact.q = view(q.data(), fattn::DType::kF64, nheads);
    exact.k = view(k.data(), fattn::DType::kF64, nheads_k);
    exact.v = view(v.data(), fattn::DType::kF64, nheads_k);
    exact.o = view(o.data(), fattn::DType::kF64, nheads);
    options.backend = fattn::Backend::kReference;
    fattn::forward(exact, options);
  } catch (const fattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }

  double worst = 0;
  for (size_t i = 0; i < o.size(); ++i) {
    const double error = std::fabs(o32[i] - o[i]);
    if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
  }
  std::printf("largest error %.1e\n", worst);
  return worst <= 1e-5 ? 0 : 1;
}
