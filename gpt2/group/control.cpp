#include "gpt2/group/control.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "files/interrupt.h"
#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/group/meeting.h"

namespace fattn::gpt2 {
namespace {

using Clock = std::chrono::steady_clock;
using files::printable;

constexpr auto kTick = std::chrono::milliseconds(50);
constexpr auto kAsleep = std::chrono::seconds(2);     // without a tick: this process itself was stopped, and knows nothing of the others
constexpr auto kLastWords = std::chrono::seconds(2);  // that sending them may take

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

// What a rank does, as it tells the others.
struct Status {
  int64_t step = 0;
  uint64_t moves = 0;  // changes of any of this
  Doing doing = Doing::kPreparing;
  bool waits = false;
};

template <class T>
void put(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
template <class T>
T take(const std::string& from, size_t& at) {
  T value{};
  if (from.size() - at < sizeof value) throw Error("a message is too short");
  std::memcpy(&value, from.data() + at, sizeof value);
  at += sizeof value;
  return value;
}

std::string text_of(const Status& status) {
  std::string text;
  put(text, status.step);
  put(text, status.moves);
  put(text, static_cast<uint8_t>(status.doing));
  put(text, static_cast<uint8_t>(status.waits));
  return text;
}
Status status_of(const std::string& text) {
  size_t at = 0;
  Status status;
  status.step = take<int64_t>(text, at);
  status.moves = take<uint64_t>(text, at);
  const auto doing = take<uint8_t>(text, at);
  if (doing > static_cast<uint8_t>(Doing::kKeeping)) throw Error("a message says what no rank does");
  status.doing = static_cast<Doing>(doing);
  status.waits = take<uint8_t>(text, at) != 0;
  return status;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}
std::string step_text(const Status& status) { return status.step > 0 ? " at step " + std::to_string(status.step) : ""; }

}  // namespace

struct Control::State {
  struct Peer {
    Peer(Connection c, int number) : connection(std::move(c)), rank(number) {}

    Connection connection;
    int rank = 0;
    Clock::time_point heard = Clock::now(), since = Clock::now();  // since: of the status
    Status status;
    bool said_bye = false;
    std::optional<std::string> part;
  };

  explicit State(const ControlOptions& o);
  ~State();

  bool leads() const { return options.launch.rank == 0; }
  void work();
  void tick();
  void receive(Peer& peer);
  void take_message(Peer& peer, const Message& message);
  void complete_exchange();
  void watch();
  void fail(const std::string& why);
  void wake() const {
    const uint64_t one = 1;
    if (write(waker, &one, sizeof one) < 0) return;  // it is awake already
  }

  const ControlOptions options;
  std::vector<Peer> peers;
  int waker = -1;
  std::mutex mutex;
  std::condition_variable changed;
  Status own;
  Clock::time_point own_since = Clock::now(), ticked = Clock::now(), beaten{}, failed_at{}, ended_at{};
  uint64_t exchanges = 0;  // that are done
  std::optional<std::string> own_part;
  std::vector<std::string> whole;
  std::string failure;
  bool taken = false;  // this process has taken note of the failure
  bool ended = false;  // nothing is said any more but what waits to be sent
  std::thread worker;
};

Control::State::State(const ControlOptions& o) : options(o) {
  std::vector<Connection> connections = meet(o.launch, o.start_timeout);
  for (size_t i = 0; i < connections.size(); ++i) peers.emplace_back(std::move(connections[i]), leads() ? static_cast<int>(i) + 1 : 0);
  waker = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (waker < 0) throw Error(std::string("no event can be made: ") + std::strerror(errno));
  const files::SignalsBlocked blocked;  // they are the main thread's
  worker = std::thread([this] { work(); });
}

Control::State::~State() {
  {
    const std::lock_guard lock(mutex);
    ended = true;
    ended_at = Clock::now();
  }
  wake();
  worker.join();
  close(waker);
}

void Control::State::work() {
  for (;;) {
    std::vector<pollfd> waiting = {{waker, POLLIN, 0}};
    {
      const std::lock_guard lock(mutex);
      const bool sends = std::any_of(peers.begin(), peers.end(), [](const Peer& p) { return !p.connection.closed() && p.connection.has_to_send(); });
      if (ended && (!sends || Clock::now() - ended_at > kLastWords)) return;
      for (const Peer& peer : peers)
        if (!peer.connection.closed())
          waiting.push_back({peer.connection.descriptor(), static_cast<short>(POLLIN | (peer.connection.has_to_send() ? POLLOUT : 0)), 0});
    }
    poll(waiting.data(), waiting.size(), static_cast<int>(kTick.count()));
    uint64_t woken = 0;
    if (read(waker, &woken, sizeof woken) < 0) woken = 0;
    std::string why;
    {
      const std::lock_guard lock(mutex);
      tick();
      if (!failure.empty() && !taken && !ended && seconds_since(failed_at) > options.timeout) {
        taken = true;
        why = failure;
      }
    }
    if (!why.empty() && options.abandon) options.abandon(why);
  }
}

void Control::State::tick() {
  const Clock::time_point now = Clock::now();
  if (now - ticked > kAsleep) {
    own_since = now;
    for (Peer& peer : peers) peer.heard = peer.since = now;
  }
  ticked = now;
  if (!ended && std::chrono::duration<double>(now - beaten).count() > std::min(0.5, options.timeout / 8)) {
    beaten = now;
    for (Peer& peer : peers) peer.connection.send(MessageKind::kBeat, text_of(own));
  }
  for (Peer& peer : peers) receive(peer);
  complete_exchange();
  for (Peer& peer : peers)
    if (!peer.connection.closed() && peer.connection.has_to_send()) receive(peer);
  if (failure.empty() && !ended) watch();
}

void Control::State::receive(Peer& peer) {
  if (peer.connection.closed()) return;
  const bool open = peer.connection.work();
  try {
    while (const auto message = peer.connection.next()) take_message(peer, *message);
  } catch (const Error& e) {
    fail("rank " + std::to_string(peer.rank) + " sends what cannot be read: " + e.what());
    peer.connection.close();
    return;
  }
  if (open) return;
  peer.connection.close();
  if (!peer.said_bye)
    fail("rank " + std::to_string(peer.rank) + " has ended without a word" + step_text(peer.status) + " (killed, or its machine is gone)");
}

void Control::State::take_message(Peer& peer, const Message& message) {
  peer.heard = Clock::now();
  if (message.kind == MessageKind::kBeat) {
    const Status status = status_of(message.text);
    if (status.moves != peer.status.moves) peer.since = peer.heard;
    peer.status = status;
  } else if (message.kind == MessageKind::kPart && leads()) {
    size_t at = 0;
    const auto number = take<uint64_t>(message.text, at);
    if (number != exchanges + 1 || peer.part)
      throw Error("exchange " + std::to_string(number) + ", when " + std::to_string(exchanges + 1) + " is due");
    peer.part = message.text.substr(at);
  } else if (message.kind == MessageKind::kWhole && !leads()) {
    size_t at = 0;
    if (take<uint64_t>(message.text, at) != exchanges + 1 || !own_part) throw Error("the result of an exchange that nobody waits for");
    std::vector<std::string> parts(static_cast<size_t>(options.launch.ranks));
    for (std::string& part : parts) {
      const auto bytes = take<uint32_t>(message.text, at);
      if (message.text.size() - at < bytes) throw Error("a message is too short");
      part = message.text.substr(at, bytes);
      at += bytes;
    }
    whole = std::move(parts);
    own_part.reset();
    ++exchanges;
    changed.notify_all();
  } else if (message.kind == MessageKind::kFailed) {
    fail(leads() ? "rank " + std::to_string(peer.rank) + " has ended: " + printable(message.text) : printable(message.text));
    peer.said_bye = true;
  } else if (message.kind == MessageKind::kBye) {
    peer.said_bye = true;
  } else if (message.kind != MessageKind::kWelcome) {
    throw Error("a message that is not for this rank");
  }
}

void Control::State::complete_exchange() {
  if (!leads() || !own_part || !std::all_of(peers.begin(), peers.end(), [](const Peer& peer) { return peer.part.has_value(); })) return;
  std::string text;
  put(text, ++exchanges);
  whole = {std::move(*own_part)};
  own_part.reset();
  for (Peer& peer : peers) {
    whole.push_back(std::move(*peer.part));
    peer.part.reset();
  }
  for (const std::string& part : whole) {
    put(text, static_cast<uint32_t>(part.size()));
    text += part;
  }
  for (Peer& peer : peers) peer.connection.send(MessageKind::kWhole, text);
  changed.notify_all();
}

// Who has been silent for too long; and, on rank 0, who lets others wait.
void Control::State::watch() {
  const auto text_of = [](double seconds) { return std::to_string(static_cast<int64_t>(seconds)) + " s"; };
  const std::string limit = text_of(options.timeout);
  std::vector<int> silent;
  const Status* last = nullptr;  // of the first that is silent
  for (const Peer& peer : peers)
    if (!peer.said_bye && !peer.connection.closed() && seconds_since(peer.heard) > options.timeout) {
      if (silent.empty()) last = &peer.status;
      silent.push_back(peer.rank);
    }
  if (!silent.empty()) {
    fail(ranks_text(silent) + (silent.size() == 1 ? " has" : " have") + " said nothing for " + limit + step_text(*last) +
         " (stopped, or the machine cannot be reached)");
    return;
  }
  if (!leads()) return;
  std::vector<int> waiting, holding;
  // Where plans are made, or NCCL comes up, a rank may wait as long as for the beginning.
  const auto limit_of = [&](const Status& status) { return status.doing == Doing::kStep ? options.timeout : options.start_timeout; };
  const auto look = [&](int rank, const Status& status, Clock::time_point since) {
    if (seconds_since(since) <= limit_of(status)) return;
    if (status.waits)
      waiting.push_back(rank);
    else if (status.doing == Doing::kStep)
      holding.push_back(rank);
  };
  look(0, own, own_since);
  for (const Peer& peer : peers) look(peer.rank, peer.status, peer.since);
  if (static_cast<int>(waiting.size()) == options.launch.ranks)
    fail("all ranks have waited for an exchange for " + text_of(limit_of(own)) + step_text(own) + ": the connection between their GPUs is lost");
  else if (!waiting.empty() && !holding.empty())
    fail(ranks_text(holding) + (holding.size() == 1 ? " has" : " have") + " stood still for " + limit + step_text(own) + " while " +
         ranks_text(waiting) + (waiting.size() == 1 ? " waits" : " wait"));
}

void Control::State::fail(const std::string& why) {
  if (!failure.empty() || ended) return;
  failure = why;
  failed_at = Clock::now();
  if (leads())
    for (Peer& peer : peers) peer.connection.send(MessageKind::kFailed, why);
  changed.notify_all();
}

Control::Control(const ControlOptions& options) : state_(std::make_unique<State>(options)) {}
Control::~Control() = default;

int Control::rank() const { return state_->options.launch.rank; }
int Control::ranks() const { return state_->options.launch.ranks; }

std::vector<std::string> Control::exchange(const std::string& mine) {
  check();
  State& s = *state_;
  const Waits waits(*this);
  std::unique_lock lock(s.mutex);
  const uint64_t number = s.exchanges + 1;
  s.own_part = mine;
  if (!s.leads()) {
    std::string text;
    put(text, number);
    s.peers.front().connection.send(MessageKind::kBeat, text_of(s.own));  // at which step
    s.peers.front().connection.send(MessageKind::kPart, text + mine);
  }
  s.wake();
  s.changed.wait(lock, [&] { return s.exchanges >= number || !s.failure.empty(); });
  if (s.exchanges >= number) return std::move(s.whole);
  lock.unlock();
  check();
  return {};
}

void Control::doing(Doing what, int64_t step) {
  const std::lock_guard lock(state_->mutex);
  state_->own.doing = what;
  state_->own.step = step;
  ++state_->own.moves;
  state_->own_since = Clock::now();
}

void Control::waits(bool so) {
  const std::lock_guard lock(state_->mutex);
  state_->own.waits = so;
  ++state_->own.moves;
  state_->own_since = Clock::now();
}

void Control::check() {
  const std::lock_guard lock(state_->mutex);
  if (state_->failure.empty()) return;
  state_->taken = true;
  throw Error(state_->failure);
}

void Control::fail(const std::string& why) noexcept {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  if (!s.failure.empty()) return;  // the others know
  s.failure = why;
  s.taken = true;
  const std::string text = s.leads() ? "rank 0 has ended: " + why : why;
  for (State::Peer& peer : s.peers) peer.connection.send(MessageKind::kFailed, text);
  s.wake();
}

void Control::finish() {
  exchange("");
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  for (State::Peer& peer : s.peers) {
    peer.connection.send(MessageKind::kBye, "");
    peer.said_bye = true;
  }
  s.wake();
}

}  // namespace fattn::gpt2
