// Serialises once, then hands the bytes to stdout or to a file that appears whole.
#include "cli/json_output.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cli/streams.h"
#include "cli/whole_file.h"
#include "files/json_text.h"

namespace fattn::cli {

void write_json(const nlohmann::ordered_json& value, const std::string& file_or_dash) {
  const std::string text = files::json_text(value);
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
  if (file_or_dash.empty() || file_or_dash == "-") return;
  const WholeFile tried(file_or_dash);
  outlive_readers();
}

}  // namespace fattn::cli
