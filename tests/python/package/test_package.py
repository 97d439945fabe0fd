"""The installed package: what it holds, information and support, its command, and what it says where something is missing."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

import fattn
import fattn.numpy

PACKAGE = pathlib.Path(fattn.__file__).parent
ROOT = pathlib.Path(__file__).resolve().parents[3]


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)


def test_is_the_installed_one_and_whole():
    assert ROOT not in PACKAGE.parents or "build" in PACKAGE.relative_to(ROOT).parts, "the source tree is imported"
    assert fattn.__version__ == importlib.metadata.version("fattn")
    assert {"numpy.py", "py.typed"} <= {path.name for path in PACKAGE.iterdir()}
    for name in ("lib/libfattn.so", "lib/libfattn_profile.so", "lib/fattn_torch.so", "bin/fattn", "include/fattn/fattn.h", "include/fattn/fattn.hpp",
                 "compat/peers/flash_attn/cute/interface.py", "compat/peers/xformers/ops/fmha/attn_bias.py", "share/fattn/providers/torch_sdpa.py", "share/fattn/providers/_provider.py", "lib/cmake/fattn/fattnConfig.cmake"):
        assert (PACKAGE / name).is_file(), name


def test_wheel_is_for_every_python():
    tags = re.findall(r"^Tag: (.*)$", importlib.metadata.distribution("fattn").read_text("WHEEL"), re.MULTILINE)
    assert all(re.fullmatch(r"py3-none-manylinux(_2_\d+|2014)_(x86_64|aarch64)", tag) for tag in tags)
    assert any(tag.startswith("py3-none-manylinux_2_17_") for tag in tags), "something in it needs a newer glibc; cmake/old_glibc.c has the list"


def versions_of(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each library that the symbols of a file ask for, by the name of the version."""
    listing = subprocess.run(["objdump", "-p", path], check=True, capture_output=True, text=True).stdout.partition("Version References:")[2]
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r" (GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)$", listing, re.MULTILINE):
        newest[name] = max(newest.get(name, ()), tuple(map(int, version.split("."))))
    return newest


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
@pytest.mark.parametrize("name", ["lib/libfattn.so", "lib/libfattn_profile.so", "lib/fattn_torch.so", "bin/fattn"])
def test_runs_with_old_systems(name):
    """Beside what auditwheel says: glibc 2.17, no C++ library, and of GCC's what came with GCC 4.8."""
    newest = versions_of(PACKAGE / name)
    assert newest["GLIBC"] <= (2, 17) and newest["GCC"] <= (4, 8) and set(newest) == {"GLIBC", "GCC"}


def test_structs_are_those_of_the_header(tmp_path):
    """The library refuses another size; this holds every offset against the C compiler's."""
    from fattn import _abi, _abi_structs

    structs = {"fattn_tensor": _abi.Tensor, "fattn_problem": _abi.Problem, "fattn_plan_info": _abi.PlanInfo, "fattn_cpu_info": _abi.CpuInfo, "fattn_library_info": _abi.LibraryInfo,
               "fattn_env_info": _abi.EnvInfo, "fattn_cuda_info": _abi.CudaInfo, "fattn_cache_info": _abi.CacheInfo}
    structs |= {f"fattn_ring_{name.lower()}": getattr(_abi_structs, f"Ring{name}") for name in ("Problem", "Range", "Hop", "Block", "Schedule")}
    lines, expected = [], []
    for name, struct in structs.items():
        for field, *_ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field.rstrip("_")}));')
            expected.append(getattr(struct, field).offset)
    (tmp_path / "offsets.c").write_text("#include <fattn/fattn.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n")
    subprocess.run(["cc", "-I", PACKAGE / "include", "offsets.c", "-o", "offsets"], cwd=tmp_path, check=True)
    printed = subprocess.run(["./offsets"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_info():
    info = json.loads(json.dumps(fattn.info()))
    assert info["version"] == fattn.__version__
    assert info["cpu"]["usable_threads"] >= 1 and info["cpu"]["isa"] in info["cpu"]["isas"]
    assert {library["name"] for library in info["libraries"]} == {"OpenBLAS", "CUDA driver", "NVRTC", "cuBLASLt", "NCCL"}
    assert len(info["environment"]) == 7
    assert bool(info["cuda"]["devices"]) != bool(info["cuda"]["reason"])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_support(backward, layout):
    q, k, v = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16)) if layout == "bshd" else ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))
    options = {"backward": backward, "layout": layout}
    for dtype in ("fp32", "fp16", "bf16", "fp64"):
        yes = fattn.support(q, k, v, dtype=dtype, causal=True, **options)
        assert yes and yes.reason == ""
    no = fattn.support(q, k, v, backend="cuda", **options)
    assert not no and "cuda" in no.reason.lower()
    with pytest.raises(ValueError, match="nheads is 4 and nheads_k is 3"):
        fattn.support(q, *(tuple(3 if n == 2 and i else n for i, n in enumerate(x)) for x in (k, v)), **options)
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed: 'fp32'"):
        fattn.support(q, k, v, dtype="int8", **options)
    with pytest.raises(ValueError, match="q has 2 dimensions"):
        fattn.support(q[:2], k, v, **options)
    with pytest.raises(ValueError, match="of q is 18446744073709551616, which does not fit into 64 bits"):
        fattn.support((2**64, *q[1:]), k, v, **options)


def test_supported_and_plan_of_what_scores_depend_on():
    q, k = (2, 5, 4, 8), (2, 7, 2, 8)
    features = [{"seqused_k": True}, {"alibi_slopes": True}, {"bias": (1, 4, 5, 7)}, {"mask": (2, 1, 1, 7)}, {"dropout_p": 0.5}, {"documents": True}]
    for options in (*features, {key: value for x in features for key, value in x.items()}):
        for backward in (False, True):
            assert fattn.support(q, k, backward=backward, **options)
            no = fattn.support(q, k, backward=backward, algorithm="standard", **options)
            assert not no and "algorithm standard of backend cpu does not compute" in no.reason
    with pytest.raises(ValueError, match=r"mask has the shape \(2, 1, 1, 6\)"):
        fattn.support(q, k, mask=(2, 1, 1, 6))
    assert fattn.support((2, 4, 5, 8), (2, 2, 7, 8), documents=True, backward=True, layout="bhsd")


def test_supported_and_plan_of_packed_sequences():
    q, k, v = (12, 4, 8), (20, 2, 8), (20, 2, 16)
    for backward in (False, True):
        for options in ({}, {"seqused_k": True, "alibi_slopes": True, "bias": (3, 4, 5, 9), "mask": (1, 1, 5, 9), "documents": True}):
            assert fattn.support(q, k, v, packed=(3, 5, 9), backward=backward, causal=True, **options)
            plan = fattn.plan(q, k, v, packed=(3, 5, 9), backward=backward, causal=True, **options)
            assert plan.backend == "cpu" and plan.algorithm == "v2"
        no = fattn.support(q, k, v, packed=(3, 5, 9), backward=backward, algorithm="standard")
        assert not no and "does not compute packed sequences" in no.reason
    for shape, options, message in (((1, *q), {}, r"^q has 4 dimensions; allowed: 3 \(total, heads, headdim\)"),
                                    (q, {"packed": 3}, r"^packed is 3; allowed: None, or \(batch, max_seqlen_q, max_seqlen_k\)"),
                                    (q, {"packed": (3, 5)}, r"^packed is \(3, 5\); allowed"),
                                    (q, {"packed": (3, 5, 2**64)}, "^max_seqlen_k is 18446744073709551616, which does not fit"),
                                    (q, {"packed": (3, -1, 9)}, "^max_seqlen_q is -1"),
                                    (q, {"layout": "bhsd"}, "^layout is 'bhsd' and packed is")):
        with pytest.raises(ValueError, match=message):
            fattn.support(shape, k, v, **{"packed": (3, 5, 9)} | options)


def test_plan_and_warmup():
    forward, backward = fattn.warmup((2, 5, 4, 8), (2, 7, 2, 8), causal=True, num_threads=1)
    assert (forward.backend, forward.algorithm, forward.num_threads) == ("cpu", "v2", 1)
    assert forward.kernel and forward.why and forward.flops == 2 * 16 * 2 * 4 * (3 + 4 + 5 + 6 + 7) and backward.flops == 2.5 * forward.flops
    assert fattn.plan((2, 5, 4, 8), (2, 7, 2, 8), dtype="fp64").backend == "reference"
    assert len(fattn.warmup((2, 5, 4, 8), (2, 7, 2, 8), backward=False)) == 1
    with pytest.raises(NotImplementedError, match="cuda"):
        fattn.plan((2, 5, 4, 8), (2, 7, 2, 8), backend="cuda")
    with pytest.raises(ValueError, match="nheads is 4 and nheads_k is 3"):
        fattn.warmup((2, 5, 4, 8), (2, 7, 3, 8))


def test_command():
    program = pathlib.Path(sysconfig.get_path("scripts"), "fattn")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and fattn.__version__ in done.stdout
    assert subprocess.run([program, "no-such-command"], capture_output=True, timeout=60).returncode == 2


def test_command_and_package_agree():
    program = pathlib.Path(sysconfig.get_path("scripts"), "fattn")
    done = subprocess.run([program, "info", "--json", "-"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cpu"]["isa_default"] == fattn.info()["cpu"]["isa"]


STUB_NVRTC = ROOT / "build/tests/libfattn_stub_nvrtc.so"
PACK = "lib/fattn/kernels.pack"


def cache_command(package, folder, *arguments, nvrtc="/nonexistent/libnvrtc.so.13"):
    """`fattn cache` of a package folder, with a cache of its own and without NVRTC unless one is named."""
    environment = {**os.environ, "FATTN_NVRTC": str(nvrtc), "FATTN_CACHE_DIR": str(folder)}
    return subprocess.run([package / "bin/fattn", "cache", *arguments], env=environment, capture_output=True, text=True, timeout=300)


def assert_kernels_come_from_the_pack(package, folder):
    for arch in ("75", "80", "86", "89", "90", "100", "120"):
        done = cache_command(package, folder, "warm", "--arch", arch)
        assert done.returncode == 0, done.stderr
        kernels = done.stdout.splitlines()
        assert kernels and all(line.endswith(" pack") for line in kernels), kernels


@pytest.mark.skipif(not STUB_NVRTC.is_file(), reason="the tests of the library are not built in build/")
def test_pack_is_found_where_a_wheel_has_it(tmp_path):
    copy = tmp_path / "fattn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("kernels.pack", "__pycache__"))
    (copy / PACK).parent.mkdir(exist_ok=True)
    assert "no usable NVRTC" in cache_command(copy, tmp_path / "empty", "warm", "--arch", "90").stderr
    made = cache_command(copy, tmp_path / "compiled", "pack", "--output", copy / PACK, nvrtc=STUB_NVRTC)
    assert made.returncode == 0, made.stderr
    assert json.loads(cache_command(copy, tmp_path / "empty", "path", "--json", "-").stdout)["installed_pack"] == str(copy / PACK)
    assert_kernels_come_from_the_pack(copy, tmp_path / "empty")


@pytest.mark.skipif(not (PACKAGE / PACK).is_file(), reason="a wheel without a pack (tools/make_wheel.sh --pack)")
def test_pack_of_this_wheel(tmp_path):
    assert_kernels_come_from_the_pack(PACKAGE, tmp_path)


def test_import_takes_no_torch_and_no_time():
    """In time of the processor, so that other programs do not count, beside a part of Python's own library, so that a slow processor does not either."""
    def seconds(module: str) -> float:
        code = f"import sys, time; start = time.process_time(); import {module}; print(time.process_time() - start); assert 'torch' not in sys.modules"
        runs = [python(code) for _ in range(5)]
        assert all(run.returncode == 0 for run in runs), runs[0].stderr
        return min(float(run.stdout) for run in runs)

    assert seconds("fattn") < 1.5 * seconds("asyncio")


def test_without_torch():
    hide = "import sys; sys.modules['torch'] = None; import fattn, fattn.numpy, numpy as np; x = np.ones((1, 3, 1, 8), 'f'); "
    assert python(hide + "assert (fattn.numpy.forward(x, x, x) == x).all()").returncode == 0
    done = python(hide + "fattn.attention")
    assert "ImportError: fattn.attention needs PyTorch 2.10 or later, which is not installed" in done.stderr


def test_torch_that_is_too_old():
    done = python("import torch; torch.__version__ = '2.9.1+cu128'; import fattn; fattn.attention")
    assert done.stderr.splitlines()[-1] == "ImportError: torch is 2.9.1+cu128; fattn.attention needs 2.10 or later"


def test_set_check():
    for check in ("sync", "none"):
        fattn.set_check(check)
    with pytest.raises(ValueError, match="check is 'always'; allowed: 'none', 'sync'"):
        fattn.set_check("always")


def test_names():
    there = fattn.__all__ if importlib.util.find_spec("torch.nn") else set(fattn.__all__) - set(fattn._OF_TORCH)
    assert all(callable(getattr(fattn, name)) for name in there)
    with pytest.raises(AttributeError, match="module 'fattn' has no attribute 'atention'"):
        fattn.atention
    x = np.ones((1, 3, 1, 8), np.float32)
    assert fattn.numpy.forward(x, x, x).shape == x.shape
