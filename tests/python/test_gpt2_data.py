"""fattn gpt2 tokenizer train against Hugging Face's `BpeTrainer`, and fattn gpt2 tokenize against what it should have written: the files are read here by
what docs/GPT2.md says of them."""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers is not installed, so there is nothing to compare with")

END = "<|endoftext|>"
WHOLE = os.environ.get("FATTN_TEST_WHOLE", "0") not in ("", "0")


def their_tokenizer(size: int, texts=None, files=None, least=0) -> "tokenizers.Tokenizer":
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=least)
    if files:
        tokenizer.train([str(file) for file in files], trainer)
    else:
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(fattn, folder, files, size, *flags) -> pathlib.Path:
    fattn("gpt2", "tokenizer", "train", *files, "--vocab-size", size, "--out", folder, *flags)
    return folder


def check_same(ours: pathlib.Path, theirs, folder: pathlib.Path):
    found, expected = json.loads((ours / "tokenizer.json").read_text()), json.loads(theirs.to_str())
    first = next((i for i, pair in enumerate(zip(found["model"]["merges"], expected["model"]["merges"])) if pair[0] != pair[1]), None)
    assert first is None, f"merge {first}: {found['model']['merges'][first]}, not {expected['model']['merges'][first]}"
    assert found == expected
    folder.mkdir()
    theirs.model.save(str(folder))
    assert (ours / "merges.txt").read_text() == (folder / "merges.txt").read_text()
    assert json.loads((ours / "vocab.json").read_text()) == json.loads((folder / "vocab.json").read_text())


@pytest.fixture(scope="module")
def code() -> list[pathlib.Path]:
    files, size = [], 0
    for path in sorted(pathlib.Path(os.path.dirname(os.__file__)).glob("*.py")):
        if size < (10_000_000 if WHOLE else 1_000_000):
            files.append(path)
            size += path.stat().st_size
    return files


@pytest.mark.parametrize("size, flags", [(300, ()), (2000, ()), (1500, ("--by", "line")), (30000, ("--min-frequency", "3"))], ids=str)
def test_trained_on_code_as_theirs(fattn, tmp_path, code, size, flags):
    by_line = "line" in flags
    theirs = their_tokenizer(size, texts=[path.read_bytes().decode() for path in code], files=code if by_line else None, least=3 if "3" in flags else 0)
    check_same(train(fattn, tmp_path / "ours", code, size, *flags), theirs, tmp_path / "theirs")


@pytest.mark.parametrize("seed", range(60 if WHOLE else 12))
def test_trained_on_few_letters_as_theirs(fattn, tmp_path, seed):
    """Ties everywhere, runs of one letter, tokens that are made in two ways."""
    rng = random.Random(seed)
    letters = ["ab", "abc", "aab é漢", "ab \n"][seed % 4]
    text = "".join(rng.choice(letters) for _ in range(rng.choice([40, 500, 5000]))) + (" " + "a" * 37 + " aaaa") * 5
    path = tmp_path / "text.txt"
    path.write_text(text)
    check_same(train(fattn, tmp_path / "ours", [path], 500), their_tokenizer(500, texts=[text]), tmp_path / "theirs")


def test_a_tokenizer_needs_text_and_room(fattn, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "there is no text" in fattn.refuses("gpt2", "tokenizer", "train", tmp_path / "empty", "--vocab-size", 300, "--out", tmp_path / "out")
    (tmp_path / "text").write_text("a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("mine")
    assert "is not empty" in fattn.refuses("gpt2", "tokenizer", "train", tmp_path / "text", "--vocab-size", 300, "--out", tmp_path / "out")
    said = fattn("gpt2", "tokenizer", "train", tmp_path / "text", "--vocab-size", 300, "--out", tmp_path / "new").stdout
    said = " ".join(said.split())
    assert "257 tokens, 0 merges" in said and "give more text" in said


@pytest.fixture(scope="module")
def tokenizer(fattn, tmp_path_factory, code) -> pathlib.Path:
    return train(fattn, tmp_path_factory.mktemp("tokenizer") / "t", code[:10], 1000)


@pytest.fixture(scope="module")
def theirs(tokenizer):
    return tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def read_tokens(path: pathlib.Path) -> tuple[list[list[int]], list[list[bool]], dict]:
    """Documents, which of their tokens are targets, and the trailer."""
    data = path.read_bytes()
    names = ("tokens", "documents", "spans", "block_bytes", "text_bytes", "vocabulary", "table_checksum", "largest_at", "vocab_size", "largest_id", "end_of_text", "id_bytes", "shard", "version")
    magic, *numbers = struct.unpack_from("<8s8Q6I", data, len(data) - 128)
    assert magic == data[:8] == b"FATTNTOK"
    trailer = dict(zip(names, numbers)) | {"last": data[len(data) - 128 + 96]}
    assert trailer["version"] == 1 and trailer["id_bytes"] == 2
    ids = struct.unpack_from(f"<{trailer['tokens']}H", data, 16)
    at = 16 + (2 * trailer["tokens"] + 7) // 8 * 8
    begins = [*struct.unpack_from(f"<{trailer['documents']}Q", data, at), trailer["tokens"]]
    spans = struct.unpack_from(f"<{2 * trailer['spans']}Q", data, at + 8 * trailer["documents"])
    targets = [True] * trailer["tokens"]
    for begin, end in zip(spans[::2], spans[1::2]):
        targets[begin:end] = [False] * (end - begin)
    assert max(ids) == trailer["largest_id"] == ids[trailer["largest_at"]]
    parts = list(zip(begins, begins[1:]))
    return [list(ids[b:e]) for b, e in parts], [targets[b:e] for b, e in parts], trailer


def tokenize(fattn, tokenizer, folder, *inputs, part="train") -> tuple[list[list[int]], list[list[bool]]]:
    fattn("gpt2", "tokenize", tokenizer, *inputs, "--out", folder)
    documents, targets, _ = read_tokens(folder / part / "00000.tokens")
    return documents, targets


def test_texts_and_code(fattn, tmp_path, tokenizer, theirs, code):
    """What is text becomes a document; what is none is counted; a long text is cut without a trace."""
    texts = tmp_path / "texts"
    (texts / "inner").mkdir(parents=True)
    (texts / "a.txt").write_text(f"one\n{END}\ntwo {END} is text\nand two\n{END}\r\n\n{END}\nthree")
    (texts / "b.py").write_text(f"x = 1\n{END}\ny = 2\n")  # code is not divided
    (texts / "c.bin").write_bytes(b"a\0b" * 100)
    (texts / ".hidden").write_text("no")
    (texts / "empty.md").write_text("")
    (texts / "inner/d.md").write_bytes(b"\xef\xbb\xbfbroken \xff utf-8, \xc3\xa9")
    (texts / "link.txt").symlink_to(texts / "a.txt")
    long = "".join(path.read_text() for path in code)
    long = (long + "  \n\t漢字が\n続く。\n 'tis " + "x" * 3000) * 2
    long = long[:1_300_000]  # parts have 2^20 bytes
    (texts / "z.txt").write_text(long)
    record = fattn.json("gpt2", "tokenize", tokenizer, texts, "--out", tmp_path / "out", "--threads", 3)
    assert record["left_out"] == {"binary": 1, "hidden": 1, "links": 1, "empty": 1, "lines": 0}
    documents, targets, trailer = read_tokens(tmp_path / "out/train/00000.tokens")
    expected = ["one\n", f"two {END} is text\nand two\n", "\n", "three", f"x = 1\n{END}\ny = 2\n", "broken \ufffd utf-8, é", long]
    assert len(documents) == len(expected) == record["train"]["documents"]
    for ids, text in zip(documents[:-1], expected):
        assert END in text or ids == [*theirs.encode(text).ids, 0], text
        assert theirs.decode(ids[:-1], skip_special_tokens=False) == text and ids[-1] == 0 and 0 not in ids[:-1]
    assert documents[-1] == [*theirs.encode(long).ids, 0]
    assert all(all(t) for t in targets)
    assert trailer["text_bytes"] == record["train"]["text_bytes"] == sum(len(text.encode()) for text in expected) - 2  # one byte became three
    fattn("gpt2", "tokenize", tokenizer, texts, "--out", tmp_path / "again", "--threads", 1)
    assert (tmp_path / "out/train/00000.tokens").read_bytes() == (tmp_path / "again/train/00000.tokens").read_bytes()
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_completions_alone_have_a_loss(fattn, tmp_path, tokenizer, theirs):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "Two and two", "completion": " is four.", "source": 1}\n\n{"prompt": "", "completion": "é"}\n')
    documents, targets = tokenize(fattn, tokenizer, tmp_path / "out", lines)
    prompt, completion = theirs.encode("Two and two").ids, theirs.encode(" is four.").ids
    assert documents == [[*prompt, *completion, 0], [*theirs.encode("é").ids, 0]]
    assert targets == [[False] * len(prompt) + [True] * (len(completion) + 1), [True] * len(documents[1])]


def test_dialogues_and_lines(fattn, tmp_path, tokenizer, theirs):
    talks, lines = tmp_path / "talks.jsonl", tmp_path / "lines.jsonl"
    talks.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Ho"}]}) + "\n"
                     + json.dumps({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}))
    lines.write_text('{"text": "a line"}\n')
    documents, targets = tokenize(fattn, tokenizer, tmp_path / "out", talks, lines)
    assert [theirs.decode(ids, skip_special_tokens=False) for ids in documents] == [f"System: Be brief.\n\nUser: Hi\nthere\n\nAssistant: Ho{END}", f"User: ?\n\nAssistant: !{END}", f"a line{END}"]
    assert all(all(t) for t in targets)


def test_bad_lines_are_named_and_left_out(fattn, tmp_path, tokenizer):
    lines = tmp_path / "a.jsonl"
    good = '{"prompt": "a", "completion": "b"}\n'
    bad = ["{", "[1]", '{"prompt": "a"}', '{"prompt": 1, "completion": "b"}', '{"prompt": "a", "completion": ""}']
    lines.write_text(good + "\n".join(bad) + "\n" + "\x1b[31m\n" * 20 + good)
    done = fattn("gpt2", "tokenize", tokenizer, lines, "--out", tmp_path / "out")
    for number, why in ((2, "no valid JSON"), (3, "is an array"), (4, 'no "completion"'), (5, '"prompt" of the object is a number'), (6, "nothing to learn"), (7, "no valid JSON")):
        assert any(f"a.jsonl:{number}: " in line and why in line for line in done.stderr.splitlines()), done.stderr
    assert done.stderr.count("a.jsonl:") == 10 and "\x1b" not in done.stderr
    assert "25 lines were left out, of which the first 10 are named above" in " ".join(done.stdout.split())
    assert len(read_tokens(tmp_path / "out/train/00000.tokens")[0]) == 2


def test_what_cannot_be_tokenized(fattn, tmp_path, tokenizer):
    lines, odd, out = tmp_path / "a.jsonl", tmp_path / "odd.jsonl", tmp_path / "out"
    lines.write_text("{\n{\n")
    odd.write_text('{"question": "?", "answer": "!"}\n')
    (tmp_path / "image").write_bytes(bytes(100))
    for arguments, expected in (
        ([tmp_path / "nothing"], "No such file"),
        ([tmp_path / "image"], "there is no text in what was given: 1 are no text"),
        ([lines], "is no JSON"),
        ([odd], "an object with the keys answer, question; allowed are objects with"),
    ):
        assert expected in " ".join(fattn.refuses("gpt2", "tokenize", tokenizer, *arguments, "--out", out).split()).replace("fattn: ", "")
        assert not out.exists()
    done = fattn("gpt2", "tokenize", tokenizer, lines, "--format", "dialogue", "--out", out, status=2)
    assert "none of the lines is a document: 2 were left out" in done.stderr and not out.exists()
    (tmp_path / "text").write_text("text")
    without_end = json.loads((tokenizer / "tokenizer.json").read_text())
    without_end["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(without_end))
    assert "has no token <|endoftext|>" in " ".join(fattn.refuses("gpt2", "tokenize", tmp_path / "tokenizer.json", tmp_path / "text", "--out", out).split())
    fattn("gpt2", "tokenize", tokenizer, tmp_path / "text", "--out", out)
    assert "is not empty" in fattn.refuses("gpt2", "tokenize", tokenizer, tmp_path / "text", "--out", out)


def test_validation_and_shards(fattn, tmp_path, tokenizer, theirs, code):
    """Nothing is lost and nothing is twice; a file ends with a document; another seed draws others."""
    lines = tmp_path / "a.jsonl"
    texts = [f"document {i} " + "word " * (i % 50) for i in range(1000)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    drawn = {}
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        record = fattn.json("gpt2", "tokenize", tokenizer, lines, "--out", out, "--validation", 0.1, "--shard-tokens", 5000, "--seed", seed)
        files = sorted((out / "train").glob("*.tokens"))
        assert len(files) == record["train"]["files"] > 3
        read = [read_tokens(file) for file in files]
        assert [trailer["shard"] for *_, trailer in read] == list(range(len(files))) and [trailer["last"] for *_, trailer in read] == [0] * (len(files) - 1) + [1]
        assert all(5000 <= trailer["tokens"] < 5200 for *_, trailer in read[:-1])
        train_texts = [theirs.decode(ids) for documents, *_ in read for ids in documents]
        drawn[seed] = [theirs.decode(ids) for file in sorted((out / "validation").iterdir()) for ids in read_tokens(file)[0]]
        assert len(drawn[seed]) == 100 and sorted(train_texts + drawn[seed]) == sorted(texts)
    assert drawn[0] != drawn[1]
    # A single text is divided: its parts together are the whole.
    (tmp_path / "text").write_text("".join(path.read_text() for path in code[:5]))
    out = tmp_path / "one"
    record = fattn.json("gpt2", "tokenize", tokenizer, tmp_path / "text", "--out", out, "--validation", 0.05)
    parts = [theirs.decode(ids) for part in ("train", "validation") for ids in read_tokens(out / part / "00000.tokens")[0]]
    assert sum(len(part.encode()) for part in parts) == (tmp_path / "text").stat().st_size
    assert 0.02 < record["validation"]["tokens"] / record["train"]["tokens"] < 0.1


def test_what_it_says_fits_the_terminal(fattn, tmp_path, tokenizer, root):
    text = fattn.in_terminal("gpt2", "tokenize", tokenizer, root / "README.md", root / "tools", "--out", tmp_path / "out", "--validation", "0.1", width=60)
    assert "tokens in" in text and "bytes a token" in " ".join(text.split())
    assert all(len(line) <= 60 for line in text.split("\n") if "\r" not in line), text


def test_training_texts_of_the_system(root, tmp_path):
    """The same on every run; what is held out is not for training."""
    for name in ("a", "b"):
        done = subprocess.run([sys.executable, root / "tools/make_training_texts.py", tmp_path / name, "--sets", "code,books", "--most-mb", "1", "--held-out", "0.2"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = [{str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()} for name in ("a", "b")]
    assert found[0] == found[1] and any(path.startswith("code/held-out/") for path in found[0])
    assert sum(len(text) for path, text in found[0].items() if path.startswith("code/")) <= 1_000_000
    refused = subprocess.run([sys.executable, root / "tools/make_training_texts.py", tmp_path / "a"], capture_output=True, text=True)
    assert refused.returncode == 2 and "is not empty" in refused.stderr
