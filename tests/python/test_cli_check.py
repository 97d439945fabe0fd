"""`fattn check`: the table of cases with its verdicts."""
import re
import subprocess

import pytest

from conftest import screen


def names(fattn, *flags):
    return fattn("check", "--list", *flags).stdout.split()


def test_list(fattn):
    everything = names(fattn)
    assert len(everything) == len(set(everything)) > 100
    bf16 = names(fattn, "--dtype", "bf16")
    assert bf16 and set(bf16) < set(everything) and all("bf16" in name for name in bf16)
    causal = names(fattn, "--dtype", "bf16", "--filter", "causal")
    assert causal and all("causal" in name for name in causal)
    assert fattn.json("check", "--list")["cases"] == everything


def test_nothing_matches(fattn):
    assert "--list" in fattn.refuses("check", "--filter", "no such case")


@pytest.fixture(scope="session")
def one(fattn):
    """The name of one small fp32 case."""
    return min(names(fattn, "--dtype", "fp32", "--filter", "-q7-"), key=len)


def test_verdicts(fattn, one):
    done = fattn("check", "--filter", one, "--dtype", "fp32", "--backend", "reference", "--verbose")
    assert re.search(rf"^passed  {re.escape(one)}$", done.stdout, re.M)
    assert re.search(r"^ +o +error \S+ +allowed \S+ ok$", done.stdout, re.M)
    assert re.match(r"2 cases on device cpu, backend reference, algorithm auto, isa auto\n", done.stdout)
    assert re.search(r"^All 2 cases passed: every output is within its error bound", done.stdout, re.M)
    assert re.search(r"^In [\d.]+ s: 2 passed, 0 failed, 0 skipped$", done.stdout, re.M)


def test_quiet(fattn):
    """A line a group, not five a case; the same cases and counts as with --verbose."""
    flags = ["check", "--filter", "-q7-"]
    done, verbose = fattn(*flags), fattn(*flags, "--verbose")
    lines = done.stdout.splitlines()
    cases = re.findall(r"^passed  (\S+)$", verbose.stdout, re.M)
    assert len(cases) > 10 and not any(case in done.stdout for case in cases) and len(lines) < 40
    assert cases == names(fattn, "--filter", "-q7-")
    groups = [line.split("  ") for line in lines if re.match(r"(fp32|fp16|bf16)  ", line)]
    assert {group[0] for group in groups} == {"fp32", "fp16", "bf16"}
    counts = [[int(word) for word in re.findall(r" (\d+)(?= )", line + " ")][:4] for line in lines if re.match(r"(fp32|fp16|bf16)  ", line)]
    assert sum(count[0] for count in counts) == sum(count[1] for count in counts) == len(cases)
    assert f"All {len(cases)} cases passed" in done.stdout and done.stderr == ""


WRONG_BLAS = """
void cblas_sgemm(void) {}
int openblas_get_num_threads(void) { return 1; }
void openblas_set_num_threads(int n) { (void)n; }
int openblas_get_parallel(void) { return 1; }
const char* openblas_get_config(void) { return "computes nothing"; }
"""


@pytest.fixture(scope="session")
def wrong_blas(tmp_path_factory):
    """Matrix products that are not computed: every case of algorithm standard is wrong."""
    folder = tmp_path_factory.mktemp("blas")
    (folder / "wrong.c").write_text(WRONG_BLAS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libwrong.so", "wrong.c"], cwd=folder, check=True)
    return {"FATTN_OPENBLAS": str(folder / "libwrong.so")}


def test_failures_are_told_at_once_with_their_details(fattn, wrong_blas):
    flags = ["check", "--dtype", "fp32", "--algorithm", "standard", "--backend", "cpu", "--filter", "-q7-"]
    done = fattn(*flags, status=1, env=wrong_blas)
    wrong = re.findall(r"^FAILED  (\S+)$", done.stdout, re.M)
    assert wrong and set(wrong) <= set(names(fattn, "--filter", "-q7-"))
    assert re.search(r"^ +o +error \S+ +allowed \S+ FAILED: ", done.stdout, re.M), done.stdout
    words = " ".join(done.stdout.split())
    assert re.search(rf"{len(wrong)} of \d+ cases FAILED: what is wrong is above", words), words
    assert done.stdout.index("FAILED") < done.stdout.index("dtype")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    text = fattn.in_terminal(*flags, status=1, width=80, env=wrong_blas)
    assert "\x1b[31mFAILED\x1b[0m" in text and "\x1b[32mAll" not in text
    assert not [line for line in screen(text) if len(line) > 80 or "check [" in line]


def test_few_groups(fattn):
    """Of the whole table a summary that fits a screen."""
    subjects = fattn("check", "--dtype", "fp16", "--backend", "reference", "--filter", "-d8-").stdout
    assert 0 < len(re.findall(r"^fp16  ", subjects, re.M)) <= 10


def test_progress_is_for_terminals(fattn):
    flags = ["check", "--dtype", "bf16", "--filter", "-q7-"]
    assert re.search(r"\rcheck|\x1b\[Kcheck", fattn.in_terminal(*flags, width=80))
    assert not [line for line in screen(fattn.in_terminal(*flags, width=80)) if line.startswith("check [")]
    assert fattn(*flags).stderr == ""

def test_record(fattn, one):
    record = fattn.json("check", "--filter", one, "--dtype", "fp32", "--backend", "reference")
    assert record["status"] == "ok" and record["failed"] == 0 and record["passed"] == len(record["cases"]) > 0
    assert record["environment"]["cpu"]
    for case in record["cases"]:
        assert case["outcome"] == "passed"
        for verdict in case["verdicts"]:
            assert verdict["pass"] and verdict["error"] <= verdict["allowed"]


def test_random_combinations(fattn):
    """The same every time, each of another name, and each passes."""
    all_of = names(fattn, "--random", "20")
    assert all_of == names(fattn, "--random", "20") and len(set(all_of)) == 60 and names(fattn, "--random", "2") == all_of[:6]
    record = fattn.json("check", "--random", "3", "--dtype", "bf16")
    assert [case["case"] for case in record["cases"]] == [name for name in all_of[:9] if name.startswith("bf16")] and record["passed"] == 3
    assert "--random" in fattn.refuses("check", "--random", "0")


def test_nothing_could_run(fattn, one):
    """A check that checks nothing is no pass."""
    available = fattn.json("info")["cpu"]["isas_available"]
    absent = next(isa for isa in ("neon", "amx", "avx512", "avx2") if isa not in available)
    done = fattn("check", "--filter", one, "--backend", "cpu", "--isa", absent, status=2)
    assert "nothing was checked" in done.stderr and absent in done.stderr
    assert "skipped, the first:" in done.stdout and "0 passed, 0 failed, 2 skipped" in done.stdout
    assert "skipped " + one in fattn("check", "--filter", one, "--backend", "cpu", "--isa", absent, "--verbose", status=2).stdout


@pytest.mark.parametrize("which", ["--accuracy", "--values"])
def test_what_python_measures(fattn, tmp_path, which):
    """The program becomes a Python, with all flags but the one that names it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nshift 2\nprintf '%s\\n' \"$@\"\nexit 7\n")
    python.chmod(0o755)
    for given in (["--python", python], [f"--python={python}"]):
        done = fattn("check", which, *given, "--sigma", "1,2", "--json", "a b.json", status=7)
        assert done.stdout.splitlines() == ["check", which, "--sigma", "1,2", "--json", "a b.json"]
    assert "--python PATH" in fattn.refuses("check", which, "--python", tmp_path / "none")
    assert "--python" in fattn.refuses("check", which, "--python")
    if not _has_package():
        assert "fattn[torch]" in fattn.refuses("check", which)


def _has_package() -> bool:
    return subprocess.run(["python3", "-c", "import fattn"], capture_output=True).returncode == 0
