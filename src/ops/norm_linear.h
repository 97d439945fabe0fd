// LayerNorm and the product behind it as operations one after the other: what every backend can do.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "ops/ops.h"

namespace fattn::ops {

inline LayerNorm norm_of(const NormLinear& p) { return {p.linear.rows, p.linear.in, p.epsilon, p.linear.dtype}; }
inline KeysValues keys_values_of(const NormLinear& p) { return {p.linear.rows, p.nheads, p.nheads_k, p.headdim, p.linear.dtype, p.rotary, p.theta}; }

class NormThenLinear final : public Kernel<NormLinear> {
 public:
  NormThenLinear(std::unique_ptr<const Kernel<LayerNorm>> norm, std::unique_ptr<const Kernel<Linear>> linear,
                 std::unique_ptr<const Kernel<KeysValues>> keys_values)
      : norm_(std::move(norm)), linear_(std::move(linear)), keys_values_(std::move(keys_values)) {}
  size_t workspace_bytes() const override {
    return std::max({norm_->workspace_bytes(), linear_->workspace_bytes(), keys_values_ ? keys_values_->workspace_bytes() : 0});
  }
  void execute(const NormLinear::Buffers& b, void* workspace, void* stream) const override {
    norm_->execute({b.rows, const_cast<float*>(b.x), nullptr, b.select, b.norm_weight, b.norm_bias, b.normed}, workspace, stream);
    linear_->execute({b.rows, b.normed, b.weight, b.bias, b.y}, workspace, stream);
    if (keys_values_) keys_values_->execute({b.rows, b.y, b.position, b.slot, b.k, b.v}, workspace, stream);
  }

 private:
  std::unique_ptr<const Kernel<LayerNorm>> norm_;
  std::unique_ptr<const Kernel<Linear>> linear_;
  std::unique_ptr<const Kernel<KeysValues>> keys_values_;  // null: none
};

}  // namespace fattn::ops
