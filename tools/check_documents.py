#!/usr/bin/env python3
"""Holds what documents promise their readers: most lines of a page, longest line outside of tables and code, links to headings that are there;
pages of the course that lead to files that are there, wherever they were made."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# (documents, most lines, longest line outside of tables and fenced code); None: no limit. All that fit a document hold.
LIMITS = (
    ("README.md", None, 120),
    ("README.zh-TW.md", None, 120),
    ("CHANGELOG.md", None, 120),
    ("AGENTS.md", 150, 120),
    ("docs/ARCHITECTURE.md", 150, 120),
    ("docs/START.md", 150, 120),
    ("docs/*.md", None, 120),
    ("docs/lab/*.md", None, 120),
    ("docs/kernels/*.md", 200, 120),
    ("docs/results/README.md", 120, 120),
    ("docs/results/*.md", None, 120),
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
HREF = re.compile(r'<a\b[^>]*\bhref="([^"#:]+)(?:#[^"]*)?"')  # without a scheme
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def slug(heading):
    """GitHub's name of a heading: lower case, spaces as hyphens, without punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text):
    """The names of a page's headings; the second of the same name has -1 behind it."""
    found = []
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = slug(heading)
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def problems_of_size(name, text, most_lines, longest):
    lines = text.splitlines()
    if most_lines is not None and len(lines) > most_lines:
        yield f"{name} has {len(lines)} lines; {most_lines} are allowed: move what is not for everybody to a page of its own"
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        if longest is not None and len(line) > longest and not fenced and not line.startswith(("|", "```")):
            yield f"{name}:{number} has {len(line)} characters; {longest} are allowed outside of tables: break the line"


def problems_of_links(path, text, root):
    for target, anchor in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        page = path.parent / target if target else path
        if "://" in target or page.suffix != ".md" or not page.is_file():
            continue  # files that are not there are found by check_docs.py
        if anchor not in anchors(page.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}: {target}#{anchor} is no heading there"


def problems_of_page(path, text, root):
    for target in HREF.findall(text):
        if not (path.parent / target).is_file():
            yield f"{path.relative_to(root)}: {target} is no file; write the way from the page's own folder"


def check(root=ROOT, limits=LIMITS):
    """What is wrong, and how many checks were made."""
    problems, count = [], 0
    for pattern, most_lines, longest in limits:
        found = sorted(root.glob(pattern))
        if not found:
            problems.append(f"{pattern}: no document is called that; change the table of tools/check_documents.py")
        for path in found:
            problems += problems_of_size(str(path.relative_to(root)), path.read_text(encoding="utf-8"), most_lines, longest)
            count += 1
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("providers/*.md")]):
        problems += problems_of_links(path, path.read_text(encoding="utf-8"), root)
        count += 1
    for path in sorted(root.glob("docs/lab/html/*.html")):
        problems += problems_of_page(path, path.read_text(encoding="utf-8"), root)
        count += 1
    return problems, count


def main():
    problems, count = check()
    for problem in problems:
        print(problem)
    print(f"{max(count - len(problems), 0)} passed, {len(problems)} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
