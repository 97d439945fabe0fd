#include "cli/streams.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <stdexcept>

#include "cli/output.h"

namespace fattn::cli {
namespace {

// Of a pipe that nobody reads any more.
bool reader_has_left(int descriptor) {
  pollfd asked{descriptor, POLLOUT, 0};
  return poll(&asked, 1, 0) == 1 && (asked.revents & POLLERR) != 0;
}

// A handler, for a program that is started inherits what is ignored.
extern "C" void stay(int /*signal*/) {}

// Whoever started the program may have asked so; a write then fails with EPIPE.
bool sigpipe_is_ignored() {
  struct sigaction now {};
  return sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

std::atomic<bool> outlives = false;

}  // namespace

void hold_standard_streams() {
  // Opened the wrong way round, so that text is not lost in silence. The lowest free number is the one that open() gives.
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(descriptor, F_GETFD) == -1 && open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY) == -1) return;
}

void put(std::FILE* stream, std::string_view text) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stream) == text.size() && std::fflush(stream) == 0;
  if (!whole && stream == stdout && !outlives) throw std::runtime_error("cannot write to stdout");
}

void outlive_readers() {
  outlives = true;
  if (!sigpipe_is_ignored()) std::signal(SIGPIPE, stay);
}

bool all_was_written() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return true;
  if (reader_has_left(STDOUT_FILENO) && !sigpipe_is_ignored()) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);  // 128 + 13, without a word
  }
  print_error("cannot write to stdout");
  return false;
}

}  // namespace fattn::cli
