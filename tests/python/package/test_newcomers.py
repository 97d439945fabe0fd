"""What is typed in the first ten minutes: dir, help, tab, python -m fattn, names of other libraries, printed results."""

import inspect
import os
import pathlib
import pydoc
import re
import rlcompleter
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fattn
from fattn import _names

PACKAGE = pathlib.Path(fattn.__file__).parent
WITH_TORCH = "attention" in dir(fattn)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_dir_shows_the_api_and_nothing_else():
    names = [name for name in dir(fattn) if not name.startswith("__")]
    assert {"info", "numpy", "plan", "support", "warmup"} <= set(names)
    assert not [name for name in names if name.startswith("_") or name in ("Any", "TYPE_CHECKING", "importlib")]
    if WITH_TORCH:
        pytest.importorskip("torch", minversion="2.10")
        assert set(fattn.__all__) | {"precision", "sdpa"} <= set(names)
    assert all(getattr(fattn, name) is not None for name in dir(fattn)), "help() and tab completion look at each"


def test_modules_need_no_import_of_their_own():
    code = "import fattn; fattn.numpy.forward" + ("; fattn.sdpa.activate(); assert fattn.sdpa.is_active(); fattn.precision.Policy" if WITH_TORCH else "")
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_dir_and_help_without_torch():
    code = ("import sys; sys.modules['torch'] = None; import fattn, pydoc; text = pydoc.render_doc(fattn, renderer=pydoc.plaintext); "
            "assert 'attention' not in dir(fattn) and 'doctor' not in dir(fattn) and 'numpy' in dir(fattn) and 'set_check' in text")
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_dir_without_what_is_too_old():
    assert _names._installed({"numpy": (1,)}) and not _names._installed({"numpy": (999,)}) and not _names._installed({"no-such-package": ()})


def test_help_lists_every_function():
    text = pydoc.render_doc(fattn, renderer=pydoc.plaintext)
    description = inspect.getdoc(fattn)
    assert max(map(len, description.splitlines())) <= 76 and description.splitlines()[-1] in text
    for name in fattn.__all__:
        assert re.search(rf"\b{name}\b", description) or name in ("Plan", "Support"), name
    assert re.search(r"^    support\(", text, re.MULTILINE) and "of_torch" not in text


def test_tab_completes():
    complete = rlcompleter.Completer({"fattn": fattn}).complete
    found = {complete("fattn.s", i) for i in range(9)}
    assert {"fattn.set_check(", "fattn.support("} <= found and not any("_abi" in str(x) for x in found)


@pytest.mark.parametrize(("name", "meant"), [("flash_attn_func", "fattn.attention is meant"), ("activate", "fattn.sdpa.activate is meant"),
                                             ("flash_attn_varlen_func", "fattn.attention_varlen is meant"), ("version", "fattn.__version__ is meant")])
def test_names_of_other_libraries(name, meant):
    with pytest.raises(AttributeError, match=f"^module 'fattn' has no attribute '{name}': {meant}"):
        getattr(fattn, name)


def test_close_names_are_suggested():
    done = python("-c", "import fattn; fattn.suport")
    assert "Did you mean: 'support'?" in done.stderr


@pytest.mark.skipif(not (PACKAGE / "bin/fattn").exists(), reason="a package without its command line")
def test_python_m_fattn():
    done = python("-m", "fattn", "--version")
    assert done.returncode == 0 and fattn.__version__ in done.stdout


@pytest.mark.parametrize("absent", [True, False])
def test_python_m_fattn_without_the_program(tmp_path, absent):
    copy = tmp_path / "fattn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("bin", "share", "__pycache__"))
    if not absent:
        (copy / "bin").mkdir()
        (copy / "bin/fattn").write_text("no program")
    done = python("-m", "fattn", "info", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith(f"fattn: the command line '{copy}/bin/fattn' cannot be run (") and "pip install" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_source_says_that_it_is_not_built(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fattn", ignore=shutil.ignore_patterns("lib", "bin", "share", "include", "__pycache__"))
    done = python("-c", "import fattn", PYTHONPATH=str(tmp_path))
    assert "ImportError: '" in done.stderr and "libfattn.so' is absent: this is the source of fattn, which is built and installed by `pip install .`" in done.stderr


def test_info_prints_itself():
    info, lines = fattn.info(), str(fattn.info()).splitlines()
    assert all(len(line) <= 80 or len(line.split()[-1]) > 60 for line in lines), "but for a path"
    assert lines == repr(info).splitlines()
    assert lines[0].split()[:2] == ["fattn", fattn.__version__] and any(info["cpu"]["isa"] in line for line in lines)
    info["cpu"]["model"] = "a\x1b[31mb"
    assert "\x1b" not in str(info)


def test_support_and_plan_print_themselves():
    q = (2, 128, 8, 64)
    assert str(fattn.support(q, q)) == "supported" and str(fattn.support(q, q, backend="cuda")).startswith("not supported: ")
    lines = str(fattn.plan(q, q, num_threads=1)).splitlines()
    assert len(lines) == 3 and lines[0].startswith("cpu v2 forward fp32") and "1 threads" in lines[0] and "0.06711 GFLOP" in lines[2]


def test_names_of_dtypes_and_devices():
    q = (2, 8, 4, 8)
    for name, short in (("bfloat16", "bf16"), ("half", "fp16"), ("float32", "fp32"), (np.float16, "fp16"), (np.dtype("float64"), "float64"), ("fp16", "fp16")):
        assert f" {short} " in fattn.plan(q, q, dtype=name).kernel + " "
    for device in ("cuda", "cuda:0"):
        assert fattn.support(q, q, device=device) == fattn.support(q, q, device="cuda", device_index=0)
    with pytest.raises(ValueError, match="^device is 'cuda:1' and device_index is 2; give one of them"):
        fattn.support(q, q, device="cuda:1", device_index=2)
    with pytest.raises(ValueError, match="^device is 'mps:0'; allowed: 'cpu', 'cuda'|^device is 'mps'"):
        fattn.support(q, q, device="mps:0")
    with pytest.raises(ValueError, match="^dtype is 'int8'; allowed"):
        fattn.support(q, q, dtype=np.int8)
    if WITH_TORCH:
        torch = pytest.importorskip("torch")
        assert fattn.support(q, q, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_tensors_in_the_place_of_shapes():
    x = np.ones((2, 8, 4, 8), np.float32)
    for function in (fattn.support, fattn.plan):
        with pytest.raises(TypeError, match="^q is a ndarray; it must be a shape: give q.shape, and dtype and device as options"):
            function(x, x)


@pytest.mark.skipif(not WITH_TORCH, reason="no torch")
def test_arrays_in_the_place_of_tensors():
    pytest.importorskip("torch")
    x = np.ones((2, 8, 4, 8), np.float32)
    with pytest.raises(TypeError, match="^q is a ndarray; it must be a torch.Tensor. Arrays of NumPy go to fattn.numpy.forward"):
        fattn.attention(x, x, x)
