// Runs a piece of a test in a forked child with environment variables of its own: for what happens once in a process.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

namespace fattn::test {

struct Variable {
  const char* name;
  const char* value;  // null: not set
};

// What `body` returns, and " (the child failed)" if the child crashed.
template <class Body>
std::string in_child(std::initializer_list<Variable> variables, const Body& body) {
  int channel[2];
  if (pipe(channel) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    for (const Variable& variable : variables) {
      if (variable.value)
        setenv(variable.name, variable.value, 1);
      else
        unsetenv(variable.name);
    }
    const std::string answer = body();
    const bool whole = write(channel[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size());
    _exit(whole ? 0 : 1);
  }
  close(channel[1]);
  if (child < 0) return "no child";
  std::string answer;
  char part[512];
  for (ssize_t n; (n = read(channel[0], part, sizeof part)) > 0;) answer.append(part, static_cast<size_t>(n));
  close(channel[0]);
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? answer : answer + " (the child failed)";
}

// What `body(i)` returns, of `count` children at the same time; empty where a child crashed.
template <class Body>
std::vector<std::string> in_children(int count, const Body& body) {
  std::vector<int> channels;
  std::vector<pid_t> children;
  for (int i = 0; i < count; ++i) {
    int channel[2];
    if (pipe(channel) != 0) return {};
    const pid_t child = fork();
    if (child == 0) {
      const std::string answer = body(i);
      _exit(write(channel[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()) ? 0 : 1);
    }
    close(channel[1]);
    channels.push_back(channel[0]);
    children.push_back(child);
  }
  std::vector<std::string> answers;
  for (int i = 0; i < count; ++i) {
    answers.emplace_back();
    char part[512];
    for (ssize_t n; (n = read(channels[static_cast<size_t>(i)], part, sizeof part)) > 0;) answers.back().append(part, static_cast<size_t>(n));
    close(channels[static_cast<size_t>(i)]);
    waitpid(children[static_cast<size_t>(i)], nullptr, 0);
  }
  return answers;
}

}  // namespace fattn::test
