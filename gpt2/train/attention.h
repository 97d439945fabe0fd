// Attention of whole sequences, forward and backward, by the C functions of fattn; of sequences that several processes share, by ring attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fattn/fattn.hpp"
#include "gpt2/model/model.h"
#include "gpt2/train/context.h"
#include "gpt2/train/network.h"

namespace fattn::gpt2 {

class TrainingAttention {
 public:
  // Throws fattn::Error where the planner refuses, with its reason.
  TrainingAttention(const Config& config, const NetworkOptions& options, const Compute& compute);

  size_t workspace_bytes() const { return workspace_bytes_ + (shares() ? 2 * packed_bytes() : 0); }
  const ContextRows& held() const { return held_; }  // of each sequence

  // What both passes take. q, k and v lie side by side in the rows of qkv, their gradients likewise.
  struct Call {
    int64_t layer = 0;
    const void* qkv = nullptr;
    void* o = nullptr;                   // (sequences, rows, heads, headdim)
    float* lse = nullptr;                // (sequences, heads, rows)
    const int32_t* documents = nullptr;  // null: none
    bool drops = false;
    const int64_t* state = nullptr;  // of dropout: seed and offset; an entry's head has a stream of its own, counted from the offset
    void *workspace = nullptr, *stream = nullptr;
  };
  void forward(const Call& call) const;
  void backward(const Call& call, const void* dout, void* dqkv) const;
  int64_t streams() const { return options_.sequences * config_.n_head; }  // that a layer's dropout takes

 private:
  // Of a sequence that several processes share the ring's, else the other.
  struct Pass {
    std::unique_ptr<Plan> whole;
    std::unique_ptr<RingPlan> ring;
    size_t workspace_bytes() const { return whole ? whole->workspace_bytes() : ring->workspace_bytes(); }
    template <class Tensors>
    void execute(const Tensors& tensors, void* workspace, size_t bytes, void* stream) const {
      whole ? whole->execute(tensors, workspace, bytes, stream) : ring->execute(tensors, workspace, bytes, stream);
    }
  };
  struct Plans {
    std::vector<Pass> forward, backward;  // of each scale
    std::optional<fattn::Error> refused;  // there is none: batches with documents are refused then
  };
  int64_t index_of_scale(int64_t layer) const { return config_.scale_attn_by_inverse_layer_idx ? layer : 0; }
  const Pass& of(const std::vector<Pass>& plans, int64_t layer) const { return plans[static_cast<size_t>(index_of_scale(layer))]; }
  const Plans& plans_of(const Call& call) const;
  void make(Plans& plans, const Call& call, fattn::Options& wanted);
  template <class Tensors>
  Pass pass(const Tensors& tensors, const fattn::Options& wanted);
  bool shares() const { return options_.context.ranks > 1; }
  // Of k and v, whose rows travel: contiguous copies behind the workspace of plans; with `call`'s memory they are made.
  Tensor packed(const Tensor& x, int which, const Call& call) const;
  size_t packed_bytes() const;
  Tensor placed(const Tensor& tensor) const { return gpu_ ? tensor.on(Device::kCuda, *gpu_, tensor.data()) : tensor; }
  Tensor rows(const void* data, int64_t first_head, int64_t heads, int64_t width) const;
  ScoreTensors scores(const Call& call) const;
  ForwardTensors forward_tensors(const Call& call) const;
  BackwardTensors backward_tensors(const Call& call, const void* dout, void* dqkv) const;

  const Config config_;
  const NetworkOptions options_;
  const std::optional<int> gpu_;
  const ContextRows held_;
  ContextTransport transport_;
  RowOptions copying_;
  Plans plans_[2][2];           // with documents, with dropout
  size_t workspace_bytes_ = 0;  // of plans, and then of packed rows
};

}  // namespace fattn::gpt2
