// Each sentence about a broken rule has a test that breaks it: tests/test_gpt2_precision.cpp.
#include "gpt2/train/precision.h"

#include <algorithm>

#include "gpt2/error.h"

namespace fattn::gpt2 {

Precision::Precision(DType network) : network_(network) {
  if (network != DType::kF32 && network != DType::kF16 && network != DType::kBF16) throw Error("a network is in fp32, fp16 or bf16");
  constexpr DType f32 = DType::kF32;
  const bool narrow = network != f32;
  const std::string dtype = name_of(network);
  const std::string fast = narrow ? "half the bytes of fp32, at the speed of the matrix units" : "fp32 throughout: nothing is rounded further";
  const auto rule = [&](Role role, const char* name, const char* what, DType stored, DType computed, const std::string& why, const char* broken) {
    rules_.push_back({role, name, what, stored, computed, f32, why, broken, false});
  };
  const auto fixed = [&](Role role, const char* name, const char* what, const char* why, const char* broken) {
    rules_.push_back({role, name, what, f32, f32, f32, why, broken, true});
  };
  rule(Role::kWeights, "weights", "matrices and biases in products, outputs of LayerNorm", network, network, fast + "; every sum is fp32",
       "summed in bf16, a sum of equal terms stops at 256 of them, in fp16 at 2,048");
  rule(Role::kEmbeddings, "embeddings", "tables of tokens and positions", network, f32,
       std::string(narrow ? "looked up in " + dtype + ", added in fp32" : "looked up and added in fp32") + "; the table is the head's matrix too",
       "rows summed in bf16: the gradient of a token that occurs 4,096 times stops at a sixteenth of its size");
  rule(Role::kQkv, "q, k, v", "q, k, v, attention's output, and their gradients", network, network,
       fast + "; of one dtype, so that attention has one kernel",
       "two dtypes among q, k and v are refused; fp16 with bf16 has fp32 as the one dtype that loses nothing");
  fixed(Role::kAttentionWeights, "attention weights", "scores, softmax, log-sum-exp (lse)",
        "a row sums many small weights, and the backward pass makes them again from lse",
        "softmax summed in bf16 over 4,096 keys loses most of its sum; lse in bf16 puts each weight off by up to 6 % where lse is near 20");
  rule(Role::kMlp, "MLP", "between the MLP's two products, and the gradient there", network, network, fast + "; GELU itself is computed in fp32",
       "a product summed in 16 bits, as under weights");
  fixed(Role::kResidual, "residual stream", "what layers add to, and its gradient", "every layer adds a little to what all before it have left",
        "in bf16, 48 layers that each add 1/512 of the stream add nothing");
  fixed(Role::kNormStatistics, "LayerNorm statistics", "mean and variance of a row",
        "a variance is a mean of squares of differences, which may be small beside the mean",
        "in fp16 the sum of squares is Inf from values of 256 on; in bf16 a row about 100 with deviation 1 is normalised with a wrong deviation");
  fixed(Role::kLoss, "loss", "logits, their log-sum-exp, the loss", "a loss is the small difference of two large numbers, summed over all tokens",
        "in fp16 the sum of 8,192 losses of 10.8 stops at 32,768 of 88,474, in bf16 at 4,096");
  rule(Role::kActivationGradients, "gradients of activations", "of q, k, v, attention's output and the MLP", network, network,
       network == DType::kF16 ? "fp16 has no normal number below 6.1e-5: the loss is multiplied by a scale, which halves when a gradient overflows"
                              : "the range of fp32: no loss scale is needed",
       "in fp16 without a loss scale, gradients below 3e-8 are 0 and what depends on them does not learn");
  fixed(Role::kGradients, "gradients", "of parameters, summed over rows and batches", "the sum of a step has thousands of small terms",
        "in bf16 a sum stops growing at 256 equal terms: the rest of the batch has no part in the step");
  fixed(Role::kOptimizer, "optimizer", "master weights, first and second moments",
        "an update is a thousandth of a weight and less; a moment moves by 1 - beta of what it misses",
        "in bf16 master weights stop at updates below 1/512 of them; with beta2 0.999 a second moment never falls again, and steps stay too small");
}

const PrecisionRule& Precision::of(Role role) const {
  return *std::find_if(rules_.begin(), rules_.end(), [&](const PrecisionRule& rule) { return rule.role == role; });
}

double unit_roundoff(DType dtype) { return dtype == DType::kF16 ? 0x1p-11 : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-24; }
double smallest_normal(DType dtype) { return dtype == DType::kF16 ? 0x1p-14 : 0x1p-126; }

}  // namespace fattn::gpt2
