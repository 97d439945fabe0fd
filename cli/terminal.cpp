// Asked anew each time, so that a window that was made wider counts.
#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace fattn::cli {
namespace {

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

size_t width_of(std::FILE* stream) {
  constexpr long kMost = 10000;
  if (const std::string_view columns = variable("COLUMNS"); !columns.empty()) {
    char* end = nullptr;
    const long given = std::strtol(columns.data(), &end, 10);
    if (*end == '\0' && given > 0) return std::max(kLeastWidth, static_cast<size_t>(std::min(given, kMost)));
  }
  winsize size{};
  if (is_terminal(stream) && ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return std::max<size_t>(kLeastWidth, size.ws_col);
  return kDefaultWidth;
}

size_t height_of(std::FILE* stream) {
  winsize size{};
  return ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_row > 1 ? size.ws_row : kDefaultHeight;
}

bool takes_escapes(std::FILE* stream) {
  const std::string_view term = variable("TERM");
  return is_terminal(stream) && !term.empty() && term != "dumb";
}

bool shows_colour(std::FILE* stream) { return takes_escapes(stream) && variable("NO_COLOR").empty(); }

}  // namespace fattn::cli
