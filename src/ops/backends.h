// What the backends of operations make. Internal to src/ops.
#pragma once

#include <memory>

#include "ops/ops.h"
#include "ops/training.h"

namespace fattn::ops {

#define FATTN_OPS_MAKE(Problem) std::unique_ptr<const Kernel<Problem>> make(const Problem&, const Device&)
#define FATTN_OPS_BACKEND                                                                                   \
  std::unique_ptr<const Kernel<Embedding>> make(const Embedding&, const Device&);                           \
  std::unique_ptr<const Kernel<LayerNorm>> make(const LayerNorm&, const Device&);                           \
  std::unique_ptr<const Kernel<Linear>> make(const Linear&, const Device&);                                 \
  std::unique_ptr<const Kernel<KeysValues>> make(const KeysValues&, const Device&);                         \
  std::unique_ptr<const Kernel<NormLinear>> make(const NormLinear&, const Device&);                         \
  std::unique_ptr<const Kernel<CrossEntropy>> make(const CrossEntropy&, const Device&);                     \
  std::unique_ptr<const Kernel<Sampling>> make(const Sampling&, const Device&);                             \
  size_t packed_bytes(const Linear&, const Device&);                                                        \
  void pack(const Linear&, const Device&, const void* weight, bool in_by_out, int64_t given, void* packed); \
  FATTN_OPS_FOR_TRAINING(FATTN_OPS_MAKE);

namespace reference {
FATTN_OPS_BACKEND
}
namespace cpu {
FATTN_OPS_BACKEND
}
namespace cuda {
FATTN_OPS_BACKEND
int64_t rows_alike(const Linear&, const Device&);
}  // namespace cuda
#undef FATTN_OPS_BACKEND
#undef FATTN_OPS_MAKE

// Error if an id or position of a row is out of range.
void check_rows(const Embedding& problem, const Embedding::Buffers& buffers);
void check_rows(const EmbeddingGradient& problem, const EmbeddingGradient::Buffers& buffers);
void check_targets(const CrossEntropy& problem, const CrossEntropy::Buffers& buffers);
void check_targets(const CrossEntropyGradient& problem, const CrossEntropyGradient::Buffers& buffers);

// LossSums on the host.
void add_losses(const LossSums::Buffers& buffers);

// What is given by pointers to memory of the host, read. AdamWStep: no rows, if nothing is to be written.
Dropout::Buffers with_changing(const Dropout::Buffers& buffers);
CrossEntropyGradient::Buffers with_changing(const CrossEntropyGradient::Buffers& buffers);
AdamWStep::Buffers with_changing(const AdamWStep::Buffers& buffers);

}  // namespace fattn::ops
