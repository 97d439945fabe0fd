#include "cli/measure_again.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "cli/interrupt.h"
#include "cli/usage_error.h"

namespace fattn::cli {

int measure_again(const std::vector<std::string>& arguments, const std::string& file) {
  std::vector<std::string> words = {"fattn"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.insert(words.end(), {"--json", file});
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int status = 0;
  {
    // Ctrl-C reaches both: the one that measures keeps its record, and this one waits for that.
    const SignalsBlocked blocked;
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error(std::string("cannot start a process to measure in: ") + std::strerror(errno));
    if (child == 0) {
      const sigset_t signals = handled_signals();
      sigprocmask(SIG_UNBLOCK, &signals, nullptr);
      const int nowhere = open("/dev/null", O_WRONLY);
      if (nowhere >= 0) dup2(nowhere, STDOUT_FILENO);
      execv("/proc/self/exe", argv.data());
      _exit(127);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  if (WIFSIGNALED(status)) end_program(WTERMSIG(status));
  const int code = WEXITSTATUS(status);
  if (code > 128) end_program(code - 128);
  if (code == 127)
    throw std::runtime_error("this program cannot start itself by /proc/self/exe; measure with --json FILE and give that with --current");
  return code;
}

std::string temporary_record() {
  const char* folder = std::getenv("TMPDIR");
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/fattn-regress.XXXXXX";
  const SignalsBlocked blocked;
  const int fd = mkstemp(path.data());
  if (fd < 0) throw std::runtime_error("'" + path + "' cannot be created: " + std::strerror(errno) + "; say with --save FILE where the record goes");
  close(fd);
  static std::unique_ptr<TemporaryFile> guard;  // until the program ends
  guard = std::make_unique<TemporaryFile>(path);
  return path;
}

}  // namespace fattn::cli
