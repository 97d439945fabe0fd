// A child process on a socket pair (so that a dead child is an error code and no SIGPIPE), its stderr in an anonymous file.
#include "measure/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>

#include "measure/failure.h"

extern char** environ;

namespace fattn::measure {
namespace {

constexpr size_t kLongestLine = 4 << 20;

std::chrono::steady_clock::time_point after(double seconds) {
  using Clock = std::chrono::steady_clock;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string how_it_ended(int status) {
  if (WIFEXITED(status)) return "ended with exit code " + std::to_string(WEXITSTATUS(status));
  if (WIFSIGNALED(status))
    return "was ended by signal " + std::to_string(WTERMSIG(status)) +
           (WTERMSIG(status) == SIGKILL ? " (the kernel does that when memory runs out)" : "");
  return "ended";
}

}  // namespace

Subprocess::Subprocess(const std::vector<std::string>& argv, const std::vector<std::string>& variables) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Failure(Status::kFailed, std::string("cannot make a socket pair: ") + std::strerror(errno));
  socket_ = ends[0];
  stderr_ = memfd_create("provider-stderr", MFD_CLOEXEC);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  if (stderr_ >= 0) posix_spawn_file_actions_adddup2(&actions, stderr_, STDERR_FILENO);

  std::vector<char*> arguments, environment;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  for (const std::string& variable : variables) environment.push_back(const_cast<char*>(variable.c_str()));
  for (char** variable = environ; *variable; ++variable) {
    const size_t name = std::strcspn(*variable, "=") + 1;
    if (std::none_of(variables.begin(), variables.end(), [&](const std::string& own) { return own.compare(0, name, *variable, name) == 0; }))
      environment.push_back(*variable);
  }
  environment.push_back(nullptr);

  // What this thread holds back is no business of the child's.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int error = posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error != 0) {
    pid_ = -1;
    stop();
    const std::string reason = "cannot start " + argv[0] + ": " + std::strerror(error);
    throw Failure(Status::kUnavailable, reason, reason);
  }
}

Subprocess::~Subprocess() { stop(); }

void Subprocess::stop() {
  if (socket_ >= 0) close(socket_);  // end of its input
  socket_ = -1;
  if (pid_ > 0) {
    int status = 0;
    bool ended = false;
    for (int i = 0; i < 100 && !ended; ++i) {
      ended = waitpid(pid_, &status, WNOHANG) != 0;
      if (!ended) usleep(10000);
    }
    if (!ended) {
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
    }
  }
  pid_ = -1;
  if (stderr_ >= 0) close(stderr_);
  stderr_ = -1;
}

std::string Subprocess::error_output() const {
  const off_t size = stderr_ >= 0 ? lseek(stderr_, 0, SEEK_END) : 0;
  constexpr off_t kTail = 400;
  std::string tail(static_cast<size_t>(std::min(size, kTail)), '\0');
  const ssize_t got = tail.empty() ? 0 : pread(stderr_, tail.data(), tail.size(), size - static_cast<off_t>(tail.size()));
  tail.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  while (!tail.empty() && tail.back() == '\n') tail.pop_back();
  return tail;
}

void Subprocess::died(const std::string& doing) {
  int status = 0;
  pid_t ended = 0;
  for (int i = 0; i < 100 && ended == 0; ++i) {  // its end of the socket may close a moment before it ends
    ended = waitpid(pid_, &status, WNOHANG);
    if (ended == 0) usleep(10000);
  }
  std::string reason = "the provider " + (ended > 0 ? how_it_ended(status) : std::string("closed its output")) + " " + doing;
  if (ended > 0) pid_ = -1;
  const std::string text = error_output();
  if (!text.empty()) reason += "; the end of its stderr: " + text;
  stop();
  throw Failure(Status::kFailed, reason);
}

bool Subprocess::wait(short events, Clock::time_point until, Clock::time_point deadline, double timeout_seconds) {
  for (;;) {
    const auto now = Clock::now();
    if (now >= deadline) {
      kill(pid_, SIGKILL);
      stop();
      throw Failure(Status::kTimeout, "no answer within " + std::to_string(std::lround(timeout_seconds)) + " s");
    }
    if (now >= until) return false;
    // Rounded up, so that it does not poll without waiting through the last millisecond.
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(std::min(until, deadline) - now).count() + 1;
    pollfd item{socket_, events, 0};
    const int ready = poll(&item, 1, static_cast<int>(std::min<long long>(left, 1000000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) died("while being waited for");
  }
}

void Subprocess::send(const std::string& line, double timeout_seconds) {
  if (!running()) throw Failure(Status::kFailed, "the provider is not running any more");
  const auto deadline = after(timeout_seconds);
  const std::string message = line + "\n";
  for (size_t sent = 0; sent < message.size();) {
    wait(POLLOUT, deadline, deadline, timeout_seconds);
    const ssize_t n = ::send(socket_, message.data() + sent, message.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) died("before it was asked");
    if (n > 0) sent += static_cast<size_t>(n);
  }
}

std::string Subprocess::receive(double timeout_seconds, const std::function<void()>& slow) {
  if (!running()) throw Failure(Status::kFailed, "the provider is not running any more");
  const auto deadline = after(timeout_seconds);
  auto until = slow ? after(kSlowSeconds) : deadline;
  for (;;) {
    const size_t end = pending_.find('\n');
    if (end != std::string::npos) {
      std::string answer = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return answer;
    }
    if (pending_.size() > kLongestLine) {
      stop();
      throw Failure(Status::kFailed, "the provider's answer has no end of line within 4 MiB");
    }
    if (!wait(POLLIN, until, deadline, timeout_seconds)) {
      slow();
      until = deadline;
      continue;
    }
    char buffer[65536];
    const ssize_t n = recv(socket_, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) died("instead of answering");
    if (n > 0) pending_.append(buffer, static_cast<size_t>(n));
  }
}

}  // namespace fattn::measure
