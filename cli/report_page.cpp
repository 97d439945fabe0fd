// All files are written beside their places first, then each takes its place.
#include "cli/report_page.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/whole_file.h"
#include "lab/report/report.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;

struct ReportFlags {
  std::vector<std::string> from;
  std::string out, language = "en", json;
};

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error || !fs::is_directory(path, error))
    throw std::runtime_error("the folder '" + printable(path) + "' cannot be made: " + (error ? error.message() : "something else has its name"));
}

int run_report(const ReportFlags& flags) {
  using namespace lab::report;
  require_writable(flags.json);
  if (flags.out.empty()) throw CLI::ValidationError("--out", "is empty; give the folder for the report");
  std::vector<ReportFile> files;
  Inputs inputs;
  try {
    inputs = read_inputs(flags.from);
    files = make_report(inputs, flags.language == "en" ? Language::kEnglish : Language::kChinese);
  } catch (const lab::RecordError& error) {
    throw std::runtime_error(printable(error.what(), 600));
  }
  make_folder(flags.out);
  make_folder(flags.out + "/figures");
  std::list<WholeFile> whole;
  size_t bytes = 0;
  nlohmann::ordered_json written = nlohmann::ordered_json::array();
  for (const ReportFile& file : files) {
    whole.emplace_back(flags.out + "/" + file.path).write(file.content.data(), file.content.size());
    written.push_back({{"path", file.path}, {"bytes", file.content.size()}});
    if (file.path == "index.html") bytes = file.content.size();
  }
  for (WholeFile& file : whole) file.publish();
  OutputFlags plain;
  const Output out(plain, flags.json);
  out.say(fmt::format("{}/index.html ({:.0f} KiB), report.md and {} figure{} of {} record{}", printable(flags.out, 200),
                      static_cast<double>(bytes) / 1024, files.size() - 2, files.size() == 3 ? "" : "s", inputs.records.size(),
                      inputs.records.size() == 1 ? "" : "s"),
          2);
  if (!inputs.not_read.empty())
    out.say(fmt::format("{} files of the folder are no records that reports know; the page names them", inputs.not_read.size()));
  if (!flags.json.empty()) {
    nlohmann::ordered_json records = nlohmann::ordered_json::array();
    for (const Input& input : inputs.records) records.push_back(input.file);
    write_json({{"fattn_report", 1},
                {"out", flags.out},
                {"language", flags.language},
                {"records", records},
                {"not_read", inputs.not_read},
                {"files", written}},
               flags.json);
  }
  return kExitFine;
}

}  // namespace

void add_report(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("report", "Make a page of records: conclusions, figures, tables, how to repeat them");
  auto flags = std::make_shared<ReportFlags>();
  command
      ->add_option("--from", flags->from,
                   "Records that --json FILE wrote (bench, compare, suites, regress, check --accuracy, check --values), or folders of them; several, "
                   "or repeated")
      ->required()
      ->expected(1, -1)
      ->type_name("FILE|DIR");
  command->add_option("--out", flags->out, "The folder for index.html, report.md and figures/; made where it is not there")
      ->required()
      ->type_name("DIR");
  command->add_option("--lang", flags->language, "The language of the page")
      ->transform(one_of({"en", "zh-TW"}, {{"english", "en"}, {"zh", "zh-TW"}, {"chinese", "zh-TW"}}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--json", flags->json, "Write what was made as JSON (docs/RECORD.md); -: to stdout")->type_name("FILE");
  command->footer(
      "index.html is one file: figures are in it, it loads nothing, follows the light or dark scheme, and can be read on a phone. report.md says the "
      "same, with figures/*.svg "
      "beside it. Every sentence is made from numbers of the records; what they do not hold is not said, and rows without a time are listed with the "
      "reason. The same "
      "records give the same bytes.\n"
      "A file that is no record is refused, and nothing is written; in a folder such files are left out, and the page names them.\n\n"
      "Examples:\n"
      "  fattn compare --preset gpt2-small --json race.json\n"
      "  fattn report --from race.json --out report\n"
      "  fattn report --from docs/results --out report-zh --lang zh-TW");
  command->callback([flags, &exit_code] { exit_code = run_report(*flags); });
}

}  // namespace fattn::cli
