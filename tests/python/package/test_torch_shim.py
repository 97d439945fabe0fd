"""torch/shim.h against the headers of the torch at hand: a compiler takes two declarations of one C function only if they agree."""

import pathlib
import re
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHIM = ROOT / "torch" / "shim.h"


def compile_with_torch(tmp_path: pathlib.Path, shim: str) -> subprocess.CompletedProcess:
    (tmp_path / "shim.h").write_text(shim)
    (tmp_path / "both.cpp").write_text("#include <torch/csrc/stable/c/shim.h>\n" + '#include "shim.h"\n')
    include = pathlib.Path(torch.__file__).parent / "include"
    return subprocess.run(["c++", "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", include, "both.cpp"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)


def test_declarations_are_those_of_torch(tmp_path):
    done = compile_with_torch(tmp_path, SHIM.read_text())
    assert done.returncode == 0, done.stderr


def test_another_declaration_is_noticed(tmp_path):
    shim = SHIM.read_text()
    wrong = shim.replace("aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype)", "aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype, int)")
    assert wrong != shim and compile_with_torch(tmp_path, wrong).returncode != 0


def test_every_function_is_torch_s():
    """A function that torch does not declare would agree with anything."""
    include = pathlib.Path(torch.__file__).parent / "include/torch/csrc"
    theirs = (include / "stable/c/shim.h").read_text() + (include / "inductor/aoti_torch/c/shim.h").read_text()
    ours = re.findall(r"\b((?:aoti_)?torch_\w+)\(", SHIM.read_text())
    assert len(ours) > 15
    assert [name for name in ours if not re.search(rf"\b{name}\(", theirs)] == []
