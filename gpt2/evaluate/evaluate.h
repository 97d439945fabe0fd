// How well a model foretells a text: the mean loss of its tokens, and how sure that is.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "gpt2/model/session.h"

namespace fattn::gpt2 {

// A piece of the text that the model sees at once; its last `counted` targets count.
struct Window {
  int64_t begin = 0, inputs = 0, counted = 0;
};
// With `stride` = context: blocks side by side. Less: each window overlaps the one before it, so that every token but the first ones has at least
// context - stride behind it. A token is foretold once. Throws Error for fewer than two tokens, or a stride that is none.
std::vector<Window> windows_of(int64_t tokens, int64_t context, int64_t stride);

struct Evaluation {
  int64_t tokens = 0, windows = 0;     // that have a loss; that were computed
  double loss = 0;                     // mean, natural
  double loss_low = 0, loss_high = 0;  // 95 %, from the scatter of windows (of tokens, where there are fewer than 8 windows); NaN: one token
  bool of_windows = false;
  double perplexity() const;
};

// The standard deviation of a mean that is a ratio: of sums over parts of a text, and how many numbers each has. NaN: there is one part alone.
double scatter_of(const std::vector<double>& sums, const std::vector<double>& counts, double mean);
inline constexpr double kNormal95 = 1.959964;

// The session was made with `hidden`, and has room for a window in a step. done(windows) after each step.
Evaluation evaluate(Session& session, const std::vector<Token>& tokens, const std::vector<Window>& windows,
                    const std::function<void(const Evaluation&)>& done = {});

}  // namespace fattn::gpt2
