#!/usr/bin/env python3
"""Makes docs/TILES.md, the tiles of the CUDA kernels, from their tables in src/backend/cuda/tiles.

    make_tile_tables.py
    make_tile_tables.py --check     exit 1 if the page is missing or stale
"""
import argparse
import re
import sys

from made_file import ROOT, write_or_check

TILES = ROOT / "src/backend/cuda/tiles"
PAGE = ROOT / "docs/TILES.md"
FIELD = re.compile(r"\.(\w+) = (?:\{([^{}]*)\}|([^,{}]+))")


def fields(text):
    """{name: number, True, False or word} of designated initialisers; a tile's are beside the row's."""
    found = {}
    for name, inner, value in FIELD.findall(text):
        if inner:
            found |= fields(inner)
        else:
            word = value.strip().split("::")[-1]
            found[name] = {"true": True, "false": False}.get(word, float(word) if re.fullmatch(r"[\d.]+", word) else word)
            if isinstance(found[name], float) and found[name].is_integer():
                found[name] = int(found[name])
    return found


def rows_of(file, table):
    """The rows of a table, in their order."""
    text = re.sub(r"//[^\n]*", "", (TILES / file).read_text(encoding="utf-8"))
    begin = re.search(rf"{table}\[\] = \{{", text)
    if begin is None:
        raise SystemExit(f"make_tile_tables.py: {file} has no table {table}; it knows tables of designated rows")
    rows, depth, start = [], 1, begin.end()
    for at in range(begin.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if text[at] == "{" and depth == 2:
            start = at
        elif text[at] == "}" and depth == 1:
            rows.append(fields(text[start + 1 : at]))
        elif depth == 0:
            return rows
    raise SystemExit(f"make_tile_tables.py: {table} of {file} does not end")


def words(*chosen):
    """Those that are said; else plain problems."""
    return "; ".join(word for word, said in chosen if said) or "plain"


def v2_forward(row):
    kinds = words(("batch invariant", row.get("own")), ("few queries", row.get("few")), ("no mask", row.get("causal") is False),
                  ("few registers", row.get("heavy") and not row.get("staged") and row.get("hides") is not False),
                  ("ALiBi or dropout alone", row.get("hides") is False), ("bias or a mask of pairs", row.get("staged")))
    return (row["level"], "fp32" if row.get("f32") else "16 bits", row["headdim"], kinds, 16 * row["warps"] * row["row_tiles"], row["block_n"], row["stages"], row["warps"],
            "registers" if row.get("queries_in_registers") else "shared memory", row["ctas"])


def v2_backward(row):
    kinds = words(("registers just suffice", row.get("tight")), ("one term", row.get("one_term")), ("few registers", row.get("heavy") and not row.get("staged") and not row.get("one_term")),
                  ("bias or a mask of pairs", row.get("staged")), ("split before", row.get("query_stages") == 2), (f"{row.get('parts')} parts of the columns", row.get("parts", 1) > 1))
    return (row["level"], "fp32" if row.get("f32") else "16 bits", row["headdim"], kinds, row["block_m"], row["block_n"], row["chunk"], row["key_groups"], row["group_warps"],
            "yes" if row.get("pipelined") else "no", row.get("ctas", 1))


SCORES = {"kDropout": "dropout", "kUncapped": "no softcap", "kPlain": "no options", "kCapped": "softcap", "kDocuments": "documents", "kTightDocuments": "documents, few registers",
          "kMask": "a mask of pairs", "kTerms": "bias"}


def v3_forward(row):
    terms = row.get("stages_terms", 0)
    return (row["width"], {"kFull": "none", "kCausal": "causal", "kWindow": "window"}[row["mask"]], row.get("most_keys", "any"), SCORES[row["scores"]] if "scores" in row else "any",
            64 * row["groups"], row["block_n"], f"{row['stages_k']} + {row['stages_v']}" + (f" + {terms}" if terms else ""), row["query_buffers"],
            "in turns" if row.get("ping_pong") else "skipping" if row.get("skip") else "as they come", f"{row['producer_registers']}, {row['consumer_registers']}", row.get("speed", 1))


def v3_backward(row):
    kinds = words(("causal", row.get("causal")), ("dropout", row.get("dropout")))
    return (row["width"], kinds, "roles" if row.get("by_role") else "keys", 64 if row.get("by_role") else 64 * row["groups"], row["groups"], row["stages"], "yes" if row.get("own_loader") else "no",
            f"{row['main_registers']}, {row['dq_registers']}, {row['loader_registers']}")


def v3_forward_f32(row):
    return (row["headdim"], row["headdim_v"], 64 * row["groups"], f"{row['stages_k']} + {row['stages_v']}", "registers" if row.get("queries_in_registers") else "shared memory",
            f"{row['producer_registers']}, {row['consumer_registers']}")


def decode(row):
    return (row["headdim"], 16 * row["row_tiles"] * row["row_warps"], row["block_n"], row["teams"], row["row_warps"], row["stages"], "registers" if row.get("queries_in_registers") else "shared memory",
            row["ctas"])


TABLES = (
    ("v2, forward", "v2_forward.h", "kV2ForwardTable", v2_forward, "Level | dtype | headdim up to | Problems | Queries | Keys | Stages | Warps | Queries lie in | CTAs a multiprocessor",
     "The first row is taken that has the problem and whose CTAs, as many as it wants on a multiprocessor, fit into its shared memory; if there is none, the first of which one fits. "
     "`kV2ForwardHeavy` and `kV2BackwardHeavy` say for which problems there are few registers: terms of pairs, dropout, in fp32 also softcap and windows."),
    ("v2, backward", "v2_backward.h", "kV2BackwardTable", v2_backward,
     "Level | dtype | headdim up to | Problems | Queries | Keys | Queries of a step | Groups of keys | Warps of a group and role | Copies ahead | CTAs a multiprocessor", "Likewise."),
    ("v3, forward", "v3_forward.h", "kV3ForwardTable", v3_forward,
     "Width | Mask | Keys up to | Scores | Queries | Keys | Stages of k + v (+ bias) | Buffers of queries | Warpgroups | Registers: copying, computing | Speed",
     "The first row that has the problem; in problems of few waves, and of packed sequences, the one that takes the least time by `Speed` and the number of waves. "
     "`src/backend/cuda/tiles/v3_forward_rules.h` says which problems have which scores."),
    ("v3, backward", "v3_backward.h", "kV3BackwardTable", v3_backward, "Width | Problems | Warpgroups share | Keys | Warpgroups | Stages of queries | Load warps apart | Registers: main, dq, loader",
     "The first row that is wide enough, for a causal mask or dropout where it says so, and has registers for the problem."),
    ("v3, forward, fp32", "v3_forward_f32.h", "kV3ForwardF32Table", v3_forward_f32, "headdim up to | headdim_v up to | Queries | Stages of k + v | Queries lie in | Registers: copying, computing",
     "The first row that is wide enough."),
    ("decode", "decode.h", "kDecodeTable", decode, "headdim up to | Rows | Keys of a step | Teams | Warps of a team | Stages | Queries lie in | CTAs a multiprocessor",
     "Tile and number of splits are those with the least time by a model of the device (`src/backend/cuda/decode.cpp`)."),
)


def made():
    page = ["# Tiles", "", *fold("Made by `tools/make_tile_tables.py` from the tables in `src/backend/cuda/tiles`, in their order. `fattn bench --explain` says which tile a call "
                                 "took; what was measured is in [LOG](results/LOG.md), which kernels would spill in [spills](results/spills.json).")]
    for title, file, table, line, header, choice in TABLES:
        rows = [line(row) for row in rows_of(file, table)]
        if not rows or any(len(row) != header.count("|") + 1 for row in rows):
            raise SystemExit(f"make_tile_tables.py: {table} has no rows, or they do not fit its header")
        page += ["", f"## {title}", "", *fold(choice), "", f"| {header} |", "|" + "--|" * len(rows[0]), *("| " + " | ".join(map(str, row)) + " |" for row in rows)]
    return "\n".join(page) + "\n"


def fold(text):
    """In lines of 120 characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > 120:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is missing or stale")
    return write_or_check(PAGE, made(), "make_tile_tables.py", parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
