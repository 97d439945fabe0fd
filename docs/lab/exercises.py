# %% [markdown]
# # Exercises
#
# Ten questions about the four chapters. Try each before you scroll: the answers below are programs, and they run.
#
# 1. How large is the matrix of weights of one head for N = 16384 in fp32? Of GPT-2 small at batch 4, all heads of a layer?
# 2. Two workers each have m, l and a of half a row. How do they make the whole row's output? Does the order matter?
# 3. For which M (numbers on the chip) does FlashAttention's forward pass move as much as standard attention, at headdim 64?
# 4. Three queries, seven keys, a causal mask. Which keys does the first query see? Show it without looking at a weight.
# 5. In bf16 -1e9 is a number. Is it a good mask there?
# 6. The backward pass needs D_i, a sum over a whole row of dP. Why need it not wait for the row?
# 7. How many operations are a forward and a backward pass of N queries and keys? What does a causal mask leave?
# 8. Blocks of 64, a window of 256 keys, N = 4096: how many tiles are computed, and how does that grow with N?
# 9. Eight heads of queries, two of keys. What is the same computation without GQA, and what does GQA save?
# 10. What is the smallest update that changes a bf16 weight of 1? Which weights of a model does that stop from learning?

# %%
import math

import numpy as np

import fattn

rng = np.random.default_rng(0)

# %% [markdown]
# ---
# **1.** N^2 numbers of 4 bytes: 1 GiB for one head, 48 of them for batch 4 and 12 heads.

# %%
one = 16384**2 * 4
print(one / 2**30, "GiB,", 4 * 12 * one / 2**30, "GiB")
assert one == 2**30 and 4 * 12 * one == 48 * 2**30

# %% [markdown]
# **2.** The larger m is the new one; each brings its l and a by its own factor. Merging is associative and commutative, up to
# rounding: any tree of workers gives the same row.


# %%
def part(scores, values):
    m = scores.max()
    return m, np.exp(scores - m).sum(), np.exp(scores - m) @ values


def merge(x, y):
    m = max(x[0], y[0])
    fx, fy = math.exp(x[0] - m), math.exp(y[0] - m)
    return m, x[1] * fx + y[1] * fy, x[2] * fx + y[2] * fy


s, values = rng.standard_normal(12) * 5, rng.standard_normal((12, 4))
a, b, c = (part(s[i : i + 4], values[i : i + 4]) for i in (0, 4, 8))
whole = part(s, values)
for merged in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))):
    assert np.allclose(merged[2] / merged[1], whole[2] / whole[1], rtol=1e-13)
print(merged[2] / merged[1])

# %% [markdown]
# **3.** With blocks of M / 4d rows v2 moves 8 N^2 d^2 / M numbers, standard attention 4 N^2 (scores and weights, each written
# and read). They are equal at M = 2 d^2: 8192 numbers, 32 KiB in fp32, for headdim 64. The shared memory of a GPU's
# multiprocessor holds several times that; beyond headdim 256 it gets tight, which is why kernels end about there.

# %%
d = 64
moved = lambda chip: 8 * d**2 / chip
print(2 * d**2, "numbers:", moved(2 * d**2), "N^2 moved by v2, 4 N^2 by standard attention")
assert moved(2 * d**2) == 4 and moved(8 * d**2) == 1

# %% [markdown]
# **4.** Masks align to the bottom right: the last query sees all seven, the first one the keys 0 to 4. What is hidden never
# reaches a row, not even NaN: so NaN in the value of one key shows who sees it.

# %%
q, k, v = (rng.standard_normal((1, length, 1, 8)).astype(np.float32) for length in (3, 7, 7))
seen = []
for j in range(7):
    spoilt = v.copy()
    spoilt[0, j] = np.nan
    seen.append(np.isnan(fattn.numpy.forward(q, k, spoilt, causal=True)[0, :, 0]).any(axis=1))
print(np.array(seen).T.astype(int))
assert np.array_equal(np.array(seen).T, np.tril(np.ones((3, 7), bool), 4))

# %% [markdown]
# **5.** Where a row sees something, yes: the hidden scores are far below. A row that sees nothing becomes the mean of what is
# hidden, as in fp32 (chapter 1), because near -1e9 bf16 numbers are four million apart and all scores are the same one. A mask
# that is no number gives 0.

# %%
step = 2.0 ** (math.floor(math.log2(1e9)) - 7)
print(f"near 1e9 bf16 numbers are {step:.0f} apart")
hidden, values = np.array([1.0, 2.0, 3.0]) - 1e9, np.array([10.0, 20.0, 60.0])
rounded = np.round(hidden / step) * step
p = np.exp(rounded - rounded.max())
print("by -1e9:", p @ values / p.sum())
o = fattn.numpy.forward(*(np.ones((1, 1, 1, 4), np.float32),) * 3, mask=np.zeros((1, 1, 1, 1), bool))
assert math.isclose(p @ values / p.sum(), 30) and not o.any()

# %% [markdown]
# **6.** Because sum_j P_ij dP_ij = sum_j P_ij (dO_i . V_j) = dO_i . O_i, and both rows are there before the first tile.

# %%
q, k, v, do = (rng.standard_normal((50, 8)) for _ in range(4))
s = q @ k.T / math.sqrt(8)
p = np.exp(s - s.max(1, keepdims=True))
p /= p.sum(1, keepdims=True)
assert np.allclose((p * (do @ v.T)).sum(1), (do * (p @ v)).sum(1), rtol=1e-10)

# %% [markdown]
# **7.** A product of (N, d) and (d, N) is N^2 d multiplications and as many additions. Two products forward, five backward: 4
# N^2 d and 10 N^2 d operations a head. A causal mask leaves N (N + 1) / 2 pairs.

# %%
n, d = 1024, 64
plans = {(causal, backward): fattn.plan((1, n, 1, d), (1, n, 1, d), dtype="fp32", causal=causal, backward=backward).flops for causal in (False, True) for backward in (False, True)}
print({f"causal {c}, backward {b}": f"{flops / 1e6:.1f} MFLOP" for (c, b), flops in plans.items()})
assert plans[False, False] == 4 * n * n * d and plans[False, True] == 10 * n * n * d
assert plans[True, False] == 4 * (n * (n + 1) // 2) * d

# %% [markdown]
# **8.** A row of 64 queries sees its own 64 keys and 256 before them: 5 tiles, but in the first rows, where there is less. So
# about 5 N / 64 tiles, which grow with N, not with its square.

# %%
def tiles(n, block=64, window=256):
    return sum(1 for i in range(n // block) for j in range(i + 1) if (j + 1) * block - 1 >= i * block - window)


print(tiles(4096), "of", 64 * 64, "tiles; twice the length:", tiles(8192))
assert tiles(4096) == 5 * 64 - 10 and tiles(8192) == 5 * 128 - 10

# %% [markdown]
# **9.** Each head of keys repeated for its four heads of queries gives the same. GQA saves three quarters of k and v: of the
# cache, and of what decoding reads.

# %%
q, k, v = (rng.standard_normal((1, 40, heads, 16)).astype(np.float32) for heads in (8, 2, 2))
grouped = fattn.numpy.forward(q, k, v, causal=True)
repeated = fattn.numpy.forward(q, np.repeat(k, 4, axis=2), np.repeat(v, 4, axis=2), causal=True)
assert np.allclose(grouped, repeated, atol=1e-6) and k.nbytes * 4 == np.repeat(k, 4, axis=2).nbytes

# %% [markdown]
# **10.** Just above half a unit in the last place, 2^-8 = 0.0039 of the weight. All weights whose updates are smaller stop: with
# a learning rate of 1e-4 nearly all of them. So optimizers keep fp32 copies.


# %%
def bf16(x):
    """To the nearest bf16, of ties to the even one."""
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


print(bf16(1 + 2**-8), bf16(1 + 1.01 * 2**-8))
assert bf16(1 + 2**-8) == 1 and bf16(1 + 1.01 * 2**-8) > 1
