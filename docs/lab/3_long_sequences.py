# %% [markdown]
# # Chapter 3: long sequences
#
# What a long sequence costs, why the backward pass computes the scores again, which work masks save, and how to train on
# whole files instead of snippets. The parts that train need `torch` and `transformers`; without them their cells say so and do
# nothing.

# %%
import contextlib
import glob
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np

import fattn
import fattn.lab

GPU = bool(fattn.info()["cuda"]["devices"])
warnings.showwarning = lambda message, *_: print("warning:", message)
print("sizes:", "full, for a GPU" if GPU else "small, for a CPU")
warnings.filterwarnings("ignore", message="IProgress not found")
try:
    import torch
    import transformers

    import fattn.transformers

    TORCH = torch.cuda.is_available() or not GPU
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}" + ("" if TORCH else ", but this torch sees no GPU: its cells are skipped"))
except ImportError as error:
    TORCH = False
    print(f"cells with torch are skipped: {error}")
rng = np.random.default_rng(0)


def command(*arguments):
    """Runs `fattn ...` as in a terminal and prints what it says."""
    done = subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments)], capture_output=True, text=True)
    print("$ fattn " + " ".join(map(str, arguments)) + "\n" + done.stdout + done.stderr)
    assert done.returncode == 0


# %% [markdown]
# ## 1. What fits
#
# In training, standard attention keeps the weights of every layer until the backward pass: batch x heads x N^2 numbers a
# layer. FlashAttention keeps o and one number a row (lse). Everything else of a model grows with N. `fattn advise` adds it
# up for a model and a memory: which batch, whether activations must be computed again (checkpointing), what fattn takes, and
# what standard attention would take for the same batch. Without `--json` it prints the arithmetic behind each line, and
# settings to paste.

# %%
def record(*arguments):
    """What `fattn ... --json -` found."""
    return json.loads(subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments), "--json", "-"], capture_output=True, text=True, check=True).stdout)


print("GPT-2 medium in 24 GiB, training in bf16")
print(f"{'N':>7} {'batch':>6} {'checkpointing':>14} {'fattn':>10} {'standard':>10} {'most at once by standard':>25}")
for seqlen in (1024, 2048, 4096, 8192, 16384, 32768):
    advice = record("advise", "--gpu-memory", "24GiB", "--seqlen", seqlen, "--model", "medium")
    if not advice["fits"]:
        print(f"{seqlen:7} does not fit: {advice['why']}")
        continue
    memory, standard = (advice[key]["bytes"] / 2**30 for key in ("memory", "standard_memory"))
    print(f"{seqlen:7} {advice['batch']:6} {'on' if advice['checkpointing'] else 'off':>14} {memory:6.1f} GiB {standard:6.1f} GiB {advice['standard_batch']:25}")

# %% [markdown]
# ## 2. Why the backward pass computes again
#
# With $dO$, the gradient of the output, and $P$ the weights, the chain rule gives
#
# $$ dV = P^T dO, \quad dP = dO\,V^T, \quad dS = P \circ (dP - D), \quad dQ = \tfrac{1}{\sqrt d}\, dS\,K, \quad dK = \tfrac{1}{\sqrt d}\, dS^T Q $$
#
# where $D_i = \sum_j P_{ij} dP_{ij}$ is what softmax's normalisation adds. It looks as if it needed the whole row, but
# $\sum_j P_{ij} (dO_i \cdot V_j) = dO_i \cdot \sum_j P_{ij} V_j = dO_i \cdot O_i$: a product of two rows that are there.
#
# All of it needs $P$ again. Either it was stored, N^2 numbers out to memory and back; or it is made again, tile by tile, from
# q, k and the forward pass's $\mathrm{lse}_i = \log \sum_j e^{S_{ij}}$: $P_{ij} = e^{S_{ij} - \mathrm{lse}_i}$, exactly, without
# another maximum or sum. That is one product more (five instead of four), and no N^2 anywhere.


# %%
def forward(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[1])
    lse = np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) + scores.max(1)
    return np.exp(scores - lse[:, None]) @ v, lse


def backward(q, k, v, o, lse, do, block=64):
    """Blocks of keys outside, as in FlashAttention-2: dk and dv stay on the chip, dq is added to."""
    scale, delta = 1 / math.sqrt(q.shape[1]), (do * o).sum(1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, len(k), block):
        kj, vj = k[j : j + block], v[j : j + block]
        for i in range(0, len(q), block):
            rows = slice(i, i + block)
            p = np.exp(q[rows] @ kj.T * scale - lse[rows, None])  # 1: the scores again
            dp = do[rows] @ vj.T                                  # 2
            ds = p * (dp - delta[rows, None])
            dv[j : j + block] += p.T @ do[rows]                   # 3
            dk[j : j + block] += ds.T @ q[rows] * scale           # 4
            dq[rows] += ds @ kj * scale                           # 5
    return dq, dk, dv


n, d = 300, 32
q, k, v, do = (rng.standard_normal((n, d)) for _ in range(4))
o, lse = forward(q, k, v)
gradients = backward(q, k, v, o, lse, do)
batched = [x.astype(np.float32)[None, :, None] for x in (q, k, v, do)]
of, lsef = fattn.numpy.forward(*batched[:3], return_lse=True)
for name, ours, theirs in zip(("dq", "dk", "dv"), gradients, fattn.numpy.backward(batched[3], *batched[:3], of, lsef)):
    print(f"{name}: the loop above beside fattn in fp32: difference {np.abs(ours - theirs[0, :, 0]).max():.1e}")
    assert np.allclose(ours, theirs[0, :, 0], atol=1e-5)
step = 1e-6  # and beside a difference quotient, which knows nothing of derivations
bumped = q.copy()
bumped[7, 3] += step
quotient = ((forward(bumped, k, v)[0] - o) * do).sum() / step
print(f"dq[7, 3] {gradients[0][7, 3]:.6f}, difference quotient {quotient:.6f}")
assert math.isclose(gradients[0][7, 3], quotient, rel_tol=1e-3)

# %% [markdown]
# What is kept and what is computed, drawn for one head:

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
lengths = 2 ** np.arange(9, 18)
axes[0].loglog(lengths, lengths.astype(float) ** 2 * 2 / 2**20, "o-", base=2, label="weights, stored in 16 bits")
axes[0].loglog(lengths, lengths * 4 / 2**20, "s-", base=2, label="lse, in fp32")
axes[0].set(title="kept for the backward pass", xlabel="N", ylabel="MiB a head")
axes[0].legend()
axes[1].bar(["forward", "backward,\nweights stored", "backward,\nrecomputed"], [2, 4, 4], label="products")
axes[1].bar(["forward", "backward,\nweights stored", "backward,\nrecomputed"], [0, 0, 1], bottom=[2, 4, 4], hatch="//", label="computed again")
axes[1].set(title="matrix products of $2 N^2 d$ operations", ylabel="products")
axes[1].legend()
figure.tight_layout()

# %% [markdown]
# Seven products instead of six for attention's forward and backward, then. And the time? Measured, forward and backward together:

# %%
sizes = dict(from_=1024, to=16384, batch=1, nheads=16, headdim=128, dtype="bf16", device="cuda", algorithm="standard,auto") if GPU else dict(
    from_=256, to=1024, batch=1, nheads=4, headdim=64, repeats=6, min_time=0, max_time=0.1, algorithm="standard,v2")
frame = fattn.lab.sweep("seqlen", pass_=["fwd", "bwd"], causal=True, progress=False, **sizes)
measured = frame[frame["status"] == "ok"].assign(ms=lambda x: x["time_median_s"] * 1e3, MiB=lambda x: x["extra_bytes"] / 2**20)
print(measured.pivot(index=["pass", "value"], columns="contestant", values=["ms", "MiB"]).to_string(float_format="{:.3g}".format))
failed = frame[frame["status"] != "ok"]
for _, row in failed.iterrows():
    print(f"{row['contestant']} at {row['value']}: {row['status']}: {row['reason']}")
fattn.lab.figure(frame)

# %% [markdown]
# ## 3. Work that masks save
#
# A tile that nobody sees is skipped. A causal mask leaves half of the tiles; a sliding window of w keys N w of N^2 pairs,
# so that time grows with N; documents that are packed behind each other, the sum of their squares.

# %%
n, block = 1024, 64


def share(visible):
    """Of the tiles those that have a visible pair."""
    return visible.reshape(n // block, block, n // block, block).any(axis=(1, 3)).mean()


i, j = np.arange(n)[:, None], np.arange(n)[None, :]
ends = np.array([100, 400, 450, 1024])
document = np.searchsorted(ends, np.arange(n), side="right").astype(np.int32)
masks = {"none": (np.ones((n, n), bool), {}), "causal": (j <= i, {"causal": True}), "window 128": ((j <= i) & (j >= i - 128), {"causal": True, "window": (128, 0)}),
         "documents": ((j <= i) & (document[:, None] == document[None]), {"causal": True, "document_q": document[None]})}
q, k, v = (rng.standard_normal((1, n, 8, 64)).astype(np.float32) for _ in range(3))
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8))
times = {}
for name, (visible, options) in masks.items():
    scores = np.where(visible, q[0, :, 0].astype(float) @ k[0, :, 0].T.astype(float) / 8, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    exact = p / p.sum(1, keepdims=True) @ v[0, :, 0]
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        o = fattn.numpy.forward(q, k, v, **options)
        samples.append(time.perf_counter() - start)
    assert np.allclose(o[0, :, 0], exact, atol=1e-5)
    times[name] = np.median(samples)
    print(f"{name:>10}: {share(visible):4.0%} of the tiles, {times[name] * 1e3:6.2f} ms, {times['none'] / times[name]:.2f} times as fast as without a mask")
for ax, (name, (visible, _)) in zip(axes, masks.items()):
    tiles = visible.reshape(n // block, block, n // block, block).mean(axis=(1, 3))
    ax.imshow(tiles, cmap="Blues", vmin=0, vmax=1)
    ax.set(title=name, xticks=[], yticks=[])
figure.tight_layout()

# %% [markdown]
# ## 4. Pieces that are merged: decoding, and rings
#
# lse makes results of parts mergeable. If o1, lse1 are attention over some keys, and o2, lse2 over others, attention over
# all is their mean with weights exp(lse). Flash-Decoding splits the long cache of one query among all processors this way;
# ring attention passes blocks of keys around a ring of GPUs and merges what each adds. GQA makes the cache smaller: heads of
# queries share heads of keys.

# %%
q, k, v = (rng.standard_normal((1, length, heads, 64)).astype(np.float32) for length, heads in ((1, 8), (6000, 2), (6000, 2)))
whole = fattn.numpy.forward(q, k, v)
parts = [fattn.numpy.forward(q, k[:, begin : begin + 2000], v[:, begin : begin + 2000], return_lse=True) for begin in (0, 2000, 4000)]
lse = np.logaddexp.reduce([x for _, x in parts])
merged = sum(o * np.exp(x - lse).transpose(0, 2, 1)[..., None] for o, x in parts)
print("three parts of 2000 keys, merged, beside all 6000: difference", np.abs(merged - whole).max())
assert np.allclose(merged, whole, atol=1e-6)
print("\ncache of one sequence of 131072 tokens, 32 layers, headdim 128, 16 bits:")
for name, heads in (("MHA, 32 heads of keys", 32), ("GQA, 8", 8), ("MQA, 1", 1)):
    print(f"{name:>22}: {2 * 32 * heads * 128 * 131072 * 2 / 2**30:5.1f} GiB")

# %% [markdown]
# ## 5. Data: whole files
#
# Long sequences want long documents: whole source files, dialogues, articles. Here are Python's own modules, as bytes, one
# document a file. Two ways make rows of N tokens of them: a document longer than N is cut into rows; short ones are packed
# behind each other, and attention must not cross their borders (`document_q`, or positions that start again).

# %%
paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
files = [np.frombuffer(open(path, "rb").read(), np.uint8) for path in paths]
files = [text for text in files if len(text) > 2000]
sizes = np.array([len(text) for text in files])
N = 8192 if GPU else 512
print(f"{len(files)} files, {sizes.sum() / 1e6:.1f} million bytes; half are longer than {np.median(sizes):.0f}, the longest has {sizes.max()}")
print(f"rows of {N}: {(sizes > N).mean():.0%} of the files do not fit into one; from rows of 512 they would be cut into {math.ceil(np.median(sizes) / 512)} pieces each")
rows = np.stack([text[begin : begin + N] for text in files for begin in range(0, len(text) - N + 1, N)]).astype(np.int64)
rng.shuffle(rows)
print(f"{len(rows)} rows of {N}")

# %% [markdown]
# ## 6. Training
#
# A small Llama on bytes: rotary positions (RoPE), which turn q and k by an angle that grows with the place, so that scores
# depend on distances alone and no table of places ends at some length. fattn sees q and k as they come from it.
#
# How long can a row be? Each attention trains one step on rows that double; a row that has no memory is an
# `OutOfMemoryError` and is said to be one. On a CPU lengths stay small and nothing runs out.

# %%
def llama(name, length, device, dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=512 if GPU else 64, intermediate_size=1408 if GPU else 176, num_hidden_layers=6 if GPU else 2,
                                      num_attention_heads=8 if GPU else 2, num_key_value_heads=2 if GPU else 1, max_position_embeddings=length)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).to(device, dtype)


def loss_of(model, batch):
    """The mean over tokens in fp32; matrices and attention in bf16 on a GPU."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=GPU):
        return model(batch, labels=batch).loss


if TORCH:
    device = "cuda" if GPU else "cpu"
    print(f"{'N':>7} " + "".join(f"{name:>24}" for name in ("eager", "fattn")))
    for length in (2048, 4096, 8192, 16384, 32768, 65536) if GPU else (128, 256, 512):
        cells = []
        for name in ("eager", "fattn"):
            model = optimizer = loss = None
            try:
                model = llama(name, length, device, torch.float32)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                batch = torch.from_numpy(np.resize(rows, (1, length))).to(device)
                if GPU:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                for _ in range(2):  # the first one warms up
                    start = time.perf_counter()
                    loss = loss_of(model, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if GPU:
                        torch.cuda.synchronize()
                    took = time.perf_counter() - start
                cells.append(f"{took * 1e3:9.1f} ms" + (f", {(torch.cuda.max_memory_allocated() - before) / 2**30:5.1f} GiB" if GPU else ""))
            except torch.OutOfMemoryError:
                cells.append("out of memory")
        print(f"{length:7} " + "".join(f"{cell:>24}" for cell in cells))
    model = optimizer = loss = None

# %% [markdown]
# Now it trains, with what long rows need: few rows fit at once, so gradients of several are accumulated. Two mistakes are
# common. The last accumulation of an epoch is smaller, and is dropped or weighted as if it were whole; here each row counts
# by its tokens. And a gradient that is not finite reaches the weights; here such a step is skipped and said.

# %%
if TORCH:
    model = llama("fattn", N, device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if not GPU else 1e-3)
    taken, accumulate, losses, norms = rows[: 18 if not GPU else 202], 8, [], []
    for begin in range(0, len(taken), accumulate):
        group = taken[begin : begin + accumulate]  # the last one has 2 rows
        total = 0.0
        for row in group:
            loss = loss_of(model, torch.from_numpy(row[None]).to(device)) * (row.size / group.size)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            print("a gradient is not finite: the step is skipped")
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        norms.append(norm.item())
    print(f"{len(taken)} rows of {N} in {len(losses)} steps, the last of {len(group)}: loss {losses[0]:.3f} to {losses[-1]:.3f} (random: {math.log(256):.3f})")
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8))
    axes[0].plot(losses, "o-")
    axes[0].set(title="loss a byte", xlabel="step")
    axes[1].plot(norms, "o-", color="C1")
    axes[1].set(title="norm of the gradient", xlabel="step")
    figure.tight_layout()
    assert losses[-1] < losses[0] and all(map(math.isfinite, norms))

# %% [markdown]
# And does it use what is far away? Later bytes of a row have more before them; a model that has learnt to look there has a
# lower loss at the end of a row than at its beginning. (This one has seen a few steps only.)

# %%
if TORCH:
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        batch = torch.from_numpy(rows[-4:]).to(device)
        logits = torch.cat([model(row[None]).logits.float().cpu() for row in batch])
        by_place = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].cpu().flatten(), reduction="none").view(4, -1).mean(0)
    for part in by_place.chunk(4):
        print(f"{part.mean():.3f}", end="  ")
    print("nats a byte, by quarter of the row")

# %% [markdown]
# ## 7. The same in C++
#
# `fattn gpt2 eval` reads a long text through a window, in C++ and without torch; a `config.json` with rotary positions and
# shared heads of keys is such a model. Weights are random, so
# the loss is near log(256) = 5.545, that of guessing.

# %%
folder = tempfile.mkdtemp()
with open(f"{folder}/config.json", "w") as file:
    file.write(f'{{"model_type": "gpt2", "n_layer": 2, "n_head": 4, "num_key_value_heads": 2, "n_embd": 128, "n_positions": {N}, "vocab_size": 256, '
               '"position_embedding_type": "rotary"}')
with open(f"{folder}/ids", "w") as file:
    file.write(" ".join(map(str, rows[:3].flatten())))
command("gpt2", "init", f"{folder}/model", "--config", f"{folder}/config.json")
command("gpt2", "eval", f"{folder}/model", "--ids", f"{folder}/ids", "--stride", N // 2)

# %% [markdown]
# ## What to take along
#
# - The backward pass trades one product for N^2 numbers of memory.
# - Tiles that a mask hides cost nothing: windows and documents make long rows cheap.
# - lse merges parts: split caches, rings.
# - Accumulate by tokens, keep the last partial group, look at the norm of the gradient.
#
# Go on with chapter 4, [performance analysis](4_performance.py).
