#include "shared/env.h"

#include <cstdlib>

namespace fattn::core {

std::string env_value(const EnvVar& variable) {
  const char* value = std::getenv(variable.name);
  return value ? value : "";
}

}  // namespace fattn::core
