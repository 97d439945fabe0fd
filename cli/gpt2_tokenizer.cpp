// `fattn gpt2 tokenizer train`: a byte-level BPE learned from texts.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "gpt2/data/count_pieces.h"
#include "gpt2/error.h"
#include "gpt2/new_folder.h"
#include "gpt2/tokenizer/train.h"

namespace fattn::cli {
namespace {

struct TrainTokenizerFlags {
  std::vector<std::string> inputs;
  std::string out, json, by = "document";
  int64_t vocab_size = 0, min_frequency = 0;
  int threads = 0;
  OutputFlags output;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

gpt2::PieceCounts count(const TrainTokenizerFlags& flags, const gpt2::TextFiles& texts, int threads) {
  Progress progress("counting");
  progress.expect(static_cast<double>(texts.bytes), false);
  return gpt2::count_pieces(texts, flags.by == "line", threads, [&](uint64_t bytes) { progress.step(static_cast<double>(bytes)); });
}

gpt2::TrainedBpe merge(const TrainTokenizerFlags& flags, const gpt2::PieceCounts& counts) {
  Progress progress("merging", flags.vocab_size - gpt2::kSmallestVocabulary);
  gpt2::BpeTraining how;
  how.vocab_size = static_cast<gpt2::Token>(flags.vocab_size);
  how.min_frequency = static_cast<uint64_t>(flags.min_frequency);
  how.progress = [&] { progress.step(); };
  return gpt2::train_bpe(counts.pieces, how);
}

int train_tokenizer(const TrainTokenizerFlags& flags) {
  require_writable(flags.json);
  const gpt2::TextFiles texts = gpt2::find_texts(flags.inputs, gpt2::TextFormat::kAuto);
  const gpt2::NewFolder folder(flags.out);
  const int threads = flags.threads > 0 ? flags.threads : cpu_info().usable_threads;
  const auto begin = Clock::now();
  const gpt2::PieceCounts counts = count(flags, texts, threads);
  if (counts.pieces.empty()) throw gpt2::Error(fmt::format("there is no text in what was given; {} lines are no documents", counts.bad_lines));
  const double counting = seconds_since(begin);
  const gpt2::TrainedBpe bpe = merge(flags, counts);
  const double seconds = seconds_since(begin);
  for (const auto& [name, text] :
       {std::pair{"tokenizer.json", gpt2::tokenizer_json(bpe)}, {"vocab.json", gpt2::vocab_json(bpe)}, {"merges.txt", gpt2::merges_txt(bpe)}}) {
    const auto file = folder.file(name);
    file->write(text.data(), text.size());
    file->publish();
  }
  uint64_t pieces = 0;
  for (const gpt2::CountedPiece& piece : counts.pieces) pieces += piece.count;
  const auto number = [](auto n) { return grouped_number(static_cast<int64_t>(n)); };
  const Output out(flags.output, flags.json);
  out.say(fmt::format("Read {} file{} of text, {}: {} pieces, {} of them different; {} for counting, {} for merging ({} thread{}).",
                      number(texts.files.size()), texts.files.size() == 1 ? "" : "s", gpt2_size_in_words(texts.bytes), number(pieces),
                      number(counts.pieces.size()), seconds_text(counting), seconds_text(seconds - counting), threads, threads == 1 ? "" : "s"));
  if (counts.bad_lines > 0) out.say(fmt::format("{} lines that are no documents were left out.", number(counts.bad_lines)));
  out.say(fmt::format("Wrote {}: {} tokens, {} merges.", printable(flags.out), number(bpe.tokens.size()), number(bpe.merges.size())));
  if (static_cast<int64_t>(bpe.tokens.size()) < flags.vocab_size)
    out.say(fmt::format("No other pair is there{}; give more text for the {} tokens that were asked for.",
                        flags.min_frequency > 1 ? fmt::format(" {} times", flags.min_frequency) : "", number(flags.vocab_size)));
  if (!flags.json.empty()) {
    nlohmann::ordered_json record = gpt2_record("tokenizer train");
    record["output"] = printable(flags.out);
    record["read"] = {{"files", texts.files.size()}, {"bytes", texts.bytes}, {"bad_lines", counts.bad_lines}};
    record["pieces"] = pieces;
    record["different_pieces"] = counts.pieces.size();
    record["vocab_size"] = bpe.tokens.size();
    record["merges"] = bpe.merges.size();
    record["seconds"] = seconds;
    record["threads"] = threads;
    write_json(record, flags.json);
  }
  return kExitFine;
}

}  // namespace

void add_gpt2_tokenizer(CLI::App& gpt2, int& exit_code) {
  CLI::App* tokenizer = gpt2.add_subcommand("tokenizer", "Make a tokenizer");
  tokenizer->require_subcommand(1);
  CLI::App* command = tokenizer->add_subcommand("train", "Learn a byte-level BPE from texts: the ids and merges of Hugging Face's trainer");
  auto flags = std::make_shared<TrainTokenizerFlags>();
  command->add_option("--text,TEXT", flags->inputs, "Files, or folders, of which all text is taken; as `fattn gpt2 tokenize` reads them")
      ->type_name("PATH ...")
      ->required();
  command->add_option("--out", flags->out, "The folder to write, new or empty: tokenizer.json, vocab.json, merges.txt")
      ->type_name("FOLDER")
      ->required();
  command->add_option("--vocab-size", flags->vocab_size, "Tokens: <|endoftext|>, 256 for the bytes, and as many merges as fit")
      ->check(whole_number(gpt2::kSmallestVocabulary, 1 << 24))
      ->type_name("N")
      ->required();
  command->option_defaults()->group("How");
  command
      ->add_option("--by", flags->by,
                   "What is split into pieces as a whole: a document, as `tokenize` does it, or a line, as Hugging Face's train() on files")
      ->transform(one_of({"document", "line"}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--min-frequency", flags->min_frequency, "Merge no pair that is there less often")
      ->check(whole_number(0))
      ->type_name("N")
      ->capture_default_str();
  add_gpt2_threads(*command, flags->threads);
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer("For example:\n  fattn gpt2 tokenizer train books src --vocab-size 4096 --out tokenizer");
  command->callback([flags, &exit_code] { exit_code = train_tokenizer(*flags); });
}

}  // namespace fattn::cli
