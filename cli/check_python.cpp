// The peers (FlashAttention-2, cuDNN) and float64 on a GPU are PyTorch's, so these two are Python, with flags of their own.
#include "cli/check_python.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "cli/output.h"
#include "cli/pythons.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"

namespace fattn::cli {
namespace {

constexpr const char* kProgram =
    "import sys\n"
    "try:\n"
    "  from fattn import _check\n"
    "except ImportError as error:\n"
    "  print(f'fattn: {sys.executable} lacks the Python package fattn, or what it needs ({error}); pip install \"fattn[torch]\" there, '\n"
    "        'or name another Python with --python PATH', file=sys.stderr)\n"
    "  sys.exit(2)\n"
    "sys.exit(_check.main(sys.argv[1:]))\n";

}  // namespace

bool measures_in_python(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) != "check") return false;
  for (int i = 2; i < argc; ++i)
    if (const std::string_view flag = argv[i]; flag == "--accuracy" || flag == "--values") return true;
  return false;
}

int become_python(int argc, char** argv) {
  std::vector<std::string> pythons = usual_pythons(), rest;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--python=", 0) == 0) {
      pythons = {argument.substr(9)};
    } else if (argument == "--python") {
      if (i + 1 == argc) {
        print_error("--python needs the path of a Python");
        return kExitBadInput;
      }
      pythons = {argv[++i]};
    } else {
      rest.push_back(argument);
    }
  }
  for (std::string& python : pythons) {
    std::string dash_c = "-c", program = kProgram;
    std::vector<char*> arguments{python.data(), dash_c.data(), program.data()};
    for (std::string& argument : rest) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    execvp(python.c_str(), arguments.data());
  }
  print_error(fmt::format("cannot run '{}': {}; this measures through PyTorch, name a Python that has it and the package fattn with --python PATH",
                          printable(pythons.front()), std::strerror(errno)));
  return kExitBadInput;
}

}  // namespace fattn::cli
