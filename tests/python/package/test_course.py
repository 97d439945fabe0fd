"""The course in docs/lab: the same code in both languages, notebooks of all of it, and every chapter executed once."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import notebooks  # noqa: E402

CHAPTERS = notebooks.chapters()


def text_of(name: str, language: str = "") -> str:
    return (notebooks.FOLDER / f"{name}{language}.py").read_text(encoding="utf-8")


def test_there_are_four_chapters_and_exercises():
    assert [name[0] for name in CHAPTERS] == ["1", "2", "3", "4", "e"]


@pytest.mark.parametrize("name", CHAPTERS)
def test_both_languages_have_the_same_code(name):
    assert notebooks.synced(text_of(name), text_of(name, notebooks.CHINESE)) == text_of(name, notebooks.CHINESE), "run `tools/notebooks.py --sync`"


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_cell_of_text_is_translated(name):
    for english, chinese in zip(notebooks.cells(text_of(name)), notebooks.cells(text_of(name, notebooks.CHINESE)), strict=True):
        if not notebooks.is_code(english):
            assert any("\u4e00" <= letter <= "\u9fff" for letter in chinese), chinese


@pytest.mark.parametrize("language", ["", notebooks.CHINESE])
@pytest.mark.parametrize("name", CHAPTERS)
def test_links_lead_somewhere(name, language):
    links = re.findall(r"\]\(([^)#\s]+)", text_of(name, language))
    missing = [link for link in links if not (notebooks.FOLDER / link).exists()]
    assert not missing and all(language in link for link in links if link.endswith(".py"))


def test_other_cells_are_refused():
    english, chinese = text_of(CHAPTERS[0]), text_of(CHAPTERS[0], notebooks.CHINESE)
    with pytest.raises(ValueError, match="same kind"):
        notebooks.synced(english, chinese + "\n# %%\nprint(1)\n")
    assert notebooks.synced(english.replace("import sys\n", "import sys, os\n", 1), chinese) != chinese


def test_notebooks_of_both_languages(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tools/notebooks.py", "--out", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {path.stem for path in tmp_path.glob("*.ipynb")}
    assert made == {f"{name}{language}" for name in CHAPTERS for language in ("", notebooks.CHINESE)}
    links = (tmp_path / f"{CHAPTERS[0]}.ipynb").read_text()
    assert f"]({CHAPTERS[1]}.ipynb)" in links and ".py)" not in links


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory) -> pathlib.Path:
    """The folder of a calibration, made as quickly as it goes: the chapters take what is kept."""
    folder = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "fattn", "calibrate", "--repeats", "1", "--kernel-seconds", "1"]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, env={**os.environ, "FATTN_CACHE_DIR": str(folder)})
    return folder


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs(name, tmp_path, calibrated, monkeypatch):
    """All of its assertions, too. It shows figures, each made by its own code."""
    monkeypatch.setenv("FATTN_CACHE_DIR", str(calibrated))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of torch: tests run side by side, and its threads would wait for each other
    made = notebooks.notebook(notebooks.FOLDER / f"{name}.py")
    notebooks.execute(made, tmp_path)
    outputs = [output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert figures >= (0 if name == "exercises" else 2), f"{figures} figures"
    assert not any(output.output_type == "error" for output in outputs)


def test_a_page_loads_nothing(tmp_path):
    """Formulas, code and links to the other pages are in it; no script, no style and no font comes from elsewhere."""
    made = notebooks.notebook(notebooks.FOLDER / f"{CHAPTERS[0]}.py")
    text = notebooks.page(notebooks.placed(made, tmp_path, "html"), "1")
    assert "<script" not in text and not re.search(r"""(src|href)\s*=\s*["']https?:|@import|url\(\s*["']?https?:""", text)
    assert text.count("<math") >= 2 and "&lt;math" not in text and f'href="{CHAPTERS[1]}.html"' in text
    assert not re.search(r"<math[^>]*></math>", text), "a formula is inside of its element"


def test_a_failing_cell_fails(tmp_path):
    made = notebooks.notebook(notebooks.FOLDER / f"{CHAPTERS[0]}.py")
    made.cells = [cell for cell in made.cells if cell.cell_type == "code"][:1]
    made.cells[0].source = "assert 1 + 1 == 3"
    with pytest.raises(Exception, match="AssertionError"):
        notebooks.execute(made, tmp_path)
