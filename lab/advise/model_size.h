// Models that advice is given for: the four of GPT-2, and others of their kind with any number of parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fattn::lab {

struct ModelSize {
  std::string name;  // "small", or "params=7000000000"
  int64_t layers = 12, width = 768, nheads = 12, vocabulary = 50257, positions = 1024;
  int64_t given_parameters = 0;  // of params=...: what was asked for, which counts; the shape is the nearest to it

  int64_t headdim() const { return width / nheads; }
  // GPT-2's: token and position embeddings, of each layer 12 width^2 + 13 width, a last layer norm; the head shares the token embedding.
  int64_t shape_parameters() const;
  // With as many positions as the sequence needs: GPT-2 has 1024, a longer table costs parameters.
  int64_t parameters(int64_t seqlen) const;
  // Those that multiply every token: all but the embeddings, and the head.
  int64_t multiplied_parameters() const { return layers * 12 * width * width + vocabulary * width; }
};

// small, medium, large, xl.
const std::vector<ModelSize>& gpt2_models();
// One of these, or params=N with N like 7e9, 7B, 350M; nothing, and `why`, for others.
std::optional<ModelSize> model_of(const std::string& text, std::string& why);
// The shape that comes near to a number of parameters: layers and width in the proportion of models that are made.
ModelSize model_with(int64_t parameters);

}  // namespace fattn::lab
