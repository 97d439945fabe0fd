"""A file that a tool makes: written, or with --check compared."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def write_or_check(path: pathlib.Path, made: str, tool: str, check: bool) -> int:
    """The exit status: 1 if `check` is set and the file is missing or differs from what `tool` made."""
    name = path.relative_to(ROOT)
    if path.exists() and path.read_text(encoding="utf-8") == made:
        return 0
    if check:
        print(f"{name} is stale; run tools/{tool}", file=sys.stderr)
        return 1
    path.write_text(made, encoding="utf-8")
    print(f"wrote {name}")
    return 0
