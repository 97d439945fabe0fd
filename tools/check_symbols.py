#!/usr/bin/env python3
"""Checks the built library: what it exports, what it needs, and that an instruction set's object leaks no shared code.

An inline function or template that two objects emit is kept once by the linker, and the copy kept may be the one that was
compiled for AVX-512. So the objects of isa_*.cpp may define such (weak) symbols inside the namespace of their own
instruction set only; isa_scalar and isa_neon are built for the plainest processor and may share. `--self-test` compiles units that must fail."""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NEEDED = re.compile(r"lib(c|m|stdc\+\+|gcc_s|dl|pthread|rt)\.so\.\d+|ld-linux[-\w]*\.so\.\d+")
WEAK = set("WwVvu")
DATA = "DW.ref."  # the compiler's references to the exception runtime: no code
BASELINE = {"isa_scalar.cpp.o", "isa_neon.cpp.o"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def exported(library):
    problems = []
    symbols = [line.split()[-1].split("@")[0] for line in output("nm", "-D", "--defined-only", str(library)).splitlines()]
    if not symbols:
        problems.append(f"{library} exports nothing")
    problems += [f"{library} exports {s}; only fattn_* may be" for s in symbols if not s.startswith("fattn_")]
    header = Path(__file__).resolve().parent.parent / "include/fattn/fattn.h"
    declared = set(re.findall(r"^FATTN_API [^(]*?(fattn_\w+)\(", header.read_text(), re.MULTILINE))
    problems += [f"{header.name} declares {s}, which {library} does not export" for s in sorted(declared - set(symbols))]
    problems += [f"{library} exports {s}, which {header.name} does not declare" for s in sorted(set(symbols) - declared)]
    return problems


def needed(library):
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", str(library)))
    return [f"{library} needs {n}; only the C and C++ runtime may be" for n in names if not NEEDED.fullmatch(n)]


def isa_object(path):
    """`path` is .../isa_NAME.cpp.o; its weak symbols must lie in fattn::core::NAME. Mangled names begin with the function's
    own namespaces, whatever its template arguments and return type are."""
    isa = re.match(r"isa_(\w+?)\.", path.name).group(1)
    own = re.compile(rf"_Z(?:TV|TI|TS|GV|Z)?N[KVrRO]*5fattn4core{len(isa)}{isa}")
    problems = []
    for line in output("nm", "--defined-only", str(path)).splitlines():
        match = re.match(r"[0-9a-f]* (\w) (\S+)", line)
        if match and match.group(1) in WEAK and not match.group(2).startswith(DATA) and not own.match(match.group(2)):
            name = output("c++filt", match.group(2)).strip()
            problems.append(f"{path.name}: weak symbol {name} is outside fattn::core::{isa}")
    return problems


def self_test():
    """Units that break each rule must be found out, a right one must pass."""
    compiler = shutil.which("c++") or "g++"
    units = {
        "good": ("namespace fattn::core::x { template <class T> T f(T a) { return a + 1; } template int f<int>(int); }", False),
        "result": ("namespace fattn::core::x { struct V { int a; }; }\n"
                   "namespace fattn::core { template <class T> x::V f(T a) { return {a}; } template x::V f<int>(int); }", True),
        "outside": ("namespace fattn::core { template <class T> T f(T a) { return a + 1; } template int f<int>(int); }", True),
        "std": ("#include <vector>\ntemplate class std::vector<float>;", True),
        "inline": ("inline int g(int a) { return a * a; }\nint (*h)(int) = g;", True),
    }
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (source, bad) in units.items():
            unit, made = Path(folder, f"{name}.cpp"), Path(folder, name, "isa_x.cpp.o")
            unit.write_text(source)
            made.parent.mkdir()
            subprocess.run([compiler, "-std=c++20", "-c", str(unit), "-o", str(made)], check=True)
            right = bool(isa_object(made)) == bad
            passed, failed = passed + right, failed + (not right)
            if not right:
                print(f"self-test {name}: expected {'a finding' if bad else 'none'}, got {isa_object(made)}")
        library = Path(folder, "libx.so")
        Path(folder, "x.cpp").write_text('extern "C" void fattn_version() {}\nvoid leak() {}')
        subprocess.run([compiler, "-shared", "-fPIC", str(Path(folder, "x.cpp")), "-o", str(library)], check=True)
        right = any("leak" in p for p in exported(library))
        passed, failed = passed + right, failed + (not right)
        if not right:
            print(f"self-test: a leaked export was not found: {exported(library)}")
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--build", type=Path, default=Path("build"), help="build directory (default: build)")
    arguments = parser.parse_args()
    if arguments.self_test:
        passed, failed = self_test()
    else:
        objects = sorted(path for path in arguments.build.glob("src/**/isa_*.cpp.o") if path.name not in BASELINE)
        library = arguments.build / "src/libfattn.so"
        results = []
        if not library.exists():
            results.append([f"{library} is not there; build it first"])
        else:
            results += [exported(library), needed(library)]
        results += [isa_object(path) for path in objects] or [[f"no isa_*.cpp.o below {arguments.build}/src"]]
        for problem in (p for problems in results for p in problems):
            print(problem)
        passed, failed = sum(not problems for problems in results), sum(bool(problems) for problems in results)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
