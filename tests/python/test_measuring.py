"""What is said about a measurement: how long it takes, what disturbs it, who is not here; presets by their names; the Python beside the program."""
import json
import os
import pathlib
import re
import resource
import select
import shutil
import subprocess
import sys
import time

import pytest

from terminal import Terminal
from test_bench_compare import TINY
from test_provider import HONEST, LOOP

PEERS = ["flash-attn", "flashinfer", "flex-attention", "torch-sdpa", "torch-standard", "xformers"]


# How long it takes.


def test_a_silly_problem_is_refused_with_its_time(fattn):
    start = time.monotonic()
    error = fattn.refuses("bench", "--seqlen", "300000", "--nheads", "1")
    assert time.monotonic() - start < 60
    assert re.search(r"B1 S300000 H1 D64 fp32 would take about \d+ (minutes|hours|days); allowed: 1 hour\. Choose a smaller problem", error), error
    assert re.search(r"or allow it with --patience \d+[hd]", error), error
    again = fattn.refuses("compare", "--seqlen", "300000", "--nheads", "1", "--provider", "fattn", "--patience", "90s")
    assert "allowed: 90 seconds" in again and "would take about" in again


def processor_seconds(call):
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = call()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


# The machine's peaks take seconds, on many cores more: what is refused needs none. Processor time, which other programs do not change.
def test_what_is_refused_is_so_before_anything_is_measured(fattn, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 64, "n_positions": 32}))
    fattn("gpt2", "init", tmp_path / "model", "--config", tmp_path / "config.json")
    no_kernel = "algorithm v3 is for Hopper GPUs"
    for call in (lambda: fattn("bench", "--algorithm", "v3", status=2).stdout, lambda: fattn("sweep", "--over", "seqlen", "--values", "64,128", "--algorithm", "v3", status=2).stdout,
                 lambda: fattn.refuses("gpt2", "bench", tmp_path / "model", "--algorithm", "v3")):
        said, seconds = processor_seconds(call)
        assert no_kernel in " ".join(said.split()) and seconds < 1, (said, seconds)
    record = json.loads(fattn("bench", "--algorithm", "v3", "--json", "-", status=2).stdout)
    assert [row["status"] for row in record["rows"]] == 3 * ["unsupported"] and record["peaks"]["before"]["fma_flops_per_s"] is None


def test_patience_is_a_time(fattn):
    assert "'soon' is no time; allowed: seconds, or a number with s, m, h or d behind it, e.g. 90m" in fattn.refuses("bench", "--patience", "soon")
    for silly in ("0", "-1h", "h", "1w", "nan", "1e400"):
        assert "is no time" in fattn.refuses("bench", "--patience", silly)
    record = fattn.json("bench", *TINY, "--no-grad", "--patience", "2h")
    assert record["flags"][record["flags"].index("--patience") + 1] == "7200"
    assert "--patience" not in fattn.json("bench", *TINY, "--no-grad")["flags"]


def test_long_work_says_how_long_before_it_begins(fattn):
    line = first_line([fattn.path, "bench", "--backend", "reference", "--seqlen", "8192", "--no-grad", "--patience", "30d"])
    assert re.fullmatch(r"bench: about \d+ (seconds|minutes?|hours?)\n", line), line


def first_line(command, timeout=120):
    """What a command says on stderr before anything else; then it is ended."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    ready, _, _ = select.select([process.stderr], [], [], timeout)
    line = process.stderr.readline() if ready else ""
    process.kill()
    process.wait(timeout=60)
    process.stderr.close()
    return line


# One part each: every kind of call in a suite is timed to know how long it takes.
PARTS = {"cpu": "Speed, fp32", "prices": "B2 S2048 H4 D64 fp32"}


@pytest.mark.parametrize("suite, what", [("cpu", "suite"), ("prices", "prices")])
def test_a_suite_says_how_long_before_it_begins(fattn, suite, what):
    line = first_line([fattn.path, "bench", "--suite", suite, "--only", PARTS[suite], "--python", "/nonexistent/python"])
    assert re.fullmatch(rf"{what}: about \d+ (seconds|minutes|hours?)\n", line), line


@pytest.mark.parametrize("suite", ["cpu", "prices"])
def test_a_suite_is_refused_with_its_time(fattn, suite):
    error = fattn.refuses("bench", "--suite", suite, "--only", PARTS[suite], "--patience", "5s", "--python", "/nonexistent/python")
    assert re.fullmatch(rf"fattn: the suite {suite} would take about \d+ \w+; allowed: 5 seconds\. Choose parts of it with --only, or --quick, or allow "
                        r"it with --patience \d+h\n", error), error


def test_short_work_says_nothing(fattn):
    assert fattn("bench", *TINY).stderr == ""


def on_terminal(command, timeout=120):
    """What a command writes to a terminal, with the time of each piece."""
    with Terminal(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as terminal:
        terminal.rest(timeout)
        assert terminal.process.returncode == 0
        return terminal.pieces


def test_time_left_is_steady(fattn):
    pieces = on_terminal([fattn.path, "bench", "--seqlen", "2048", "--nheads", "4", "--min-time", "1"])
    left = [(at, int(seconds)) for at, piece in pieces for seconds in re.findall(r"(\d+) seconds? left", piece)]
    assert len(left) >= 5, pieces
    for (before, was), (at, now) in zip(left, left[1:]):
        assert now <= was + 0.5 * (at - before) + 1.01, left  # rounded
    assert left[-1][1] <= max(3, left[0][1] / 2), left
    shares = [int(share) for _, piece in pieces for share in re.findall(r"(\d+) %", piece)]
    assert shares == sorted(shares) and shares[-1] >= 95, shares


# What disturbs it.


@pytest.fixture
def busy_machine():
    """Other programs, as many as there are processors, that compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(os.cpu_count())]
    yield
    for program in programs:
        program.kill()
        program.wait()


LONG_ENOUGH = ["--seqlen", "512", "--nheads", "2", "--no-grad", "--min-time", "0.5"]
BUSY = r"^Busy machine: other programs used \d+\.\d of \d+ CPUs; repeat when it is quiet\.$"


@pytest.mark.parametrize("command", [("bench", *LONG_ENOUGH), ("compare", *LONG_ENOUGH, "--provider", "fattn")])
def test_a_busy_machine_is_said(fattn, busy_machine, tmp_path, command):
    target = tmp_path / "record.json"
    text = fattn(*command, "--json", target).stdout
    record = json.loads(target.read_text())
    lines = [line for line in text.splitlines() if re.match(BUSY, line)]
    assert len(lines) == 1 and len(lines[0]) <= 80, text
    assert record["disturbance"]["warning"] == lines[0]
    assert record["disturbance"]["other_cpus"] > 0.2


def test_own_processes_are_no_others(fattn, tmp_path):
    """A provider that computes is this program's."""
    spin = "def spin(r):\n    end = time.perf_counter() + 0.3\n    while time.perf_counter() < end: pass\n    return times(r)\nOPS['time'] = spin\n"
    (tmp_path / "spinning.py").write_text(HONEST + spin + LOOP)
    for _ in range(3):
        record = fattn.json("compare", *TINY, "--no-grad", "--providers", tmp_path, "--python", sys.executable, "--provider", "spinning")
        others = record["disturbance"]["other_cpus"]
        if others < 0.7:  # it would count as a whole one
            return
    assert os.getloadavg()[0] > 1.5, others


@pytest.mark.parametrize("command", [("bench", *LONG_ENOUGH), ("bench", "--suite", "cpu", "--quick", "--no-grad", "--only", "Small", "--python", "/nonexistent/python")],
                         ids=["one", "suite"])
def test_what_is_said_is_in_the_record(fattn, tmp_path, command):
    target = tmp_path / "record.json"
    text = fattn(*command, "--json", target).stdout
    record = json.loads(target.read_text())
    warning = record["disturbance"]["warning"]
    assert warning in text if warning else "machine:" not in text
    assert record["disturbance"]["seconds"] > 0 and record["disturbance"]["cpus"] >= 1
    assert record["rows"][0]["time_spread_fraction"] >= 0 and record["rows"][0]["held_back_by"] == []


# Who is not here.


def test_absent_peers_are_one_line(fattn, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    environment = {"PYTHONPATH": str(tmp_path), "COLUMNS": "500"}
    done = fattn("compare", *TINY, "--python", sys.executable, env=environment)
    assert done.stdout.count("Not here: ") == 1, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Not here: ")]
    assert line == "Not here: flash-attn, flashinfer, xformers (for GPUs); flex-attention, torch-sdpa, torch-standard (no module named torch)"
    assert "nstall" not in done.stdout and "unavailable" not in done.stdout, done.stdout
    for peer in PEERS:
        assert done.stdout.count(peer) == 1, done.stdout
    # Whoever asks for one is told all there is to say, and the record has it in any case.
    asked = fattn("compare", *TINY, "--no-grad", "--python", sys.executable, "--provider", "fattn", "--provider", "torch-sdpa", env=environment).stdout
    assert "Not here" not in asked and "Install PyTorch, or name another Python with --python" in asked
    rows = fattn.json("compare", *TINY, "--no-grad", "--python", sys.executable, env=environment)["rows"]
    assert {row["provider"]: row["status"] for row in rows if row["provider"] in PEERS} == {
        **dict.fromkeys(["flash-attn", "flashinfer", "xformers"], "unsupported"), **dict.fromkeys(["flex-attention", "torch-sdpa", "torch-standard"], "unavailable")}


def test_no_python_is_one_reason(fattn):
    text = fattn("compare", *TINY, "--no-grad", "--python", "/nonexistent/python", env={"COLUMNS": "500"}).stdout
    assert text.count("/nonexistent/python") == 1 and f"Not here: {', '.join(PEERS)} (cannot start /nonexistent/python: " in text


def test_who_has_no_backward_pass_races_forward(fattn, tmp_path):
    forward = "def hello_forward(r):\n    assert r['device'] == 'cpu'\n    return {**hello(r), 'forward_only': 'it never learned to'}\nOPS['hello'] = hello_forward\n"
    take = "def take_forward(r):\n    assert not r['grad']\n    return take(r)\nOPS['problem'] = take_forward\n"
    (tmp_path / "fake.py").write_text(HONEST + forward + take + LOOP)
    arguments = ["compare", *TINY, "--providers", tmp_path, "--python", sys.executable, "--provider", "fattn", "--provider", "fake"]
    rows = {row["pass"]: row for row in fattn.json(*arguments)["rows"] if row["provider"] == "fake"}
    assert rows["fwd"]["status"] == "ok" and rows["fwd"]["samples"] >= 6 and rows["fwd"]["extra_bytes"] == 4096
    for name in ("bwd", "fwdbwd"):
        assert (rows[name]["status"], rows[name]["reason"]) == ("unsupported", "it never learned to")
    assert fattn(*arguments).stdout.count("it never learned to") == 1


# Python.


@pytest.fixture
def own_python(fattn, tmp_path):
    """make(bin of Python, bin of fattn): copies of the program and a Python that says that it is the one."""
    (tmp_path / "providers").mkdir()
    tell = "import os\nOPS['hello'] = lambda r: {**hello(r), 'version': os.environ.get('WHO', 'of PATH')}\n"
    (tmp_path / "providers" / "fake.py").write_text(HONEST + tell + LOOP)

    def make(python, program):
        for folder in (python, program):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        script = tmp_path / python / "python3"
        script.write_text(f"#!/bin/sh\nWHO=beside exec {sys.executable} \"$@\"\n")
        script.chmod(0o755)
        copy = shutil.copy(fattn.path, tmp_path / program / "fattn")
        libraries = pathlib.Path(fattn.path).parent.parent / "src"
        done = subprocess.run([copy, "compare", *TINY, "--no-grad", "--providers", tmp_path / "providers", "--provider", "fake", "--json", "-"],
                              capture_output=True, text=True, timeout=120, env={**os.environ, "LD_LIBRARY_PATH": str(libraries)})
        return json.loads(done.stdout)["rows"][0]["version"]

    return make


@pytest.mark.parametrize("python, program", [("venv/bin", "venv/bin"), ("venv/bin", "venv/lib/python3.11/site-packages/fattn/bin"),
                                             ("usr/bin", "usr/lib/python3/dist-packages/fattn/bin")])
def test_python_beside_the_program_is_found(own_python, python, program):
    assert own_python(python, program) == "beside"


# Presets.


@pytest.mark.parametrize("given, preset", [("gpt2", "gpt2-small"), ("GPT-2", "gpt2-small"), ("gpt2_medium", "gpt2-medium"), ("llama-3-8b", "llama3-8b"),
                                           ("bert", "bert-base"), ("gpt2-xl", "gpt2-xl")])
def test_presets_by_other_names(fattn, given, preset):
    # Too little memory for any of them, so that nothing is measured.
    errors = [fattn.refuses("bench", "--preset", name, "--memory-limit", "1KiB") for name in (given, preset)]
    assert errors[0] == errors[1] and "the input of B" in errors[0]


@pytest.mark.parametrize("given, preset", [("gpt2-smal", "gpt2-small"), ("lama3-8b", "llama3-8b"), ("bert-bas", "bert-base"), ("context-32k", "context-16k")])
def test_a_misspelled_preset_is_suggested(fattn, given, preset):
    error = fattn.refuses("bench", "--preset", given)
    assert f"there is no preset '{given}'; did you mean '{preset}'?" in error and "--preset list" in error


def test_presets_show_their_shapes(fattn):
    done = fattn("bench", "--preset", "list")
    header, _, *lines = done.stdout.splitlines()
    assert header.split() == ["preset", "batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "passes"]
    assert ["llama3-8b", "1", "8192", "32", "8", "128", "yes", "all"] in [line.split() for line in lines]
    assert len(lines) >= 12 and max(map(len, done.stdout.splitlines())) <= 80
    assert fattn("compare", "--preset", "list").stdout == done.stdout


# Records.


def test_traffic_of_the_cpu_is_in_records(fattn):
    rows = fattn.json("compare", "--seqlen", "256", "--nheads", "2", "--repeats", "6", "--min-time", "0", "--warmup", "1", "--provider", "fattn", "--provider",
                      "standard")["rows"]
    for row in rows:
        assert row["moved_bytes_model"] > row["bytes"] if row["provider"] == "fattn" else row["moved_bytes_model"] is None
    assert fattn.json("bench", *TINY, "--no-grad")["rows"][0]["moved_bytes_model"] is None, "the reference has no blocks"


def git(folder, *arguments):
    return subprocess.run(["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *arguments], capture_output=True, text=True)


def test_commit_of_a_clone_is_in_records(fattn, root):
    commit = fattn.json("bench", *TINY, "--no-grad")["environment"]["commit"]
    if not (root / ".git").exists():
        pytest.skip("the sources are no git clone")
    assert re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", commit)
    assert git(root, "cat-file", "-e", commit.removesuffix("+dirty")).returncode == 0


def test_commit_is_written_only_when_it_changes(root, tmp_path):
    source, header = tmp_path / "source", tmp_path / "made" / "source_commit.h"
    (source / "tarball").mkdir(parents=True)

    def written(folder=source, given=""):
        subprocess.run(["cmake", f"-DSOURCE={folder}", f"-DHEADER={header}", f"-DGIVEN={given}", "-P", root / "cmake" / "write_commit.cmake"], check=True)
        return re.fullmatch(r'#define FATTN_COMMIT "(.*)"\n', header.read_text()).group(1)

    assert written() == ""
    git(source, "init", "-q")
    (source / "file").write_text("1")
    git(source, "add", "file")
    git(source, "commit", "-qm", "x")
    head = git(source, "rev-parse", "HEAD").stdout.strip()
    assert written() == head
    before = header.stat().st_mtime_ns
    (source / "untracked").touch()
    assert written() == head and header.stat().st_mtime_ns == before
    (source / "file").write_text("2")
    assert written() == head + "+dirty"
    assert written(source / "tarball") == "", "another project's clone"
    assert written(given="v1") == "v1"
