// A stream that is no terminal gets kDefaultWidth columns and loses nothing: what does not fit follows below.
#include "cli/output.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "cli/streams.h"
#include "cli/table_formats.h"
#include "cli/table_lines.h"
#include "cli/terminal.h"
#include "cli/values.h"
#include "cli/words.h"

namespace fattn::cli {

void OutputFlags::add_to(CLI::App& command) {
  command.option_defaults()->group("Output");
  command.add_flag("--wide", wide, "Tables with all of their columns, however long the lines are");
  command.add_option("--format", format, "How tables are written: for people, as Markdown, or as CSV with all digits (words go to stderr then)")
      ->transform(one_of({"table", "markdown", "csv"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.option_defaults()->group("Options");
}

Output::Output(const OutputFlags& flags, const std::string& json_target) : tables_(json_target == "-" ? stderr : stdout), wide_(flags.wide) {
  if (flags.format == "markdown") format_ = Format::kMarkdown;
  if (flags.format == "csv") format_ = Format::kCsv;
  words_ = for_programs() ? stderr : tables_;
}

void Output::say(const std::string& text, size_t hanging) const { put(words_, laid_out(text, width_of(words_), hanging)); }

void Output::say_line(const std::string& text, size_t hanging) const {
  if (is_terminal(words_)) return say(text, hanging);
  put(words_, text + "\n");
}

void Output::print(const Table& table) {
  std::string text;
  if (format_ == Format::kCsv) {
    const std::string headings = csv_headings(table);
    if (headings != headings_) text = (printed_ ? "\r\n" : "") + headings;
    headings_ = headings;
    text += csv_rows(table);
  } else if (format_ == Format::kMarkdown) {
    text = (printed_ ? "\n" : "") + as_markdown(table);
  } else {
    const size_t width = width_of(tables_);
    const bool colour = shows_colour(tables_);
    if (!table.title().empty()) text = "\n" + laid_out(colour ? painted(table.title(), Mood::kTitle) : table.title(), width);
    text += as_lines(table, {wide_ ? 0 : width, !is_terminal(tables_), colour});
  }
  printed_ = true;
  put(tables_, text);
}

std::string Output::in(Mood mood, const std::string& text) const { return shows_colour(words_) ? painted(text, mood) : text; }

void print_error(const std::string& text) {
  const std::string line = "fattn: " + text;
  put(stderr, is_terminal(stderr) ? laid_out(line, width_of(stderr), 2) : line + "\n");
}

}  // namespace fattn::cli
