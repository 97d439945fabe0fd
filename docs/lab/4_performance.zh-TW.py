# %% [markdown]
# # 第 4 章：效能分析
#
# 它為什麼這麼快，怎樣才能更快？答案永遠是某個極限：運算、指數函數、頻寬，或是光啟動就需要的時間。這一章量測這台機器的極限，把各種形狀與極限相比，先預測時間再量測，並以正確的方式比較兩次量測。

# %%
import json
import os
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
# ## 1. 這台機器最多能做多少
#
# `fattn calibrate` 量測一次並保存。從表中讀兩個商。FLOP/s 除以 DRAM 的 bytes/s：每個位元組的運算少於這個數的 kernel 都在等記憶體。FLOP/s 除以每秒指數函數的次數：softmax 對每一對 query 與 key 需要一次指數函數，在矩陣單元很快的晶片上，所花的時間可能和矩陣乘法一樣多。

# %%
command("calibrate", *WHERE[:2])

# %% [markdown]
# ## 2. 什麼在限制
#
# `fattn memory` 對每個形狀數出運算、指數函數與各層的位元組，再除以各自的速率。最大的商就是限制所在，也是時間的下限。長序列與提示：運算。超出快取的標準注意力：頻寬。解碼只有一個 query：把 k 與 v 讀一遍，每個數字只做兩次運算，不論 kernel 怎麼寫都在等記憶體。而很短的呼叫，在所有處理器啟動之前就結束了。

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
# 同樣的事畫成 roofline：每位元組的運算量對上可達到的速度。轉折點以左受記憶體限制，以右受運算限制。FlashAttention 把形狀往右移：運算相同，位元組較少。

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
# ## 3. 先預測，再量測
#
# 從沒錯過的效能模型，是從沒被問過的模型。`fattn predict` 由計畫與校準得知時間，什麼都不必執行；這裡先量測，再拿預測來對。

# %%
folder = tempfile.mkdtemp()
sizes = ["--batch", 4, "--nheads", 16, "--headdim", 128] if GPU else ["--batch", 1, "--nheads", 4, "--headdim", 64, "--repeats", 6, "--min-time", 0, "--max-time", 0.1]
command("bench", *WHERE, *sizes, "--seqlen", 4096 if GPU else 512, "--causal", "--json", f"{folder}/bench.json")
command("predict", "--against", f"{folder}/bench.json")

# %% [markdown]
# ## 4. 如何擴展
#
# 序列越多，機器越滿；滿了之後每秒 token 數不再增加，只有延遲增加。轉折在哪裡，就說明哪個 batch 最適合。

# %%
over = dict(values=[1, 2, 4, 8, 16], nheads=16, headdim=64, seqlen=1024, dtype="bf16", device="cuda", algorithm="standard,auto") if GPU else dict(
    values=[1, 2, 4], nheads=2, headdim=64, seqlen=256, repeats=6, min_time=0, max_time=0.1, algorithm="standard,v2")
frame = fattn.lab.sweep("batch", causal=True, no_grad=True, progress=False, **over)
for sentence in frame.attrs["findings"]:
    print("-", sentence)
fattn.lab.figure(frame)

# %% [markdown]
# ## 5. 較好、較差，或只是雜訊
#
# 時間會變動。三次呼叫的平均不能說明什麼；「快 3 %」需要區間。`fattn regress` 逐列比較兩份紀錄，其中一種答案是「無法判定」。先讓同一個程式和自己相比，不能被說成較差或較好（margin 是多大的變化仍算沒有變化：安靜的機器上是 1 %，小問題、少數幾次呼叫時要大一些；`--across-clocks` 讓它在時脈已改變時仍然比較）；再比較 v1 與 v2。

# %%
race = ["compare", *WHERE, *sizes, "--seqlen", 2048 if GPU else 256, "--no-grad", "--algorithm", "standard,v1,v2"]
command(*race, "--json", f"{folder}/first.json")
command(*race, "--json", f"{folder}/second.json")
command("regress", "--baseline", f"{folder}/first.json", "--current", f"{folder}/second.json", "--margin", 3 if GPU else 50, "--across-clocks", "--all", codes=(0, 1))
command("regress", "--baseline", f"{folder}/first.json", "--current", f"{folder}/first.json", "--match", "v1=v2", codes=(0, 1))

# %% [markdown]
# ## 6. 時間花在哪裡
#
# `torch.profiler` 列出標準注意力的運算：兩次乘法、一次 softmax，以及在其間搬動矩陣的動作。fattn 只有一個。

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
# `fattn profile` 更深入：一個資料夾，包含各項運算、與第 2 節計數並列的硬體計數器、隨時間變化的記憶體與時間軸（[docs/PROFILING.md](../PROFILING.zh-TW.md) 說明每個數字）。`fattn watch` 即時顯示 GPU 與執行中的量測。

# %%
command("profile", *WHERE, *sizes[:6], "--seqlen", 4096 if GPU else 256, "--out", f"{folder}/profile")
print(sorted(os.listdir(f"{folder}/profile")))

# %% [markdown]
# ## 7. 什麼時候用哪一種
#
# 規則要由它所適用的機器量測而來。`fattn advise --when` 在這台機器上搜尋從哪個長度開始 fattn 比標準注意力快，分別針對推理、訓練與解碼，並列出每句話背後的對決。

# %%
command("advise", "--when", "--longest", 4096 if GPU else 256, *WHERE[:2])

# %% [markdown]
# ## 學習檢查清單
#
# 現在你能說明與做到的事，以及它在哪裡出現過：
#
# | | 出處 |
# |--|--|
# | **理論理解** | |
# | 解釋標準 attention 的記憶體瓶頸 | 1.1 |
# | 理解 GPU 記憶體階層（HBM 與 SRAM） | 1.4、4.1、4.2 |
# | 說明 FlashAttention 的核心演算法 | 1.2、1.3、3.2 |
# | 對比 FlashAttention v1 與 v2 | 1.3、1.4 |
# | IO 感知的設計：數位元組，不只數運算 | 1.4、4.2 |
# | **實作技能** | |
# | 安裝並驗證 fattn | 1、`fattn info`、`fattn check` |
# | 實現標準 attention | 1.1 |
# | 在模型中替換注意力 | 2.2 |
# | 訓練長序列 | 3.6 |
# | 分析 FlashAttention 的效能 | 本章 |
# | **應用能力** | |
# | 為專案選擇合適的 attention | 4.7 |
# | 長序列訓練的設定 | 3.1、`fattn advise` |
# | 診斷與解決常見問題 | [故障排除](../TROUBLESHOOTING.zh-TW.md) |
# | 評估 FlashAttention 的效益 | 1.7、2.3、4.5 |
#
# [練習](exercises.zh-TW.py)會問其中一部分。[最佳實踐](../BEST_PRACTICE.zh-TW.md)是精簡版。
