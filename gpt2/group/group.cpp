#include "gpt2/group/group.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "fattn/error.hpp"
#include "files/printable.h"
#include "gpt2/error.h"
#include "ops/process_sum.h"

namespace fattn::gpt2 {
namespace {

using files::printable;

std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text.append(name).append(1, '\0').append(value).append(1, '\0');
  return text;
}
Facts facts_of(const std::string& text) {
  Facts facts;
  for (size_t at = 0; at < text.size();) {
    const size_t middle = text.find('\0', at), end = middle == std::string::npos ? middle : text.find('\0', middle + 1);
    if (end == std::string::npos) break;
    facts.emplace_back(text.substr(at, middle - at), text.substr(middle + 1, end - middle - 1));
    at = end + 1;
  }
  return facts;
}

}  // namespace

// Parts that follow each other in memory wait until they are worth a sum: every sum costs its start.
class Group::Sums final : public GradientExchange {
 public:
  Sums(Control& control, const ops::Device& device, const std::vector<std::byte>& id, int64_t bucket)
      : control_(control),
        sum_(device, {id, control.rank(), control.ranks(), [this] { alive(); }}),
        bucket_(std::max<int64_t>(bucket / static_cast<int64_t>(sizeof(float)), 1)) {
    waits_.reset();  // for all to join
  }

  void ready(float* gradients, int64_t begin, int64_t end, void* stream) override {
    if (begin == end) return;
    if (end_ == begin) {
      end_ = end;
    } else if (begin_ == end) {
      begin_ = begin;
    } else {
      start(gradients, stream);
      begin_ = begin;
      end_ = end;
    }
    gradients_ = gradients;
    if (end_ - begin_ >= bucket_) start(gradients, stream);
  }

  void finish(void* stream) override {
    start(gradients_, stream);
    call([&](ops::ProcessSum& sum) { sum.finish(stream); });
  }

  // Within `what` this process waits for the others from the moment on that it asks whether they live. Also where an exchange begins: the first one
  // connects to its peers. What does not come back from NCCL asks nothing, and stands still.
  template <class What>
  void call(const What& what) {
    const struct End {
      std::optional<Control::Waits>& waits;
      ~End() { waits.reset(); }
    } end{waits_};
    what(sum_);
  }

 private:
  void alive() {
    if (!waits_) waits_.emplace(control_);
    control_.check();
  }
  void start(float* gradients, void* stream) {
    if (begin_ < end_) call([&](ops::ProcessSum& sum) { sum.begin(gradients + begin_, end_ - begin_, stream); });
    begin_ = end_ = -1;
  }

  Control& control_;
  std::optional<Control::Waits> waits_;  // while it waits
  ops::ProcessSum sum_;
  const int64_t bucket_;           // numbers
  int64_t begin_ = -1, end_ = -1;  // what waits
  float* gradients_ = nullptr;
};

// Rows travel beside gradients, over one communicator and in one order on all: two of them could wait for each other.
class Group::Rows final : public RingTransport {
 public:
  explicit Rows(Group& group) : group_(group) {}
  int rank() const override { return group_.share_.context_rank; }
  int ranks() const override { return group_.share_.context_ranks; }

  void begin(const std::vector<RingPiece>& pieces, void* stream) override {
    pieces_ = pieces;
    for (RingPiece& piece : pieces_) piece.peer = group_.share_.rank_of(piece.peer);
    sums().call([&](ops::ProcessSum& processes) { processes.begin_exchange(pieces_, stream); });
  }
  void finish(void* stream) override {
    sums().call([&](ops::ProcessSum& processes) { processes.finish_exchange(stream); });
  }
  void settle() override {
    sums().call([](ops::ProcessSum& processes) { processes.settle(); });
  }

 private:
  Sums& sums() const {
    if (!group_.sums_) throw Error("rows are exchanged before the processes are connected");
    return *group_.sums_;
  }
  Group& group_;
  std::vector<RingPiece> pieces_;
};

Group::Group(const ControlOptions& options)
    : control_(options), share_{0, 1, control_.rank(), control_.ranks()}, context_(std::make_unique<Rows>(*this)) {}
Group::~Group() = default;

void Group::agree(const Facts& mine) {
  const std::vector<std::string> all = control_.exchange(text_of(mine));
  const Facts first = facts_of(all.front());
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const Facts other = facts_of(all[rank]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (i < first.size() && i < other.size() && first[i] == other[i]) continue;
      const auto told = [i](const Facts& facts) {
        return i < facts.size() ? printable(facts[i].first, 60) + " " + printable(facts[i].second, 200) : std::string("none");
      };
      throw Error("rank " + std::to_string(rank) + " has " + told(other) + ", rank 0 has " + told(first) +
                  "; all processes of a run must have the same");
    }
  }
}

void Group::connect(const Compute& compute, int64_t bucket_bytes) {
  std::string mine;
  if (leads()) {
    const std::vector<std::byte> id = ops::ProcessSum::new_id();
    mine.assign(reinterpret_cast<const char*>(id.data()), id.size());
  }
  const std::string told = control_.exchange(mine).front();
  std::vector<std::byte> id(told.size());
  std::memcpy(id.data(), told.data(), told.size());
  sums_ = std::make_unique<Sums>(control_, device_of(compute), id, bucket_bytes);
}

GradientExchange& Group::gradients() { return *sums_; }

std::vector<std::vector<double>> Group::all(const std::vector<double>& mine) {
  const std::vector<std::string> told = control_.exchange({reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double)});
  std::vector<std::vector<double>> numbers;
  for (const std::string& text : told) {
    if (text.size() % sizeof(double) != 0) throw Error("an exchange of numbers has " + std::to_string(text.size()) + " bytes");
    numbers.emplace_back(text.size() / sizeof(double));
    if (!text.empty()) std::memcpy(numbers.back().data(), text.data(), text.size());
  }
  return numbers;
}

}  // namespace fattn::gpt2
