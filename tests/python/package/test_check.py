"""`fattn check --accuracy` and `fattn check --values`, on the CPU: what they measure, and that they see what they are there to see."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

import forked

import fattn
from fattn import _check
from fattn._check import peers, spoilers, values

PROGRAM = pathlib.Path(fattn.__file__).parent / "bin" / "fattn"
ACCURACY = ["--device", "cpu", "--dtype", "bf16", "--headdim", "64", "--sigma", "1,3", "--seeds", "2", "--seqlen", "128", "--nheads", "2"]
VALUES = ["--device", "cpu", "--dtype", "bf16", "--headdim", "64", "--algorithm", "v2", "--seqlen", "64", "--nheads", "1", "--repeats", "3", "--quick"]


def command(*arguments, status=0, **environment):
    """With kernels whose accuracy does not depend on the processor. As a person runs it: the program becomes Python's."""
    done = subprocess.run([PROGRAM, "check", "--python", sys.executable, *arguments], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "COLUMNS": "", "FATTN_CPU_ISA": "scalar", **environment})
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_accuracy(tmp_path):
    done = command("--accuracy", *ACCURACY, "--option", "none,packed,decode", "--batch", "2", "--json", str(tmp_path / "a.json"))
    assert re.search(r"^(\d+) tensors on cpu: \1 passed, 0 failed, 0 skipped$", done.stdout, re.MULTILINE)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    rows = json.loads((tmp_path / "a.json").read_text())
    assert {(row["option"], row["causal"], row["sigma"]) for row in rows} == {(o, c, s) for o in ("none", "packed", "decode") for c in (False, True) for s in (1, 3)}
    assert {row["tensor"] for row in rows if row["option"] == "packed"} == {"o", "lse", "dq", "dk", "dv"}
    assert {row["tensor"] for row in rows if row["option"] == "decode"} == {"o", "lse"}
    assert {row["peer"] for row in rows} == {"emulation", "torch"}
    for row in rows:
        if row["peer"] == "emulation" and row["tensor"] != "lse":  # scalar kernels round the result alone
            assert 0.4 < row["rms_ratio"] < 1.1 and row["max_ratio"] < 1.35 and row["goal"] == "met", row


def early_reference(x, **options):
    """The forward pass as one whose weights are relative to the maximum of the last 16 keys, with an unrounded sum."""
    found = peers.emulation(x)
    q, k, v = (t.transpose(1, 2).float() for t in (x.q, x.k, x.v))
    s, _ = peers._scores(x, q, k)
    p = (s - s[..., -16:].amax(-1, keepdim=True)).exp()
    found["o"] = ((p.to(x.q.dtype).float() @ v) / p.sum(-1, keepdim=True)).to(x.q.dtype).transpose(1, 2)
    return found


def test_accuracy_sees_weights_that_are_not_relative_to_the_maximum(monkeypatch, capsys):
    monkeypatch.setattr(peers, "fattn", early_reference)
    arguments = ["check", "--accuracy", *ACCURACY, "--option", "none", "--causal", "no"]
    assert _check.main(arguments) == 1
    missed = re.findall(r"^MISSED bf16 d64 none sigma (\d): (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert missed == [("3", "o")]


def test_accuracy_sees_nan_and_a_wrong_lse(monkeypatch, capsys):
    def spoilt(x, **options):
        found = peers.emulation(x)
        found["dv"][0, 0, 0, 0] = float("nan")
        found["lse"] = found["lse"] + 1e-4
        return found

    monkeypatch.setattr(peers, "fattn", spoilt)
    assert _check.main(["check", "--accuracy", *ACCURACY, "--option", "none", "--causal", "yes"]) == 1
    assert {name for _, name in re.findall(r"^MISSED .* sigma (\d): (\w+)", capsys.readouterr().out, re.MULTILINE)} == {"dv", "lse"}


def test_values(tmp_path):
    done = forked.python("-m", "fattn", "check", "--values", *VALUES, "--limit", "1000", "--option", "none,seqused_k,causal,packed,scores", "--json", tmp_path / "v.json",
                         COLUMNS="", FATTN_CPU_ISA="scalar")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^(\d+) calls on cpu, limit 1000: \1 passed, 0 failed, 0 skipped$", done.stdout, re.MULTILINE)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    rows = json.loads((tmp_path / "v.json").read_text())
    assert {row["option"] for row in rows} == {"none", "seqused_k", "causal", "packed", "scores", "scores, causal", "scores, softcap"}
    assert {row["values"] for row in rows if row["option"] == "none"} == {"nan", "inf", "-inf", "huge", "subnormal", "zero"}
    assert {row["pass"] for row in rows} == {"fwd", "bwd"}
    for row in rows:
        assert row["ratio"] > 0 and row["same_bits"] is (True if row["where"].startswith("hidden") else None), row


def slow_or_wrong(monkeypatch, slow=0.0, wrong=0.0):
    """Where k holds NaN, a call takes longer, or its first query differs."""
    real = values._attention.attention

    def attention(q, k, v, **options):
        found = real(q, k, v, **options)
        if k.isnan().any():
            time.sleep(slow)
            (found[0] if isinstance(found, tuple) else found).data[:, 0] += wrong
        return found

    monkeypatch.setattr(values._attention, "attention", attention)


def test_values_sees_a_slow_call(monkeypatch, capsys):
    slow_or_wrong(monkeypatch, slow=0.2)
    assert _check.main(["check", "--values", *VALUES, "--limit", "20", "--option", "causal"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^SLOW v2 bf16 d64 fwd causal, nan hidden, all: \d+", out, re.MULTILINE) and "BITS" not in out


def test_values_sees_a_changed_bit(monkeypatch, capsys):
    slow_or_wrong(monkeypatch, wrong=0.01)
    assert _check.main(["check", "--values", *VALUES, "--limit", "1000", "--option", "causal"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^BITS v2 bf16 d64 fwd causal, nan hidden, all", out, re.MULTILINE) and "SLOW" not in out


def test_what_sees_a_hidden_key():
    """From the masks themselves, once more."""
    shape = spoilers.Shape(2, 80, 80, 1, 8)
    for option in spoilers.HIDDEN:
        call = spoilers.Call(option, shape, torch.device("cpu"))
        inputs = call.inputs(torch.float32, 0)
        spoilers._put(("k", "v"), call.keys, float("nan"), "all")(inputs)
        o = fattn.attention(inputs["q"], inputs["k"], inputs["v"], backend="reference", **call.arguments)
        rows, _ = call.untouched(call.keys)
        finite = o.isfinite().flatten(-2).all(-1)
        assert torch.equal(finite if call.packed else finite.all(0), rows), option
        assert rows.any(), option


def one_line(stdout, stderr):
    return stderr.startswith("fattn: ") and len(stderr.splitlines()) == 1 and not stdout


@pytest.mark.parametrize("arguments", [["--accuracy", "--sigma", "x"], ["--values", "--option", "nothing"], ["--accuracy", "--seeds", "0"], ["--values", "--limit", "1"],
                                       ["--accuracy", "--values"], ["--accuracy", "--json", "/nonexistent/a.json"], ["--accuracy", "--json", "/tmp"],
                                       ["--accuracy", "--device", "cpu", "--headdim", "0"]])
def test_refuses(arguments, capsys):
    try:
        status = _check.main(["check", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and one_line(*capsys.readouterr())


def test_refuses_as_a_command():
    done = command("--accuracy", "--sigma", "x", status=2)
    assert one_line(done.stdout, done.stderr)


@pytest.mark.parametrize("which", ["--accuracy", "--values"])
def test_help(which, monkeypatch, capsys):
    def text(columns):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit, match="0"):
            _check.main(["check", which, "--help"])
        return capsys.readouterr().out

    usual, wide, narrow = text(""), text("120"), text("50")
    assert "--json" in usual and "Exit 1" in usual and all(len(line) <= 80 for line in usual.splitlines())
    assert f"\n  fattn check {which} --quick\n" in usual
    assert 80 < max(map(len, wide.splitlines())) <= 120
    assert max(map(len, narrow.splitlines())) <= 50
    if which == "--values":
        assert command(which, "--help").stdout == usual


def test_dtypes_by_their_other_names():
    from fattn._check import terminal

    assert terminal.names(tuple(terminal.DTYPES))("float32,torch.half,BF16,bfloat16") == ["fp32", "fp16", "bf16", "bf16"]


def test_interrupted_keeps_what_was_measured(tmp_path):
    path = tmp_path / "a.json"
    process = subprocess.Popen([sys.executable, "-u", "-m", "fattn", "check", "--accuracy", "--device", "cpu", "--seqlen", "128", "--seeds", "2", "--json", str(path)],
                               stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    while not process.stdout.readline().startswith("bf16"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(path.read_text()) and os.listdir(tmp_path) == ["a.json"]


def processor_s(process: subprocess.Popen) -> float:
    """The processor time that it has taken so far."""
    with open(f"/proc/{process.pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def computed(process: subprocess.Popen, seconds: float) -> None:
    """Waits until it has taken so much more of the processor."""
    until_s, deadline = processor_s(process) + seconds, time.monotonic() + 60
    while processor_s(process) < until_s:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupted_in_a_long_call(tmp_path):
    """It is not waited for: one takes some ten seconds."""
    path = tmp_path / "a.json"
    process = subprocess.Popen([sys.executable, "-u", "-m", "fattn", "check", "--values", "--device", "cpu", "--algorithm", "v2", "--dtype", "fp32", "--seqlen", "16384",
                                "--nheads", "24", "--json", str(path)], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    process.stdout.readline()
    computed(process, 3)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("signals, finished", [(1, True), (2, False)])
def test_signals_in_a_call_that_does_not_end(signals, finished):
    """The first is waited for a second, then what was measured is written; the second ends the program at once, without."""
    patience = "" if finished else "terminal.PATIENCE_S = 600\n"  # no pause of this machine is taken for a second without an answer
    code = ("import hashlib\nfrom fattn._check import terminal\n"
            f"{patience}def call():\n    print('begun', flush=True)\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # minutes, sees no signal
            "raise SystemExit(terminal.until_interrupted(call, lambda: print('finished', flush=True) or 0))")
    process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + 60
    computed(process, 0.1)  # the call has begun now
    process.send_signal(signal.SIGINT)
    while not finished and process.poll() is None and time.monotonic() < deadline:  # two that the system has not handed over yet are one
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    try:
        assert ("finished" in process.communicate(timeout=60)[0]) == finished
        assert process.returncode == 130
    finally:
        process.kill()


@pytest.mark.parametrize("option", ["none", "seqused_k", "packed", "decode"])
def test_no_values_are_slow_on_the_cpu(option):
    """With this processor's kernels and a generous limit: a cliff is what this is after."""
    which = ["--algorithm", "decode"] if option == "decode" else ["--algorithm", "v2", "--option", option]
    done = forked.python("-m", "fattn", "check", "--values", "--device", "cpu", "--headdim", "64", "--dtype", "bf16,fp32", "--seqlen", "256", "--nheads", "2", "--repeats", "5",
                         "--quick", "--limit", "5", *which, *(["--option", "none,seqused_k,scores"] if option == "decode" else []), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
