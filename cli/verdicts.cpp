// An error that is no number (something non-finite is wrong) is "inf" in text and null in JSON, as JSON has no infinity.
#include "cli/verdicts.h"

#include <fmt/format.h>

#include "cli/sanitize.h"
#include "files/json.h"

namespace fattn::cli {

std::string as_text(const testing::TensorVerdict& verdict) {
  const std::string rms =
      verdict.rms_peer > 0 ? fmt::format("rms {:<8.2e} of FlashAttention-2's {:<8.2e} ", verdict.rms, verdict.rms_peer) : std::string();
  return fmt::format("{:<5} error {:<8.2e} allowed {:<8.2e} {}{}", verdict.tensor, verdict.error, verdict.allowed, rms,
                     verdict.pass ? "ok" : "FAILED: " + printable(verdict.message));
}

Table verdict_table(const std::string& title, const std::vector<testing::TensorVerdict>& verdicts) {
  Table table({Column::text("tensor").as_key(), Column::number("error"), Column::number("allowed"), Column::number("RMS error").if_any(),
               Column::number("FlashAttention-2's").if_any(), Column::text("verdict")},
              title);
  for (const testing::TensorVerdict& verdict : verdicts) {
    const bool second = verdict.rms_peer > 0;
    table.add({verdict.tensor, short_cell(verdict.error), short_cell(verdict.allowed), second ? short_cell(verdict.rms) : "",
               second ? short_cell(verdict.rms_peer) : "", verdict.pass ? Cell("ok").in(Mood::kGood) : Cell("FAILED").in(Mood::kBad)});
    if (!verdict.pass) table.note(printable(verdict.message));
  }
  return table;
}

nlohmann::ordered_json as_json(const std::vector<testing::TensorVerdict>& verdicts) {
  auto all = nlohmann::ordered_json::array();
  for (const testing::TensorVerdict& verdict : verdicts) {
    nlohmann::ordered_json one = {{"tensor", verdict.tensor}, {"error", verdict.error}, {"allowed", verdict.allowed}, {"pass", verdict.pass}};
    const bool second = verdict.rms_peer > 0;
    one["rms_error"] = second ? files::number_or_null(verdict.rms) : nullptr;
    one["rms_peer"] = second ? files::number_or_null(verdict.rms_peer) : nullptr;
    one["rms_allowed"] = second ? files::number_or_null(verdict.rms_allowed) : nullptr;
    if (!verdict.pass) {
      one["first_bad"] = verdict.first_bad;
      one["message"] = printable(verdict.message);
    }
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace fattn::cli
