// Libraries that are opened at run time if present, with the reason if not: those of devices.
#pragma once

#include <string>
#include <vector>

namespace fattn::core {

struct LibraryStatus {
  std::string name, purpose, path, reason;  // reason is empty if the library is loaded
};

std::vector<LibraryStatus> library_status();

}  // namespace fattn::core
