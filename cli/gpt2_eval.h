// What the tasks of `fattn gpt2 eval` share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/gpt2_model.h"
#include "cli/output.h"

namespace fattn::cli {

struct EvalFlags {
  Gpt2ModelFlags model;
  std::string task = "lm", file, tokenizer, json, logits;
  int64_t context = 0, stride = 0, batch = 1, most = 0, limit = 0, max_new_tokens = 0;
  bool ids = false;
  std::vector<std::string> stops;
  OutputFlags output;
};

// Of "qa", "summarise", "dialogue", "code".
int gpt2_eval_task(const EvalFlags& flags);

}  // namespace fattn::cli
