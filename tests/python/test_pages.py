"""Best practice and troubleshooting: every command that the pages show runs, and both languages show the same."""
import os
import re
import subprocess

import pytest

from conftest import ROOT

PAGES = ("BEST_PRACTICE", "TROUBLESHOOTING")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    return FENCE.findall((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))


COMMANDS = [(name, line) for name in PAGES for language, text in blocks(name) if language == "sh" for line in text.splitlines()]


@pytest.fixture(scope="module")
def surroundings(fattn, tmp_path_factory):
    """A folder as the root of the project looks to the commands, with `fattn` on the PATH and a calibration."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "fattn").symlink_to(fattn.path)
    environment = {**os.environ, "FATTN_CACHE_DIR": str(folder / "cache"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([fattn.path, "calibrate", "--repeats", "1", "--kernel-seconds", "1"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder, environment


def test_there_are_commands():
    assert len(COMMANDS) > 20 and all(line.startswith("fattn ") for _, line in COMMANDS)


def test_commands_run(surroundings):
    """In their order: later ones use what earlier ones wrote."""
    folder, environment = surroundings
    for name, line in COMMANDS:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{name}: {line}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip(), line


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_show_the_same(name):
    assert blocks(name) == blocks(f"{name}.zh-TW")
