"""`fattn profile` around Python code: what the library, torch and the GPU do in a block, as the folder that the command writes."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import _abi
from .._command import program
from ._run import CommandError

_MOST_OPERATORS = 200_000
_OTHER_THREADS = 2_000_000_000  # torch numbers its threads itself; numbers that no thread of the system has
_lock = threading.Lock()


class Profile:
    """What a `with profile(...)` block gives. Once the block has ended, `record` is profile.json as a dict."""

    def __init__(self, out: Path):
        self.out = out
        self._record: dict[str, Any] | None = None

    @property
    def record(self) -> dict[str, Any]:
        if self._record is None:
            path = self.out / "profile.json"
            if not path.is_file():
                raise RuntimeError(f"'{path}' is not there yet: the record is written when the block ends")
            self._record = json.loads(path.read_text())
        return self._record

    @property
    def summary(self) -> str:
        """SUMMARY.md as text."""
        return (self.out / "SUMMARY.md").read_text()


def _recorder() -> ctypes.CDLL:
    path = _abi.PACKAGE / "lib" / "libfattn_profile.so"
    if not path.is_file():
        raise FileNotFoundError(f"'{path}' is absent; install fattn again")
    library = ctypes.CDLL(str(path))
    library.fattn_profile_start.argtypes = [ctypes.c_char_p]
    library.fattn_profile_trace.restype = ctypes.c_void_p
    library.fattn_profile_watch_gpu.restype = ctypes.c_char_p
    library.fattn_profile_now.restype = ctypes.c_double
    library.fattn_profile_begin.argtypes = [ctypes.c_char_p]
    library.fattn_profile_event.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double, ctypes.c_double, ctypes.c_int, ctypes.c_double]
    library.fattn_profile_event.restype = None
    return library


def _has_cuda() -> bool:
    """Whether this process uses a GPU's driver."""
    try:
        ctypes.CDLL("libcuda.so.1", os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


class _Operators:
    """torch's own record of its operators on the host, beside ours: on the same clock by a marker."""

    MARK = "fattn.lab.profile"

    def __init__(self, torch: Any, recorder: ctypes.CDLL):
        self.recorder, self.thread = recorder, threading.get_native_id()
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_flops=True)
        self.profiler.__enter__()
        before = recorder.fattn_profile_now()
        with torch.profiler.record_function(self.MARK):
            pass
        self.marked = (before + recorder.fattn_profile_now()) / 2

    def stop(self) -> None:
        self.profiler.__exit__(None, None, None)
        events = list(self.profiler.events())
        marks = [e for e in events if e.name == self.MARK]
        if not marks:
            warnings.warn("torch's profiler lost its marker; its operators are left out", stacklevel=4)
            return
        offset = self.marked - marks[0].time_range.start * 1e-6
        for event in events[:_MOST_OPERATORS]:
            if event.name == self.MARK:
                continue
            shapes = str([s for s in event.input_shapes or [] if s]) if event.input_shapes else ""
            thread = self.thread if event.thread == marks[0].thread else _OTHER_THREADS + int(event.thread) % 100_000
            begin, end = (offset + t * 1e-6 for t in (event.time_range.start, event.time_range.end))
            self.recorder.fattn_profile_event(event.name.encode(errors="replace"), shapes.encode(errors="replace"), begin, end, thread, float(event.flops or 0))
        if len(events) > _MOST_OPERATORS:
            warnings.warn(f"{len(events)} operators of torch were recorded; the first {_MOST_OPERATORS} are kept", stacklevel=4)


@contextmanager
def profile(out: str | os.PathLike, *, operators: bool = True, sort: str = "time", top: int = 20) -> Iterator[Profile]:
    """Records what happens in the block and writes the folder that `fattn profile` writes: SUMMARY.md, index.html, profile.json, timeline.json, ....

        with fattn.lab.profile(out="profile") as profile:
            loss = model(x).sum()
            loss.backward()
        print(profile.summary)

    Calls of fattn and their parts are recorded always, operators of torch if it is imported, kernels, copies and allocations of GPUs by CUPTI if this
    process uses one; why something could not be watched is in the folder. What the block raises goes on, and the folder is written all the same.

    Args:
        out: the folder; made where it is not there. One that an earlier profile left is written anew.
        operators: whether torch's operators are recorded; they take some microseconds each then.
        sort: the order of operations: "time", "times", "flops", "bytes", "memory" or "name".
        top: operations that tables show.

    Raises:
        ValueError: the folder cannot be written, or holds what no profile left there; the message is the command's. (After the block.)
        RuntimeError: this process is being profiled already.
        FileNotFoundError: the package has no command line.
    """
    target, command, recorder = Path(out), program(), _recorder()
    if not _lock.acquire(blocking=False):
        raise RuntimeError("this process is being profiled already; end that block first")
    folder = Path(tempfile.mkdtemp(prefix="fattn-profile-"))
    try:
        started = recorder.fattn_profile_start(os.fsencode(folder))
        if started == 1:
            raise RuntimeError("this process is being profiled already, by `fattn profile`; leave one of them out")
        if started != 0:
            raise RuntimeError(f"no trace can be written in '{folder}'")
        torch = sys.modules.get("torch") if operators else None
        watched = None
        result = Profile(target)
        try:
            if _has_cuda():
                recorder.fattn_profile_watch_gpu()
            _abi.check(_abi.library.fattn_set_trace(recorder.fattn_profile_trace()))
            if torch is not None:
                watched = _Operators(torch, recorder)
            recorder.fattn_profile_begin(b"block")
            try:
                yield result
            finally:
                recorder.fattn_profile_end()
                if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
                    torch.cuda.synchronize()
        finally:
            if watched is not None:
                watched.stop()
            _abi.check(_abi.library.fattn_set_trace(None))
            recorder.fattn_profile_stop()
            done = subprocess.run([str(command), "profile", f"--from={folder}", f"--out={target}", f"--sort={sort}", f"--top={top}"], capture_output=True, text=True,
                                  errors="replace", stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            text = done.stderr.strip().removeprefix("fattn: ")
            raise ValueError(text) if done.returncode == 2 else CommandError(text or f"`fattn profile` ended with status {done.returncode}", done.returncode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock.release()
