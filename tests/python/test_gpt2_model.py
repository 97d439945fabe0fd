"""fattn gpt2 generate and eval: logits, losses and text beside transformers', the same text on every run, what is refused."""
import json
import os
import pathlib
import random
import signal
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_gpt2_weights import PYTHON

CONFIGS = {
    "plain": {},
    "wide": {"vocab_size": 517, "n_embd": 128, "n_head": 2, "n_layer": 2},
    "deep": {"n_embd": 32, "n_layer": 8},
    "inner": {"n_inner": 77, "activation_function": "gelu"},
    "scales": {"scale_attn_by_inverse_layer_idx": True, "n_head": 6, "n_embd": 48, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
}
DTYPES = ("float32", "bfloat16", "float16")

# Models, their logits of some tokens in float64, the errors of their own logits in each dtype, what they generate.
THEIRS = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel
folder, configs, ids = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
found = {}
for name, changes in configs.items():
    torch.manual_seed(1)
    config = GPT2Config(**{"vocab_size": 300, "n_positions": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1, **changes})
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(f"{folder}/{name}")
    tokens = torch.tensor([ids])
    with torch.no_grad():
        exact = model.double()(tokens).logits[0]
        loss = torch.nn.functional.cross_entropy(exact[:-1], tokens[0, 1:]).item()
        errors, logits = {}, {"float64": exact.contiguous()}
        for dtype in ("float32", "bfloat16", "float16"):
            # The weights as they are in this dtype, exactly computed with, and by transformers.
            copy = GPT2LMHeadModel.from_pretrained(f"{folder}/{name}", dtype=getattr(torch, dtype)).eval()
            got = copy(tokens).logits[0].double()
            logits[dtype] = copy.double()(tokens).logits[0].contiguous()
            errors[dtype] = (got - logits[dtype]).abs().max().item()
        greedy = model.float().generate(tokens[:, :20], max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 20:].tolist()
        penalty = model.generate(tokens[:, :20], max_new_tokens=30, do_sample=False, pad_token_id=0, repetition_penalty=1.3)[0, 20:].tolist()
    save_file(logits, f"{folder}/{name}.safetensors")
    found[name] = {"errors": errors, "loss": loss, "greedy": greedy, "penalty": penalty}
print(json.dumps(found))
"""

IDS = [random.Random(5).randrange(1, 300) for _ in range(90)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    if PYTHON is None:
        pytest.skip("no Python with transformers; name one in FATTN_TORCH_PYTHON")
    folder = tmp_path_factory.mktemp("theirs")
    done = subprocess.run([PYTHON, "-c", THEIRS, folder, json.dumps(CONFIGS), json.dumps(IDS)], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(fattn, theirs, tmp_path, name):
    """In fp32 within 1e-4 of the logits' scale; in 16 bits at most twice as far from float64 as transformers."""
    folder, found = theirs
    exact = load_file(folder / f"{name}.safetensors")
    (tmp_path / "ids").write_text(" ".join(map(str, IDS)))
    for dtype in DTYPES:
        fattn("gpt2", "eval", folder / name, tmp_path / "ids", "--ids", "--dtype", dtype, "--logits", tmp_path / "logits")
        ours = load_file(tmp_path / "logits")["logits"].astype(np.float64)
        error, scale = np.abs(ours - exact[dtype]).max(), np.abs(exact[dtype]).max()
        assert error <= 1e-4 * scale if dtype == "float32" else error <= 2 * found[name]["errors"][dtype], (dtype, error, scale, found[name]["errors"])


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_text(fattn, theirs, tmp_path, name):
    folder, found = theirs
    (tmp_path / "ids").write_text("\n".join(map(str, IDS)))
    record = fattn.json("gpt2", "eval", folder / name, tmp_path / "ids", "--ids")
    assert abs(record["loss"] - found[name]["loss"]) <= 1e-5 * found[name]["loss"]
    assert record["tokens"] == 89 and record["windows"] == 1
    prompt = " ".join(map(str, IDS[:20]))
    for flags, key in [([], "greedy"), (["--repetition-penalty", 1.3], "penalty")]:
        texts = fattn.json("gpt2", "generate", folder / name, "--ids", prompt, "-n", 30, *flags)["texts"]
        # transformers gives the end-of-text token too.
        expected = found[name][key]
        assert texts[0]["ids"] == (expected[:-1] if expected[-1] == 0 else expected)


@pytest.fixture(scope="module")
def model(fattn, tmp_path_factory):
    """A model with a tokenizer of bytes and a few pairs."""
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 258, "n_positions": 64, "eos_token_id": 257, "initializer_range": 0.3}
    (folder / "config.json").write_text(json.dumps(config))
    fattn("gpt2", "init", "--config", folder / "config.json", "--seed", 3, folder / "model")
    import base64
    ranks = [bytes([i]) for i in range(256)] + [b"ab"]
    (folder / "model" / "bytes.tiktoken").write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks)))
    return folder / "model"


DRAWN = ["-n", 12, "--temperature", 1, "--top-k", 50, "--top-p", 0.95, "--seed", 4, "--ignore-end"]


def test_the_same_on_every_run(fattn, model):
    """Also on other threads, in chunks, and with other texts beside it if batch-invariant."""
    prompts = ["Hello world", "x", "a longer text than the others, by far"]
    first = fattn.json("gpt2", "generate", model, *prompts, *DRAWN, "--batch-invariant")
    assert first["batch_invariant_price"] > 0
    ids = [text["ids"] for text in first["texts"]]
    assert len({tuple(i) for i in ids}) == 3 and all(len(i) == 12 for i in ids)
    for flags in (["--threads", 1], ["--batch", 1], ["--batch", 2]):
        again = fattn.json("gpt2", "generate", model, *prompts, *DRAWN, "--batch-invariant", *flags)["texts"]
        assert [t["ids"] for t in sorted(again, key=lambda t: t["request"])] == ids
    assert [t["ids"] for t in fattn.json("gpt2", "generate", model, *prompts, *DRAWN[:-2], 5, "--ignore-end", "--batch-invariant")["texts"]] != ids


def test_texts_share_a_cache(fattn, model):
    """In pages, one text after the other where there is room for one alone."""
    prompts = ["Hello world", "x", "a longer text than the others, by far", "ab"]
    def texts(*flags):
        record = fattn.json("gpt2", "generate", model, *prompts, *DRAWN, *flags)
        return record["options"], {t["request"]: t["ids"] for t in record["texts"]}
    options, wanted = texts()
    assert options["page_size"] == options["cache_tokens"] == 0
    for flags, pages in ((["--cache-tokens", 50], (50, 50)), (["--cache-tokens", 50, "--page-size", 8], (8, 56)), (["--page-size", 1], (1, 4 * options["context"]))):
        options, got = texts(*flags)
        assert got == wanted and (options["page_size"], options["cache_tokens"]) == pages
    assert "prompt 2 and its new tokens need room for 48; the cache holds 40" in fattn.refuses(
        "gpt2", "generate", model, *prompts, *DRAWN, "--cache-tokens", 36, "--page-size", 8)
    assert "has no cache in pages: algorithm v1" in fattn.refuses("gpt2", "generate", model, "x", "--page-size", 8, "--algorithm", "v1")
    used = {u["what"]: u["bytes"] for u in fattn.json("gpt2", "info", model, "--memory", "--device", "cpu", "--batch", 64, "--cache-tokens", 128)["memory"]["uses"]}
    assert used["keys and values"] == 2 * 2 * 128 * 32 * 4 and used["pages of sequences"] == 64 * 4


def test_where_prompts_come_from(fattn, model, tmp_path):
    (tmp_path / "one").write_text("Hello\nworld")
    said = fattn("gpt2", "generate", model, "Hello\nworld", *DRAWN)
    assert fattn("gpt2", "generate", model, "--file", tmp_path / "one", *DRAWN).stdout == said.stdout
    assert fattn("gpt2", "generate", model, *DRAWN, input="Hello\nworld").stdout == said.stdout
    assert "tokens" in said.stderr and "a second" in said.stderr
    lines = fattn.json("gpt2", "generate", model, "--lines", "--file", tmp_path / "one", *DRAWN)["texts"]
    assert [text["prompt_tokens"] for text in lines] == [5, 5]


def test_a_terminal_is_shown_what_it_would_obey(fattn, model, tmp_path):
    """A vocabulary that has nothing but an escape character in the place of every letter."""
    import base64
    ranks = [bytes([i]) for i in range(256)]
    folder = tmp_path / "escapes"
    folder.mkdir()
    (folder / "escapes.tiktoken").write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks)) + f"{base64.b64encode(bytes([27]) * 2).decode()} 256\n")
    flags = ["--tokenizer", folder / "escapes.tiktoken", "-n", 60, "--temperature", 50, "--seed", 1, "--ignore-end", "--quiet"]
    texts = fattn.json("gpt2", "generate", model, "x", *flags)["texts"]
    assert any(ord(c) < 32 for c in texts[0]["text"])
    shown = fattn.in_terminal("gpt2", "generate", model, "x", *flags, width=80)
    assert not [c for c in shown if ord(c) < 32 and c not in "\r\n\t"]


def test_stops(fattn, model):
    text = fattn.json("gpt2", "generate", model, "Hello", *DRAWN)["texts"][0]["text"]
    stop = text[4:6]
    cut = fattn.json("gpt2", "generate", model, "Hello", *DRAWN, f"--stop={stop}")["texts"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["ended"] == "stop string"
    full = fattn.json("gpt2", "generate", model, "Hello", "-n", 1000, "--ignore-end")["texts"][0]
    assert full["ended"] == "context" and full["prompt_tokens"] + len(full["ids"]) == 65


def test_in_a_program(fattn, model):
    """examples/gpt2/gpt2.cpp."""
    example = pathlib.Path(fattn.path).resolve().parent.parent / "tests" / "example_gpt2"
    if not example.exists():
        pytest.skip("the tests were not built")
    said = subprocess.run([example, model, "Hello"], capture_output=True, check=True).stdout
    text = fattn.json("gpt2", "generate", model, "Hello", "-n", 20, "--temperature", 0.8, "--top-p", 0.95, "--seed", 1, "--context", 64, "--ignore-end")["texts"][0]
    assert said.decode(errors="replace") == f"{text['text']}\n20 tokens, ended by length\n"
    assert b"65 tokens" in subprocess.run([example, model, "x" * 65], capture_output=True).stderr


def test_windows(fattn, model, tmp_path):
    """Windows that overlap give each token's loss once, and a token with more behind it another one."""
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    whole = fattn.json("gpt2", "eval", model, tmp_path / "text")
    assert whole["windows"] == 9 and whole["interval_of"] == "windows"
    sliding = fattn.json("gpt2", "eval", model, tmp_path / "text", "--stride", 16, "--batch", 3)
    assert sliding["tokens"] == whole["tokens"] and sliding["loss"] != whole["loss"]
    low, high = whole["loss_interval"]
    assert low < whole["loss"] < high and whole["perplexity"] == pytest.approx(np.exp(whole["loss"]))
    assert fattn.json("gpt2", "eval", model, tmp_path / "text", "--batch", 4)["loss"] == whole["loss"]


def test_each_attention_gives_the_same(fattn, model, tmp_path):
    record = fattn.json("gpt2", "compare", model, "--batch", 2, "--seqlen", "16,64", "--dtype", "fp32,bf16,fp16", "--repeats", 1, "--figure", tmp_path / "f.svg")
    assert record["passed"] and len(record["cases"]) == 6
    for case in record["cases"]:
        assert [a["algorithm"] for a in case["algorithms"]] == ["standard", "v1", "v2", "auto"]
        assert all(a["passed"] and a["max_abs_error"] <= a["scale"] / 10 for a in case["algorithms"])
    assert (tmp_path / "f.svg").read_text().startswith("<svg")


def test_an_output_that_differs_fails(fattn, model, tmp_path):
    """A model whose numbers are not finite passes no check."""
    from safetensors.numpy import load_file as load, save_file as save
    import shutil
    shutil.copytree(model, tmp_path / "bad")
    tensors = load(model / "model.safetensors")
    name = next(key for key in tensors if key.endswith("ln_f.bias"))
    tensors[name][3] = np.nan
    save(tensors, tmp_path / "bad" / "model.safetensors")
    done = fattn("gpt2", "compare", tmp_path / "bad", "--batch", 1, "--seqlen", 8, "--repeats", 1, status=1)
    assert "FAILS" in done.stdout and "NOT the same" in done.stdout
    assert "not a number" in fattn("gpt2", "eval", tmp_path / "bad", status=1, input="some text").stdout
    assert "NaN" in fattn.refuses("gpt2", "generate", tmp_path / "bad", "x")


def test_bench(fattn, model):
    record = fattn.json("gpt2", "bench", model, "--batch", "1,2", "--context", "8,64", "--seconds", 0)
    assert [(t["pass"], t["batch"], t["context"]) for t in record["timings"]] == [(p, b, c) for p in ("prefill", "decode") for b in (1, 2) for c in (8, 64)]
    assert all(t["of_limit"] > 0 for t in record["timings"])
    assert "more than the model's 64 positions" in fattn.refuses("gpt2", "bench", model, "--context", 65)
    paged = fattn.json("gpt2", "bench", model, "--batch", 3, "--context", 50, "--page-size", 16, "--seconds", 0)
    assert (record["page_size"], paged["page_size"]) == (0, 16) and len(paged["timings"]) == 2


def test_lengths_that_nobody_chose_fit_the_model(fattn, model):
    """One of 64 positions: fewer than what a GPT-2 of usual size is measured at."""
    record = fattn.json("gpt2", "bench", model, "--batch", 1, "--seconds", 0)
    assert {t["context"] for t in record["timings"]} == {64}
    for flags in ([], ["--sweep"]):
        record = fattn.json("gpt2", "compare", model, "--batch", 1, "--repeats", 1, *flags)
        assert [case["seqlen"] for case in record["cases"]] == [64]
    assert "more than the model's 64 positions" in fattn.refuses("gpt2", "compare", model, "--seqlen", 512)


@pytest.mark.parametrize("command", [["generate"], ["eval"], ["info"], ["bench"], ["compare"]])
def test_folders_that_are_no_model(fattn, tmp_path, command):
    text = ["x"] if command == ["generate"] else []
    wanted = "give a model's folder, which has config.json and model.safetensors"
    for name, words in ((tmp_path / "missing", "there is no folder"), (tmp_path / "empty", "has no config.json"), (tmp_path / "file", "is no folder")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / "file").write_text("x")
        error = fattn.refuses("gpt2", *command, name, *text)
        assert words in error and wanted in error and str(name) in error
    run = tmp_path / "run"
    run.mkdir()
    (run / "training.json").write_text("{}")
    assert "is a training run that has no checkpoint yet" in fattn.refuses("gpt2", *command, run, *text)
    for step in (500, 1500, 1000):
        (run / f"step-{step:08}").mkdir()
    (run / "step-00009000").write_text("no folder")
    for name in ("step-best", "step-00001600.bak", "step-1700", "step-000001800"):
        (run / name).mkdir()
    assert f"is a training run; give one of its checkpoints: '{run}/step-00001500'" in fattn.refuses("gpt2", *command, run, *text)
    (run / "step-100000000").mkdir()
    assert f"'{run}/step-100000000'" in fattn.refuses("gpt2", *command, run, *text)
    (tmp_path / "loop").symlink_to("loop")
    error = fattn.refuses("gpt2", *command, tmp_path / "loop", *text)
    assert f"'{tmp_path / 'loop'}' cannot be looked at: Too many levels of symbolic links" in error and "no folder" not in error


@pytest.mark.parametrize("prompts", [1, 300])
def test_texts_are_kept_though_nobody_reads_them(fattn, model, tmp_path, prompts):
    """Of 300 there are more than a pipe and stdio's buffer hold; a single text is written as it comes."""
    (tmp_path / "prompts").write_text("".join(f"{i % 250}\n" if prompts > 1 else "a" for i in range(prompts)))
    generate = ["gpt2", "generate", model, "--file", tmp_path / "prompts", *(["--ids", "--lines"] if prompts > 1 else []), "-n", 60, "--ignore-end", "--quiet"]

    def texts(file) -> list[int]:
        return [len(text["ids"]) for text in json.loads(file.read_text())["texts"]]

    with open("/dev/full", "w") as full:
        done = subprocess.run([fattn.path, *map(str, generate), "--json", tmp_path / "full.json"], stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (2, "fattn: cannot write to stdout\n")
        assert texts(tmp_path / "full.json") == [60] * prompts
        done = subprocess.run([fattn.path, *map(str, generate), "--json", "-"], stdout=subprocess.PIPE, stderr=full, text=True)
        assert done.returncode == 0 and len(json.loads(done.stdout)["texts"]) == prompts
    done = fattn.unread(*generate, "--json", tmp_path / "unread.json")
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    assert texts(tmp_path / "unread.json") == [60] * prompts


def test_bad_input(fattn, model, tmp_path):
    assert "token 258 is not in the model's vocabulary; allowed: 0 to 257" in fattn.refuses("gpt2", "generate", model, "--ids", "258")
    assert "'1x'" in fattn.refuses("gpt2", "generate", model, "--ids", "1x")
    assert "'-1'" in fattn.refuses("gpt2", "generate", model, "--ids", "5 -1")
    assert "65 tokens" in fattn.refuses("gpt2", "generate", model, "x" * 65)
    assert "positions for 1 to 64" in fattn.refuses("gpt2", "generate", model, "x", "--context", 65)
    assert "empty" in fattn.refuses("gpt2", "generate", model, "")
    assert "no prompt" in fattn.refuses("gpt2", "generate", model, "--lines", input="\n\n")
    assert "--top-p" in fattn.refuses("gpt2", "generate", model, "x", "--top-p", 2)
    assert "top_p is 0" in fattn.refuses("gpt2", "generate", model, "x", "--top-p", 0)
    assert "at least 2" in fattn.refuses("gpt2", "eval", model, input="x")
    assert "a stride of 65" in fattn.refuses("gpt2", "eval", model, "--stride", 65, input="x y z")
    big = tmp_path / "big.tiktoken"
    big.write_text((model / "bytes.tiktoken").read_text() + "YWJh 257\nYWJj 258\n")
    assert "the tokenizer has 260 tokens, the model's vocabulary 258" in fattn.refuses("gpt2", "generate", model, "x", "--tokenizer", big)
    (model / "bytes.tiktoken").rename(tmp_path / "bytes.tiktoken")
    assert "has no tokenizer" in fattn.refuses("gpt2", "generate", model, "x")
    (tmp_path / "bytes.tiktoken").rename(model / "bytes.tiktoken")
