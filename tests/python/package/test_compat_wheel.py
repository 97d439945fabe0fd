"""The wheel flash-attn-fattn, of tools/make_compat_wheel.py, in a clean environment: the name flash_attn by itself, beside fattn, beside the real one, without fattn."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest

pytest.importorskip("torch")
import fattn  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/make_compat_wheel.py"
NO_NETWORK = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Its folder and its Python: the wheel is installed by pip, and nothing else; no network."""
    folder = tmp_path_factory.mktemp("environment")
    done = subprocess.run([sys.executable, TOOL, "--out", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    wheel = pathlib.Path(done.stdout.strip())
    assert wheel.name == f"flash_attn_fattn-{fattn.__version__}-py3-none-any.whl" and wheel.stat().st_size < 16384
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *NO_NETWORK, wheel], check=True, timeout=120)
    return folder, python, wheel


def here() -> str:
    """Where this environment's torch and fattn are, for PYTHONPATH."""
    return os.pathsep.join([str(pathlib.Path(fattn.__file__).parent.parent), sysconfig.get_path("purelib"), *(x for x in sys.path if "site-packages" in x)])


def run(python, code: str, *folders) -> subprocess.CompletedProcess:
    path = os.pathsep.join(map(str, folders))
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}, cwd=python.parent)


def test_made_twice_it_is_the_same(environment, tmp_path):
    _, _, wheel = environment
    subprocess.run([sys.executable, TOOL, "--out", tmp_path], check=True, capture_output=True, timeout=60)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(name.partition("/")[2] for name in archive.namelist()) == ["METADATA", "RECORD", "WHEEL", "__init__.py", "licenses/LICENSE", "top_level.txt"]
        assert f"Requires-Dist: fattn>={fattn.__version__}" in archive.read(next(x for x in archive.namelist() if x.endswith("METADATA"))).decode()


PROGRAM = """
import importlib.metadata, sys, torch
import flash_attn, flash_attn.cute, flash_attn.layers.rotary
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import unpad_input
from flash_attn.modules.mha import MHA
assert "fattn" in sys.modules and flash_attn.__version__ == "2.8.3" and importlib.metadata.version("flash-attn-fattn")
assert all(hasattr(flash_attn, name) for name in flash_attn.__all__) and len(flash_attn.__all__) == 7
q = torch.randn(1, 9, 2, 16, requires_grad=True)
o = flash_attn_func(q, q, q, causal=True)
torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2))
o.sum().backward()
assert flash_attn.cute.flash_attn_func(q, q, q)[1].shape == (1, 2, 9)
from fattn import compat
import warnings
warnings.simplefilter("error")  # the name alone is not the real one, of which a warning would say that it stays
assert compat.install() == ("flash_attn", "flash_attn_interface", "xformers")
import flash_attn as again, xformers.ops
assert again is not flash_attn and importlib.metadata.version("flash-attn") == "2.8.3"
compat.uninstall()
assert sys.modules["flash_attn"] is flash_attn
print("computed")
"""


def test_the_name_by_itself(environment):
    _, python, _ = environment
    done = run(python, PROGRAM, here())
    assert done.returncode == 0 and done.stdout == "computed\n", done.stderr


def test_after_install(environment):
    """Metadata of fattn.compat is not the real one's."""
    _, python, _ = environment
    done = run(python, "from fattn import compat; compat.install('flash_attn_interface'); import flash_attn; compat.install(); import flash_attn, flash_attn.cute; print('fine')", here())
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-4"])
def test_beside_the_real_one(environment, tmp_path, name):
    _, python, _ = environment
    info = tmp_path / f"{name.replace('-', '_')}-2.7.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.7.4\n")
    done = run(python, "import flash_attn", here(), tmp_path)
    assert done.returncode == 1 and f"ImportError: {name} 2.7.4 and flash-attn-fattn are both installed" in done.stderr
    assert f"pip uninstall {name} flash-attn-fattn" in done.stderr


def test_without_fattn(environment):
    _, python, _ = environment
    done = run(python, "import flash_attn")
    assert done.returncode == 1 and "flash-attn-fattn, which needs fattn with fattn.compat; it is not installed: pip install fattn" in done.stderr
