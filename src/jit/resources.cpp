// Numbers out of the text that ptxas -v prints.
#include <algorithm>
#include <charconv>
#include <string_view>

#include "jit/jit.h"

namespace fattn::core::jit {
namespace {

// The number right before ` unit` ("78" of "Used 78 registers"), -1 if there is none.
int before(std::string_view line, std::string_view unit) {
  const size_t at = line.find(unit);
  if (at == std::string_view::npos) return -1;
  size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = -1;
  return std::from_chars(line.data() + begin, line.data() + at, value).ec == std::errc() ? value : -1;
}

}  // namespace

Resources parse_resources(const std::string& log) {
  Resources r;
  const auto raise = [](int& held, int seen) { held = std::max(held, seen); };
  for (std::string_view rest = log; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    raise(r.stack_bytes, before(line, " bytes stack frame"));
    raise(r.spill_store_bytes, before(line, " bytes spill stores"));
    raise(r.spill_load_bytes, before(line, " bytes spill loads"));
    // "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", "(C7507) ... setmaxnreg ignored ...".
    // C7519 says that ptxas added a fence of its own, which costs nothing.
    if (line.find("(C75") != std::string_view::npos && line.find("(C7519)") == std::string_view::npos) r.degraded = true;
    if (line.find("wgmma") != std::string_view::npos && line.find("serialized") != std::string_view::npos) r.degraded = true;
    if (line.find("Used ") == std::string_view::npos) continue;
    const int registers = before(line, " registers");
    if (registers >= 0) r.known = true;
    raise(r.registers, registers);
    raise(r.stack_bytes, before(line, " bytes cumulative stack size"));
    raise(r.shared_bytes, before(line, " bytes smem"));
    raise(r.barriers, before(line, " barriers"));
  }
  return r;
}

}  // namespace fattn::core::jit
