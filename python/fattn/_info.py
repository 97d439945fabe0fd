"""What the library found on this machine."""

import ctypes
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from . import _abi


def set_check(check: str) -> None:
    """What is done about lists in a GPU's memory (`seqused_k`, `cu_seqlens_q`, `cu_seqlens_k`) whose numbers are out of range.

    Args:
        check: "none" (at first): the batch entry or sequence has NaN in its outputs, and nothing is read or written by such numbers. "sync": calls wait for
            their stream, look at the lists and raise ValueError before anything is computed; not under a CUDA graph. On the CPU it is always an error.

    Raises:
        ValueError: `check` is neither.
    """
    if check not in _abi.CHECKS:
        raise ValueError(f"check is {check!r}; allowed: {', '.join(map(repr, _abi.CHECKS))}")
    _abi.check(_abi.library.fattn_set_check(_abi.CHECKS[check]))


def _values(struct: ctypes.Structure) -> dict[str, Any]:
    """The fields of a struct for people and JSON."""
    names = [name for name, *_ in struct._fields_ if name not in ("struct_size", "reserved")]
    values = {name: getattr(struct, name) for name in names}
    return {name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()}


def _until_the_end(query: Callable[..., int], struct: type[ctypes.Structure]) -> Iterator[dict[str, Any]]:
    """What a query answers for the indices from 0 on, until it refuses one."""
    index = 0
    while query(index, answer := struct()) == 0:
        yield _values(answer)
        index += 1


def _cuda() -> dict[str, Any]:
    count, reason = ctypes.c_int32(), ctypes.create_string_buffer(1024)
    _abi.check(_abi.library.fattn_cuda_count(count, reason, len(reason)))
    devices = []
    for index in range(count.value):
        device = _abi.CudaInfo()
        _abi.check(_abi.library.fattn_cuda_query(index, device))
        devices.append(_values(device))
    return {"devices": devices, "reason": reason.value.decode(errors="replace")}


def _lines(name: str, text: str) -> str:
    """Two columns of 78; what came from outside may hold anything."""
    text = "".join(x if x.isprintable() else "?" for x in text)
    return textwrap.fill(text, 78, initial_indent=f"{name:<14}", subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)


class Info(dict):
    """What `info` returns: a dictionary that prints itself for people. `dict(fattn.info())` prints as dictionaries do."""

    def __repr__(self) -> str:
        cpu, cuda, cache = self["cpu"], self["cuda"], self["kernel_cache"]
        said_below = any(x["reason"] == cuda["reason"] for x in self["libraries"])
        devices = ", ".join(x["name"] for x in cuda["devices"]) or ("none" if said_below else f"none: {cuda['reason']}")
        lines = [_lines("fattn", f"{self['version']} (C ABI {self['abi_version']})"),
                 _lines("CPU", f"{cpu['model'] or 'unknown'}, {cpu['usable_threads']} threads, instruction set {cpu['isa']} of {', '.join(cpu['isas'])}"),
                 _lines("GPU", devices)]
        for library in self["libraries"]:
            lines.append(_lines(library["name"], library["path"] if library["loaded"] else f"not used: {library['reason']}"))
        lines.append(_lines("kernel cache", cache["path"]))
        lines += [_lines("environment", f"{x['name']}={x['value']}") for x in self["environment"] if x["is_set"]]
        return "\n".join(lines)


def info() -> Info:
    """The library and this machine as it sees it; every value can be written as JSON, and `print(fattn.info())` is for people (as `fattn info` on the command line).

    Returns:
        A dictionary with
        `version`, `abi_version`;
        `cpu`: vendor, model, sizes of caches and memory in bytes, `usable_threads`, `isas` (instruction sets that can run here),
        `isa` (the one taken);
        `libraries`: what is opened at run time, where it was found, or why not;
        `environment`: the variables that fattn reads, their meaning and values;
        `cuda`: `devices`, or the `reason` why there is none;
        `kernel_cache`: the folder of compiled GPU kernels.

    Raises:
        RuntimeError: a CUDA driver is there and fails.
    """
    processor, cache = _abi.CpuInfo(), _abi.CacheInfo()
    _abi.check(_abi.library.fattn_query_cpu(processor))
    _abi.check(_abi.library.fattn_cache_query(cache))
    cpu = _values(processor)
    available, default = cpu.pop("isas_available"), cpu.pop("isa_default")
    cpu["isas"] = [name for name, value in _abi.ISAS.items() if available >> value & 1]
    cpu["isa"] = next(name for name, value in _abi.ISAS.items() if value == default)
    return Info({
        "version": _abi.version(),
        "abi_version": _abi.ABI_VERSION,
        "cpu": cpu,
        "libraries": list(_until_the_end(_abi.library.fattn_query_library, _abi.LibraryInfo)),
        "environment": list(_until_the_end(_abi.library.fattn_query_environment, _abi.EnvInfo)),
        "cuda": _cuda(),
        "kernel_cache": _values(cache),
    })
