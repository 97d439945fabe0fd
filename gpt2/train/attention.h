// Attention of whole sequences, forward and backward, by the C functions of fattn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fattn/fattn.hpp"
#include "gpt2/model/model.h"
#include "gpt2/train/network.h"

namespace fattn::gpt2 {

class TrainingAttention {
 public:
  // Throws fattn::Error where the planner refuses, with its reason.
  TrainingAttention(const Config& config, const NetworkOptions& options, const Compute& compute);

  size_t workspace_bytes() const { return workspace_bytes_; }

  // What both passes take. q, k and v lie side by side in the rows of qkv, their gradients likewise.
  struct Call {
    int64_t layer = 0;
    const void* qkv = nullptr;
    void* o = nullptr;                   // (sequences, seqlen, heads, headdim)
    float* lse = nullptr;                // (sequences, heads, seqlen)
    const int32_t* documents = nullptr;  // null: none
    bool drops = false;
    const int64_t* state = nullptr;  // of dropout: seed and offset; an entry's head has a stream of its own, counted from the offset
    void *workspace = nullptr, *stream = nullptr;
  };
  void forward(const Call& call) const;
  void backward(const Call& call, const void* dout, void* dqkv) const;
  int64_t streams() const { return options_.sequences * config_.n_head; }  // that a layer's dropout takes

 private:
  struct Plans {
    std::vector<Plan> forward, backward;  // of each scale
    std::optional<fattn::Error> refused;  // there is none: batches with documents are refused then
  };
  int64_t index_of_scale(int64_t layer) const { return config_.scale_attn_by_inverse_layer_idx ? layer : 0; }
  const Plan& of(const std::vector<Plan>& plans, int64_t layer) const { return plans[static_cast<size_t>(index_of_scale(layer))]; }
  const Plans& plans_of(const Call& call) const;
  void make(Plans& plans, const Call& call, fattn::Options& wanted);
  Tensor placed(const Tensor& tensor) const { return gpu_ ? tensor.on(Device::kCuda, *gpu_, tensor.data()) : tensor; }
  Tensor rows(const void* data, int64_t first_head, int64_t heads, int64_t width) const;
  ScoreTensors scores(const Call& call) const;
  ForwardTensors forward_tensors(const Call& call) const;
  BackwardTensors backward_tensors(const Call& call, const void* dout, void* dqkv) const;

  const Config config_;
  const NetworkOptions options_;
  const std::optional<int> gpu_;
  Plans plans_[2][2];  // with documents, with dropout
  size_t workspace_bytes_ = 0;
};

}  // namespace fattn::gpt2
