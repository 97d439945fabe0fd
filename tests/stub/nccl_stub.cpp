// NCCL for tests: sums and exchanges of arrays in memory of the host, over processes of this machine. Rank 0 adds in the order of ranks and sends the
// sum back, each communicator on a thread of its own, so that callers go on meanwhile, as with a GPU. STUB_NCCL_KILL=RANK:N ends the process of a
// rank at its N-th sum or exchange, STUB_NCCL_STALL=RANK:N never comes back from that call there, STUB_NCCL_LOSE=RANK:N never comes to its end,
// STUB_NCCL_CONNECT=RANK:N is for ever on the way to its peers, STUB_NCCL_SPOIL=RANK:N makes it wrong on this rank alone.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl_peers.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Status { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
static_assert(sizeof(Config) == 24);

// The socket of an id that this process has made; whoever asked for the id is rank 0.
int& listener() {
  static int socket = -1;
  return socket;
}

sockaddr_un address_of(const Id& id, socklen_t& size) { return socket_address(std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes)), size); }

// Whether the variable says that it happens to this rank at this sum.
bool happens(const char* variable, int rank, int64_t sum) {
  const char* value = std::getenv(variable);
  int of = 0;
  long long at = 0;
  return value && std::sscanf(value, "%d:%lld", &of, &at) == 2 && of == rank && at == sum;
}

}  // namespace

struct Communicator {
  struct Sum {
    float* x;
    size_t count;
    std::vector<StubPiece> pieces;  // an exchange in place of a sum
  };
  StubPeers others;
  int rank = 0, ranks = 1;
  std::vector<int> peers;  // of rank 0 all others in their order; of these rank 0
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Sum> queue;
  bool joined = false, ended = false;
  int64_t sums = 0, begun = 0;  // of the worker, of the caller
  std::atomic<int> status{kSuccess};
  std::thread worker;

  bool join(const Id& id) {
    if (rank == 0) {
      peers.assign(static_cast<size_t>(ranks) - 1, -1);
      for (int i = 1; i < ranks; ++i) {
        for (;;) {  // until the communicator is aborted
          pollfd waiting{listener(), POLLIN, 0};
          if (poll(&waiting, 1, 20) > 0) break;
          const std::lock_guard lock(mutex);
          if (ended) return false;
        }
        const int socket = accept(listener(), nullptr, nullptr);
        int who = 0;
        if (socket < 0 || !transfer(socket, &who, sizeof who, false) || who < 1 || who >= ranks) return false;
        peers[static_cast<size_t>(who) - 1] = socket;
      }
      char go = 1;
      for (const int peer : peers)
        if (!transfer(peer, &go, 1, true)) return false;
      return true;
    }
    socklen_t size = 0;
    const sockaddr_un address = address_of(id, size);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    {
      const std::lock_guard lock(mutex);
      peers = {socket};
    }
    char go = 0;
    return connect(socket, reinterpret_cast<const sockaddr*>(&address), size) == 0 && transfer(socket, &rank, sizeof rank, true) &&
           transfer(socket, &go, 1, false);
  }

  bool add(const Sum& sum) {
    uint64_t count = sum.count;
    if (rank > 0)
      return transfer(peers[0], &count, sizeof count, true) && transfer(peers[0], sum.x, count * sizeof(float), true) &&
             transfer(peers[0], sum.x, count * sizeof(float), false);
    std::vector<float> part(sum.count);
    for (const int peer : peers) {
      if (!transfer(peer, &count, sizeof count, false) || count != sum.count || !transfer(peer, part.data(), count * sizeof(float), false))
        return false;
      for (size_t i = 0; i < sum.count; ++i) sum.x[i] += part[i];
    }
    for (const int peer : peers)
      if (!transfer(peer, sum.x, sum.count * sizeof(float), true)) return false;
    return true;
  }

  void work(const Id& id) {
    if (!join(id)) {
      status = kRemoteError;
      return;
    }
    std::unique_lock lock(mutex);
    joined = true;
    for (;;) {
      changed.wait(lock, [this] { return ended || !queue.empty(); });
      if (ended) return;
      const Sum sum = queue.front();
      ++sums;
      lock.unlock();
      if (happens("STUB_NCCL_KILL", rank, sums)) std::raise(SIGKILL);
      const bool lost = happens("STUB_NCCL_LOSE", rank, sums) || happens("STUB_NCCL_CONNECT", rank, sums);
      while (lost && !ended_now()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const bool fine = sum.pieces.empty() ? add(sum) : others.exchange(sum.pieces);
      if (fine && sum.pieces.empty() && happens("STUB_NCCL_SPOIL", rank, sums)) sum.x[0] += 1;
      lock.lock();
      queue.pop_front();
      if (!fine) {
        status = kRemoteError;
        return;
      }
    }
  }
  bool ended_now() {
    const std::lock_guard lock(mutex);
    return ended;
  }

  void end() {
    {
      const std::lock_guard lock(mutex);
      ended = true;
      for (const int peer : peers) shutdown(peer, SHUT_RDWR);
    }
    changed.notify_all();
    others.end();
    worker.join();
    for (const int peer : peers) close(peer);
  }
};

STUB_EXPORT int fattn_nccl_in_host_memory() { return 1; }
STUB_EXPORT int ncclGetVersion(int* version) {
  *version = 21400;
  return kSuccess;
}
STUB_EXPORT const char* ncclGetErrorString(int status) { return status == kRemoteError ? "remote process exited" : "an error of the stub"; }
STUB_EXPORT const char* ncclGetLastError(Communicator*) { return "the stub says no more"; }

STUB_EXPORT int ncclGetUniqueId(Id* id) {
  static std::atomic<int> count{0};
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::snprintf(id->bytes, sizeof id->bytes, "fattn-nccl-stub-%d-%d", static_cast<int>(getpid()), count++);
  socklen_t size = 0;
  const sockaddr_un address = address_of(*id, size);
  listener() = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  return bind(listener(), reinterpret_cast<const sockaddr*>(&address), size) == 0 && listen(listener(), 64) == 0 ? kSuccess : kSystemError;
}

STUB_EXPORT int ncclCommInitRankConfig(Communicator** communicator, int ranks, Id id, int rank, Config* config) {
  if (!config || config->size != sizeof *config || config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= ranks)
    return kInvalidArgument;
  auto* made = new Communicator;
  made->rank = rank;
  made->ranks = ranks;
  if (!made->others.listen_as(std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes)), rank)) {
    delete made;
    return kSystemError;
  }
  made->worker = std::thread([made, id] { made->work(id); });
  *communicator = made;
  return kInProgress;
}
STUB_EXPORT int ncclCommGetAsyncError(Communicator* c, int* status) {
  const std::lock_guard lock(c->mutex);
  *status = c->status != kSuccess ? c->status.load() : c->joined && c->queue.empty() ? kSuccess : kInProgress;
  return kSuccess;
}
STUB_EXPORT int ncclCommFinalize(Communicator*) { return kSuccess; }
STUB_EXPORT int ncclCommAbort(Communicator* c) {
  c->end();
  delete c;
  return kSuccess;
}
STUB_EXPORT int ncclCommDestroy(Communicator* c) { return ncclCommAbort(c); }

STUB_EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* c, void*) {
  if (type != 7 || operation != 0 || from != to) return kInvalidArgument;
  ++c->begun;
  while (happens("STUB_NCCL_STALL", c->rank, c->begun)) std::this_thread::sleep_for(std::chrono::seconds(1));
  {
    const std::lock_guard lock(c->mutex);
    c->queue.push_back({static_cast<float*>(to), count, {}});
  }
  c->changed.notify_all();
  return happens("STUB_NCCL_CONNECT", c->rank, c->begun) ? kInProgress : kSuccess;
}

// Between groupStart and groupEnd pieces are kept; then they are one exchange.
namespace {
struct Open {
  Communicator* communicator = nullptr;
  std::vector<StubPiece> pieces;
};
thread_local Open open_group;

int take(const void* data, size_t bytes, int type, int peer, Communicator* c, bool sent) {
  if (type != 0 || peer < 0 || peer >= c->ranks || peer == c->rank) return kInvalidArgument;
  open_group.communicator = c;
  open_group.pieces.push_back({const_cast<void*>(data), bytes, peer, sent});
  return kSuccess;
}
}  // namespace

STUB_EXPORT int ncclGroupStart() { return kSuccess; }
STUB_EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Communicator* c, void*) {
  return take(from, count, type, peer, c, true);
}
STUB_EXPORT int ncclRecv(void* to, size_t count, int type, int peer, Communicator* c, void*) { return take(to, count, type, peer, c, false); }
STUB_EXPORT int ncclGroupEnd() {
  Communicator* const c = open_group.communicator;
  if (!c) return kSuccess;
  ++c->begun;
  while (happens("STUB_NCCL_STALL", c->rank, c->begun)) std::this_thread::sleep_for(std::chrono::seconds(1));
  {
    const std::lock_guard lock(c->mutex);
    c->queue.push_back({nullptr, 0, std::move(open_group.pieces)});
  }
  open_group = Open{};
  c->changed.notify_all();
  return happens("STUB_NCCL_CONNECT", c->rank, c->begun) ? kInProgress : kSuccess;
}
