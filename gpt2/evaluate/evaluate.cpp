// Tokens of a window depend on each other, so the interval is that of a ratio of sums over windows.
#include "gpt2/evaluate/evaluate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

constexpr int64_t kFewestWindows = 8;

struct Sums {
  std::vector<double> losses;  // of each window, or token
  std::vector<double> counts;
};

}  // namespace

double scatter_of(const std::vector<double>& sums, const std::vector<double>& counts, double mean) {
  const auto n = static_cast<double>(sums.size());
  if (n < 2) return std::numeric_limits<double>::quiet_NaN();
  double squares = 0, total = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    const double off = sums[i] - counts[i] * mean;
    squares += off * off;
    total += counts[i];
  }
  return std::sqrt(squares * n / (n - 1)) / total;
}

double Evaluation::perplexity() const { return std::exp(loss); }

std::vector<Window> windows_of(int64_t tokens, int64_t context, int64_t stride) {
  if (tokens < 2) throw Error("a text of " + std::to_string(tokens) + " tokens; at least 2 are needed: the first has no loss");
  if (stride < 1 || stride > context)
    throw Error("a stride of " + std::to_string(stride) + "; allowed: 1 to the context of " + std::to_string(context));
  std::vector<Window> windows;
  int64_t counted = 0;  // targets are tokens 1 and on
  for (int64_t begin = 0; counted < tokens - 1; begin += stride) {
    const int64_t inputs = std::min(context, tokens - 1 - begin);
    windows.push_back({begin, inputs, begin + inputs - counted});
    counted = begin + inputs;
  }
  return windows;
}

Evaluation evaluate(Session& session, const std::vector<Token>& tokens, const std::vector<Window>& windows,
                    const std::function<void(const Evaluation&)>& done) {
  Evaluation result;
  Sums by_window, by_token;
  double sum = 0;
  const int64_t batch = session.options().batch;
  std::vector<int32_t> targets;
  std::vector<float> losses;
  for (size_t first = 0; first < windows.size(); first += static_cast<size_t>(batch)) {
    const size_t end = std::min(windows.size(), first + static_cast<size_t>(batch));
    std::vector<NewTokens> parts;
    targets.clear();
    for (size_t i = first; i < end; ++i) {
      const Window& w = windows[i];
      const auto sequence = static_cast<int64_t>(i - first);
      session.truncate(sequence, 0);
      parts.push_back({sequence, std::span(tokens).subspan(static_cast<size_t>(w.begin), static_cast<size_t>(w.inputs)), WantLogits::kNone});
      for (int64_t t = 0; t < w.inputs; ++t) targets.push_back(t < w.inputs - w.counted ? -1 : tokens[static_cast<size_t>(w.begin + t + 1)]);
    }
    session.step(parts);
    losses.resize(targets.size());
    session.losses(targets, losses.data());
    size_t row = 0;
    for (size_t i = first; i < end; ++i) {
      double of_window = 0;
      for (int64_t t = 0; t < windows[i].inputs; ++t, ++row) {
        if (targets[row] < 0) continue;
        const auto loss = static_cast<double>(losses[row]);
        of_window += loss;
        if (static_cast<int64_t>(windows.size()) < kFewestWindows) {
          by_token.losses.push_back(loss);
          by_token.counts.push_back(1);
        }
      }
      by_window.losses.push_back(of_window);
      by_window.counts.push_back(static_cast<double>(windows[i].counted));
      sum += of_window;
      result.tokens += windows[i].counted;
      ++result.windows;
    }
    result.loss = sum / static_cast<double>(result.tokens);
    result.of_windows = static_cast<int64_t>(windows.size()) >= kFewestWindows;
    const Sums& by = result.of_windows ? by_window : by_token;
    const double deviation = scatter_of(by.losses, by.counts, result.loss);
    result.loss_low = result.loss - kNormal95 * deviation;
    result.loss_high = result.loss + kNormal95 * deviation;
    if (done) done(result);
  }
  return result;
}

}  // namespace fattn::gpt2
