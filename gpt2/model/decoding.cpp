#include "gpt2/model/decoding.h"

#include <algorithm>
#include <cstring>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

size_t bytes_of_row(int64_t context) { return 3 * sizeof(int32_t) + sizeof(int64_t) + sizeof(ops::Choice) + static_cast<size_t>(context + 1) * 4; }

[[noreturn]] void refuse_nan() { throw Error("a logit is NaN, so no token can be drawn; look at the weights"); }

}  // namespace

size_t Decoding::bytes(int64_t batch, int64_t context) { return static_cast<size_t>(batch) * (bytes_of_row(context) + 2 * sizeof(int32_t)); }

Decoding::Decoding(Session& session)
    : session_(session),
      batch_(std::max(session.options().batch, session.options().logit_rows)),
      seen_stride_(session.options().context + 1),
      tokens_(2 * static_cast<size_t>(batch_) * sizeof(int32_t), "tokens", session.space_),
      reading_(session.space_.gpu()) {
  const auto n = static_cast<size_t>(batch_);
  state_bytes_ = n * (sizeof(ops::Choice) + sizeof(int64_t) + 3 * sizeof(int32_t));
  state_ = Inputs(state_bytes_, "steps of one token", session.space_);
  seen_ = Inputs(n * static_cast<size_t>(seen_stride_) * sizeof(int32_t), "tokens that were there", session.space_);
  host_ = rows_at(state_.host(0), seen_.host(0));
  device_ = rows_at(state_.at(0), seen_.at(0));
  drawn_.resize(n);
  for (int turn = 0; turn < 2; ++turn) done_.emplace_back(session.space_.gpu());
}

// A step that nobody waits for may be on its way.
Decoding::~Decoding() {
  try {
    session_.space_.wait();
  } catch (...) {  // whoever asks the device next hears of it
  }
}

void Decoding::forget_graphs() {
  session_.space_.wait();
  ahead_ = 0;
  graphs_.clear();
}

Decoding::Rows Decoding::rows_at(std::byte* begin, std::byte* seen) const {
  Rows r{};
  const auto take = [&](auto*& to) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(begin);
    begin += static_cast<size_t>(batch_) * sizeof *to;
  };
  take(r.choice);
  take(r.slot);
  take(r.ids);
  take(r.position);
  take(r.used);
  r.seen = reinterpret_cast<int32_t*>(seen);
  return r;
}

// Tokens that were there are kept only where a penalty asks for them: a full list does not grow.
void Decoding::set_choice(int64_t row, const ops::Choice& choice) {
  ops::check_choice(choice);
  ops::Choice& to = host_.choice[row];
  to = choice;
  int32_t* seen = host_.seen + row * seen_stride_;
  to.seen = device_.seen + row * seen_stride_;
  if (choice.repetition_penalty == 1) {
    to.seen_count = seen_stride_;
    return;
  }
  if (choice.seen_count > seen_stride_)
    throw Error(std::to_string(choice.seen_count) + " tokens that were there; this session has room for " + std::to_string(seen_stride_));
  std::copy_n(choice.seen, choice.seen_count, seen);
  seen_.send(static_cast<size_t>(row * seen_stride_) * sizeof *seen, static_cast<size_t>(choice.seen_count) * sizeof *seen);
}

void Decoding::draw(const float* logits, std::span<const ops::Choice> choices, Token* tokens) {
  known_ = false;
  ahead_ = 0;
  const auto rows = static_cast<int64_t>(choices.size());
  for (int64_t r = 0; r < rows; ++r) {
    set_choice(r, choices[static_cast<size_t>(r)]);
    host_.slot[r] = -1;
  }
  state_.send(0, state_bytes_);
  session_.sampling_.execute({rows, logits, device_.choice, tokens_of(0)}, session_.sampling_workspace_.at(0), session_.space_.stream());
  session_.space_.download(drawn_.data(), tokens_of(0), static_cast<size_t>(rows) * sizeof(int32_t));
  for (int64_t r = 0; r < rows; ++r) {
    if (drawn_[static_cast<size_t>(r)] < 0) refuse_nan();
    tokens[r] = drawn_[static_cast<size_t>(r)];
  }
}

bool Decoding::bring_up(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, int64_t rows) {
  bool same = known_;
  const auto put = [&](auto& to, auto value) {
    same = same && to == value;
    to = value;
  };
  size_t part = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const bool active = part < parts.size() && parts[part].sequence == row;
    const int64_t past = session_.length(row);
    put(host_.ids[row], active ? parts[part].tokens[0] : 0);
    put(host_.position[row], active ? static_cast<int32_t>(past) : 0);
    put(host_.used[row], active ? static_cast<int32_t>(past + 1) : 1);
    put(host_.slot[row], active ? session_.place(row, past) : int64_t{-1});
    const ops::Choice wanted = active ? choices[part] : ops::Choice{};
    const ops::Choice& has = host_.choice[row];
    const bool penalty = wanted.repetition_penalty != 1;
    const bool drawn = active && wanted.temperature > 0;  // by a number that depends on these
    const bool alike = same && wanted.temperature == has.temperature && wanted.top_k == has.top_k && wanted.top_p == has.top_p &&
                       wanted.repetition_penalty == has.repetition_penalty &&
                       (!drawn || (wanted.seed == has.seed && wanted.request == has.request && wanted.position == has.position)) &&
                       (!penalty || wanted.seen_count == has.seen_count) &&
                       (!penalty || std::equal(wanted.seen, wanted.seen + wanted.seen_count, host_.seen + row * seen_stride_));
    if (!alike) {
      same = false;
      set_choice(row, wanted);
    }
    if (active) ++part;
  }
  return same;
}

void Decoding::execute(int64_t rows, int turn) {
  const auto* const table = reinterpret_cast<const int32_t*>(session_.inputs_.at(session_.table_));
  const StepRows in{device_.ids, device_.position, nullptr, device_.used, table, device_.slot};
  session_.layers(in, spans_, rows, rows, 0);
  const ops::Advance advance{device_.ids, device_.position, device_.used, device_.slot, device_.seen, seen_stride_};
  session_.sampling_.execute({rows, session_.logits_, device_.choice, tokens_of(turn), advance}, session_.sampling_workspace_.at(0),
                             session_.space_.stream());
}

const cuda::Graph* Decoding::graphs_of(int64_t rows) {
  const auto found = graphs_.find(rows);
  if (found != graphs_.end()) return found->second.data();
  // Once as it is, so that all kernels are there, with rows that change nothing.
  known_ = false;
  ahead_ = 0;
  for (int64_t row = 0; row < batch_; ++row) {
    host_.ids[row] = host_.position[row] = 0;
    host_.used[row] = 1;
    host_.slot[row] = -1;
    host_.choice[row] = {};
  }
  state_.send(0, state_bytes_);
  spans_.clear();
  for (int64_t row = 0; row < rows; ++row) spans_.push_back({row, 0, 1});
  execute(rows, 0);
  session_.space_.wait();
  std::vector<cuda::Graph> both;
  for (int turn = 0; turn < 2; ++turn) both.emplace_back(session_.space_.work(), [&] { execute(rows, turn); });
  return graphs_.emplace(rows, std::move(both)).first->second.data();
}

void Decoding::launch(const cuda::Graph* graphs) {
  graphs[turn_].launch(session_.space_.stream());
  done_[static_cast<size_t>(turn_)].record(session_.space_.stream());
}

// Whether the cache has room for a token behind those of this step, in the row behind theirs.
bool Decoding::fits_once_more(std::span<const NewTokens> parts) const {
  const SessionOptions& o = session_.options();
  return std::all_of(parts.begin(), parts.end(), [&](const NewTokens& p) {
    const int64_t next = session_.length(p.sequence) + 1;
    return next < o.context && (o.page_size == 0 || next % o.page_size != 0);
  });
}

void Decoding::step(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, Token* tokens, bool more) {
  // As few rows as there are sequences, but not a graph for each number.
  int64_t rows = 1;
  while (rows <= parts.back().sequence) rows *= 2;
  rows = std::min(rows, session_.options().batch);
  session_.send_table();
  const cuda::Graph* graphs = graphs_of(rows);
  const bool same = bring_up(parts, choices, rows), on_its_way = same && ahead_ == rows;
  ahead_ = 0;
  known_ = false;  // unless all goes well
  if (!on_its_way) {
    if (!same) state_.send(0, state_bytes_);
    launch(graphs);
  }
  const int turn = turn_;
  turn_ = 1 - turn_;
  const bool goes_on = more && same && fits_once_more(parts);
  if (goes_on) {
    launch(graphs);
    done_[static_cast<size_t>(turn)].seconds_to(done_[static_cast<size_t>(turn)]);  // waits for this step alone
  }
  (goes_on ? reading_ : session_.space_).download(drawn_.data(), tokens_of(turn), static_cast<size_t>(rows) * sizeof(int32_t));
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t row = parts[i].sequence;
    const int32_t token = drawn_[static_cast<size_t>(row)];
    if (token < 0) refuse_nan();
    tokens[i] = token;
    host_.ids[row] = token;
    ++host_.position[row];
    ++host_.used[row];
    ++host_.slot[row];
    ops::Choice& choice = host_.choice[row];
    if (choice.seen_count < seen_stride_) host_.seen[row * seen_stride_ + choice.seen_count++] = token;
    ++choice.position;
  }
  known_ = true;
  if (goes_on) ahead_ = rows;
}

}  // namespace fattn::gpt2
