// Copies of tensors on a CUDA device, with everything between and around them, so that a case runs there in the same layout and
// what a kernel writes outside its outputs is seen.
#pragma once

#include <vector>

#include "fattn/device.hpp"
#include "testing/tensors.h"

namespace fattn::testing {

class DeviceMirror {
 public:
  explicit DeviceMirror(int device) : device_(device) {}
  // Copies the blocks' bytes to the device. The blocks must outlive the mirror.
  void add(const std::vector<TensorBlock>& blocks);
  // The view's copy on the device; an absent tensor stays absent. Every tensor lies in a block that was added.
  Tensor at(const Tensor& host) const;
  // Copies everything back over the blocks' memory.
  void fetch() const;

 private:
  struct Copy {
    const TensorBlock* host;
    cuda::Buffer device;
  };
  int device_;
  std::vector<Copy> copies_;
};

}  // namespace fattn::testing
