#!/usr/bin/env bash
# Makes build/venv-package: a clean environment with the wheel of build/wheel, torch and what the tests need. torch is that of an installed Python
# if one has 2.10 or later: FATTN_TORCH_PYTHON, python3, python. Without one it is downloaded (some GB).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/venv-package
requirements=tests/python/package/requirements.txt

new_enough() { "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 10))' >/dev/null 2>&1; }
python=python3 torch_folder=""
for candidate in ${FATTN_TORCH_PYTHON:+"$FATTN_TORCH_PYTHON"} python3 python; do
  if new_enough "$candidate"; then
    python=$candidate
    torch_folder=$("$candidate" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)')
    break
  fi
done
if [ -n "${FATTN_TORCH_PYTHON:-}" ] && [ "$python" != "$FATTN_TORCH_PYTHON" ]; then
  echo "FATTN_TORCH_PYTHON is '$FATTN_TORCH_PYTHON', which has no torch 2.10 or later; name a Python that has, or unset it" >&2
  exit 1
fi

pip() { timeout 1800 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --timeout 20 --retries 2 "$@"; }
made_of="$(command -v "$python") $torch_folder $(cat "$requirements" tests/python/requirements.txt)"
if [ "$made_of" != "$(cat "$venv/made_of" 2>/dev/null)" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  packages=(-r "$requirements")
  if [ -n "$torch_folder" ]; then
    echo "torch is that of $torch_folder"
    echo "$torch_folder" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_another_python.pth"
  else
    echo "No installed Python has torch 2.10 or later (FATTN_TORCH_PYTHON names one): downloading torch, some GB"
    packages+=('torch>=2.10')
  fi
  if ! pip "${packages[@]}"; then
    echo "pip could not install ${packages[*]}: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
    exit 1
  fi
  printf '%s' "$made_of" >"$venv/made_of"
fi
pip --no-deps --no-index --force-reinstall build/wheel/fattn-*.whl
