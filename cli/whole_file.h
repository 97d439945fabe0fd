// Files that are there whole or not at all, by the name that commands use.
#pragma once

#include "files/whole_file.h"

namespace fattn::cli {

using files::WholeFile;

}  // namespace fattn::cli
