// Gradients on their way to the other processes of a run, part by part, while the backward pass goes on.
#pragma once

#include <cstdint>

namespace fattn::gpt2 {

class GradientExchange {
 public:
  virtual ~GradientExchange() = default;
  // Numbers [begin, end) of the flat gradients are final once the work so far on `stream` is done (null: they are, in memory of the host). Parts come
  // in the same order on every process, do not overlap, and are all of the gradients together.
  virtual void ready(float* gradients, int64_t begin, int64_t end, void* stream) = 0;
  // Behind the last part: returns when all of them are sums over the processes, which work on `stream` from here on sees. Throws Error where another
  // process is gone.
  virtual void finish(void* stream) = 0;
};

}  // namespace fattn::gpt2
