#!/usr/bin/env python3
"""Writes gpt2/tokenizer/character_ranges.inc: what Hugging Face's `tokenizers` takes for letters, numbers, white space and characters of words.

It asks the package itself, code point by code point, so that its Unicode version is the one that counts. `--check` compares and writes nothing."""

import argparse
import re
import sys
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

TARGET = Path(__file__).resolve().parent.parent / "gpt2/tokenizer/character_ranges.inc"
SPLITTER = pre_tokenizers.ByteLevel(add_prefix_space=False)
LETTER, NUMBER, SPACE, OTHER = "L", "N", "S", "O"


def word_finder():
    """A tokenizer that finds the token "@" only where it stands alone: where the character before it is none of a word."""
    tokenizer = Tokenizer(models.BPE({"x": 0}, []))
    tokenizer.add_tokens([AddedToken("@", single_word=True, normalized=False)])
    return tokenizer


def class_of(character):
    """What a character joins: a piece goes on while the class stays the same."""
    for name, neighbour in ((LETTER, "a"), (NUMBER, "1"), (OTHER, "!")):
        if len(SPLITTER.pre_tokenize_str(neighbour + character)) == 1:
            return name
    return SPACE


def value_of(code, words):
    """Its class, and whether words have it."""
    if 0xD800 <= code < 0xE000:  # surrogates: no text has them
        return OTHER
    return class_of(chr(code)) + ("" if 1 in words.encode(chr(code) + "@").ids else "W")


def ranges():
    """(first code point, value) wherever the value changes."""
    words, found = word_finder(), []
    for code in range(0x110000):
        value = value_of(code, words)
        if not found or found[-1][1] != value:
            found.append((code, value))
    return found


def differences(every):
    """Code points of the file whose value is another one; of those between its ranges' ends one in so many."""
    found = [(int(first, 16), value) for first, value in re.findall(r"\{0x([0-9a-f]+), ([LNSOW]+)\}", TARGET.read_text())]
    words = word_finder()
    ends = [first for first, _ in found[1:]] + [0x110000]
    return [
        code
        for (first, value), end in zip(found, ends)
        for code in sorted({first, end - 1, *range(first, end, every)})
        if value_of(code, words) != value
    ]


def text_of(found):
    lines = [f"// Made by tools/make_character_classes.py from tokenizers {tokenizers.__version__}: where classes begin: letters, numbers, white space, others; W: of words.\n"]
    line = ""
    for code, value in found:
        entry = f"{{0x{code:x}, {value}}},"
        if len(line) + len(entry) + 1 > 148:
            lines.append(line + "\n")
            line = ""
        line += (" " if line else "") + entry
    return "".join(lines + [line + "\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the file is not what this version of tokenizers gives")
    parser.add_argument("--every", type=int, default=1, help="with --check: look at one code point in so many, and at the ends of ranges")
    arguments = parser.parse_args()
    if arguments.check:
        wrong = differences(arguments.every)
        for code in wrong[:10]:
            print(f"U+{code:04X} is another one in tokenizers {tokenizers.__version__}; run {Path(__file__).name}")
        print(f"{not wrong:d} passed, {len(wrong)} failed")
        return 1 if wrong else 0
    TARGET.write_text(text_of(ranges()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
