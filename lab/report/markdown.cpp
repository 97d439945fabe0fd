// The same report as Markdown (GitHub's), with figures as files beside it.
#include <fmt/format.h>

#include <algorithm>

#include "lab/report/page.h"

namespace fattn::lab::report {
namespace {

// Everything that Markdown or the HTML in it could take for its own.
constexpr std::string_view kSpecial = "\\`*_{}[]<>()#+-!|~&$^=\"':@";
// Of these a sentence is full, and in its middle they mean nothing.
constexpr std::string_view kHarmlessInside = "()-+=:'\"#!@^";

std::string escaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += byte == '\n' || byte == '\t' ? " " : "?";
      continue;
    }
    const bool special = kSpecial.find(c) != std::string_view::npos && (i == 0 || kHarmlessInside.find(c) == std::string_view::npos);
    if (special) out += '\\';
    out += c;
  }
  // A scheme before "://" makes a link where Markdown finds links by itself.
  for (size_t at = 0; (at = out.find("://", at)) != std::string::npos; at += 4) out.replace(at, 1, "\\:");
  return out;
}

// The longest run of backticks in it, and one more.
std::string fence_for(std::string_view text, size_t least) {
  size_t longest = 0, run = 0;
  for (const char c : text) {
    run = c == '`' ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  return std::string(std::max(least, longest + 1), '`');
}

std::string code_span(std::string_view code, bool in_table) {
  std::string text;
  for (const char c : code) text += in_table && c == '|' ? "\\|" : std::string(1, c);
  const std::string fence = fence_for(text, 1);
  const std::string space = fence.size() > 1 ? " " : "";
  return fence + space + text + space + fence;
}

std::string inline_markdown(std::string_view text, bool in_table = false) {
  std::string out, piece;
  bool code = false;
  for (const char c : text) {
    if (c != kBold && c != kCode) {
      piece += c;
      continue;
    }
    out += code ? code_span(piece, in_table) : escaped(piece);
    piece.clear();
    if (c == kBold) out += "**";
    if (c == kCode) code = !code;
  }
  return out + (code ? code_span(piece, in_table) : escaped(piece));
}

std::string table_markdown(const PageTable& table) {
  std::string out = table.caption.empty() ? "" : "**" + inline_markdown(table.caption) + "**\n\n";
  const auto line = [&](const std::vector<std::string>& cells) {
    out += "|";
    for (size_t i = 0; i < table.heads.size(); ++i) out += " " + (i < cells.size() ? inline_markdown(cells[i], true) : "") + " |";
    out += "\n";
  };
  line(table.heads);
  out += "|";
  for (size_t i = 0; i < table.heads.size(); ++i) out += i < table.numeric.size() && table.numeric[i] ? "--:|" : ":--|";
  out += "\n";
  for (const std::vector<std::string>& row : table.rows) line(row);
  return out + "\n";
}

std::string block_markdown(const Block& block) {
  std::string out;
  switch (block.kind) {
    case Block::Kind::kText: return inline_markdown(block.text) + "\n\n";
    case Block::Kind::kBullets:
      for (const std::string& item : block.items) out += "- " + inline_markdown(item) + "\n";
      return out + "\n";
    case Block::Kind::kCards:
      for (const Card& card : block.cards)
        out += "- **" + inline_markdown(card.figure) + "** " + inline_markdown(card.what) + " (" + inline_markdown(card.detail) + ")\n";
      return out + "\n";
    case Block::Kind::kTable: return table_markdown(block.table);
    case Block::Kind::kFigure: return fmt::format("![{}](figures/{}.svg)\n\n", inline_markdown(clean(block.figure.caption)), block.figure.name);
    case Block::Kind::kCommands: {
      std::string text;
      for (const std::string& line : block.items) text += clean(line) + "\n";
      const std::string fence = fence_for(text, 3);
      return inline_markdown(block.text) + "\n\n" + fence + "sh\n" + text + fence + "\n\n";
    }
  }
  return out;
}

}  // namespace

std::string to_markdown(const Page& page) {
  std::string out = "# " + inline_markdown(page.title) + "\n\n" + inline_markdown(page.subtitle) + "\n\n";
  for (const Section& section : page.sections) {
    out += "## " + inline_markdown(section.title) + "\n\n";
    for (const Block& block : section.blocks) out += block_markdown(block);
  }
  while (out.size() > 1 && out[out.size() - 2] == '\n') out.pop_back();
  return out;
}

}  // namespace fattn::lab::report
