// A way to compute a problem on a GPU: a fixed list of launches on one stream. The planners (plan/planners.h) make them; loading, executing and
// compiling in advance go over them (route.cpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/cuda/matmul.h"
#include "device/cuda_device.h"
#include "fattn/tensors.hpp"
#include "jit/kernel_table.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// One of the tensors of kTensors as a bit of a set of them.
using TensorSet = uint32_t;
static_assert(kTensorCount <= 32);
constexpr TensorSet tensor_set(std::initializer_list<const char*> names) {
  TensorSet set = 0;
  for (const char* name : names) set |= TensorSet{1} << tensor_index(name);
  return set;
}
// Those whose rows kernels copy.
constexpr TensorSet kForwardRows = tensor_set({"q", "k", "v", "o"});
constexpr TensorSet kBackwardRows = tensor_set({"q", "k", "v", "o", "dout", "dq", "dk", "dv"});
constexpr TensorSet rows_of_pass(const Problem& p) { return p.backward ? kBackwardRows : kForwardRows; }

// Tensors that begin at no multiple of 16 bytes, of 4.
struct Misaligned {
  TensorSet of_16 = 0, of_4 = 0;
};
Misaligned misaligned(const fattn_buffers& buffers);

// One execution.
struct Call {
  CudaDevice& device;
  const Problem& problem;
  const fattn_buffers& buffers;
  CUstream stream;
  Misaligned off;

  void* workspace(int64_t offset) const { return static_cast<char*>(buffers.workspace) + offset; }
};

// A specialisation, which is compiled when it is first needed.
struct Kernel {
  jit::KernelKey key;
  jit::Request (*request)(const jit::KernelKey&) = nullptr;  // null: none
};
template <class Key, jit::Request (*make)(const Key&)>
Kernel kernel_of(const Key& key) {
  return {jit::key_of_pod(key), [](const jit::KernelKey& of) { return make(jit::pod_of_key<Key>(of)); }};
}

// What a product is given.
struct Operands {
  const void *a, *b;
  void *d, *workspace;
};

// A kernel, or a product by cuBLASLt.
struct Launch {
  Kernel kernel;
  Kernel unaligned = {};  // instead, for calls with one of `aligned` at an address that 16-byte copies do not take; none: `kernel` takes any
  TensorSet aligned = 0;
  CudaLaunch shape = {};
  int registers = 0;  // that its warps count on: they move as many among them, and with fewer would wait for ever
  std::shared_ptr<const Matmul> product = nullptr;
  std::array<uint16_t, 8> parameters = {};  // where in the parameters of a call
  const Kernel& kernel_for(const Misaligned& off) const { return (off.of_16 & aligned) != 0 && unaligned.request ? unaligned : kernel; }
};

inline CudaLaunch shape_of(int64_t grid, int threads, int shared_bytes, bool early = false) {
  CudaLaunch launch;
  launch.grid_x = static_cast<unsigned>(grid);
  launch.block_x = static_cast<unsigned>(threads);
  launch.shared_bytes = static_cast<unsigned>(shared_bytes);
  launch.early = early;
  return launch;
}

// A struct that is made for each call, and one of them, to tell where its members are.
template <class Params>
struct ParameterBlock {
  size_t at = 0;
  Params example{};
};

class Route {
 public:
  // What a plan says of it; `title` is the name of its kernels for people.
  Algorithm algorithm = Algorithm::kV2;
  int level = 0;
  std::string title, why;
  int64_t workspace_bytes = 0;
  // It accepts calls whose tensors of these sets begin at multiples of 16 bytes, and of 4; `else_why` says why there may be no other way.
  TensorSet needs_16 = 0, needs_4 = 0;
  std::string else_why;

  bool any_address() const { return (needs_16 | needs_4) == 0; }
  bool accepts(const Misaligned& off) const { return ((off.of_16 & needs_16) | (off.of_4 & needs_4)) == 0; }

  // Params that fill(call) returns, or fill(call, params) fills.
  template <class Params, class Fill>
  ParameterBlock<Params> parameters(Fill fill) {
    static_assert(std::is_trivially_destructible_v<Params> && alignof(Params) <= kAlignment);
    const size_t at = (parameter_bytes_ + alignof(Params) - 1) / alignof(Params) * alignof(Params);
    parameter_bytes_ = at + sizeof(Params);
    fills_.push_back([fill = std::move(fill), at](const Call& call, std::byte* to) {
      if constexpr (std::is_invocable_v<Fill, const Call&>)
        ::new (to + at) Params(fill(call));
      else
        fill(call, *::new (to + at) Params);
    });
    return {at};
  }
  // Behind the launches that are there, or before them, unless its grid is empty; it takes these members of the block's example.
  template <class Params, size_t n>
  void add(const ParameterBlock<Params>& block, const std::array<void*, n>& members, Launch launch, bool before = false) {
    if (launch.shape.grid_x == 0 || (!launch.kernel.request && !launch.product)) return;
    const auto* const base = reinterpret_cast<const std::byte*>(&block.example);
    for (size_t i = 0; i < n; ++i)
      launch.parameters[i] = static_cast<uint16_t>(block.at + static_cast<size_t>(static_cast<const std::byte*>(members[i]) - base));
    launches_.insert(before ? launches_.begin() : launches_.end(), std::move(launch));
  }
  // It takes the whole struct.
  template <class Params>
  void add(const ParameterBlock<Params>& block, Launch launch, bool before = false) {
    add(block, std::array<void*, 1>{const_cast<Params*>(&block.example)}, std::move(launch), before);
  }
  // A kernel of problems that differ in lengths, or on a GPU of another size: it is compiled in advance with the others.
  void add_sibling(const Kernel& sibling) { siblings_.push_back(sibling); }

  const std::vector<Launch>& launches() const { return launches_; }
  const std::vector<Kernel>& siblings() const { return siblings_; }

  // Loads the kernels of calls with aligned pointers.
  void load(CudaDevice& device) const;
  // Allocates nothing once they are loaded.
  void execute(const Call& call) const;
  // Those of calls with aligned pointers, and the siblings.
  std::vector<jit::Request> requests() const;

 private:
  static constexpr size_t kMostParameters = 16384, kAlignment = 128;
  std::vector<Launch> launches_;
  std::vector<Kernel> siblings_;
  std::vector<std::function<void(const Call&, std::byte*)>> fills_;
  size_t parameter_bytes_ = 0;
};

}  // namespace fattn::core::cuda
