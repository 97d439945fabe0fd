// A linear layer of any number of rows.
#pragma once

#include <memory>

#include "ops/cuda/matmul.h"
#include "ops/cuda/product.h"

namespace fattn::ops::cuda {

class CudaLinear final : public Kernel<Linear> {
 public:
  CudaLinear(const Linear& problem, const Device& device);
  size_t workspace_bytes() const override { return problem_.rows > few_.most_rows() && !odd_ ? Matmul::kMostWorkspace : 0; }
  void execute(const Linear::Buffers& buffers, void* workspace, void* stream) const override;
  int64_t few_rows() const { return few_.most_rows(); }

 private:
  std::shared_ptr<const Matmul> matmul_of(int64_t rows, BiasOf bias) const;
  void by_few(const Linear::Buffers& buffers, void* stream) const;  // y is in the dtype of x

  const Linear problem_;
  const Gpu gpu_;
  const Product few_;
  const bool odd_;  // rows of 16 bits at such addresses the library rounds before it adds the bias
  KernelKey bias_;
  const Matmuls matmuls_;
};

}  // namespace fattn::ops::cuda
