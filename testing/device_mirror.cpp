#include "testing/device_mirror.h"

#include <stdexcept>

namespace fattn::testing {

void DeviceMirror::add(const std::vector<TensorBlock>& blocks) {
  for (const TensorBlock& block : blocks) {
    const Memory& memory = block.memory();
    Copy copy{&block, cuda::Buffer(device_, memory.size())};
    if (memory.size() > 0) copy.device.copy_from(memory.data(), memory.size());
    copies_.push_back(std::move(copy));
  }
}

Tensor DeviceMirror::at(const Tensor& host) const {
  if (!host) return host;
  if (!host.data()) return host.on(Device::kCuda, device_, nullptr);
  const auto* data = static_cast<const unsigned char*>(host.data());
  for (const Copy& copy : copies_) {
    const Memory& memory = copy.host->memory();
    if (data >= memory.data() && data <= memory.data() + memory.size())
      return host.on(Device::kCuda, device_, static_cast<unsigned char*>(copy.device.get()) + (data - memory.data()));
  }
  throw std::logic_error("DeviceMirror::at: the tensor lies in no block that was added");
}

void DeviceMirror::fetch() const {
  for (const Copy& copy : copies_)
    if (const Memory& memory = copy.host->memory(); memory.size() > 0) copy.device.copy_to(memory.data(), memory.size());
}

}  // namespace fattn::testing
