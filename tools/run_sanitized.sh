#!/usr/bin/env bash
# Runs a program that AddressSanitizer watches: run_sanitized.sh PROGRAM [ARGUMENT...]. At its end LeakSanitizer stops all threads, and once in about a
# thousand runs it says that it cannot, whatever the program has done: then the program runs once more. Every other failure is one.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for _ in first again; do
  "$@" >"$log" 2>&1
  status=$?
  cat "$log"
  if [ "$status" = 0 ] || ! grep -q 'LeakSanitizer has encountered a fatal error' "$log" || grep -qE '\[  FAILED  \]|ERROR: AddressSanitizer|runtime error' "$log"; then break; fi
done
exit "$status"
