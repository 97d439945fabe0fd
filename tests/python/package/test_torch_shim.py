"""torch/shim.h against the headers of the torch at hand: a compiler takes two declarations of one C function only if they agree."""

import pathlib
import re
import subprocess

import torch

SHIM = pathlib.Path(__file__).resolve().parents[3] / "torch" / "shim.h"


def compiler(folder: pathlib.Path, source: str, flag: str) -> subprocess.CompletedProcess:
    """With torch's headers as of 2.10, whatever their version."""
    (folder / "unit.cpp").write_text(source)
    include = pathlib.Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++20", flag, "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", "-isystem", include, "unit.cpp"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def both(shim: str) -> str:
    return "#include <torch/csrc/stable/c/shim.h>\n" + shim.replace("#pragma once", "")


def test_declarations_are_those_of_torch(tmp_path):
    done = compiler(tmp_path, both(SHIM.read_text()), "-fsyntax-only")
    assert done.returncode == 0, done.stderr


def test_another_declaration_is_noticed(tmp_path):
    shim = SHIM.read_text()
    wrong = shim.replace("aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t*", "aoti_torch_get_dtype(AtenTensorHandle tensor, int64_t*")
    assert wrong != shim
    assert compiler(tmp_path, both(wrong), "-fsyntax-only").returncode != 0


def test_every_function_is_in_torch_since_2_10(tmp_path):
    """A function that torch does not declare would agree with anything."""
    theirs = compiler(tmp_path, both(""), "-E").stdout
    ours = re.findall(r"\b((?:aoti_)?torch_\w+)\(", SHIM.read_text())
    assert len(ours) > 15
    assert [name for name in ours if not re.search(rf"\b{name}\(", theirs)] == []
