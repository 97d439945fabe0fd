// A signal handler may call little more than unlink and _exit, so the names lie in a fixed table.
#include "files/interrupt.h"

#include <unistd.h>
#include <climits>

#include <atomic>
#include <cstring>
#include <stdexcept>

namespace fattn::files {
namespace {

struct Slot {
  enum State { kFree, kFilling, kTaken };
  std::atomic<int> state{kFree};
  char path[PATH_MAX];
};
// A handler receives nothing but the signal's number: the one place where a global table is needed.
Slot slots[128];
static_assert(std::atomic<int>::is_always_lock_free);

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

}  // namespace

extern "C" void end_program(int signal) {
  for (Slot& slot : slots)
    if (slot.state.load() == Slot::kTaken) unlink(slot.path);
  if (isatty(STDERR_FILENO)) {
    const ssize_t ignored = write(STDERR_FILENO, "\n", 1);  // leave the progress line
    static_cast<void>(ignored);
  }
  _exit(128 + signal);
}

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : kSignals) {
    struct sigaction now {};
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) sigaddset(&set, signal);
  }
  return set;
}

void install_interrupt_handlers() {
  struct sigaction action {};
  action.sa_handler = end_program;
  sigemptyset(&action.sa_mask);
  for (int signal : kSignals) sigaddset(&action.sa_mask, signal);
  for (int signal : kSignals) {
    // A signal that the parent made us ignore (nohup, a background job of a script) stays ignored.
    struct sigaction before {};
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    sigaction(signal, &action, nullptr);
  }
}

SignalsBlocked::SignalsBlocked() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : kSignals) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

TemporaryFile::TemporaryFile(const std::string& path) : slot_(-1) {
  if (path.size() >= PATH_MAX) throw std::runtime_error("the path of a temporary file is longer than the system allows");
  for (int i = 0; i < static_cast<int>(std::size(slots)); ++i) {
    int expected = Slot::kFree;
    if (!slots[i].state.compare_exchange_strong(expected, Slot::kFilling)) continue;
    std::memcpy(slots[i].path, path.c_str(), path.size() + 1);
    slots[i].state.store(Slot::kTaken);
    slot_ = i;
    return;
  }
  throw std::runtime_error("too many temporary files at once");
}

TemporaryFile::~TemporaryFile() {
  if (slot_ < 0) return;
  unlink(slots[slot_].path);
  release();
}

void TemporaryFile::release() {
  if (slot_ >= 0) slots[slot_].state.store(Slot::kFree);
  slot_ = -1;
}

}  // namespace fattn::files
