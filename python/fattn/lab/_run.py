"""`fattn sweep` as a function: the command line that the package has, its flags as keyword arguments, its record as a frame."""

import json as json_module
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import pandas as pd

from .._command import program
from ._frames import read

_REPEATED = ("provider",)  # flags that are given once for each value; lists of others are joined by commas
_OURS = ("status", "format", "wide")  # flags whose output the function itself uses or does without
_LOOK_S = 0.1
_PATIENCE_S = 2  # after Ctrl-C, which a terminal sends to the command, too


class CommandError(RuntimeError):
    """The command failed by itself; the message is its own. `returncode` is its exit status (negative: the signal that ended it)."""

    def __init__(self, message: str, returncode: int):
        super().__init__(message)
        self.returncode = returncode


def sweep(over: str | None = None, *, json: str | os.PathLike | None = None, progress: bool = True, **flags: Any) -> pd.DataFrame:
    """Runs `fattn sweep` and returns its rows, as `read` does.

    Keyword arguments are the flags of `fattn sweep --help` with `_` for `-`; a name that Python reserves has one behind it:

        sweep("seqlen", from_=256, to=4096, nheads=8, causal=True, pass_=["fwd", "bwd"], algorithm=["standard", "auto"])
        sweep(preset="ci")
        sweep("batch", values=[1, 2, 4], provider=["standard", "torch-sdpa"], no_grad=True, device="cuda", json="batch.json")

    True gives the flag alone, False leaves it out (`causal=False` is --no-causal), None is as if it was not given. Values of a list are joined by
    commas, those of `provider` repeated. What fails at a value is a row with its `status` and `reason`; a warning says how many there are,
    and another what disturbed the measurement.

    Args:
        over: the size that changes: "seqlen", "batch", "nheads", "headdim", "embed", "seqlen-k", "threads" or "causal"; not with every preset.
        json: where the record is kept; with `resume=True` rows that are in it already are not measured again. After Ctrl-C it has what was measured.
        progress: say on stderr what is measured and how long it will take.
        flags: flags of the command.

    Raises:
        ValueError: the command refused its flags or input; the message is its own.
        TypeError: an argument is of a type that no flag takes, or is used by the function itself.
        CommandError: the command failed otherwise, or was ended by a signal.
        FileNotFoundError: the package has no command line.
    """
    with tempfile.TemporaryDirectory(prefix="fattn-sweep-") as folder:
        record = Path(json) if json is not None else Path(folder) / "sweep.json"
        status_file = Path(folder) / "status.json"
        arguments = _arguments({"over": over, **flags})
        before = _stamp(record)
        code, text = _run([str(program()), "sweep", *arguments, f"--json={record}", f"--status={status_file}"], status_file, progress, json)
        if _stamp(record) == before:  # it came to no record
            raise ValueError(text) if code in (0, 2) else CommandError(text or f"`fattn sweep` ended with status {code} and said nothing", code)
        if code not in (0, 1, 2):
            kept = f"; '{record}' has what was measured before" if json is not None else ""
            raise CommandError((text or f"`fattn sweep` ended with status {code}") + kept, code)
        frame = read(record)
        if json is None:
            frame["file"] = None
        for disturbance in frame["disturbance"].dropna().unique():
            warnings.warn(disturbance, stacklevel=2)
        failed = frame[frame["status"] != "ok"]
        if not failed.empty:
            counts = ", ".join(f"{count} {status}" for status, count in failed["status"].value_counts().items())
            warnings.warn(f"{len(failed)} of {len(frame)} rows have no time: {counts}; `reason` says why: frame[frame.status != 'ok']", stacklevel=2)
        return frame


def _arguments(flags: dict[str, Any]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        flag = name.rstrip("_").replace("_", "-")
        if flag in _OURS:
            raise TypeError(f"{name} is used by fattn.lab.sweep itself; leave it out")
        if value is None or value is False and flag != "causal":
            continue
        if value is False:
            arguments.append("--no-causal")
        elif value is True:
            arguments.append(f"--{flag}")
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict, os.PathLike)):
            texts = [_text_of(name, part) for part in value]
            if not texts:
                raise ValueError(f"{name} is an empty list; name at least one value, or leave it out")
            arguments += [f"--{flag}={text}" for text in texts] if flag in _REPEATED else [f"--{flag}={','.join(texts)}"]
        else:
            arguments.append(f"--{flag}={_text_of(name, value)}")
    return arguments


def _text_of(name: str, value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # a number of NumPy
        return repr(value.item())
    raise TypeError(f"{name} is of the type {type(value).__name__}; flags take text, numbers, True and False, and lists of text or numbers")


def _stamp(file: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None if it is not there."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _run(command: list[str], status_file: Path, progress: bool, json: str | os.PathLike | None) -> tuple[int, str]:
    """The exit status, and what the command said to people: of one that failed on stderr, else on stdout."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        line = _Line(sys.stderr if progress else None)
        try:
            while process.poll() is None:
                line.show(status_file)
                time.sleep(_LOOK_S)
        except BaseException:
            _end(process)
            line.wipe()
            if json is not None and sys.stderr is not None:
                print(_said(err) or f"fattn sweep: interrupted; '{os.fspath(json)}' has what was measured", file=sys.stderr)
            raise
        line.wipe()
        return process.returncode, _said(err) or (_said(out) if process.returncode in (0, 2) else "")


def _said(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _end(process: subprocess.Popen) -> None:
    """Lets the command keep what was measured. A terminal's Ctrl-C has reached it already, and a second signal would end it at once."""
    for wait, then in ((_PATIENCE_S, signal.SIGINT), (10, signal.SIGKILL), (10, None)):
        try:
            process.wait(wait)
            return
        except subprocess.TimeoutExpired:
            if then is not None:
                process.send_signal(then)


class _Line:
    """The command's status on one line that is drawn anew, in a terminal or a notebook; elsewhere a line whenever something else is measured."""

    def __init__(self, stream: Any):
        self._stream, self._said, self._width = stream, "", 0
        self._redrawn = stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel"))

    def show(self, status_file: Path) -> None:
        if self._stream is None:
            return
        try:
            status = json_module.loads(status_file.read_text())
        except (OSError, ValueError):  # not yet there
            return
        if status.get("state") != "running" or not status.get("now"):
            return
        done, of, left = status.get("step", 0), status.get("of", 0), status.get("seconds_left")
        text = f"fattn sweep: {done} of {of} done, now {status['now']}"
        if self._redrawn:
            text += f", about {_duration(left)} left" if isinstance(left, (int, float)) else ""
            self._write("\r" + text[:110].ljust(self._width))
            self._width = len(text[:110])
        elif status["now"] != self._said:
            self._write(text + "\n")
            self._said = status["now"]

    def wipe(self) -> None:
        if self._redrawn and self._width:
            self._write("\r" + " " * self._width + "\r")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
