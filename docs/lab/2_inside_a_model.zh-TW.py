# %% [markdown]
# # 第 2 章：模型內部
#
# 注意力只是模型中許多運算之一。這一章讓 GPT-2 與 BERT 換上另一種注意力，權重一個都不改，證明輸出相同，並量測訓練、提示與逐字解碼。接著談精度：模型的哪些部分承受得了 16 位元、哪些不行，以及每種錯誤看起來是什麼樣子。
#
# 第一部分是 `fattn gpt2`，用 C++ 寫成、不需要 torch 的 GPT-2。其餘需要 `torch` 與 `transformers`（`pip install '.[course,transformers]'`）；沒有的話，那些儲存格會說明並略過。權重是隨機的，不必下載任何東西：時間與誤差和模型學過什麼無關。

# %%
import contextlib
import io
import math
import subprocess
import sys
import tempfile
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np

import fattn

GPU = bool(fattn.info()["cuda"]["devices"])
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


def command(*arguments):
    """Runs `fattn ...` as in a terminal and prints what it says."""
    done = subprocess.run([sys.executable, "-m", "fattn", *map(str, arguments)], capture_output=True, text=True)
    print("$ fattn " + " ".join(map(str, arguments)) + "\n" + done.stdout + done.stderr)
    assert done.returncode == 0


# %% [markdown]
# ## 1. C++ 的 GPT-2
#
# GPT-2 small 有 124,439,808 個參數：50,257 個 token 與 1,024 個位置的嵌入、十二層寬度 768 的注意力與 MLP，以及與嵌入共用權重的輸出層。`fattn gpt2 info` 不需權重檔就能逐一列出：

# %%
command("gpt2", "info", "gpt2")

# %% [markdown]
# `fattn gpt2 init` 以 Hugging Face 的格式寫出隨機權重的模型；`config.json` 可以給別的尺寸。`compare` 用每種注意力各跑一次：相同的權重、相同的 token。最後一欄是判定：最後的隱藏狀態和標準注意力差多少，以及單靠捨入最多能差多少（[docs/GPT2.md](../GPT2.md) 推導了這個上限）。

# %%
folder = tempfile.mkdtemp()
with open(f"{folder}/config.json", "w") as file:
    file.write('{"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 512, "vocab_size": 1000}')
command("gpt2", "init", f"{folder}/model", *(["--preset", "gpt2", "--dtype", "bf16"] if GPU else ["--config", f"{folder}/config.json"]), "--seed", 1)
command("gpt2", "compare", f"{folder}/model", "--batch", 1 if not GPU else 8, "--seqlen", "256" if not GPU else "512,1024")

# %% [markdown]
# `bench` 把提示與解碼分開。提示（prefill）一次處理許多 token：矩陣乘法，受運算能力限制。解碼一個 token 要讀所有權重與快取，只為了一列的工作：受記憶體限制。時間旁的欄位就是這些極限，在同一次執行中於這台機器上量測。

# %%
command("gpt2", "bench", f"{folder}/model", "--batch", "1,4", "--context", "128" if not GPU else "128,512", "--seconds", 0.2 if not GPU else 1)

# %% [markdown]
# ## 2. transformers 的 GPT-2：一個字
#
# `import fattn.transformers` 會註冊名為 "fattn" 的注意力，模型建立時或之後都能用名字選用。其他一概不變：權重、dtype、遮罩與快取都是 transformers 自己的。（自己寫一個注意力層，就得轉置 GPT-2 的 `Conv1D` 權重、讓因果遮罩對齊快取、還不能偷偷轉型。每一項都是經典的錯誤，而這裡都不需要。）

# %%
if TORCH:
    device = "cuda" if GPU else "cpu"
    dtype = torch.bfloat16 if GPU else torch.float32
    sizes = dict(n_layer=12, n_head=12, n_embd=768, n_positions=2048) if GPU else dict(n_layer=2, n_head=4, n_embd=128, n_positions=256)
    torch.manual_seed(0)
    with torch.device("meta"):  # counts, and takes no memory
        whole = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    print(f"GPT-2 small: {whole.num_parameters():,} parameters")
    assert whole.num_parameters() == 124_439_808
    config = transformers.GPT2Config(**sizes, vocab_size=50257 if GPU else 1000, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).to(device, dtype).eval()
    tokens = torch.randint(1, config.vocab_size, (2, 1024 if GPU else 128), device=device)
    print("here:", {**sizes, "dtype": str(dtype), "device": device, "tokens": tuple(tokens.shape)})
    comparison = fattn.transformers.compare(model, {"input_ids": tokens}, baseline="eager", repeat=5)
    assert comparison.passed

# %% [markdown]
# 判定用的不是隨意挑的數字。兩者的輸出都與同一個模型的 float64 結果相比；fattn 的誤差最多是被取代的注意力的兩倍，再加一個末位單位。只拿兩個 16 位元的輸出互比，說不出誰錯。
#
# `fattn.doctor` 對你自己的模型說同樣的事：哪些層用 fattn、哪些沒有、為什麼，以及可以期待什麼。

# %%
if TORCH:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        print(fattn.doctor(model, {"input_ids": tokens}, repeat=2))

# %% [markdown]
# ## 3. 訓練：前向、反向、更新
#
# 各部分的時間，三種注意力輪流執行，取中位數。記憶體是一步之中 torch 配置器的峰值減去之前已有的量，每次量測前重設（只有 GPU；CPU 的配置器不提供）。

# %%
def seconds_of(call, repeat=7):
    times = []
    for _ in range(repeat + 1):
        if GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))  # the first one warms up


class Training:
    """A model with an attention, its optimizer, and what its steps took."""

    def __init__(self, name):
        torch.manual_seed(1)
        self.model = transformers.GPT2LMHeadModel(config).to(device).train()
        self.model.set_attn_implementation(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses, self.peak, self.seconds = [], math.nan, {"forward": [], "backward": [], "step": []}

    def part(self, name, work):
        start = time.perf_counter()
        result = work()
        if GPU:
            torch.cuda.synchronize()
        self.seconds[name].append(time.perf_counter() - start)
        return result

    def step(self):
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=GPU):  # weights and optimizer stay in fp32
            loss = self.part("forward", lambda: self.model(tokens, labels=tokens).loss)
        self.part("backward", loss.backward)
        self.part("step", self.optimizer.step)
        if GPU:
            self.peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())

    def median(self, name):
        return float(np.median(self.seconds[name][1:])) * 1e3  # the first one warms up


if TORCH:
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0  # so that losses can be compared
    found = {name: Training(name) for name in ("eager", "sdpa", "fattn")}
    for _ in range(8 if GPU else 4):
        for training in found.values():
            training.step()
    print(f"{'attention':>10} {'forward':>10} {'backward':>10} {'step':>10} {'tokens/s':>10} {'peak MiB':>9}   losses")
    for name, training in found.items():
        parts = {part: training.median(part) for part in training.seconds}
        print(f"{name:>10} " + " ".join(f"{x:7.1f} ms" for x in parts.values()) + f" {tokens.numel() / sum(parts.values()) * 1e3:10.0f} "
              f"{f'{training.peak:9.0f}' if GPU else '        -'}   " + " ".join(f"{x:.3f}" for x in training.losses))
    assert np.allclose(found["fattn"].losses, found["eager"].losses, rtol=5e-2 if GPU else 1e-4)
    figure, ax = plt.subplots(figsize=(6, 3))
    bottom = np.zeros(3)
    for part in ("forward", "backward", "step"):
        heights = np.array([training.median(part) for training in found.values()])
        ax.bar(list(found), heights, bottom=bottom, label=part)
        bottom += heights
    ax.set(title="a training step", ylabel="ms")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    del found

# %% [markdown]
# 損失相同：梯度除了捨入都一樣。一步能快多少，取決於注意力佔多少：序列短時很少（與權重相乘的部分隨 N 成長，注意力隨 N^2），序列長時幾乎全部。那是第 3 章。
#
# ## 4. 提示，以及一次一個 token
#
# 一個請求先是一次算完的提示，再來是靠 key 與 value 的快取逐一產生的 token。第一個 token 的延遲就是提示的時間。有快取時，query 是最後的 token：因果遮罩要對齊右下角（第 1 章），否則文字就變了。

# %%
if TORCH:
    prompt, new = tokens[:1, :64], 64 if GPU else 8
    texts = {}
    for name in ("eager", "sdpa", "fattn"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            generate = lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, pad_token_id=0)
            first = seconds_of(lambda: model(prompt), repeat=5)
            texts[name] = generate()[0, prompt.shape[1] :].tolist()
            all_of_it = seconds_of(generate, repeat=2)
        print(f"{name:>6}: prompt of {prompt.shape[1]} {first * 1e3:7.2f} ms, then {(all_of_it - first) / (new - 1) * 1e3:6.2f} ms a token; text {texts[name][:8]} ...")
    batch = tokens[:1, :64].repeat(8, 1)
    with torch.no_grad():
        took = seconds_of(lambda: model(batch), repeat=5)
    print(f"eight prompts at once: {took * 1e3:.2f} ms, {batch.numel() / took:.0f} tokens/s")
    if not GPU:  # in bf16 two tokens can be as likely as rounding can tell
        assert texts["fattn"] == texts["eager"]

# %% [markdown]
# ## 5. BERT：每個 token 看得到所有 token，但看不到補齊的部分
#
# BERT 不是因果的，它的遮罩是補齊：一批長短不一的句子。`attention_mask` 在有 token 的地方是 1。fattn 把這樣的一批當作各自長度的序列，完全不計算補齊的部分。

# %%
if TORCH:
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=768 if GPU else 128, num_hidden_layers=12 if GPU else 2, num_attention_heads=12 if GPU else 4,
                                                          intermediate_size=3072 if GPU else 512, vocab_size=1000)).to(device, dtype).eval()
    length = 512 if GPU else 128
    lengths = [length, length // 2, length // 4, length // 8]
    sentences = torch.randint(1, 1000, (4, length), device=device)
    padding = (torch.arange(length, device=device) < torch.tensor(lengths, device=device)[:, None]).long()
    print(f"tokens of {lengths} in rows of {length}: {padding.float().mean():.0%} are no padding")
    assert fattn.transformers.compare(bert, {"input_ids": sentences, "attention_mask": padding}, baseline="sdpa", repeat=5).passed

# %% [markdown]
# ## 6. 哪些部分承受得了 16 位元
#
# 一次呼叫的 q、k、v 是同一種 dtype；以 16 位元相乘、以 fp32 加總，正是 GPU 的專長。模型的某些部分承受不了 16 位元。`fattn.precision.Policy` 說明各部分用什麼計算，拒絕行不通的組合；`Tracker` 在執行中的模型裡找出違反規則之處。逐條示範每條規則的失敗：
#
# **混用 dtype。** `fattn.attention` 會指名拒絕。`safe_attention` 以不損失資訊的 dtype 計算，再轉回 q 的 dtype。它從不把 bf16 變成 fp16，因為 bf16 的範圍較大。

# %%
if TORCH:
    import torch.nn.functional as F

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    try:
        fattn.attention(q, k.half(), v.half())
    except ValueError as error:
        print("refused:", error)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        o = fattn.precision.safe_attention(q.half(), k.bfloat16(), v.bfloat16())
    print("safe_attention:", o.dtype, "-", said[0].message)
    try:
        fattn.precision.Policy(layernorm=torch.float16)
    except ValueError as error:
        print("a policy that breaks a rule:", error)

# %%
if TORCH:
    RULES, shown = fattn.precision.RULES, {}

    # layernorm: a mean of squares
    x = torch.full((1024,), 300.0)
    shown["layernorm"] = f"mean square of 300s: fp16 {x.half().square().mean().item()}, fp32 {x.square().mean().item():.0f}"

    # attention_weights: a softmax whose weights and sum are in 16 bits
    s = torch.zeros(4096).bfloat16()
    w, total = torch.exp(s), torch.zeros((), dtype=torch.bfloat16)
    for one in w:
        total = total + one
    shown["attention_weights"] = f"4096 equal weights, summed one by one in bf16: {total.item():.0f}; so they would sum to {(w.float() / total.float()).sum().item():.0f}, not 1"

    # loss: digits
    logits, labels = torch.randn(512, 1000) * 3, torch.randint(0, 1000, (512,))
    exact = F.cross_entropy(logits.double(), labels).item()
    low = F.cross_entropy(logits.bfloat16(), labels).item()
    shown["loss"] = f"cross entropy {exact:.5f}; in bf16 {low:.5f}: a change of the loss below {abs(2.0 ** (math.floor(math.log2(exact)) - 7)):.3f} does not show"

    # optimizer: updates below half a unit in the last place
    small, master = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(1000):
        small, master = small + 1e-3, master + 1e-3
    shown["optimizer"] = f"1 + 1000 updates of 0.001: bf16 {small.item()}, fp32 {master.item():.3f}; so weights have a master copy in fp32"

    # mask: beyond the range
    hidden = torch.full((1, 4), -1e9).half()
    shown["mask"] = f"-1e9 in fp16 is {hidden[0, 0].item()}, softmax of a row of it {torch.softmax(hidden, -1)[0].tolist()}"

    # gradients: below the range
    weight = torch.tensor(1.0, requires_grad=True)
    plain, = torch.autograd.grad((weight.half() * torch.tensor(1e-8).half()).float(), weight)
    scaled, = torch.autograd.grad(weight.half() * (torch.tensor(1e-8) * 2**16).half(), weight)
    shown["gradients"] = f"a gradient of 1e-8: fp16 {plain.item()}; of a loss times 65536, then divided: {scaled.item() / 2**16:.2e}"

    # policy: the tracker's findings in a model that is in fp16 as a whole, its layer norms, softmax and parameters with it
    bad = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=64, vocab_size=64, attn_implementation="eager")).half()
    with fattn.precision.Tracker(bad) as tracker:
        bad(torch.randint(0, 64, (1, 16)))
    found = {violation.rule for violation in tracker.violations}
    shown["policy"] = f"the tracker in a GPT-2 after model.half(): {len(tracker.violations)} violations of {sorted(found)}"
    assert {"policy", "optimizer"} <= found

    for rule, what in shown.items():
        print(f"{rule}\n  why:   {RULES[rule]}\n  shown: {what}")
    assert set(shown) == set(RULES)

# %% [markdown]
# `fattn.precision.apply` 以 hook 讓模型依政策計算：參數保持原樣，維持 fp32，最佳化器更新的就是這些參數。

# %%
if TORCH:
    good = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=64, vocab_size=64, attn_implementation="fattn"))
    inputs = torch.randint(0, 64, (1, 16))
    with fattn.precision.apply(good, fattn.precision.Policy()), fattn.precision.Tracker(good) as tracker:
        good(inputs, labels=inputs).loss.backward()
    print(tracker.report() or "nothing found", "| parameters in", next(good.parameters()).dtype, "| gradients in", next(good.parameters()).grad.dtype)
    good.zero_grad()

# %% [markdown]
# 16 位元的模型離 fp32 有多遠，主要由權重與活化值決定，而不是注意力。同一個模型以三種 dtype，分別用 eager 注意力與 fattn，各自與 float64 相比：

# %%
if TORCH:
    rows = []
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        sample = transformers.GPT2Model(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=128, n_positions=256, vocab_size=1000)).to(kind).eval()
        with contextlib.redirect_stdout(io.StringIO()):
            rows.append((str(kind).removeprefix("torch."), fattn.transformers.compare(sample, {"input_ids": torch.randint(0, 1000, (1, 128))}, repeat=2)))
    figure, ax = plt.subplots(figsize=(6, 3))
    x = np.arange(len(rows))
    ax.bar(x - 0.2, [row.error_baseline for _, row in rows], 0.4, label="eager")
    ax.bar(x + 0.2, [row.error for _, row in rows], 0.4, label="fattn")
    ax.set(title="largest error of the last hidden state", yscale="log", xticks=x, xticklabels=[name for name, _ in rows])
    ax.legend()
    for name, row in rows:
        print(f"{name:>9}: eager {row.error_baseline:.1e}, fattn {row.error:.1e}, allowed {row.allowed:.1e}")
        assert row.passed

# %% [markdown]
# ## 帶走什麼
#
# - 注意力用名字替換；權重、遮罩與快取不變。
# -「相同」是由 float64 與 dtype 得來的上限，不是用眼睛看的。
# - 提示受運算限制，解碼受記憶體限制。
# - q、k、v 用 16 位元；正規化、softmax、損失與最佳化器用 fp32；遮罩不是數字。
#
# 接著看第 3 章：[長序列](3_long_sequences.zh-TW.py)。
