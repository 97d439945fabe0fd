#!/usr/bin/env python3
"""Makes notebooks of the course (docs/lab/*.py, jupytext's percent format), and executes them.

    notebooks.py                          build/notebooks/*.ipynb, of all chapters in both languages; needs jupytext
    notebooks.py --run 1_comparison       executes that chapter; its outputs are in the notebook (nbclient, ipykernel)
    notebooks.py --run --html FOLDER      all English chapters, and a page of each in FOLDER (nbconvert, latex2mathml)
    notebooks.py --sync                   copies the code cells of the English chapters into the Chinese ones

`pip install '.[course]'` in the root installs fattn and what this needs. Cells take small sizes on a CPU and full ones on a GPU."""

import argparse
import copy
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "lab"
CHINESE = ".zh-TW"
MARK = re.compile(r"^# %%", re.MULTILINE)
STYLE = """body { max-width: 60em; margin: 2em auto; padding: 0 1em; font-family: sans-serif; line-height: 1.5; }
pre { overflow-x: auto; padding: 0.5em; font-size: 0.9em; line-height: 1.3; }
.highlight pre { background: #f6f6f6; }
.prompt, .anchor-link { display: none; }
img, svg { max-width: 100%; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: 0.2em 0.6em; }
"""
CELL_S = 600  # the most that a cell may take


def chapters() -> list[str]:
    """Their names, in their order; the exercises are the last."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.endswith(CHINESE))


def cells(text: str) -> list[str]:
    """The cells of a chapter, each with the line that begins it."""
    starts = [match.start() for match in MARK.finditer(text)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]


def is_code(cell: str) -> bool:
    return not cell.startswith("# %% [markdown]")


def synced(english: str, chinese: str) -> str:
    """The Chinese chapter with the code of the English one. Raises ValueError where the two have other kinds of cells."""
    ours, theirs = cells(english), cells(chinese)
    kinds = [["code" if is_code(cell) else "markdown" for cell in each] for each in (ours, theirs)]
    if kinds[0] != kinds[1]:
        at = next((i for i, (a, b) in enumerate(zip(*kinds)) if a != b), min(map(len, kinds)))
        raise ValueError(f"cell {at + 1} is not of the same kind in both languages ({len(kinds[0])} cells in English, {len(kinds[1])} in Chinese)")
    return "".join(a if is_code(a) else b for a, b in zip(ours, theirs)).rstrip("\n") + "\n"


def sync() -> int:
    for name in chapters():
        english, chinese = ((FOLDER / f"{name}{language}.py") for language in ("", CHINESE))
        try:
            chinese.write_text(synced(english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, ValueError) as error:
            print(f"notebooks.py: {name}: {error}", file=sys.stderr)
            return 1
    return 0


def notebook(path: Path):
    """The chapter as a notebook, with the links of its file."""
    import jupytext

    made = jupytext.read(path, fmt="py:percent")
    made.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, "language_info": {"name": "python"}}
    return made


def placed(made, folder: Path, suffix: str):
    """A copy for a folder: links to other chapters lead to their files with this suffix, those to documents to the documents."""
    copied = copy.deepcopy(made)
    for cell in copied.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w[\w.-]*)\.py\)", rf"](\1.{suffix})", cell.source)
            cell.source = cell.source.replace("](../", f"]({os.path.relpath(FOLDER.parent, folder.resolve())}/")
    return copied


def execute(made, folder: Path) -> float:
    """Runs all cells in a kernel of this Python; seconds."""
    from nbclient import NotebookClient

    start = time.monotonic()
    NotebookClient(made, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return time.monotonic() - start


def page(made, title: str) -> str:
    """The notebook as one file that loads nothing: formulas are MathML, and styles are these few."""
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\$\$(.+?)\$\$", lambda match: convert(match.group(1).strip(), display="block"), cell.source, flags=re.DOTALL)
            cell.source = re.sub(r"\$([^$\n]+)\$", lambda match: convert(match.group(1)), cell.source)
    # Without embed_images, which takes MathML apart; outputs have their images in them, and texts have none.
    text = HTMLExporter(template_name="basic").from_notebook_node(made)[0]
    body = re.sub(r"<script\b[^>]*>.*?</script>\s*", "", text, flags=re.DOTALL)
    style = STYLE + HtmlFormatter().get_style_defs(".highlight")
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n<style>\n{style}\n</style>\n{body.strip()}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"which; all if not said: {', '.join(chapters())}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "notebooks", help="where notebooks go (default: build/notebooks)")
    parser.add_argument("--lang", choices=["en", "zh-TW"], help="one language (default: both; with --run English)")
    parser.add_argument("--run", action="store_true", help="execute the notebooks, too")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="with --run: pages with the outputs in them")
    parser.add_argument("--sync", action="store_true", help="make the code cells of the Chinese chapters those of the English ones")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.chapters if name not in chapters()]:
        parser.error(f"no chapter is called {', '.join(unknown)}; there are: {', '.join(chapters())}")
    if arguments.html and not arguments.run:
        parser.error("--html has pages of outputs: give --run, too")
    if arguments.sync:
        return sync()
    try:
        import nbformat
    except ImportError as error:
        print(f"notebooks.py: {error}; `pip install '.[course]'` installs what the course needs", file=sys.stderr)
        return 2

    languages = {"en": [""], "zh-TW": [CHINESE]}.get(arguments.lang, [""] if arguments.run else ["", CHINESE])
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.chapters or chapters():
        for language in languages:
            made, target = notebook(FOLDER / f"{name}{language}.py"), arguments.out / f"{name}{language}.ipynb"
            took = ""
            if arguments.run:
                try:
                    took = f", executed in {execute(made, arguments.out):.1f} s"
                except Exception as error:  # a cell's own; the notebook is written with what there is
                    failed += 1
                    took = f", FAILED: {str(error)[-1500:]}"
            nbformat.write(placed(made, arguments.out, "ipynb"), target)
            print(f"{target}{took}", flush=True)
            if arguments.html:
                arguments.html.mkdir(parents=True, exist_ok=True)
                (arguments.html / f"{name}{language}.html").write_text(page(placed(made, arguments.html, "html"), name), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
