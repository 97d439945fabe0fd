#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing for the named groups: build, test, lint.
# Uses apt-get as root or through `sudo -n`; otherwise prints the one line to run and stops.
set -euo pipefail

# Probes: is the thing there, from whatever source? One line a package: PROBE ARGUMENT PACKAGE.
command_probe() { command -v "$1" >/dev/null 2>&1; }
header_probe() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ]; }
library_probe() { { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true; } | grep -q "$1"; }
python_probe() { python3 -c "import $1" >/dev/null 2>&1; }
file_probe() { [ -e "$1" ]; }
# The runtimes of -fsanitize with clang++, found where this clang looks for them.
clang_runtime_probe() { compgen -G "$(clang++ -print-resource-dir 2>/dev/null)/lib/*/*clang_rt.$1*" >/dev/null; }

BUILD_NEEDS="
command c++ g++
command cmake cmake
command ninja ninja-build
command pkg-config pkg-config
command git git
command python3 python3
header CLI/CLI.hpp libcli11-dev
header nlohmann/json.hpp nlohmann-json3-dev
header fmt/core.h libfmt-dev
header gtest/gtest.h libgtest-dev
library libopenblas.so.0 libopenblas0-pthread
"
TEST_NEEDS="
$BUILD_NEEDS
command g++ g++
command ccache ccache
command clang++ clang
clang_runtime fuzzer libclang-rt-dev
command ld.lld lld
command aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
command qemu-aarch64 qemu-user
command setarch util-linux
python ensurepip python3-venv
file /usr/src/googletest/CMakeLists.txt googletest
"
LINT_NEEDS="
command clang-format clang-format
command clang-tidy clang-tidy
command clang++ clang
command pyflakes3 pyflakes3
command shellcheck shellcheck
command cmake cmake
command ninja ninja-build
"

needs=""
for group in "${@:-build}"; do
  case "$group" in
    build) needs+="$BUILD_NEEDS" ;;
    test) needs+="$TEST_NEEDS" ;;
    lint) needs+="$LINT_NEEDS" ;;
    *) echo "setup.sh: '$group' is no group; allowed: build, test, lint" >&2; exit 2 ;;
  esac
done

missing=()
while read -r probe argument package; do
  [ -n "$probe" ] || continue
  "${probe}_probe" "$argument" && continue
  [[ " ${missing[*]-} " == *" $package "* ]] || missing+=("$package")
done <<<"$needs"
[ ${#missing[@]} -gt 0 ] || exit 0

line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
if ! command -v apt-get >/dev/null; then
  echo "Missing: ${missing[*]} (names of Debian packages). Install them with this system's package manager, then repeat." >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then
  as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  echo "Missing: ${missing[*]}. This user may not install packages; run this line, then repeat:" >&2
  echo "  sudo sh -c '$line'" >&2
  exit 1
fi

echo "Installing: ${missing[*]}"
apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${as_root[@]}" "${apt[@]}" update && "${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  echo "apt-get could not install these. Look at its messages above; the line was: $line" >&2
  exit 1
fi
