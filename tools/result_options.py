"""Tables of what options cost for docs/results/options.md, each from its records."""
from result_records import PASS_NAMES, PASSES, column_name, grid, load

OPTIONS = {
    "softcap": "softcap 30", "ALiBi": "ALiBi", "dropout": "dropout 0.1", "mask keys": "mask of keys, a quarter hidden", "mask one": "mask of pairs for all, likewise",
    "bias heads": "bias, one a head", "bias one": "bias, one for all", "bias heads in fp32": "bias in fp32, one a head", "bias heads with gradient": "bias, one a head, with its gradient",
    "lengths": "lengths, half to all keys", "packed": "packed, a quarter to all rows", "documents": "4 documents of equal length", "window": "window, over causal rows",
}


def option_of(text):
    """The name of an option without its numbers, but where they say which of several it is."""
    name = text if text in OPTIONS else text.split()[0]
    if name not in OPTIONS:
        raise SystemExit(f"the option '{text}' of a record has no row; add it to OPTIONS in tools/result_options.py")
    return name


def prices(names):
    """More time for a visible pair in %, forward and backward: a column for each dtype, headdim and mask of the records. What a run measured twice is the mean."""
    cells, columns = {}, {}
    for name in names:
        for one in load(name)["summary"]:
            words = one["problem"].split()
            dtype, headdim, causal = words[4], int(words[3][1:]), words[-1] == "causal"
            column, option = (dtype, headdim, causal), option_of(one["option"])
            columns[column] = None
            cells.setdefault((option, column), {}).setdefault(one["pass"], []).append(one["price"])

    def percent(prices):
        return f"{round(100 * sum(prices) / len(prices))}"

    for dtype, headdim, causal in [c for c in columns if c[2] and {option for option, at in cells if at == c} == {"window"}]:
        cells["window", (dtype, headdim, False)] = cells["window", (dtype, headdim, causal)]  # a column for windows alone is none: their rows say "causal"
        del columns[dtype, headdim, causal]
    several = len({dtype for dtype, _, _ in columns}) > 1
    lines = []
    for option, title in OPTIONS.items():
        found = [cells.get((option, column)) for column in columns]
        if any(found):
            lines.append([title] + [f"{percent(cell['fwd'])}, {percent(cell['bwd'])}" if cell else "" for cell in found])
    return grid(["option"] + [(f"{dtype}, " if several else "") + column_name(headdim, causal) for dtype, headdim, causal in columns], lines)


def windows(name):
    rows = [r for r in load(name)["rows"] if r["window_left"] >= 0 and not r["softcap"]]
    headdims = list(dict.fromkeys(r["headdim"] for r in rows))
    lines = []
    for which in PASSES:
        of = {r["headdim"]: r for r in rows if r["pass"] == which}
        lines.append([PASS_NAMES[which]] + [f"{of[d]['tflops']:.0f}, {of[d]['rate_of_dense']:.2f}" if d in of else "" for d in headdims])
    return grid(["headdim"] + [str(d) for d in headdims], lines)


FEATURES = {
    "lengths_full": "lengths", "alibi": "ALiBi", "dropout": "dropout", "mask_of_keys": "mask of keys", "mask_of_pairs": "mask of pairs", "bias_bf16_one_a_head": "bias bf16",
    "bias_fp32_one_a_head": "bias fp32", "bias_fp32_one": "bias fp32, one",
}


def features(name):
    """Time of algorithm v2 with a feature over that of its plain attention. (What v3 takes with them has changed since: the prices above.)"""
    cells = {}
    for r in load(name)["rows"]:
        if r["algorithm"] != "v2":
            continue
        key = (r["dtype"], r["pass"], r["headdim"], r["causal"], r["seqlen"], r["batch"])
        cells.setdefault(key, {})[r["feature"]] = r.get("of_plain")
    lines = []
    for (dtype, which, headdim, causal, seqlen, batch), found in sorted(cells.items(), key=lambda item: (item[0][0], PASSES.index(item[0][1]), item[0][2:])):
        if any(found.get(feature) for feature in FEATURES):
            lines.append([f"{dtype} {PASS_NAMES[which]}", column_name(headdim, causal), f"{batch} x {seqlen}"] + [f"{found[f]:.2f}" if found.get(f) else "" for f in FEATURES])
    return grid(["dtype, pass", "headdim", "batch x seqlen"] + list(FEATURES.values()), lines)


def packed(name):
    rows = load(name)["rows"]
    kinds = list(dict.fromkeys(r["sequences"] for r in rows))
    titles = {"ragged": "24 uneven", "ragged_long": "6 uneven", "ragged_short": "64 uneven"}
    lines = []
    for column in dict.fromkeys((r["headdim"], r["causal"]) for r in rows):
        of = {r["sequences"]: r for r in rows if (r["headdim"], r["causal"]) == column}
        lines.append([column_name(*column)] + [f"{of[k]['rate_of_dense']:.2f}, {of[k]['v2_over_v3']:.2f}x" if k in of else "" for k in kinds])
    return grid(["headdim"] + [titles.get(k, k) for k in kinds], lines)


def any_rows(name):
    rows = load(name)["rows"]
    lines = []
    for n in dict.fromkeys(r["seqlen"] for r in rows):
        for options in dict.fromkeys(r["options"] for r in rows if r["seqlen"] == n and r["options"]):
            of = {r["version"]: r for r in rows if (r["seqlen"], r["options"]) == (n, options)}
            lines.append([str(n), f"`{options}`"] + [f"{of['before'][key]:.2f}, {of['since'][key]:.2f} ({of['before'][key] / of['since'][key]:.2f}x)" for key in ("forward_ms", "backward_ms")])
    return grid(["seqlen", "option", "forward, ms", "backward, ms"], lines)


def blocks():
    return {"options": {
        "prices-h100": prices(("h100-prices", "h100-prices-fp32")), "prices-h200": prices(("h200-prices",)), "prices-zen5": prices(("cpu-prices-2-cores-zen5",)),
        "prices-amx": prices(("cpu-prices-amx-4-cores",)), "windows": windows("h200-features"), "features": features("h200-pair-features"),
        "packed": packed("h200-packed-backward"), "any-rows": any_rows("h100-any-rows"),
    }}
