// The only file that a new commit compiles again.
#include "measure/commit.h"

#include <source_commit.h>  // made by cmake/write_commit.cmake

namespace fattn::measure {

std::string source_commit() { return FATTN_COMMIT; }

}  // namespace fattn::measure
