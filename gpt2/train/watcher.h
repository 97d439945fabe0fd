// Whoever looks at the tensors of a pass while it runs: the tracker of precision, and the search for the first number that is none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fattn/types.hpp"

namespace fattn::gpt2 {

// A tensor that a pass has just computed, (rows, width), in memory of the host.
struct SeenTensor {
  enum class Kind { kActivation, kResidual, kLogSumExp, kGradient };
  std::string name;
  Kind kind = Kind::kActivation;
  DType dtype = DType::kF32;
  int64_t rows = 0, width = 0;
  const void* data = nullptr;

  int64_t size() const { return rows * width; }
  // A row in fp32, in `buffer` where it is in 16 bits.
  const float* row(int64_t r, std::vector<float>& buffer) const;
};

class PassWatcher {
 public:
  virtual ~PassWatcher() = default;
  virtual void see(const SeenTensor& tensor) = 0;
};

// The first tensor that is not finite, in the order in which they are computed.
class FirstBad : public PassWatcher {
 public:
  void see(const SeenTensor& tensor) override;
  const std::string& name() const { return name_; }  // "'h.3.mlp.inner' (63 x 100, fp16)"; empty: there is none

 private:
  std::string name_;
};

}  // namespace fattn::gpt2
