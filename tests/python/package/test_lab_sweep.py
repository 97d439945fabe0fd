"""fattn.lab.sweep: the command line that the package has, as a function; and what a command that misbehaves comes to."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("pandas", minversion="2.0")

import fattn.lab as lab  # noqa: E402
from fattn.lab import _run  # noqa: E402

QUICK = {"nheads": 2, "headdim": 32, "batch": 1, "repeats": 6, "min_time": 0, "max_time": 0.05, "warmup": 1}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """standard has no memory for 512."""
    path = tmp_path_factory.mktemp("sweep") / "record.json"
    with pytest.warns(UserWarning, match="2 of 16 rows have no time: 2 out_of_memory"):
        return lab.sweep("seqlen", values=[64, 128, 256, 512], pass_=["fwd", "bwd"], algorithm=["standard", "auto"], memory_limit="2500KiB", json=path,
                         progress=False, **QUICK), path


def test_rows(swept):
    frame, path = swept
    record = json.loads(path.read_text())
    assert record["fattn_sweep"] == 1 and len(frame) == 16 and set(frame["over"]) == {"seqlen"}
    times = [row.get("time_median_s") for row in record["rows"]]
    assert list(frame["time_median_s"].dropna()) == [time for time in times if time is not None] and frame.attrs["findings"] == record["findings"]
    assert frame.equals(lab.read(path)) and set(frame["file"]) == {str(path)}
    failed = frame[frame["status"] != "ok"]
    assert set(failed["contestant"]) == {"standard"} and set(failed["value"]) == {512} and failed["time_median_s"].isna().all()
    assert failed["reason"].str.contains("2500|MiB|memory").all()


def test_speedups_and_exponents_are_those_of_the_record(swept):
    from fattn.lab._cells import Cells

    frame, path = swept
    record, cells = json.loads(path.read_text()), Cells(frame)
    for row in record["rows"]:
        ratio = cells.speedup(row["value"], row["contestant"], row["pass"])
        if row["speedup_over_baseline"] is None:
            assert row["value"] == 512 and ratio is None
            continue
        assert ratio.value == pytest.approx(row["speedup_over_baseline"])
        assert row["contestant"] == "standard" or ratio.undecided == row["speedup_undecided"]
        assert cells.memory_share(row["value"], row["contestant"], row["pass"]) == pytest.approx(row["memory_share_of_baseline"])
    fits = lab.growth(frame).set_index(["contestant", "pass"])
    assert len(record["fits"]) == 4
    for fit in record["fits"]:
        mine = fits.loc[(fit["contestant"], fit["pass"])]
        assert mine["points"] == fit["points"] and mine["factor"] == pytest.approx(fit["factor"])
        width = fit["exponent_high"] - fit["exponent_low"]
        for key in ("exponent", "exponent_low", "exponent_high"):
            assert mine[key] == pytest.approx(fit[key], abs=1e-4 * width, rel=0), key  # the command's quantiles have five digits


@pytest.mark.parametrize(("arguments", "message"), [
    ({"over": "seqln"}, "'seqln' is not known.*did you mean 'seqlen'"),
    ({"over": "seqlen", "from_": 64, "to": 32}, "--to 32 is less than --from 64"),
    ({"over": "seqlen", "values": [64], "nheds": 2}, "no flag '--nheds'; did you mean '--nheads'"),
    ({"over": "seqlen", "values": []}, "values is an empty list"),
    ({"preset": "list"}, "gpt2-medium"),
    ({}, "what is swept"),
])
def test_refused_in_the_words_of_the_command(arguments, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        lab.sweep(**arguments)


def test_a_record_that_is_there_already_is_not_taken_for_the_new_one(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="'seqln' is not known"):
        lab.sweep("seqln", json=path)
    assert path.read_text() == "{}"


@pytest.mark.parametrize("arguments", [{"over": {}}, {"values": [[1]]}, {"nheads": object()}, {"status": "x.json"}, {"wide": True}])
def test_types(arguments):
    with pytest.raises(TypeError, match="flags take text, numbers|used by fattn.lab.sweep itself"):
        lab.sweep(**arguments)


def test_flags():
    import numpy as np

    flags = {"over": "batch", "from_": 1, "to": np.int64(4), "factor": 1.5, "causal": False, "no_grad": True, "deterministic": False, "dtype": None, "seqlen_k": 8,
             "values": range(1, 3), "pass_": ("fwd", "bwd"), "provider": ["a", "b:c"], "figure": pathlib.Path("x.svg"), "warmup": -1,
             "resume": True}
    assert _run._arguments(flags) == ["--over=batch", "--from=1", "--to=4", "--factor=1.5", "--no-causal", "--no-grad", "--seqlen-k=8", "--values=1,2",
                                      "--pass=fwd,bwd", "--provider=a", "--provider=b:c", "--figure=x.svg", "--warmup=-1", "--resume"]


# A command that misbehaves, or takes its time.


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Takes the place of the command line: a Python program, whose `flag(name)` is what it was given."""

    def become(body: str) -> None:
        path = tmp_path / "command"
        path.write_text(f"#!{sys.executable}\nimport json, os, signal, sys, time\n"
                        "flag = lambda name: next(a.split('=', 1)[1] for a in sys.argv if a.startswith(f'--{name}='))\n" + body)
        path.chmod(0o755)
        monkeypatch.setattr(_run, "program", lambda: path)

    return become


def test_a_command_that_dies(command):
    command("print('fattn: no more', file=sys.stderr); sys.exit(5)")
    with pytest.raises(lab.CommandError, match="^fattn: no more$") as error:
        lab.sweep("batch")
    assert error.value.returncode == 5
    command("os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(lab.CommandError, match="ended with status -11") as error:
        lab.sweep("batch")
    assert error.value.returncode == -signal.SIGSEGV


def test_a_command_that_writes_no_record(command):
    command("open(flag('json'), 'w').write('{\"fattn_sweep\": 2}')")
    with pytest.raises(lab.RecordError, match="fattn_sweep of version 2"):
        lab.sweep("batch")


def test_no_command(monkeypatch, tmp_path):
    from fattn import _command

    monkeypatch.setattr(_command, "PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match="bin/fattn' cannot be run .*pip install"):
        lab.sweep("batch")


PROGRESS = """
for step, now in ((0, "batch 1: fattn"), (1, "batch 2: fattn")):
    status = {"fattn_status": 1, "state": "running", "step": step, "of": 2, "now": now, "seconds_left": 100}
    open(flag("status") + ".new", "w").write(json.dumps(status)); os.rename(flag("status") + ".new", flag("status")); time.sleep(0.3)
sys.exit("fattn: enough")
"""


def test_progress(command, capsys):
    command(PROGRESS)
    with pytest.raises(lab.CommandError, match="enough"):
        lab.sweep("batch")
    assert capsys.readouterr().err == "fattn sweep: 0 of 2 done, now batch 1: fattn\nfattn sweep: 1 of 2 done, now batch 2: fattn\n"
    with pytest.raises(lab.CommandError):
        lab.sweep("batch", progress=False)
    assert capsys.readouterr().err == ""


def test_progress_in_a_terminal(command, capsys, monkeypatch):
    command(PROGRESS)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(lab.CommandError):
        lab.sweep("batch")
    text = capsys.readouterr().err
    assert "\rfattn sweep: 0 of 2 done, now batch 1: fattn, about 2 min left" in text and "\n" not in text and text.endswith(" \r")


def test_ctrl_c_lets_the_command_keep_what_it_has(command, tmp_path):
    """As in a notebook, where the kernel alone gets the signal."""
    command("signal.signal(signal.SIGINT, lambda *_: (open(flag('json'), 'w').write('kept'), sys.exit(130)))\nopen(flag('json') + '.begun', 'w')\ntime.sleep(30)")
    kept = tmp_path / "kept.json"
    code = f"import pathlib\nfrom fattn.lab import _run\n_run.program = lambda: pathlib.Path({str(tmp_path / 'command')!r})\n_run.sweep('batch', json={str(kept)!r})"
    # As in the foreground: background jobs, such as this test may be, ignore the signal.
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 60
    while not os.path.exists(str(kept) + ".begun") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err and f"'{kept}' has what was measured" in err and kept.read_text() == "kept"
