"""fattn gpt2 info, init and export: files that safetensors and transformers read, and theirs that it reads; every way in which weights do not fit."""
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

SMALL = {"model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}


def write_config(folder: pathlib.Path, **changes) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return folder / "config.json"


@pytest.fixture(scope="module")
def model(fattn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    fattn("gpt2", "init", "--config", write_config(folder / "config"), "--seed", 5, folder / "model")
    return folder / "model"


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def copy_of(model: pathlib.Path, folder: pathlib.Path, change=lambda tensors: None, **config) -> pathlib.Path:
    """The model with changed tensors and keys of config.json."""
    tensors = tensors_of(model)
    change(tensors)
    write_config(folder, **config)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("preset, parameters", [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)])
def test_parameters(fattn, preset, parameters):
    record = fattn.json("gpt2", "info", preset, "--memory", "--dtype", "bf16")
    assert record["parameters"] == parameters == sum(int(np.prod(t["shape"])) for t in record["tensors"])
    assert record["memory"]["uses"][0]["bytes"] == 2 * parameters
    config = record["config"]
    assert record["memory"]["kv_bytes_per_token"] == 2 * 2 * config["n_layer"] * config["n_embd"]
    shown = fattn("gpt2", "info", preset).stdout
    assert f"{parameters:,} parameters" in " ".join(shown.split())


def test_random_weights_have_their_spread(fattn, tmp_path):
    fattn("gpt2", "init", "--config", write_config(tmp_path / "c", n_embd=96, n_layer=8, vocab_size=3000), "--seed", 1, tmp_path / "m")
    tensors = tensors_of(tmp_path / "m")
    for name, tensor in tensors.items():
        if "ln_" in name or name.endswith("bias"):
            assert (tensor == (1 if name.endswith("weight") else 0)).all(), name
        else:
            expected = 0.02 / (np.sqrt(2 * 8) if "c_proj" in name else 1)
            assert tensor.std() == pytest.approx(expected, rel=5 / np.sqrt(2 * tensor.size)), name
            assert abs(tensor.mean()) < 5 * expected / np.sqrt(tensor.size), name
    wte = np.sort(tensors["transformer.wte.weight"].ravel() / 0.02)
    normal = np.random.default_rng(0).standard_normal(wte.size)
    normal.sort()
    assert np.abs(wte - normal)[100:-100].max() < 0.15  # quantile by quantile
    assert len(np.unique(wte)) > 0.98 * wte.size


def test_seeds(fattn, model, tmp_path):
    config = model.parent / "config/config.json"
    for seed in (5, 6):
        fattn("gpt2", "init", "--config", config, "--seed", seed, tmp_path / str(seed))
    assert (tmp_path / "5/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert (tmp_path / "6/model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype, theirs", [("bf16", bfloat16), ("fp16", np.float16)])
def test_export_rounds_to_the_nearest(fattn, model, tmp_path, dtype, theirs):
    """All sorts of numbers: halfway cases, subnormal ones, the largest."""
    rng = np.random.default_rng(1)
    bits = np.concatenate([rng.integers(0, 0x47000000, 600), np.arange(0x33000000, 0x39000000, 0x20100), np.arange(0x3F800000, 0x3F800000 + 1200 * 0x800, 0x800)])
    values = bits.astype(np.uint32).view(np.float32)[: 24 * 72]
    values[::2] *= -1

    def put(tensors):
        tensors["transformer.h.0.attn.c_attn.weight"].ravel()[: values.size] = values

    source = copy_of(model, tmp_path / "in", put)
    fattn("gpt2", "export", source, tmp_path / "out", "--dtype", dtype)
    ours, expected = tensors_of(tmp_path / "out"), tensors_of(source)
    for name, tensor in expected.items():
        assert (ours[name].view(np.uint16) == tensor.astype(theirs).view(np.uint16)).all(), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    fattn("gpt2", "export", tmp_path / "out", tmp_path / "back", "--dtype", "fp32")
    for name, tensor in tensors_of(tmp_path / "back").items():
        assert (tensor == expected[name].astype(theirs).astype(np.float32)).all(), name


def test_shards_and_prefixes(fattn, model, tmp_path):
    """There and back: through files without a prefix, in several files, the bits stay."""
    fattn("gpt2", "init", "--config", write_config(tmp_path / "c", n_embd=96, vocab_size=2000), tmp_path / "one")
    fattn("gpt2", "export", tmp_path / "one", tmp_path / "shards", "--prefix", "no", "--shard", 1)
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * fattn.json("gpt2", "info", tmp_path / "shards")["parameters"]
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "shards" / file)
    fattn("gpt2", "export", tmp_path / "shards", tmp_path / "back", "--prefix", "yes")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    assert fattn.json("gpt2", "info", tmp_path / "shards")["prefix"] is False


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 1},
        {"position_embedding_type": "rotary"},
        {"is_causal": False, "n_inner": 40},
        {"tie_word_embeddings": False},
        {"activation_function": "gelu", "n_head": 1},
    ],
    ids=str,
)
def test_other_models(fattn, tmp_path, change):
    fattn("gpt2", "init", "--config", write_config(tmp_path / "c", **change), tmp_path / "m")
    record = fattn.json("gpt2", "info", tmp_path / "m")
    shapes = {t["name"]: t["shape"] for t in record["tensors"]}
    assert shapes["h.1.attn.c_attn.weight"] == [24, 24 + 2 * 8 * change.get("num_key_value_heads", change.get("n_head", 3)) * (3 if change.get("n_head") else 1)]
    assert ("wpe.weight" in shapes) == ("position_embedding_type" not in change)
    assert ("lm_head.weight" in shapes) == ("tie_word_embeddings" in change)
    assert shapes["h.0.mlp.c_fc.weight"] == [24, change.get("n_inner", 96)]
    for key, value in change.items():
        assert json.loads((tmp_path / "m/config.json").read_text())[key] == value


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def add(name, array):
    return lambda tensors: tensors.update({name: array})


T = "transformer."
WRONG = [
    (lambda t: t.pop(T + "h.1.mlp.c_fc.bias"), {}, "missing: 'transformer.h.1.mlp.c_fc.bias'"),
    (lambda t: rename(t, T + "ln_f.bias", "ln_f.bias"), {}, "missing: 'transformer.ln_f.bias'; not of this model: 'ln_f.bias'"),
    (add(T + "h.2.ln_1.weight", np.zeros(24, np.float32)), {}, "not of this model: 'transformer.h.2.ln_1.weight'"),
    (add(T + "h.0.attn.c_proj.weight", np.zeros((24, 23), np.float32)), {}, "'h.0.attn.c_proj.weight' is [24, 23], config.json says [24, 24]"),
    (lambda t: t.update({T + "h.0.mlp.c_fc.weight": t[T + "h.0.mlp.c_fc.weight"].T.copy()}), {}, "is [96, 24], config.json says [24, 96]"),
    (add(T + "wpe.weight", np.zeros((16, 24), np.float64)), {}, "'wpe.weight' is F64"),
    (add("lm_head.weight", np.zeros((50, 24), np.float32)), {}, "'lm_head.weight' is not 'wte.weight'"),
    (lambda t: None, {"tie_word_embeddings": False}, "missing: 'lm_head.weight'"),
    (lambda t: None, {"vocab_size": 51}, "config.json says [51, 24]"),
    (lambda t: None, {"n_layer": 40}, "and "),
]


@pytest.mark.parametrize("change, config, part", WRONG, ids=[part for _, _, part in WRONG])
def test_weights_that_do_not_fit(fattn, model, tmp_path, change, config, part):
    folder = copy_of(model, tmp_path / "m", change, **config)
    error = fattn.refuses("gpt2", "info", folder)
    assert part in error and "do not fit config.json" in error and len(error) < 1500
    assert part in fattn.refuses("gpt2", "export", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_older_files_hold_beside_the_weights(fattn, model, tmp_path):
    """Masks, and the tied head once more."""
    def put(tensors):
        tensors[T + "h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)
        tensors[T + "h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
        tensors["lm_head.weight"] = tensors[T + "wte.weight"]

    folder = copy_of(model, tmp_path / "m", put)
    fattn("gpt2", "export", folder, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


CONFIGS = [
    ({"model_type": "bert"}, "'model_type' is \"bert\""),
    ({"n_embd": 25}, "n_embd 25 is no multiple of n_head 3"),
    ({"n_head": 0}, "'n_head' is 0"),
    ({"n_layer": 1e9}, "'n_layer' is 1000000000.0"),
    ({"n_layer": 100_000}, "from 1 to 4096"),
    ({"vocab_size": -1}, "'vocab_size' is -1"),
    ({"vocab_size": "50"}, "'vocab_size' is \"50\""),
    ({"num_key_value_heads": 2}, "is no multiple of num_key_value_heads 2"),
    ({"n_head": 8, "position_embedding_type": "rotary"}, "it must be even"),
    ({"position_embedding_type": "alibi"}, "allowed: absolute, rotary"),
    ({"activation_function": "relu"}, "allowed: gelu_new"),
    ({"layer_norm_epsilon": 0}, "'layer_norm_epsilon' is 0"),
    ({"add_cross_attention": True}, "cross-attention"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"is_causal": 1}, "it must be true or false"),
]


@pytest.mark.parametrize("change, part", CONFIGS, ids=[part for _, part in CONFIGS])
def test_configurations_that_are_refused(fattn, tmp_path, change, part):
    assert part in fattn.refuses("gpt2", "init", "--config", write_config(tmp_path / "c", **change), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("text, part", [("", "malformed"), ("[]", "must be an object"), ('{"a":1,"a":2}', "twice"), ('{"a":' * 99, "nested deeper"), ('{"a":"\udcff"}', "malformed")])
def test_config_json_that_is_none(fattn, model, tmp_path, text, part):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    assert part in fattn.refuses("gpt2", "info", tmp_path)


def test_indexes_that_are_refused(fattn, model, tmp_path):
    fattn("gpt2", "export", model, tmp_path / "m")
    (tmp_path / "m/model.safetensors").rename(tmp_path / "m/a.safetensors")
    names = list(tensors_of(model))
    good = {name: "a.safetensors" for name in names}

    def error(index) -> str:
        (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
        return fattn.refuses("gpt2", "info", tmp_path / "m")

    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": good}))
    assert fattn.json("gpt2", "info", tmp_path / "m")["files"] == 1
    assert "no weight_map" in error({})
    assert "no weight_map" in error({"weight_map": {}})
    for file in ("../a.safetensors", "/etc/passwd", "", ".hidden"):
        assert "the name of a file in its folder" in error({"weight_map": {**good, names[0]: file}})
    assert "in a number" in error({"weight_map": {**good, names[0]: 1}})
    assert "cannot open" in error({"weight_map": {**good, names[0]: "b.safetensors"}})
    assert "(of the index)" in error({"weight_map": {**good, "more": "a.safetensors"}})
    del good[names[0]]
    assert "elsewhere or not at all" in error({"weight_map": good})


def test_nothing_is_overwritten_or_left_half_done(fattn, model, tmp_path):
    before = (model / "model.safetensors").read_bytes()
    assert "not empty" in fattn.refuses("gpt2", "export", model, model)
    assert "not empty" in fattn.refuses("gpt2", "init", model)
    assert (model / "model.safetensors").read_bytes() == before
    assert "cannot be made" in fattn.refuses("gpt2", "export", model, tmp_path / "no/where")
    (tmp_path / "file").write_text("x")
    assert "no folder" in fattn.refuses("gpt2", "export", model, tmp_path / "file")
    large = copy_of(model, tmp_path / "large", lambda t: t[T + "ln_f.bias"].fill(1e5))
    assert "'ln_f.bias' has numbers that are too large for float16" in fattn.refuses("gpt2", "export", large, tmp_path / "out", "--dtype", "fp16")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    fattn.refuses("gpt2", "export", large, tmp_path / "empty", "--dtype", "fp16")
    assert list((tmp_path / "empty").iterdir()) == []


def test_damaged_weights(fattn, model, tmp_path):
    content = (model / "model.safetensors").read_bytes()
    write_config(tmp_path / "m")
    for damaged in (content[:-1], content + b"x", content[:100], b"", b"\xff" * 100, content[:8] + b"[" + content[9:]):
        (tmp_path / "m/model.safetensors").write_bytes(damaged)
        assert "safetensors" in fattn.refuses("gpt2", "info", tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    assert "has no weights" in fattn.refuses("gpt2", "info", tmp_path / "m")


def test_too_much_memory_to_count(fattn):
    assert "2^31" in fattn.refuses("gpt2", "info", "gpt2", "--memory", "--batch", 2**48)
    assert "more than the model's 1024 positions" in fattn.refuses("gpt2", "info", "gpt2", "--memory", "--seqlen", 2000)


# transformers

TRANSFORMERS = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
folder = sys.argv[1]
if len(sys.argv) == 2:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder + "/head")
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder + "/bf16")
    GPT2LMHeadModel(config).half().save_pretrained(folder + "/shards", max_shard_size="20KB")
    GPT2Model(config).save_pretrained(folder + "/base")
for one, other in zip(sys.argv[2::2], sys.argv[3::2]):
    a, b = (GPT2LMHeadModel.from_pretrained(f, dtype="auto", output_loading_info=True) for f in (one, other))
    assert not any(list(info.get(key, ())) for _, info in (a, b) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (a[1], b[1])
    assert a[0].dtype == b[0].dtype
    left, right = a[0].state_dict(), b[0].state_dict()
    assert left.keys() == right.keys() and len(left) > 20
    for name in left:
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name
"""


def python_with_transformers():
    """FATTN_TORCH_PYTHON, or this Python if it has transformers."""
    for python in filter(None, [os.environ.get("FATTN_TORCH_PYTHON"), sys.executable]):
        if subprocess.run([python, "-c", "import importlib.util as i, sys; sys.exit(not (i.find_spec('torch.nn') and i.find_spec('transformers')))"], capture_output=True).returncode == 0:
            return python
    return None


PYTHON = python_with_transformers()


@pytest.mark.skipif(PYTHON is None, reason="no Python with transformers; name one in FATTN_TORCH_PYTHON")
def test_through_transformers_and_back(fattn, model, tmp_path):
    """Bit by bit: its files with and without a prefix, in one file or several, in three dtypes; and a model of ours."""
    def run(*arguments):
        done = subprocess.run([PYTHON, "-c", TRANSFORMERS, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr

    run(tmp_path)
    for name, flags in {"head": [], "bf16": [], "shards": [], "base": ["--prefix", "yes"]}.items():
        fattn("gpt2", "export", tmp_path / name, tmp_path / f"{name}-ours", *flags)
        theirs, ours = tensors_of(tmp_path / name), tensors_of(tmp_path / f"{name}-ours")
        theirs = {("transformer." if flags else "") + key: value for key, value in theirs.items()}
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert value.dtype == ours[key].dtype and value.tobytes() == ours[key].tobytes(), key
    fattn("gpt2", "export", model, tmp_path / "model-shards", "--prefix", "no", "--shard", 1)
    pairs = [("head", "head-ours"), ("shards", "shards-ours"), ("bf16", "bf16-ours")]
    run("-", *(tmp_path / name for pair in pairs for name in pair), model, tmp_path / "model-shards")
