// What is written to stdout and stderr, whatever is behind them: a full disk, a reader that has left, nothing at all.
#pragma once

#include <cstdio>
#include <string_view>

namespace fattn::cli {

// Opens /dev/null in place of each of stdin, stdout and stderr that is closed, so that no file gets its number. Reading or writing it still fails.
void hold_standard_streams();

// Writes and flushes. Text that does not reach stderr is lost in silence. If it does not reach stdout, std::runtime_error is thrown; behind
// outlive_readers() it is said when the program ends, after its files are written.
void put(std::FILE* stream, std::string_view text);

// From here on neither a reader of stdout that leaves (`| head -1`) nor a full disk behind it ends the program: a record or a checkpoint is to be
// written.
void outlive_readers();

// At the end: whether all text reached stdout. If not, an error is printed; where a reader has left, SIGPIPE ends the program as it always does, but
// for one that was started with SIGPIPE ignored.
bool all_was_written();

}  // namespace fattn::cli
