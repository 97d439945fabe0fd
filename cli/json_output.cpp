// Serialises once, then hands the bytes to stdout or to a file that appears whole.
#include "cli/json_output.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cli/whole_file.h"

namespace fattn::cli {

void write_json(const nlohmann::ordered_json& value, const std::string& file_or_dash) {
  // Text that is no UTF-8 is replaced, never an exception: the record matters more than one odd byte.
  const std::string text = value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (file_or_dash == "-") {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
      throw std::runtime_error(std::string("cannot write the JSON to stdout: ") + std::strerror(errno));
    return;
  }
  WholeFile file(file_or_dash);
  file.write(text.data(), text.size());
  file.publish();
}

void require_writable(const std::string& file_or_dash) {
  if (!file_or_dash.empty() && file_or_dash != "-") const WholeFile tried(file_or_dash);
}

}  // namespace fattn::cli
