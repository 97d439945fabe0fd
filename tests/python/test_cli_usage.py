"""The command line's skeleton: help, versions, exit codes, errors that help, output that is only what it should be."""
import json
import os
import re
import subprocess

import pytest

COMMANDS = ["info", "run", "check", "bench", "compare"]


def test_help_lists_every_command(fattn):
    text = fattn("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.M), text
    assert "Exit codes" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(fattn, command):
    text = fattn(command, "--help").stdout
    assert "--json" in text and "FILE|-" in text


def test_version(fattn):
    assert re.fullmatch(r"fattn \d+\.\d+\.\d+\n", fattn("--version").stdout)


def test_no_command(fattn):
    assert "--help" in fattn.refuses()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["inof"], "has no command 'inof'; did you mean 'info'?"),
        (["--verson"], "has no flag '--verson'; did you mean '--version'?"),
        (["check", "--bakend", "cpu"], "fattn check has no flag '--bakend'; did you mean '--backend'?"),
        (["run", "--cuasal"], "fattn run has no flag '--cuasal'; did you mean '--causal'?"),
        (["info", "--zzzzzzzzzz"], "fattn info has no flag '--zzzzzzzzzz'"),
        (["info", "surplus"], "fattn info has no argument 'surplus'"),
        (["info", "--jsn=x"], "has no flag '--jsn'; did you mean '--json'?"),
        (["run", "--input", "x"], "--output is required"),
        (["check", "--backend", "gpu"], "gpu not in {auto,reference,cpu}"),
        (["check", "--threads", "many"], "many"),
        (["check", "--threads", "-1"], "-1 not in range"),
        (["check", "--dtype", "fp8"], "fp8 not in"),
        (["check", "--filter"], "--filter"),
        (["info", "--json"], "--json"),
    ],
)
def test_bad_usage(fattn, arguments, expected):
    assert expected in fattn.refuses(*arguments)


def test_unknown_flag_of_a_wild_user_is_printed_harmlessly(fattn):
    error = fattn.refuses("info", "--\x1b[31mred\x07\u202e")
    assert "\\x1b[31mred\\x07\\u202e" in error
    assert len(fattn.refuses("info", "--" + "x" * 100_000)) < 1000


def test_info(fattn):
    text = fattn("info").stdout
    for word in ("CPU", "ISAs", "Caches", "Memory", "Threads", "GPU", "no GPU backend", "Libraries", "Environment variables", "FATTN_CPU_ISA"):
        assert word in text
    info = fattn.json("info")
    assert "scalar" in info["cpu"]["isas_available"]
    assert 1 <= info["cpu"]["usable_threads"] <= info["cpu"]["logical_cpus"]
    assert info["gpu"]["available"] is False and "no GPU backend" in info["gpu"]["reason"]
    for library in info["libraries"]:
        assert bool(library["path"]) == library["loaded"] and bool(library["reason"]) != library["loaded"]


def test_info_says_why_it_has_these_threads(fattn):
    cpus = sorted(os.sched_getaffinity(0))
    one = fattn.json("info", preexec_fn=lambda: os.sched_setaffinity(0, cpus[:1]))["cpu"]
    assert one["usable_threads"] == 1
    if len(cpus) > 1:
        assert "affinity" in one["usable_threads_why"]
    set_to = fattn.json("info", env={"FATTN_NUM_THREADS": "1"})["cpu"]
    assert set_to["usable_threads"] == 1 and "FATTN_NUM_THREADS" in set_to["usable_threads_why"]


def test_values_of_variables_are_printed_harmlessly(fattn):
    value = "/no\x1b[2J\nsuch"
    done = fattn("info", env={"FATTN_OPENBLAS": value})
    assert "\x1b" not in done.stdout and "/no\\x1b[2J\\nsuch" in done.stdout
    info = fattn.json("info", env={"FATTN_OPENBLAS": value})
    assert "/no\\x1b[2J\\nsuch" in [v["value"] for v in info["environment_variables"]]


def test_a_variable_that_is_no_utf8_does_not_break_the_json(fattn):
    done = fattn("info", "--json", "-", env={"FATTN_OPENBLAS": "/no/\udcff"})
    assert "/no/\\xff" in json.dumps(json.loads(done.stdout), ensure_ascii=False).replace("\\\\", "\\")


def test_json_file_is_whole(fattn, tmp_path):
    target = tmp_path / "info.json"
    target.write_text("old")
    done = fattn("info", "--json", target)
    assert "CPU" in done.stdout
    assert json.loads(target.read_text())["fattn_info"] == 1
    assert os.listdir(tmp_path) == ["info.json"]


@pytest.mark.parametrize("target", ["/nonexistent/folder/x.json", "/dev/null", "/"])
def test_json_that_cannot_be_written(fattn, target):
    assert target in fattn.refuses("info", "--json", target)
    assert os.path.exists("/dev/null")


def test_stdout_that_is_full(fattn):
    with open("/dev/full", "w") as full:
        for arguments in (["info"], ["info", "--json", "-"]):
            done = subprocess.run([fattn.path, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 2 and "stdout" in done.stderr
