"""fattn.lab.profile: a block's calls, its torch operators, and the folder that the command writes of them."""
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("pandas")
torch = pytest.importorskip("torch")
import fattn  # noqa: E402
import fattn.lab as lab  # noqa: E402


def operations(record):
    return {o["name"]: o for o in record["operations"][0]["operations"]}


def test_calls_and_operators_of_a_block(tmp_path):
    q = torch.randn(1, 64, 2, 16)
    k = torch.randn(1, 64, 2, 16, requires_grad=True)
    fattn.attention(q, k, q)  # before: not in it
    with lab.profile(out=tmp_path / "out") as profile:
        with pytest.raises(RuntimeError, match="is not there yet"):
            profile.record
        for _ in range(3):
            fattn.attention(q, k, q).sum().backward()
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    fattn.attention(q, k, q)  # and behind
    by = operations(profile.record)
    assert by["attention forward"]["times"] == by["attention backward"]["times"] == 3 and by["aten::mm"]["times"] == 1
    assert by["aten::mm"]["flops"] == 2 * 8 * 8 * 8 and by["block"]["kind"] == "range"
    # On one clock: our calls lie inside of torch's operators, and these inside of the block.
    timeline = [e for e in json.loads((tmp_path / "out/timeline.json").read_text())["traceEvents"] if e["ph"] == "X"]
    block = next(e for e in timeline if e["name"] == "block")
    near = 200  # microseconds
    for inner, outer in (("attention forward", "fattn::forward"), ("attention backward", "fattn::backward")):
        inside = [e for e in timeline if e["name"] == inner]
        around = [e for e in timeline if e["name"] == outer]
        assert len(inside) == len(around) == 3
        for a, b in zip(inside, around):
            assert b["ts"] - near <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"] + near
            assert block["ts"] <= a["ts"] and a["ts"] + a["dur"] <= block["ts"] + block["dur"]
    assert "attention forward" in profile.summary and (tmp_path / "out/index.html").is_file()


def test_numpy_calls_on_other_threads(tmp_path):
    x = np.ones((1, 32, 2, 16), np.float32)
    with lab.profile(out=tmp_path / "out", operators=False) as profile:
        threads = [threading.Thread(target=fattn.numpy.forward, args=(x, x, x)) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert operations(profile.record)["attention forward"]["times"] == 4 and not any(n.startswith("aten") for n in operations(profile.record))


def test_what_a_block_raises_goes_on_and_the_folder_is_there(tmp_path):
    x = np.ones((1, 32, 2, 16), np.float32)
    with pytest.raises(ZeroDivisionError), lab.profile(out=tmp_path / "out", operators=False):
        fattn.numpy.forward(x, x, x)
        1 / 0
    assert operations(json.loads((tmp_path / "out/profile.json").read_text()))["attention forward"]["times"] == 1
    with lab.profile(out=tmp_path / "out", operators=False):  # and another may begin
        pass


def test_one_at_a_time(tmp_path):
    with lab.profile(out=tmp_path / "a", operators=False):
        with pytest.raises(RuntimeError, match="being profiled already"):
            with lab.profile(out=tmp_path / "b", operators=False):
                pass


def test_a_folder_that_is_somebody_elses_is_refused(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="no profile left there"):
        with lab.profile(out=tmp_path, operators=False):
            pass


def test_the_command_watches_a_python_program(tmp_path):
    code = "import fattn.numpy, numpy; x = numpy.ones((1, 32, 2, 16), 'f'); [fattn.numpy.forward(x, x, x) for _ in range(5)]"
    done = subprocess.run([str(fattn._command.program()), "profile", "--out", tmp_path / "out", "--", sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert done.returncode == 0, done.stderr
    assert operations(json.loads((tmp_path / "out/profile.json").read_text()))["attention forward"]["times"] == 5
