"""fattn gpt2 encode and decode against Hugging Face's `tokenizers`: a vocabulary trained here on text that the system has, the same ids for every text."""
import base64
import json
import os
import pathlib
import random
import subprocess
import sys
import unicodedata

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers is not installed, so there are no ids to compare with")

# Theirs reads less than a megabyte a second. FATTN_TEST_WHOLE=1: all of it.
WHOLE = os.environ.get("FATTN_TEST_WHOLE", "0") not in ("", "0")
MIXED_BYTES, CODE_BYTES = (10_500_000, 2_000_000) if WHOLE else (1_500_000, 400_000)
END = "<|endoftext|>"


def files_of_system(*patterns: str, most: int) -> str:
    """Text of files that match, in the order of their names."""
    texts, size = [], 0
    for root, pattern in [p.split(" ") for p in patterns]:
        for path in sorted(pathlib.Path(root).glob(pattern)):
            if size >= most:
                break
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            texts.append(text[: min(most - size, 200_000)])
            size += len(texts[-1])
    return "".join(texts)


def random_text(count: int) -> str:
    """Code points of all kinds in pieces of all lengths, with spaces, apostrophes and newlines between them."""
    rng = random.Random(1)
    planes = [(0x20, 0x7F), (0xA0, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000), (0x20000, 0x110000), (0x09, 0x0E)]
    between = [" ", "  ", "\n", "'s", "'", " '", "\t", "\u00a0", "\u180e", "\u3000 ", "\r\n"]
    return "".join("".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(1, 12))) + rng.choice(between) for _ in range(count))


@pytest.fixture(scope="module")
def code():
    return files_of_system(f"{os.path.dirname(os.__file__)} **/*.py", most=CODE_BYTES)


@pytest.fixture(scope="module")
def mixed(code):
    """English, translations where the system has some, code, all scripts."""
    english = files_of_system("/usr/share/common-licenses *", "/usr/share/doc **/copyright", "/usr/share/perl **/*.pod", most=MIXED_BYTES // 2)
    scripts = "".join(chr(c) + (" " if c % 7 == 0 else "") for c in range(0xA0, 0x30000, 1 if WHOLE else 16) if unicodedata.category(chr(c)) in ("Ll", "Lo", "Lu", "Mn", "Nd", "So"))
    text = english + code + scripts + random_text(MIXED_BYTES // 400)
    while len(text.encode()) < MIXED_BYTES:
        text += text[: MIXED_BYTES // 4][::-1]  # words that no vocabulary has
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory, code, root):
    """A small vocabulary as tokenizer.json, as two files, and as ranks."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=3000, special_tokens=[END], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    readme = (root / "README.zh-TW.md").read_text()
    tokenizer.train_from_iterator([code[:300_000], readme, "".join(chr(c) for c in range(0x400, 0x460)) * 3], trainer)
    (folder / "json").mkdir()
    tokenizer.save(str(folder / "json/tokenizer.json"))
    (folder / "two").mkdir()
    tokenizer.model.save(str(folder / "two"))
    letters = {}  # of the alphabet: byte by character
    others = 0
    for byte in range(256):
        itself = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte
        letters[chr(byte if itself else 256 + others)] = byte
        others += not itself
    (folder / "ranks").mkdir()
    vocab = sorted((id_ - 1, bytes(letters[c] for c in token)) for token, id_ in tokenizer.get_vocab().items() if token != END)
    (folder / "ranks/small.tiktoken").write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in vocab))
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "json/tokenizer.json"))


def ids_of(fattn, tokenizer: pathlib.Path, text: bytes, *flags: str) -> list[int]:
    done = subprocess.run([fattn.path, "gpt2", "encode", str(tokenizer), *flags], input=text, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def text_of(fattn, tokenizer: pathlib.Path, ids: list[int], *flags: str) -> bytes:
    done = subprocess.run([fattn.path, "gpt2", "decode", str(tokenizer), *flags], input=" ".join(map(str, ids)).encode(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_difference(ours: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, expected)) if a != b), min(len(ours), len(expected)))
    return f"at token {at}: {ours[at - 3:at + 5]}, not {expected[at - 3:at + 5]}"


def check(fattn, folder, theirs, text: str):
    expected = theirs.encode(text).ids
    ours = ids_of(fattn, folder / "json", text.encode())
    assert ours == expected, first_difference(ours, expected)
    assert text_of(fattn, folder / "json", ours) == theirs.decode(expected, skip_special_tokens=False).encode()


def test_mixed_text_and_code(fattn, folder, theirs, mixed, code):
    """The ids of the whole text are those of its parts where white space follows something else: one call of theirs would take half a minute."""
    assert len(mixed.encode()) >= MIXED_BYTES
    expected = [e.ids for e in theirs.encode_batch(parts_of(mixed))]
    ours = ids_of(fattn, folder / "json", mixed.encode())
    expected = [id_ for ids in expected for id_ in ids]
    assert ours == expected, first_difference(ours, expected)
    assert text_of(fattn, folder / "json", ours) == mixed.encode()
    check(fattn, folder, theirs, code[: CODE_BYTES // 4])


def parts_of(text: str) -> list[str]:
    parts, begin = [], 0
    while begin < len(text):
        end = begin + 200_000
        while end < len(text) and not (text[end] == " " and text[end - 1].isascii() and text[end - 1].isprintable() and text[end - 1] != " "):
            end += 1
        parts.append(text[begin:end])
        begin = end
    return parts


def test_every_code_point(fattn, folder, theirs):
    """What each of them is to the splitter shows in where pieces end. Without FATTN_TEST_WHOLE: where letters and signs are, every one; of the empty planes
    one in 64."""
    codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and (WHOLE or c < 0x3400 or 0xA000 <= c < 0x20000 and not 0xAC40 < c < 0xD780 or c % 64 == 0)]
    forms = ["a{0}1{0}!{0} {0}"] if WHOLE else ["a{0}1{0}"]
    texts = ["".join(form.format(chr(c)) for c in codes[at : at + 10_000]) for form in forms for at in range(0, len(codes), 10_000)]
    expected = [e.ids for e in theirs.encode_batch(texts)]
    for text, ids in zip(texts, expected):
        assert ids_of(fattn, folder / "json", text.encode()) == ids, f"near U+{ord(text[1]):04X}; see tools/make_character_classes.py"


def test_the_checked_in_table_is_what_tokenizers_gives(root):
    """Letters, numbers, white space and characters of words: a sample, with FATTN_TEST_WHOLE=1 all code points."""
    done = subprocess.run([sys.executable, root / "tools/make_character_classes.py", "--check", "--every", "1" if WHOLE else "31"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", ["", " ", "  ", "\n\n ", " a", "it's we're I'll'd 'S 's", "a" * 1000, "!" * 300 + "a" * 99, "é\u0301 \u1680x", "x \u00a0 y", "1²3 x٣"])
def test_corners(fattn, folder, theirs, text):
    check(fattn, folder, theirs, text)


def test_other_files_give_the_same_ids(fattn, folder, theirs, mixed):
    text = mixed[:500_000] + random_text(1000) + END + " x"
    expected = ids_of(fattn, folder / "json", text.encode())
    assert ids_of(fattn, folder / "two", text.encode()) == expected
    assert ids_of(fattn, folder / "two/merges.txt", text.encode()) == expected
    ranks = [(id_ - 1) % 3000 for id_ in expected]  # END is 0 there, and behind the last one here
    assert ids_of(fattn, folder / "ranks", text.encode()) == ranks


@pytest.mark.parametrize("data", [b"\xff", b"a\xc3", b"\xe4\xb8 x", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf\xf5", b"\xe4\xb8\xe4\xb8\xad", bytes(range(256))], ids=repr)
def test_invalid_utf8_is_replaced(fattn, folder, theirs, data):
    assert ids_of(fattn, folder / "json", data) == theirs.encode(data.decode(errors="replace")).ids


def test_ids_of_parts_of_characters(fattn, folder, theirs):
    """Any ids have a text; what is no UTF-8 in it is U+FFFD as often as theirs."""
    rng = random.Random(2)
    for _ in range(8):
        ids = [rng.randrange(theirs.get_vocab_size()) for _ in range(60)]
        assert text_of(fattn, folder / "json", ids) == theirs.decode(ids, skip_special_tokens=False).encode()
        assert text_of(fattn, folder / "json", ids, "--skip-special") == theirs.decode(ids).encode()


def test_long_runs_are_quick(fattn, folder):
    """A megabyte of one letter: a merge that looks at all pairs each time would take minutes."""
    done = subprocess.run([fattn.path, "gpt2", "encode", str(folder / "json"), "--count"], input=b"a" * 1_000_000, capture_output=True, timeout=20)
    assert done.returncode == 0 and int(done.stdout) > 0


def test_added_tokens(fattn, folder, theirs, tmp_path):
    """Special or not, alone, with the white space around them, overlapping, looked for first or last."""
    for prefix_space in (False, True):
        tokenizer = tokenizers.Tokenizer.from_str(theirs.to_str())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        add = tokenizers.AddedToken
        tokenizer.add_special_tokens([add("<s>"), add("<left>", lstrip=True), add("<right>", rstrip=True), add("<s><s>x"), add("日本")])
        tokenizer.add_tokens([add("word", single_word=True), add("two words", normalized=False), add("tail", lstrip=True, rstrip=True), add("é")])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        rng = random.Random(3)
        parts = ["<s>", "<left>", "<right>", "<s><s>x", "日本", "word", "words", "two words", "tail", "é", " ", "  ", "\n", "\u00a0", "a", "_", ".", "x1", "<", "<s", "日", END, "ß"]
        text = [" <left>", "a <left> <right>  b", "word-word_word wordß word", "\nx <s>\nx"] + ["".join(rng.choice(parts) for _ in range(rng.randrange(1, 15))) for _ in range(300)]
        for flags in ([], ["--special-as-text"]):
            tokenizer.encode_special_tokens = bool(flags)
            lines = fattn("gpt2", "encode", tmp_path, *flags, "--", *text).stdout.split("\n")
            for one, line in zip(text, lines):
                assert [int(word) for word in line.split()] == tokenizer.encode(one).ids, repr(one)
            assert len(lines) == len(text) + 1


def test_streamed_text_never_splits_a_character(fattn, folder, theirs):
    """Ids that come one by one: what is written after each is whole characters."""
    text = "naïve 中文 😀😀 end"
    ids = theirs.encode(text).ids
    process = subprocess.Popen([fattn.path, "gpt2", "decode", str(folder / "json")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for id_ in ids:
        process.stdin.write(f"{id_}\n".encode())
        process.stdin.flush()
    process.stdin.close()
    written = b""
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        written += piece
        written.decode()  # whole so far
    assert process.wait() == 0 and written.decode() == text


def test_pieces_and_count(fattn, folder, theirs):
    text = "def f(x): return x"
    expected = theirs.encode(text).ids
    assert fattn("gpt2", "encode", folder / "json", text, "--count").stdout.split() == [str(len(expected))]
    rows = fattn("gpt2", "encode", folder / "json", text, "--pieces", "--format", "csv").stdout.splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == expected
    assert fattn.json("gpt2", "decode", folder / "json", *expected)["text"] == text
    assert fattn("gpt2", "encode", folder / "json", "a", "b").stdout.count("\n") == 2


def change(folder, tmp_path, **changes) -> pathlib.Path:
    """The tokenizer with other values at "model.dropout" and the like."""
    content = json.loads((folder / "json/tokenizer.json").read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        at = content
        for name in path:
            at = at[name]
        at[last] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer is set"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "'Whitespace'; GPT-2's is ByteLevel"),
        ({"pre_tokenizer__use_regex": False}, "use_regex is false"),
        ({"post_processor": {"type": "BertProcessing"}}, "post_processor is of type 'BertProcessing'"),
        ({"decoder": {"type": "WordPiece"}}, "decoder is of type"),
        ({"model__type": "Unigram"}, "model.type is 'Unigram'"),
        ({"model__dropout": 0.1}, "model.dropout is set"),
        ({"model__end_of_word_suffix": "</w>"}, "model.end_of_word_suffix is set"),
        ({"model__vocab": {}}, "vocabulary"),
        ({"model__vocab": {"a": -1}}, "ids are whole numbers"),
        ({"model__vocab": {"a": 0, "b": 0}, "model__merges": [], "added_tokens": []}, "the id 0 belongs to two tokens"),
        ({"model__vocab": {"a": 10_000_000}, "model__merges": [], "added_tokens": []}, "for a vocabulary of this size"),
        ({"model__vocab": {"a": 0}, "model__merges": [], "added_tokens": []}, "lacks tokens of single bytes: 0, 1, 2"),
        ({"model__merges": [["a", "nothing"]]}, "needs the token 'nothing'"),
        ({"model__merges": ["a b c"]}, "a merge is two tokens"),
        ({"added_tokens": [{"id": 1, "content": END}]}, "has the id 1, but 0"),
        ({"added_tokens": [{"id": 1, "content": ""}]}, "has no content"),
        ({"added_tokens": [{"id": 5000, "content": "x" * 5000}]}, "at most 4096"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_files_that_are_refused(fattn, folder, tmp_path, changes, part):
    assert part in fattn.refuses("gpt2", "encode", change(folder, tmp_path, **changes), "x")


def test_what_transformers_writes_is_read(fattn, folder, tmp_path, theirs):
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}
    changed = change(folder, tmp_path, post_processor=template, truncation={"max_length": 2}, padding={"length": 9})
    assert fattn.json("gpt2", "encode", changed, "one two three")["ids"] == theirs.encode("one two three").ids
    template["single"].insert(0, {"SpecialToken": {"id": END, "type_id": 0}})
    assert "post_processor" in fattn.refuses("gpt2", "encode", change(folder, tmp_path, post_processor=template), "x")


def test_bad_calls(fattn, folder, tmp_path):
    assert "has no tokenizer" in fattn.refuses("gpt2", "encode", tmp_path, "x")
    assert "cannot open" in fattn.refuses("gpt2", "encode", tmp_path / "none", "x")
    assert "no token has the id 999999" in fattn.refuses("gpt2", "decode", folder / "json", 999999)
    for word in ("-x", "1.5", "99999999999", "a"):
        assert "is no token's id" in fattn.refuses("gpt2", "decode", folder / "json", "--", word)
    assert "give one of them" in fattn.refuses("gpt2", "encode", folder / "json", "x", "--file", "-")
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert "nested deeper" in fattn.refuses("gpt2", "encode", tmp_path, "x")
