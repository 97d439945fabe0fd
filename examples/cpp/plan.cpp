// A plan made once and executed many times without allocating, and the reason when a problem cannot run.
#include <fattn/fattn.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

int main() {
  constexpr int64_t batch = 1, seqlen_q = 1, seqlen_k = 500, nheads = 8, nheads_k = 2, headdim = 64;
  std::vector<float> q(batch * seqlen_q * nheads * headdim, 1.0f), k(batch * seqlen_k * nheads_k * headdim, 0.5f);
  std::vector<float> v(k.size()), o(q.size());

  fattn::ForwardTensors tensors;
  tensors.q = fattn::Tensor(q.data(), fattn::DType::kF32, {batch, seqlen_q, nheads, headdim});
  tensors.k = fattn::Tensor(k.data(), fattn::DType::kF32, {batch, seqlen_k, nheads_k, headdim});
  tensors.v = fattn::Tensor(v.data(), fattn::DType::kF32, {batch, seqlen_k, nheads_k, headdim});
  tensors.o = fattn::Tensor(o.data(), fattn::DType::kF32, {batch, seqlen_q, nheads, headdim});
  fattn::Options options;
  options.causal = true;

  try {
    const fattn::Plan plan(tensors, options);
    const fattn_plan_info info = plan.info();
    std::printf("%s: %.0f FLOPs, workspace of %zu bytes; %s\n", info.kernel, info.flops, info.workspace_bytes, info.why);
    const size_t bytes = (plan.workspace_bytes() + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> workspace(bytes ? std::aligned_alloc(64, bytes) : nullptr, &std::free);

    // All keys are equal, so every weight is 1 / seqlen_k and the output is the mean of v.
    for (int token = 1; token <= 3; ++token) {
      for (float& x : v) x = static_cast<float>(token);
      plan.execute(tensors, workspace.get(), bytes);
      for (float x : o)
        if (!(std::fabs(x - static_cast<float>(token)) <= 1e-5f * static_cast<float>(token))) return 1;
    }

    // The weights matrix exists in standard attention only; fattn says so instead of guessing.
    std::vector<float> weights(batch * nheads * seqlen_q * seqlen_k);
    tensors.weights = fattn::Tensor(weights.data(), fattn::DType::kF32, {batch, nheads, seqlen_q, seqlen_k});
    options.algorithm = fattn::Algorithm::kV2;
    const fattn::Support support = fattn::supported(fattn::describe(tensors, options));
    std::printf("weights with v2: %s\n", support.reason.c_str());
    return support ? 1 : 0;
  } catch (const fattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
