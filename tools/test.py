#!/usr/bin/env python3
"""The stages of `make test`. All run, whatever fails; the last line is `N passed, N failed`, the exit status 1 if any failed."""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from stages import Count, Stage, count_ctest, count_line, count_pytest, count_status, groups, run_group, run_stages

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build/reports"

WHOLE_S = 5400  # the most that one test program takes whole, under a sanitizer or in an emulator

# Test programs that are too slow whole under a sanitizer, and what of them runs there.
HEAVY = "^test_(cases|properties|features|numerics|standard|kernels|cpu_accuracy|cpu_v1|cpu_values|cuda_standard)"
HEAVY_FILTER = "*Small*:AmxKernels*:Standard*:DTypes/Standard*:*CpuValues*bf16_cpu_avx2*:Cublaslt*:CudaMatmul*:CudaStandard.P*:CudaStandard.W*:CudaStandard.E*"
HEAVY_FILTER += "-*PropertySmall*/fp16*:*Small*_reference"  # fp16 is in the table of cases; the reference judges every one of them
HEAVY_FILTER += ":CasesSmall.WhatIsNotComputedIsRefused"  # the table's cases and their oracle once more
HEAVY_FILTER += ":*MatchesOracle/*16:DTypes/Standard.NaNAndInf*16:DTypes/Standard.SameBits*16"  # standard attention: the conversions have tests of their own
HEAVY_FILTER += ":*TableSmall*16_cpu_scalar:*PropertySmall*16_cpu_scalar"  # the same templates as in fp32, with the conversions of the vector kernels
HEAVY_FILTER += ":OracleSmall.Gradients*:DocumentsSmall.GradientsOfASharedBias*:*CpuValues.OfAnySize*:*CpuValues.BehindAMask*:AmxKernels.*AsExactAs*"  # many calls, for numbers or times alone
# The list of planned kernels is the same text in each build: three minutes without optimisation. The order of sums is the tasks', whatever computes them:
# the portable kernels take a hundred seconds for it. Slopes of gradients are many calls, for numbers alone: one model stands for all, one instruction set.
LIGHT_FILTER = "-JitSmallPlanned.TheListIsWhole:*CpuDqOrder*cpu_scalar:" + ":".join(f"*GradientsAreSlopes/{x}*" for x in ("t", "s", "o", "r", "e", "gqa"))
LIGHT_FILTER += ":" + ":".join(f"*OpsBackwardSmall.Product/{x}" for x in ("*fp16", "scalar*", "auto*", "avx512_fp32", "avx512_bf16", "avx2_bf16"))
LIGHT_FILTER += ":" + ":".join(f"*BatchInvariantSmall*{x}*" for x in ("fp16", "scalar", "reference", "IsRight/fp32_cpu_avx512_bf16", "IsRight/bf16_cpu_avx2"))
LIGHT_FILTER += ":RingAttention.*:RingScheduleSmall.EveryPairOnce:Append.ManyMore*:Pages.OfAnySize*"  # exhaustive
# Times, the memory of the process, and how often a verdict on samples errs.
LIGHT_FILTER += ":Profile.WhatNobodyListensToCostsNothing:Gpt2Data.LoadsFasterThanAnythingLearns:Estimate.OfTheLibraryIsWithinAFactorOfTwo:CpuMemory.OfTheBackwardPass*"
LIGHT_FILTER += ":LabRegress.OfAProgramAgainstItself*:LabRegress.ThreePerCent*"
# The release build runs every test, but for groups that look at kernels in each dtype, where two are the same code: the plain kernels, standard attention
# and the oracle differ in 16 bits by the conversions alone. The table of cases has each of these kernels in each dtype, its dearer cases in turn.
SAMPLE_FILTER = "-*CpuValues*/fp16_cpu_scalar:*CpuValues*/fp16_standard:*Accuracy*/fp16_cpu_scalar:*FeaturesMany*/fp16_cpu_scalar"
SAMPLE_FILTER += "".join(f":*PropertySmall*/fp16_{x}" for x in ("cpu_scalar", "standard", "reference"))
# Where the processor has products of bf16, the table of kernels with them stands for AVX-512's: all but bf16 is the same code, and bf16 as AVX2 has it.
# Properties are looked at in one dtype by each of the two that are left; the table of cases has both.
CPUINFO = Path("/proc/cpuinfo")
if CPUINFO.is_file() and "avx512_bf16" in CPUINFO.read_text(errors="replace"):
    HEAVY_FILTER += ":*_cpu_avx512:*PropertySmall*/bf16_cpu_avx2:*PropertySmall*/fp32_cpu_avx512_bf16"
    LIGHT_FILTER += ":*cpu_avx512"
    SAMPLE_FILTER += "".join(f":*{group}*/{dtype}_cpu_avx512" for group in ("CpuValues", "Accuracy", "PropertySmall", "BatchInvariantSmall") for dtype in ("fp32", "fp16"))
# What the thread sanitizer is for: the pool, and everything that several threads call at once (no OpenMP: its runtime is not
# built for it; no test that forks: ThreadSanitizer cannot start threads in the child of a process that had several).
THREADED = "^test_(executor|concurrency|cpu_info|properties|libraries|cuda_device|cuda_backend(_scores)?|jit_(build|cache|load|nvrtc|pack))$"
TSAN_FILTER = "*Executor*:*ThreadPool*:*Concurren*:*Thread*:*CpuInfo*:*OpenBlas*:*DynamicLibrary*:*Cuda*"
TSAN_FILTER += ":JitSmall*:JitLoad*:JitBuild.ManyThreads*"
FORKS = "-*DeathTest*:Executor.NoThreadBefore*:Executor.ThePoolGrows:Executor.AChild*:Executor.Unloading*:*Fork.*"
# Of the properties that run in several threads: by one instruction set in two dtypes, in fp32 by what shares its work out otherwise. The table of kernels
# is full after 4,096, one after the other.
NOT_OF_THREADS = ":JitLoad.NumberOfKernelsIsBounded:" + ":".join(
    f"*PropertySmall*/{x}" for x in ("fp16*", "*scalar", "*avx512*", "*reference", "bf16_standard", "bf16_cpu_v1"))
# qemu's emulation of user programs ends (with status 127) a child of a process with threads when it starts threads itself.
EMULATED_FILTER = "*-*Fork.*"
# What another architecture can change: its kernels, conversions, the plain ones as its compiler makes them. (The oracle on the whole table and its
# gradients, which take float64 that is emulated, and the plain kernels in 16 bits are left to `make test-all`. How calls share threads is the same in
# every dtype.)
PORTABLE_FILTER = "*Small*neon:*TableSmall*fp32_cpu_scalar:JudgeSmall*:GuardSmall*:StandardModelSmall*:*Half*:*Abi*:*Problem*"
PORTABLE_FILTER += "-*PropertySmall*scalar:*PropertySmall*fp16*"
PORTABLE_FILTER += "".join(f":*PropertySmall.{x}*/bf16*" for x in ("TheSameBits", "AHostsExecutor", "AFailingExecutor", "APlanRuns"))
PORTABLE = "^test_(cases|half|numerics|problem|properties|abi)$"


def ctest(build, jobs, label="", select="", prefix="", timeout_s=900):
    """Runs the GoogleTest programs of a build directory; their results land where count_ctest looks."""
    return (
        f'GTEST_OUTPUT="xml:$REPORTS/gtest{label}/" {prefix} ctest --test-dir {build} --output-on-failure --no-tests=error '
        f'--timeout {timeout_s} -j {jobs} --output-junit "$REPORTS/ctest{label}.xml" {select}\n'
    )


def build_tests(build, jobs, select):
    """Builds the test programs whose names match, and fails if there are none."""
    return (
        f"ninja -C {build} -t targets all | sed -n 's/^\\(test_[a-z_0-9]*\\|abi_c_check\\): phony$/\\1/p' | grep -E '{select}' "
        f"| xargs cmake --build {build} --parallel {jobs} --target\n"
    )


def heavy_and_light(build, jobs, whole):
    """All programs whole, or of the heavy ones the quick groups only; runs both halves even if one fails."""
    if whole:
        return ctest(build, jobs, prefix="FATTN_TEST_WHOLE=1", timeout_s=WHOLE_S)
    light = ctest(build, jobs, "-light", f"-E '{HEAVY}'", f"GTEST_FILTER='{LIGHT_FILTER}'")
    heavy = ctest(build, jobs, "-heavy", f"-R '{HEAVY}'", f"FATTN_TEST_WHOLE=0 GTEST_FILTER='{HEAVY_FILTER}'")
    return f"status=0\n{light.rstrip()} || status=1\n{heavy.rstrip()} || status=1\nexit $status\n"


def in_shards(build, jobs, select, prefix, timeout_s):
    """Every program as `jobs` processes side by side, each with its share of the cases: where one program takes most of the time, processors would idle.
    Each ctest has a folder of its own, because it writes there."""
    script = "pids=() status=0\n"
    for i in range(jobs):
        script += f"mkdir -p {build}/shard{i}\necho 'subdirs(\"../tests\")' > {build}/shard{i}/CTestTestfile.cmake\n"
        shard = f"GTEST_TOTAL_SHARDS={jobs} GTEST_SHARD_INDEX={i} {prefix}"
        script += ctest(f"{build}/shard{i}", 1, f"-{i}", select, shard, timeout_s).rstrip() + ' & pids+=("$!")\n'
    return script + 'for pid in "${pids[@]}"; do wait "$pid" || status=1; done\nexit $status\n'


def make_wheel(jobs, *arguments):
    """Of the sources as they are now; with the flags of the stage `build`, so that ccache has the library's objects, and little is done again for the next stage."""
    return f"SKBUILD_CMAKE_DEFINE=FATTN_WERROR=ON CMAKE_BUILD_PARALLEL_LEVEL={jobs} {' '.join(('tools/make_wheel.sh', *arguments))}\n"


def package_tests(which, jobs):
    """The wheel with another torch and another Python; the models of transformers and the examples are left to the stage `package`."""
    return Stage(
        f"package-{which}",
        make_wheel(jobs)
        + f"tools/package_venv.sh {which}\n"
        f"build/venv-package-{which}/bin/python -m pytest tests/python/package -q --ignore tests/python/package/test_transformers.py "
        '--ignore tests/python/package/test_examples.py --junitxml="$REPORTS/pytest.xml"\n',
        count_pytest,
        7200,
    )


def package_stages(jobs):
    """What `make test-all` does with wheels beside the stage `package`."""
    return [
        package_tests("oldest", jobs),
        package_tests("newest", jobs),
        Stage(
            "package-aarch64",
            make_wheel(jobs, "--arch", "aarch64")
            + "tools/arm64_python.sh\n"
            # No test that starts Python or the command: without binfmt the kernel runs no programs of another processor.
            "PYTHONPATH=build/arm64/site qemu-aarch64 -L build/arm64/root build/arm64/root/usr/bin/python3 -m pytest -q -p no:cacheprovider "
            "tests/python/package/test_numpy.py "
            + " ".join(f"tests/python/package/test_package.py::test_{test}" for test in ("info", "support", "names", "runs_with_old_systems"))
            + ' --junitxml="$REPORTS/pytest.xml"\n',
            count_pytest,
            7200,
        ),
        Stage(
            "package-pack",
            make_wheel(jobs, "--pack")
            + "tools/package_venv.sh\n"
            'build/venv-package/bin/python -m pytest tests/python/package/test_package.py -q --junitxml="$REPORTS/pytest.xml"\n',
            count_pytest,
            7200,
        ),
    ]


def stages(jobs, long, wheel_apart=True):
    """`wheel_apart`: a stage of its own makes the wheel beside other builds; else the stage `package` makes it."""
    build = f"cmake --build %s --parallel {jobs}\n"
    fuzz_s = 600 if long else 12
    whole = "FATTN_TEST_WHOLE=1 " if long else ""  # what tests leave out else: cases in every dtype, models that others stand for
    side_by_side = f"-n {jobs} --dist worksteal"  # pytest-xdist
    # No detect_stack_use_after_return: g++ 12 places 64-byte vectors unaligned on its fake stacks (GCC bug 110027).
    sanitizer_options = (
        "export ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=0:check_initialization_order=1:allocator_may_return_null=1\n"
        "export UBSAN_OPTIONS=print_stacktrace=1\n"
    )
    # Without address randomisation, because ThreadSanitizer of these compilers cannot place its shadow with some kernels' settings.
    fixed_addresses = "$(setarch -R true 2>/dev/null && echo setarch -R)"
    return [
        Stage("setup", "tools/setup.sh test", count_status, 900),
        Stage(
            "build",
            "export CCACHE_BASEDIR=$PWD/build  # as tools/make_wheel.sh has it\n"
            "cmake --preset release --log-level=WARNING -DFATTN_WERROR=ON -DFATTN_BUILD_TESTS=ON\n" + build % "build",
            count_status,
            2400,
        ),
        # One build for three stages: clang++ takes everything without a warning, its sanitizers see the tests, its fuzzers the rest.
        Stage("clang", f"cmake --preset asan --log-level=WARNING\n" + build % "build/asan", count_status, 2400),
        # What pip fetches and unpacks takes one processor at most, and as long as two builds of which ccache has most.
        Stage("downloads", "tools/python_venv.sh\ntools/package_venv.sh packages\n", count_status, 7200, beside="clang"),
        # The wheel takes one processor at most: ccache has its objects from the stage build.
        *([Stage("wheel", make_wheel(jobs), count_status, 7200, beside="clang")] if wheel_apart else []),
        *([Stage("clang-release", "cmake --preset clang --log-level=WARNING\n" + build % "build/clang", count_status, 2400)] if long else []),
        Stage("gtest", ctest("build", jobs, prefix=whole or f"GTEST_FILTER='{SAMPLE_FILTER}'", timeout_s=WHOLE_S if long else 900), count_ctest, 10800 if long else 2400),
        Stage(
            "python",
            "tools/python_venv.sh\n"
            f'{whole}FATTN_CLI="$PWD/build/cli/fattn" build/venv/bin/python -m pytest {side_by_side} tests/python --ignore tests/python/package -q '
            '--junitxml="$REPORTS/pytest.xml"\n',
            count_pytest,
            1800,
        ),
        Stage(
            "package",
            ("" if wheel_apart else make_wheel(jobs))
            + "tools/package_venv.sh\n"
            f'{whole}build/venv-package/bin/python -m pytest {side_by_side} tests/python/package -q --junitxml="$REPORTS/pytest.xml"\n',
            count_pytest,
            7200,
        ),
        # Logits, gradients and weights of GPT-2 beside those of transformers, which only the package's environment has.
        Stage(
            "gpt2",
            f'{whole}FATTN_TORCH_PYTHON="$PWD/build/venv-package/bin/python" FATTN_CLI="$PWD/build/cli/fattn" build/venv/bin/python -m pytest {side_by_side} '
            "tests/python/test_gpt2_model.py tests/python/test_gpt2_training.py tests/python/test_gpt2_weights.py -k 'logits or loss_and_text or gradients or steps or through_transformers' -q "
            '--junitxml="$REPORTS/pytest.xml"\n',
            count_pytest,
            1800,
        ),
        *(package_stages(jobs) if long else []),
        Stage(
            "kernels",
            "status=0\n"
            "python3 tools/check_kernels.py --self-test || status=1\n"
            "python3 tools/compare_cubins.py --self-test || status=1\n"
            f"python3 tools/check_kernels.py --jobs {jobs}{' --full' if long else ''} || status=1\n"
            "nvrtc=$(python3 tools/check_kernels.py --print-nvrtc)\n"
            'if FATTN_TEST_NVRTC="$nvrtc" build/tests/test_jit_nvrtc --gtest_filter=\'JitReal*\'; then echo \'1 passed, 0 failed\'\n'
            "else status=1; echo '0 passed, 1 failed'; fi\n"
            # Rules on registers: all of them, or one.
            f'FATTN_NVRTC="$nvrtc" FATTN_CACHE_DIR="$PWD/build/kernel-cache" build/tests/find_spills -j {jobs} --filter "{"" if long else "fp32, softcap above 64"}" || status=1\n'
            "exit $status\n",
            count_line,
            10800 if long else 2400,
        ),
        # These four do one thing at a time each.
        Stage("install", "tests/install/test_install.sh build", count_line),
        Stage("smoke", "tools/smoke.sh build", count_line, beside="install"),
        Stage(
            "structure",
            "status=0\n"
            "for check in includes types headers symbols; do\n"
            "  python3 tools/check_$check.py --self-test || status=1\n"
            "  python3 tools/check_$check.py || status=1\n"
            "done\n"
            "python3 tools/test.py --self-test || status=1\n"
            "exit $status\n",
            count_line,
            beside="install",
        ),
        Stage(
            "documents",
            "status=0\n"
            f"{whole}python3 tools/check_docs.py || status=1\n"
            "python3 tools/check_documents.py || status=1\n"
            "python3 tools/check_design.py --self-test || status=1\n"
            "python3 tools/check_design.py || status=1\n"
            "for check in make_abi make_cli_reference make_features make_migration make_numbers make_result_tables make_report make_spills make_tile_tables compact_records; do\n"
            "  if python3 tools/$check.py --check; then echo '1 passed, 0 failed'; else status=1; echo '0 passed, 1 failed'; fi\n"
            "done\n"
            "exit $status\n",
            count_line,
            beside="install",
        ),
        Stage("asan", sanitizer_options + heavy_and_light("build/asan", jobs, long), count_ctest, 10800 if long else 2400),
        Stage("fuzz", f"tools/fuzz.sh build/asan {fuzz_s}\n", count_line, 1200 + 10 * fuzz_s),
        Stage(
            "tsan",
            "export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1\n"
            "cmake --preset tsan --log-level=WARNING\n" + build_tests("build/tsan", jobs, THREADED)
            + in_shards("build/tsan", jobs, f"-R '{THREADED}'", "GTEST_FILTER='" + ("*" + FORKS if long else TSAN_FILTER + FORKS + NOT_OF_THREADS) + "' " + fixed_addresses,
                        WHOLE_S if long else 900),
            count_ctest,
            10800 if long else 2400,
        ),
        Stage(
            "neon",
            "cmake -S /usr/src/googletest -B build/neon-gtest -G Ninja --log-level=WARNING -DBUILD_GMOCK=OFF -DCMAKE_BUILD_TYPE=Debug "
            '--toolchain "$PWD/tools/cmake/aarch64-linux-gnu.cmake" -DCMAKE_INSTALL_PREFIX="$PWD/build/neon-gtest/prefix"\n'
            + (build % "build/neon-gtest").replace("\n", " --target install\n")
            + "cmake --preset neon --log-level=WARNING\n"
            + build_tests("build/neon", jobs, PORTABLE)
            + in_shards("build/neon", jobs, f"-R '{PORTABLE}'", f"FATTN_TEST_WHOLE={int(long)} GTEST_FILTER='{EMULATED_FILTER if long else PORTABLE_FILTER}'",
                        WHOLE_S if long else 900),
            count_ctest,
            10800 if long else 2400,
        ),
    ]


def self_test():
    """The runner on made-up stages: nothing that fails, hangs, crashes or runs nothing may look like a pass."""
    three = '<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase>'
    junit = f"<testsuites><testsuite>{three}</testsuite></testsuites>"
    ctest_ok = '<testsuite><testcase name="t" status="run"/></testsuite>'
    ctest_bad = '<testsuite><testcase name="t" status="fail"><failure/></testcase></testsuite>'
    ctest_gone = '<testsuite><testcase name="t" status="notrun"><skipped/></testcase></testsuite>'
    write = "mkdir -p $REPORTS/gtest; printf '%s' '{}' > $REPORTS/{}\n"
    cases = [
        (Stage("passes", "true", count_status), Count(1, 0)),
        (Stage("fails", "false; true", count_status), Count(0, 1)),
        (Stage("pipe", "false | true", count_status), Count(0, 1)),
        (Stage("hangs", "sleep 60", count_status, 1), Count(0, 1)),
        (Stage("lines", "echo 3 passed, 0 failed; echo 2 passed, 1 failed", count_line), Count(5, 1)),
        (Stage("lines_status", "echo 3 passed, 0 failed; exit 1", count_line), Count(3, 1)),
        (Stage("nothing", "true", count_line), Count(0, 1)),
        (Stage("pytest", write.format(junit, "pytest.xml"), count_pytest), Count(1, 1, 1)),
        (Stage("pytest_gone", "exit 4", count_pytest), Count(0, 1)),
        (Stage("pytest_cut", write.format("<testsuites><testsuite>", "pytest.xml"), count_pytest), Count(0, 1)),
        (Stage("gtest", write.format(ctest_bad, "ctest.xml") + write.format(junit, "gtest/t.xml"), count_ctest), Count(1, 1, 1)),
        (Stage("gtest_plain", write.format(ctest_ok, "ctest.xml"), count_ctest), Count(1, 0)),
        (Stage("gtest_crash", write.format(ctest_bad, "ctest.xml"), count_ctest), Count(0, 1)),
        (Stage("gtest_cut", write.format(ctest_bad, "ctest.xml") + write.format("<testsuites>", "gtest/t.xml"), count_ctest), Count(0, 1)),
        (Stage("gtest_unbuilt", write.format(ctest_gone, "ctest.xml"), count_ctest), Count(0, 1)),
        (Stage("gtest_filtered", write.format(ctest_ok, "ctest.xml") + write.format("<testsuites/>", "gtest/t.xml"), count_ctest), Count(0, 1)),
    ]
    passed = failed = 0
    for long in (False, True):
        for apart in (False, True):  # somewhere before its tests the wheel is made
            scripts = [stage.script for stage in stages(1, long, apart)]
            made = next(i for i, script in enumerate(scripts) if "tools/make_wheel.sh\n" in script)
            assert made <= next(i for i, script in enumerate(scripts) if "venv-package/bin/python -m pytest" in script)
    with tempfile.TemporaryDirectory() as folder:
        for stage, expected in cases:
            with contextlib.redirect_stdout(None):
                [(_, count)] = run_group([stage], Path(folder), Path(folder), verbose=False)
            right = count == expected
            passed, failed = passed + right, failed + (not right)
            if not right:
                print(f"self-test {stage.name}: expected {expected}, got {count}")
    # Side by side: both are waited for, whichever ends first, and each has its own result.
    pair = [Stage("slow", "while [ ! -e b ]; do sleep 0.05; done", count_status, 20), Stage("quick", "touch b; false", count_status, beside="slow")]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        found = {run.stage.name: count for run, count in run_group(pair, Path(folder), Path(folder), verbose=False)}
    right = found == {"slow": Count(1, 0), "quick": Count(0, 1)} and groups(pair) == [pair] and groups(pair[1:]) == [pair[1:]]
    passed, failed = passed + right, failed + (not right)
    if not right:
        print(f"self-test of two side by side: got {found}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="programs at once (default: all CPUs)")
    parser.add_argument("--long", action="store_true", help="whole table under sanitizers and emulator, 10 minutes of fuzzing")
    parser.add_argument("--only", action="append", metavar="STAGE", help="run this stage alone; may be repeated")
    parser.add_argument("--verbose", action="store_true", help="show what the stages print while they run")
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    parser.add_argument("--self-test", action="store_true", help="test the runner itself")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    chosen = stages(max(arguments.jobs, 1), arguments.long, wheel_apart=not arguments.only or "wheel" in arguments.only)
    names = [stage.name for stage in chosen]
    if arguments.list:
        print("\n".join(names))
        return 0
    if arguments.only:
        unknown = [name for name in arguments.only if name not in names]
        if unknown:
            parser.error(f"no stage is called {', '.join(unknown)}; there are: {', '.join(names)}")
        chosen = [stage for stage in chosen if stage.name in arguments.only]
    # Bytecode of Python is kept, in build/ alone: without it each of some hundred processes compiles torch's modules again, which takes seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build/pycache"))
    # Threads of OpenMP (torch's) sleep while they wait: tests run side by side, and two times two of them that spin take each other's processors.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if shutil.which("ccache"):
        os.environ.setdefault("CMAKE_C_COMPILER_LAUNCHER", "ccache")
        os.environ.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")  # else nothing with a precompiled header is found
    return run_stages(chosen, ROOT, REPORTS, arguments.verbose)


if __name__ == "__main__":
    sys.exit(main())
