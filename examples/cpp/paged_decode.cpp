// A decode loop over a paged cache: pages of 16 keys are handed out as sequences grow, two sequences share the pages of their common prompt, and each
// step is two calls: new keys and values go into the cache, turned with the queries to their positions, then attention. Every step is checked against
// keys that lie side by side.
#include <fattn/fattn.hpp>

#include <algorithm>
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

  // Pages for as many new keys of a sequence.
  void make_room(int64_t sequence, int64_t keys) {
    const int64_t length = lengths[static_cast<size_t>(sequence)];
    for (int64_t column = (length + kPage - 1) / kPage; column * kPage < length + keys; ++column)
      table[static_cast<size_t>(sequence * kColumns + column)] = next_free++;
  }
  fattn::Tensor keys() const { return fattn::Tensor(k.data(), fattn::DType::kF32, {kPages, kPage, kHeadsK, kHeaddim}); }
  fattn::Tensor values() const { return fattn::Tensor(v.data(), fattn::DType::kF32, {kPages, kPage, kHeadsK, kHeaddim}); }
};

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = normal(generator);
  };
  Cache cache;
  std::vector<float> cosines(kColumns * kPage * kHeaddim / 2), sines(cosines.size());
  for (size_t i = 0; i < cosines.size(); ++i) {
    const double position = static_cast<double>(i / (kHeaddim / 2)), d = static_cast<double>(i % (kHeaddim / 2));
    const double angle = position * std::pow(10000.0, -2 * d / kHeaddim);
    cosines[i] = static_cast<float>(std::cos(angle)), sines[i] = static_cast<float>(std::sin(angle));
  }
  fattn::AppendOptions rope;
  rope.cos = fattn::Tensor(cosines.data(), fattn::DType::kF32, {kColumns * kPage, kHeaddim / 2});
  rope.sin = fattn::Tensor(sines.data(), fattn::DType::kF32, {kColumns * kPage, kHeaddim / 2});

  std::vector<float> q(kBatch * kHeads * kHeaddim), o(q.size()), expected(q.size());
  fattn::ForwardTensors step;
  step.q = fattn::Tensor(q.data(), fattn::DType::kF32, {kBatch, 1, kHeads, kHeaddim});
  step.k = cache.keys();
  step.v = cache.values();
  step.o = fattn::Tensor(o.data(), fattn::DType::kF32, {kBatch, 1, kHeads, kHeaddim});
  step.scores.block_table = fattn::Tensor(cache.table.data(), fattn::DType::kI32, {kBatch, kColumns});

  // The prompt goes to the pages of the first sequence, and the second one begins with the same.
  std::vector<float> prompt_k(kPrompt * kRow), prompt_v(kPrompt * kRow), new_k(kBatch * kRow), new_v(kBatch * kRow);
  fill(prompt_k.data(), kPrompt * kRow);
  fill(prompt_v.data(), kPrompt * kRow);
  fattn::AppendOptions prefill = rope;
  prefill.block_table = fattn::Tensor(cache.table.data(), fattn::DType::kI32, {1, kColumns});
  fattn::AppendOptions decode = rope;
  decode.block_table = step.scores.block_table;
  decode.cache_seqlens = fattn::Tensor(cache.lengths.data(), fattn::DType::kI32, {kBatch});
  std::vector<int32_t> used(kBatch);
  decode.seqused_k = step.scores.seqused_k = fattn::Tensor(used.data(), fattn::DType::kI32, {kBatch});
  decode.q = decode.q_out = step.q;  // in place

  double worst = 0;
  try {
    cache.make_room(0, kPrompt);
    fattn::append(fattn::Tensor(prompt_k.data(), fattn::DType::kF32, {1, kPrompt, kHeadsK, kHeaddim}),
                  fattn::Tensor(prompt_v.data(), fattn::DType::kF32, {1, kPrompt, kHeadsK, kHeaddim}), step.k, step.v, prefill);
    for (int64_t page = 0; page < kPrompt / kPage; ++page) cache.table[static_cast<size_t>(kColumns + page)] = cache.table[static_cast<size_t>(page)];
    cache.lengths = {kPrompt, kPrompt};

    const fattn::Plan plan(step, {});  // once; lengths and tables may change from call to call
    std::vector<unsigned char> workspace(plan.workspace_bytes() + 64);
    void* const aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    for (int64_t i = 0; i < kSteps; ++i) {
      for (int64_t sequence = 0; sequence < kBatch; ++sequence) cache.make_room(sequence, 1);
      fill(q.data(), kBatch * kHeads * kHeaddim);
      fill(new_k.data(), kBatch * kRow);
      fill(new_v.data(), kBatch * kRow);
      fattn::append(fattn::Tensor(new_k.data(), fattn::DType::kF32, {kBatch, 1, kHeadsK, kHeaddim}),
                    fattn::Tensor(new_v.data(), fattn::DType::kF32, {kBatch, 1, kHeadsK, kHeaddim}), step.k, step.v, decode);
      plan.execute(step, aligned, plan.workspace_bytes());
      std::copy(used.begin(), used.end(), cache.lengths.begin());

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
