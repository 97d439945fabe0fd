// Executing a plan of the CPU backend allocates nothing: every operator new of this program is counted.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>

#include "fattn/fattn.hpp"

namespace {

std::atomic<int64_t> allocations{0};

void* allocate(size_t bytes, size_t alignment) {
  ++allocations;
  void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment + (bytes == 0 ? alignment : 0));
  if (!p) throw std::bad_alloc();
  return p;
}

// Out of line: inlined into a `delete`, free() on what operator new gave is a warning.
[[gnu::noinline]] void release(void* p) noexcept { std::free(p); }

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void* operator new[](size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, size_t) noexcept { release(p); }
void operator delete[](void* p, size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { release(p); }

namespace fattn {
namespace {

struct Aligned {
  explicit Aligned(size_t bytes) : data(static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64))) { std::fill_n(data, bytes, '\0'); }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  char* data;
};

// How often three calls allocate, after a first one: that starts the pool's threads.
template <class Tensors>
int64_t allocations_of(const Tensors& tensors, const Options& options) {
  const Plan plan(tensors, options);
  const Aligned workspace(plan.workspace_bytes());
  plan.execute(tensors, workspace.data, plan.workspace_bytes());
  const int64_t before = allocations;
  for (int i = 0; i < 3; ++i) plan.execute(tensors, workspace.data, plan.workspace_bytes());
  return allocations - before;
}

TEST(AllocationsSmall, AreCounted) {
  const int64_t before = allocations;
  const std::string text(static_cast<size_t>(before % 100 + 100), 'x');
  EXPECT_EQ(allocations - before, 1) << text;
}

TEST(AllocationsSmall, ExecutingMakesNone) {
  constexpr int64_t kBatch = 2, kHeads = 4, kHeadsK = 2, kHeaddim = 40, kKeys = 200;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kV1, Algorithm::kStandard})
      for (const int64_t queries : {int64_t{1}, int64_t{130}})
        for (const int threads : {1, 3}) {
          Options options;
          options.algorithm = algorithm;
          options.backend = Backend::kCpu;
          options.causal = true;
          options.num_threads = threads;
          const Aligned memory(11 * kBatch * kKeys * kHeads * kHeaddim * sizeof(float));
          char* next = memory.data;
          const auto tensor = [&](int64_t seqlen, int64_t heads) {
            const Tensor t(next, dtype, {kBatch, seqlen, heads, kHeaddim});
            next += kBatch * kKeys * kHeads * kHeaddim * sizeof(float);
            return t;
          };
          const Tensor q = tensor(queries, kHeads), k = tensor(kKeys, kHeadsK), v = tensor(kKeys, kHeadsK), o = tensor(queries, kHeads);
          const Tensor lse(next, DType::kF32, {kBatch, kHeads, queries});
          next += kBatch * kKeys * kHeads * kHeaddim * sizeof(float);
          const Tensor dout = tensor(queries, kHeads), dq = tensor(queries, kHeads), dk = tensor(kKeys, kHeadsK), dv = tensor(kKeys, kHeadsK);
          const ForwardTensors forward = {q, k, v, o, lse, {}};
          const BackwardTensors backward = {q, k, v, o, lse, dout, dq, dk, dv, {}, {}};
          if (!supported(describe(forward, options))) continue;  // no OpenBLAS
          const std::string what = "dtype " + std::to_string(static_cast<int>(dtype)) + ", algorithm " + std::to_string(static_cast<int>(algorithm)) +
                                   ", " + std::to_string(queries) + " queries, " + std::to_string(threads) + " threads";
          EXPECT_EQ(allocations_of(forward, options), 0) << "forward, " << what;
          EXPECT_EQ(allocations_of(backward, options), 0) << "backward, " << what;
        }
}

TEST(AllocationsSmall, MergeRotaryAndAppendMakeNone) {
  constexpr int64_t kBatch = 2, kSeqlen = 300, kHeads = 4, kHeaddim = 64, kSize = kBatch * kSeqlen * kHeads * kHeaddim;
  const Aligned memory(14 * kSize * sizeof(float));
  int64_t next = 0;
  const auto tensor = [&](DType dtype) {
    return Tensor(memory.data + kSize * static_cast<int64_t>(sizeof(float)) * next++, dtype, {kBatch, kSeqlen, kHeads, kHeaddim});
  };
  const auto lse = [&] { return Tensor(memory.data + kSize * static_cast<int64_t>(sizeof(float)) * next++, DType::kF32, {kBatch, kHeads, kSeqlen}); };
  const MergePart parts[] = {{tensor(DType::kBF16), lse(), tensor(DType::kF32), lse()}, {tensor(DType::kF32), lse(), {}, lse()}};
  const MergePart inputs[] = {{parts[0].o, parts[0].lse, {}, {}}, {parts[1].o, parts[1].lse, {}, {}}};
  const Tensor o = tensor(DType::kF16), all = lse();
  const Tensor angles(memory.data, DType::kF32, {kSeqlen, kHeaddim / 2});
  const Tensor cache = tensor(DType::kBF16), other_cache = tensor(DType::kF32);
  const auto pages = [](const Tensor& t) { return Tensor(t.data(), t.dtype(), {kBatch * 30, 10, kHeads, kHeaddim}); };
  int32_t table[kBatch * 30], lengths[kBatch] = {};
  for (int32_t i = 0; i < kBatch * 30; ++i) table[i] = kBatch * 30 - 1 - i;
  for (const int threads : {1, 3}) {
    AppendOptions step;
    step.num_threads = threads;
    step.block_table = Tensor(table, DType::kI32, {kBatch, 30});
    step.cache_seqlens = Tensor(lengths, DType::kI32, {kBatch});
    step.cos = step.sin = angles;
    step.q = step.q_out = o;
    RotaryOptions options;
    options.num_threads = threads;
    const auto call = [&] {
      merge(inputs, 2, o, all, options);
      merge_backward(parts, 2, o, {}, options);
      rotary(parts[1].o, angles, angles, parts[0].dout, options);
      append(parts[0].dout, parts[1].o, pages(cache), pages(other_cache), step);
    };
    call();
    const int64_t before = allocations;
    for (int i = 0; i < 3; ++i) call();
    EXPECT_EQ(allocations - before, 0) << threads << " threads";
  }
}

}  // namespace
}  // namespace fattn
