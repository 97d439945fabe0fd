#!/usr/bin/env bash
# Makes build/venv with the packages of tests/python/requirements.txt, once for each content of that file. Modules are compiled when they are
# imported: most never are.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-20}" PIP_RETRIES="${PIP_RETRIES:-2}"  # no network is found out soon
requirements=tests/python/requirements.txt
venv=build/venv
if cmp -s "$requirements" "$venv/requirements.txt"; then exit 0; fi
rm -rf "$venv"
python3 -m venv "$venv"
if ! timeout 300 "$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check -r "$requirements"; then
  echo "pip could not install $requirements: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
  exit 1
fi
cp "$requirements" "$venv/requirements.txt"
