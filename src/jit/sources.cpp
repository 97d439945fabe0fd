#include "jit/sources.h"

#include <algorithm>
#include <string>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

std::string_view without_blanks(std::string_view line) {
  const size_t begin = line.find_first_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view() : line.substr(begin);
}

// The path of an #include line, empty for every other line. Lines that a preprocessor would skip count too: that costs a
// rebuild at worst. One that this does not see (behind a comment, by a macro) finds no header when it is compiled.
std::string_view included(std::string_view line, std::string_view from) {
  line = without_blanks(line);
  if (line.empty() || line[0] != '#') return {};
  line = without_blanks(line.substr(1));
  if (line.substr(0, 7) != "include") return {};
  line = without_blanks(line.substr(7));
  const size_t end = line.size() < 2 ? std::string_view::npos : line.find('"', 1);
  if (line.empty() || line[0] != '"' || end == std::string_view::npos)
    throw Error(ErrorCode::kCompile, text("device code includes ", line.substr(0, 100), " in ", from,
                                          "; allowed: #include \"kernels/...\" or \"shared/...\" of a header that is embedded in the library"));
  return line.substr(1, end - 1);
}

}  // namespace

std::vector<Source> reachable(std::string_view text_of_unit, Sources sources) {
  std::vector<Source> found;
  size_t bytes = 0;
  const auto visit = [&](std::string_view content, std::string_view from) {
    while (!content.empty()) {
      const size_t end = std::min(content.find('\n'), content.size());
      const std::string_view path = included(content.substr(0, end), from);
      content.remove_prefix(std::min(end + 1, content.size()));
      if (path.empty()) continue;
      if (std::any_of(found.begin(), found.end(), [&](const Source& s) { return s.path == path; })) continue;
      const auto source = std::find_if(sources.begin(), sources.end(), [&](const Source& s) { return s.path == path; });
      if (source == sources.end())
        throw Error(ErrorCode::kCompile, text("device code includes \"", path.substr(0, 100), "\" in ", from,
                                              ", which is not embedded in the library; the path counts from the root of the project (kernels/...) "
                                              "or from src (shared/...)"));
      bytes += source->text.size();
      if (bytes > kMaxHeaderBytes)
        throw Error(ErrorCode::kCompile, text("device code includes more than ", kMaxHeaderBytes, " bytes of headers; include less"));
      found.push_back(*source);
    }
  };
  visit(text_of_unit, "the kernel's source");
  for (size_t i = 0; i < found.size(); ++i) visit(found[i].text, found[i].path);
  std::sort(found.begin(), found.end(), [](const Source& a, const Source& b) { return a.path < b.path; });
  return found;
}

}  // namespace fattn::core::jit
