// `fattn check --accuracy` and `fattn check --values`, which measure through PyTorch.
#pragma once

namespace fattn::cli {

// Whether this command line asks for one of them.
bool measures_in_python(int argc, char** argv);

// The program becomes the command line of the Python package. Returns only if that cannot be: the exit code.
int become_python(int argc, char** argv);

}  // namespace fattn::cli
