// Where a command's words and tables go, and in what form: --wide and --format, the width of the terminal, colours.
#pragma once

#include <cstdio>
#include <string>

#include "cli/parser.h"
#include "cli/table.h"

namespace fattn::cli {

struct OutputFlags {
  bool wide = false;
  std::string format = "table";

  void add_to(CLI::App& command);
};

class Output {
 public:
  // Tables go to stdout, with --json - to stderr. So do words, but where tables are for programs: these words go to stderr.
  explicit Output(const OutputFlags& flags, const std::string& json_target = "");

  // Lines of words, each wrapped with its own indent; what a line continues on has `hanging` columns more.
  void say(const std::string& text, size_t hanging = 0) const;
  // The same for lines that others count or search: where there is no terminal each stays one.
  void say_line(const std::string& text, size_t hanging = 0) const;
  // A table with its title above it, and an empty line before it if it has one.
  void print(const Table& table);
  // In its colour, where what say() prints has colours.
  std::string in(Mood mood, const std::string& text) const;

  std::FILE* words() const { return words_; }
  bool for_programs() const { return format_ != Format::kLines; }

 private:
  enum class Format { kLines, kMarkdown, kCsv };

  std::FILE *tables_, *words_;
  Format format_ = Format::kLines;
  bool wide_;
  std::string headings_;  // of the CSV so far
  bool printed_ = false;
};

// "fattn: TEXT" on stderr, wrapped where that is a terminal.
void print_error(const std::string& text);

}  // namespace fattn::cli
