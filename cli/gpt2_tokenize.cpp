// `fattn gpt2 tokenize`: texts to token files.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_texts.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "gpt2/data/tokenize.h"
#include "gpt2/error.h"
#include "gpt2/new_folder.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;
using gpt2::TextFormat;

constexpr size_t kNamedLines = 10;

struct TokenizeFlags {
  std::string tokenizer, out, format = "auto", json;
  std::vector<std::string> inputs;
  int64_t shard_tokens = 100'000'000, seed = 0;
  double validation = 0;
  int threads = 0;
};

const std::map<std::string, TextFormat>& formats() {
  static const std::map<std::string, TextFormat> all = {{"auto", TextFormat::kAuto},         {"text", TextFormat::kText},
                                                        {"code", TextFormat::kCode},         {"lines", TextFormat::kLines},
                                                        {"dialogue", TextFormat::kDialogue}, {"completion", TextFormat::kCompletion}};
  return all;
}

const char* name_of(TextFormat format) {
  for (const auto& [name, value] : formats())
    if (value == format) return name.c_str();
  return "";
}

std::string files_in_words(uint64_t n) { return fmt::format("{} file{}", grouped_number(static_cast<int64_t>(n)), n == 1 ? "" : "s"); }

std::string left_out_in_words(const gpt2::TextFiles& texts) {
  std::string words;
  const auto add = [&](uint64_t count, const char* what) {
    if (count > 0) words += fmt::format("{}{} {}", words.empty() ? "" : ", ", grouped_number(static_cast<int64_t>(count)), what);
  };
  add(texts.binary, "no text");
  add(texts.hidden, "hidden");
  add(texts.links, "links");
  add(texts.empty, "empty");
  return words;
}

std::string set_in_words(const char* name, const gpt2::TokenizedSet& set) {
  const auto number = [](uint64_t n) { return grouped_number(static_cast<int64_t>(n)); };
  std::string words = fmt::format("{}: {} tokens in {} document{}, {:.3f} bytes a token, {} of {}", name, number(set.tokens), number(set.documents),
                                  set.documents == 1 ? "" : "s", static_cast<double>(set.text_bytes) / static_cast<double>(set.tokens),
                                  files_in_words(set.files), gpt2_size_in_words(set.file_bytes));
  if (set.targets < set.tokens) words += fmt::format("; {} tokens have a loss, prompts have none", number(set.targets));
  return words + ".";
}

Json set_json(const gpt2::TokenizedSet& set) {
  return {{"tokens", set.tokens},         {"documents", set.documents},   {"targets", set.targets},
          {"text_bytes", set.text_bytes}, {"file_bytes", set.file_bytes}, {"files", set.files}};
}

int run_tokenize(const TokenizeFlags& flags) {
  require_writable(flags.json);
  const gpt2::Tokenizer tokenizer = gpt2::Tokenizer::load(flags.tokenizer);
  const gpt2::TextFiles texts = gpt2::find_texts(flags.inputs, formats().at(flags.format));
  const gpt2::NewFolder folder(flags.out);
  std::vector<std::string> bad;
  gpt2::TokenizeOptions options;
  options.shard_tokens = static_cast<uint64_t>(flags.shard_tokens);
  options.validation = flags.validation;
  options.seed = static_cast<uint64_t>(flags.seed);
  options.threads = flags.threads > 0 ? flags.threads : cpu_info().usable_threads;
  gpt2::Tokenized done;
  const auto begin = std::chrono::steady_clock::now();
  {
    Progress progress("tokenizing");
    progress.expect(static_cast<double>(texts.bytes), false);
    options.progress = [&](uint64_t bytes) { progress.step(static_cast<double>(bytes)); };
    options.bad_line = [&](const std::string& line) {
      if (bad.size() == kNamedLines) return;
      bad.push_back(line);
      progress.say("left out " + line);
    };
    done = gpt2::tokenize(tokenizer, texts, flags.out, options);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (done.train.tokens == 0) {
    if (done.bad_lines > 0)
      throw gpt2::Error(fmt::format("none of the lines is a document: {} were left out; name what they are by --format", done.bad_lines));
    throw gpt2::Error("there is no text for training; give more of it, or a smaller share by --validation");
  }
  folder.folder("tokenizer");
  for (const auto& [name, text] : gpt2_tokenizer_texts(flags.tokenizer)) {
    const auto file = folder.file("tokenizer/" + name);
    file->write(text.data(), text.size());
    file->publish();
  }
  std::map<std::string, int64_t> kinds;
  for (const gpt2::TextFile& file : texts.files) ++kinds[name_of(file.format)];
  const Output out(OutputFlags{}, flags.json);
  std::string read;
  for (const auto& [kind, count] : kinds)
    read += fmt::format("{}{} of {}", read.empty() ? "" : ", ", files_in_words(static_cast<uint64_t>(count)), kind);
  const std::string left_out = left_out_in_words(texts);
  out.say(fmt::format("Read {}, {}, in {} ({:.0f} MB/s, {} thread{}).{}", read, gpt2_size_in_words(texts.bytes), seconds_text(seconds),
                      static_cast<double>(texts.bytes) / seconds / 1e6, options.threads, options.threads == 1 ? "" : "s",
                      left_out.empty() ? "" : " Left out: " + left_out + "."));
  if (done.bad_lines > 0)
    out.say(fmt::format("{} line{} left out{}.", grouped_number(static_cast<int64_t>(done.bad_lines)), done.bad_lines == 1 ? " was" : "s were",
                        done.bad_lines > kNamedLines ? fmt::format(", of which the first {} are named above", kNamedLines) : ", named above"));
  out.say(set_in_words("train", done.train));
  if (done.validation.tokens > 0) out.say(set_in_words("validation", done.validation));
  if (flags.validation > 0 && done.validation.tokens == 0) out.say("validation: nothing; the text is too short for this share.");
  out.say(fmt::format("Wrote {}.", printable(flags.out)));
  if (!flags.json.empty()) {
    Json record = gpt2_record("tokenize");
    record["output"] = printable(flags.out);
    record["tokenizer"] = printable(flags.tokenizer);
    record["vocab_size"] = tokenizer.vocabulary().size();
    record["read"] = {{"files", texts.files.size()}, {"bytes", texts.bytes}, {"formats", kinds}};
    record["left_out"] = {
        {"binary", texts.binary}, {"hidden", texts.hidden}, {"links", texts.links}, {"empty", texts.empty}, {"lines", done.bad_lines}};
    record["bad_lines"] = bad;
    record["train"] = set_json(done.train);
    record["validation"] = done.validation.tokens > 0 ? set_json(done.validation) : Json();
    record["seconds"] = seconds;
    record["threads"] = options.threads;
    write_json(record, flags.json);
  }
  return kExitFine;
}

}  // namespace

void add_gpt2_tokenize(CLI::App& gpt2, int& exit_code) {
  CLI::App* command =
      gpt2.add_subcommand("tokenize", "Texts, source code, dialogues and questions with answers to token files, which training reads");
  auto flags = std::make_shared<TokenizeFlags>();
  command->add_option("--tokenizer,TOKENIZER", flags->tokenizer, "Its folder or file")->type_name("PATH")->required();
  command->add_option("--input,INPUT", flags->inputs, "Files, or folders, of which all text is taken")->type_name("PATH ...")->required();
  command->add_option("--out", flags->out, "The folder to write, new or empty")->type_name("FOLDER")->required();
  command->option_defaults()->group("How");
  command->add_option("--format", flags->format, "What the files hold; auto: what their names and first lines say")
      ->transform(
          one_of({"auto", "text", "code", "lines", "dialogue", "completion"}, {{"plain", "text"}, {"chat", "dialogue"}, {"prompt", "completion"}}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--validation", flags->validation, "Share of the text that goes into files of its own")
      ->check(number(0, 0.5))
      ->type_name("SHARE")
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Another one, another part for validation")
      ->check(whole_number(0))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--shard-tokens", flags->shard_tokens, "A file ends with the document that reaches so many tokens")
      ->check(whole_number(1))
      ->type_name("N")
      ->capture_default_str();
  add_gpt2_threads(*command, flags->threads);
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  command->footer(
      "text: a document a file, or several, with lines <|endoftext|> between them. code: a document a file. lines: {\"text\"} a line. dialogue: "
      "{\"messages\": [{\"role\", \"content\"}]} a line. completion: {\"prompt\", \"completion\"} a line, with a loss on completions alone. Hidden "
      "files "
      "and links of folders, and files that are no text, are left out. FOLDER gets train, validation and tokenizer.\n\nFor example:\n"
      "  fattn gpt2 tokenize gpt2 books src --out tokens --validation 0.05\n"
      "  fattn gpt2 tokenize gpt2 answers.jsonl --out tokens");
  command->callback([flags, &exit_code] { exit_code = run_tokenize(*flags); });
}

}  // namespace fattn::cli
