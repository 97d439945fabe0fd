// A decode loop over a paged cache: pages of 16 keys are handed out as sequences grow, two sequences share the pages of their common prompt, and each
// step is one call. Every step is checked against keys that lie side by side.
#include <fattn/fattn.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kPages = 16, kPage = 16, kColumns = 6, kHeads = 8, kHeadsK = 2, kHeaddim = 64, kBatch = 2, kPrompt = 32, kSteps = 20;
constexpr int64_t kRow = kHeadsK * kHeaddim;

struct Cache {
  std::vector<float> k = std::vector<float>(kPages * kPage * kRow), v = k;
  std::vector<int32_t> table = std::vector<int32_t>(kBatch * kColumns, -1), lengths = std::vector<int32_t>(kBatch, 0);
  int32_t next_free = 0;

  // Where the next key of a sequence goes, on a new page where the last one is full.
  int64_t append(int64_t sequence) {
    const int32_t j = lengths[static_cast<size_t>(sequence)]++;
    int32_t& page = table[static_cast<size_t>(sequence * kColumns + j / kPage)];
    if (j % kPage == 0) page = next_free++;
    return (page * kPage + j % kPage) * kRow;
  }
};

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = normal(generator);
  };
  Cache cache;
  const auto new_key = [&](int64_t sequence) {
    const int64_t at = cache.append(sequence);
    fill(cache.k.data() + at, kRow);
    fill(cache.v.data() + at, kRow);
  };
  for (int64_t j = 0; j < kPrompt; ++j) new_key(0);
  for (int64_t page = 0; page < kPrompt / kPage; ++page)  // the second sequence begins with the same prompt
    cache.table[static_cast<size_t>(kColumns + page)] = cache.table[static_cast<size_t>(page)];
  cache.lengths[1] = kPrompt;

  std::vector<float> q(kBatch * kHeads * kHeaddim), o(q.size()), expected(q.size());
  fattn::ForwardTensors step;
  step.q = fattn::Tensor(q.data(), fattn::DType::kF32, {kBatch, 1, kHeads, kHeaddim});
  step.k = fattn::Tensor(cache.k.data(), fattn::DType::kF32, {kPages, kPage, kHeadsK, kHeaddim});
  step.v = fattn::Tensor(cache.v.data(), fattn::DType::kF32, {kPages, kPage, kHeadsK, kHeaddim});
  step.o = fattn::Tensor(o.data(), fattn::DType::kF32, {kBatch, 1, kHeads, kHeaddim});
  step.scores.seqused_k = fattn::Tensor(cache.lengths.data(), fattn::DType::kI32, {kBatch});
  step.scores.block_table = fattn::Tensor(cache.table.data(), fattn::DType::kI32, {kBatch, kColumns});

  double worst = 0;
  try {
    const fattn::Plan plan(step, {});  // once; lengths and tables may change from call to call
    std::vector<unsigned char> workspace(plan.workspace_bytes() + 64);
    void* const aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    for (int64_t i = 0; i < kSteps; ++i) {
      for (int64_t sequence = 0; sequence < kBatch; ++sequence) new_key(sequence);
      fill(q.data(), kBatch * kHeads * kHeaddim);
      plan.execute(step, aligned, plan.workspace_bytes());

      for (int64_t b = 0; b < kBatch; ++b) {  // the same from keys side by side
        const int64_t keys = cache.lengths[static_cast<size_t>(b)];
        std::vector<float> k, v;
        for (int64_t j = 0; j < keys; ++j) {
          const int64_t row = (cache.table[static_cast<size_t>(b * kColumns + j / kPage)] * kPage + j % kPage) * kRow;
          k.insert(k.end(), cache.k.begin() + row, cache.k.begin() + row + kRow);
          v.insert(v.end(), cache.v.begin() + row, cache.v.begin() + row + kRow);
        }
        fattn::ForwardTensors alone;
        alone.q = fattn::Tensor(q.data() + b * kHeads * kHeaddim, fattn::DType::kF32, {1, 1, kHeads, kHeaddim});
        alone.k = fattn::Tensor(k.data(), fattn::DType::kF32, {1, keys, kHeadsK, kHeaddim});
        alone.v = fattn::Tensor(v.data(), fattn::DType::kF32, {1, keys, kHeadsK, kHeaddim});
        alone.o = fattn::Tensor(expected.data() + b * kHeads * kHeaddim, fattn::DType::kF32, {1, 1, kHeads, kHeaddim});
        fattn::forward(alone, {});
      }
      for (size_t d = 0; d < o.size(); ++d) {
        const double error = std::fabs(static_cast<double>(o[d]) - static_cast<double>(expected[d]));
        if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
      }
    }
  } catch (const fattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%d steps, %d pages, largest difference %.1e\n", static_cast<int>(kSteps), cache.next_free, worst);
  return worst <= 1e-5 ? 0 : 1;
}
