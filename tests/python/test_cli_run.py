"""`fattn run`: files in, files out, in both directions with Python's safetensors; everything that a bad file can be."""
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import time

import numpy as np
import pytest
import safetensors
import safetensors.numpy


def inputs(rng, dtype=np.float32, batch=2, seqlen_q=9, seqlen_k=13, nheads=4, nheads_k=2, headdim=8, headdim_v=8, gradient=True):
    tensors = {
        "q": rng.standard_normal((batch, seqlen_q, nheads, headdim)).astype(dtype),
        "k": rng.standard_normal((batch, seqlen_k, nheads_k, headdim)).astype(dtype),
        "v": rng.standard_normal((batch, seqlen_k, nheads_k, headdim_v)).astype(dtype),
    }
    if gradient:
        tensors["do"] = rng.standard_normal((batch, seqlen_q, nheads, headdim_v)).astype(dtype)
    return tensors


def attention(q, k, v, causal, scale=None, dout=None, window=(-1, -1), softcap=0, added=0, *, dtype):
    """Textbook attention, as the formulas are written, in this dtype: o, lse, dq, dk, dv and the gradient of what is added to scores."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale, softcap, added = dtype(1 / np.sqrt(q.shape[3]) if scale is None else scale), dtype(softcap), np.asarray(added, dtype)
    q, keys, values = q.transpose(0, 2, 1, 3), np.repeat(k, group, 2).transpose(0, 2, 1, 3), np.repeat(v, group, 2).transpose(0, 2, 1, 3)
    s = scale * q @ keys.swapaxes(-1, -2)
    t = np.tanh(s / softcap) if softcap else np.zeros_like(s)
    s = (softcap * t if softcap else s) + added
    away = np.arange(s.shape[3])[None, :] - (np.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2])
    left, right = window[0], 0 if causal else window[1]
    s = np.where((away >= -left) | (left < 0), s, -np.inf)
    s = np.where((away <= right) | (right < 0), s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    p = e / e.sum(-1, keepdims=True)
    result = {"o": (p @ values).transpose(0, 2, 1, 3), "lse": (m + np.log(e.sum(-1, keepdims=True)))[..., 0]}
    if dout is not None:
        do = dout.astype(dtype).transpose(0, 2, 1, 3)
        dp = do @ values.swapaxes(-1, -2)
        dadded = p * (dp - (do * (p @ values)).sum(-1, keepdims=True))
        ds = dadded * (1 - t * t) * scale
        fold = lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1, group, x.shape[3]).sum(3)
        result |= {"dq": (ds @ keys).transpose(0, 2, 1, 3), "dk": fold(ds.swapaxes(-1, -2) @ q), "dv": fold(p.swapaxes(-1, -2) @ do)}
        if np.ndim(added):
            result["dadded"] = dadded
    return result


def assert_close(got: dict, expected: dict, usual: dict):
    """At most twice as far as the textbook (`usual`), three times for gradients, and one last place of the largest as it is stored (testing/check.h)."""
    assert got.keys() == expected.keys() == usual.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        unit = np.finfo(got[name].dtype).eps * np.abs(value).max()
        allowed = (2 if name in ("o", "lse") else 3) * np.abs(usual[name] - value).max() + unit
        assert np.abs(got[name] - value).max() <= allowed, name


def exact_and_usual(q, k, v, causal, **options):
    """In a dtype wider than any given, and in that of q, or fp32, which kernels widen numbers of 16 bits to."""
    return [attention(q, k, v, causal, dtype=dtype, **options) for dtype in (np.longdouble, np.promote_types(q.dtype, np.float32).type)]


def run(fattn, tmp_path, tensors, *flags, **options):
    safetensors.numpy.save_file(tensors, tmp_path / "in.safetensors")
    fattn("run", "--input", tmp_path / "in.safetensors", "--output", tmp_path / "out.safetensors", *flags, **options)
    return safetensors.numpy.load_file(tmp_path / "out.safetensors")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_numpy_files_both_ways(fattn, tmp_path, dtype, causal):
    tensors = inputs(np.random.default_rng(1), dtype)
    got = run(fattn, tmp_path, tensors, *(["--causal"] if causal else []), "--verify")
    assert {name: str(x.dtype) for name, x in got.items()} == {
        name: "float32" if name == "lse" and dtype == np.float16 else np.dtype(dtype).name for name in ("o", "lse", "dq", "dk", "dv")
    }
    assert_close(got, *exact_and_usual(tensors["q"], tensors["k"], tensors["v"], causal, dout=tensors["do"]))


def test_forward_only_and_own_headdim_of_v(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(2), headdim_v=5, gradient=False)
    got = run(fattn, tmp_path, tensors, "--softmax-scale", "0.3")
    assert_close(got, *exact_and_usual(tensors["q"], tensors["k"], tensors["v"], False, scale=0.3))


@pytest.mark.parametrize("window, softcap", [((4, 1), 0), ((3, -1), 0), ((-1, 2), 0), ((-1, -1), 0.8), ((5, 2), 2)])
def test_windows_and_softcap(fattn, tmp_path, window, softcap):
    tensors = inputs(np.random.default_rng(6))
    flags = ["--window-left", str(window[0]), "--window-right", str(window[1]), "--softcap", str(softcap)]
    got = run(fattn, tmp_path, tensors, *flags, "--verify")
    assert_close(got, *exact_and_usual(tensors["q"], tensors["k"], tensors["v"], False, dout=tensors["do"], window=window, softcap=softcap))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_scores_depend_on(fattn, tmp_path, layout):
    rng = np.random.default_rng(11)
    tensors = inputs(rng)
    (batch, seqlen_q, heads, _), seqlen_k = tensors["q"].shape, tensors["k"].shape[1]
    more = {
        "seqused_k": np.array([seqlen_k, 5], np.int32),
        "alibi_slopes": rng.random((batch, heads)).astype(np.float32),
        "bias": rng.standard_normal((1, heads, seqlen_q, seqlen_k)).astype(np.float32),
        "mask": rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.7,
    }
    more["mask"][..., 0] = True
    more["bias"][..., 1] = -np.inf
    keys, used = np.arange(seqlen_k), more["seqused_k"][:, None, None, None]
    away = np.abs(np.arange(seqlen_q)[:, None] + used - seqlen_q - keys)
    added = -more["alibi_slopes"][:, :, None, None] * away + more["bias"]
    added = np.where((keys < used) & more["mask"], added, -np.inf)
    wanted = exact_and_usual(tensors["q"], tensors["k"], tensors["v"], False, dout=tensors["do"], added=added)
    for x in wanted:
        x["dbias"] = x.pop("dadded").sum(0, keepdims=True)
    swapped = {name: x if layout == "bshd" else np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items()}
    got = run(fattn, tmp_path, swapped | more, "--layout", layout, "--verify")
    for name in ("o", "dq", "dk", "dv") if layout == "bhsd" else ():
        got[name] = got[name].swapaxes(1, 2)
    assert_close(got, *wanted)


def test_gradient_of_lse(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(13))
    batch, seqlen_q, heads, headdim = tensors["q"].shape
    dlse = np.random.default_rng(14).standard_normal((batch, heads, seqlen_q)).astype(np.float32)
    # d lse_i / d s_ij = p_ij, so that dq_i = scale dlse_i sum_j p_ij k_j: attention whose values are its keys.
    got = run(fattn, tmp_path, tensors | {"do": np.zeros_like(tensors["do"]), "dlse": dlse}, "--verify")
    means = [x["o"] for x in exact_and_usual(tensors["q"], tensors["k"], tensors["k"], False)]
    assert_close({"dq": got["dq"]}, *({"dq": dlse.swapaxes(1, 2)[..., None] * x / np.sqrt(headdim).astype(x.dtype)} for x in means))
    assert not got["dv"].any()


def test_sinks(fattn, tmp_path):
    """A sink is a key of that score whose value is 0: lse counts it, and its gradient is that of what is added to its scores."""
    rng = np.random.default_rng(21)
    tensors = inputs(rng)
    (batch, seqlen_q, heads, _), seqlen_k = tensors["q"].shape, tensors["k"].shape[1]
    sinks = rng.standard_normal(heads).astype(np.float32)
    got = run(fattn, tmp_path, tensors | {"sinks": sinks}, "--verify")
    added = np.zeros((batch, heads, seqlen_q, seqlen_k + 1), np.float32)
    added[..., -1] = sinks[:, None]
    longer = {name: np.concatenate([tensors[name], np.zeros_like(tensors[name][:, :1])], 1) for name in ("k", "v")}
    wanted = exact_and_usual(tensors["q"], longer["k"], longer["v"], False, dout=tensors["do"], added=added)
    for x in wanted:
        x["dsinks"] = x.pop("dadded")[..., -1].sum((0, 2))
        x["dk"], x["dv"] = x["dk"][:, :-1], x["dv"][:, :-1]
    assert_close(got, *wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(fattn, tmp_path, causal):
    rng = np.random.default_rng(15)
    lengths = [(4, 9), (0, 3), (7, 7), (2, 5)]
    alone = [inputs(rng, batch=1, seqlen_q=q, seqlen_k=k) for q, k in lengths]
    tensors = {name: np.concatenate([one[name][0] for one in alone]) for name in alone[0]}
    for name, of in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
        tensors[name] = np.cumsum([0] + [one[of] for one in lengths], dtype=np.int32)
    got = run(fattn, tmp_path, tensors, *(["--causal"] if causal else []), "--verify")
    some = [one for one in alone if one["q"].size]  # a sequence without queries has no gradients
    results = [exact_and_usual(one["q"], one["k"], one["v"], causal, dout=one["do"]) for one in some]
    wanted = []
    for several in zip(*results):
        whole = {name: [one[name][0] for one in several] for name in ("o", "dq", "dk", "dv", "lse")}
        for name in ("dk", "dv"):
            whole[name].insert(1, np.zeros_like(alone[1]["k"][0], whole[name][0].dtype))
        wanted.append({name: np.concatenate(x, 1 if name == "lse" else 0) for name, x in whole.items()})
    assert_close(got, *wanted)
    fattn("run", "--input", tmp_path / "in.safetensors", "--output", tmp_path / "out.safetensors", "--layout", "bhsd", status=2)


def test_documents(fattn, tmp_path):
    rng = np.random.default_rng(16)
    tensors = inputs(rng, seqlen_q=40, seqlen_k=60)
    ids = {"document_q": rng.integers(-1, 2, (2, 40)).astype(np.int32), "document_k": np.sort(rng.integers(-1, 2, (2, 60)).astype(np.int32))}
    got = run(fattn, tmp_path, tensors | ids, "--verify")
    hidden = ids["document_q"][:, None, :, None] != ids["document_k"][:, None, None, :]
    wanted = exact_and_usual(tensors["q"], tensors["k"], tensors["v"], False, dout=tensors["do"], added=np.where(hidden, -np.inf, 0.0))
    for x in wanted:
        del x["dadded"]
    assert_close(got, *wanted)


def test_dropout_is_its_seed(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(12))
    o = [run(fattn, tmp_path, tensors, "--dropout", "0.4", "--dropout-seed", seed, "--verify")["o"] for seed in ("7", "7", "8")]
    assert (o[0] == o[1]).all() and (o[0] != o[2]).any()
    assert (o[0] != run(fattn, tmp_path, tensors)["o"]).any()


def test_bhsd_layout_is_the_same_attention(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(3))
    expected = run(fattn, tmp_path, tensors, "--causal")
    swapped = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items()}
    got = run(fattn, tmp_path, swapped, "--causal", "--layout", "bhsd", "--verify")
    for name in expected:
        assert np.array_equal(got[name] if name == "lse" else got[name].swapaxes(1, 2), expected[name]), name


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (np.frombuffer(x, np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_bf16(fattn, tmp_path):
    tensors = {name: to_bf16(x) for name, x in inputs(np.random.default_rng(4), gradient=False).items()}
    # numpy has no bfloat16, and what `safetensors.serialize` takes differs between versions: the file is put together here and read back.
    header, data = {}, b""
    for name, x in tensors.items():
        header[name] = {"dtype": "BF16", "shape": x.shape, "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + data
    assert {name for name, _ in safetensors.deserialize(content)} == set(tensors)
    (tmp_path / "in").write_bytes(content)
    fattn("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--verify")
    got = dict(safetensors.deserialize((tmp_path / "out").read_bytes()))
    assert got["o"]["dtype"] == "BF16" and got["lse"]["dtype"] == "F32"
    wide = {name: from_bf16(x.tobytes()).reshape(x.shape) for name, x in tensors.items()}
    expected = attention(wide["q"], wide["k"], wide["v"], False, dtype=np.float64)["o"]
    # Half an epsilon of o itself, and of weights that sum to 1, times the largest v.
    assert (np.abs(from_bf16(got["o"]["data"]).reshape(expected.shape) - expected) <= 2**-8 * (np.abs(expected) + np.abs(wide["v"]).max())).all()


def test_empty_rows_and_nan(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(5), seqlen_q=5, seqlen_k=3, gradient=False)
    tensors["q"][0, 4, 0, 0] = np.nan
    got = run(fattn, tmp_path, tensors, "--causal")
    assert (got["o"][:, :2] == 0).all() and (got["lse"][:, :, :2] == -np.inf).all()  # rows 0 and 1 see no key
    assert np.isnan(got["o"][0, 4, 0]).all() and np.isnan(got["o"]).sum() == got["o"].shape[3]
    nothing = run(fattn, tmp_path, inputs(np.random.default_rng(5), batch=0))
    assert nothing["o"].size == 0 and nothing["dk"].size == 0


@pytest.mark.parametrize("name", ["small.safetensors", "small_bf16.safetensors"])
def test_example_files(fattn, root, tmp_path, name):
    done = fattn("run", "--input", root / "examples" / "data" / name, "--output", tmp_path / "out", "--causal", "--verify")
    assert "FAILED" not in done.stdout and len(re.findall(r"^(?:o|lse|dq|dk|dv) .* ok$", done.stdout, re.M)) == (2 if "bf16" in name else 5)
    assert re.search(r"^o +B?F\w+ +\(1, 12, 4, 8\)$", done.stdout.partition("Wrote")[2], re.M)
    assert safetensors.safe_open(tmp_path / "out", "numpy").metadata()["causal"] == "true"


def test_files_as_arguments(fattn, root, tmp_path):
    example = root / "examples" / "data" / "small.safetensors"
    fattn("run", "--input", example, "--output", tmp_path / "flags", "--causal")
    for arguments in ([example, tmp_path / "one", "--causal"], ["--causal", example, "--output", tmp_path / "two"], ["--input", example, "--causal", tmp_path / "three"]):
        fattn("run", *arguments)
    for name in ("one", "two", "three"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "flags").read_bytes()
    assert "--output is required" in fattn.refuses("run", example)
    assert "has no argument 'surplus'" in fattn.refuses("run", example, tmp_path / "four", "surplus")


def test_example_files_are_what_their_script_makes(root):
    subprocess.run(["python3", root / "tools" / "make_example_data.py", "--check"], check=True)


def test_record(fattn, root, tmp_path):
    record = fattn.json("run", "--input", root / "examples/data/small.safetensors", "--output", tmp_path / "out", "--causal", "--verify")
    assert record["status"] == "ok" and record["causal"] is True
    assert {v["tensor"] for v in record["verdicts"]} == {"o", "lse", "dq", "dk", "dv"}
    assert all(v["pass"] and v["error"] <= v["allowed"] for v in record["verdicts"])
    assert record["tensors"]["o"] == {"dtype": "F32", "shape": [1, 12, 4, 8]}
    assert record["environment"]["cpu"]["model"] is not None


def test_other_tensors_are_ignored_and_named_harmlessly(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(6), gradient=False) | {"a\x1b[31m": np.zeros(3, np.int8)}
    safetensors.numpy.save_file(tensors, tmp_path / "in")
    done = fattn("run", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert "ignored  a\\x1b[31m" in done.stdout


# What a person gets wrong.


def refused(fattn, tmp_path, tensors, *flags):
    safetensors.numpy.save_file(tensors, tmp_path / "in")
    error = fattn.refuses("run", "--input", tmp_path / "in", "--output", tmp_path / "out", *flags)
    assert sorted(os.listdir(tmp_path)) == ["in"]  # neither an output nor a temporary file
    return error


def test_tensors_that_are_no_attention(fattn, tmp_path):
    good = inputs(np.random.default_rng(7), gradient=False)
    assert "has no tensor 'v'" in refused(fattn, tmp_path, {"q": good["q"], "k": good["k"]})
    assert "It holds: x" in refused(fattn, tmp_path, {"x": good["q"]})
    assert "'q' has the shape (4)" in refused(fattn, tmp_path, good | {"q": np.zeros(4, np.float32)})
    assert "'k' has dtype I32" in refused(fattn, tmp_path, good | {"k": good["k"].astype(np.int32)})
    assert "dtype" in refused(fattn, tmp_path, good | {"k": good["k"].astype(np.float16)})
    assert "headdim" in refused(fattn, tmp_path, good | {"k": np.zeros((2, 13, 2, 9), np.float32)})
    assert "nheads" in refused(fattn, tmp_path, good | {"k": np.zeros((2, 13, 3, 8), np.float32), "v": np.zeros((2, 13, 3, 8), np.float32)})
    assert "seqlen" in refused(fattn, tmp_path, good | {"v": np.zeros((2, 12, 2, 8), np.float32)})
    assert "batch" in refused(fattn, tmp_path, good | {"v": np.zeros((1, 13, 2, 8), np.float32)})
    assert refused(fattn, tmp_path, good | {"do": np.zeros((2, 9, 4, 7), np.float32)})
    assert "softmax_scale" in refused(fattn, tmp_path, good, "--softmax-scale", "nan")
    assert "softmax_scale" in refused(fattn, tmp_path, good, "--softmax-scale", "inf")
    assert "--softmax-scale" in refused(fattn, tmp_path, good, "--softmax-scale", "big")
    assert "window_left is -2" in refused(fattn, tmp_path, good, "--window-left", "-2")
    assert "softcap is -1" in refused(fattn, tmp_path, good, "--softcap", "-1")
    assert "p_dropout is 1" in refused(fattn, tmp_path, good, "--dropout", "1")
    assert "seqused_k[1] is 14" in refused(fattn, tmp_path, good | {"seqused_k": np.array([3, 14], np.int32)})
    assert "bias has the shape (2, 4, 9, 12)" in refused(fattn, tmp_path, good | {"bias": np.zeros((2, 4, 9, 12), np.float32)})
    assert "mask has the dtype fp32 (1)" in refused(fattn, tmp_path, good | {"mask": np.zeros((2, 4, 9, 13), np.float32)})
    assert "'mask' has dtype I16" in refused(fattn, tmp_path, good | {"mask": np.zeros((2, 4, 9, 13), np.int16)})


def test_an_isa_that_is_not_here(fattn, tmp_path):
    available = fattn.json("info")["cpu"]["isas_available"]
    absent = next(isa for isa in ("neon", "amx", "avx512", "avx2") if isa not in available)
    good = inputs(np.random.default_rng(8), gradient=False)
    assert absent in refused(fattn, tmp_path, good, "--backend", "cpu", "--isa", absent)


def test_impossible_memory(fattn, tmp_path):
    """Standard attention on 2^22 queries and keys needs 64 TiB for its weights: refused by size, at once, nothing allocated."""
    n = 1 << 22
    start = time.monotonic()
    safetensors.numpy.save_file({name: np.zeros((1, n, 1, 1), np.float32) for name in "qkv"}, tmp_path / "in")
    done = fattn("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--backend", "cpu", "--algorithm", "standard", "--json", tmp_path / "json", status=2)
    record = json.loads((tmp_path / "json").read_text())
    if record["status"] == "unsupported":
        pytest.skip(record["reason"])  # no OpenBLAS here
    assert record["status"] == "out_of_memory" and "MiB" in done.stderr
    assert not (tmp_path / "out").exists() and time.monotonic() - start < 60


def test_outputs_that_would_destroy(fattn, root, tmp_path):
    source = tmp_path / "in"
    source.write_bytes((root / "examples/data/small.safetensors").read_bytes())
    before = source.read_bytes()
    (tmp_path / "link").symlink_to("in")
    os.link(source, tmp_path / "hard")
    for output in ("in", "link", "hard", "../" + tmp_path.name + "/in"):
        assert "the same file" in fattn.refuses("run", "--input", source, "--output", tmp_path / output)
    assert "the same file" in fattn.refuses("run", "--input", source, "--output", tmp_path / "out", "--json", source)
    assert "the same file" in fattn.refuses("run", "--input", source, "--output", tmp_path / "out", "--json", tmp_path / "out")
    assert "no regular file" in fattn.refuses("run", "--input", source, "--output", "/dev/null")
    assert "folder" in fattn.refuses("run", "--input", source, "--output", tmp_path / "nowhere" / "out")
    assert source.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["hard", "in", "link"]


# What a hostile file contains. tests/test_safetensors.cpp has them all; here, that each ends with 2 and a clear line.


def header(text: bytes | str, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


F32 = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "claim a header"),
    "text": (b"not a tensor file at all\n", "claim a header"),
    "huge header": (struct.pack("<Q", 1 << 63) + b"{}", "claim a header"),
    "truncated header": (header('{"q":' + F32 + "}")[:20], "claim a header"),
    "truncated data": (header('{"q":' + F32 + "}", b"123"), "reach beyond the file"),
    "nested": (header('{"q":' + "[" * 1_000_000), "an array"),
    "duplicate": (header('{"q":' + F32 + ',"q":' + F32 + "}", b"1234"), "twice"),
    "overlap": (header('{"q":' + F32 + ',"k":' + F32 + "}", b"1234"), "overlap"),
    "hole": (header('{"q":' + F32.replace("[0,4]", "[4,8]") + "}", b"12345678"), "hole"),
    "dtype": (header('{"q":' + F32.replace("F32", "F\\u001b[2J") + "}", b"1234"), "F\\x1b[2J"),
    "huge shape": (header('{"q":' + F32.replace("[1]", "[4294967296,4294967296]") + "}", b"1234"), "more bits"),
    "huge claim": (header('{"q":{"dtype":"U8","shape":[1125899906842624],"data_offsets":[0,1125899906842624]}}'), "reach beyond"),
    "array": (header("[]"), "begin with '{'"),
    "not utf-8": (header(b'{"\xff":1}'), "no valid JSON"),
    "metadata": (header('{"__metadata__":{"a":1}}'), "must be text"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file(fattn, tmp_path, kind):
    content, expected = HOSTILE[kind]
    (tmp_path / "in").write_bytes(content)
    error = fattn.refuses("run", "--input", tmp_path / "in", "--output", tmp_path / "out", timeout=20)
    assert expected in error and len(error) < 3000
    assert os.listdir(tmp_path) == ["in"]


def test_inputs_that_are_no_files(fattn, tmp_path):
    out = tmp_path / "out"
    assert "No such file" in fattn.refuses("run", "--input", tmp_path / "missing", "--output", out)
    assert "folder" in fattn.refuses("run", "--input", tmp_path, "--output", out)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in fattn.refuses("run", "--input", tmp_path / "pipe", "--output", out, timeout=20)
    assert "\\x1b[2J" in fattn.refuses("run", "--input", tmp_path / "\x1b[2J", "--output", out)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(fattn, tmp_path, number, status):
    """While the oracle works for minutes the temporary output is there; the signal removes it and the old output stays."""
    n = 6000
    safetensors.numpy.save_file({name: np.zeros((1, n, 4, 64), np.float32) for name in "qkv"}, tmp_path / "in")
    (tmp_path / "out").write_text("old")
    # A shell's background jobs ignore SIGINT; this test's child must not inherit that.
    process = subprocess.Popen(
        [fattn.path, "run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--backend", "reference"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=20) == status
    process.communicate()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert pathlib.Path(tmp_path / "out").read_text() == "old"


def test_a_paged_cache(fattn, tmp_path):
    """The same bits as from keys side by side, in both layouts; what does not fit is refused."""
    rng = np.random.default_rng(5)
    plain = inputs(rng, seqlen_k=12, gradient=False) | {"seqused_k": np.array([11, 4], np.int32)}
    table = np.array([[3, 0, 5], [1, -1, -1]], np.int32)
    paged = plain | {"block_table": table}
    for name in ("k", "v"):
        pages = np.full((6, 4, *plain[name].shape[2:]), np.nan, np.float32)
        for b, n in enumerate(plain["seqused_k"]):
            for j in range(n):
                pages[table[b, j // 4], j % 4] = plain[name][b, j]
        paged[name] = pages
    results = []
    for tensors, *flags in ((plain,), (paged,), ({name: np.ascontiguousarray(x.swapaxes(1, 2)) if name in "qkv" else x for name, x in paged.items()}, "--layout", "bhsd")):
        safetensors.numpy.save_file(tensors, tmp_path / "in.safetensors")
        fattn("run", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--causal", "--verify", *flags)
        o = safetensors.numpy.load_file(tmp_path / "out.safetensors")["o"]
        results.append(o.swapaxes(1, 2) if flags else o)
    assert all(np.array_equal(o, results[0]) for o in results[1:])
    for spoilt, words in (
        ({"block_table": table - 1}, "block_table[0, 1] is -1, of 11 keys; allowed: 0 to 5, the last page of k"),
        ({"block_table": table[:, :1]}, "seqused_k[0] is 11; allowed: 0 to 4, the keys of 1 pages of 4"),
        ({"do": plain["q"]}, "the backward pass does not compute a paged cache"),
    ):
        safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in (paged | spoilt).items()}, tmp_path / "in.safetensors")
        refused = fattn("run", tmp_path / "in.safetensors", tmp_path / "bad.safetensors", status=2)
        assert words in " ".join(refused.stderr.split()), refused.stderr


def test_outputs_in_fp32(fattn, tmp_path):
    """Of 16 bits: o, or with do the gradients, not rounded once more."""
    tensors = inputs(np.random.default_rng(6), np.float16)
    exact = attention(*(tensors[name] for name in "qkv"), False, dout=tensors["do"], dtype=np.float64)
    forward = {name: x for name, x in tensors.items() if name != "do"}
    for given, names in ((forward, ("o",)), (tensors, ("dq", "dk", "dv"))):
        usual = run(fattn, tmp_path, given, "--verify")
        wide = run(fattn, tmp_path, given, "--fp32-outputs", "--verify")
        assert wide.keys() == usual.keys()
        for name, x in wide.items():
            assert x.dtype == (np.float32 if name in (*names, "lse") else np.float16)
        for name in names:
            assert np.square(wide[name] - exact[name]).mean() < np.square(usual[name] - exact[name]).mean()


def test_outputs_in_fp32_beside_fp32(fattn, tmp_path):
    wide = inputs(np.random.default_rng(6))
    assert "--fp32-outputs: q is F32; outputs are wider than inputs of F16 and BF16. Leave it out" in refused(fattn, tmp_path, wide, "--fp32-outputs")


def test_batch_invariant(fattn, tmp_path):
    """The last query alone has the bits that it has among the others."""
    tensors = inputs(np.random.default_rng(7), gradient=False, seqlen_q=13)
    whole = run(fattn, tmp_path, tensors, "--causal", "--batch-invariant", "--verify")
    last = run(fattn, tmp_path, tensors | {"q": np.ascontiguousarray(tensors["q"][:, -1:])}, "--causal", "--batch-invariant", "--verify")
    assert np.array_equal(last["o"][:, 0], whole["o"][:, -1]) and np.array_equal(last["lse"][..., 0], whole["lse"][..., -1])


def test_batch_invariant_of_an_algorithm_that_lacks_it(fattn, tmp_path):
    tensors = inputs(np.random.default_rng(7), gradient=False)
    assert "bits of a row that are its own (batch_invariant)" in refused(fattn, tmp_path, tensors, "--batch-invariant", "--algorithm", "v1")
