#!/usr/bin/env python3
"""Writes gpt2/tokenizer/character_ranges.inc: what Hugging Face's `tokenizers` takes for letters, numbers, white space and characters of words.

It asks the package itself, code point by code point, so that its Unicode version is the one that counts. `--check` compares and writes nothing."""

import argparse
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


def ranges():
    """(first code point, class, whether words have it) wherever these change."""
    words, found, before = word_finder(), [], None
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:  # surrogates: no text has them
            now = (OTHER, False)
        else:
            now = (class_of(chr(code)), 1 not in words.encode(chr(code) + "@").ids)
        if now != before:
            found.append((code, *now))
            before = now
    return found


def text_of(found):
    lines = [f"// Made by tools/make_character_classes.py from tokenizers {tokenizers.__version__}: where classes begin: letters, numbers, white space, others; W: of words.\n"]
    line = ""
    for code, name, word in found:
        entry = f"{{0x{code:x}, {name}{'W' if word else ''}}},"
        if len(line) + len(entry) + 1 > 148:
            lines.append(line + "\n")
            line = ""
        line += (" " if line else "") + entry
    return "".join(lines + [line + "\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the file is not what this version of tokenizers gives")
    arguments = parser.parse_args()
    text = text_of(ranges())
    if arguments.check:
        same = TARGET.read_text().split("\n", 1)[1] == text.split("\n", 1)[1]
        print("1 passed, 0 failed" if same else f"{TARGET.name} differs from tokenizers {tokenizers.__version__}; run {Path(__file__).name}\n0 passed, 1 failed")
        return 0 if same else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
