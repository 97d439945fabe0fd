#!/usr/bin/env bash
# A compiler's launcher (CXX_COMPILER_LAUNCHER): compiles a unit that nothing is linked with for its warnings alone. No code is made of it, which is half
# of the time; an empty file stands for its object. Precompiled headers, which the units read, are made as ever.
set -euo pipefail
output="" last=""
for argument in "$@"; do
  if [ "$last" = -o ]; then output=$argument; fi
  last=$argument
done
case "$output" in
  *.pch | *.gch) exec "$@" ;;
esac
"$@" -fsyntax-only
: >"${output:?compile_for_warnings.sh: the command has no -o}"
