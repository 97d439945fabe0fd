// Ctrl-C and friends, by the names that commands use.
#pragma once

#include "files/interrupt.h"

namespace fattn::cli {

using files::end_program;
using files::handled_signals;
using files::install_interrupt_handlers;
using files::SignalsBlocked;
using files::TemporaryFile;

}  // namespace fattn::cli
