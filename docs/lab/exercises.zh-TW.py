# %% [markdown]
# # 練習
#
# 關於四章的十個問題。先自己想，再往下看：下面的答案是程式，而且真的會執行。
#
# 1. N = 16384、fp32 時，一個 head 的權重矩陣有多大？GPT-2 small 在 batch 4 時，一層所有的 head 呢？
# 2. 兩個工作單元各有半列的 m、l、a。怎麼得到整列的輸出？順序有關係嗎？
# 3. headdim 64 時，M（晶片上的數字個數）為多少，FlashAttention 前向的搬運量會和標準注意力一樣多？
# 4. 三個 query、七個 key、因果遮罩。第一個 query 看得到哪些 key？不看權重，證明給我看。
# 5. 在 bf16 裡 -1e9 是個數字。在那裡它是好的遮罩嗎？
# 6. 反向計算需要 D_i，那是 dP 整列的總和。為什麼不必等整列？
# 7. N 個 query 與 key 的前向與反向各有多少運算？因果遮罩留下多少？
# 8. 區塊 64、視窗 256 個 key、N = 4096：要計算幾塊？隨 N 如何成長？
# 9. 八個 query head、兩個 key head。不用 GQA 時，等價的計算是什麼？GQA 省下什麼？
# 10. 能改變 bf16 權重 1 的最小更新是多少？這讓模型的哪些權重停止學習？

# %%
import math

import numpy as np

import fattn

rng = np.random.default_rng(0)

# %% [markdown]
# ---
# **1.** N^2 個 4 位元組的數字：一個 head 為 1 GiB；batch 4、12 個 head 就是 48 個。

# %%
one = 16384**2 * 4
print(one / 2**30, "GiB,", 4 * 12 * one / 2**30, "GiB")
assert one == 2**30 and 4 * 12 * one == 48 * 2**30

# %% [markdown]
# **2.** 較大的 m 成為新的 m，各自的 l 與 a 乘上自己的倍數。合併滿足結合律與交換律（除了捨入）：任何形狀的樹都得到同一列。


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
# **3.** 區塊有 M / 4d 列時，v2 搬 8 N^2 d^2 / M 個數字，標準注意力搬 4 N^2（分數與權重各寫一次、讀一次）。M = 2 d^2 時相等：headdim 64 為 8192 個數字，fp32 是 32 KiB。GPU 一個多處理器的共享記憶體是它的好幾倍；headdim 超過 256 就吃緊了，這也是 kernel 大約到那裡為止的原因。

# %%
d = 64
moved = lambda chip: 8 * d**2 / chip
print(2 * d**2, "numbers:", moved(2 * d**2), "N^2 moved by v2, 4 N^2 by standard attention")
assert moved(2 * d**2) == 4 and moved(8 * d**2) == 1

# %% [markdown]
# **4.** 遮罩對齊右下角：最後一個 query 看得到全部七個，第一個看得到 key 0 到 4。被遮住的內容不會影響任何一列，即使是 NaN；所以把某個 key 的 value 設為 NaN，就知道誰看得到它。

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
# **5.** 只要一列還看得到東西，就沒問題：被遮住的分數低得多。什麼都看不到的列，會和 fp32 一樣變成被遮住內容的平均（第 1 章），因為在 -1e9 附近 bf16 的數字相隔四百萬，所有分數都是同一個數。不是數字的遮罩則得到 0。

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
# **6.** 因為 sum_j P_ij dP_ij = sum_j P_ij (dO_i . V_j) = dO_i . O_i，而這兩列在第一塊之前就都有了。

# %%
q, k, v, do = (rng.standard_normal((50, 8)) for _ in range(4))
s = q @ k.T / math.sqrt(8)
p = np.exp(s - s.max(1, keepdims=True))
p /= p.sum(1, keepdims=True)
assert np.allclose((p * (do @ v.T)).sum(1), (do * (p @ v)).sum(1), rtol=1e-10)

# %% [markdown]
# **7.** (N, d) 與 (d, N) 的乘積是 N^2 d 次乘法與同樣多的加法。前向兩次、反向五次：每個 head 4 N^2 d 與 10 N^2 d 次運算。因果遮罩留下 N (N + 1) / 2 對。

# %%
n, d = 1024, 64
plans = {(causal, backward): fattn.plan((1, n, 1, d), (1, n, 1, d), dtype="fp32", causal=causal, backward=backward).flops for causal in (False, True) for backward in (False, True)}
print({f"causal {c}, backward {b}": f"{flops / 1e6:.1f} MFLOP" for (c, b), flops in plans.items()})
assert plans[False, False] == 4 * n * n * d and plans[False, True] == 10 * n * n * d
assert plans[True, False] == 4 * (n * (n + 1) // 2) * d

# %% [markdown]
# **8.** 一列 64 個 query 看得到自己的 64 個 key 與之前的 256 個：5 塊，只有最前面幾列較少。所以大約 5 N / 64 塊，隨 N 成長，而不是隨平方。

# %%
def tiles(n, block=64, window=256):
    return sum(1 for i in range(n // block) for j in range(i + 1) if (j + 1) * block - 1 >= i * block - window)


print(tiles(4096), "of", 64 * 64, "tiles; twice the length:", tiles(8192))
assert tiles(4096) == 5 * 64 - 10 and tiles(8192) == 5 * 128 - 10

# %% [markdown]
# **9.** 把每個 key head 重複給它的四個 query head，結果相同。GQA 省下 k 與 v 的四分之三：快取如此，解碼所讀的也如此。

# %%
q, k, v = (rng.standard_normal((1, 40, heads, 16)).astype(np.float32) for heads in (8, 2, 2))
grouped = fattn.numpy.forward(q, k, v, causal=True)
repeated = fattn.numpy.forward(q, np.repeat(k, 4, axis=2), np.repeat(v, 4, axis=2), causal=True)
assert np.allclose(grouped, repeated, atol=1e-6) and k.nbytes * 4 == np.repeat(k, 4, axis=2).nbytes

# %% [markdown]
# **10.** 剛超過半個末位單位，也就是權重的 2^-8 = 0.0039。更新比它小的權重全都停住；學習率 1e-4 時幾乎是全部。所以最佳化器保留 fp32 的副本。


# %%
def bf16(x):
    """To the nearest bf16, of ties to the even one."""
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


print(bf16(1 + 2**-8), bf16(1 + 1.01 * 2**-8))
assert bf16(1 + 2**-8) == 1 and bf16(1 + 1.01 * 2**-8) > 1
