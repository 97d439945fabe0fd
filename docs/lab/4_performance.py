# %% [markdown]
# # Chapter 4: performance analysis
#
# Why is it as fast as it is, and what would make it faster? The answer is always a limit: arithmetic, exponentials, a
# bandwidth, or the time that it takes to start at all. Here the limits of this machine are measured, each shape is held
# against them, times are predicted and then measured, and two measurements are compared as one should.

# %%
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings

import matplotlib.pyplot as plt
import numpy as np

import fattn
import fattn.lab

GPU = bool(fattn.info()["cuda"]["devices"])
warnings.showwarning = lambda message, *_: print("warning:", message)
print("sizes:", "full, for a GPU" if GPU else "small, for a CPU")
warnings.filterwarnings("ignore", message="IProgress not found")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler says less
try:
    import torch

    TORCH = torch.cuda.is_available() or not GPU
    print(f"torch {torch.__version__}" + ("" if TORCH else ", but this torch sees no GPU: its cells are skipped"))
except ImportError as error:
    TORCH = False
    print(f"cells with torch are skipped: {error}")
WHERE = ["--device", "cuda", "--dtype", "bf16"] if GPU else ["--device", "cpu", "--dtype", "fp32"]


def command(*arguments, codes=(0,)):
    """Runs `fattn ...` as in a terminal and prints what it says."""
    done = subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments)], capture_output=True, text=True)
    print("$ fattn " + " ".join(map(str, arguments)) + "\n" + done.stdout + done.stderr)
    assert done.returncode in codes


def record(*arguments):
    """What `fattn ... --json -` found."""
    return json.loads(subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments), "--json", "-"], capture_output=True, text=True, check=True).stdout)


# %% [markdown]
# ## 1. What this machine can do at most
#
# `fattn calibrate` measures it once and keeps it. Read two quotients from the table. FLOP/s over DRAM bytes/s: a kernel that
# does fewer operations for each byte waits for memory. And FLOP/s over exponentials/s: softmax needs one exponential for each
# pair of a query and a key, and on chips with fast matrix units those can take as long as the products.

# %%
command("calibrate", *WHERE[:2])

# %% [markdown]
# ## 2. What binds where
#
# For each shape `fattn memory` counts operations, exponentials and bytes at each level, and divides each by its rate. The
# largest quotient is the limit that binds, and a lower bound of the time. Long sequences and prompts: arithmetic. Standard
# attention beyond the caches: bandwidth. Decoding, one query: it reads k and v once and does two operations with each number
# of them, so it waits for memory whatever the kernel is. And a short call is over before all processors have started.

# %%
shapes = [("short", 64, 64, 64), ("a sentence", 512, 512, 64), ("a document", 4096, 4096, 64), ("wide heads", 4096, 4096, 128), ("decode", 1, 16384, 128)]
bars = []
print(f"{'shape':>12} {'queries':>8} {'keys':>6} {'headdim':>8}   {'standard is limited by':<24} {'v2 by':<20} {'v2, at least':>12}")
for name, queries, keys, headdim in shapes:
    found = record("memory", *WHERE, "--batch", 1, "--nheads", 16, "--seqlen", queries, "--seqlen-k", keys, "--headdim", headdim, "--algorithm", "standard,v2", "--no-grad")
    rows = {row["algorithm"]: row for row in found["passes"][0]["algorithms"]}
    words = {which: row["binding"] or row["reason"] or "not known" for which, row in rows.items()}
    least = rows["v2"]["bound_s"]
    print(f"{name:>12} {queries:8} {keys:6} {headdim:8}   {words['standard'][:24]:<24} {words['v2'][:20]:<20} {least * 1e6 if least else float('nan'):9.1f} us")
    bars.append((name, {limit["name"]: limit["seconds"] for limit in rows["v2"]["limits"]}))
names = list(dict.fromkeys(limit for _, limits in bars for limit in limits))
figure, ax = plt.subplots(figsize=(9, 3.4))
width = 0.8 / len(names)
for look, limit in enumerate(names):
    ax.bar(np.arange(len(bars)) + (look - len(names) / 2 + 0.5) * width, [limits.get(limit, 0) * 1e6 for _, limits in bars], width, label=limit)
ax.set(title="v2: how long each limit takes alone", ylabel="us", yscale="log", xticks=range(len(bars)), xticklabels=[name for name, _ in bars])
ax.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# The same as a roofline: operations a byte against what can be reached. Left of the knee memory binds, right of it
# arithmetic. FlashAttention moves a shape to the right: the same operations, fewer bytes.

# %%
found = record("memory", *WHERE, "--batch", 1, "--nheads", 16, "--seqlen", 4096, "--headdim", 64, "--no-grad")
machine = found["machine"]
figure, ax = plt.subplots(figsize=(7, 3.6))
x = np.logspace(-1, 4, 200)
if machine["flops_per_s"] and machine["cache_bytes_per_s"]:
    ax.loglog(x, np.minimum(machine["flops_per_s"], x * machine["cache_bytes_per_s"]) / 1e9, "k-", label=f"{machine['chip']} - {machine['cache']}")
if machine["flops_per_s"] and machine["dram_bytes_per_s"]:
    ax.loglog(x, np.minimum(machine["flops_per_s"], x * machine["dram_bytes_per_s"]) / 1e9, "k--", label="DRAM")
for look, row in enumerate(found["passes"][0]["algorithms"]):
    if row["reason"]:
        print(f"{row['algorithm']}: {row['reason']}")
    elif row["bound_s"]:
        ax.plot(row["flops_per_byte_moved"], row["flops"] / row["bound_s"] / 1e9, "o", color=f"C{look}", label=f"{row['algorithm']}: {row['binding']}")
        print(f"{row['algorithm']:>8}: {row['flops_per_byte_moved']:7.1f} FLOP a byte, at most {row['flops'] / row['bound_s'] / 1e9:.0f} GFLOP/s, limited by {row['binding']}")
ax.set(xlabel="FLOP a byte between chip and cache", ylabel="GFLOP/s", title="16 heads of 64, N = 4096")
ax.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## 3. Predict, then measure
#
# A model of performance that was never wrong was never asked. `fattn predict` knows times before anything runs, from the
# plan and the calibration; here it is asked, then the times are measured.

# %%
folder = tempfile.mkdtemp()
sizes = ["--batch", 4, "--nheads", 16, "--headdim", 128] if GPU else ["--batch", 1, "--nheads", 4, "--headdim", 64, "--repeats", 6, "--min-time", 0, "--max-time", 0.1]
command("bench", *WHERE, *sizes, "--seqlen", 4096 if GPU else 512, "--causal", "--json", f"{folder}/bench.json")
command("predict", "--against", f"{folder}/bench.json")

# %% [markdown]
# ## 4. How it scales
#
# More sequences fill the machine until it is full; from there on tokens/s stay what they are and only the latency grows.
# Where that begins says which batch serves best.

# %%
over = dict(values=[1, 2, 4, 8, 16], nheads=16, headdim=64, seqlen=1024, dtype="bf16", device="cuda", algorithm="standard,auto") if GPU else dict(
    values=[1, 2, 4], nheads=2, headdim=64, seqlen=256, repeats=6, min_time=0, max_time=0.1, algorithm="standard,v2")
frame = fattn.lab.sweep("batch", causal=True, no_grad=True, progress=False, **over)
for sentence in frame.attrs["findings"]:
    print("-", sentence)
fattn.lab.figure(frame)

# %% [markdown]
# ## 5. Better, worse, or noise
#
# Time varies. A mean of three calls says nothing; "3 % faster" needs an interval. `fattn regress` holds two records against
# each other, row by row, and one of its answers is *undecided*. First the same program against itself, which must not be
# called worse or better (the margin is what a change may be and still be none: 1 % on a quiet machine, more for a few calls
# of a small one; `--across-clocks` lets it compare although the clock was another one meanwhile); then v1 against v2.

# %%
race = ["compare", *WHERE, *sizes, "--seqlen", 2048 if GPU else 256, "--no-grad", "--algorithm", "standard,v1,v2"]
command(*race, "--json", f"{folder}/first.json")
command(*race, "--json", f"{folder}/second.json")
command("regress", "--baseline", f"{folder}/first.json", "--current", f"{folder}/second.json", "--margin", 3 if GPU else 50, "--across-clocks", "--all", codes=(0, 1))
command("regress", "--baseline", f"{folder}/first.json", "--current", f"{folder}/first.json", "--match", "v1=v2", codes=(0, 1))

# %% [markdown]
# ## 6. Where the time goes
#
# `torch.profiler` lists the operations of standard attention: two products, a softmax, and what moves the matrix in between.
# Of fattn there is one.

# %%
if TORCH:
    from torch.profiler import ProfilerActivity, profile, record_function

    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    q, k, v = (torch.randn(2, 2048 if GPU else 256, 8, 64, device=device, dtype=dtype) for _ in range(3))

    def written_out(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v).transpose(1, 2)

    for name, attention in (("standard, written out", written_out), ("fattn", fattn.attention)):
        for _ in range(3):
            attention(q, k, v)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]) as profiler:
            with record_function(name):
                for _ in range(5):
                    attention(q, k, v)
            if GPU:
                torch.cuda.synchronize()
        own = "self_device_time_total" if GPU else "self_cpu_time_total"
        rows = sorted((row for row in profiler.key_averages() if row.key != name), key=lambda row: -getattr(row, own))[:5]
        print(f"{name}:")
        for row in rows:
            print(f"  {row.key[:60]:<60} {row.count // 5:3} a call {getattr(row, own) / 5:9.1f} us")

# %% [markdown]
# `fattn profile` goes deeper: one folder with operations, hardware counters beside the counts of section 2, memory over time
# and a timeline. `fattn watch` shows what a GPU and a running benchmark do, live.

# %%
commands = subprocess.run([sys.executable, "-m", "fattn", "--help"], capture_output=True, text=True).stdout
if re.search(r"^  profile ", commands, re.MULTILINE):
    command("profile", *WHERE, "--seqlen", 512, "--out", f"{folder}/profile")
    print(sorted(os.listdir(f"{folder}/profile")))
else:
    print("skipped: this fattn has no command `profile`")

# %% [markdown]
# ## 7. When to use which
#
# Rules come from measurements of the machine that they are for. `fattn advise --when` searches the length from which on fattn
# is faster than standard attention here, for inference, training and decoding, and prints the duels behind each sentence.

# %%
command("advise", "--when", "--longest", 4096 if GPU else 256, *WHERE[:2])

# %% [markdown]
# ## The checklist
#
# What you can explain and do now, and where it was shown:
#
# | | Shown in |
# |--|--|
# | **Theory** | |
# | explain the memory bottleneck of standard attention | 1.1 |
# | the hierarchy of a GPU's memory (HBM and SRAM) | 1.4, 4.1, 4.2 |
# | the algorithm of FlashAttention | 1.2, 1.3, 3.2 |
# | FlashAttention v1 against v2 | 1.3, 1.4 |
# | IO-aware design: count bytes, not only operations | 1.4, 4.2 |
# | **Practice** | |
# | install fattn and see that it works | 1, `fattn info`, `fattn check` |
# | implement standard attention | 1.1 |
# | exchange the attention of a model | 2.2 |
# | train on long sequences | 3.6 |
# | analyse FlashAttention's performance | this chapter |
# | **Use** | |
# | choose the attention for a project | 4.7 |
# | settings for long training | 3.1, `fattn advise` |
# | diagnose and solve the usual problems | [troubleshooting](../TROUBLESHOOTING.md) |
# | judge what FlashAttention gives | 1.7, 2.3, 4.5 |
#
# The [exercises](exercises.py) ask for some of it. [Best practice](../BEST_PRACTICE.md) is the short form.
