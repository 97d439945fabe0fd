// `fattn gpt2 encode` and `fattn gpt2 decode`: text and tokens, as they come.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::cli {
namespace {

using gpt2::Token;

struct Gpt2TextFlags {
  std::string tokenizer, file, json;
  std::vector<std::string> given;
  bool special_as_text = false, skip_special = false, count = false, pieces = false;
  OutputFlags output;
};

// Where ids go as they are found: to a stream, divided by spaces, to the record, to the table.
class Ids {
 public:
  Ids(const Gpt2TextFlags& flags, std::FILE* stream)
      : keeps_(!flags.json.empty() || flags.pieces), prints_(!flags.count && !flags.pieces), stream_(stream) {}

  void take(std::vector<Token>& ids) {
    count_ += ids.size();
    if (keeps_) all_.insert(all_.end(), ids.begin(), ids.end());
    if (prints_) {
      fmt::memory_buffer text;
      for (const Token id : ids) {
        if (!first_) text.push_back(' ');
        first_ = false;
        fmt::format_to(std::back_inserter(text), "{}", id);
      }
      put(stream_, {text.data(), text.size()});
    }
    ids.clear();
  }
  void end_text() {
    if (prints_) put(stream_, "\n");
    first_ = true;
  }

  size_t count() const { return count_; }
  const std::vector<Token>& all() const { return all_; }

 private:
  const bool keeps_, prints_;
  std::FILE* stream_;
  std::vector<Token> all_;
  size_t count_ = 0;
  bool first_ = true;
};

int encode(const Gpt2TextFlags& flags) {
  if (!flags.given.empty() && !flags.file.empty()) throw CLI::ValidationError("--file", "is given beside a text; give one of them");
  require_writable(flags.json);
  const gpt2::Tokenizer tokenizer = gpt2::Tokenizer::load(flags.tokenizer);
  gpt2::Encoder encoder(tokenizer, flags.special_as_text);
  Output out(flags.output, flags.json);
  Ids ids(flags, text_stream(flags.json));
  std::vector<Token> tokens;
  for (const std::string& text : flags.given) {
    encoder.encode(text, tokens);
    ids.take(tokens);
    ids.end_text();
  }
  if (flags.given.empty()) {
    gpt2_read_parts(flags.file, [&](std::string_view part) {
      encoder.feed(part, tokens);
      ids.take(tokens);
    });
    encoder.finish(tokens);
    ids.take(tokens);
    ids.end_text();
  }
  if (flags.count) out.say(std::to_string(ids.count()));
  if (flags.pieces) {
    Table table({Column::number("id"), Column::text("token").as_key()});
    for (const Token id : ids.all()) table.add({std::to_string(id), printable(tokenizer.vocabulary().bytes(id))});
    out.print(table);
  }
  if (!flags.json.empty()) {
    nlohmann::ordered_json record = gpt2_record("encode");
    record["tokenizer"] = printable(flags.tokenizer);
    record["ids"] = ids.all();
    write_json(record, flags.json);
  }
  return kExitFine;
}

int decode(const Gpt2TextFlags& flags) {
  if (!flags.given.empty() && !flags.file.empty()) throw CLI::ValidationError("--file", "is given beside ids; give one of them");
  require_writable(flags.json);
  const gpt2::Tokenizer tokenizer = gpt2::Tokenizer::load(flags.tokenizer);
  gpt2::Decoder decoder(tokenizer, flags.skip_special);
  std::FILE* stream = text_stream(flags.json);
  std::string text, all;
  const auto show = [&] {
    gpt2_show(stream, text);
    if (!flags.json.empty()) all += text;
    text.clear();
  };
  Gpt2IdReader ids;
  const auto take = [&](Token id) { decoder.feed(id, text); };
  for (const std::string& given : flags.given) {
    ids.feed(given, take);
    ids.finish(take);
  }
  if (flags.given.empty())
    gpt2_read_parts(flags.file, [&](std::string_view part) {
      ids.feed(part, take);
      show();
    });
  ids.finish(take);
  decoder.finish(text);
  show();
  if (is_terminal(stream)) put(stream, "\n");
  if (!flags.json.empty()) {
    nlohmann::ordered_json record = gpt2_record("decode");
    record["tokenizer"] = printable(flags.tokenizer);
    record["text"] = all;
    write_json(record, flags.json);
  }
  return kExitFine;
}

void add_tokenizer(CLI::App& command, Gpt2TextFlags& flags) {
  command.add_option("--tokenizer,TOKENIZER", flags.tokenizer, "Its folder, or one of its files: tokenizer.json, vocab.json, merges.txt, *.tiktoken")
      ->type_name("PATH")
      ->required();
}

}  // namespace

void add_gpt2_text(CLI::App& gpt2, int& exit_code) {
  CLI::App* encode_command = gpt2.add_subcommand("encode", "Text to tokens: the ids that Hugging Face's tokenizers gives");
  auto flags = std::make_shared<Gpt2TextFlags>();
  add_tokenizer(*encode_command, *flags);
  encode_command->add_option("TEXT", flags->given, "One text or several, a line of ids each [stdin]")->type_name("TEXT ...");
  encode_command->add_option("--file", flags->file, "Take the text from a file, or - for stdin")->type_name("FILE|-");
  encode_command->add_flag("--special-as-text", flags->special_as_text, "Text that reads like a special token (<|endoftext|>) is text");
  encode_command->add_flag("--count", flags->count, "Print how many tokens there are instead of their ids");
  encode_command->add_flag("--pieces", flags->pieces, "Print each token's text beside its id");
  add_gpt2_json(*encode_command, flags->json);
  flags->output.add_to(*encode_command);
  encode_command->footer(
      "Bytes that are no UTF-8 are read as U+FFFD. Long texts are encoded as they come.\n\nFor example:\n  fattn gpt2 encode model 'Hello world'\n  "
      "fattn "
      "gpt2 encode model --file book.txt > book.ids");
  encode_command->callback([flags, &exit_code] { exit_code = encode(*flags); });

  CLI::App* decode_command = gpt2.add_subcommand("decode", "Tokens to text");
  auto decode_flags = std::make_shared<Gpt2TextFlags>();
  add_tokenizer(*decode_command, *decode_flags);
  decode_command->add_option("ID", decode_flags->given, "Ids [stdin]")->type_name("ID ...");
  decode_command->add_option("--file", decode_flags->file, "Take the ids from a file, or - for stdin")->type_name("FILE|-");
  decode_command->add_flag("--skip-special", decode_flags->skip_special, "Leave special tokens out");
  add_gpt2_json(*decode_command, decode_flags->json);
  decode_command->footer(
      "Text is written as ids come, whole characters only; bytes that are no UTF-8 become U+FFFD. On a terminal, control characters are shown as "
      "\\x1b.\n\nFor example:\n  fattn gpt2 decode model 15496 995\n  fattn gpt2 encode model --file book.txt | fattn gpt2 decode model");
  decode_command->callback([decode_flags, &exit_code] { exit_code = decode(*decode_flags); });
}

}  // namespace fattn::cli
