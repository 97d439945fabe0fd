// Markdown and CSV.
#include "cli/table_formats.h"

#include <algorithm>
#include <vector>

namespace fattn::cli {
namespace {

bool has_notes(const Table& table) {
  return std::any_of(table.rows().begin(), table.rows().end(), [](const Table::Row& row) { return !row.notes.empty(); });
}

std::string notes_of(const Table::Row& row) {
  std::string text;
  for (const std::string& note : row.notes) text += (text.empty() ? "" : "; ") + note;
  return text;
}

std::string for_markdown(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|' || c == '\\') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

std::string for_csv(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

std::string csv_line(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) line += (i > 0 ? "," : "") + for_csv(cells[i]);
  return line + "\r\n";
}

}  // namespace

std::string as_markdown(const Table& table) {
  const bool notes = has_notes(table);
  std::string names = "|", alignment = "|", text;
  for (const Column& column : table.columns()) {
    names += " " + for_markdown(column.name) + " |";
    alignment += column.left ? ":--|" : "--:|";
  }
  if (notes) names += " note |", alignment += ":--|";
  for (const Table::Row& row : table.rows()) {
    text += "|";
    for (const Cell& cell : row.cells) text += " " + for_markdown(cell.text) + " |";
    if (notes) text += " " + for_markdown(notes_of(row)) + " |";
    text += "\n";
  }
  return (table.title().empty() ? "" : "**" + table.title() + "**\n\n") + names + "\n" + alignment + "\n" + text;
}

// A column of notes is always there: whether a row has one, is known too late.
std::string csv_headings(const Table& table) {
  std::vector<std::string> names;
  if (!table.title().empty()) names.emplace_back("table");
  for (const Column& column : table.columns()) names.push_back(column.name + (column.unit.empty() ? "" : " (" + column.unit + ")"));
  names.emplace_back("note");
  return csv_line(names);
}

std::string csv_rows(const Table& table) {
  std::string text;
  for (const Table::Row& row : table.rows()) {
    std::vector<std::string> cells;
    if (!table.title().empty()) cells.push_back(table.title());
    for (const Cell& cell : row.cells) cells.push_back(cell.exact.empty() ? cell.text : cell.exact);
    cells.push_back(notes_of(row));
    text += csv_line(cells);
  }
  return text;
}

}  // namespace fattn::cli
