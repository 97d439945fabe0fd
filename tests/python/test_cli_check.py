"""`fattn check`: the table of cases with its verdicts."""
import os
import re
import signal
import subprocess
import time

import pytest


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
    done = fattn("check", "--filter", one, "--dtype", "fp32", "--backend", "reference")
    assert re.search(rf"^passed  {re.escape(one)}$", done.stdout, re.M)
    assert re.search(r"^ +o +error \S+ +allowed \S+ ok$", done.stdout, re.M)
    assert re.search(r"\d+ cases on device cpu, backend reference.*: \d+ passed, 0 failed, 0 skipped", done.stdout)


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
    assert "skipped " + one in done.stdout


def test_interrupted(fattn, tmp_path):
    process = subprocess.Popen(
        [fattn.path, "check", "--backend", "reference", "--json", tmp_path / "record.json"],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert os.listdir(tmp_path) == []


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
