"""fattn gpt2 eval --task, precision, and train --track-precision: scores of texts that are known, what is printed, what is refused."""
import base64
import json
import math
import pathlib

import pytest

SIZES = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--seqlen", 32, "--batch", 4]


def write(path: pathlib.Path, *records) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def trained(fattn, tmp_path_factory):
    """A model that has learned four questions by heart, its data, and the questions."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tok").mkdir()
    (folder / "tok" / "bytes.tiktoken").write_text("".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256)))
    pairs = {"color of grass? ": "green", "color of snow? ": "white", "sum of 1, 1? ": "two", "animal? ": "red fox"}
    write(folder / "learn.jsonl", *({"prompt": p, "completion": c} for p, c in pairs.items() for _ in range(20)))
    fattn("gpt2", "tokenize", folder / "tok", folder / "learn.jsonl", "--out", folder / "tokens", "--threads", 1)
    fattn("gpt2", "train", *SIZES, "--steps", 250, "--every", 250, "--learning-rate", 1e-2, "--data", folder / "tokens", "--out", folder / "run")
    return folder / "run" / "step-00000250", folder, pairs


def test_answers(fattn, trained, tmp_path):
    model, _, pairs = trained
    ask = [{"prompt": p, "completion": c} for p, c in pairs.items()]
    learned = fattn.json("gpt2", "eval", model, "--task", "qa", write(tmp_path / "a.jsonl", *ask), "-n", 12)
    assert [text["text"] for text in learned["texts"]] == list(pairs.values())
    assert learned["scores"]["exact_match"]["mean"] == learned["scores"]["f1"]["mean"] == 1 and learned["examples"] == 4
    # Other right answers: "The green!" is the same, "white hare" shares one word of 1 and 2, "3" none; "wolf" is wrong but for what stands beside it.
    changed = [{**ask[0], "completion": "The green!"}, {**ask[1], "completion": "white hare"}, {**ask[2], "completion": "3"}, {**ask[3], "completion": "wolf", "answers": ["a red fox"]}]
    other = fattn.json("gpt2", "eval", model, "--task", "qa", write(tmp_path / "b.jsonl", *changed), "-n", 12)
    assert [text["exact_match"] for text in other["texts"]] == [True, False, False, True]
    assert [text["f1"] for text in other["texts"]] == pytest.approx([1, 2 / 3, 0, 1])
    assert other["scores"]["exact_match"]["mean"] == 0.5 and other["scores"]["f1"]["mean"] == pytest.approx((2 + 2 / 3) / 4)
    assert fattn.json("gpt2", "eval", model, "--task", "qa", tmp_path / "b.jsonl", "--limit", 2)["examples_in_all"] == 2
    words = fattn("gpt2", "eval", model, "--task", "qa", tmp_path / "b.jsonl", "-n", 12).stdout
    assert "exact match 0.5000 (95 %:" in words and "4 examples, greedy" in words


def test_summaries(fattn, trained, tmp_path):
    model, _, pairs = trained
    ask = [{"prompt": "animal? ", "completion": "the red and old fox"}, {"prompt": "color of snow? ", "completion": "white"}]
    record = fattn.json("gpt2", "eval", model, "--task", "summarize", write(tmp_path / "a.jsonl", *ask), "-n", 12)
    assert record["task"] == "summarise"
    assert [text["rouge_l"] for text in record["texts"]] == pytest.approx([2 * 1 * 0.4 / 1.4, 1])
    assert record["scores"]["rouge_l_recall"]["mean"] == pytest.approx(0.7) and record["scores"]["rouge_l_precision"]["mean"] == 1
    stopped = fattn.json("gpt2", "eval", model, "--task", "summarise", tmp_path / "a.jsonl", "--stop", " f")
    assert stopped["texts"][0]["text"] == "red"
    long = write(tmp_path / "long.jsonl", {"prompt": "x" * 500 + "animal? ", "completion": "red fox"})
    assert fattn.json("gpt2", "eval", model, "--task", "qa", long, "-n", 12)["prompts_cut"] == 1


def test_documents(fattn, trained, tmp_path):
    """Perplexity of documents is that of each by itself, weighed by tokens."""
    model, _, _ = trained
    config = json.loads((model / "config.json").read_text())
    texts = ["def f(x):\n    return x\n", "import os\nprint(os.sep)\n" * 4]
    (tmp_path / "code").mkdir()
    losses, tokens = 0, 0
    for i, text in enumerate(texts):
        (tmp_path / "code" / f"{i}.py").write_text(text)
        ids = [*text.encode(), config["eos_token_id"]]
        (tmp_path / "ids").write_text(" ".join(map(str, ids)))
        one = fattn.json("gpt2", "eval", model, "--ids", tmp_path / "ids")
        assert one["task"] == "lm"
        losses, tokens = losses + one["loss"] * one["tokens"], tokens + one["tokens"]
    record = fattn.json("gpt2", "eval", model, "--task", "code", tmp_path / "code")
    assert record["documents"] == 2 and record["tokens"] == tokens
    assert record["loss"] == pytest.approx(losses / tokens, rel=1e-6) and record["perplexity"] == pytest.approx(math.exp(losses / tokens), rel=1e-6)
    talk = write(tmp_path / "talk.jsonl", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]})
    record = fattn.json("gpt2", "eval", model, "--task", "dialogue", talk)
    assert record["documents"] == 1 and record["tokens"] == len("User: hi\n\nAssistant: ho") and record["loss_interval"] == [None, None]
    assert "perplexity" in fattn("gpt2", "eval", model, "--task", "dialogue", talk).stdout


def test_what_is_refused(fattn, trained, tmp_path):
    model, folder, _ = trained
    good = write(tmp_path / "good.jsonl", {"prompt": "p", "completion": "c"})
    bad = write(tmp_path / "bad.jsonl", {"prompt": "p"})
    assert "line 1: the object has no \"completion\"" in fattn.refuses("gpt2", "eval", model, "--task", "qa", bad)
    assert "is of --task qa and summarise, not of code" in fattn.refuses("gpt2", "eval", model, "--task", "code", good, "--stop", "x")
    assert "--tokens is what limits a text" in fattn.refuses("gpt2", "eval", model, good, "--limit", 2)
    assert "give the file or folder" in fattn.refuses("gpt2", "eval", model, "--task", "qa", input="x")
    assert "leaves no room for a prompt" in fattn.refuses("gpt2", "eval", model, "--task", "qa", good, "-n", 32)
    assert "--task" in fattn.refuses("gpt2", "eval", model, "--task", "chess", good)
    assert "nowhere.jsonl" in fattn.refuses("gpt2", "eval", model, "--task", "qa", tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_precision(fattn, dtype):
    record = fattn.json("gpt2", "precision", "--dtype", dtype)
    rules = {rule["part"]: rule for rule in record["rules"]}
    assert rules["MLP"]["stored"] == dtype and rules["optimizer"]["stored"] == rules["loss"]["computed"] == "fp32"
    assert record["loss_scale"] == (dtype == "fp16")
    text = fattn.in_terminal("gpt2", "precision", "--dtype", dtype, width=80)
    assert all(part in text for part in rules) and text.count("Why:") == text.count("Broken:") == len(rules)
    assert max(map(len, text.split("\n"))) <= 80


def test_tracking(fattn, trained, tmp_path):
    """The same steps as without; fp16 with a loss scale that is too large at first overflows, bf16 and fp32 do not."""
    _, folder, _ = trained
    data = ["--data", folder / "tokens", "--steps", 6, "--every", 3]
    fattn("gpt2", "train", *SIZES, *data, "--out", tmp_path / "plain")
    track = tmp_path / "track.jsonl"
    record = fattn.json("gpt2", "train", *SIZES, *data, "--out", tmp_path / "fp32", "--track-precision", track)
    assert track.read_text() == "" and record["run"]["precision"]["violations"] == [] and record["run"]["precision"]["steps"] == 6
    losses = [[json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("plain", "fp32")]
    assert losses[0] == losses[1]
    run = ["gpt2", "train", *SIZES, *data, "--out", tmp_path / "fp16", "--dtype", "fp16", "--learning-rate", 30, "--warmup", 0, "--clip", 0, "--track-precision", track]
    done = fattn(*run)
    lines = [json.loads(line) for line in track.read_text().splitlines()]
    assert lines and {"step", "kind", "tensor", "shape", "dtypes", "loss_scale", "count", "elements", "value", "limit"} <= set(lines[0])
    assert "violations are in" in done.stdout and "first in step" in done.stdout


def test_a_loss_that_is_no_number_names_a_tensor(fattn, trained, tmp_path):
    """Products of large weights are Inf: found in the order of the passes, with its shape and dtype."""
    _, folder, _ = trained
    error = fattn("gpt2", "train", *SIZES, "--dtype", "bf16", "--steps", 20, "--every", 1, "--learning-rate", 1e30, "--warmup", 0, "--clip", 0, "--data", folder / "tokens",
                  "--out", tmp_path / "run", "--track-precision", tmp_path / "track.jsonl", status=1).stderr
    assert "the first tensor that is not finite is '" in error and "(128 x " in error and "step-00000001" in error
    assert any(json.loads(line)["kind"] in ("nan", "overflow") for line in (tmp_path / "track.jsonl").read_text().splitlines())
