// Advice as settings that are pasted into a program.
#pragma once

#include <string>
#include <vector>

#include "lab/advise/advice.h"

namespace fattn::lab {

struct Settings {
  std::string where;  // "PyTorch", "transformers", "C++"
  std::string text;   // lines of code
};
std::vector<Settings> settings_of(const Advice& advice);

}  // namespace fattn::lab
