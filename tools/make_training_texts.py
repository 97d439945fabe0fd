#!/usr/bin/env python3
"""Makes folders of texts to train on from what the system ships, without a network.

    make_training_texts.py FOLDER              all sets
    make_training_texts.py FOLDER --sets code,manuals --most-mb 20

Each set is a folder with `train` and `held-out`, which `fattn gpt2 tokenize` reads:

    code        Python's own library, a file a document
    summaries   its functions and the first sentences of their docstrings: {"prompt", "completion"}
    dialogues   its doctests, as talks between a user and Python: {"messages"}
    manuals     manual pages in English as plain text, a file a page
    questions   what the commands of these pages are for: {"prompt", "completion"}
    documents   texts of /usr/share/doc
    books       texts of the packages of BOOKS that are installed; the others are named

The same system, seed and share give the same bytes. What a set lacks is said.
"""
import argparse
import ast
import bz2
import doctest
import functools
import gzip
import hashlib
import json
import lzma
import pathlib
import re
import subprocess
import sys
import sysconfig
import warnings

# Debian's and Ubuntu's packages of texts that anybody may train on.
BOOKS = ["bible-kjv-text", "wordnet-base", "dict-gcide", "debian-handbook", "fortunes", "fortunes-min", "perl-doc", "vim-runtime", "linux-doc", "debian-faq", "debian-policy", "doc-rfc-std"]
OPENERS = {".gz": gzip.open, ".dz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LONGEST = 1 << 22  # bytes of a file


def text_of(path: pathlib.Path) -> str | None:
    """What a file holds, unpacked; None if that is no text."""
    try:
        if not path.is_file() or path.is_symlink():
            return None
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            data = file.read(LONGEST)
        if b"\0" in data:
            return None
        if len(data) == LONGEST:
            data = data[: data.rfind(b"\n") + 1]
        return data.decode()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError):
        return None


class Set:
    """A folder that is being written: what is held out depends on the seed and a name alone. Texts that were there before are left out."""

    def __init__(self, folder: pathlib.Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.left = options.most_mb * 1_000_000
        self.seen: set[bytes] = set()
        self.count = {"train": 0, "held-out": 0}
        self.bytes = {"train": 0, "held-out": 0}
        self.lines: dict[str, list[str]] = {"train": [], "held-out": []}

    def part(self, name: str) -> str:
        hashed = hashlib.sha256(f"{self.options.seed} {name}".encode()).digest()
        return "held-out" if int.from_bytes(hashed[:8], "big") < self.options.held_out * 2**64 else "train"

    def take(self, text: str) -> bool:
        digest = hashlib.sha256(text.encode()).digest()
        size = len(text.encode())
        if digest in self.seen or not text.strip() or size > self.left:
            return False
        self.seen.add(digest)
        self.left -= size
        return True

    def add_file(self, name: str, text: str):
        if self.take(text):
            part = self.part(name)
            path = self.folder / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            self.count[part] += 1
            self.bytes[part] += len(text.encode())

    def add_record(self, name: str, record: dict):
        line = json.dumps(record, ensure_ascii=False)
        if self.take(line):
            part = self.part(name)
            self.lines[part].append(line)
            self.count[part] += 1
            self.bytes[part] += len(line.encode()) + 1

    def finish(self):
        for part, lines in self.lines.items():
            if lines:
                path = self.folder / part / f"{self.folder.name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(line + "\n" for line in lines))


@functools.cache
def library() -> list[tuple[str, str]]:
    """Names and texts of Python's own modules, without its tests."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not {"test", "tests", "site-packages", "dist-packages", "idle_test"} & set(name.parts):
            text = text_of(path)
            if text:
                files.append((str(name), text))
    return files


def parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def documented(tree: ast.Module):
    """Every function and class with a docstring, in its order."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            yield node


def make_code(into: Set):
    for name, text in library():
        into.add_file(name, text)


def make_summaries(into: Set):
    for name, text in library():
        tree = parsed(text)
        lines = text.splitlines(keepends=True)
        for node in documented(tree) if tree else ():
            if isinstance(node, ast.ClassDef) or len(node.body) < 2:
                continue
            summary = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
            doc = node.body[0]
            source = "".join(lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno])
            if 10 <= len(summary) <= 300 and len(source) <= 4000:
                into.add_record(f"{name}:{node.name}", {"prompt": f"{source.rstrip()}\n\nSummary:", "completion": f" {summary}"})


def make_dialogues(into: Set):
    parser = doctest.DocTestParser()
    for name, text in library():
        tree = parsed(text)
        for node in [tree, *documented(tree)] if tree else ():
            try:
                examples = parser.get_examples(ast.get_docstring(node) or "")
            except ValueError:
                continue
            messages, asked = [], ""
            for example in examples:
                asked += example.source  # what prints nothing belongs to the next question
                if example.want.strip():
                    messages += [{"role": "user", "content": asked.strip()}, {"role": "assistant", "content": example.want.strip()}]
                    asked = ""
            if messages:
                into.add_record(f"{name}:{getattr(node, 'name', '')}", {"messages": messages})


ESCAPES = [(re.compile(pattern), by) for pattern, by in (
    (r"\\f(\[[^\]]*\]|\(..|.)", ""), (r"\\s[-+]?\d+", ""), (r"\\[&|^,/%:)]", ""), (r"\\\*?\((lq|rq|dq)|\\\[(lq|rq|dq)\]", '"'), (r"\\\((aq|cq|oq)|\\\[(aq|cq|oq)\]", "'"),
    (r"\\\((em|en)|\\\[(em|en)\]", "-"), (r"\\\(bu|\\\[bu\]", "*"), (r"\\-", "-"), (r"\\e|\\\(rs|\\\[rs\]", r"\\"), (r"\\\[[^\]]*\]|\\\*?\(..", ""), (r"\\[ ~0]", " "), (r"\\([.'`])", r"\1"), (r'\\".*', ""))]
HEADINGS, SILENT = {"SH", "Sh", "SS", "Ss"}, {"TH", "Dd", "Dt", "Os", "de", "if", "ie", "el", "ds", "nr", "so", "ft", "hy", "ad", "tr", "ig", "am", "ne", "ll", "in", "ti", "ta", "UR", "MT"}


def plain(roff: str) -> str:
    """A manual page as text: headings, paragraphs and lists; what only says how things look is left out."""
    lines, macro = [], False
    for line in roff.splitlines():
        if macro:  # within a definition, up to its two dots
            macro = not line.startswith("..")
            continue
        request = re.match(r"[.'][ \t]*(\w*)[ \t]*(.*)", line)
        if request:
            name, rest = request.groups()
            macro = name in ("de", "am", "ig")
            words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
            if name in HEADINGS:
                line = "\n" + " ".join(words).upper() + "\n"
            elif name in ("PP", "P", "LP", "Pp", "TP", "IP", "It", "sp", "HP"):
                line = "\n" + " ".join(words[: 1 if name == "IP" else None] if name in ("IP", "It") else [])
            elif name in SILENT or not name:
                continue
            elif len(name) == 2 and set(name) <= set("BIR") or name in ("SM", "SB"):
                line = ("" if len(name) == 2 and name not in ("SM", "SB") else " ").join(words)
            elif name in ("B", "I") or name[0].isupper():
                line = " ".join(words)
            else:
                continue
        for pattern, by in ESCAPES if "\\" in line else ():
            line = pattern.sub(by, line)
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


@functools.cache
def manuals() -> list[tuple[str, str]]:
    pages = []
    for path in sorted(pathlib.Path("/usr/share/man").glob("man[1-8]/*")):
        roff = text_of(path)
        if roff and len(roff) > 500:
            pages.append((path.name.removesuffix(".gz"), plain(roff)))
    return pages


def make_manuals(into: Set):
    for name, text in manuals():
        into.add_file(name + ".txt", text)


def make_questions(into: Set):
    for name, text in manuals():
        found = re.search(r"^NAME\n\s*(.+?) - (.+?)\n\n", text, re.MULTILINE | re.DOTALL)
        if found:
            what, answer = (" ".join(part.split()) for part in found.groups())
            if len(what) <= 40 and 8 <= len(answer) <= 200:
                into.add_record(name, {"prompt": f"Question: What is {what} for?\nAnswer:", "completion": f" {answer}"})


def make_documents(into: Set):
    for path in sorted(pathlib.Path("/usr/share/doc").rglob("*")):
        if not re.search(r"changelog|\.(html?|json|svg|ps|py|c|h|cpp|pas|pp|output)(\.gz)?$", path.name, re.IGNORECASE):
            text = text_of(path)
            if text and len(text) > 500:
                into.add_file(str(path.relative_to("/usr/share/doc")).replace("/", "_").removesuffix(".gz") + ".txt", text)


def make_books(into: Set) -> list[str]:
    missing = []
    for package in BOOKS:
        done = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True)
        if done.returncode != 0:
            missing.append(package)
            continue
        for name in sorted(done.stdout.splitlines()):
            path = pathlib.Path(name)
            if re.search(r"\.(html?|css|js|png|svg|vim|so|index|dat|ps)(\.gz)?$|changelog|copyright|/(bin|lib|man|python3)/", name):
                continue
            text = text_of(path)
            if text and len(text) > 2000:
                into.add_file(f"{package}_{path.name.removesuffix('.txt')}.txt", text)
    return missing


MAKERS = {"code": make_code, "summaries": make_summaries, "dialogues": make_dialogues, "manuals": make_manuals, "questions": make_questions, "documents": make_documents, "books": make_books}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="new or empty")
    parser.add_argument("--sets", default=",".join(MAKERS), help="names with commas between them [all]")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of each set that is not for training [0.05]")
    parser.add_argument("--seed", type=int, default=0, help="of which share that is [0]")
    parser.add_argument("--most-mb", type=int, default=50, help="megabytes of each set [50]")
    options = parser.parse_args()
    names = options.sets.split(",")
    for name in names:
        if name not in MAKERS:
            parser.error(f"there is no set {name!r}; allowed: {', '.join(MAKERS)}")
    if not 0 <= options.held_out < 1 or options.most_mb < 1:
        parser.error("--held-out is from 0 to 1, --most-mb 1 or more")
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        parser.error(f"{str(options.folder)!r} is not empty; give a folder that is new or empty")
    print(f"{'set':<10}  {'documents':>9}  {'MB':>7}  {'held out':>8}  {'MB':>7}")
    print(f"{'-' * 10}  {'-' * 9}  {'-' * 7}  {'-' * 8}  {'-' * 7}")
    notes, total = [], 0
    for name in names:
        made = Set(options.folder / name, options)
        missing = MAKERS[name](made)
        made.finish()
        total += made.count["train"]
        print(f"{name:<10}  {made.count['train']:>9,}  {made.bytes['train'] / 1e6:>7.2f}  {made.count['held-out']:>8,}  {made.bytes['held-out'] / 1e6:>7.2f}", flush=True)
        if missing:
            notes.append(f"{name}: not installed: {', '.join(missing)}")
        if not made.count["train"]:
            notes.append(f"{name}: there is nothing on this system")
    print("\n".join(notes))
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
