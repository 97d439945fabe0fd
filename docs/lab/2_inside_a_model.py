# %% [markdown]
# # Chapter 2: inside a model
#
# Attention is one operation of many in a model. Here GPT-2 and BERT get another attention without another weight, the
# output is shown to be the same, and training, prompts and decoding are timed. Then precision: which part of a model bears
# 16 bits, which does not, and what each mistake looks like.
#
# The first part is `fattn gpt2`, a GPT-2 in C++ that needs no torch. The rest needs `torch` and `transformers`
# (`pip install '.[course,transformers]'`); without them its cells say so and do nothing. Weights are random, so that
# nothing is fetched: time and errors do not depend on what a model has learnt.

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
# ## 1. GPT-2 in C++
#
# GPT-2 small has 124,439,808 parameters: embeddings of 50,257 tokens and 1,024 places, twelve layers of attention and MLP
# of width 768, and a head that shares the embedding. `fattn gpt2 info` counts them by tensor, without a file of weights:

# %%
command("gpt2", "info", "gpt2")

# %% [markdown]
# `fattn gpt2 init` writes such a model with random weights, in Hugging Face's format; a `config.json` gives another size.
# `compare` runs it once with each attention: the same weights, the same tokens. The last column is the verdict: how far the
# last hidden state is from that of standard attention, and how far rounding alone can bring it ([docs/GPT2.md](../GPT2.md)
# derives the bound).

# %%
folder = tempfile.mkdtemp()
with open(f"{folder}/config.json", "w") as file:
    file.write('{"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 512, "vocab_size": 1000}')
command("gpt2", "init", f"{folder}/model", *(["--preset", "gpt2", "--dtype", "bf16"] if GPU else ["--config", f"{folder}/config.json"]), "--seed", 1)
command("gpt2", "compare", f"{folder}/model", "--batch", 1 if not GPU else 8, "--seqlen", "256" if not GPU else "512,1024")

# %% [markdown]
# `bench` tells prompts from decoding. A prompt (prefill) is many tokens at once: matrix products, limited by arithmetic.
# A decoded token reads all weights and the cache for one row of work: limited by memory. The columns beside the times are
# those limits, measured on this machine in the same run.

# %%
command("gpt2", "bench", f"{folder}/model", "--batch", "1,4", "--context", "128" if not GPU else "128,512", "--seconds", 0.2 if not GPU else 1)

# %% [markdown]
# ## 2. GPT-2 of transformers: one word
#
# `import fattn.transformers` registers the attention "fattn". A model takes it by name, when it is made or later. Nothing
# else changes: weights, dtypes, masks and the cache are transformers' own. (A layer written by hand must transpose GPT-2's
# `Conv1D` weights, align its causal mask with the cache and cast nothing behind the caller's back. Each of these is a
# classic mistake, and none of them is needed.)

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
# The verdict is not a number that was chosen. Both outputs are held against the same model in float64; fattn's error may be
# at most twice the error of the attention that it takes the place of, plus one unit in the last place. A comparison with the
# other 16-bit output alone could not say which of the two is wrong.
#
# `fattn.doctor` says the same of a model that you bring: which layers run fattn, which not and why, and what to expect.

# %%
if TORCH:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        print(fattn.doctor(model, {"input_ids": tokens}, repeat=2))

# %% [markdown]
# ## 3. Training: forward, backward, step
#
# Times of the parts, each attention in turns; medians. Memory is the peak of torch's allocator during a step beyond what
# was there before it, reset before each measurement (a GPU's only: the CPU's allocator does not tell).

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
# The losses are the same: the same gradients up to rounding. How much a step gains depends on how much of it attention is:
# with short sequences little (the products with weights grow with N, attention with N^2), with long ones nearly all. That
# is chapter 3.
#
# ## 4. Prompts, and one token at a time
#
# A request is a prompt, computed at once, then tokens one by one with a cache of keys and values. The latency of the first
# token is the prompt's. With a cache the queries are the last tokens: causal masks align to the bottom right (chapter 1), or
# the text is another one.

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
# ## 5. BERT: every token sees every other, but not the padding
#
# BERT is not causal. Its mask is padding: a batch of sentences of unequal length. `attention_mask` has ones where tokens
# are. fattn takes such a batch as sequences of their own lengths and computes no padding at all.

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
# ## 6. Which part bears 16 bits
#
# q, k and v of one call have one dtype; products in 16 bits with sums in fp32 are what GPUs are made for. Some parts of a
# model do not bear 16 bits. `fattn.precision.Policy` says which part computes in what, refuses what does not work, and
# `Tracker` finds what breaks a rule in a model that runs. Each rule's failure, shown:
#
# **Mixed dtypes.** `fattn.attention` refuses them by name. `safe_attention` computes in the dtype that loses nothing, and
# returns q's. It never makes fp16 of bf16: bf16 has a larger range.

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
# `fattn.precision.apply` has a model compute by a policy, by hooks: parameters stay as they are, in fp32, and what the
# optimizer updates are the parameters.

# %%
if TORCH:
    good = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=64, vocab_size=64, attn_implementation="fattn"))
    inputs = torch.randint(0, 64, (1, 16))
    with fattn.precision.apply(good, fattn.precision.Policy()), fattn.precision.Tracker(good) as tracker:
        good(inputs, labels=inputs).loss.backward()
    print(tracker.report() or "nothing found", "| parameters in", next(good.parameters()).dtype, "| gradients in", next(good.parameters()).grad.dtype)
    good.zero_grad()

# %% [markdown]
# How far the error of a 16-bit model is from the fp32 one is mostly decided by its weights and activations, not by
# attention. The same model in three dtypes, with eager attention and with fattn, each against float64:

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
# ## What to take along
#
# - Attention is exchanged by name; weights, masks and caches stay.
# - "The same" is a bound that comes from float64 and the dtype, not from looking.
# - Prompts are limited by arithmetic, decoding by memory.
# - q, k, v in 16 bits; norms, softmax, loss and optimizer in fp32; masks that are no numbers.
#
# Go on with chapter 3, [long sequences](3_long_sequences.py).
