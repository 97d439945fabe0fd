#!/usr/bin/env bash
# Format and static checks: clang-format and clang-tidy for C++, pyflakes for Python, shellcheck for shell scripts.
# --fix rewrites the format and does nothing else; --no-tidy leaves clang-tidy out (it takes minutes, of what has not changed nothing).
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
  # As part of a build of its own (objects only), so that a file is looked at again only when it or what it includes has changed.
  cmake --preset lint --log-level=WARNING
  cmp -s .clang-tidy build/lint/.clang-tidy || { ninja -C build/lint -t clean >/dev/null && cp .clang-tidy build/lint/; }
  mapfile -t targets < <(ninja -C build/lint -t targets all | sed -nE 's/^((src|testing|measure|files|lab|gpt2|cli|torch)\/.*\.cpp\.o): .*/\1/p')
  [ "${#targets[@]}" -ge 50 ] || { echo "lint.sh: only ${#targets[@]} files to look at; did their names change?" >&2; exit 2; }
  step "clang-tidy, ${#targets[@]} files" ninja -C build/lint --quiet -j "$(nproc)" -k 0 "${targets[@]}"
fi
[ "$failed" -eq 0 ]
