// Checks the problems of training, and makes their plans.
#include "ops/training.h"

#include <algorithm>
#include <cmath>

#include "ops/plan_of.h"

namespace fattn::ops {
namespace {

void check_matrix(int64_t rows, int64_t width) {
  check_size("width", width);
  check_product("activations", rows, width);
}
void check_activation(Activation activation) {
  if (activation == Activation::kNone) throw Error(ErrorCode::kInvalidArgument, "an activation of none; allowed: both forms of GELU");
}

template <class Problem>
void check_ids(const Problem& p, const typename Problem::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r) {
    if (b.ids[r] < 0 || b.ids[r] >= p.vocab)
      throw Error(ErrorCode::kInvalidArgument, text("token ", b.ids[r], " of row ", r, " is not in the vocabulary; allowed: 0 to ", p.vocab - 1));
    if (p.positions > 0 && (b.position[r] < 0 || b.position[r] >= p.positions))
      throw Error(ErrorCode::kInvalidArgument,
                  text("position ", b.position[r], " of row ", r, " is beyond the model's; allowed: 0 to ", p.positions - 1));
  }
}
template <class Problem>
void check_each_target(const Problem& p, const typename Problem::Buffers& b) {
  for (int64_t r = 0; r < b.rows; ++r)
    if (b.target[r] < -1 || b.target[r] >= p.vocab)
      throw Error(ErrorCode::kInvalidArgument, text("target ", b.target[r], " of row ", r, " is not in the vocabulary; allowed: 0 to ", p.vocab - 1));
}

}  // namespace

void check(const Product& p) {
  check_size("columns", p.columns);
  check_size("inner", p.inner);
  check_product("a product", p.rows, p.columns);
  check_product("its first factor", p.rows, p.inner);
  check_product("its second factor", p.inner, p.columns);
  for (const DType dtype : {p.a, p.b, p.c}) check_dtype(dtype);
  if (!std::isfinite(p.alpha)) throw Error(ErrorCode::kInvalidArgument, text("alpha is ", p.alpha, "; allowed: finite numbers"));
}
void check(const ColumnSums& p) {
  check_matrix(p.rows, p.columns);
  check_dtype(p.x);
}
void check(const Activate& p) {
  check_matrix(p.rows, p.width);
  check_dtype(p.dtype);
  check_activation(p.activation);
}
void check(const ActivationGradient& p) {
  check_matrix(p.rows, p.width);
  check_dtype(p.dtype);
  check_activation(p.activation);
}
void check(const LayerNormGradient& p) {
  check_matrix(p.rows, p.width);
  check_dtype(p.dtype);
  if (!(p.epsilon > 0)) throw Error(ErrorCode::kInvalidArgument, text("epsilon is ", p.epsilon, "; allowed: above 0"));
}
void check(const EmbeddingGradient& p) {
  check_matrix(p.rows, p.width);
  check_size("vocab", p.vocab);
  check_size("positions", p.positions, 0);
}
void check(const Rotary& p) {
  check_size("nheads", p.nheads);
  check_size("headdim", p.headdim);
  check_size("stride", p.stride, p.nheads * p.headdim);
  check_product("activations", p.rows, p.stride);
  check_dtype(p.dtype);
  if (p.headdim % 2 != 0) throw Error(ErrorCode::kInvalidArgument, text("headdim is ", p.headdim, "; rotary positions need an even one"));
  if (!(p.theta > 0)) throw Error(ErrorCode::kInvalidArgument, text("theta is ", p.theta, "; allowed: above 0"));
}
void check(const Dropout& p) {
  check_matrix(p.rows, p.width);
  if (!(p.p >= 0 && std::round(p.p * 65536) < 65536))
    throw Error(ErrorCode::kInvalidArgument, text("dropout of ", p.p, "; allowed: 0 to 0.9999, of which some elements stay"));
}
void check(const CrossEntropyGradient& p) {
  check_matrix(p.rows, p.width);
  check_size("vocab", p.vocab);
  check_product("a weight", std::max(p.vocab, p.padded), p.width);
  check_dtype(p.dtype);
  if (p.padded != 0 && p.padded < p.vocab)
    throw Error(ErrorCode::kInvalidArgument, text("a weight of ", p.padded, " rows for a vocabulary of ", p.vocab, "; allowed: as many, or more"));
}
void check(const LossSums&) {}
void check(const SquareSum&) {}
void check(const AdamWStep& p) { check_dtype(p.dtype); }

void check_rows(const Embedding& p, const Embedding::Buffers& b) { check_ids(p, b); }
void check_rows(const EmbeddingGradient& p, const EmbeddingGradient::Buffers& b) { check_ids(p, b); }
void check_targets(const CrossEntropy& p, const CrossEntropy::Buffers& b) { check_each_target(p, b); }
void check_targets(const CrossEntropyGradient& p, const CrossEntropyGradient::Buffers& b) { check_each_target(p, b); }

void add_losses(const LossSums::Buffers& b) {
  double sum = 0;
  for (int64_t r = 0; r < b.rows; ++r) {
    if (b.target[r] < 0) continue;
    sum += static_cast<double>(b.loss[r]);
    if (!(static_cast<double>(b.largest[r]) <= b.sums[1])) b.sums[1] = std::isnan(b.sums[1]) ? NAN : static_cast<double>(b.largest[r]);
  }
  b.sums[0] += sum;
}

Dropout::Buffers with_changing(const Dropout::Buffers& given) {
  Dropout::Buffers b = given;
  if (b.state) b.seed = b.state[0], b.stream += b.state[1];
  return b;
}
CrossEntropyGradient::Buffers with_changing(const CrossEntropyGradient::Buffers& given) {
  CrossEntropyGradient::Buffers b = given;
  if (b.scale_at) b.scale = *b.scale_at;
  return b;
}
AdamWStep::Buffers with_changing(const AdamWStep::Buffers& given) {
  AdamWStep::Buffers b = given;
  if (b.changing) b.scale = b.changing->scale, b.learning_rate = b.changing->learning_rate, b.step = b.changing->step;
  if (!b.square_sum) return b;
  if (!std::isfinite(*b.square_sum)) b.rows = 0;
  if (b.clip > 0) b.scale *= std::min(1.0, b.clip / (std::sqrt(*b.square_sum) * std::abs(b.scale) + 1e-6));  // as torch's clip_grad_norm_
  return b;
}

#define FATTN_OPS_PLAN(Problem) template class Plan<Problem>
FATTN_OPS_FOR_TRAINING(FATTN_OPS_PLAN);
#undef FATTN_OPS_PLAN

}  // namespace fattn::ops
