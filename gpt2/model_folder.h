// What is given as a model's folder, and is none.
#pragma once

#include <string>

namespace fattn::gpt2 {

// Throws Error where it is not there, has no config.json, or is a training run, whose checkpoints are models.
void require_model_folder(const std::string& folder);

}  // namespace fattn::gpt2
