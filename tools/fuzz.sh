#!/usr/bin/env bash
# Runs every fuzzer of a build (first argument) for some seconds (second argument), side by side. A fuzzer's own seeds are in
# tests/fuzz/corpus/NAME, its dictionary in tests/fuzz/NAME.dict; what it finds stays in BUILD/corpus/NAME.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
build=${1:?build directory}
seconds=${2:?seconds for each fuzzer}
mapfile -t fuzzers < <(find "$build" -type f -executable -name 'fuzz_*' | sort)
if [ ${#fuzzers[@]} -eq 0 ]; then
  echo "no fuzz_* program below $build"
  echo "0 passed, 1 failed"
  exit 1
fi

passed=0 failed=0
# At most two at once, so that each gets a processor on small machines.
for ((first = 0; first < ${#fuzzers[@]}; first += 2)); do
  pids=()
  for fuzzer in "${fuzzers[@]:first:2}"; do
    name=$(basename "$fuzzer")
    corpus=$build/corpus/$name
    mkdir -p "$corpus"
    options=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="$build/$name-")
    # A short run is a test of the change, always the same one; the long ones look for something new.
    [ "$seconds" -le 60 ] && options+=(-seed=1)
    [ -f "tests/fuzz/$name.dict" ] && options+=(-dict="tests/fuzz/$name.dict")
    seeds=()
    [ -d "tests/fuzz/corpus/$name" ] && seeds+=("tests/fuzz/corpus/$name")
    "$fuzzer" "${options[@]}" "$corpus" "${seeds[@]}" >"$build/$name.log" 2>&1 &
    pids+=("$! $name")
  done
  for pid_name in "${pids[@]}"; do
    read -r pid name <<<"$pid_name"
    wait "$pid"
    status=$?
    if [ "$status" -eq 0 ]; then
      passed=$((passed + 1))
      echo "ok     $name: $(grep -o 'stat::number_of_executed_units: .*' "$build/$name.log")"
    else
      failed=$((failed + 1))
      why=$(grep -m 1 -E '^==[0-9]+== ?ERROR|runtime error:|^ALARM|^SUMMARY' "$build/$name.log")
      echo "FAILED $name (${why:-ended with status $status}); the input is kept as $build/$name-*"
      tail -n 60 "$build/$name.log"
    fi
  done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
