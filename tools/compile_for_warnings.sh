#!/usr/bin/env bash
# A compiler's launcher (CXX_COMPILER_LAUNCHER): compiles a unit that nothing is linked with for its warnings alone. No code is made of it, which is half
# of the time; a word stands for its object. Precompiled headers, which the units read, are made as ever. ccache, where it is the launcher of other
# units, keeps what had no warning: it runs this script again, before the compiler (CCACHE_PREFIX), and keeps the word.
set -euo pipefail
output="" last=""
for argument in "$@"; do
  if [ "$last" = -o ]; then output=$argument; fi
  last=$argument
done
launcher=$(basename "${CMAKE_CXX_COMPILER_LAUNCHER:-}")
case "$output" in
  *.pch | *.gch) if [ "$launcher" = ccache ]; then exec ccache "$@"; else exec "$@"; fi ;;
esac
if [ "$launcher" = ccache ] && [ -z "${CCACHE_PREFIX:-}" ]; then
  CCACHE_PREFIX=$(realpath "$0") CCACHE_NAMESPACE=warnings exec ccache "$@"
fi
"$@" -fsyntax-only
echo warnings >"${output:?compile_for_warnings.sh: the command has no -o}"
