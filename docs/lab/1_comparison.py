# %% [markdown]
# # Chapter 1: set-up and comparison
#
# Attention as it is written in textbooks, the same answer without its large matrix, and both of them measured on this
# machine. Everything that you see here is computed when the cell runs: no figure is pasted in.
#
# `pip install '.[course]'` in the root of fattn installs what the course needs. A GPU is not needed: without one the
# cells take small sizes, with one they take full sizes. The next cell says which.

# %%
import math
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np

import fattn
import fattn.lab

GPU = bool(fattn.info()["cuda"]["devices"])
warnings.showwarning = lambda message, *_: print("warning:", message)
print(fattn.info())
print("\nsizes:", "full, for a GPU" if GPU else "small, for a CPU")


def command(*arguments):
    """Runs `fattn ...` as in a terminal and prints what it says."""
    done = subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments)], capture_output=True, text=True)
    print("$ fattn " + " ".join(map(str, arguments)) + "\n" + done.stdout + done.stderr)
    assert done.returncode == 0


rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. Standard attention, and what it stores
#
# A query row looks at all keys, turns its scores into weights that sum to 1, and mixes the values by them:
#
# $$ S = \frac{Q K^T}{\sqrt{d}}, \qquad P = \mathrm{softmax}(S), \qquad O = P V $$
#
# `visible` is a mask: a query sees the keys where it is true. The maximum of a row is subtracted before `exp`, so that
# no exponential overflows; the quotient is the same.


# %%
def standard(q, k, v, visible=None):
    scores = q @ k.T / math.sqrt(q.shape[1])
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v, weights


q, k, v = (rng.standard_normal((6, 4)) for _ in range(3))
o, weights = standard(q, k, v, visible=np.tril(np.ones((6, 6), bool)))
print(np.round(weights, 2), "\nrows sum to", weights.sum(axis=1).round(12))

# %% [markdown]
# The weights are a matrix of N x N for every head of every batch entry, N being the length of the sequence. Inputs and
# outputs grow with N, the matrix with N^2. Twice the length is four times the memory:

# %%
batch, nheads, d = 4, 12, 64
print(f"batch {batch}, {nheads} heads, headdim {d}, fp32: MiB")
print(f"{'N':>7} {'q, k, v, o':>12} {'the matrix':>12}")
for n in (512, 1024, 2048, 4096, 8192, 16384, 32768):
    print(f"{n:7} {batch * nheads * n * 4 * d * 4 / 2**20:12.0f} {batch * nheads * n * n * 4 / 2**20:12.0f}")

# %% [markdown]
# ## 2. Online softmax: one pass over the row, whatever comes
#
# Softmax seems to need the whole row: its maximum, then its sum, then the quotients. It does not. Keep three things for
# a row while its keys come by in blocks: the maximum `m` so far, the sum `l` of `exp(s - m)` so far, and the unnormalised
# output `a`, the sum of `exp(s - m) v`.
#
# A block brings scores s. The new maximum is m' = max(m, max s). What was summed with respect to m is wrong by one factor
# only, the same for all of it, because exp(s - m') = exp(s - m) exp(m - m'):
#
# $$ l' = l\,e^{m - m'} + \sum_j e^{s_j - m'}, \qquad a' = a\,e^{m - m'} + \sum_j e^{s_j - m'} v_j $$
#
# By induction `l` and `a` are at every moment what softmax would have over the keys seen so far. At the end o = a / l.
# Nothing was approximated. Watch it on eight numbers, two at a time; every line's `a / l` is the exact answer over the
# keys so far:

# %%
s, values = np.array([1.0, 3.0, 2.0, -1.0, 7.0, 0.0, 6.0, 7.5]), np.arange(8.0)
m, l, a = -np.inf, 0.0, 0.0
for j in range(0, 8, 2):
    block, m_before = s[j : j + 2], m
    m = max(m, block.max())
    factor, p = math.exp(m_before - m), np.exp(block - m)
    l, a = l * factor + p.sum(), a * factor + p @ values[j : j + 2]
    seen = np.exp(s[: j + 2] - s[: j + 2].max())
    print(f"scores {block}: m {m:4.1f}, what was there times {factor:.5f}, l {l:.5f}, a / l {a / l:.6f}, softmax {seen @ values[: j + 2] / seen.sum():.6f}")
assert math.isclose(a / l, seen @ values / seen.sum(), rel_tol=1e-14)

# %% [markdown]
# ## 3. FlashAttention in twenty lines
#
# The same with blocks of queries and keys. This is the loop of FlashAttention-2: **outside, blocks of queries; inside,
# blocks of keys**. A block of queries keeps m, l and its output until it is done, and blocks of queries know nothing of
# each other: each can be another worker's. So it is parallel over the sequence.


# %%
def flash_v2(q, k, v, rows=64, columns=64):
    o = np.empty_like(q)
    for i in range(0, len(q), rows):
        qi = q[i : i + rows] / math.sqrt(q.shape[1])
        m, l, a = np.full((len(qi), 1), -np.inf), np.zeros((len(qi), 1)), np.zeros_like(qi)
        for j in range(0, len(k), columns):
            scores = qi @ k[j : j + columns].T
            m_before, m = m, np.maximum(m, scores.max(axis=1, keepdims=True))
            p, factor = np.exp(scores - m), np.exp(m_before - m)
            l = l * factor + p.sum(axis=1, keepdims=True)
            a = a * factor + p @ v[j : j + columns]
        o[i : i + rows] = a / l
    return o


# %% [markdown]
# The first FlashAttention (2022) has the loops the other way round: **outside, blocks of keys; inside, blocks of
# queries**. A block of keys stays on the chip while all queries pass, so o, m and l of every query go out to memory and
# come back once for each block of keys, and only batch and heads are left to be parallel over.


# %%
def flash_v1(q, k, v, rows=64, columns=64):
    o, l, m = np.zeros_like(q), np.zeros((len(q), 1)), np.full((len(q), 1), -np.inf)
    for j in range(0, len(k), columns):
        kj, vj = k[j : j + columns], v[j : j + columns]
        for i in range(0, len(q), rows):
            scores = q[i : i + rows] @ kj.T / math.sqrt(q.shape[1])
            m_before, m_now = m[i : i + rows], np.maximum(m[i : i + rows], scores.max(axis=1, keepdims=True))
            p, factor = np.exp(scores - m_now), np.exp(m_before - m_now)
            l[i : i + rows] = l[i : i + rows] * factor + p.sum(axis=1, keepdims=True)
            o[i : i + rows] = o[i : i + rows] * factor + p @ vj
            m[i : i + rows] = m_now
    return o / l


q, k, v = (rng.standard_normal((500, 32)) for _ in range(3))
for name, attention in (("v1", flash_v1), ("v2", flash_v2)):
    error = np.abs(attention(q, k, v) - standard(q, k, v)[0]).max()
    print(f"{name}: differs from standard attention by {error:.1e}")
    assert error < 1e-14

# %% [markdown]
# The order in which the two take the tiles of the matrix, drawn by their loops. Arrows join one tile to the next. In v1
# one worker has a head to itself. In v2 each row of tiles can be another worker's (colours).

# %%
tiles = 6
figure, axes = plt.subplots(1, 2, figsize=(9, 4))
for ax, title, order in ((axes[0], "v1: keys outside", [(i, j) for j in range(tiles) for i in range(tiles)]),
                         (axes[1], "v2: queries outside", [(i, j) for i in range(tiles) for j in range(tiles)])):
    colours = np.zeros((tiles, tiles)) if title.startswith("v1") else np.repeat(np.arange(tiles)[:, None], tiles, axis=1)
    ax.imshow(colours, cmap="Pastel1", vmin=0, vmax=8)
    for (i, j), (i_next, j_next) in zip(order, order[1:]):
        if title.startswith("v1") or i == i_next:
            ax.annotate("", (j_next, i_next), (j, i), arrowprops={"arrowstyle": "->", "color": "0.3"})
    ax.set(title=title, xlabel="block of keys", ylabel="block of queries", xticks=range(tiles), yticks=range(tiles))
figure.tight_layout()

# %% [markdown]
# ## 4. What goes through memory: not O(N)
#
# The *memory* that FlashAttention needs beside its inputs grows with N. Its *traffic* does not: for every block of
# queries all keys and values come by again. With M numbers on the chip a block has on the order of M / d rows, so there
# are N d / M blocks, each of which reads 2 N d numbers: **Theta(N^2 d^2 / M)** (Dao et al. 2022, theorem 2). Standard
# attention moves Theta(N d + N^2). The gain is the factor M / d^2, not a lower power of N.
#
# Do not believe it; count it. `Memory` is an array that counts the numbers which are read from it and written to it, and
# the loops above run on it, as far as they move anything.


# %%
class Memory:
    """An array in slow memory: what is sliced from it is read, what is assigned is written."""

    moved = 0

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __len__(self):
        return len(self.array)

    def __getitem__(self, where):
        Memory.moved += self.array[where].size
        return self.array[where]

    def __setitem__(self, where, value):
        Memory.moved += self.array[where].size
        self.array[where] = value


def count(n, d, chip, which):
    Memory.moved = 0
    q, k, v = (Memory(rng.standard_normal((n, d))) for _ in range(3))
    if which == "standard":
        scores, weights, o = Memory(np.empty((n, n))), Memory(np.empty((n, n))), Memory(np.empty((n, d)))
        scores[:] = q[:] @ k[:].T
        weights[:] = np.exp(scores[:])
        o[:] = weights[:] @ v[:]
        return Memory.moved
    rows = columns = max(chip // (4 * d), 1)  # q, k, v and o of a block fill the chip
    o = Memory(np.zeros((n, d)))
    outer = range(0, n, rows)
    for a in outer:
        if which == "v2":
            qi = q[a : a + rows]
            for j in range(0, n, columns):
                qi @ k[j : j + columns].T @ v[j : j + columns]
            o[a : a + rows] = qi
        else:
            kj, vj = k[a : a + columns], v[a : a + columns]
            for i in range(0, n, rows):
                o[i : i + rows] = o[i : i + rows] + q[i : i + rows] @ kj.T @ vj
    return Memory.moved


lengths, chips, d, chip = (256, 512, 1024, 2048), (2048, 4096, 8192, 16384), 32, 8192
by_length = {which: [count(n, d, chip, which) for n in lengths] for which in ("standard", "v1", "v2")}
by_chip = {which: [count(1024, d, m, which) for m in chips] for which in ("v1", "v2")}
slope = lambda x, y: np.polyfit(np.log(x), np.log(y), 1)[0]
for which, moved in by_length.items():
    print(f"{which:>8}: numbers moved {moved}, N^{slope(lengths, moved):.2f}", f"M^{slope(chips, by_chip[which]):.2f}" if which in by_chip else "")
assert slope(lengths[-2:], by_length["v2"][-2:]) > 1.8 and slope(chips[:2], by_chip["v2"][:2]) < -0.9

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
for which, moved in by_length.items():
    axes[0].loglog(lengths, moved, "o-", base=2, label=which)
axes[0].loglog(lengths, [by_length["v2"][0] * n / lengths[0] for n in lengths], ":", base=2, color="0.5", label="were it O(N)")
axes[0].set(title=f"by length, M = {chip}", xlabel="N", ylabel="numbers moved")
for which, moved in by_chip.items():
    axes[1].loglog(chips, moved, "o-", base=2, label=which)
axes[1].loglog(chips, [8 * 1024**2 * d**2 / m for m in chips], ":", base=2, color="0.5", label="$8 N^2 d^2 / M$")
axes[1].set(title="by what the chip holds, N = 1024", xlabel="M, numbers", ylabel="numbers moved")
for ax in axes:
    ax.legend()
figure.tight_layout()

# %% [markdown]
# `fattn memory` counts the same for this machine, by the papers and by the loops that run here; `--explain` prints the
# line of arithmetic behind every number.

# %%
command("memory", "--batch", 1, "--nheads", 8, "--seqlen", 2048, "--headdim", 64, "--algorithm", "standard,v1,v2", "--no-grad",
        *(["--device", "cuda", "--dtype", "bf16"] if GPU else []))

# %% [markdown]
# ## 5. The answer is the same: how large errors are
#
# Rounding is not: the order of sums differs. The limits of this course, for inputs of N(0, 1), are the largest absolute
# difference from float64: **1e-5 in fp32, 1e-3 in fp16, 8e-3 in bf16**. An output near 1 that is rounded once to fp16 or
# bf16 is off by 5e-4 or 4e-3 at most; the limit is twice that. Rounded to fp32 it is off by 6e-8; the rest of the limit is
# for the sums of thousands of products, which are in fp32 with every dtype.

# %%
LIMITS = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}
dtypes = {"fp32": np.float32, "fp16": np.float16}
try:
    import ml_dtypes

    dtypes["bf16"] = ml_dtypes.bfloat16
except ImportError:
    print("bf16 is left out: NumPy has it from the package ml_dtypes (pip install ml_dtypes)")


def error_of(n, dtype, scale=1.0, algorithm="auto"):
    """Largest difference from float64 on the same (rounded) inputs, and the output's size."""
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(dtype) for _ in range(3))
    q = (q.astype(np.float32) * scale).astype(dtype)
    exact = standard(*(x[0, :, 0].astype(np.float64) for x in (q, k, v)))[0]
    return np.abs(fattn.numpy.forward(q, k, v, algorithm=algorithm)[0, :, 0].astype(np.float64) - exact).max()


lengths = (64, 256, 1024, 4096) if GPU else (64, 256, 1024, 2048)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
scales = (0.5, 1, 2, 4, 8, 16, 32)
for look, (name, dtype) in enumerate(dtypes.items()):
    errors = [error_of(n, dtype) for n in lengths]
    print(f"{name}: {', '.join(f'N {n}: {e:.1e}' for n, e in zip(lengths, errors))}; limit {LIMITS[name]:g}")
    assert all(e <= LIMITS[name] for e in errors)
    axes[0].loglog(lengths, errors, "o-", color=f"C{look}", label=name)
    axes[1].loglog(scales, [error_of(256, dtype, scale) for scale in scales], "o-", base=2, color=f"C{look}", label=name)
    for ax in axes:
        ax.axhline(LIMITS[name], ls=":", color=f"C{look}")
axes[0].set(title="by length; dotted: limits", xlabel="N", ylabel="largest error")
axes[1].set(title="by the size of the scores", xlabel="q times", ylabel="largest error")
axes[1].set_yscale("log")
for ax in axes:
    ax.legend()
figure.tight_layout()

# %% [markdown]
# On the left errors do not grow with N: sums are in fp32, and the mean of many values is small itself. On the right they
# grow with the scores. A score of 30 is rounded 30 times as coarsely as one of 1, and `exp` makes of an absolute error of
# its argument a relative error of the weight: that is the line of fp32. In 16 bits something else comes first: a row whose
# weight is on few keys has an output as large as their values, 2 or 3 here, and rounding that costs up to 1e-3 and 8e-3 by
# itself. So the limits are for inputs of usual size, and a difference beyond them says first: look at the scores.
#
# What grows with N is a sum that is kept in 16 bits. fp16 counts to 2048 and no further; that is why every sum here is in
# fp32:

# %%
ones = np.ones(4096, np.float16)
print("4096 ones, summed in fp16:", np.cumsum(ones, dtype=np.float16)[-1], " in fp32:", np.cumsum(ones, dtype=np.float32)[-1])

# %% [markdown]
# ## 6. Masks: causal, BERT-style, and what is wrong with -1e9
#
# **Causal** (GPT): query i sees the keys up to its own place. With fewer queries than keys, as with a cache of keys, the
# queries are the *last* ones: masks align to the bottom right. A mask aligned to the top left would show the newest token
# nothing but the first key.

# %%
q, k, v = (rng.standard_normal((1, 8, 1, 16)).astype(np.float32) for _ in range(3))
whole = fattn.numpy.forward(q, k, v, causal=True)
last = fattn.numpy.forward(q[:, -2:], k, v, causal=True)
print("the last two queries alone, beside the same rows of all eight: difference", np.abs(last - whole[:, -2:]).max())
wrong = standard(q[0, -2:, 0], k[0, :, 0], v[0, :, 0], visible=np.tril(np.ones((2, 8), bool)))[0]
print("aligned to the top left:                                       difference", np.abs(wrong - whole[0, -2:, 0]).max().round(2))
assert np.allclose(last, whole[:, -2:], atol=1e-6)

# %% [markdown]
# **BERT-style**: every token sees every other, but not the padding. `seqused_k` says how many keys each entry of the batch
# has; what is behind them is never looked at, not even if it is NaN:

# %%
q, k, v = (rng.standard_normal((2, 8, 1, 16)).astype(np.float32) for _ in range(3))
k[1, 5:], v[1, 5:] = np.nan, np.nan
o = fattn.numpy.forward(q, k, v, seqused_k=np.array([8, 5], np.int32))
alone = fattn.numpy.forward(q[1:], k[1:, :5], v[1:, :5])
print("five keys and NaN behind them, beside five keys: difference", np.abs(o[1] - alone[0]).max())
assert np.allclose(o[1], alone[0], atol=1e-6)

# %% [markdown]
# **-1e9.** Many programs hide a key by adding -1e9 to its score. Two things go wrong. fp16 ends at 65504: -1e9 becomes
# -inf, and a row that hides everything is exp(-inf + inf), NaN. In fp32 such a row becomes the *mean of what was hidden*:
# all scores are about -1e9, differ by nothing that fp32 can hold, and softmax makes equal weights of them. fattn's masks
# are no numbers: a row that sees nothing is 0, its log-sum-exp -inf.

# %%
scores, values = np.array([[1.0, 2.0, 3.0]]), np.array([[10.0], [20.0], [60.0]])
for dtype in (np.float16, np.float32):
    with np.errstate(all="ignore"):
        hidden = scores.astype(dtype) + np.array(-1e9).astype(dtype)
        p = np.exp(hidden - hidden.max())
        print(f"{np.dtype(dtype).name}: all three hidden by -1e9: scores {hidden[0]}, output {(p / p.sum() @ values)[0]}")
one = np.ones((1, 1, 1, 4), np.float32)
o, lse = fattn.numpy.forward(one, one, one, mask=np.zeros((1, 1, 1, 1), bool), return_lse=True)
print("fattn, a row that sees nothing: output", o[0, 0, 0], "lse", lse[0, 0])
assert not o.any() and lse[0, 0, 0] == -np.inf

# %% [markdown]
# ## 7. The race
#
# Now time and memory. `fattn.lab.sweep` runs `fattn sweep`: every result is held against float64 before it is timed, all
# contestants take turns, and memory is what a call allocates beyond its inputs. Standard attention here is an honest
# baseline, made of the best matrix products of this machine.

# %%
sizes = dict(from_=512, to=8192, batch=4, nheads=16, headdim=128, dtype="bf16", device="cuda", algorithm="standard,v1,v2,auto") if GPU else dict(
    from_=128, to=1024, batch=1, nheads=4, headdim=64, repeats=6, min_time=0, max_time=0.1, algorithm="standard,v1,v2")
frame = fattn.lab.sweep("seqlen", causal=True, no_grad=True, progress=False, **sizes)
measured = frame[frame["status"] == "ok"].assign(ms=lambda x: x["time_median_s"] * 1e3, MiB=lambda x: x["extra_bytes"] / 2**20)
print(measured.pivot(index="value", columns="contestant", values=["ms", "MiB"]).to_string(float_format="{:.3g}".format))
for sentence in frame.attrs["findings"]:
    print("-", sentence)

# %%
fattn.lab.figure(frame)

# %% [markdown]
# Read the exponents of growth. For long sequences all of them come near 2 (short ones have costs that do not grow):
# FlashAttention does the same arithmetic. What it saves is the matrix, so memory grows with N; what it gains in time is the
# traffic.
#
# ## What to take along
#
# - The matrix of scores is what grows with N^2. Nobody needs it.
# - Online softmax is exact. Blocks come in any size; one factor corrects the past.
# - v1: keys outside. v2: queries outside, parallel over the sequence.
# - Memory O(N), traffic Theta(N^2 d^2 / M), arithmetic as ever.
# - Errors: 1e-5, 1e-3, 8e-3. Sums in fp32. Masks that are no numbers.
#
# Go on with chapter 2, [inside a model](2_inside_a_model.py). `fattn lab` shows five of these steps in a terminal, and the
# [exercises](exercises.py) ask what you know now.
