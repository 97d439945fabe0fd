// Ctrl-C and friends: temporary files are removed, then the program ends with 128 + the signal's number.
#pragma once

#include <csignal>
#include <string>

namespace fattn::files {

// SIGINT, SIGTERM and SIGHUP from here on. Call once, before threads exist.
void install_interrupt_handlers();

// Those of them that the parent did not make us ignore.
sigset_t handled_signals();

// Removes temporary files and ends the program with 128 + the signal's number.
extern "C" [[noreturn]] void end_program(int signal);

// Holds these signals back from this thread while it lives (and from the threads that it starts meanwhile, for good), so
// that the handler runs on the main thread only and never between two steps that belong together.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Names a file that must not outlive the program: it is removed when a signal ends the program, and by the destructor
// unless release() was called. To leave no gap, create the file and this object under one SignalsBlocked.
// Throws std::runtime_error if the path is too long or there are too many of them.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void release();  // the file is no longer temporary (it was renamed) or no longer there

 private:
  int slot_;
};

}  // namespace fattn::files
