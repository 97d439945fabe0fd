#!/usr/bin/env python3
"""What needs a GPU: the table of cases on the CUDA backend, the tests of test_cuda_gpu, test_cuda_v3_gpu, test_cuda_algorithms_gpu, test_cuda_decode_gpu, test_cuda_pages_gpu, test_cuda_batch_invariant_gpu, test_cuda_dropout_gpu, test_cuda_rows_gpu, test_cuda_values_gpu, test_ops_gpu,
test_ops_training_gpu, test_ops_training_rows_gpu, test_ops_process_sum_gpu, test_gpt2_gpu, test_gpt2_train_gpu and test_gpt2_group_gpu, and compute-sanitizer on a subset.
Accuracy beside FlashAttention-2 and the time by the values in a call, through the PyTorch of the Python that FATTN_TORCH_PYTHON names, or of python3.
Ends with `N passed, N failed`; exit status 1 if anything failed or there is no GPU."""

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from stages import Count, Stage, count_ctest, count_pytest, run_stages

ROOT = Path(__file__).resolve().parent.parent
# Small problems of every kind of tile: the sanitizers are a hundred times slower.
SANITIZED = [("bf16", "q65-k97"), ("fp16", "q33-k33"), ("bf16", "q67-k65"), ("fp16", "padded"), ("bf16", "b1-q132-k200"), ("bf16", "pages24")]
# racecheck loses track of __syncthreads where warps also meet at barriers of their own number: in a small program that is correct by construction it
# reports hazards for bar.arrive, and in some backward kernels under a causal mask others from run to run: in the machine code of headdim 80 the read
# and the copy that it names have the loop's __syncthreads between them. These are without.
RACECHECKED = [("bf16", f"q65-k97-h2_1-d{headdim}") for headdim in ("32", "40", "64", "72", "96", "192")]
RACECHECKED += [("fp16", "q65-k97-h2_1-d64"), ("bf16", "q65-k97-h8_2-d64")]


def count_check(reports, log, status):
    """The line of `fattn check`: N cases on ...: N passed, N failed, N skipped. Nothing passed is a failure."""
    count = Count()
    for passed, failed, skipped in re.findall(r"(\d+) passed, (\d+) failed, (\d+) skipped$", log, re.MULTILINE):
        count.passed += int(passed)
        count.failed += int(failed)
        count.skipped += int(skipped)
    count.names = re.findall(r"^FAILED +(\S+)", log, re.MULTILINE)
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


def staged_package(fattn, folder):
    """The Python package beside this build's library, as a wheel would have it."""
    build = Path(fattn).resolve().parent.parent
    package = folder / "fattn"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "fattn", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "lib").mkdir()
    for library in (*(build / "src").glob("libfattn.so*"), build / "torch" / "fattn_torch.so"):
        shutil.copy2(library, package / "lib", follow_symlinks=False)
    return folder


def stages(fattn, tests, sanitizer, package):
    check = f"'{fattn}' check --device cuda"
    found = [
        Stage("cases", check, count_check, 1200),
        Stage("deterministic", f"{check} --deterministic", count_check, 1200),
        Stage("random", f"{check} --random 200", count_check, 1200),
        Stage("standardrandom", f"{check} --algorithm standard --random 200", count_check, 1200),
        # Where the GPU has kernels of its own, these are not what the planner takes.
        Stage("v2", f"{check} --algorithm v2", count_check, 1200),
        Stage("v2deterministic", f"{check} --algorithm v2 --deterministic", count_check, 1200),
        Stage("standard", f"{check} --algorithm standard", count_check, 1200),
        Stage("v1", f"{check} --algorithm v1", count_check, 1200),
        Stage("level75", f"{check} --cuda-level 75 --dtype fp16", count_check, 1200),
    ]
    for name in ("test_cuda_gpu", "test_cuda_v3_gpu", "test_cuda_algorithms_gpu", "test_cuda_decode_gpu", "test_cuda_pages_gpu", "test_cuda_batch_invariant_gpu", "test_cuda_dropout_gpu", "test_cuda_rows_gpu", "test_cuda_values_gpu", "test_ops_gpu", "test_ops_training_gpu", "test_ops_training_rows_gpu", "test_ops_process_sum_gpu", "test_gpt2_gpu", "test_gpt2_train_gpu", "test_gpt2_group_gpu"):
        run = (
            f"GTEST_OUTPUT=\"xml:$REPORTS/gtest/{name}.xml\" '{tests}/{name}' || status=$?\n"
            'word=$([ "${status:-0}" = 0 ] && echo run || echo fail)\n'
            f'echo "<testsuite><testcase name=\\"{name}\\" status=\\"$word\\"/></testsuite>" > "$REPORTS/ctest.xml"\n'
            "exit ${status:-0}\n"
        )
        found.append(Stage(name, run, count_ctest, 900))
    python = os.environ.get("FATTN_TORCH_PYTHON", "python3")
    tester = ROOT / "build" / "venv" / "bin" / "python3"  # has pytest, where `make test` ran
    tester = tester if tester.exists() else sys.executable
    killed = f"FATTN_CLI='{fattn}' FATTN_TEST_DEVICE=cuda '{tester}' -m pytest -q -p no:cacheprovider --junitxml=\"$REPORTS/pytest.xml\" tests/python/test_gpt2_train.py -k killed"
    found.append(Stage("killed", killed, count_pytest, 600))
    measure = f"PYTHONPATH='{package}' '{fattn}' check --python '{python}' --device cuda"
    found.append(Stage("accuracy", f"{measure} --accuracy --quick", count_check, 900))
    # Generous: a cliff is what this is after, and others may use the machine. `fattn check --values` itself takes 1.5.
    found.append(Stage("values", f"{measure} --values --quick --limit 3", count_check, 900))
    for tool in ("memcheck", "racecheck", "initcheck") if sanitizer else ():
        # racecheck does not know the order that TMA and mbarriers give; it is for v2 only.
        chosen = [("v2", RACECHECKED)] if tool == "racecheck" else [("auto", SANITIZED), ("v2", SANITIZED), ("v1", SANITIZED), ("standard", SANITIZED)]
        lines = [
            f"compute-sanitizer --tool {tool} --error-exitcode 9 --target-processes all {check} --algorithm {algorithm} --dtype {dtype} --filter {name}"
            for algorithm, cases in chosen
            for dtype, name in cases
        ]
        found.append(Stage(tool, "\n".join(lines), count_check, 1800))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fattn", default=str(ROOT / "build/cli/fattn"), help="the program to test")
    parser.add_argument("--tests", default=str(ROOT / "build/tests"), help="folder with the tests that need a GPU")
    parser.add_argument("--only", action="append", help="run this stage; may be repeated")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") is not None
    chosen = stages(arguments.fattn, arguments.tests, sanitizer, staged_package(arguments.fattn, ROOT / "build" / "package-gpu"))
    if arguments.only:
        chosen = [stage for stage in chosen if stage.name in arguments.only]
    if not chosen:
        parser.error(f"no stage is left of {', '.join(arguments.only)} (memcheck, racecheck and initcheck need compute-sanitizer)")
    if not sanitizer:
        print("compute-sanitizer is not on the PATH: memcheck, racecheck and initcheck are left out")
    reports = ROOT / "build/reports-gpu"
    try:
        reports.mkdir(parents=True, exist_ok=True)
    except OSError:
        reports = Path(tempfile.mkdtemp())
    return run_stages(chosen, ROOT, reports, arguments.verbose)


if __name__ == "__main__":
    sys.exit(main())
