# %% [markdown]
# # 第 1 章：環境設置與標準對比
#
# 先照教科書寫出注意力，再不用那個大矩陣得到相同的答案，最後在這台機器上量測兩者。這裡看到的一切都是執行儲存格時當場計算的，沒有任何貼上的圖。
#
# 在 fattn 的根目錄執行 `pip install '.[course]'` 即可安裝課程所需。不需要 GPU：沒有 GPU 時用小尺寸，有 GPU 時用完整尺寸，下一個儲存格會說是哪一種。

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
# ## 1. 標準注意力，以及它存了什麼
#
# 每一列 query 看過所有的 key，把分數變成總和為 1 的權重，再用權重混合 value：
#
# $$ S = \frac{Q K^T}{\sqrt{d}}, \qquad P = \mathrm{softmax}(S), \qquad O = P V $$
#
# `visible` 是遮罩：query 只看得到為真的 key。取 `exp` 之前先減去該列的最大值，避免溢位；商不變。


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
# 每個 batch 的每個 head 都有一個 N x N 的權重矩陣，N 是序列長度。輸入與輸出隨 N 成長，矩陣隨 N^2 成長。長度加倍，記憶體變成四倍：

# %%
batch, nheads, d = 4, 12, 64
print(f"batch {batch}, {nheads} heads, headdim {d}, fp32: MiB")
print(f"{'N':>7} {'q, k, v, o':>12} {'the matrix':>12}")
for n in (512, 1024, 2048, 4096, 8192, 16384, 32768):
    print(f"{n:7} {batch * nheads * n * 4 * d * 4 / 2**20:12.0f} {batch * nheads * n * n * 4 / 2**20:12.0f}")

# %% [markdown]
# ## 2. 線上 softmax：逐塊走過一列
#
# Softmax 看似需要整列：先最大值、再總和、再相除。其實不用。key 一塊一塊到來時，每列只保留三樣東西：目前的最大值 `m`、`exp(s - m)` 的總和 `l`，以及未正規化的輸出 `a`，也就是 `exp(s - m) v` 的總和。
#
# 新的一塊帶來分數 s，新的最大值是 m' = max(m, max s)。先前以 m 為基準的總和只差一個倍數，而且對所有項都相同，因為 exp(s - m') = exp(s - m) exp(m - m')：
#
# $$ l' = l\,e^{m - m'} + \sum_j e^{s_j - m'}, \qquad a' = a\,e^{m - m'} + \sum_j e^{s_j - m'} v_j $$
#
# 由歸納法，`l` 與 `a` 在任何時刻都等於 softmax 對至今看過的 key 所得的值，最後 o = a / l，沒有任何近似。看八個數字、每次兩個；每一行的 `a / l` 都是至今所有 key 的精確答案：

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
# ## 3. 二十行的 FlashAttention
#
# 同樣的做法，用在 query 與 key 的區塊上。這是 FlashAttention-2 的迴圈：**外層是 query 的區塊，內層是 key 的區塊**。一塊 query 保有自己的 m、l 與輸出直到算完，各塊 query 互不相干，可以交給不同的工作單元：因此能沿著序列平行。


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
# 第一版 FlashAttention（2022）的迴圈相反：**外層是 key 的區塊，內層是 query 的區塊**。一塊 key 留在晶片上，所有 query 輪流經過，所以每處理一塊 key，每個 query 的 o、m、l 都要寫到記憶體再讀回來，而且只剩 batch 與 head 可以平行。


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
# 兩者走過矩陣各塊的順序，由它們的迴圈畫出。箭頭連接前後兩塊。v1 由一個工作單元負責整個 head；v2 的每一列區塊都可以是另一個工作單元（顏色）。

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
# ## 4. 經過記憶體的搬運量：不是 O(N)
#
# FlashAttention 在輸入以外所需的「記憶體」隨 N 成長，但「搬運量」不是：每一塊 query 都要讓所有的 key 與 value 再經過一次。晶片上容得下 M 個數字時，一塊約有 M / d 列，所以有 N d / M 塊，每塊讀 2 N d 個數字：**Theta(N^2 d^2 / M)**（Dao 等人 2022，定理 2）。標準注意力搬 Theta(N d + N^2)。省下的是 M / d^2 這個倍數，而不是 N 的次方。
#
# 不必相信，數一數。`Memory` 是會計數的陣列，記錄讀出與寫入的數字個數；上面的迴圈在它上面照原樣執行，只留下搬運的部分。


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
# `fattn memory` 對這台機器做同樣的計數，一欄依論文，一欄依實際執行的迴圈；`--explain` 會印出每個數字的算式。

# %%
command("memory", "--batch", 1, "--nheads", 8, "--seqlen", 2048, "--headdim", 64, "--algorithm", "standard,v1,v2", "--no-grad",
        *(["--device", "cuda", "--dtype", "bf16"] if GPU else []))

# %% [markdown]
# ## 5. 答案相同：誤差有多大
#
# 捨入不同，因為加總的順序不同。本課程的限度，是輸入為 N(0, 1) 時與 float64 的最大絕對差：**fp32 為 1e-5，fp16 為 1e-3，bf16 為 8e-3**。接近 1 的輸出捨入一次到 fp16 或 bf16，最多差 5e-4 或 4e-3，限度是它的兩倍。捨入到 fp32 最多差 6e-8，其餘留給上千個乘積的加總；無論哪種 dtype，加總都用 fp32。

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
# 左圖的誤差不隨 N 成長：加總在 fp32，而且許多數值的平均本身就小。右圖的誤差隨分數成長：分數 30 的捨入比分數 1 粗 30 倍，而 `exp` 把引數的絕對誤差變成權重的相對誤差，這就是 fp32 那條線。16 位元則先遇到另一件事：權重集中在少數 key 的列，輸出和那些 value 一樣大（這裡是 2 或 3），光是捨入它就要 1e-3 與 8e-3。所以限度是給一般大小的輸入；超過時先看分數有多大。
#
# 會隨 N 成長的，是用 16 位元保存的總和。fp16 數到 2048 就停了，所以這裡所有的加總都在 fp32：

# %%
ones = np.ones(4096, np.float16)
print("4096 ones, summed in fp16:", np.cumsum(ones, dtype=np.float16)[-1], " in fp32:", np.cumsum(ones, dtype=np.float32)[-1])

# %% [markdown]
# ## 6. 遮罩：因果、BERT 式，以及 -1e9 錯在哪裡
#
# **因果**（GPT）：query i 看得到自己位置以前的 key。query 比 key 少時（例如有 KV cache），這些 query 是「最後」幾個：遮罩對齊右下角。若對齊左上角，最新的 token 就只看得到第一個 key。

# %%
q, k, v = (rng.standard_normal((1, 8, 1, 16)).astype(np.float32) for _ in range(3))
whole = fattn.numpy.forward(q, k, v, causal=True)
last = fattn.numpy.forward(q[:, -2:], k, v, causal=True)
print("the last two queries alone, beside the same rows of all eight: difference", np.abs(last - whole[:, -2:]).max())
wrong = standard(q[0, -2:, 0], k[0, :, 0], v[0, :, 0], visible=np.tril(np.ones((2, 8), bool)))[0]
print("aligned to the top left:                                       difference", np.abs(wrong - whole[0, -2:, 0]).max().round(2))
assert np.allclose(last, whole[:, -2:], atol=1e-6)

# %% [markdown]
# **BERT 式**：每個 token 看得到所有 token，但看不到補齊的部分。`seqused_k` 說明 batch 中每一項有幾個 key；後面的內容完全不會被讀取，即使是 NaN：

# %%
q, k, v = (rng.standard_normal((2, 8, 1, 16)).astype(np.float32) for _ in range(3))
k[1, 5:], v[1, 5:] = np.nan, np.nan
o = fattn.numpy.forward(q, k, v, seqused_k=np.array([8, 5], np.int32))
alone = fattn.numpy.forward(q[1:], k[1:, :5], v[1:, :5])
print("five keys and NaN behind them, beside five keys: difference", np.abs(o[1] - alone[0]).max())
assert np.allclose(o[1], alone[0], atol=1e-6)

# %% [markdown]
# **-1e9。** 許多程式用分數加上 -1e9 來遮住 key，有兩件事會出錯。fp16 到 65504 為止：-1e9 變成 -inf，全部被遮住的列是 exp(-inf + inf)，也就是 NaN。在 fp32，這樣的列會變成「被遮住內容的平均」：所有分數都約為 -1e9，差異小到 fp32 存不下，softmax 給出相等的權重。fattn 的遮罩不是數字：什麼都看不到的列輸出 0，log-sum-exp 為 -inf。

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
# ## 7. 比賽
#
# 現在量時間與記憶體。`fattn.lab.sweep` 執行 `fattn sweep`：每個結果先與 float64 比對才計時，參賽者輪流執行，記憶體是一次呼叫在輸入以外配置的量。這裡的標準注意力是誠實的基準，用的是這台機器上最好的矩陣乘法。

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
# 看成長的指數。長序列時全部接近 2（短序列有不隨長度成長的固定成本）：FlashAttention 的運算量相同。它省下的是矩陣，所以記憶體隨 N 成長；時間上贏的是搬運量。
#
# ## 帶走什麼
#
# - 隨 N^2 成長的是分數矩陣，而沒有人需要它。
# - 線上 softmax 是精確的。區塊大小任意，一個倍數就能修正過去。
# - v1：key 在外層。v2：query 在外層，沿序列平行。
# - 記憶體 O(N)，搬運量 Theta(N^2 d^2 / M)，運算量不變。
# - 誤差：1e-5、1e-3、8e-3。加總用 fp32。遮罩不是數字。
#
# 接著看第 2 章：[模型內部](2_inside_a_model.zh-TW.py)。`fattn lab` 在終端機裡示範其中五步，[練習](exercises.zh-TW.py)會問你現在知道了什麼。
