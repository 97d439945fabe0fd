"""The Python examples, and the blocks of Python in the documents, each as a program of its own."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))
BLOCKS = [(name, i, block) for name in ("README.md", "docs/MIGRATION.md")
          for i, block in enumerate(re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL))]


def run(*command: str | pathlib.Path) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example(path):
    assert run(path)


@pytest.mark.parametrize(("name", "index", "block"), BLOCKS, ids=[f"{name}-{i}" for name, i, _ in BLOCKS])
def test_block(name, index, block):
    if "transformers" in block:
        pytest.importorskip("transformers", minversion="5")
    run("-c", block)


def test_there_are_some():
    assert len(EXAMPLES) >= 3 and len(BLOCKS) >= 5
