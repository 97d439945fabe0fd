// A line of JSON as a document: what is read, and which parts of it something learns to foretell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gpt2/data/texts.h"

namespace fattn::gpt2 {

// A line of a part that holds lines; empty ones are none.
struct LineOfPart {
  uint64_t number = 0;  // in its file, from 1
  std::string_view text;
};
std::vector<LineOfPart> lines_of(const TextPart& part);

struct RecordPart {
  std::string text;
  bool targets = true;
};

// kLines: {"text"}. kDialogue: {"messages": [{"role", "content"}]} or {"conversations": [{"from", "value"}]}, as "Role: content" with an empty line
// between two of them. kCompletion: {"prompt", "completion"}, of which the prompt is no target. Throws Error: what the line has instead.
std::vector<RecordPart> parse_record(std::string_view line, TextFormat format);

}  // namespace fattn::gpt2
