#!/usr/bin/env python3
"""Writes python/fattn/_abi_structs.py from include/fattn: the structs of the C ABI as ctypes has them, and the list of tensors.

    make_abi.py             writes the module
    make_abi.py --check     exit 1 if it is missing or differs

It fails where fattn_problem and the list of tensors (tensors.hpp) do not name the same tensors in the same order.
"""
import argparse
import re
import sys

from made_file import ROOT, write_or_check

INCLUDE = ROOT / "include" / "fattn"
MODULE = ROOT / "python" / "fattn" / "_abi_structs.py"

# Of those that Python passes to the library or reads: the name there.
STRUCTS = {"fattn_tensor": "Tensor", "fattn_problem": "Problem", "fattn_plan_info": "PlanInfo", "fattn_cpu_info": "CpuInfo", "fattn_library_info": "LibraryInfo",
           "fattn_env_info": "EnvInfo", "fattn_cuda_info": "CudaInfo", "fattn_cache_info": "CacheInfo", "fattn_ring_problem": "RingProblem",
           "fattn_ring_range": "RingRange", "fattn_ring_hop": "RingHop", "fattn_ring_block": "RingBlock", "fattn_ring_schedule": "RingSchedule"}
TYPES = {"int32_t": "_i32", "uint32_t": "_u32", "int64_t": "_i64", "double": "ctypes.c_double", "size_t": "ctypes.c_size_t", "char": "ctypes.c_char",
         "const char*": "ctypes.c_char_p", "fattn_tensor": "Tensor"}
KEYWORDS = {"pass": "pass_"}

ROW = re.compile(r'\{"(\w+)", &P::(\w+), &Pointers::(\w+), (?:\{[^{}]*\}|&S::\w+), D::k(\w+), Dims::k(\w+), Role::k(\w+), Pass::k(\w+)\}')


class Defect(Exception):
    """In the headers."""


def fields(struct: str, header: str) -> list[tuple[str, str]]:
    """(name, type in Python) of each member."""
    found = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", header, re.S)
    if not found:
        raise Defect(f"fattn.h has no struct {struct}")
    members = []
    for declaration in re.sub(r"/\*.*?\*/", "", found[1], flags=re.S).split(";"):
        if not declaration.strip():
            continue
        kind, names = re.fullmatch(r"\s*((?:const )?\w+\b)\s*(.*?)\s*", declaration, re.S).groups()
        for name in re.split(r",\s*", names):
            star, name, count = re.fullmatch(r"(\*?)\s*(\w+)(?:\[(\d+)\])?", name).groups()
            python = TYPES.get(kind + star) or ("ctypes.c_void_p" if star else None)
            if python is None:
                raise Defect(f"{struct}.{name} is a {kind}, which has no type in Python here; add it to TYPES of tools/make_abi.py")
            members.append((KEYWORDS.get(name, name), f"{python} * {count}" if count else python))
    return members


def tensors(header: str, described: list[str]) -> list[tuple[str, ...]]:
    """(name, dtype, dims, role, pass) of each row."""
    rows = ROW.findall(header)
    for name, *members in rows:
        if members[:2] != [name, name]:
            raise Defect(f"the row {name!r} of tensors.hpp is of {members[0]} in fattn_problem and of {members[1]} in fattn_buffers")
    names = [row[0] for row in rows]
    if names != described:
        raise Defect(f"tensors.hpp lists {', '.join(names)}; fattn_problem has {', '.join(described)}. A row of kTensors for each, in that order")
    return [(row[0], *row[3:]) for row in rows]


def module() -> str:
    header = (INCLUDE / "fattn.h").read_text(encoding="utf-8")
    version = re.search(r"#define FATTN_ABI_VERSION (\d+)u", header)[1]
    members = {struct: fields(struct, header) for struct in STRUCTS}
    rows = tensors((INCLUDE / "tensors.hpp").read_text(encoding="utf-8"), [name for name, kind in members["fattn_problem"] if kind == "Tensor"])
    lines = [
        '"""The structs of the C ABI and the list of tensors. Made by tools/make_abi.py from include/fattn; do not edit."""',
        "",
        "import ctypes",
        "from typing import NamedTuple",
        "",
        f"ABI_VERSION = {version}",
        "",
        "_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64",
        "",
        "",
        "class Sized(ctypes.Structure):",
        '    """A struct that begins with its size: zeroed, with the size set."""',
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        "        self.struct_size = ctypes.sizeof(self)",
    ]
    for struct, name in STRUCTS.items():
        sized = members[struct][0][0] == "struct_size"
        lines += ["", "", f"class {name}({'Sized' if sized else 'ctypes.Structure'}):", "    _fields_ = ["]
        lines += [f'        ("{member}", {kind}),' for member, kind in members[struct]] + ["    ]"]
    lines += [
        "",
        "",
        "class TensorRow(NamedTuple):",
        '    """As include/fattn/tensors.hpp has it."""',
        "",
        "    name: str",
        "    dtype: str",
        "    dims: str",
        "    role: str",
        "    passes: str",
        "",
        "",
        "TENSORS = (",
        *(f"    TensorRow({', '.join(repr(x).replace(chr(39), chr(34)) for x in row)})," for row in rows),
        ")",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the module is stale")
    arguments = parser.parse_args()
    try:
        made = module()
    except Defect as defect:
        print(defect, file=sys.stderr)
        return 1
    return write_or_check(MODULE, made, "make_abi.py", arguments.check)


if __name__ == "__main__":
    sys.exit(main())
