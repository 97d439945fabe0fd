#!/usr/bin/env bash
# Makes build/arm64: a 64-bit Arm Python of this system's own packages with the wheel of build/wheel-aarch64 and what the tests of fattn.numpy
# need, to run under qemu-user: qemu-aarch64 -L build/arm64/root build/arm64/root/usr/bin/python3. Nothing is installed on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-20}" PIP_RETRIES="${PIP_RETRIES:-2}"  # no network is found out soon
folder=build/arm64
root=$folder/root
requirements=tests/python/requirements.txt
packages=(python3 libstdc++6 libopenblas0-pthread)  # the last for algorithm standard
made_of="${packages[*]} $(cat "$requirements")"
wheel=(build/wheel-aarch64/fattn-*.whl)
[ -f "${wheel[0]}" ] || { echo "arm64_python.sh: there is no wheel in build/wheel-aarch64; make it with: tools/make_wheel.sh --arch aarch64" >&2; exit 1; }

if [ "$made_of" != "$(cat "$folder/made_of" 2>/dev/null)" ]; then
  rm -rf "$folder"
  mkdir -p "$folder"/apt/{state/lists/partial,cache/archives/partial} "$root" "$folder/site"
  : >"$folder/apt/status"
  apt=(apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$PWD/$folder/apt/state" -o "Dir::State::status=$PWD/$folder/apt/status"
    -o "Dir::Cache=$PWD/$folder/apt/cache" -o Acquire::Retries=3 -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  # Other sources than the system's own may have nothing for Arm.
  "${apt[@]}" update || true
  if ! "${apt[@]}" install -y --download-only --no-install-recommends "${packages[@]}"; then
    echo "apt-get could not get ${packages[*]} for arm64: the package sources of this machine (/etc/apt) must serve that architecture; Debian's do" >&2
    exit 1
  fi
  for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  version=$(basename "$(readlink "$root/usr/bin/python3")" | sed 's/^python//')
  if ! timeout 600 python3 -m pip install --quiet --disable-pip-version-check --target "$folder/site" --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --python-version "$version" -r "$requirements"; then
    echo "pip could not get $requirements for aarch64: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)" >&2
    exit 1
  fi
  printf '%s' "$made_of" >"$folder/made_of"
fi
rm -rf "$folder"/site/fattn "$folder"/site/fattn-*
python3 -m zipfile -e "${wheel[0]}" "$folder/site"
