"""`fattn profile`: the folder of a problem and of a program, its records, and what goes wrong."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, schema_of, schemas

TINY = ["--batch", "1", "--seqlen", "128", "--nheads", "2", "--headdim", "32", "--min-time", "0", "--repeats", "2", "--max-time", "0.1", "--warmup", "1", "--threads", "2"]
PROGRAM = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("structs", {structs!r})
structs = importlib.util.module_from_spec(spec)
sys.modules["structs"] = structs
spec.loader.exec_module(structs)
library = ctypes.CDLL({library!r})
library.fattn_last_error.restype = ctypes.c_char_p
numbers = [(ctypes.c_float * (64 * 2 * 16))(*[0.5] * (64 * 2 * 16)) for _ in range(4)]
problem = structs.Problem()
problem.abi_version = structs.ABI_VERSION
for name, data in zip("qkvo", numbers):
    tensor = getattr(problem, name)
    tensor.data, tensor.dtype, tensor.ndim = ctypes.addressof(data), 1, 4
    tensor.shape[:], tensor.strides[:] = (1, 64, 2, 16), (2048, 32, 16, 1)
for _ in range(4):
    assert library.fattn_execute(ctypes.byref(problem)) == 0, library.fattn_last_error()
print("output of the program")
sys.exit(5)
"""


@pytest.fixture(scope="module")
def folder(fattn, tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "of a problem"
    record = fattn.json("profile", *TINY, "--causal", "--calls", 2, "--out", out)
    assert record == json.loads((out / "profile.json").read_text())
    return out


@pytest.fixture
def program(fattn):
    library = pathlib.Path(fattn.path).resolve().parent.parent / "src" / "libfattn.so"
    return [sys.executable, "-c", PROGRAM.format(structs=str(ROOT / "python/fattn/_abi_structs.py"), library=str(library))]


def load(folder, name="profile.json"):
    return json.loads((folder / name).read_text())


def test_every_file_is_there_and_keeps_to_its_schema(folder):
    record = load(folder)
    schemas()["profile"].validate(record)
    schemas()["timeline"].validate(load(folder, "timeline.json"))
    for name in ("baseline.json", "comparison.json"):
        schema_of(load(folder, name)).validate(load(folder, name))
    assert {row["provider"] for row in load(folder, "baseline.json")["rows"]} == {"standard"}
    assert {row["provider"] for row in load(folder, "comparison.json")["rows"]} == {"fattn", "standard"}
    assert set(record["files"]) == {p.name for p in folder.iterdir() if p.is_file()}
    assert record["complete"] and record["problem"]["causal"] and load(folder, "machine.json")["environment"]["date"]


def test_operations_are_those_of_the_calls(folder):
    by = {(p["side"], p["pass"]): {o["name"]: o for o in p["operations"]} for p in load(folder)["operations"]}
    assert set(by) == {(side, which) for side in ("standard", "fattn") for which in ("fwd", "bwd")}
    assert {"s = q k^T", "p = softmax(s)", "o = p v"} <= set(by["standard", "fwd"])
    assert {"dp = dout v^T", "gradient of softmax", "dq = ds k", "dk = ds^T q", "dv = p^T dout"} <= set(by["standard", "bwd"])
    assert "tiles of queries" in by["fattn", "fwd"] and "super-blocks of keys" in by["fattn", "bwd"]
    for (side, which), operations in by.items():
        call = operations["attention forward" if which == "fwd" else "attention backward"]
        assert call["times"] == 2 and "B1 S128 H2 D32 fp32 causal" in call["detail"]
        assert sum(o["self_fraction"] for o in operations.values()) == pytest.approx(1)
        assert all(o["self_s"] <= o["time_s"] * (1 + 1e-9) for o in operations.values())
        # Nothing of a call is longer than all calls together, but for what other threads do of it.
        assert all(o["wall_s"] <= call["wall_s"] * 1.5 for o in operations.values())
    # Two products of 128 x 128 x 32 in two heads, for each of the two calls.
    assert by["standard", "fwd"]["s = q k^T"]["flops"] == 2 * (2 * 2 * 128 * 128 * 32)
    # FLOPs of a call: the visible half.
    assert by["fattn", "fwd"]["attention forward"]["flops"] == 2 * (4 * 2 * 32 * 128 * 129 / 2)


def test_totals_are_those_of_the_operations(folder):
    for part in load(folder)["operations"]:
        host = sum(o["self_s"] for o in part["operations"] if o["on"] == "host")
        assert part["totals"]["host_s"] == pytest.approx(host) and part["totals"]["gpu_s"] == 0
        assert part["totals"]["flops"] == sum(o["flops"] for o in part["operations"] if o["kind"] == "call")
    assert "All operations together, a call" in (folder / "SUMMARY.md").read_text()


def test_counters_are_numbers_or_reasons(folder):
    passes = load(folder)["counters"]
    assert len(passes) == 4
    for counters in passes:
        names = {c["name"] for c in counters["counters"]}
        assert {"cycles", "instructions", "cache_misses", "memory_bytes", "page_faults"} <= names
        assert all((c["value"] is None) != (c["reason"] is None) for c in counters["counters"])


def test_memory_goes_back(folder):
    for side in load(folder)["memory"]:
        changes = side["changes"]
        assert {"q", "k", "v", "o", "lse", "dq", "dk", "dv", "workspace"} <= {c["what"] for c in changes}
        assert changes[-1]["total_bytes"] == 0 and sum(c["bytes"] for c in changes) == 0
        assert side["peak_allocated_bytes"] == max(c["total_bytes"] for c in changes)
        assert len(side["resident"]) > 0


def test_timeline_has_threads_in_order(folder):
    events = load(folder, "timeline.json")["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len({e["tid"] for e in spans}) >= 1 and any(e["ph"] == "C" for e in events)
    assert [e["ts"] for e in events if e["ph"] != "M"] == sorted(e["ts"] for e in events if e["ph"] != "M")
    # On a thread, two either follow each other or one is inside of the other.
    for tid in {e["tid"] for e in spans}:
        open_until = []
        for e in (e for e in spans if e["tid"] == tid):
            while open_until and open_until[-1] <= e["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or e["ts"] + e["dur"] <= open_until[-1] + 1e-3, e
            open_until.append(e["ts"] + e["dur"])


def test_the_page_says_what_was_found_and_loads_nothing(folder):
    page, summary = (folder / "index.html").read_text(), (folder / "SUMMARY.md").read_text()
    assert not re.search(r"<script|<link|src=|@import|url\(", page)
    for text in ("as fast as standard attention", "Memory over time", "super-blocks of keys"):
        assert text in page
    assert "timeline.json" in summary and "![Memory over time](figures/memory.svg)" in summary and (folder / "figures/memory.svg").exists()
    for finding in load(folder)["verdict"]:
        assert re.search(r"\d", finding["text"])


def test_a_program_is_watched_and_its_exit_code_kept(fattn, program, tmp_path):
    before = set(pathlib.Path("/tmp").glob("fattn-profile-*/trace.*"))
    done = fattn("profile", "--out", tmp_path / "out", "--", *program, status=5)
    assert done.stdout == "output of the program\n" and "attention forward" in done.stderr
    record = load(tmp_path / "out")
    schemas()["profile"].validate(record)
    schemas()["timeline"].validate(load(tmp_path / "out", "timeline.json"))
    assert record["program"]["exit_code"] == 5 and record["program"]["processes"] >= 1
    calls = [o for o in record["operations"][0]["operations"] if o["kind"] == "call"]
    assert [(c["name"], c["times"]) for c in calls] == [("attention forward", 4)] and "B1 S64 H2 D16 fp32" in calls[0]["detail"]
    assert any("exit code 5" in f["text"] for f in record["verdict"])
    # Other tests have such folders while they run; this one's are gone.
    for _ in range(60):
        if not set(pathlib.Path("/tmp").glob("fattn-profile-*/trace.*")) - before:
            break
        time.sleep(1)
    else:
        pytest.fail("traces were left in /tmp")


def test_a_program_of_several_processes(fattn, program, tmp_path):
    twice = "import subprocess, sys; [subprocess.run(sys.argv[1:]) for _ in range(2)]"
    fattn("profile", "--out", tmp_path / "out", "--", sys.executable, "-c", twice, *program)
    record = load(tmp_path / "out")
    calls = [o for o in record["operations"][0]["operations"] if o["kind"] == "call"]
    assert record["program"]["processes"] >= 3 and sum(c["times"] for c in calls) == 8


def test_a_program_that_forks_while_it_computes(fattn, program, tmp_path):
    forks = program[2].replace('print("output', """
import os, threading
stop = []
def compute():
    while not stop:
        library.fattn_execute(ctypes.byref(problem))
thread = threading.Thread(target=compute)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        library.fattn_execute(ctypes.byref(problem))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.append(1)
thread.join()
print(\"output""")
    fattn("profile", "--out", tmp_path / "out", "--", *program[:2], forks, status=5, timeout=60)
    record = load(tmp_path / "out")
    assert record["program"]["processes"] == 21 and not [n for n in record["notes"] if "cannot be" in n or "no trace" in n]


def test_a_program_that_never_calls_the_library(fattn, tmp_path):
    done = fattn("profile", "--out", tmp_path / "out", "--", "true")
    assert "0 calls" in done.stderr.replace("\n", " ")


def test_a_program_that_is_killed(fattn, tmp_path):
    fattn("profile", "--out", tmp_path / "out", "--", "sh", "-c", "kill -9 $$", status=137)
    assert load(tmp_path / "out")["program"]["signal"] == 9


def wait_until(process, there):
    end = time.monotonic() + 120
    while not there():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def test_an_interrupt_reaches_the_program_and_keeps_what_there_is(fattn, tmp_path):
    process = subprocess.Popen([fattn.path, "profile", "--out", tmp_path / "out", "--", "sh", "-c", f"> '{tmp_path}/begun'; exec sleep 60"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_until(process, (tmp_path / "begun").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    record = load(tmp_path / "out")
    schemas()["profile"].validate(record)
    assert not record["complete"] and record["program"]["signal"] == signal.SIGINT


def test_an_interrupt_keeps_the_times(fattn, tmp_path):
    out, status = tmp_path / "out", tmp_path / "status.json"
    process = subprocess.Popen([fattn.path, "profile", "--out", out, "--seqlen", "256", "--min-time", "0", "--repeats", "2", "--calls", "1000", "--no-grad", "--batch", "32",
                                "--status", status], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    # The times are the first step of three; the calls that follow last seconds.
    wait_until(process, lambda: status.exists() and "recording and counting" in (load(tmp_path, "status.json")["now"] or ""))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    record = load(out)
    schemas()["profile"].validate(record)
    assert not record["complete"] and record["interrupted"] and record["rows"]
    assert "Interrupted" in (out / "SUMMARY.md").read_text()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(fattn, tmp_path):
    marker = tmp_path / "ran"
    for out, words in (("/proc/nothing", "cannot be made"), ("/dev/null", "cannot be made")):
        done = fattn("profile", "--out", out, "--", "touch", marker, status=2)
        assert words in done.stderr and not marker.exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    done = fattn("profile", "--out", other, "--", "touch", marker, status=2)
    assert "holds files that no profile left there" in done.stderr and not marker.exists()


def test_a_profile_may_be_written_anew(fattn, tmp_path):
    for _ in range(2):
        fattn("profile", "--out", tmp_path / "out", "--", "true")


NSIGHT = """#!/bin/sh
case "$1" in stats|--csv) echo "Name,Time"; exit 0;; esac
while [ $# -gt 0 ]; do case "$1" in -o) base=$2; shift 2; break;; *) shift;; esac; done
{fails}
echo report > "$base.{report}"
exec "$@"
"""


def test_nsight_runs_where_it_is(fattn, tmp_path):
    for name, report, fails in (("nsys", "nsys-rep", ""), ("ncu", "ncu-rep", "echo no permission >&2; exit 9")):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(NSIGHT.format(report=report, fails=fails))
        tool.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    record = fattn.json("profile", *TINY, "--no-grad", "--nsight", "--out", tmp_path / "out", env=path)
    schemas()["profile"].validate(record)
    nsys, ncu = record["tools"]
    assert nsys["status"] == "ran" and set(nsys["files"]) == {"nsys.log", "nsys.nsys-rep", "nsys_kernels.csv", "nsys_memory.csv"}
    assert (tmp_path / "out/nsys_kernels.csv").read_text() == "Name,Time\n"
    assert ncu["status"] == "failed" and "exit code 9" in ncu["words"] and (tmp_path / "out/ncu.log").read_text() == "no permission\n"
    assert set(record["files"]) == {p.name for p in (tmp_path / "out").iterdir() if p.is_file()}


def test_nsight_that_is_not_here_is_a_line(fattn, tmp_path):
    fattn("profile", "--nsight", "--out", tmp_path / "out", "--", "true", env={"PATH": "/bin:/usr/bin"})
    record = load(tmp_path / "out")
    assert [(t["name"], t["status"]) for t in record["tools"]] == [("nsys", "absent"), ("ncu", "absent")]
    assert all("CUDA toolkit" in t["words"] for t in record["tools"])


@pytest.mark.parametrize("arguments, words", [
    (["--", "/nonexistent/program"], "cannot be started"),
    (["--seqlen", "64", "--", "true"], "leave the flags of a problem out"),
    (["--dtype", "fp64"], "allowed: fp32, bf16, fp16"),
    (["--calls", "0"], "--calls"),
    (["--sort", "colour"], "--sort"),
    (["--from", "/nonexistent"], "holds no trace"),
])
def test_bad_input_is_refused_with_words(fattn, tmp_path, arguments, words):
    assert words in fattn("profile", "--out", tmp_path / "out", *arguments, status=2).stderr


def test_hostile_traces_and_names(fattn, tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "trace.1").write_bytes(os.urandom(5000))
    (traces / "trace.2").write_bytes(b"fattn trace 1\n\0\0" + os.urandom(5000))
    fattn("profile", "--from", traces, "--out", tmp_path / "out")
    notes = load(tmp_path / "out")["notes"]
    assert len(notes) == 2 and all("no trace of fattn" in n or "another version" in n for n in notes)
    name = tmp_path / "<b>\x1b[31m&\n'\"<script>"
    name.write_text("#!/bin/sh\nexit 0\n")
    name.chmod(0o755)
    done = fattn("profile", "--out", tmp_path / "named", "--", name)
    assert "\x1b" not in done.stderr + done.stdout
    assert "<script>" not in (tmp_path / "named/index.html").read_text() and "\x1b" not in (tmp_path / "named/SUMMARY.md").read_text()
