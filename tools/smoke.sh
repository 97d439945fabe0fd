#!/usr/bin/env bash
# Every command of BUILD/cli/fattn (default: build) once, as a person would: right output, right exit code, readable JSON.
# Ends with the line `N passed, N failed`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
fattn=${1:-build}/cli/fattn
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0

# expect STATUS COMMAND...: the command must end with this status.
expect() {
  local wanted=$1 status=0
  shift
  "$@" >"$scratch/log" 2>&1 || status=$?
  if [ "$status" = "$wanted" ]; then
    passed=$((passed + 1))
    echo "ok     ${*/#$scratch\//}"
  else
    failed=$((failed + 1))
    echo "FAILED (exit $status, not $wanted) $*"
    sed 's/^/       /' "$scratch/log"
  fi
}
json() { python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$1"; }
# stdout of the command with `--json -` is JSON and nothing else.
json_of() { "$fattn" "$@" --json - >"$scratch/record.json" && json "$scratch/record.json"; }

small=(--batch 1 --seqlen 128 --nheads 2 --headdim 64 --causal)
expect 0 "$fattn" --version
expect 0 "$fattn" --help
expect 0 "$fattn" info
expect 0 json_of info
expect 0 env FATTN_CACHE_DIR="$scratch/cache" "$fattn" cache path
expect 0 env FATTN_CACHE_DIR="$scratch/cache" "$fattn" cache list
expect 2 env FATTN_CACHE_DIR="$scratch/cache" FATTN_NVRTC=/nonexistent "$fattn" cache warm --arch 80
expect 0 "$fattn" check --list
expect 0 "$fattn" check --backend reference --dtype bf16 --filter h8_2
expect 0 "$fattn" check --dtype fp32 --filter h8_2
expect 0 json_of check --dtype fp16 --filter h8_2
expect 0 "$fattn" run --input examples/data/small.safetensors --output "$scratch/out.safetensors" --causal --verify
expect 0 test -s "$scratch/out.safetensors"
expect 0 "$fattn" run examples/data/small.safetensors "$scratch/again.safetensors" --causal
expect 0 "$fattn" bench "${small[@]}" --dtype fp32 --json "$scratch/bench.json"
expect 0 json "$scratch/bench.json"
expect 0 "$fattn" compare "${small[@]}" --dtype bf16 --json "$scratch/compare.json"
expect 0 json "$scratch/compare.json"
expect 0 "$fattn"
expect 2 "$fattn" bench --no-such-flag
expect 2 "$fattn" run --input "$scratch/absent.safetensors" --output "$scratch/none.safetensors"
expect 1 test -e "$scratch/none.safetensors"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
