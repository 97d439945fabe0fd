// Texts to learn from: which files there are, and their documents, part by part.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fattn::gpt2 {

// What a file holds. kLines: objects with a "text", one a line.
enum class TextFormat { kAuto, kText, kCode, kLines, kDialogue, kCompletion };

// Objects, one a line.
inline bool holds_lines(TextFormat format) { return format != TextFormat::kText && format != TextFormat::kCode; }

struct TextFile {
  std::string path;
  TextFormat format = TextFormat::kText;  // never kAuto
  uint64_t bytes = 0;
};

struct TextFiles {
  std::vector<TextFile> files;
  uint64_t bytes = 0;
  uint64_t hidden = 0, links = 0, binary = 0, empty = 0;  // left out
};

// Files as given and those of folders, in the order of their names; hidden ones and links in folders are left out, and what is no text everywhere.
// kAuto looks at names and first lines. Throws Error: one that is missing, no file at all, lines that say what no format has.
TextFiles find_texts(const std::vector<std::string>& inputs, TextFormat format);

// A part of a document of plain text, or whole lines of JSON.
struct TextPart {
  size_t file = 0;    // in TextFiles::files
  uint64_t line = 1;  // of the first line, for lines of JSON
  std::string bytes;
  bool ends_document = false;
};

// Reads files one after another. A line `<|endoftext|>` divides the documents of a plain text; code has one document a file.
class TextReader {
 public:
  // Parts of a long document have about `part_bytes` bytes and end where a tokenizer may be restarted (behind a line, or a word); 0: they are whole.
  TextReader(const TextFiles& texts, uint64_t part_bytes);
  ~TextReader();
  TextReader(const TextReader&) = delete;
  TextReader& operator=(const TextReader&) = delete;

  // Parts of about `bytes` bytes together; empty at the end. Throws Error.
  std::vector<TextPart> next(uint64_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::gpt2
