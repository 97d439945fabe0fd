"""What the measuring commands share: flags, progress with the time left, and records that are written whole."""

import argparse
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .. import _abi
from .._options import short_dtype

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHORTER = {"f16": "fp16", "f32": "fp32"}  # than what torch and NumPy say


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list]:
    """The type of a flag that takes numbers separated by commas."""
    def parse(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1,2,3") from None
    return parse


def names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """The type of a flag that takes some of these names, separated by commas."""
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if "bf16" in allowed:
            found = [short_dtype(_SHORTER.get(name, name)) for name in text.lower().split(",")]
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found
    return parse


def positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 where there is neither."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


class _Help(argparse.HelpFormatter):
    """Paragraphs in the terminal's width; indented lines, which are commands, stay as they are where they fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled: list[str] = []
        for paragraph in text.split("\n\n"):
            lines: list[str] = []
            for line in paragraph.splitlines():
                if lines and not line.startswith("  ") and not lines[-1].startswith("  "):
                    lines[-1] += " " + line
                else:
                    lines.append(line)
            filled.append("\n".join(part for line in lines
                                    for part in textwrap.wrap(line, width, subsequent_indent="      " if line.startswith("  ") else "", break_on_hyphens=False)))
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Errors as the program `fattn` has them: one line, exit status 2. Help that fits the terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, formatter_class=_Help, **options)

    def error(self, message: str) -> None:
        print(f"fattn: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def device_of(flag: str) -> torch.device:
    if flag == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(flag)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("fattn: torch sees no CUDA device; --device cpu measures on the processor", file=sys.stderr)
        sys.exit(2)
    return device


def require_writable(path: str | None, flag: str = "--json") -> None:
    """Before minutes of measuring, not after."""
    if path in (None, "-"):
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        why = "it is a folder"
    elif not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        why = "its folder is not there or not writable"
    else:
        return
    print(f"fattn: cannot write '{path}': {why}; name another file with {flag}", file=sys.stderr)
    sys.exit(2)


def write(rows: list[dict], path: str | None) -> None:
    """A list, one row a line."""
    if path is None:
        return
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    if path == "-":
        sys.stdout.write(text)
        return
    write_whole(path, text)


def write_whole(path: str, text: str) -> None:
    """The file is replaced at once."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def say(out: TextIO, text: str) -> None:
    """In lines that fit the terminal."""
    print(textwrap.fill(text, width(), subsequent_indent="    "), file=out, flush=True)


def finite(x: float, digits: int = 4) -> float | None:
    """For JSON, which has no infinity."""
    return float(f"{x:.{digits}g}") if x == x and abs(x) != float("inf") else None


def machine(device: torch.device) -> dict[str, str]:
    """What every row says about where it was measured."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        from .._info import info
        cpu = info()["cpu"]
        name = f"{cpu['model']}, {cpu['isa']}, {torch.get_num_threads()} threads"
    return {"device": name, "fattn": _abi.version(), "torch": torch.__version__}


PATIENCE_S = 1.0  # for the call in hand, after Ctrl-C


def until_interrupted(measure: Callable[[], None], finish: Callable[[], int]) -> int:
    """Runs it, then `finish`, which says and writes what was measured. The exit status is that of `finish`, or 130 after Ctrl-C or SIGTERM. If the call in
    hand takes longer than a second then, a thread finishes and ends the program; so does a second signal, without finishing."""
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def end_early() -> int:
        print("\nfattn: interrupted; what was measured so far is kept", file=sys.stderr, flush=True)
        finish()
        return 130

    def watch() -> None:
        if os.read(reader, 1) == b"\0":
            return
        if not select.select([reader], [], [], PATIENCE_S)[0] and not caught.is_set():
            end_early()
        elif os.read(reader, 1) == b"\0":  # the main thread has finished
            return
        sys.stdout.flush()
        os._exit(130)

    caught = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakes = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            measure()
        except KeyboardInterrupt:
            caught.set()
            return end_early()
        return finish()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(wakes)
        os.write(writer, b"\0")
        watcher.join()  # a thread that is left when Python ends may abort the program
        os.close(reader)
        os.close(writer)


class Progress:
    """One line on stderr, where that is a terminal: how far it is, and how long the rest takes."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.start, self.shown = what, total, 0, time.monotonic(), 0.0
        self.live = sys.stderr.isatty()
        self.columns = min(width(), 100) - 1

    def step(self, about: str = "") -> None:
        self.done += 1
        now = time.monotonic()
        if not self.live or (now - self.shown < 0.2 and self.done < self.total):
            return
        self.shown = now
        left = (now - self.start) / self.done * (self.total - self.done)
        line = f"{self.what} {self.done} of {self.total}, {left:.0f} s left  {about}"
        sys.stderr.write("\r" + line[: self.columns].ljust(self.columns))
        sys.stderr.flush()

    def clear(self) -> None:
        if self.live and self.shown:
            sys.stderr.write("\r" + " " * self.columns + "\r")
            self.shown = 0.0
