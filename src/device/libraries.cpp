#include "device/libraries.h"

namespace fattn::core {
std::vector<LibraryStatus> library_status() { return {}; }
const OpenBlas& openblas() {
  static const OpenBlas blas;
  return blas;
}
}  // namespace fattn::core
