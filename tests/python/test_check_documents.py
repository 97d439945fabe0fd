"""tools/check_documents.py finds pages that are too long, lines that are too long, links to headings and pages to files that are not there."""

import importlib.util

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("check_documents", ROOT / "tools" / "check_documents.py")
documents = importlib.util.module_from_spec(spec)
spec.loader.exec_module(documents)


def problems(tmp_path, text, limits=(("docs/a.md", 5, 20),)):
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "docs" / "a.md").write_text(text)
    return documents.check(tmp_path, limits)[0]


@pytest.mark.parametrize("text, found", [
    ("one\n" * 5, None),
    ("one\n" * 6, "docs/a.md has 6 lines; 5 are allowed"),
    ("x" * 20, None),
    ("x" * 21, "docs/a.md:1 has 21 characters; 20 are allowed"),
    ("| " + "x" * 30 + " |\n", None),
    ("```\n" + "x" * 30 + "\n```\n", None),
    ("```\na\n```\n" + "x" * 30, "docs/a.md:4 has 30 characters"),
    ("# One two, 3\n[a](#one-two-3)\n", None),
    ("# A\n# A\n[a](#a-1)\n", None),
    ("# A\n[a](#a-1)\n", "docs/a.md: #a-1 is no heading"),
    ("# A\n[a](a.md#b)\n", "docs/a.md: a.md#b is no heading"),
    ("```\n# A\n```\n[a](#a)\n", "docs/a.md: #a is no heading"),
    ("`[a](#b)`\n", None),
    ("# 兩個字\n[a](#兩個字)\n", None),
])
def test_what_is_wrong_is_found(tmp_path, text, found):
    wrong = problems(tmp_path, text)
    assert (wrong == []) if found is None else (len(wrong) == 1 and wrong[0].startswith(found))


def test_a_row_of_no_document_is_found(tmp_path):
    assert problems(tmp_path, "", (("docs/b.md", 5, 20),))[0].startswith("docs/b.md: no document is called that")


def test_the_documents_of_this_project():
    assert documents.check()[0] == []


def test_pages_of_the_course_lead_to_files(tmp_path):
    folder = tmp_path / "docs" / "lab" / "html"
    folder.mkdir(parents=True)
    (tmp_path / "docs" / "HERE.md").write_text("# Here\n")
    (folder / "1.html").write_text('<a href="#own">a</a> <a href="https://example.org/x">b</a> <a class="c" href="../../HERE.md#here">c</a>')
    assert documents.check(tmp_path, ()) == ([], 2)
    (folder / "2.html").write_text('<a href="../../../elsewhere/HERE.md">d</a>')
    problems, count = documents.check(tmp_path, ())
    assert count == 3 and len(problems) == 1 and "2.html: ../../../elsewhere/HERE.md is no file" in problems[0]
