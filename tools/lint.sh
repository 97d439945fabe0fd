#!/usr/bin/env bash
# Format and static checks: clang-format and clang-tidy for C++, pyflakes for Python, shellcheck for shell scripts.
# --fix rewrites the format and does nothing else; --no-tidy leaves clang-tidy out (it takes minutes).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
fix=0 tidy=1
for argument in "$@"; do
  case "$argument" in
    --fix) fix=1 ;;
    --no-tidy) tidy=0 ;;
    *) echo "lint.sh: '$argument' is no option; allowed: --fix, --no-tidy" >&2; exit 2 ;;
  esac
done

# Files of the project: tracked ones and new ones that git does not ignore.
files() { git ls-files -co --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
mapfile -t cxx < <(files '*.h' '*.hpp' '*.c' '*.cpp')
mapfile -t python < <(files '*.py')
mapfile -t shell < <(files '*.sh' .ci/run)

if [ "$fix" = 1 ]; then
  clang-format -i "${cxx[@]}"
  exit
fi

failed=0
step() {
  local name=$1
  shift
  if "$@"; then echo "ok     $name"; else failed=$((failed + 1)); echo "FAILED $name"; fi
}
step "clang-format (make format mends it)" clang-format --dry-run --Werror "${cxx[@]}"
step "pyflakes" pyflakes3 "${python[@]}"
step "shellcheck" shellcheck "${shell[@]}"
if [ "$tidy" = 1 ]; then
  # A build directory of clang's own, so that the commands have no flag that clang-tidy does not know.
  cmake --preset clang --log-level=WARNING
  mapfile -t units < <(files 'src/*.cpp' 'testing/*.cpp' 'measure/*.cpp' 'cli/*.cpp' | grep -v '/isa_neon\.cpp$')
  step "clang-tidy" xargs -a <(printf '%s\n' "${units[@]}") -P "$(nproc)" -n 4 clang-tidy -p build/clang --quiet
fi
[ "$failed" -eq 0 ]
