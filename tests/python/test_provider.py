"""The provider protocol from both sides: the host against providers that misbehave, torch_sdpa.py against a host."""
import json
import os
import stat
import subprocess
import sys
import textwrap
import time

import pytest

TINY = ["--backend", "reference", "--seqlen", "32", "--nheads", "4", "--headdim", "8", "--repeats", "6", "--min-time", "0", "--warmup", "1"]

# A correct provider in numpy. A test replaces single answers to make it misbehave.
HONEST = """
import json, sys, time
import numpy

problem, tensors = {}, {}
SHAPES = {"q": ("seqlen_q", "nheads", "headdim"), "k": ("seqlen_k", "nheads_k", "headdim"), "v": ("seqlen_k", "nheads_k", "headdim_v")}

def attention():
    group = problem["nheads"] // problem["nheads_k"]
    q, k, v = tensors["q"], tensors["k"].repeat(group, axis=2), tensors["v"].repeat(group, axis=2)
    s = numpy.einsum("bqhd,bkhd->bhqk", q, k) * problem["softmax_scale"]
    if problem["causal"]:
        i, j = numpy.indices(s.shape[2:])
        s[:, :, j > i + s.shape[3] - s.shape[2]] = -numpy.inf
    p = numpy.exp(s - s.max(axis=-1, keepdims=True))
    return numpy.einsum("bhqk,bkhd->bqhd", p / p.sum(axis=-1, keepdims=True), v)

def hello(r): return {"protocol": 1, "provider": "fake", "version": "1", "devices": {"cpu": ["plain", "fancy"]}}
def take(r):
    problem.update(r)
    return {}
def prepare(r):
    for name, path in r["inputs"].items():
        if name in SHAPES:
            tensors[name] = numpy.fromfile(path, dtype=numpy.float32).reshape([problem["batch"]] + [problem[n] for n in SHAPES[name]]).astype(numpy.float64)
    return {"kernel": "numpy"}
def check(r):
    with open(r["outputs"]["o"], "r+b") as file: file.write(attention().astype(numpy.float32).tobytes())
    return {}
def memory(r): return {"extra_bytes": 4096, "method": "guess"}
def times(r):
    seconds = []
    for _ in range(r["samples"]):
        start = time.perf_counter(); attention(); seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}
def release(r): return {}

OPS = {"hello": hello, "problem": take, "prepare": prepare, "check": check, "memory": memory, "time": times, "release": release}
"""

LOOP = """
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "quit": break
    print(json.dumps({"ok": True, **OPS[request["op"]](request)}), flush=True)
"""


@pytest.fixture
def race(fattn, tmp_path):
    def run(changes="", flags=(), name="fake", status=0, loop=LOOP, python=sys.executable, provider=None):
        (tmp_path / "fake.py").write_text(HONEST + textwrap.dedent(changes) + loop)
        record = fattn.json("compare", *TINY, "--no-grad", "--providers", tmp_path, "--python", python, "--provider", "fattn", "--provider", provider or name,
                            *flags, status=status)
        assert record["rows"][0]["provider"] == "fattn" and record["rows"][0]["status"] == "ok"
        return record["rows"][1]

    return run


def test_honest_provider(race):
    row = race(flags=["--causal", "--seqlen-k", "48", "--nheads-k", "2"])
    assert row["status"] == "ok", row["reason"]
    assert (row["provider"], row["algorithm"], row["kernel"], row["extra_bytes"]) == ("fake", "plain", "numpy", 4096)
    assert row["checks"][0]["pass"] and row["samples"] >= 6


def test_variant_by_name(race):
    assert race(provider="fake:fancy")["algorithm"] == "fancy"
    row = race(provider="fake:none")
    assert row["status"] == "unsupported" and "plain, fancy" in row["reason"]


@pytest.mark.parametrize(
    "changes, status, reason",
    [
        ("OPS['time'] = lambda r: sys.exit(3)", "failed", "exit code 3"),
        ("def crash(r):\n    import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\nOPS['memory'] = crash", "failed", "signal 11"),
        ("def quit_(r):\n    print('last words', file=sys.stderr); sys.exit(1)\nOPS['hello'] = quit_", "failed", "last words"),
        ("OPS['hello'] = lambda r: {'protocol': 2}", "failed", "version"),
        ("OPS['hello'] = lambda r: {'protocol': 1, 'devices': {'cuda': ['auto']}}", "unsupported", "device cpu"),
        ("OPS['hello'] = lambda r: print('welcome!', flush=True) or {}", "failed", "welcome!"),
        ("OPS['hello'] = lambda r: {'ok': 'yes'}", "failed", "ok"),
        ("OPS['problem'] = lambda r: {'ok': False, 'status': 'unsupported', 'reason': 'no such mask'}", "unsupported", "no such mask"),
        ("OPS['prepare'] = lambda r: {'ok': False, 'status': 'out_of_memory', 'reason': 'full'}", "out_of_memory", "full"),
        ("OPS['prepare'] = lambda r: {'ok': False, 'status': 'failed', 'reason': 'CUDA out of memory'}", "failed", "CUDA"),
        ("OPS['prepare'] = lambda r: {'ok': False, 'status': 'ok'}", "failed", "no reason"),
        ("OPS['memory'] = lambda r: {'extra_bytes': -1}", "failed", "extra_bytes"),
        ("OPS['memory'] = lambda r: {'extra_bytes': 'few'}", "failed", "extra_bytes"),
        ("OPS['time'] = lambda r: {'seconds': [1.0]*(r['samples'] + 1)}", "failed", "one number for each"),
        ("OPS['time'] = lambda r: {'seconds': [0.0]*r['samples']}", "failed", "positive"),
        ("OPS['time'] = lambda r: {'seconds': ['1']*r['samples']}", "failed", "positive"),
        ("OPS['memory'] = lambda r: time.sleep(60)", "timeout", "no answer"),
    ],
)
def test_provider_that_misbehaves_is_a_row(race, changes, status, reason):
    row = race(changes, flags=["--timeout", "5" if status == "timeout" else "60"])
    assert row["status"] == status, row["reason"]
    assert reason in row["reason"]
    assert row["speedup_over_standard"] is None and "time_median_s" not in row


@pytest.mark.parametrize(
    "changes",
    [
        "OPS['check'] = lambda r: {}",  # writes nothing
        "honest = attention\ndef attention(): return honest() + 1e-3",
        "honest = attention\ndef attention():\n    o = honest(); o[0, 0, 0, 0] = numpy.nan; return o",
    ],
)
def test_wrong_result_fails_the_check_and_the_command(race, changes):
    row = race(changes, status=1)
    assert row["status"] == "check_failed" and "time_median_s" not in row
    assert any(not c["pass"] for c in row["checks"])


def test_impossible_rate_is_refused(race):
    row = race("OPS['time'] = lambda r: {'seconds': [1e-12]*r['samples']}", status=1)
    assert row["status"] == "refused" and "peak" in row["reason"] and row["flops_per_s"] is None


def test_python_that_is_not_there(race):
    row = race(python="/nonexistent/python")
    assert row["status"] == "unavailable" and "/nonexistent/python" in row["reason"]


def test_control_characters_do_not_reach_the_terminal(fattn, tmp_path):
    refuse = "OPS['problem'] = lambda r: {'ok': False, 'status': 'unsupported', 'reason': '\\x1b[31mred\\x07'}"
    (tmp_path / "fake.py").write_text(HONEST + refuse + LOOP)
    text = fattn("compare", *TINY, "--no-grad", "--providers", tmp_path, "--python", sys.executable).stdout
    assert "\x1b" not in text and "\x07" not in text and "red" in text


def test_executable_provider(fattn, tmp_path):
    program = tmp_path / "native"
    program.write_text(f"#!{sys.executable}\n" + HONEST + LOOP)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    record = fattn.json("compare", *TINY, "--no-grad", "--providers", tmp_path)
    assert {row["provider"]: row["status"] for row in record["rows"]}["native"] == "ok"


# torch_sdpa.py


def python_with_torch():
    """FATTN_TORCH_PYTHON, or this Python if it has torch (torch.nn, because this project's folder torch can be imported, too)."""
    for python in filter(None, [os.environ.get("FATTN_TORCH_PYTHON"), sys.executable]):
        if subprocess.run([python, "-c", "import torch.nn"], capture_output=True).returncode == 0:
            return python
    return None


TORCH = python_with_torch()
needs_torch = pytest.mark.skipif(TORCH is None, reason="no Python with torch; name one in FATTN_TORCH_PYTHON")


class Talk:
    def __init__(self, root, python):
        self.process = subprocess.Popen([python, root / "providers" / "torch_sdpa.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait(timeout=30) == 0
        self.process.stdout.close()


def test_torch_sdpa_without_torch(root, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, root / "providers" / "torch_sdpa.py"], input='{"op": "hello", "protocol": 1}\n{"op": "time"}\nnonsense\n',
                          capture_output=True, text=True, env=environment, timeout=60)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0]["ok"] is False and answers[0]["status"] == "unavailable" and "none here" in answers[0]["reason"]
    assert [a["status"] for a in answers[1:]] == ["failed", "failed"]


@needs_torch
def test_torch_sdpa_refuses_by_size(root):
    with Talk(root, TORCH) as talk:
        hello = talk(op="hello", protocol=1)
        assert hello["ok"] and hello["devices"]["cpu"][0] == "auto"
        problem = {"batch": 1, "seqlen_q": 4096, "seqlen_k": 4096, "nheads": 1, "nheads_k": 1, "headdim": 8, "headdim_v": 8, "causal": False, "dtype": "fp32",
                   "softmax_scale": 0.35, "grad": False, "seed": 1, "threads": 1, "device": "cpu", "variant": "math", "min_sample_s": 5e-5,
                   "memory_limit_bytes": 1 << 20}
        answer = talk(op="problem", **problem)
        assert (answer["ok"], answer["status"]) == (False, "out_of_memory")
        assert talk(op="problem", **{**problem, "memory_limit_bytes": 0})["ok"]
        assert talk(op="problem", **{**problem, "dtype": "int8"})["status"] == "unsupported"


@needs_torch
@pytest.mark.parametrize(
    "variant, flags",
    [
        ("torch-sdpa:auto", []),
        ("torch-sdpa:auto", ["--causal"]),
        ("torch-sdpa:auto", ["--causal", "--seqlen-k", "48"]),
        ("torch-sdpa:auto", ["--nheads-k", "2", "--dtype", "bf16"]),
        ("torch-sdpa:auto", ["--causal", "--seqlen", "1"]),
        ("torch-sdpa:flash", ["--causal"]),
        ("torch-sdpa:math", ["--causal", "--seqlen-k", "48"]),
        ("torch-standard", []),
        ("torch-standard", ["--causal", "--seqlen-k", "48", "--nheads-k", "2"]),
        ("torch-standard", ["--causal", "--seqlen", "1", "--dtype", "bf16"]),
    ],
)
def test_torch_computes_the_same(fattn, root, variant, flags):
    arguments = [*TINY, *flags]
    record = fattn.json("compare", *arguments, "--providers", root / "providers", "--python", TORCH, "--provider", "fattn", "--provider", variant)
    rows = [row for row in record["rows"] if row["provider"] == variant.partition(":")[0]]
    assert [row["pass"] for row in rows] == ["fwd", "bwd", "fwdbwd"]
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert row["extra_bytes_method"] == "resident set" and row["samples"] >= 6


@needs_torch
@pytest.mark.parametrize(
    "flags, status, reason",
    [(["--causal", "--seqlen-k", "16"], "unsupported", "see no key"), (["--seqlen", "64", "--memory-limit", "100KiB"], "out_of_memory", "score matrices")],
)
def test_torch_standard_says_what_it_cannot(fattn, root, flags, status, reason):
    arguments = [*TINY, *flags, "--no-grad", "--providers", root / "providers", "--python", TORCH]
    record = fattn.json("compare", *arguments, "--provider", "fattn", "--provider", "torch-standard")
    row = record["rows"][1]
    assert (row["provider"], row["status"]) == ("torch-standard", status) and reason in row["reason"]


def compare_rows(fattn, folder, *flags):
    done = fattn("compare", *TINY, "--no-grad", "--providers", folder, "--python", sys.executable, "--json", "-", *flags)
    return json.loads(done.stdout)["rows"], done.stderr


def test_one_that_takes_longer_than_the_time_limit_is_a_row(fattn, tmp_path):
    (tmp_path / "quick.py").write_text(HONEST + LOOP)
    compiling = "def check(r):\n    time.sleep(120)\nOPS['hello'] = lambda r: {**hello(r), 'compiles': True}\nOPS['check'] = check\n"
    (tmp_path / "compiling.py").write_text(HONEST + compiling + LOOP)
    start = time.monotonic()
    rows, said = compare_rows(fattn, tmp_path, "--provider", "compiling", "--provider", "fattn", "--provider", "quick", "--time-limit", "20")
    assert time.monotonic() - start < 40
    assert [row["status"] for row in rows] == ["timeout", "ok", "ok"]
    assert "check" in rows[0]["reason"] and "--time-limit" in rows[0]["reason"]
    assert "compiling compiles for this problem" in said and "still at work" in said


def test_all_are_started_at_once(fattn, tmp_path):
    meet = """
def meet(r):
    import pathlib
    here = pathlib.Path(__file__)
    here.with_suffix(".here").touch()
    other = here.with_name("two.here" if here.stem == "one" else "one.here")
    while not other.exists():
        time.sleep(0.05)
    return hello(r)
OPS["hello"] = meet
"""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(HONEST + meet + LOOP)
    rows, said = compare_rows(fattn, tmp_path, "--provider", "one", "--provider", "two", "--timeout", "20")
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    assert "still at work" not in said and "compiles for" not in said


def test_those_that_compile_get_ready_last(fattn, tmp_path):
    order = "\ndef noted(r):\n    open(sys.path[0] + '/order', 'a').write(sys.argv[0][-6:-3])\n    return prepare(r)\nOPS['prepare'] = noted\n"
    (tmp_path / "one.py").write_text(HONEST + order + "OPS['hello'] = lambda r: {**hello(r), 'compiles': True}\n" + LOOP)
    (tmp_path / "two.py").write_text(HONEST + order + LOOP)
    rows, _ = compare_rows(fattn, tmp_path, "--provider", "one", "--provider", "two")
    assert [(row["provider"], row["status"]) for row in rows] == [("one", "ok"), ("two", "ok")]
    assert (tmp_path / "order").read_text() == "twoone"
