// Which sources this program was built from.
#pragma once

#include <string>

namespace fattn::measure {

// The commit of the git clone, with "+dirty" behind it where files differed from it; empty if it was none. Of the last build.
std::string source_commit();

}  // namespace fattn::measure
