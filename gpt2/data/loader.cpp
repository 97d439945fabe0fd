// A thread of its own fills batches that wait in a ring; where an epoch is does not depend on how far ahead it has read.
#include "gpt2/data/loader.h"

#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "files/interrupt.h"
#include "gpt2/data/permutation.h"
#include "gpt2/data/rows.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
struct Loader::State {
  struct Buffer {
    std::vector<int32_t> numbers;  // ids, targets, positions, documents
    Batch batch;
    std::exception_ptr error;
  };

  State(const std::vector<std::string>& paths, const LoaderOptions& o, LoaderPosition from);
  ~State();

  LoaderPosition after(LoaderPosition p) const {
    return p.batch + options.ranks < batches ? LoaderPosition{p.epoch, p.batch + options.ranks} : LoaderPosition{p.epoch + 1, 0};
  }
  void fill(LoaderPosition p, Buffer& buffer);
  void read_ahead();

  const LoaderOptions options;
  TokenSet set;
  Rows rows;
  int64_t batches = 0;
  LoaderPosition next;  // what the caller gets next

  // Of the ring one buffer is the caller's; the others are filled or wait to be.
  std::array<Buffer, 3> ring;
  uint64_t filled = 0, taken = 0;  // buffers, counted from the beginning
  LoaderPosition ahead;
  bool ended = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::thread reader;
};

Loader::State::State(const std::vector<std::string>& paths, const LoaderOptions& o, LoaderPosition from)
    : options(o), set(paths), rows(set, o.seqlen), next(from), ahead(from) {
  if (o.sequences < 1 || o.seqlen < 1 || o.ranks < 1 || o.rank < 0 || o.rank >= o.ranks)
    throw Error("a batch of " + std::to_string(o.sequences) + " sequences of " + std::to_string(o.seqlen) + " tokens for rank " +
                std::to_string(o.rank) + " of " + std::to_string(o.ranks) + " cannot be; sizes are 1 or more, ranks count from 0");
  set.require_fits(o.vocab_size);
  if (set.tokens() < static_cast<uint64_t>(o.seqlen))
    throw Error("the data has " + std::to_string(set.tokens()) + " tokens, less than one sequence of " + std::to_string(o.seqlen) +
                "; give more text, or a smaller seqlen");
  const auto at_once = static_cast<uint64_t>(o.sequences);
  batches = static_cast<int64_t>((rows.count() + at_once - 1) / at_once);
  if (from.epoch < 0 || from.batch < 0 || from.batch >= batches)
    throw Error("there is no batch " + std::to_string(from.batch) + " in epoch " + std::to_string(from.epoch) + ": an epoch of this data has " +
                std::to_string(batches) + "; go on with the data and the batch size of the checkpoint");
  const auto size = static_cast<size_t>(o.sequences) * static_cast<size_t>(o.seqlen);
  for (Buffer& buffer : ring) {
    buffer.numbers.resize(4 * size);
    int32_t* const at = buffer.numbers.data();
    buffer.batch = {o.sequences, o.seqlen, at, at + size, at + 2 * size, at + 3 * size, 0};
  }
  const files::SignalsBlocked blocked;  // they are the main thread's
  reader = std::thread([this] { read_ahead(); });
}

Loader::State::~State() {
  {
    const std::lock_guard lock(mutex);
    ended = true;
  }
  changed.notify_all();
  if (reader.joinable()) reader.join();
}

void Loader::State::fill(LoaderPosition p, Buffer& buffer) {
  const auto n = static_cast<uint64_t>(options.seqlen), size = static_cast<uint64_t>(options.sequences) * n;
  const Permutation order(rows.count(), scrambled(options.seed ^ scrambled(static_cast<uint64_t>(p.epoch))));
  const auto sequences = static_cast<uint64_t>(options.sequences), batch = static_cast<uint64_t>(p.batch + options.rank);
  buffer.batch.target_count = 0;
  buffer.batch.documents = nullptr;
  for (uint64_t s = 0; s < sequences; ++s) {
    const uint64_t i = batch * sequences + s;
    int32_t* const at = buffer.numbers.data() + s * n;
    const Row row{at, at + size, at + 2 * size, at + 3 * size};
    if (i < rows.count())
      buffer.batch.target_count += rows.fill(options.shuffle ? order(i) : i, row);
    else
      rows.pad(row);
    // Attention without a mask of documents is faster, and has more algorithms.
    if (row.documents[n - 1] != row.documents[0]) buffer.batch.documents = buffer.numbers.data() + 3 * size;
  }
}

void Loader::State::read_ahead() {
  for (;;) {
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return ended || filled < taken + ring.size() - 1; });
      if (ended) return;
    }
    Buffer& buffer = ring[filled % ring.size()];
    try {
      fill(ahead, buffer);
    } catch (...) {
      buffer.error = std::current_exception();
    }
    const bool failed = buffer.error != nullptr;
    ahead = after(ahead);
    {
      const std::lock_guard lock(mutex);
      ++filled;
    }
    changed.notify_all();
    if (failed) return;
  }
}

Loader::Loader(const std::vector<std::string>& paths, const LoaderOptions& options, LoaderPosition from)
    : state_(std::make_unique<State>(paths, options, from)) {}
Loader::~Loader() = default;

const Batch& Loader::next() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.changed.wait(lock, [&s] { return s.taken < s.filled; });
  State::Buffer& buffer = s.ring[s.taken % s.ring.size()];
  if (buffer.error) std::rethrow_exception(buffer.error);  // and again, if the caller asks again
  ++s.taken;
  lock.unlock();
  s.changed.notify_all();
  s.next = s.after(s.next);
  return buffer.batch;
}

LoaderPosition Loader::position() const { return state_->next; }
int64_t Loader::batches_an_epoch() const { return state_->batches; }
int64_t Loader::tokens() const { return static_cast<int64_t>(state_->set.tokens()); }
const TokenSet& Loader::data() const { return state_->set; }
uint64_t Loader::fingerprint() const { return state_->set.fingerprint(); }

}  // namespace fattn::gpt2
