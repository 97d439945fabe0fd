// A report of records: one page of HTML, the same as Markdown, and its figures as SVG files.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lab/record_file.h"
#include "lab/report/words.h"

namespace fattn::lab::report {

struct Input {
  std::string file;  // as the page names it
  Json json;
};

struct Inputs {
  std::vector<Input> records;
  std::vector<std::string> not_read;  // files of a folder that are no records
};

// Of files, which must be records of a kind that reports know, and of folders, whose *.json that are none are left out. Throws RecordError.
Inputs read_inputs(const std::vector<std::string>& paths);

struct ReportFile {
  std::string path, content;  // below the report's folder
};

// index.html, report.md and figures/*.svg. The same records give the same bytes. Throws RecordError.
std::vector<ReportFile> make_report(const Inputs& inputs, Language language);

}  // namespace fattn::lab::report
