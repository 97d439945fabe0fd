// Decoding for several sequences that begin with the same prompt: its keys are read once for the queries of all of them, what each has itself by a
// call of its own, and the results are merged. Queries and keys are turned by rotary embeddings. Checked against attention over all keys side by
// side.
#include <fattn/fattn.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 4, kHeads = 8, kHeadsK = 2, kHeaddim = 64, kPrompt = 100, kOwn = 30, kPositions = kPrompt + kOwn;
constexpr int64_t kRow = kHeadsK * kHeaddim;

using Numbers = std::vector<float>;

fattn::Tensor tensor(const Numbers& numbers, std::initializer_list<int64_t> shape) {
  return fattn::Tensor(numbers.data(), fattn::DType::kF32, shape);
}

// Angles of every position: position * 10000^(-2 d / headdim).
void fill_angles(Numbers& cos, Numbers& sin) {
  for (int64_t position = 0; position < kPositions; ++position)
    for (int64_t d = 0; d < kHeaddim / 2; ++d) {
      const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * static_cast<double>(d) / kHeaddim);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t n) {
    Numbers numbers(static_cast<size_t>(n));
    for (float& x : numbers) x = normal(generator);
    return numbers;
  };
  Numbers k_prompt = random(kPrompt * kRow), v_prompt = random(kPrompt * kRow), k_own = random(kBatch * kOwn * kRow),
          v_own = random(kBatch * kOwn * kRow);
  Numbers q = random(kBatch * kHeads * kHeaddim), o(q.size()), o_prompt(q.size()), lse(kBatch * kHeads), lse_prompt(lse), cos, sin;
  fill_angles(cos, sin);

  double worst = 0;
  try {
    const fattn::Tensor cosines = tensor(cos, {kPositions, kHeaddim / 2}), sines = tensor(sin, {kPositions, kHeaddim / 2});
    const auto turn = [&](const fattn::Tensor& x, int64_t position) {  // in place
      fattn::RotaryOptions options;
      options.offset = position;
      fattn::rotary(x, cosines, sines, x, options);
    };
    turn(tensor(k_prompt, {1, kPrompt, kHeadsK, kHeaddim}), 0);
    turn(tensor(k_own, {kBatch, kOwn, kHeadsK, kHeaddim}), kPrompt);
    turn(tensor(q, {kBatch, 1, kHeads, kHeaddim}), kPositions - 1);  // each sequence's last token

    // The queries of all sequences are as one sequence's to the prompt, which is before every one of them.
    fattn::ForwardTensors prompt;
    prompt.q = tensor(q, {1, kBatch, kHeads, kHeaddim});
    prompt.k = tensor(k_prompt, {1, kPrompt, kHeadsK, kHeaddim});
    prompt.v = tensor(v_prompt, {1, kPrompt, kHeadsK, kHeaddim});
    prompt.o = tensor(o_prompt, {1, kBatch, kHeads, kHeaddim});
    prompt.lse = tensor(lse_prompt, {1, kHeads, kBatch});
    fattn::forward(prompt);

    fattn::ForwardTensors own;
    own.q = tensor(q, {kBatch, 1, kHeads, kHeaddim});
    own.k = tensor(k_own, {kBatch, kOwn, kHeadsK, kHeaddim});
    own.v = tensor(v_own, {kBatch, kOwn, kHeadsK, kHeaddim});
    own.o = tensor(o, {kBatch, 1, kHeads, kHeaddim});
    own.lse = tensor(lse, {kBatch, kHeads, 1});
    fattn::forward(own);

    // (1, batch, ...) and (batch, 1, ...) are the same rows, as (1, nheads, batch) is a view of (batch, nheads, 1) by other strides.
    const fattn::Tensor of_own(lse.data(), fattn::DType::kF32, {1, kHeads, kBatch}, {0, 1, kHeads});
    const fattn::Tensor result = tensor(o, {1, kBatch, kHeads, kHeaddim});
    fattn::merge({{result, of_own, {}, {}}, {prompt.o, prompt.lse, {}, {}}}, result, of_own);  // in place of `own`

    for (int64_t b = 0; b < kBatch; ++b) {
      Numbers k = k_prompt, v = v_prompt, expected(kHeads * kHeaddim);
      k.insert(k.end(), k_own.begin() + b * kOwn * kRow, k_own.begin() + (b + 1) * kOwn * kRow);
      v.insert(v.end(), v_own.begin() + b * kOwn * kRow, v_own.begin() + (b + 1) * kOwn * kRow);
      fattn::ForwardTensors all;
      all.q = fattn::Tensor(q.data() + b * kHeads * kHeaddim, fattn::DType::kF32, {1, 1, kHeads, kHeaddim});
      all.k = tensor(k, {1, kPositions, kHeadsK, kHeaddim});
      all.v = tensor(v, {1, kPositions, kHeadsK, kHeaddim});
      all.o = tensor(expected, {1, 1, kHeads, kHeaddim});
      fattn::forward(all);
      for (size_t d = 0; d < expected.size(); ++d) {
        const double error = std::fabs(static_cast<double>(o[static_cast<size_t>(b) * expected.size() + d]) - static_cast<double>(expected[d]));
        if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
      }
    }
  } catch (const fattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%d sequences, a prompt of %d keys, largest difference %.1e\n", static_cast<int>(kBatch), static_cast<int>(kPrompt), worst);
  return worst <= 1e-5 ? 0 : 1;
}
