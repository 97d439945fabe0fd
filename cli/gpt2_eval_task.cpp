// `fattn gpt2 eval --task`: answers and summaries beside right ones, perplexity of dialogues and code.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "cli/gpt2.h"
#include "cli/gpt2_eval.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "files/json.h"
#include "gpt2/error.h"
#include "gpt2/evaluate/scores.h"
#include "gpt2/evaluate/tasks.h"
#include "gpt2/generate/generate.h"
#include "gpt2/model_folder.h"

namespace fattn::cli {
namespace {

using gpt2::Mean;
using gpt2::Token;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double eval_seconds(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, end + 1 - begin);
}
Json json_of(const Mean& mean, int64_t scored) {
  if (scored == 0) return nullptr;
  return {{"mean", files::number_or_null(mean.value)}, {"interval", {files::number_or_null(mean.low), files::number_or_null(mean.high)}}};
}
std::string words_of(const Mean& mean) {
  if (std::isnan(mean.low)) return fmt::format("{:.4f}", mean.value);
  return fmt::format("{:.4f} (95 %: {:.4f} to {:.4f})", mean.value, mean.low, mean.high);
}
Json begun(const EvalFlags& flags, const gpt2::Model& model) {
  Json record = gpt2_record("eval");
  record.update(gpt2_compute_json(model, flags.model.model));
  record["task"] = flags.task;
  return record;
}

// Texts that go on with prompts, greedily, and what they score.
class Answers {
 public:
  Answers(const EvalFlags& flags, const gpt2::Model& model, const gpt2::Tokenizer& tokenizer)
      : flags_(flags), model_(model), tokenizer_(tokenizer), examples_(gpt2::read_examples(flags.file, flags.limit)) {
    const int64_t positions = model.config().n_positions;
    most_ = flags.max_new_tokens > 0 ? flags.max_new_tokens : std::min<int64_t>(64, std::max<int64_t>(1, positions / 2));
    if (most_ >= positions)
      throw gpt2::Error(fmt::format("--max-new-tokens {} leaves no room for a prompt in the model's {} positions; allowed: 1 to {}", most_, positions,
                                    positions - 1));
    gpt2::Encoder encoder(tokenizer, true);
    for (const gpt2::Example& example : examples_) {
      std::vector<Token> ids = encoder.encode(example.prompt);
      if (ids.empty()) throw gpt2::Error(fmt::format("the prompt of example {} is empty", prompts_.size() + 1));
      const auto room = static_cast<size_t>(positions - most_);
      if (ids.size() > room) {
        ids.erase(ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(room));
        ++cut_;
      }
      longest_ = std::max(longest_, static_cast<int64_t>(ids.size()));
      prompts_.push_back(std::move(ids));
    }
    texts_.resize(examples_.size());
  }

  int run(Kept& kept, const Output& out) {
    gpt2::SessionOptions session_options;
    session_options.batch = std::min<int64_t>(static_cast<int64_t>(prompts_.size()), flags_.batch);
    session_options.context = longest_ + most_;
    session_options.algorithm = flags_.model.attention();
    gpt2::Session session(model_, session_options);
    gpt2::GenerateOptions options;
    options.max_new_tokens = most_;
    options.stops = flags_.stops;
    if (const auto end = model_.config().eos_token_id) options.end_token = static_cast<Token>(*end);
    {
      Progress progress("examples", static_cast<int64_t>(prompts_.size()));
      gpt2::GenerateCalls calls;
      calls.finished = [&](size_t i, const gpt2::Generated& g) {
        score(i, trimmed(g.text));
        progress.note(notes());
        progress.step();
        if (eval_seconds(kept_at_) >= 1) {  // a copy of all: another thread writes it
          kept_at_ = Clock::now();
          kept.keep([record = record_now()] { return record; }, fmt::format("{} of {} examples", scored_, prompts_.size()));
        }
      };
      gpt2::generate(model_, session, &tokenizer_, prompts_, options, calls);
    }
    say(out);
    if (!flags_.json.empty()) write_json(record_now(), flags_.json);
    return kExitFine;
  }

 private:
  bool summaries() const { return flags_.task == "summarise"; }

  void score(size_t i, const std::string& text) {
    ++scored_;
    const std::vector<std::string>& right = examples_[i].answers;
    texts_[i] = {{"example", i}, {"prompt_tokens", prompts_[i].size()}, {"text", text}, {"answers", right}};
    if (summaries()) {
      gpt2::RougeL best;
      for (const std::string& one : right)
        if (const gpt2::RougeL score = gpt2::rouge_l(text, one); score.f > best.f) best = score;
      precision_.push_back(best.precision);
      recall_.push_back(best.recall);
      f_.push_back(best.f);
      texts_[i]["rouge_l"] = best.f;
    } else {
      const bool exact = gpt2::exact_match(text, right);
      const double f1 = gpt2::answer_f1(text, right);
      exact_.push_back(exact ? 1 : 0);
      f_.push_back(f1);
      texts_[i]["exact_match"] = exact;
      texts_[i]["f1"] = f1;
    }
  }
  std::vector<std::string> notes() const {
    return {summaries() ? fmt::format("ROUGE-L {:.3f}", gpt2::mean_of(f_).value)
                        : fmt::format("exact {:.3f}, F1 {:.3f}", gpt2::mean_of(exact_).value, gpt2::mean_of(f_).value)};
  }
  Json record_now() const {
    Json record = begun(flags_, model_);
    record["examples"] = scored_;
    record["examples_in_all"] = prompts_.size();
    record["prompts_cut"] = cut_;
    record["max_new_tokens"] = most_;
    if (summaries())
      record["scores"] = {{"rouge_l", json_of(gpt2::mean_of(f_), scored_)},
                          {"rouge_l_precision", json_of(gpt2::mean_of(precision_), scored_)},
                          {"rouge_l_recall", json_of(gpt2::mean_of(recall_), scored_)},
                          {"beta", gpt2::RougeL::kBeta}};
    else
      record["scores"] = {{"exact_match", json_of(gpt2::mean_of(exact_), scored_)}, {"f1", json_of(gpt2::mean_of(f_), scored_)}};
    record["texts"] = Json::array();
    for (const Json& text : texts_)
      if (!text.is_null()) record["texts"].push_back(text);
    record["seconds"] = eval_seconds(begin_);
    return record;
  }
  void say(const Output& out) const {
    if (summaries())
      out.say(fmt::format("ROUGE-L {}; precision {:.4f}, recall {:.4f}", words_of(gpt2::mean_of(f_)), gpt2::mean_of(precision_).value,
                          gpt2::mean_of(recall_).value));
    else
      out.say(fmt::format("exact match {}, F1 {}", words_of(gpt2::mean_of(exact_)), words_of(gpt2::mean_of(f_))));
    out.say(fmt::format("{} examples, greedy, at most {} tokens each, {} ({}).", grouped_number(scored_), most_,
                        cut_ == 0 ? "no prompt cut" : fmt::format("{} prompts cut at their beginning to fit", grouped_number(cut_)),
                        gpt2_compute_words(model_)));
    const auto best = std::max_element(f_.begin(), f_.end());
    if (*best == 0) out.say("No text has a word of its right answer. Was the model trained on prompts of this form?");
  }

  const EvalFlags& flags_;
  const gpt2::Model& model_;
  const gpt2::Tokenizer& tokenizer_;
  const std::vector<gpt2::Example> examples_;
  std::vector<std::vector<Token>> prompts_;
  int64_t most_ = 0, longest_ = 0, cut_ = 0, scored_ = 0;
  std::vector<Json> texts_;
  std::vector<double> exact_, f_, precision_, recall_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point kept_at_ = {};
};

int documents(const EvalFlags& flags, const gpt2::Model& model, const gpt2::Tokenizer& tokenizer, Kept& kept, const Output& out) {
  const gpt2::Config& config = model.config();
  std::optional<Token> end;
  if (config.eos_token_id) end = static_cast<Token>(*config.eos_token_id);
  const auto kind = flags.task == "code" ? gpt2::Documents::kCode : gpt2::Documents::kDialogue;
  const std::vector<std::vector<Token>> texts = gpt2::read_documents(flags.file, kind, tokenizer, end, flags.limit);
  gpt2::SessionOptions options;
  options.batch = options.logit_rows = 1;
  options.context = options.rows = flags.context == 0 ? config.n_positions : flags.context;
  options.hidden = true;
  options.algorithm = flags.model.attention();
  gpt2::Session session(model, options);
  const int64_t stride = flags.stride == 0 ? options.context : flags.stride;
  const auto begin = Clock::now();
  const auto record_of = [&](const gpt2::DocumentLoss& d) {
    Json record = begun(flags, model);
    record["context"] = options.context;
    record["stride"] = stride;
    record["documents"] = d.documents;
    record["documents_in_all"] = texts.size();
    record["tokens"] = d.tokens;
    record["loss"] = files::number_or_null(d.loss.value);
    record["loss_interval"] = {files::number_or_null(d.loss.low), files::number_or_null(d.loss.high)};
    record["perplexity"] = files::number_or_null(std::exp(d.loss.value));
    record["perplexity_interval"] = {files::number_or_null(std::exp(d.loss.low)), files::number_or_null(std::exp(d.loss.high))};
    record["seconds"] = eval_seconds(begin);
    return record;
  };
  gpt2::DocumentLoss result;
  {
    Progress progress("documents", static_cast<int64_t>(texts.size()));
    result = gpt2::evaluate_documents(session, texts, options.context, stride, [&](const gpt2::DocumentLoss& d) {
      progress.note({fmt::format("perplexity {:.3f}", std::exp(d.loss.value))});
      progress.step();
      kept.keep([record = record_of(d)] { return record; }, fmt::format("{} of {} documents", d.documents, texts.size()));
    });
  }
  const Json record = record_of(result);
  const Mean perplexity{std::exp(result.loss.value), std::exp(result.loss.low), std::exp(result.loss.high)};
  out.say(fmt::format("perplexity {}, loss {:.4f}", words_of(perplexity), result.loss.value));
  out.say(fmt::format("{} tokens of {} documents, each by itself, in windows of {} ({}).", grouped_number(result.tokens),
                      grouped_number(result.documents), options.context, gpt2_compute_words(model)));
  if (!flags.json.empty()) write_json(record, flags.json);
  if (std::isfinite(result.loss.value)) return kExitFine;
  out.say("The loss is not a number: look at the weights.");
  return kExitCheckFailed;
}

}  // namespace

int gpt2_eval_task(const EvalFlags& flags) {
  require_writable(flags.json);
  Kept kept(flags.json);
  gpt2::require_model_folder(flags.model.model);
  const std::optional<gpt2::Tokenizer> tokenizer = gpt2_tokenizer(flags.tokenizer, flags.model.model);
  if (!tokenizer) throw gpt2::Error("'" + printable(flags.model.model) + "' has no tokenizer; name one by --tokenizer");
  const gpt2::Model model = flags.model.load();
  if (!model.config().causal) throw gpt2::Error("the model is not causal: it sees the tokens that it would foretell");
  gpt2::check_fits(*tokenizer, model.config());
  const Output out(flags.output, flags.json);
  if (flags.task == "dialogue" || flags.task == "code") return documents(flags, model, *tokenizer, kept, out);
  return Answers(flags, model, *tokenizer).run(kept, out);
}

}  // namespace fattn::cli
