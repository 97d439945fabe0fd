// `fattn gpt2 generate`: text that goes on.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/error.h"
#include "gpt2/generate/generate.h"
#include "gpt2/model_folder.h"

namespace fattn::cli {
namespace {

using gpt2::Token;
using Json = nlohmann::ordered_json;

struct GenerateFlags {
  Gpt2ModelFlags model;
  std::vector<std::string> prompts, stops;
  std::string file, tokenizer, json;
  gpt2::GenerateOptions options;
  gpt2::SessionOptions session{.batch = 0};
  bool ids = false, lines = false, ignore_end = false, quiet = false;
  OutputFlags output;
};

std::vector<std::vector<Token>> prompts_of(const GenerateFlags& flags, const gpt2::Tokenizer* tokenizer) {
  std::vector<std::string> texts = flags.prompts;
  if (texts.empty()) {
    const std::string all = gpt2_read_all(flags.file);
    if (flags.lines) {
      for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find('\n', at), all.size());
        if (end > at) texts.push_back(all.substr(at, end - at));
        at = end + 1;
      }
    } else {
      texts.push_back(all);
    }
  }
  std::vector<std::vector<Token>> prompts;
  std::optional<gpt2::Encoder> encoder;
  if (tokenizer && !flags.ids) encoder.emplace(*tokenizer);
  for (size_t i = 0; i < texts.size(); ++i) {
    prompts.push_back(encoder ? encoder->encode(texts[i]) : gpt2_ids(texts[i]));
    if (prompts.back().empty()) throw gpt2::Error(fmt::format("prompt {} is empty; give some text", i));
  }
  if (prompts.empty()) throw gpt2::Error("there is no prompt; give one as an argument, in a file or on stdin");
  return prompts;
}

std::string ids_text(const std::vector<Token>& ids) {
  std::string text;
  for (const Token id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
  return text;
}

double per_second(int64_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

// What fixing how each sequence's work is split costs a step: such steps and others in turns, at the length that the texts began with.
struct Price {
  double with = 0, without = 0;
};
Price price_of(const gpt2::Model& model, gpt2::SessionOptions options, const std::vector<std::vector<Token>>& prompts) {
  constexpr int kSteps = 5;
  options.batch_invariant = true;
  gpt2::Session with(model, options);
  options.batch_invariant = false;
  gpt2::Session without(model, options);
  const size_t most = std::min(prompts.size(), static_cast<size_t>(options.batch));
  size_t count = 0;  // as many as the cache holds together
  while (count < most && with.reserve(static_cast<int64_t>(count), static_cast<int64_t>(prompts[count].size()))) ++count;
  std::vector<double> seconds[2];
  for (gpt2::Session* session : {&with, &without}) {
    std::vector<gpt2::NewTokens> parts;
    for (size_t i = 0; i < count; ++i) parts.push_back({static_cast<int64_t>(i), prompts[i]});
    session->prefill(parts);
    std::vector<Token> drawn(count);  // what is made once is made now
    session->draw(std::vector<ops::Choice>(count), drawn.data());
  }
  for (int step = -1; step < kSteps; ++step)
    for (const int which : {0, 1}) {
      gpt2::Session& session = which == 0 ? with : without;
      std::vector<gpt2::NewTokens> parts;
      for (size_t i = 0; i < count; ++i) {
        const auto length = static_cast<int64_t>(prompts[i].size());
        session.truncate(static_cast<int64_t>(i), length - 1);
        parts.push_back({static_cast<int64_t>(i), std::span(prompts[i]).last(1)});
      }
      std::vector<Token> drawn(count);
      const auto begin = std::chrono::steady_clock::now();
      session.step_and_draw(parts, std::vector<ops::Choice>(count), drawn.data());
      if (step >= 0) seconds[which].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  for (auto& all : seconds) std::sort(all.begin(), all.end());
  return {seconds[0][kSteps / 2], seconds[1][kSteps / 2]};
}

int generate(GenerateFlags flags) {
  if (!flags.prompts.empty() && !flags.file.empty()) throw CLI::ValidationError("--file", "is given beside a prompt; give one of them");
  require_writable(flags.json);
  gpt2::require_model_folder(flags.model.model);
  const std::optional<gpt2::Tokenizer> tokenizer = gpt2_tokenizer(flags.tokenizer, flags.model.model);
  if (!tokenizer && !flags.ids)
    throw gpt2::Error("'" + printable(flags.model.model) + "' has no tokenizer; name one by --tokenizer, or give ids of tokens with --ids");
  Kept kept(flags.json);
  const gpt2::Model model = flags.model.load();
  const gpt2::Config& config = model.config();
  if (tokenizer) gpt2::check_fits(*tokenizer, config);
  const std::vector<std::vector<Token>> prompts = prompts_of(flags, tokenizer ? &*tokenizer : nullptr);
  size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  gpt2::SessionOptions& session_options = flags.session;
  if (session_options.batch == 0) session_options.batch = std::min<int64_t>(static_cast<int64_t>(prompts.size()), 16);
  if (session_options.context == 0)
    session_options.context = std::min(config.n_positions, static_cast<int64_t>(longest) + flags.options.max_new_tokens);
  session_options.algorithm = flags.model.attention();
  gpt2::Session session(model, session_options);
  flags.options.stops = flags.stops;
  if (!flags.ignore_end && config.eos_token_id) flags.options.end_token = static_cast<Token>(*config.eos_token_id);

  Output out(flags.output, flags.json);
  std::FILE* stream = text_stream(flags.json);
  const bool streams = prompts.size() == 1 && !flags.ids && tokenizer;
  std::vector<Json> texts(prompts.size());
  size_t done = 0;
  const auto record_now = [&] {
    Json record = gpt2_record("generate");
    record.update(gpt2_compute_json(model, flags.model.model));
    const gpt2::GenerateOptions& o = flags.options;
    record["options"] = {{"max_new_tokens", o.max_new_tokens},
                         {"temperature", o.temperature},
                         {"top_k", o.top_k},
                         {"top_p", o.top_p},
                         {"repetition_penalty", o.repetition_penalty},
                         {"seed", o.seed},
                         {"batch", session.options().batch},
                         {"context", session.options().context},
                         {"batch_invariant", session.options().batch_invariant},
                         {"page_size", session.options().page_size},
                         {"cache_tokens", session.options().cache_tokens}};
    Json finished = Json::array();
    for (const Json& text : texts)
      if (!text.is_null()) finished.push_back(text);
    record["texts"] = finished;
    return record;
  };
  gpt2::GenerateCalls calls;
  std::unique_ptr<Progress> progress;
  if (!streams) progress = std::make_unique<Progress>("texts", static_cast<int64_t>(prompts.size()));
  if (streams) calls.text = [&](size_t, std::string_view text) { gpt2_show(stream, text); };
  calls.finished = [&](size_t i, const gpt2::Generated& g) {
    ++done;
    texts[i] = {
        {"request", i}, {"prompt_tokens", prompts[i].size()}, {"ids", g.tokens}, {"text", tokenizer ? Json(g.text) : Json()}, {"ended", g.ended}};
    if (progress) progress->step();
    kept.keep([record = record_now()] { return record; }, fmt::format("{} of {} texts", done, prompts.size()));
  };
  gpt2::GenerateTimes times;
  const std::vector<gpt2::Generated> generated =
      gpt2::generate(model, session, tokenizer ? &*tokenizer : nullptr, prompts, flags.options, calls, &times);
  progress.reset();
  if (streams) {
    put(stream, "\n");
  } else {
    for (size_t i = 0; i < generated.size(); ++i) {
      if (prompts.size() > 1) put(stream, fmt::format("--- {}\n", i));
      gpt2_show(stream, (flags.ids ? ids_text(generated[i].tokens) : generated[i].text) + "\n");
    }
  }

  Json record = record_now();
  record["prefill"] = {{"tokens", times.prefill_tokens}, {"seconds", times.prefill_seconds}};
  record["decode"] = {{"tokens", times.decode_tokens}, {"seconds", times.decode_seconds}};
  record["batch_invariant_price"] = nullptr;
  if (!flags.quiet)
    print_error(fmt::format("prefill {} tokens, {:.0f} a second; decode {}, {:.1f} a second ({}){}", times.prefill_tokens,
                            per_second(times.prefill_tokens, times.prefill_seconds), times.decode_tokens,
                            per_second(times.decode_tokens, times.decode_seconds), gpt2_compute_words(model),
                            generated.size() == 1 ? fmt::format("; ended by {}", generated[0].ended) : ""));
  if (session_options.batch_invariant) {
    const Price price = price_of(model, session.options(), prompts);
    record["batch_invariant_price"] = price.with / price.without;
    if (!flags.quiet)
      print_error(fmt::format("batch-invariant: a step takes {}, without {}: {:.2f}x", seconds_text(price.with), seconds_text(price.without),
                              price.with / price.without));
  }
  if (!flags.json.empty()) write_json(record, flags.json);
  return kExitFine;
}

}  // namespace

void add_gpt2_generate(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("generate", "Go on with a text: greedy, or drawn by temperature, top-k and top-p");
  auto flags = std::make_shared<GenerateFlags>();
  gpt2::GenerateOptions& o = flags->options;
  flags->model.add_to(*command);
  command->add_option("--prompt,PROMPT", flags->prompts, "Texts to go on with [stdin]")->type_name("TEXT");
  command->add_option("--file", flags->file, "One prompt from a file, or - for stdin")->type_name("FILE|-");
  command->add_flag("--lines", flags->lines, "Each line of the file is a prompt");
  command->add_flag("--ids", flags->ids, "Prompts are ids of tokens, and so is what is printed");
  command->add_option("--tokenizer", flags->tokenizer, "Its folder or file [the model's folder]")->type_name("PATH");
  command->option_defaults()->group("What comes");
  command->add_option("-n,--max-new-tokens", o.max_new_tokens, "Tokens of each text at most")
      ->check(whole_number(1))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--temperature", o.temperature, "0: the most likely token each time")->check(number(0))->type_name("X")->capture_default_str();
  command->add_option("--top-k", o.top_k, "Only the K most likely; 0: all")->check(whole_number(0))->type_name("K")->capture_default_str();
  command->add_option("--top-p", o.top_p, "Only the most likely ones that have P together")
      ->check(number(0, 1))
      ->type_name("P")
      ->capture_default_str();
  command->add_option("--repetition-penalty", o.repetition_penalty, "Divides the logits of tokens that were there; 1: none")
      ->check(number(0))
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--seed", o.seed, "A token depends on it, on the prompt's place in the list and on the token's place")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--stop", flags->stops, "Ends a text before this string; may be given again")->type_name("TEXT")->allow_extra_args(false);
  command->add_flag("--ignore-end", flags->ignore_end, "Go on behind the model's end-of-text token");
  command->option_defaults()->group("How");
  command->add_option("--batch", flags->session.batch, "Texts at once [as many as prompts, up to 16]")->check(whole_number(1))->type_name("N");
  command->add_option("--context", flags->session.context, "Tokens of each that the cache holds [what is needed]")
      ->check(whole_number(1))
      ->type_name("N");
  add_gpt2_cache(*command, flags->session);
  command->add_option("--chunk", flags->session.rows, "Tokens of prompts in a step at most [256; on a GPU 8192]")
      ->check(whole_number(1))
      ->type_name("N");
  command->add_flag("--batch-invariant", flags->session.batch_invariant, "No text changes another by a bit; its price is measured and printed");
  command->add_flag("--quiet", flags->quiet, "The text alone");
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  command->footer(
      "The text goes to stdout as it comes, several of them when all are done; tokens a second go to stderr. The same command gives the same text on "
      "every run and any number of threads.\n\nFor example:\n  fattn gpt2 generate MODEL 'Once upon a time' -n 50\n  fattn gpt2 generate MODEL "
      "--lines --file prompts.txt --temperature 0.8 --top-p 0.95 --seed 7\n  fattn gpt2 generate MODEL --ids '15496 995'");
  command->callback([flags, &exit_code] { exit_code = generate(*flags); });
}

}  // namespace fattn::cli
