#include "backend/cuda/route.h"

#include <algorithm>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

const jit::Loaded& loaded(CudaDevice& device, const Kernel& kernel, int registers) {
  const jit::Loaded& found = jit::kernel_table().get(device, kernel.key, kernel.request);
  if (found.registers < registers)
    throw Error(ErrorCode::kInternal, text(found.name, " has ", found.registers, " registers a thread, and its warps count on ", registers));
  return found;
}

}  // namespace

Misaligned misaligned(const fattn_buffers& buffers) {
  Misaligned off;
  for (size_t i = 0; i < kTensorCount; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(kTensors[i].pointer.get(buffers));
    if (at % 16 != 0) off.of_16 |= TensorSet{1} << i;
    if (at % 4 != 0) off.of_4 |= TensorSet{1} << i;
  }
  return off;
}

void Route::load(CudaDevice& device) const {
  for (const Launch& launch : launches_)
    if (launch.kernel.request) loaded(device, launch.kernel, launch.registers);
}

void Route::execute(const Call& call) const {
  alignas(kAlignment) std::byte block[kMostParameters];
  if (parameter_bytes_ > sizeof block) throw Error(ErrorCode::kInternal, text("a route has ", parameter_bytes_, " bytes of parameters"));
  for (const auto& fill : fills_) fill(call, block);
  for (const Launch& launch : launches_) {
    if (launch.product) {
      const auto& of = *std::launder(reinterpret_cast<const Operands*>(block + launch.parameters[0]));
      launch.product->run(of.a, of.b, of.d, of.workspace, call.stream);
      continue;
    }
    const jit::Loaded& code = loaded(call.device, launch.kernel_for(call.off), launch.registers);
    void* parameters[std::tuple_size_v<decltype(launch.parameters)>];
    for (size_t i = 0; i < launch.parameters.size(); ++i) parameters[i] = block + launch.parameters[i];
    call.device.launch(code.function, launch.shape, call.stream, parameters, code.name.c_str());
  }
}

std::vector<jit::Request> Route::requests() const {
  std::vector<Kernel> kernels;
  const auto add = [&](const Kernel& kernel) {
    if (kernel.request && std::none_of(kernels.begin(), kernels.end(), [&](const Kernel& k) { return k.key == kernel.key; }))
      kernels.push_back(kernel);
  };
  for (const Launch& launch : launches_) add(launch.kernel);
  for (const Kernel& kernel : siblings_) add(kernel);
  std::vector<jit::Request> requests;
  for (const Kernel& kernel : kernels) requests.push_back(kernel.request(kernel.key));
  return requests;
}

}  // namespace fattn::core::cuda
