#!/usr/bin/env python3
"""Makes flash_attn_fattn-VERSION-py3-none-any.whl: the import name flash_attn for fattn.compat, so that programs written for flash_attn need no call before.

A few files, which contain nothing but the way to fattn: fattn itself must be installed. Never beside the real flash-attn: the import says so then.

    make_compat_wheel.py               in build/wheel
    make_compat_wheel.py --out DIR     in DIR
"""
import argparse
import base64
import hashlib
import pathlib
import re
import sys
import zipfile

from made_file import ROOT

FOLDER = ROOT / "python/compat_wheel"
SUMMARY = "The import name flash_attn, computed by fattn (fattn.compat)"
DESCRIPTION = """# flash-attn-fattn

`import flash_attn` finds fattn's functions with flash_attn's names, arguments and results, on CPUs too. fattn must be
installed, and the real flash-attn must not. What transformers asks for, and flash_attn 3 and xFormers, need
`fattn.compat.install()` or `python -m fattn.compat program.py`: a wheel cannot answer for other distributions.
"""


def version() -> str:
    return re.search(r"project\(fattn VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1]


def files(of_version: str) -> dict[str, str]:
    """Names and texts, the record last."""
    info = f"flash_attn_fattn-{of_version}.dist-info"
    texts = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.py"))}
    texts |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: flash-attn-fattn\nVersion: {of_version}\nSummary: {SUMMARY}\nLicense: Apache-2.0\n"
                            f"Requires-Python: >=3.10\nRequires-Dist: fattn>={of_version}\nDescription-Content-Type: text/markdown\n\n{DESCRIPTION}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: fattn\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/top_level.txt": "flash_attn\n",
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
    }
    lines = []
    for name, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text.encode())}\n")
    return texts | {f"{info}/RECORD": "".join(lines) + f"{info}/RECORD,,\n"}


def make(folder: pathlib.Path) -> pathlib.Path:
    """The same bytes whenever it is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flash_attn_fattn-{version()}-py3-none-any.whl"
    partial = path.with_suffix(".part")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files(version()).items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    partial.replace(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/wheel", metavar="DIR", help="where the wheel goes (default: build/wheel)")
    print(make(parser.parse_args().out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
