// The forward and the backward pass over a batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpt2/data/batch.h"
#include "gpt2/train/plans.h"
#include "gpt2/train/watcher.h"

namespace fattn::gpt2 {

class Passes {
 public:
  // `host`: where the host writes what it says of a pass; on the host itself those of the places.
  Passes(const NetworkPlans& plans, const NetworkPlans::Places& places, const NetworkPlans::Inputs& host, const MemorySpace& space)
      : plans_(plans), places_(places), host_(host), space_(space) {}

  // Is shown what the passes compute from now on, tensor by tensor; null: nobody.
  void watch(PassWatcher* watcher) { watcher_ = watcher; }

  struct Call {
    bool documents = false, drops = false;
    int64_t targets = 0;
    auto operator<=>(const Call&) const = default;
  };
  // Checks a batch and brings it to where the passes read it. Throws Error.
  Call take(const Batch& batch, bool drops, uint64_t draw, double scale) const;
  void forward(const Call& call) const;
  // Of what forward() left, added to `sums`; with `gradient` also that of the last LayerNorm's output, which backward() begins with.
  void loss(double* sums, bool gradient) const;
  // Hands gradients to `exchange`, unless it is null.
  void backward(const Call& call, GradientExchange* exchange) const;

 private:
  enum class DropPlace { kEmbedding, kAttention, kMlp };

  const NetworkPlans::Kept& kept(int64_t i) const { return places_.kept[places_.kept.size() == 1 ? 0 : static_cast<size_t>(i)]; }
  const void* weight(int64_t offset) const { return places_.weights + static_cast<size_t>(offset) * size_of(plans_.options.dtype); }
  float* gradient(int64_t offset) const { return places_.gradients + offset; }
  // On the device's stream, in the workspace of operations.
  template <class Problem>
  void run(const ops::Plan<Problem>& plan, const typename Problem::Buffers& buffers) const {
    plan.execute(buffers, places_.workspace, space_.stream());
  }

  void forward_layer(int64_t i, const Call& call) const;
  void backward_layer(int64_t i, const Call& call) const;
  void normalise(const float* x, const PairAt& at) const;
  void normalise_back(const float* x, const PairAt& at) const;
  // to = x W + b + before, of which the product may be dropped
  void add_linear(const LinearPlans& linear, const void* x, const PairAt& at, const float* before, float* to, const Call& call, DropPlace place,
                  int64_t i) const;
  // Gradients of W and b, from x and dy.
  void linear_gradients(const LinearPlans& linear, const void* x, const void* dy, const PairAt& at) const;
  void drop(DropPlace place, int64_t i, const float* x, const float* add, float* to) const;
  TrainingAttention::Call attention(int64_t i, const Call& call) const;
  // To the watcher, if there is one (watcher.cpp).
  void show(const std::string& name, SeenTensor::Kind kind, DType dtype, int64_t width, const void* data) const;
  void show_layer(int64_t i) const;
  void show_gradient(int64_t i, const char* of, DType dtype, int64_t width, const void* data) const;

  const NetworkPlans& plans_;
  const NetworkPlans::Places& places_;
  const NetworkPlans::Inputs& host_;
  const MemorySpace& space_;
  PassWatcher* watcher_ = nullptr;
};

}  // namespace fattn::gpt2
