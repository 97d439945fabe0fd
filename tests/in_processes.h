// Work that is shared out among processes, because NVRTC lets one thread at a time compile.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace fattn::test {

// What `work` counted as process 0, 1, ... of `processes`. A process that died has not said it.
template <class Counts, class Work>
std::vector<Counts> in_processes(size_t processes, Work work) {
  int channel[2];
  if (pipe(channel) != 0) return {};
  std::vector<pid_t> children;
  for (size_t process = 0; process < processes; ++process) {
    const pid_t child = fork();
    if (child == 0) {
      const Counts counts = work(process);
      _exit(write(channel[1], &counts, sizeof counts) == sizeof counts ? 0 : 1);
    }
    children.push_back(child);
  }
  close(channel[1]);
  std::vector<Counts> all;
  for (Counts part; read(channel[0], &part, sizeof part) == sizeof part;) all.push_back(part);
  close(channel[0]);
  for (const pid_t child : children)
    if (child > 0) waitpid(child, nullptr, 0);
  return all;
}

}  // namespace fattn::test
