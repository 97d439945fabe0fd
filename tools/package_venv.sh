#!/usr/bin/env bash
# Makes a clean environment with the wheel of build/wheel, torch and what the tests need.
#   (nothing)  build/venv-package: torch is that of an installed Python if one has 2.10 or later: FATTN_TORCH_PYTHON, python3, python. Without
#              one it is downloaded (some GB).
#   packages   likewise, but for the wheel, which need not be there yet
#   oldest     build/venv-package-oldest: torch 2.10, the oldest that fattn takes, on the oldest installed Python from 3.10 on; downloads torch
#   newest     build/venv-package-newest: the newest torch on the newest installed Python; downloads torch
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-20}" PIP_RETRIES="${PIP_RETRIES:-2}"  # no network is found out soon
which=${1:-} wheel=yes
[[ "$which" =~ ^(|packages|oldest|newest)$ ]] || { echo "package_venv.sh: '$which' is no environment; allowed: packages, oldest, newest, or nothing" >&2; exit 2; }
if [ "$which" = packages ]; then which="" wheel=""; fi
venv=build/venv-package${which:+-$which}
requirements=tests/python/package/requirements.txt

# The interpreter of Python 3.N: of this name, or one of pyenv's, whose programs run only if they are chosen.
python_3() {
  local candidate
  for candidate in "python3.$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$1".*/bin/python; do
    if "$candidate" -c 'import ensurepip' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}
first_python() { for minor in "$@"; do python_3 "$minor" && return; done; command -v python3; }
new_enough() { "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 10))' >/dev/null 2>&1; }

python=python3 torch_folder="" torch='torch>=2.10'
case "$which" in
  oldest) python=$(first_python 10 11 12 13 14) torch='torch==2.10.*' ;;
  newest) python=$(first_python 14 13 12 11 10) ;;
  *)
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
    ;;
esac

pip() { timeout 3600 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
made_of="$(command -v "$python") $torch_folder $torch $(cat "$requirements" tests/python/requirements.txt)"
if [ "$made_of" != "$(cat "$venv/made_of" 2>/dev/null)" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  packages=(-r "$requirements")
  if [ -n "$torch_folder" ]; then
    echo "torch is that of $torch_folder"
    echo "$torch_folder" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_another_python.pth"
  else
    [ -n "$which" ] || echo "No installed Python has torch 2.10 or later (FATTN_TORCH_PYTHON names one)"
    echo "Downloading $torch for $("$python" -V), some GB"
    packages+=("$torch")
  fi
  if ! pip --no-compile "${packages[@]}"; then  # modules are compiled when they are imported: most never are
    echo "pip could not install ${packages[*]}: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
    exit 1
  fi
  printf '%s' "$made_of" >"$venv/made_of"
fi
[ -n "$wheel" ] || exit 0
pip --no-deps --no-index --force-reinstall build/wheel/fattn-*.whl
if [ -n "$which" ]; then "$venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "on Python", platform.python_version())'; fi
