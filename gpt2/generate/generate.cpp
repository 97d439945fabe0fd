// A request takes a free sequence of the session, its prompt is computed, then it goes on with the others, a token a step.
#include "gpt2/generate/generate.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/generate/stops.h"

namespace fattn::gpt2 {
namespace {

using Clock = std::chrono::steady_clock;

struct Request {
  size_t index = 0;
  int64_t sequence = 0;
  std::vector<Token> all;  // the prompt and what follows
  size_t prompt = 0;
  std::unique_ptr<Decoder> decoder;
  Stops stops{{}};
};

class Run {
 public:
  Run(const Model& model, Session& session, const Tokenizer* tokenizer, const std::vector<std::vector<Token>>& prompts,
      const GenerateOptions& options, const GenerateCalls& calls, GenerateTimes& times)
      : session_(session), tokenizer_(tokenizer), prompts_(prompts), options_(options), calls_(calls), times_(times), results_(prompts.size()) {
    const Config& c = model.config();
    if (!c.causal) throw Error("the model is not causal: it has no text that goes on");
    if (options.max_new_tokens < 1) throw Error("max_new_tokens is " + std::to_string(options.max_new_tokens) + "; allowed: 1 and above");
    if (!tokenizer && !options.stops.empty()) throw Error("stop strings need a tokenizer");
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (prompts[i].empty()) throw Error("prompt " + std::to_string(i) + " has no token; begin with <|endoftext|>, say");
      if (static_cast<int64_t>(prompts[i].size()) > session.options().context)
        throw Error("prompt " + std::to_string(i) + " has " + std::to_string(prompts[i].size()) + " tokens; the context is " +
                    std::to_string(session.options().context) + ": use a shorter one, or a larger context");
      const int64_t most = session.options().cache_tokens;
      if (session.options().page_size > 0 && needed(prompts[i].size()) > most)
        throw Error("prompt " + std::to_string(i) + " and its new tokens need room for " + std::to_string(needed(prompts[i].size())) +
                    "; the cache holds " + std::to_string(most) + ": use a larger one, or fewer new tokens");
    }
    // A token that only the model's padding has is none.
    const int64_t known = tokenizer ? std::min<int64_t>(c.vocab_size, tokenizer->vocabulary().size()) : c.vocab_size;
    session.draw_from(known);
    choices_.resize(static_cast<size_t>(session.options().batch));
    drawn_.resize(choices_.size());
    for (int64_t s = session.options().batch; s-- > 0;) {
      session.truncate(s, 0);
      free_.push_back(s);
    }
  }

  std::vector<Generated> run() {
    while (next_ < prompts_.size() || !active_.empty()) {
      if (next_ < prompts_.size() && !free_.empty()) admit();
      if (!active_.empty()) step();
    }
    return std::move(results_);
  }

 private:
  // What the cache must hold of a text at most: the last token is never read.
  int64_t needed(size_t prompt) const {
    const auto tokens = static_cast<int64_t>(prompt);
    return tokens + std::min(options_.max_new_tokens - 1, session_.options().context - tokens);
  }

  // Requests in their order, as long as there are sequences and, where these share a cache, room for the longest that a text may become.
  void admit() {
    std::vector<Request> fresh;
    while (next_ < prompts_.size() && !free_.empty() && session_.reserve(free_.back(), needed(prompts_[next_].size()))) {
      Request r;
      r.index = next_++;
      r.sequence = free_.back();
      free_.pop_back();
      r.all = prompts_[r.index];
      r.prompt = r.all.size();
      if (tokenizer_) r.decoder = std::make_unique<Decoder>(*tokenizer_);
      r.stops = Stops(options_.stops);
      fresh.push_back(std::move(r));
    }
    if (fresh.empty()) return;
    std::sort(fresh.begin(), fresh.end(), [](const Request& a, const Request& b) { return a.sequence < b.sequence; });
    std::vector<NewTokens> parts;
    for (const Request& r : fresh) {
      parts.push_back({r.sequence, r.all});
      times_.prefill_tokens += static_cast<int64_t>(r.all.size());
    }
    const auto begin = Clock::now();
    session_.prefill(parts);
    session_.wait();
    times_.prefill_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    choose(fresh);
    session_.draw(std::span(choices_).first(fresh.size()), drawn_.data());
    take(fresh);
    for (Request& r : fresh) active_.push_back(std::move(r));
    std::sort(active_.begin(), active_.end(), [](const Request& a, const Request& b) { return a.sequence < b.sequence; });
  }

  void step() {
    parts_.clear();
    for (const Request& r : active_) parts_.push_back({r.sequence, std::span(r.all).last(1)});
    const auto begin = Clock::now();
    choose(active_);
    session_.step_and_draw(parts_, std::span(choices_).first(active_.size()), drawn_.data(), true);
    times_.decode_tokens += static_cast<int64_t>(parts_.size());
    take(active_);
    times_.decode_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void choose(const std::vector<Request>& requests) {
    for (size_t i = 0; i < requests.size(); ++i) {
      const Request& r = requests[i];
      choices_[i] = {options_.temperature,
                     options_.top_k,
                     options_.top_p,
                     options_.repetition_penalty,
                     options_.seed,
                     r.index,
                     r.all.size(),
                     r.all.data(),
                     static_cast<int64_t>(r.all.size())};
    }
  }

  // The next token of each; those that end give back their sequence.
  void take(std::vector<Request>& requests) {
    for (size_t i = 0; i < requests.size(); ++i) take(requests[i], drawn_[i]);
    std::erase_if(requests, [](const Request& r) { return r.sequence < 0; });
  }

  void take(Request& r, Token token) {
    Generated& result = results_[r.index];
    if (options_.end_token == token) return end(r, "end of text");
    r.all.push_back(token);
    result.tokens.push_back(token);
    if (tokenizer_) {
      bytes_.clear();
      r.decoder->feed(token, bytes_);
      const bool stopped = say(r, [&](std::string& to) { return r.stops.feed(bytes_, to); });
      if (stopped) return end(r, "stop string");
    }
    if (static_cast<int64_t>(result.tokens.size()) >= options_.max_new_tokens) return end(r, "length");
    if (static_cast<int64_t>(r.all.size()) > session_.options().context) end(r, "context");
  }

  template <class Feed>
  bool say(const Request& r, const Feed& feed) {
    std::string& text = results_[r.index].text;
    const size_t before = text.size();
    const bool stopped = feed(text);
    if (calls_.text && text.size() > before) calls_.text(r.index, std::string_view(text).substr(before));
    return stopped;
  }

  void end(Request& r, const char* why) {
    Generated& result = results_[r.index];
    result.ended = why;
    if (tokenizer_ && std::string_view(why) != "stop string")
      say(r, [&](std::string& to) {
        bytes_.clear();
        r.decoder->finish(bytes_);
        if (r.stops.feed(bytes_, to))
          result.ended = "stop string";
        else
          r.stops.finish(to);
        return false;
      });
    session_.truncate(r.sequence, 0);
    free_.push_back(r.sequence);
    r.sequence = -1;
    if (calls_.finished) calls_.finished(r.index, result);
  }

  Session& session_;
  const Tokenizer* tokenizer_;
  const std::vector<std::vector<Token>>& prompts_;
  const GenerateOptions& options_;
  const GenerateCalls& calls_;
  GenerateTimes& times_;
  std::vector<Generated> results_;
  std::vector<ops::Choice> choices_;
  std::vector<int32_t> drawn_;
  std::vector<int64_t> free_;
  std::vector<Request> active_;
  std::vector<NewTokens> parts_;
  std::string bytes_;
  size_t next_ = 0;
};

}  // namespace

std::vector<Generated> generate(const Model& model, Session& session, const Tokenizer* tokenizer, const std::vector<std::vector<Token>>& prompts,
                                const GenerateOptions& options, const GenerateCalls& calls, GenerateTimes* times) {
  GenerateTimes unseen;
  return Run(model, session, tokenizer, prompts, options, calls, times ? *times : unseen).run();
}

void check_fits(const Tokenizer& tokenizer, const Config& config) {
  const int64_t tokens = tokenizer.vocabulary().size();
  if (tokens > config.vocab_size)
    throw Error("the tokenizer has " + std::to_string(tokens) + " tokens, the model's vocabulary " + std::to_string(config.vocab_size) +
                "; use the model's own tokenizer");
}

}  // namespace fattn::gpt2
