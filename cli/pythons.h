// Which Python runs what is Python where none is named.
#pragma once

#include <string>
#include <vector>

namespace fattn::cli {

// Those to try, in this order: the one beside this program (a virtual environment's, or that of the installation that the package is in), then
// python3 and python of PATH. One that is there under two names is tried once.
std::vector<std::string> usual_pythons();

// The same for a program at `program`, by the folders of `path` ("/a:/b").
std::vector<std::string> usual_pythons(const std::string& program, const std::string& path);

}  // namespace fattn::cli
