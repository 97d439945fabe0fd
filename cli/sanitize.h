// Text from outside made safe to print, by the name that commands use.
#pragma once

#include "files/printable.h"

namespace fattn::cli {

using files::kPrintableBytes;
using files::printable;

}  // namespace fattn::cli
