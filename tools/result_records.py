"""What the makers of tables share: records of docs/results, means, grids in Markdown, lines of at most 120 characters."""
import functools
import json
import math
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PASSES = ("fwd", "bwd")
PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "both"}
LONGEST = 120


@functools.cache
def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def link(name, text=None):
    return f"[{text or name + '.json'}]({name}.json)"


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def grid(titles, lines):
    return "\n".join("|" + "|".join(row) + "|" if row[0] == "--" else "| " + " | ".join(row) + " |" for row in [titles, ["--"] * len(titles)] + lines) + "\n"


def prose(text):
    """Lines that break between words; a link or code with spaces may be broken, too: Markdown reads it the same."""
    return textwrap.fill(text, LONGEST, break_long_words=False, break_on_hyphens=False) + "\n"


def column_name(headdim, causal):
    return f"{headdim} causal" if causal else f"{headdim}"


def who(row):
    """fattn's own algorithms by name in comparisons of several, others by what they are."""
    names = {"flash": "FlashAttention-2", "cudnn": "cuDNN", "flex-attention": "FlexAttention", "flash-attn": "FlashAttention 4", "xformers": "xFormers"}
    return names.get(row["algorithm"], names.get(row["provider"], row["provider"]))


def microseconds(seconds):
    return f"{seconds * 1e6:.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def date_of(record):
    return record.get("environment", record).get("date", "")[:10]
