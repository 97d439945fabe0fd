// Runs a measuring command of this program in a process of its own, for its record.
#pragma once

#include <string>
#include <vector>

namespace fattn::cli {

// `fattn ARGUMENTS --json FILE`, whose tables are dropped and whose progress and errors are seen. Returns its exit code, which may be one of a check
// that failed; the record is there then. Ends this program if a signal ended that one.
int measure_again(const std::vector<std::string>& arguments, const std::string& file);

// An empty file that is removed when the program ends, however it does.
std::string temporary_record();

}  // namespace fattn::cli
