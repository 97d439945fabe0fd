#include "gpt2/train/watcher.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "gpt2/train/passes.h"
#include "gpt2/weights/convert.h"

namespace fattn::gpt2 {

const float* SeenTensor::row(int64_t r, std::vector<float>& buffer) const {
  const auto* begin = static_cast<const std::byte*>(data) + static_cast<size_t>(r * width) * size_of(dtype);
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(begin);
  buffer.resize(static_cast<size_t>(width));
  convert(begin, dtype, buffer.data(), DType::kF32, buffer.size());
  return buffer.data();
}

void FirstBad::see(const SeenTensor& tensor) {
  if (!name_.empty()) return;
  // The log-sum-exp of a row that sees no key is -Inf.
  const bool lse = tensor.kind == SeenTensor::Kind::kLogSumExp;
  std::vector<float> buffer;
  for (int64_t r = 0; r < tensor.rows; ++r) {
    const float* row = tensor.row(r, buffer);
    if (std::all_of(row, row + tensor.width, [&](float x) { return std::isfinite(x) || (lse && x < 0); })) continue;
    name_ = "'" + tensor.name + "' (" + std::to_string(tensor.rows) + " x " + std::to_string(tensor.width) + ", " + name_of(tensor.dtype) + ")";
    return;
  }
}

void Passes::show(const std::string& name, SeenTensor::Kind kind, DType dtype, int64_t width, const void* data) const {
  if (!watcher_) return;
  SeenTensor tensor{name, kind, dtype, plans_.rows(), width, data};
  std::vector<std::byte> copy;
  if (space_.on_gpu()) {
    copy.resize(static_cast<size_t>(tensor.size()) * size_of(dtype));
    space_.download(copy.data(), data, copy.size());
    tensor.data = copy.data();
  }
  watcher_->see(tensor);
}

void Passes::show_layer(int64_t i) const {
  if (!watcher_) return;
  using Kind = SeenTensor::Kind;
  const Config& c = plans_.config;
  const DType dtype = plans_.options.dtype;
  const NetworkPlans::Kept& k = kept(i);
  const std::string h = "h." + std::to_string(i);
  show(h + ".attn.qkv", Kind::kActivation, dtype, c.qkv_width(), k.qkv);
  show(h + ".attn.lse", Kind::kLogSumExp, DType::kF32, c.n_head, k.lse);
  show(h + ".attn.out", Kind::kActivation, dtype, c.n_embd, k.o);
  show(h + ".middle", Kind::kResidual, DType::kF32, c.n_embd, k.middle);
  show(h + ".mlp.inner", Kind::kActivation, dtype, c.n_inner, k.inner);
  show(h + ".mlp.activated", Kind::kActivation, dtype, c.n_inner, places_.activated);
  show(h + ".out", Kind::kResidual, DType::kF32, c.n_embd, places_.x[static_cast<size_t>(i) + 1]);
}

void Passes::show_gradient(int64_t i, const char* of, DType dtype, int64_t width, const void* data) const {
  if (watcher_) show("gradient of h." + std::to_string(i) + of, SeenTensor::Kind::kGradient, dtype, width, data);
}

}  // namespace fattn::gpt2
