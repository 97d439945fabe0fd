"""Tables of training and of ring attention, from their records."""
from result_records import grid, load

ALGORITHMS = {"auto": "automatic"}


def gibibytes(count):
    return f"{count / 2**30:.1f} GiB"


def of_llm_c(name):
    """124M parameters in bf16 beside llm.c and, where it ran, transformers."""
    lines = []
    for row in load(name)["rows"]:
        theirs = row.get("transformers")
        beside = f"{theirs['tokens_per_s']:,.0f}, {gibibytes(theirs['memory'])}: {row['tokens_per_s'] / theirs['tokens_per_s']:.2f}x" if theirs else ""
        lines.append([f"{row['batch']} x {row['seqlen']}", f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s_per_tflops'] / row['llm_c']:.2f}", f"{100 * row['mfu']:.0f} %",
                      gibibytes(row["memory_bytes"]), beside])
    return grid(["sequences x tokens", "tokens/s", "of llm.c", "MFU", "memory", "transformers, compiled"], lines)


def by_algorithm(name):
    """Each algorithm at each length; a step over that of the first algorithm."""
    record, lines, first = load(name), [], {}
    for row in record["rows"]:
        base = first.setdefault(row["seqlen"], row)
        forward = f"{1e3 * row['forward_seconds']:.1f}" if row.get("forward_seconds") else ""
        cells = [str(row["seqlen"]), ALGORITHMS.get(row["algorithm"], row["algorithm"]), forward]
        if "refused" in row:
            words = row["refused"].split(";")[0].split(",")[0].removeprefix("out of memory: ")
            lines.append([*cells, "", "", f"out of memory: {words}", ""])
            continue
        rest = f"{1e3 * (row['step_seconds'] - row['forward_seconds']):.1f}" if forward else ""
        lines.append([*cells, rest, f"{1e3 * row['step_seconds']:.1f}", f"{row['tokens_per_s']:,.0f}, {gibibytes(row['memory_bytes'])}", f"{base['step_seconds'] / row['step_seconds']:.2f}x"])
    return grid(["seqlen", "attention", "forward, ms", "backward and update", "step", "tokens/s, memory", "of standard"], lines)


def several_gpus(name):
    """Processes together beside as many alone; the loss beside one that accumulates their batches."""
    lines = []
    for row in load(name)["rows"]:
        together = row["together"]
        lines.append([f"{row['batch']} x {row['seqlen']}", str(together["ranks"]), f"{together['alone_tokens_per_s']:,.0f}", f"{together['tokens_per_s']:,.0f}",
                      f"{100 * together['efficiency']:.1f} %", f"{together['largest_difference_of_losses']:.1e} in {row['steps']} steps"])
    return grid(["sequences x tokens of each", "GPUs", "one alone, tokens/s", "together", "of as many alone", "losses apart"], lines)


def ring(name):
    """Each rank of a ring beside one rank alone with as many rows; what the agreement of a call and the transfer of a hop take by themselves."""
    lines = []
    for row in load(name)["rows"]:
        passes = [row["forward"], row["forward_backward"]]
        lines.append([row["name"], *(f"{x['tflops_a_rank']:.0f} of {x['tflops_alone']:.0f}, {100 * x['share']:.1f} %" for x in passes),
                      *(f"{1e3 * x['seconds']:.2f}" for x in passes), f"{1e3 * row['exchange_seconds']:.2f}", f"{1e3 * row['transfer_seconds']:.2f}", gibibytes(row["peak_bytes"])])
    return grid(["rows a GPU, heads", "forward, TFLOP/s", "and backward", "forward, ms", "and backward", "agreement", "transfer", "memory"], lines)


def ring_errors(name):
    """By dtype and mask the greatest ratios of all methods and layouts."""
    rows, lines = load(name)["rows"], []
    for dtype, mask in dict.fromkeys((row["dtype"], row["mask"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["mask"]) == (dtype, mask)]
        greatest = {kind: [max(row[tensor][kind] for row in mine) for tensor in ("o", "dq", "dk", "dv")] for kind in ("rms_ratio", "largest_ratio")}
        lines.append([dtype, mask, *(f"{a:.2f}, {b:.2f}" for a, b in zip(*greatest.values()))])
    return grid(["dtype", "mask", "o", "dq", "dk", "dv"], lines)


def blocks():
    """By page its marks with what stands between them."""
    return {"training": {"training": of_llm_c("h200-gpt2-training"), "training-medium": by_algorithm("h200-gpt2-medium-training"),
                         "training-gpus": several_gpus("h200-gpt2-two-gpus")},
            "ring": {"ring": ring("h200-ring"), "ring-errors": ring_errors("cpu-ring-errors"), "ring-errors-gpu": ring_errors("h200-ring-errors")}}
