"""The most memory that a call holds beyond what was there before it: what torch's allocators say, on a GPU and on the CPU."""

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

_LOG_LEVEL = "KINETO_LOG_LEVEL"  # torch's profiler writes lines of its own to stderr, unless this is set when it first runs
_CPU = 0  # torch's number of the device type


def _quietly(path: str, call: Callable[[], Any]) -> Any:
    """A trace of the call's allocations."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = call()
        profile.export_chrome_trace(path)
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
    return result


def _on_cpu(call: Callable[[], Any]) -> int | None:
    """By torch's profiler, which sees each allocation: the process's own size would hide what memory freed before is used again for."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        # The result is kept, as a caller would keep it.
        result = _quietly(path, call)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    del result
    steps = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == _CPU]
    held = most = 0
    for _, size in sorted(steps, key=lambda step: step[0]):
        held += size
        most = max(most, held)
    return most if steps else None


def _on_cuda(call: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def most_held(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes; None where they cannot be counted: on other devices, without torch's profiler, or while another profiler runs."""
    if device.type == "cuda":
        return _on_cuda(call, device)
    if device.type != "cpu" or not torch.profiler.kineto_available() or torch.autograd._profiler_enabled():
        return None
    return _on_cpu(call)
