# %% [markdown]
# # 第 3 章：長序列
#
# 長序列要付出什麼、為什麼反向計算要把分數重算一次、遮罩省下哪些工作，以及如何用整份檔案而不是片段來訓練。訓練的部分需要 `torch` 與 `transformers`；沒有的話，那些儲存格會說明並略過。

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
# ## 1. 放得下多少
#
# 訓練時，標準注意力要把每一層的權重保留到反向計算：每層 batch x heads x N^2 個數字。FlashAttention 只留 o 與每列一個數（lse）。模型其餘的部分隨 N 成長。`fattn advise` 針對模型與記憶體逐項相加：用多大的 batch、活化值是否需要重算（checkpointing）、fattn 需要多少，以及同樣的 batch 用標準注意力需要多少。不加 `--json` 時會印出每一行的算式與可直接貼上的設定。

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
# ## 2. 為什麼反向要重算
#
# 設 $dO$ 為輸出的梯度，$P$ 為權重，連鎖律給出
#
# $$ dV = P^T dO, \quad dP = dO\,V^T, \quad dS = P \circ (dP - D), \quad dQ = \tfrac{1}{\sqrt d}\, dS\,K, \quad dK = \tfrac{1}{\sqrt d}\, dS^T Q $$
#
# 其中 $D_i = \sum_j P_{ij} dP_{ij}$ 來自 softmax 的正規化。看似需要整列，但 $\sum_j P_{ij} (dO_i \cdot V_j) = dO_i \cdot \sum_j P_{ij} V_j = dO_i \cdot O_i$：只是兩個現成的列的內積。
#
# 這一切都再次用到 $P$。要嘛存起來，N^2 個數字寫到記憶體再讀回來；要嘛由 q、k 與前向留下的 $\mathrm{lse}_i = \log \sum_j e^{S_{ij}}$ 一塊一塊重算：$P_{ij} = e^{S_{ij} - \mathrm{lse}_i}$，完全精確，不必再求最大值或總和。代價是多一次矩陣乘法（五次而非四次），而且到處都沒有 N^2。


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
# 保留了什麼、計算了什麼，以一個 head 畫出：

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
# 注意力的前向加反向是七次乘法而不是六次。那麼時間呢？量測前向與反向：

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
# ## 3. 遮罩省下的工作
#
# 沒有人看的區塊會跳過。因果遮罩留下一半的區塊；w 個 key 的滑動視窗只留下 N^2 對中的 N w 對，時間因此隨 N 成長；前後相接的多份文件，則是各自長度的平方和。

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
# ## 4. 可以合併的部分：解碼與環狀
#
# 有了 lse，部分結果就能合併。若 o1、lse1 是對某些 key 的注意力，o2、lse2 是對其他 key 的，則對全部 key 的注意力是兩者以 exp(lse) 加權的平均。Flash-Decoding 就是這樣把一個 query 的長快取分給所有處理器；ring attention 讓 key 的區塊在 GPU 之間繞一圈，合併每一步的結果。GQA 讓快取變小：多個 query head 共用 key 的 head。

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
# ## 5. 資料：整份檔案
#
# 長序列需要長文件：整份原始碼、對話、文章。這裡用 Python 自己的模組，以位元組表示，一份檔案一份文件。把它們變成 N 個 token 的列有兩種方式：比 N 長的文件切成多列；短的首尾相接，而注意力不得跨越邊界（`document_q`，或重新起算的位置）。

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
# ## 6. 訓練
#
# 一個以位元組為單位的小 Llama：旋轉位置編碼（RoPE）把 q 與 k 轉一個隨位置增加的角度，分數只取決於距離，沒有哪個長度是位置表的盡頭。fattn 看到的是轉過的 q 與 k。
#
# 一列可以多長？每種注意力各訓練一步，長度逐次加倍；記憶體不足的一列會引發 `OutOfMemoryError`，就照實寫出。在 CPU 上長度保持很小，不會用盡。

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
# 接著真正訓練，並處理長列的需要：一次放得下的列很少，所以要累積多列的梯度。有兩個常見的錯誤。一輪最後的累積較小，卻被丟掉，或被當成完整的來加權；這裡每一列依 token 數計。另一個是非有限的梯度進入權重；這裡會跳過那一步並說出來。

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
# 它用到遠處的內容了嗎？一列中越後面的位元組，前面的內容越多；學會往回看的模型，列尾的損失會比列首低。（這個模型只走了幾步。）

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
# ## 7. 用 C++ 做同樣的事
#
# `fattn gpt2 eval` 以視窗讀過一篇長文，用 C++、不需要 torch；`config.json` 裡設定旋轉位置與共用的 key head，就是這樣的模型。權重是隨機的，所以損失接近瞎猜的 log(256) = 5.545。

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
# ## 帶走什麼
#
# - 反向計算以一次乘法換掉 N^2 個數字的記憶體。
# - 被遮住的區塊不花錢：視窗與文件讓長列變便宜。
# - lse 能合併部分：分割的快取、環。
# - 依 token 累積，保留最後不完整的一組，並注意梯度的範數。
#
# 接著看第 4 章：[效能分析](4_performance.zh-TW.py)。
