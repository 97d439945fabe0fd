// `fattn gpt2 eval`: loss and perplexity on a text; cli/gpt2_eval_task.cpp has the other tasks.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_eval.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/whole_file.h"
#include "files/json.h"
#include "files/safetensors/writer.h"
#include "gpt2/error.h"
#include "gpt2/evaluate/evaluate.h"
#include "gpt2/generate/generate.h"

namespace fattn::cli {
namespace {

using gpt2::Token;
using Json = nlohmann::ordered_json;

std::vector<Token> tokens_of(const EvalFlags& flags, const gpt2::Config& config) {
  std::vector<Token> tokens;
  if (flags.ids) {
    tokens = gpt2_ids(gpt2_read_all(flags.file));
  } else {
    const std::optional<gpt2::Tokenizer> tokenizer = gpt2_tokenizer(flags.tokenizer, flags.model.model);
    if (!tokenizer)
      throw gpt2::Error("'" + printable(flags.model.model) + "' has no tokenizer; name one by --tokenizer, or give a file of ids with --ids");
    gpt2::check_fits(*tokenizer, config);
    gpt2::Encoder encoder(*tokenizer);
    gpt2_read_parts(flags.file, [&](std::string_view part) { encoder.feed(part, tokens); });
    encoder.finish(tokens);
  }
  if (flags.most > 0 && static_cast<int64_t>(tokens.size()) > flags.most) tokens.resize(static_cast<size_t>(flags.most));
  return tokens;
}

// Those of all tokens, (tokens, vocabulary) in fp32.
void write_logits(const EvalFlags& flags, const gpt2::Model& model, const std::vector<Token>& tokens) {
  const gpt2::Config& c = model.config();
  const auto n = static_cast<int64_t>(tokens.size());
  if (n > c.n_positions)
    throw gpt2::Error(fmt::format("--logits of {} tokens; the model takes {} at once: limit them by --tokens", n, c.n_positions));
  WholeFile file(flags.logits);
  gpt2::SessionOptions options;
  options.context = options.rows = options.logit_rows = n;
  options.algorithm = flags.model.attention();
  gpt2::Session session(model, options);
  session.step({{0, tokens, gpt2::WantLogits::kAll}});
  std::vector<float> logits;
  for (int64_t r = 0; r < n; ++r) logits.insert(logits.end(), session.logits(r), session.logits(r) + c.vocab_size);
  files::safetensors::write(file, {{"logits", "F32", {n, c.vocab_size}, logits.data()}}, {});
}

int eval(const EvalFlags& flags) {
  require_writable(flags.json);
  Kept kept(flags.json);
  const gpt2::Model model = flags.model.load();
  const gpt2::Config& config = model.config();
  if (!config.causal) throw gpt2::Error("the model is not causal: it sees the tokens that it would foretell");
  const std::vector<Token> tokens = tokens_of(flags, config);
  const int64_t context = flags.context == 0 ? config.n_positions : flags.context;
  const int64_t stride = flags.stride == 0 ? context : flags.stride;
  const std::vector<gpt2::Window> windows = gpt2::windows_of(static_cast<int64_t>(tokens.size()), context, stride);
  gpt2::SessionOptions options;
  options.batch = std::min<int64_t>(flags.batch, static_cast<int64_t>(windows.size()));
  options.context = context;
  options.rows = options.batch * std::min<int64_t>(context, static_cast<int64_t>(tokens.size()));
  options.logit_rows = 1;
  options.hidden = true;
  options.algorithm = flags.model.attention();
  gpt2::Session session(model, options);
  if (!flags.logits.empty()) write_logits(flags, model, tokens);
  Output out(flags.output, flags.json);
  const auto begin = std::chrono::steady_clock::now();
  const auto record_of = [&](const gpt2::Evaluation& e) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    Json record = gpt2_record("eval");
    record.update(gpt2_compute_json(model, flags.model.model));
    record["task"] = flags.task;
    record["context"] = context;
    record["stride"] = stride;
    record["tokens"] = e.tokens;
    record["windows"] = e.windows;
    record["windows_in_all"] = windows.size();
    record["loss"] = files::number_or_null(e.loss);
    record["loss_interval"] = {files::number_or_null(e.loss_low), files::number_or_null(e.loss_high)};
    record["perplexity"] = files::number_or_null(e.perplexity());
    record["perplexity_interval"] = {files::number_or_null(std::exp(e.loss_low)), files::number_or_null(std::exp(e.loss_high))};
    record["interval_of"] = e.of_windows ? "windows" : "tokens";
    record["seconds"] = seconds;
    return record;
  };
  gpt2::Evaluation result;
  {
    Progress progress("windows", static_cast<int64_t>(windows.size()));
    result = gpt2::evaluate(session, tokens, windows, [&](const gpt2::Evaluation& e) {
      for (int64_t i = 0; i < options.batch && e.windows - i > 0; ++i) progress.step();
      kept.keep([record = record_of(e)] { return record; }, fmt::format("{} of {} windows", e.windows, windows.size()));
    });
  }
  const Json record = record_of(result);
  out.say(fmt::format("loss {:.4f} (95 %: {:.4f} to {:.4f}), perplexity {:.3f} ({:.3f} to {:.3f})", result.loss, result.loss_low, result.loss_high,
                      result.perplexity(), std::exp(result.loss_low), std::exp(result.loss_high)));
  out.say(fmt::format("{} tokens in {} windows of {}, {}; the interval is from the scatter of {}. {:.0f} tokens a second ({}).",
                      grouped_number(result.tokens), result.windows, context, stride == context ? "side by side" : fmt::format("{} apart", stride),
                      result.of_windows ? "windows" : "tokens", static_cast<double>(result.tokens) / record["seconds"].get<double>(),
                      gpt2_compute_words(model)));
  if (!flags.json.empty()) write_json(record, flags.json);
  if (std::isfinite(result.loss)) return kExitFine;
  out.say("The loss is not a number: look at the weights.");
  return kExitCheckFailed;
}

// A flag that another task has is an error, not ignored.
void check_flags(const CLI::App& command, const EvalFlags& flags) {
  const bool answers = flags.task == "qa" || flags.task == "summarise", documents = flags.task == "dialogue" || flags.task == "code";
  const auto refuse = [&](const char* flag, bool allowed, const char* of) {
    if (!allowed && command.count(flag) > 0) throw CLI::ValidationError(flag, fmt::format("is of --task {}, not of {}", of, flags.task));
  };
  for (const char* flag : {"--max-new-tokens", "--stop"}) refuse(flag, answers, "qa and summarise");
  refuse("--limit", answers || documents, "qa, summarise, dialogue and code; --tokens is what limits a text");
  for (const char* flag : {"--ids", "--tokens", "--logits"}) refuse(flag, !answers && !documents, "lm");
  for (const char* flag : {"--context", "--stride"}) refuse(flag, !answers, "lm, dialogue and code");
  refuse("--batch", !documents, "lm, qa and summarise");
  if (flags.task != "lm" && (flags.file.empty() || flags.file == "-"))
    throw CLI::ValidationError("--file", fmt::format("give the file or folder of the examples of --task {}", flags.task));
}

}  // namespace

void add_gpt2_eval(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("eval", "Loss and perplexity on a text; answers, summaries, dialogues and code as tasks");
  auto flags = std::make_shared<EvalFlags>();
  flags->model.add_to(*command);
  command->add_option("--file,FILE", flags->file, "A text, or - for stdin [stdin]; of other tasks a file or folder")->type_name("FILE|-");
  command
      ->add_option("--task", flags->task,
                   "lm: a text. qa, summarise: lines {\"prompt\", \"completion\"}. dialogue: lines {\"messages\"}. code: files, or a folder of them")
      ->transform(one_of({"lm", "qa", "summarise", "dialogue", "code"}, {{"summarize", "summarise"}}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--limit", flags->limit, "Only so many examples or documents, from the beginning [all]")
      ->check(whole_number(1))
      ->type_name("N");
  command->add_flag("--ids", flags->ids, "The file has ids of tokens, divided by white space");
  command->add_option("--tokenizer", flags->tokenizer, "Its folder or file [the model's folder]")->type_name("PATH");
  command->add_option("--tokens", flags->most, "Only so many tokens, from the beginning")->check(whole_number(2))->type_name("N");
  command->option_defaults()->group("How");
  command->add_option("--context", flags->context, "Tokens that the model sees at once [its positions]")->check(whole_number(1))->type_name("N");
  command->add_option("--stride", flags->stride, "From a window to the next; less than the context: they overlap [the context]")
      ->check(whole_number(1))
      ->type_name("N");
  command->add_option("--batch", flags->batch, "Windows, or texts, at once")->check(whole_number(1, 1 << 20))->type_name("N")->capture_default_str();
  command->add_option("-n,--max-new-tokens", flags->max_new_tokens, "Of an answer or a summary, at most [64, or half of the model's positions]")
      ->check(whole_number(1))
      ->type_name("N");
  command->add_option("--stop", flags->stops, "Ends an answer or a summary before this string; may be given again")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  command->option_defaults()->group("Output");
  command->add_option("--logits", flags->logits, "Write the logits of all tokens too, in fp32, as safetensors; no more than the model's positions")
      ->type_name("FILE");
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer(
      "Every token but the first has a loss, once. Blocks side by side are quick; windows that overlap (--stride 512) are what a model is judged by."
      " qa gives exact match and F1 as SQuAD has them, summarise ROUGE-L (Lin 2004, F with beta 1), of greedy texts; dialogue and code perplexity, "
      "each "
      "document by itself.\n\nFor example:\n  fattn gpt2 eval MODEL book.txt\n  fattn gpt2 eval MODEL book.txt --stride 512 --dtype bf16\n  fattn "
      "gpt2 eval MODEL --ids "
      "book.ids --json -\n  fattn gpt2 eval MODEL --task qa questions.jsonl --limit 200\n  fattn gpt2 eval MODEL --task code src");
  command->callback([flags, command, &exit_code] {
    check_flags(*command, *flags);
    exit_code = flags->task == "lm" ? eval(*flags) : gpt2_eval_task(*flags);
  });
}

}  // namespace fattn::cli
