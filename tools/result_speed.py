"""Tables of speed for the pages of docs/results, each from its records: a function makes a block, `blocks` says which page has it."""
from result_records import PASS_NAMES, PASSES, column_name, date_of, grid, link, load, mean, microseconds, prose, who
from result_serving import pages_with_launch

COLUMNS = [(headdim, causal) for headdim in (64, 128, 256) for causal in (False, True)]
ALL_COLUMNS = [(headdim, causal) for headdim in (64, 96, 128, 192, 256) for causal in (False, True)]
PEERS = ("flash", "cudnn")


def cells_of(record):
    """By (dtype, pass, seqlen, headdim, causal) the rows of each contestant: "fattn", or a peer's algorithm. Decode is left out."""
    cells = {}
    for row in record["rows"]:
        if row["status"] == "ok" and row["seqlen_q"] == row["seqlen_k"]:
            key = (row["dtype"], row["pass"], row["seqlen_q"], row["headdim"], row["causal"])
            cells.setdefault(key, {})["fattn" if row["provider"] == "fattn" else row["algorithm"]] = row
    return cells


def ratio(cell, peer):
    return cell[peer]["time_median_s"] / cell["fattn"]["time_median_s"]


def suite(name):
    """Two tables of the bf16 cells: rates, and ratios to both peers."""
    record = load(name)
    cells = cells_of(record)
    lengths = sorted({key[2] for key in cells})
    titles = ["pass", "seqlen"] + [column_name(*column) for column in COLUMNS]

    def lines(text):
        return [[PASS_NAMES[which], str(n)] + [text(cells["bf16", which, n, *column]) for column in COLUMNS] for which in PASSES for n in lengths]

    return (prose(f"{link(name)}, {date_of(record)}, {record['environment']['gpus'][0]['name']}: TFLOP/s of visible pairs.")
            + "\n" + grid(titles, lines(lambda cell: f"{cell['fattn']['flops_per_s'] / 1e12:.0f}"))
            + "\n" + prose("Times as fast as FlashAttention-2 / cuDNN of PyTorch, in turns in the same run:")
            + "\n" + grid(titles, lines(lambda cell: " / ".join(f"{ratio(cell, peer):.2f}" for peer in PEERS))))


def suites(names):
    """A line a record, dtype and pass: mean, least and number of cells in which the peer is faster."""
    lines = []
    for name in names:
        cells = cells_of(load(name))
        for dtype in dict.fromkeys(key[0] for key in cells):
            for which in PASSES:
                of = [cell for key, cell in cells.items() if key[:2] == (dtype, which) and "fattn" in cell]
                ratios = [[ratio(cell, peer) for cell in of] for peer in PEERS]
                lines.append([link(name, name), f"{dtype} {PASS_NAMES[which]}", str(len(of))] + [f"{mean(x):.2f}, {min(x):.2f}, {sum(r < 1 for r in x)}" for x in ratios])
    return grid(["record", "pass", "cells", "FlashAttention-2", "cuDNN"], lines)


def fp16(names):
    """fp16's rate over bf16's, where a suite has both."""
    lines = []
    for name in names:
        cells = cells_of(load(name))
        for who_, title in (("fattn", "fattn"), ("flash", "FlashAttention-2"), ("cudnn", "cuDNN")):
            for which in PASSES:
                n = next(key[2] for key in cells if key[0] == "fp16")
                lines.append([link(name, name), title, PASS_NAMES[which]] + [
                    f"{cells['bf16', which, n, *c][who_]['time_median_s'] / cells['fp16', which, n, *c][who_]['time_median_s']:.2f}" for c in COLUMNS
                ])
    return grid(["record", "who", "pass"] + [column_name(*c) for c in COLUMNS], lines)


def algorithms(names):
    lines = []
    for name in names:
        rows = load(name)["rows"]
        for which in PASSES:
            of = [row for row in rows if row["pass"] == which]
            lines.append([PASS_NAMES[which], link(name, str(of[0]["seqlen_q"]))] + [
                f"{microseconds(row['time_median_s'])}, {row['flops_per_s'] / 1e12:.0f}, {row['extra_bytes'] / 2**20:.0f}, {row['moved_bytes_model'] / 2**20:.0f}" for row in of
            ])
    return grid(["pass", "seqlen"] + [row["algorithm"] for row in of], lines)


def headline(name):
    rows = load(name)["rows"]
    titles = ["torch, written out" if row["provider"] == "torch-standard" else who(row) for row in rows if row["pass"] == "fwd"]
    lines = [[PASS_NAMES[which] + ", us"] + [f"{row['time_median_s'] * 1e6:.0f}" for row in rows if row["pass"] == which] for which in PASS_NAMES]
    memory = ["both, MiB"] + [f"{row['extra_bytes'] / 2**20:.0f}" for row in rows if row["pass"] == "fwdbwd"]
    return grid([link(name, "record")] + titles, lines + [memory])


def headdims(name):
    rates = {(row["pass"], row["headdim"], row["causal"], row["seqlen"]): row["tflops"] for row in load(name)["rows"]}
    between = {96: (64, 128), 192: (128, 256)}
    lines = []
    for which in PASSES:
        for n in sorted({key[3] for key in rates}):
            lines.append([PASS_NAMES[which], str(n)] + [
                f"{rates[which, d, causal, n]:.0f}" + (f", {rates[which, d, causal, n] * 2 / sum(rates[which, x, causal, n] for x in between[d]):.2f}" if d in between else "")
                for d, causal in ALL_COLUMNS
            ])
    return grid(["pass", "seqlen"] + [column_name(*c) for c in ALL_COLUMNS], lines)


def tune(names):
    """The rate of the fastest tile of a search over that of the planner's choice at the time."""
    lines = []
    for name in names:
        found = {(p["headdim"], p["causal"], p["seqlen"]): p["tiles"] for p in load(name)["problems"]}
        lengths = sorted({key[2] for key in found})
        for column in dict.fromkeys(key[:2] for key in found):
            def best(tiles):
                own = [tile["flops_per_s"] for tile in tiles if tile["of_table"]]
                return f"{max(tile['flops_per_s'] for tile in tiles) / max(own):.3f}" if own else "-"
            lines.append([link(name, name.split("-")[0]), column_name(*column)] + [best(found[(*column, n)]) if (*column, n) in found else "" for n in lengths])
    return grid(["record", "headdim"] + [str(n) for n in lengths], lines)


def sigma(name):
    lines = [[column_name(r["headdim"], r["causal"]), str(r["seqlen"])] + [
        text for s in ("sigma1", "sigma3") for text in (f"{r[s + '_us']:.0f}", f"{r[s + '_before_us'] / r[s + '_us']:.2f}", f"{r[s + '_cudnn_over_fattn']:.2f}")
    ] for r in load(name)["rows"]]
    return grid(["headdim", "seqlen", "sigma 1, us", "before / now", "over cuDNN", "sigma 3, us", "before / now", "over cuDNN"], lines)


def wild(name):
    """Rates at large scores over those of standard deviation 1."""
    rates = {(r["headdim"], r["causal"], r["seqlen"], r["sigma"]): r["tflops"] for r in load(name)["rows"] if r["pass"] == "fwd" and r["dtype"] == "bf16" and r["headdim"] == r["headdim_v"]}
    sigmas = sorted({key[3] for key in rates} - {1})
    lines = [[column_name(d, causal), str(n)] + [f"{rates[d, causal, n, s] / rate:.2f}" for s in sigmas]
             for (d, causal, n, one), rate in rates.items() if one == 1 and all((d, causal, n, s) in rates for s in sigmas)]
    return grid(["headdim", "seqlen"] + [f"sigma {s:g}" for s in sigmas], lines)


def fp32(name):
    lines = []
    for r in sorted(load(name)["rows"], key=lambda r: (PASSES.index(r["pass"]), r["headdim"], r["causal"], r["seqlen"])):
        torch, own = r["torch_memory_efficient_ms"], r.get("v3_ms", r["v2_ms"])
        lines.append([PASS_NAMES[r["pass"]], column_name(r["headdim"], r["causal"]), str(r["seqlen"]), f"{torch:.2f}", f"{r['v2_ms']:.2f}",
                      f"{r['v3_ms']:.2f}" if "v3_ms" in r else "", f"{torch / own:.2f}x"])
    return grid(["pass", "headdim", "seqlen", "PyTorch, ms", "v2, ms", "v3, ms", "times as fast"], lines)


def first_call(name):
    lines = []
    rows = load(name)["rows"]
    for machine in sorted({row["machine"] for row in rows}):
        of = [row for row in rows if row["machine"] == machine]
        spans = [sorted(row[key] / 1e3 for row in of if row.get(key)) for key in ("forward_ms", "backward_ms")]
        phases = [sorted(k[key] for row in of for k in row.get("kernels", []) if k["kernel"] == "fattn_v3_fwd" and key in k) for key in ("frontend_ms", "optimizer_ms", "ptxas_ms")]
        lines.append([str(machine), str(len(of))] + [f"{x[0]:.2f} to {x[-1]:.2f} s" for x in spans] + [f"{x[0]:.0f} to {x[-1]:.0f} ms" if x else "" for x in phases])
    return grid(["machine", "processes", "first forward", "first backward", "front end", "optimizer", "ptxas"], lines)


def decode(name):
    lines = []
    for record in load(name)["records"]:
        rows = {who(row): row for row in record["rows"]}
        own = rows["fattn"]
        lines.append([f"{own['batch']}, {own['seqlen_k']}, {own['nheads']}/{own['nheads_k']}"] + [f"{rows[x]['time_median_s'] * 1e6:.1f}" for x in ("fattn", "cuDNN", "FlashAttention-2")]
                     + [f"{own['bytes'] / own['time_median_s'] / 1e12:.2f}"])
    return grid(["batch, seqlen_k, heads", "fattn, us", "cuDNN", "FlashAttention-2", "TB/s"], lines)


def decode_suite(name):
    cells = {}
    for row in load(name)["rows"]:
        cells.setdefault((row["batch"], row["seqlen_k"], row["nheads"], row["nheads_k"]), {})[who(row)] = row
    lines = [[f"{b}, {n}, {h}/{hk}"] + [f"{rows[x]['time_median_s'] * 1e6:.1f}" for x in ("fattn", "cuDNN", "FlashAttention-2")]
             + [f"{rows['fattn']['bytes'] / rows['fattn']['time_median_s'] / 1e12:.2f}"] for (b, n, h, hk), rows in cells.items()]
    return grid(["batch, seqlen_k, heads", "fattn, us", "cuDNN", "FlashAttention-2", "TB/s"], lines)


def decode_cpu(names):
    lines = []
    for name in names:
        for row in load(name)["rows"]:
            if row["status"] == "ok" and row["provider"] == "fattn" and row["seqlen_q"] == 1:
                lines.append([link(name, name), row["dtype"], f"{row['batch']}, {row['seqlen_k']}, {row['nheads']}/{row['nheads_k']}", microseconds(row["time_median_s"]),
                              f"{row['bytes'] / row['time_median_s'] / 1e9:.0f}", f"{100 * row['bandwidth_fraction']:.0f} %"])
    return grid(["record", "dtype", "batch, seqlen_k, heads", "us", "GB/s", "of the read rate"], lines)


def compared(names):
    """Records of `fattn compare`: milliseconds, the time over fattn's, memory of both passes."""
    lines = []
    for name in names:
        rows = load(name)["rows"]
        for whose in dict.fromkeys(who(row) for row in rows):
            of = {row["pass"]: row for row in rows if who(row) == whose}
            own = {row["pass"]: row for row in rows if who(row) == "fattn"}
            first = of["fwd"]
            lines.append([link(name, f"{first['seqlen_q']}, {column_name(first['headdim'], first['causal'])}"), whose]
                         + [f"{of[which]['time_median_s'] * 1e3:.3f}" + ("" if whose == "fattn" else f" ({of[which]['time_median_s'] / own[which]['time_median_s']:.2f})") for which in PASS_NAMES]
                         + [f"{of['fwdbwd']['extra_bytes'] / 2**20:.0f}"])
    return grid(["seqlen, headdim", "who", "forward, ms", "backward", "both", "MiB of both"], lines)


def transformers(name):
    rows = load(name)["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    names = {"step": "training step", "forward": "forward", "generate": "generation"}
    cases = dict.fromkeys((row["size"], row["phase"], row["dropout"]) for row in rows)
    lines = []
    for size, phase, dropout in cases:
        of = {row["variant"]: row for row in rows if (row["size"], row["phase"], row["dropout"]) == (size, phase, dropout)}
        lines.append([f"{size}, {names[phase]}" + (f", dropout {dropout:g}" if dropout else "")]
                     + [f"{of[v]['median_ms']:.{2 if of[v]['median_ms'] < 10 else 1}f} ({of[v]['spread_ms']:.1f})" if v in of else "" for v in variants])
    return grid(["model"] + variants, lines)


def python(name):
    record = load(name)
    phases = list(record["overhead_us"]["fattn.attention"])
    lines = [[f"`{whose}`"] + [f"{times[phase]:.1f}" if phase in times else "" for phase in phases] for whose, times in record["overhead_us"].items()]
    windows = [[w["attention"], {"forward": "forward", "step": "training step"}[w["phase"]], f"{w['median_ms']:.2f}", str(w["peak_mib"])] for w in record["windows"]]
    return grid(["us of the host a call"] + phases, lines) + "\n" + grid(["compiled Mistral, window 512", "phase", "ms", "peak MiB"], windows)


def cpu_suites(names):
    lines = []
    for name in names:
        rows = load(name)["rows"]
        for dtype in ("fp32", "bf16", "fp16"):
            for which in PASSES:
                of = {}
                for row in rows:
                    if row["status"] == "ok" and (row["dtype"], row["pass"]) == (dtype, which):
                        key = tuple(row[x] for x in ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v", "causal"))
                        of.setdefault(key, {})["fattn" if row["provider"] == "fattn" else "peer"] = row
                of = [cell for cell in of.values() if len(cell) == 2]
                ratios = [ratio(cell, "peer") for cell in of]
                unsure = sum(cell["fattn"]["time_ci_high_s"] >= cell["peer"]["time_ci_low_s"] and cell["peer"]["time_ci_high_s"] >= cell["fattn"]["time_ci_low_s"] for cell in of)
                lines.append([link(name, name), f"{dtype} {PASS_NAMES[which]}", str(len(of)), f"{mean(ratios):.2f}x", f"{min(ratios):.2f}x", f"{max(ratios):.2f}x", str(unsure)])
    return grid(["record", "pass", "problems", "mean", "least", "most", "undecided"], lines)


def sweeps(names):
    lines = []
    for name in names:
        record = load(name)
        own = [c for c in record["sweep"]["contestants"] if c != record["sweep"]["baseline"]]
        for contestant in own:
            cells = []
            for which in PASS_NAMES:
                rows = [r for r in record["rows"] if r["contestant"] == contestant and r["pass"] == which and r["status"] == "ok" and r["speedup_over_baseline"]]
                cells.append(", ".join(f"{r['speedup_over_baseline']:.2f}" for r in rows))
            last = [r for r in record["rows"] if r["contestant"] == contestant and r["status"] == "ok" and r["memory_share_of_baseline"]]
            values = [r["value"] for r in last if r["pass"] == "fwd"]
            what = record["sweep"]["preset"] or "two cores"
            lines.append([link(name, what), f"{record['sweep']['over']} " + ", ".join(map(str, values)), contestant] + cells + [f"{100 * last[-1]['memory_share_of_baseline']:.0f} %" if last else ""])
    return grid(["sweep", "over", "who", "forward", "backward", "both", "memory"], lines)


def prediction(name):
    """A sentence with what the rows say, in the words that tests/python/test_predict_record.py looks for, and a line a pass."""
    record = load(name)
    scores, count = record["scores"], record["held_out"]["count"]
    f, b = scores["fwd"], scores["bwd"]

    def percent(score, key, digits=0):
        return f"{100 * abs(score[key]):.{digits}f}"

    def way(score):
        return "too long" if score["worst_error_fraction"] > 0 else "too short"

    text = (f"{link(name)}: {count} shapes that nothing was fitted to, {date_of(record)}. Mean absolute error {percent(f, 'mean_absolute_error_fraction', 1)} % forward and "
            f"{percent(b, 'mean_absolute_error_fraction', 1)} % backward; 95 of 100 within {percent(f, 'error_95_fraction')} and {percent(b, 'error_95_fraction')} %. "
            f"Worst: {f['worst']} forward ({percent(f, 'worst_error_fraction')} % {way(f)}), {b['worst']} backward ({percent(b, 'worst_error_fraction')} % {way(b)}).")
    lines = [[PASS_NAMES[which], str(s["count"]), f"{percent(s, 'mean_absolute_error_fraction', 1)} %", f"{percent(s, 'error_95_fraction')} %", f"{100 * s['bias_fraction']:+.1f} %",
              f"{percent(s, 'covered_fraction')} of 90", f"{s['memory_exact']} of {s['memory_count']}"] for which, s in (("fwd", f), ("bwd", b))]
    return prose(text) + "\n" + grid(["pass", "timed", "mean error", "95 of 100", "bias", "in the interval", "memory right"], lines)


SUITES = ("h100-suite", "h200-suite", "h200-v2-suite")
LENGTHS = (512, 1024, 2048, 4096, 8192)
PRESETS = ("headline", "gpt2-medium", "seqlen", "batch", "heads", "embed")
CPU_PRESETS = tuple(preset for preset in PRESETS if preset != "seqlen")
CPU_CORES = {"embed": 16, "gpt2-medium": 16}  # others: 8
CPU_SUITES = ("cpu-suite-2-cores-zen4", "cpu-suite-quick-16-cores")


def blocks():
    """By page its marks with what stands between them."""
    return {
        "hopper": {"suite": suite("h100-suite"), "suites": suites(SUITES), "fp16": fp16(SUITES[:2]), "algorithms": algorithms([f"h200-algorithms-b4-s{n}" for n in LENGTHS]),
                   "headline": headline("h200-headline"), "headdims": headdims("h100-v3-headdims"), "sigma": sigma("h200-v3-sigma"), "wild": wild("h200-v3-more"),
                   "fp32": fp32("h200-fp32-shapes"), "first-call": first_call("h100-first-call"), "tune": tune(("h100-v3-backward-tune", "h200-v3-backward-tune"))},
        "decode": {"decode": decode("h200-decode"), "decode-suite": decode_suite("h200-suite-decode"), "decode-cpu": decode_cpu(CPU_SUITES), "decode-pages": pages_with_launch("h200-pages")},
        "peers": {"peers": compared(("h200-peers-b4-s4096-d64", "h200-peers-b4-s4096-d128")),
                  "packages": compared(("h200-flash-attention-4-d64", "h200-flash-attention-4-d128", "h200-xformers")),
                  "transformers": transformers("h200-gpt2"), "python": python("h200-python")},
        "cpu": {"cpu-suites": cpu_suites(CPU_SUITES)},
        "sweeps": {"sweeps-gpu": sweeps([f"h100-sweep-{preset}" for preset in PRESETS]),
                   "sweeps-cpu": sweeps([f"cpu-sweep-{preset}-{CPU_CORES.get(preset, 8)}-cores" for preset in CPU_PRESETS] + ["cpu-sweep-2-cores-zen5", "cpu-sweep-seqlen-2-cores"])},
        "README": {"suites-short": suites(SUITES[:2]), "cpu-short": cpu_suites(CPU_SUITES)},
        "predictions": {"predict-cpu": prediction("cpu-predict"), "predict-gpu": prediction("h200-predict")},
    }
