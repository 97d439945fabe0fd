#!/usr/bin/env python3
"""Checks who includes whom against the layers of docs/ARCHITECTURE.md. `--self-test` checks the checker on made-up trees."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

SOURCES = ("*.h", "*.hpp", "*.cuh", "*.c", "*.cpp", "*.inc")

# The layers of src/, lowest first: a file sees its own layer's folder and everything below, nothing above.
LAYERS = ["src/device_abi", "src/shared", "src/device", "src/cpu", "src/jit", "src/problem", "src/plan", "src/backend", "src/rows", "src/attention", "src/ring",
          "src/api"]
# Run-time compilation and the layer of CPUs know no attention, and what describes and plans attention compiles nothing. Schedules of several processes know
# neither tensors nor devices.
NOT_SEEN = {"src/jit": ["src/cpu"], "src/problem": ["src/jit"], "src/plan": ["src/jit"],
            "src/ring": ["src/device", "src/cpu", "src/jit", "src/problem", "src/plan", "src/backend", "src/rows", "src/attention"]}

# Beside the attention: operations that see what both are made of.
OPERATIONS = {"src/ops": ["include/fattn", "src/device_abi", "src/shared", "src/device", "src/cpu", "src/jit"]}

# Folders above the API, and what they see besides themselves.
ABOVE = {
    "include/fattn": [],
    "testing": ["include/fattn"],
    "measure": ["include/fattn"],
    "files": [],
    "lab": ["include/fattn", "measure"],
    "gpt2": ["include/fattn", "files", "src/ops/ops.h", "src/ops/process_sum.h", "src/ops/training.h"],
    "cli": ["include/fattn", "testing", "measure", "files", "lab", "gpt2"],
    "examples": ["include/fattn", "gpt2"],
    "torch": ["include/fattn"],
    "tests": ["include/fattn", "src", "testing", "measure", "files", "lab", "gpt2", "cli", "kernels"],
    "kernels": ["src/device_abi"],
}

# Other people's libraries, by the first part of the name, and the folders that may use them.
LIBRARIES = {
    "nlohmann": ["measure", "files", "lab", "gpt2", "cli", "tests"],
    "CLI": ["cli"],
    "fmt": ["lab", "gpt2", "cli"],
    "gtest": ["tests"],
    "gmock": ["tests"],
    "torch": [],
    "ATen": [],
    "cuda": [],
    "cblas": [],
    "omp": ["tests"],
}

# Libraries that take seconds in each unit that sees them: the header that names their classes instead, and the headers that need more than names.
SLOW = {"CLI": ("cli/parser.h", ["cli/help_format.h"])}

# A translation unit that is built for more than the plainest processor, and all that it includes, may use these system
# headers alone: anything with templates or inline functions could leave a copy in the program that an older processor
# cannot run. The units of BASELINE are built without flags of their own.
BASELINE = {f"src/{layer}/cpu/isa_{isa}.cpp" for layer in ("backend", "ops", "rows") for isa in ("scalar", "neon")}
ISA_HEADERS = {"stddef.h", "stdint.h", "float.h", "math.h", "string.h", "immintrin.h", "arm_neon.h", "arm_sve.h"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)


def area_of(path):
    """The layer or folder that a file belongs to: 'src/plan', 'cli', ...; None for files under no rule."""
    for layer in LAYERS + list(OPERATIONS):
        if path.startswith(layer + "/") or path.startswith(layer + "."):
            return layer
    for folder in ABOVE:
        if path.startswith(folder + "/"):
            return folder
    return None


def may_see(path, target):
    area, target_area = area_of(path), area_of(target)
    if area is None or target_area is None:
        return False
    if area == target_area:
        return True
    if area in LAYERS:
        if target_area == "include/fattn":
            return True
        if target_area in NOT_SEEN.get(area, []):
            return False
        return target_area in LAYERS and LAYERS.index(target_area) < LAYERS.index(area)
    return any(target == seen or target.startswith(seen + "/") for seen in (ABOVE | OPERATIONS)[area])


def read_graph(root):
    """{file: [(line, kind, name, file included or None)]} with paths relative to root."""
    files = {}
    for top in ("include", "src", "testing", "measure", "files", "lab", "gpt2", "cli", "examples", "torch", "tests", "kernels"):
        for pattern in SOURCES:
            for path in sorted((root / top).rglob(pattern)):
                files[path.relative_to(root).as_posix()] = path
    graph = {}
    for name, path in files.items():
        text = path.read_text(encoding="utf-8", errors="replace")
        found = []
        for match in INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            kind, included = match.groups()
            near = (Path(name).parent / included).as_posix()
            candidates = [near, f"include/{included}", f"src/{included}", included]
            if kind == "<":  # ours in angle brackets is ours still
                candidates = [f"include/{included}"]
            found.append((line, kind, included, next((c for c in candidates if c in files), None)))
        graph[name] = found
    return graph


def cycles(graph):
    """Files that include themselves through others: one readable chain for each cycle found."""
    state, chains = {}, []

    def visit(name, chain):
        state[name] = "open"
        for _, _, _, target in graph[name]:
            if target is None:
                continue
            if state.get(target) == "open":
                start = chain.index(target) if target in chain else 0
                chains.append(" -> ".join(chain[start:] + [target]))
            elif target not in state:
                visit(target, chain + [target])
        state[name] = "done"

    for name in graph:
        if name not in state:
            visit(name, [name])
    return chains


def check(root):
    """The violations, as lines to print, and the number of includes looked at."""
    graph = read_graph(root)
    problems, seen = [], 0
    for name, includes in graph.items():
        for line, kind, included, target in includes:
            seen += 1
            where = f"{name}:{line}"
            if target is not None:
                if area_of(name) is None:
                    problems.append(f"{where}: {name} is in no layer; put it into one of {', '.join(LAYERS)} or a folder above the API")
                elif not may_see(name, target):
                    problems.append(f"{where}: {area_of(name)} may not see {target}")
                elif area_of(name) == "kernels" and area_of(target) != "kernels" and graph[target]:
                    problems.append(f"{where}: {target} includes other headers, so device code cannot use it")
                elif area_of(name) == "kernels" and included not in (target, target.removeprefix("src/")):
                    problems.append(f'{where}: device code includes by the path from the root, or from src: "{target.removeprefix("src/")}"')
                continue
            if kind == '"':
                problems.append(f'{where}: "{included}" is no file of the project; use <{included}> for others\' headers')
                continue
            if area_of(name) == "kernels":
                problems.append(f"{where}: <{included}>: device code includes no system headers; NVRTC has none")
                continue
            library = re.split(r"[/.]", included)[0]
            if library in LIBRARIES and area_of(name) not in LIBRARIES[library]:
                problems.append(f"{where}: <{included}> may be used in {', '.join(LIBRARIES[library]) or 'no part of this'} only")
            elif library in SLOW and name.endswith(".h") and name not in SLOW[library][1]:
                problems.append(f"{where}: <{included}> takes seconds in each unit that sees it; headers include {SLOW[library][0]}")
    problems += [f"cycle: {chain}" for chain in cycles(graph)]

    for unit in sorted(n for n in graph if re.fullmatch(r"src/(backend|ops|rows)/cpu/isa_\w+\.cpp", n) and n not in BASELINE):
        reached, todo = {unit}, [unit]
        while todo:
            name = todo.pop()
            for line, _, included, target in graph[name]:
                if target is None and included not in ISA_HEADERS:
                    problems.append(f"{name}:{line}: <{included}> reaches {unit}; allowed there: {', '.join(sorted(ISA_HEADERS))}")
                elif target is not None and target not in reached:
                    reached.add(target)
                    todo.append(target)
    return sorted(set(problems)), seen


GOOD_TREE = {
    "include/fattn/fattn.h": "#include <stdint.h>\n",
    "include/fattn/types.hpp": '#include <cstdint>\n#include "fattn/fattn.h"\n',
    "src/device_abi/mask.h": "",
    "src/shared/text.h": "#include <string>\n",
    "src/device/cuda_device.h": '#include "shared/text.h"\n',
    "src/jit/jit.h": '#include "device/cuda_device.h"\n',
    "src/backend/cuda/v2.cpp": '#include "jit/jit.h"\n#include "plan/plan.h"\n',
    "kernels/ptx/element.h": "",
    "kernels/ptx/mma.h": '#include "kernels/ptx/element.h"\n',
    "kernels/v2/forward.h": '#include "kernels/ptx/mma.h"\n#include "device_abi/mask.h"\n',
    "src/problem/problem.h": '#include "fattn/types.hpp"\n#include "device_abi/mask.h"\n',
    "src/plan/plan.h": '#include "problem/problem.h"\n',
    "src/plan/plan.cpp": '#include "plan/plan.h"\n',
    "src/backend/cpu/kernels.h": "#include <stdint.h>\n",
    "src/backend/cpu/isa_avx2.cpp": '#include "backend/cpu/kernels.h"\n#include <math.h>\n',
    "src/backend/cpu/isa_scalar.cpp": '#include "backend/cpu/kernels.h"\n#include <cstdint>\n',
    "src/backend/cpu/cpu.h": '#include "plan/plan.h"\n',
    "src/attention.cpp": '#include "backend/cpu/cpu.h"\n#include <vector>\n',
    "src/ring/schedule.cpp": '#include "shared/text.h"\n#include "fattn/fattn.h"\n',
    "src/api/ring_api.cpp": '#include "ring/schedule.cpp"\n',
    "testing/check.h": '#include "fattn/types.hpp"\n',
    "files/json.h": "#include <nlohmann/json.hpp>\n",
    "src/ops/ops.h": '#include "fattn/types.hpp"\n',
    "src/ops/host.h": '#include "device/cuda_device.h"\n',
    "gpt2/model.h": '#include "files/json.h"\n#include "ops/ops.h"\n',
    "cli/check.cpp": '#include "testing/check.h"\n#include <CLI/CLI.hpp>\n',
    "cli/check.h": '#include "cli/parser.h"\n',
    "cli/parser.h": "",
    "cli/help_format.h": "#include <CLI/CLI.hpp>\n",
    "torch/operators.cpp": '#include "fattn/fattn.h"\n',
    "tests/test_plan.cpp": '#include "plan/plan.h"\n#include <gtest/gtest.h>\n',
}
# (file, what is added to it, what the message must say)
BAD_CHANGES = [
    ("include/fattn/types.hpp", '#include "device_abi/mask.h"\n', "include/fattn may not see src/device_abi/mask.h"),
    ("src/problem/problem.h", '#include "plan/plan.h"\n', "src/problem may not see src/plan/plan.h"),
    ("src/plan/plan.h", '#include "backend/cpu/cpu.h"\n', "src/plan may not see src/backend/cpu/cpu.h"),
    ("src/plan/plan.cpp", '#include "backend/cpu/kernels.h"\n', "src/plan may not see src/backend/cpu/kernels.h"),
    ("src/device_abi/mask.h", '#include "attention.cpp"\n', "src/device_abi may not see src/attention.cpp"),
    ("cli/check.cpp", '#include "plan/plan.h"\n', "cli may not see src/plan/plan.h"),
    ("cli/check.h", "#include <CLI/CLI.hpp>\n", "headers include cli/parser.h"),
    ("torch/operators.cpp", '#include "problem/problem.h"\n', "torch may not see src/problem/problem.h"),
    ("torch/operators.cpp", "#include <torch/library.h>\n", "<torch/library.h> may be used in no part of this only"),
    ("testing/check.h", '#include "device_abi/mask.h"\n', "testing may not see src/device_abi/mask.h"),
    ("gpt2/model.h", '#include "cli/check.cpp"\n', "gpt2 may not see cli/check.cpp"),
    ("gpt2/model.h", '#include "ops/host.h"\n', "gpt2 may not see src/ops/host.h"),
    ("src/ops/host.h", '#include "problem/problem.h"\n', "src/ops may not see src/problem/problem.h"),
    ("src/plan/plan.h", '#include "ops/ops.h"\n', "src/plan may not see src/ops/ops.h"),
    ("files/json.h", '#include "gpt2/model.h"\n', "files may not see gpt2/model.h"),
    ("src/plan/plan.cpp", '#include "gone.h"\n', '"gone.h" is no file of the project'),
    ("src/plan/plan.cpp", "#include <nlohmann/json.hpp>\n", "<nlohmann/json.hpp> may be used in measure, files, lab, gpt2, cli, tests only"),
    ("include/fattn/fattn.h", '  #  include "fattn/types.hpp"\n', "cycle: include/fattn/"),
    ("src/backend/cpu/kernels.h", "#include <vector>\n", "<vector> reaches src/backend/cpu/isa_avx2.cpp"),
    ("src/jit/jit.h", '#include "problem/problem.h"\n', "src/jit may not see src/problem/problem.h"),
    ("src/device/cuda_device.h", '#include "jit/jit.h"\n', "src/device may not see src/jit/jit.h"),
    ("src/plan/plan.h", '#include "jit/jit.h"\n', "src/plan may not see src/jit/jit.h"),
    ("src/backend/cuda/v2.cpp", '#include "kernels/v2/forward.h"\n', "src/backend may not see kernels/v2/forward.h"),
    ("kernels/v2/forward.h", '#include "plan/plan.h"\n', "kernels may not see src/plan/plan.h"),
    ("kernels/v2/forward.h", '#include "shared/text.h"\n', "kernels may not see src/shared/text.h"),
    ("src/device_abi/mask.h", "#include <stdint.h>\n", "src/device_abi/mask.h includes other headers"),
    ("kernels/v2/forward.h", "#include <cuda_fp16.h>\n", "device code includes no system headers"),
    ("kernels/ptx/mma.h", '#include "element.h"\n', "device code includes by the path from the root"),
    ("src/ring/schedule.cpp", '#include "problem/problem.h"\n', "src/ring may not see src/problem/problem.h"),
    ("src/plan/plan.cpp", '#include "ring/schedule.cpp"\n', "src/plan may not see src/ring/schedule.cpp"),
    ("src/odd.h", '#include "device_abi/mask.h"\n', "src/odd.h is in no layer"),
]


def self_test():
    passed = failed = 0
    for changed, addition, expected in [(None, "", None)] + BAD_CHANGES:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in list(GOOD_TREE) + [changed] * (changed not in (None, *GOOD_TREE)):
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(GOOD_TREE.get(name, "") + (addition if name == changed else ""))
            problems, _ = check(root)
        good = not problems if expected is None else any(expected in p for p in problems)
        if not good:
            print(f"self-test: {changed}: expected {expected!r}, got {problems}")
        passed, failed = passed + good, failed + (not good)
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        passed, failed = self_test()
    else:
        problems, seen = check(Path(__file__).resolve().parent.parent)
        for problem in problems:
            print(problem)
        print(f"{seen} includes looked at")
        passed, failed = (0, len(problems)) if problems or not seen else (1, 0)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
