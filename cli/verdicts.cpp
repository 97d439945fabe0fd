// An error that is no number (something non-finite is wrong) is "inf" in text and null in JSON, as JSON has no infinity.
#include "cli/verdicts.h"

#include <fmt/format.h>

#include "cli/sanitize.h"

namespace fattn::cli {

std::string as_text(const testing::TensorVerdict& verdict) {
  return fmt::format("{:<5} error {:<8.2e} allowed {:<8.2e} {}", verdict.tensor, verdict.error, verdict.allowed,
                     verdict.pass ? "ok" : "FAILED: " + printable(verdict.message));
}

nlohmann::ordered_json as_json(const std::vector<testing::TensorVerdict>& verdicts) {
  auto all = nlohmann::ordered_json::array();
  for (const testing::TensorVerdict& verdict : verdicts) {
    nlohmann::ordered_json one = {{"tensor", verdict.tensor}, {"error", verdict.error}, {"allowed", verdict.allowed}, {"pass", verdict.pass}};
    if (!verdict.pass) {
      one["first_bad"] = verdict.first_bad;
      one["message"] = printable(verdict.message);
    }
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace fattn::cli
