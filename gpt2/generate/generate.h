// Text that goes on: prompts of any lengths, as many at once as a session has sequences.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gpt2/model/session.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::gpt2 {

struct GenerateOptions {
  int64_t max_new_tokens = 100;
  double temperature = 0;  // 0: the most likely token
  int64_t top_k = 0;       // 0: all
  double top_p = 1;
  double repetition_penalty = 1;
  uint64_t seed = 0;
  std::vector<std::string> stops = {};  // text ends before the first of them; with a tokenizer only
  std::optional<Token> end_token = {};  // ends a text, and is not in it
};

struct Generated {
  std::vector<Token> tokens;  // behind the prompt
  std::string text;           // with a tokenizer
  const char* ended = "";     // "length", "context", "stop string", "end of text"
};

struct GenerateTimes {
  double prefill_seconds = 0, decode_seconds = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;  // of decode: those that steps of one token gave
};

struct GenerateCalls {
  std::function<void(size_t request, std::string_view text)> text = {};           // as it comes
  std::function<void(size_t request, const Generated& generated)> finished = {};  // in any order
};

// What comes behind each prompt. The same for the same model, seed and place in the list; which requests share a step changes products by no bit, and
// attention by its last bits unless the session is batch-invariant. `tokenizer` may be null: there is no text then. Throws Error.
std::vector<Generated> generate(const Model& model, Session& session, const Tokenizer* tokenizer, const std::vector<std::vector<Token>>& prompts,
                                const GenerateOptions& options, const GenerateCalls& calls = {}, GenerateTimes* times = nullptr);

// Error if the tokenizer has tokens that the model has no row for.
void check_fits(const Tokenizer& tokenizer, const Config& config);

}  // namespace fattn::gpt2
