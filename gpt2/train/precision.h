// Which part of a network is stored, computed and summed in which dtype. The plans of a network ask this table, and `fattn gpt2 precision` prints it.
#pragma once

#include <string>
#include <vector>

#include "fattn/types.hpp"

namespace fattn::gpt2 {

enum class Role {
  kWeights,              // as products read them, and what goes into products
  kEmbeddings,           // tables that are looked up
  kQkv,                  // q, k, v, attention's output, and their gradients
  kAttentionWeights,     // scores, softmax, log-sum-exp
  kMlp,                  // between the two products of the MLP, and its gradient
  kResidual,             // the stream that layers add to, and its gradient
  kNormStatistics,       // mean and variance of LayerNorm
  kLoss,                 // logits, their log-sum-exp, the loss
  kActivationGradients,  // in what dtype small gradients must still be numbers
  kGradients,            // of parameters, over rows and batches
  kOptimizer,            // master weights and moments
};

struct PrecisionRule {
  Role role;
  const char* name;
  const char* what;  // tensors that it is about
  DType stored, computed, summed;
  std::string why, broken;
  bool fixed;  // operations do it in fp32 whatever the network's dtype is
};

class Precision {
 public:
  // Safe rules for a network of this dtype: fp32, fp16 or bf16. Throws Error for another.
  explicit Precision(DType network);

  const std::vector<PrecisionRule>& rules() const { return rules_; }
  const PrecisionRule& of(Role role) const;
  DType stored(Role role) const { return of(role).stored; }
  bool scales_loss() const { return network_ == DType::kF16; }
  DType network() const { return network_; }

 private:
  DType network_;
  std::vector<PrecisionRule> rules_;
};

// The largest relative error of rounding to the dtype, and its smallest number that keeps all of its digits.
double unit_roundoff(DType dtype);
double smallest_normal(DType dtype);

// A logit, or a log-sum-exp of attention's scores, above this may be off by more than 0.5, because what it is a product of is rounded to the dtype.
inline double largest_safe_logit(DType dtype) { return 0.5 / unit_roundoff(dtype); }

}  // namespace fattn::gpt2
