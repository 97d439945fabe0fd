// What a model is judged by beside one text: prompts with right answers, and documents of dialogues or code.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gpt2/evaluate/evaluate.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::gpt2 {

struct Example {
  std::string prompt;
  std::vector<std::string> answers;  // each of which is right
};
// Lines {"prompt", "completion"} of a file or folder, and beside them "answers", a list of what else is right. At most `limit`; 0: all. Throws Error
// with the file and line of one that is no such object.
std::vector<Example> read_examples(const std::string& path, int64_t limit);

enum class Documents { kDialogue, kCode };
// The tokens of each document, and behind them `end` where there is one; documents of a single token have no loss and are left out.
std::vector<std::vector<Token>> read_documents(const std::string& path, Documents kind, const Tokenizer& tokenizer, std::optional<Token> end,
                                               int64_t limit);

// A mean, and where it lies with 95 %, from the scatter of what it is a mean of; NaN: there is one alone.
struct Mean {
  double value = 0, low = 0, high = 0;
};
Mean mean_of(const std::vector<double>& values);

struct DocumentLoss {
  int64_t documents = 0, tokens = 0;
  Mean loss;  // of a token; the scatter is that of documents
};
// The session was made with `hidden`, and has room for a window in a step. done() after each document.
DocumentLoss evaluate_documents(Session& session, const std::vector<std::vector<Token>>& documents, int64_t context, int64_t stride,
                                const std::function<void(const DocumentLoss&)>& done = {});

}  // namespace fattn::gpt2
