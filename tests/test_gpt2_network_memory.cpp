// What a network allocates: as much as it says before, and nothing from its second step on. Every operator new and aligned_alloc of this program is
// counted.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "network_text.h"

namespace {

std::atomic<int64_t> allocations{0}, allocated{0};

// Out of line: inlined into a `delete`, free() on what operator new gave is a warning.
[[gnu::noinline]] void release(void* p) noexcept { std::free(p); }

}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* p = std::malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {  // std::stable_sort's; sanitizers have one of their own
  ++allocations;
  return std::malloc(bytes ? bytes : 1);
}
void operator delete(void* p) noexcept { release(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { release(p); }
void operator delete(void* p, size_t) noexcept { release(p); }
extern "C" void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  ++allocations;
  allocated += static_cast<int64_t>(bytes);
  void* p = nullptr;
  return posix_memalign(&p, alignment, bytes) == 0 ? p : nullptr;
}

namespace fattn::gpt2 {
namespace {

TEST(NetworkSmallMemory, IsWhatItSays) {
  const Config config = small();
  const Beginning start(config);
  for (const DType dtype : {DType::kF32, DType::kF16})
    for (const bool checkpoints : {false, true}) {
      NetworkOptions options = options_of(dtype);
      options.checkpoint_activations = checkpoints;
      options.dropout = 0.1;
      int64_t said = 0;
      for (const TrainingMemory& use : Network::memory(config, options, {})) said += static_cast<int64_t>(use.bytes);
      Network warm = start.network(options);  // opens libraries
      const int64_t before = allocated;
      Network network = start.network(options);
      EXPECT_EQ(allocated - before, said) << name_of(dtype);
      const Text text(config, true);
      network.accumulate(text.batch, 1, 1);
      network.update({.learning_rate = 1e-3});
      const int64_t count = allocations;
      network.zero_gradients();
      network.accumulate(text.batch, 1, 2);
      network.update({.learning_rate = 1e-3, .step = 2});
      network.evaluate(text.batch);
      EXPECT_EQ(allocations, count);
    }
}

}  // namespace
}  // namespace fattn::gpt2
