// `fattn lab`: FlashAttention in five steps, each computed on this machine, shown, and closed by a question.
#pragma once

#include "cli/parser.h"

namespace fattn::cli {

// Registers the command; when it runs, it sets exit_code or throws.
void add_lab(CLI::App& app, int& exit_code);

}  // namespace fattn::cli
