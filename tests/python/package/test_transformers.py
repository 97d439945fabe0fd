"""attn_implementation="fattn" on small random models of transformers: equal to eager, with padding, caches, generation, training, compiled."""

import contextlib
import copy
import os

import forked
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import fattn.transformers  # noqa: E402
from attention_reference import reordered, rounded  # noqa: E402
from fattn import precision  # noqa: E402
from fattn._compare import Float64  # noqa: E402
from fattn._operators import OPTIONS  # noqa: E402
from fattn._scores import Scores  # noqa: E402

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 128}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**SMALL, **TOKENS, "intermediate_size": 96, "num_key_value_heads": 2}


LAYER = 64, 64, 32, 23, 128, 64, 64, 256  # norm, q k v, q k, over the keys, the four heads' o, norm, the two products of gpt2's MLP, the widest
WHOLE = *LAYER, *LAYER, 64, 64  # with the last norm and the logits
NORMS = (64,) * 5  # what models in float64 compute in float32, if not in Float64


def near(got: torch.Tensor, wanted: torch.Tensor, dtype: str = "float64", sums: tuple[int, ...] = WHOLE) -> None:
    """Of a model: numbers inside are as great as the greatest outside."""
    torch.testing.assert_close(got, wanted, **reordered(dtype, *sums, largest=float(wanted.detach().abs().max())))


def gradients_are_near(got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: str = "float64", sums: tuple[int, ...] = WHOLE) -> None:
    """Of both passes. A bias of keys has a gradient of 0: what is left of the greatest numbers."""
    bound, rest = (reordered(name, *terms * 2)["atol"] for name, terms in ((dtype, sums), ("float64", WHOLE)))
    greatest = max(float(y.abs().max()) for y in wanted)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=bound * float(y.abs().max()) + rest * greatest)


def config_of(name: str):
    if name == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=128, **TOKENS)
    if name == "bert":
        return transformers.BertConfig(**SMALL, intermediate_size=96, pad_token_id=0)
    if name == "llama":
        return transformers.LlamaConfig(**GROUPED)
    if name == "mistral":
        return transformers.MistralConfig(**GROUPED, sliding_window=7)
    if name == "gemma2":
        return transformers.Gemma2Config(**GROUPED, head_dim=32, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=4)
    if name == "gpt_oss":
        return transformers.GptOssConfig(**GROUPED, head_dim=32, sliding_window=7, num_local_experts=4, num_experts_per_tok=2)
    return transformers.Qwen3Config(**GROUPED, head_dim=32)


def compiled(*names: str, short: str) -> list[str]:
    """Compiling takes seconds a model: one that has what the test is about, and the others too with FATTN_TEST_WHOLE=1 (`make test-all`)."""
    return [*names, short] if os.environ.get("FATTN_TEST_WHOLE") == "1" else [short]


NAMES = ["gpt2", "bert", "llama", "mistral", "gemma2", "gpt_oss", "qwen3"]
CAUSAL = [name for name in NAMES if name != "bert"]


def model_of(name: str, causal_lm: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32, **options):
    torch.manual_seed(0)
    config = config_of(name)
    for key, value in options.items():
        setattr(config, key, value)
    kind = transformers.AutoModelForCausalLM if causal_lm else transformers.AutoModel
    model = kind.from_config(config, attn_implementation="fattn").eval()
    for parameter in model.parameters():  # scores large enough that a mask, the cap and the scale matter
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
    return model.to(device, dtype)


def inputs_of(padding: str = "none", device: str = "cpu", seqlen: int = 23) -> dict:
    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(3, 97, (4, seqlen))}
    if padding != "none":
        mask = torch.ones(4, seqlen, dtype=torch.long)
        for b, n in ((0, 5), (1, 5), (3, seqlen - 1)):  # two of the same length
            mask[b, :n] = 0
        inputs["attention_mask"] = mask if padding == "left" else mask.flip(1)
    return {name: x.to(device) for name, x in inputs.items()}


def dtype_on(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def computed(device: str, name: str) -> bool:
    """Windows and softcap are asked of the library, all else must be computed."""
    options = {"mistral": {"window": (6, 0)}, "gpt_oss": {"window": (6, 0)}, "gemma2": {"window": (6, 0), "softcap": 2.0}}.get(name, {})
    return bool(fattn.support((1, 23, 4, 32), (1, 23, 2, 32), dtype="fp32" if device == "cpu" else "bf16", device=device, causal=True, **options))


@pytest.fixture
def calls(monkeypatch):
    """How often fattn, and how often standard attention was called by the adapter."""
    counts = {"_attention": 0, "_attention_varlen": 0, "_standard": 0}
    for function in counts:
        original = getattr(fattn.transformers, function)

        def counted(*arguments, function=function, original=original, **options):
            counts[function] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(fattn.transformers, function, counted)
    return counts


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_eager(name, padding, device, calls, capsys):
    model = model_of(name, device=device, dtype=dtype_on(device))
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    if not computed(device, name):
        with pytest.raises(NotImplementedError):
            model(**inputs_of(padding, device))
        return
    result = fattn.transformers.compare(model, inputs_of(padding, device), repeat=1)
    assert result.passed, str(result)
    assert calls["_attention"] > 0 and calls["_standard"] == 0
    assert model.config._attn_implementation == "fattn"
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())
    assert "times as fast; the outputs agree" in capsys.readouterr().out


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_and_gradients_in_float64(name, padding):
    """Where rounding hides nothing: what a wrong mask does is far above the bound."""
    model = model_of(name, dtype=torch.float64)
    inputs = inputs_of(padding)
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    outputs, gradients = [], []
    for implementation in ("eager", "fattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with Float64():
            outputs.append(model(**inputs)[0][counts])
        outputs[-1].square().sum().backward()
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    near(outputs[1], outputs[0])
    gradients_are_near(*reversed(gradients))


@pytest.mark.parametrize(("padding", "cache"), [("none", "static"), ("left", "dynamic")])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate(name, padding, cache, calls):
    """Longer than the windows."""
    model = model_of(name, causal_lm=True, dtype=torch.float64)
    inputs = inputs_of(padding, seqlen=9)
    results = []
    for implementation in ("eager", "fattn"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
        if cache == "static":
            options["cache_implementation"] = "static"
        with Float64():
            results.append(model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True))
    for x, y in zip(results[0].logits, results[1].logits, strict=True):
        near(y, x)
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert calls["_attention"] > 0


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", compiled("gpt2", "gemma2", short="mistral"))
def test_generate_compiled(name, padding, lengths, monkeypatch):
    """A step is compiled once; where a window's cache fills, as often as transformers needs. Without padding nothing is stored for the pairs, unless a device has no
    lengths."""
    if not lengths:
        monkeypatch.setattr(fattn.transformers, "_computed", lambda feature, *_: feature != "lengths")
    model, made = model_of(name, causal_lm=True), []
    mapping = fattn.transformers.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(mapping, "fattn", lambda *x, **options: made.append(fattn.transformers.mask_for(*x, **options)) or made[-1])
    results, graphs = [], []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for implementation in ("eager", "fattn"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0, "cache_implementation": "static"}
        if implementation == "fattn":
            torch._dynamo.reset()
            options["compile_config"] = transformers.CompileConfig(backend=counted, fullgraph=True, mode=None)
            options["compile_config"]._compile_all_devices = True
        with torch.no_grad():
            results.append(model.generate(**inputs_of(padding, seqlen=5 if padding == "none" else 9), **options))
    assert torch.equal(*results)
    assert 1 <= len(graphs) <= (1 if name == "gpt2" else 4)
    steps = [x for x in made if x is not None and x.dim() == 4]
    assert steps and all(x.dtype == torch.int32 and x.shape == (4, 1, 1, 1) if padding == "none" else x.dtype == torch.bool for x in steps)


def test_tokens_in_steps():
    """A prompt in two parts: queries behind a cache."""
    model = model_of("llama", causal_lm=True, dtype=torch.float64)
    tokens = inputs_of()["input_ids"]
    whole = model(tokens).logits
    first = model(tokens[:, :10], use_cache=True)
    second = model(tokens[:, 10:], past_key_values=first.past_key_values).logits
    near(second, whole[:, 10:])


@pytest.mark.parametrize("name", CAUSAL)
def test_holes(name, calls):
    """Prompts padded on the right, then tokens that see them: no range of keys."""
    model = model_of(name, causal_lm=True, dtype=torch.float64)
    prompt, more = inputs_of("right"), inputs_of(seqlen=4)["input_ids"]
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(more)], dim=1)
    logits = []
    for implementation in ("eager", "fattn"):
        model.set_attn_implementation(implementation)
        with Float64(), torch.no_grad():
            cache = model(**prompt, use_cache=True).past_key_values
            calls.update(_attention=0, _standard=0)
            logits.append(model(more, attention_mask=mask, past_key_values=cache).logits)
    near(logits[1], logits[0])
    assert calls["_attention"] == 2 and calls["_standard"] == 0


def test_where_masks_are_not_computed(calls, monkeypatch):
    """As on a device without them: holes are gathered, or in windows left to standard attention, masks of pairs too; dropout is refused."""
    monkeypatch.setattr(fattn.transformers, "_computed", lambda *_: False)
    prompt, more = inputs_of("right"), inputs_of(seqlen=4)["input_ids"]
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(more)], dim=1)
    for name, options in (("llama", {}), ("mistral", {}), ("gemma2", {}), ("gpt_oss", {})):
        model, logits = model_of(name, causal_lm=True, dtype=torch.float64, **options), []
        for implementation in ("eager", "fattn"):
            model.set_attn_implementation(implementation)
            with Float64(), torch.no_grad():
                cache = model(**prompt, use_cache=True).past_key_values
                logits.append([model(more, attention_mask=mask, past_key_values=cache).logits, model(**packed_positions()).logits])
        for x, y in zip(*logits):
            near(y, x)
    assert calls["_attention"] > 0 and calls["_standard"] > 0
    model = model_of("gpt2", causal_lm=True).train()
    with pytest.raises(NotImplementedError, match=r"dropout of the weights \(it is 0.1\) is not computed on cpu; set the model's attention dropout to 0"):
        model(**inputs_of())

def packed_positions() -> dict:
    return {"use_cache": False, "input_ids": inputs_of()["input_ids"][:1], "position_ids": torch.cat([torch.arange(9), torch.arange(14)])[None]}


def mask_of_pairs() -> dict:
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & (torch.arange(23) % 3 != 1)
    seen |= torch.eye(23, dtype=torch.bool)
    return {**inputs_of(), "attention_mask": torch.zeros(23, 23, dtype=torch.float64).masked_fill(~seen, -1e300)[None, None].expand(4, 1, 23, 23)}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("inputs", [packed_positions, mask_of_pairs])
def test_other_masks(inputs, name, calls):
    model = model_of(name, dtype=torch.float64)
    with Float64():
        got = model(**inputs())[0]
        assert calls["_attention"] == 2 and calls["_standard"] == 0
        model.set_attn_implementation("eager")
        wanted = model(**inputs())[0]
    near(got, wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_packed_by_positions(name, device, monkeypatch):
    """As documents, no mask of pairs is stored; in both passes, as it is and compiled, where transformers takes all positions for packed ones."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    model, seen = model_of(name, device=device, dtype=dtype), set()
    packed = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in packed_positions().items()}
    options = {"document_q": True, "mask": False}
    original = fattn.transformers._attention
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for inputs, run in ((packed, model), (packed, compiled), (inputs_of(device=device) | {"use_cache": False}, compiled)):
        torch._dynamo.reset()
        gradients, outputs = [], []
        for implementation in ("eager", "fattn"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            monkeypatch.setattr(fattn.transformers, "_attention", original)
            if implementation == "fattn" and run is model:
                monkeypatch.setattr(fattn.transformers, "_attention", lambda *x, **y: seen.add(tuple(y.get(n) is not None for n in options)) or original(*x, **y))
            with Float64() if device == "cpu" and run is model else contextlib.nullcontext():
                outputs.append((model if implementation == "eager" else run)(**inputs)[0])
            outputs[-1].square().sum().backward()
            gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        if device == "cuda":
            counts = torch.ones_like(inputs["input_ids"]).bool()
            error, allowed = errors_in_bf16(model, inputs, counts, outputs[1].detach()[counts])
            assert error <= allowed
            way = "bfloat16", (1,) * 24  # what two layers round: their norms, products, sums, q and k after rotation
        else:
            way = ("float64", WHOLE) if run is model else ("float32", NORMS)
            near(outputs[1], outputs[0], *way)
        gradients_are_near(*reversed(gradients), *way)
    if name != "mistral" or computed(device, name):
        assert seen == {tuple(options.values())}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", compiled("gpt2", "qwen3", short="llama"))
def test_compiled_without_a_mask(name, dynamic):
    """Positions that the model made are no documents; those that are given may be."""
    model, packed = model_of(name), packed_positions()["position_ids"]
    operators = []

    def backend(graph, inputs):
        operators.append({node.target for node in graph.graph.nodes if "fattn" in str(node.target)})
        return graph

    def half_way(tokens):  # written after it was made
        positions = torch.arange(tokens.shape[1])[None]
        positions[:, 9:] -= 9
        return model(input_ids=tokens, position_ids=positions, use_cache=False)

    torch._dynamo.reset()
    tokens = inputs_of()["input_ids"][:1]
    with torch.no_grad():
        for function, more, documents in ((model, {}, False), (model, {"position_ids": torch.arange(23)[None]}, True), (model, {"position_ids": packed}, True),
                                          (half_way, {}, True)):
            operators.clear()
            options = {"use_cache": False, **more} if function is model else {}
            got = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)(tokens, **options)[0]
            near(got, function(tokens, **options)[0], "float32")
            operator = torch.ops.fattn.forward_with_scores.default if documents else torch.ops.fattn.forward.default
            assert all(x == {operator} for x in operators)


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_by_lengths(name, computed, calls, monkeypatch):
    """cu_seq_lens, as collators without padding give them: each sequence by itself, in one call, or in one each where a device has no packed sequences."""
    model = model_of(name, dtype=torch.float64)
    inputs, ends = packed_positions(), torch.tensor([0, 9, 23], dtype=torch.int32)
    with Float64():
        model.set_attn_implementation("eager")
        wanted = torch.cat([model(input_ids=x)[0] for x in inputs["input_ids"].split([9, 14], dim=1)], dim=1)
        model.set_attn_implementation("fattn")
        if not computed:
            monkeypatch.setattr(fattn.transformers, "_computed", lambda *_: False)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
        near(model(**inputs, **lengths)[0], wanted)
    assert calls == {"_attention": 0 if computed else 4, "_attention_varlen": 2 if computed else 0, "_standard": 0}


def test_packed_by_lengths_that_change(calls):
    """The same tensor with other numbers, and in torch.compile, where none is looked at."""
    model = model_of("llama")
    inputs, ends = packed_positions(), torch.tensor([0, 12, 23], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    model(**inputs, **lengths)
    ends[1] = 9
    wanted = model(**inputs)[0]
    near(model(**inputs, **lengths)[0], wanted, "float32")
    module, x = torch.nn.Module(), torch.randn(1, 2, 23, 8)
    eager = fattn.transformers.attention(module, x, x, x, None, **lengths)[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, **lengths: fattn.transformers.attention(module, x, x, x, None, **lengths)[0], fullgraph=True, backend="aot_eager")
    alike = reordered("float32", 8, 14)  # q k, over the keys
    torch.testing.assert_close(compiled(x, **lengths), eager, **alike)
    with torch.inference_mode():
        torch.testing.assert_close(fattn.transformers.attention(module, x, x, x, None, **lengths | {"cu_seq_lens_q": ends.clone()})[0], eager, **alike)


def test_packed_by_lengths_on_a_gpu():
    """In one call or in several, as the device has it."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    model = model_of("llama", device="cuda", dtype=torch.bfloat16)
    inputs = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in packed_positions().items()}
    ends = torch.tensor([0, 9, 23], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        got = model(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14, max_length_k=14)[0]
    counts = torch.ones_like(inputs["input_ids"]).bool()
    error, allowed = errors_in_bf16(model, inputs, counts, got[counts])
    assert error <= allowed


def test_packed_by_lengths_refused():
    model = model_of("llama")
    inputs, ends = packed_positions(), torch.tensor([0, 9, 23], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with pytest.raises(ValueError, match="cu_seq_lens_q ends with 20"):
        model(**inputs, **lengths | {"cu_seq_lens_q": torch.tensor([0, 9, 20])})
    module, x = torch.nn.Module(), torch.ones(2, 2, 3, 8)
    with pytest.raises(ValueError, match="cu_seq_lens_q is given with a batch of 2"):
        fattn.transformers.attention(module, x, x, x, None, cu_seq_lens_q=torch.tensor([0, 3]))


def test_dropout_in_training():
    """fattn.attention's own, of the same generator."""
    module, x = torch.nn.Module(), torch.randn(2, 4, 9, 8, requires_grad=True)
    torch.manual_seed(1)
    o, _ = fattn.transformers.attention(module, x, x, x, None, dropout=0.5)
    torch.manual_seed(1)
    wanted = fattn.attention(x, x, x, causal=True, dropout_p=0.5, layout="bhsd").transpose(1, 2)
    assert torch.equal(o, wanted) and o.requires_grad
    model, losses = model_of("llama", causal_lm=True, attention_dropout=0.5).train(), []
    inputs = inputs_of("left")
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss.item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "mistral"])
def test_weights_are_asked_for(name, padding):
    model = model_of(name, dtype=torch.float64)
    inputs = inputs_of(padding)
    assert not model(**inputs).attentions
    with pytest.warns(UserWarning, match="output_attentions=True: the weights are computed by standard attention"), Float64():
        got = model(**inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    with Float64():
        wanted = model(**inputs, output_attentions=True)
    if padding == "none":
        inputs["attention_mask"] = torch.ones(4, 23)
    counts = inputs["attention_mask"].bool()
    near(got[0][counts], wanted[0][counts])
    assert len(got.attentions) == len(wanted.attentions) == 2
    for x, y in zip(got.attentions, wanted.attentions):
        near(x.transpose(1, 2)[counts], y.transpose(1, 2)[counts])


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_training_learns_as_eager_does(name):
    losses = []
    for implementation in ("eager", "fattn"):
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if name == "gpt2" else {"attention_dropout": 0.0}
        model = model_of(name, causal_lm=True, **dropout).train()
        model.set_attn_implementation(implementation)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        inputs = inputs_of()
        for _ in range(5):
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[4] < losses[0]
    # Each step amplifies last places; a wrong gradient is a part of what they change.
    assert losses[:5] == pytest.approx(losses[5:], rel=0, abs=(losses[0] - losses[4]) / 2000)


@pytest.mark.parametrize(("padding", "use_cache"), [("none", True), ("left", False)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_compiled_without_a_break(name, use_cache, padding, calls):
    model = model_of(name, dtype=torch.float64)
    inputs = {**inputs_of(padding), "use_cache": use_cache}
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = model(**inputs)[0][counts]
        calls.update(_attention=0)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)[0][counts]
    near(got, wanted, "float32", NORMS)
    assert calls["_attention"] == 2


def errors_in_bf16(model, inputs, counts, got) -> tuple[float, float]:
    """How far `got` is from what the model computes in float32, and twice how far the model is with standard attention in its own dtype."""
    ours, results = model.config._attn_implementation, []
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for x in (model, copy.deepcopy(model).float()):
                results.append(x(**inputs)[0][counts].float())
    finally:
        model.set_attn_implementation(ours)
    standard, exact = results
    return float((got.float() - exact).abs().max()), 2 * float((standard - exact).abs().max())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", compiled("gpt2", "bert", "mistral", "gemma2", short="gpt_oss"))
def test_compiled_stores_no_mask_of_pairs(name, dynamic, device, monkeypatch):
    """Windows are fattn's own, and padding a mask of the keys; or, where a device has no masks, one of pairs that says the same."""
    more = {"num_experts_per_tok": 4} if name == "gpt_oss" else {}  # all, so that rounding changes no choice
    model, operators = model_of(name, device=device, dtype=dtype_on(device), **more), []

    def backend(graph, inputs):
        operators.extend(node for node in graph.graph.nodes if "fattn" in str(node.target))
        return graph

    def of(node, index, absent):
        return node.args[index] if len(node.args) > index else absent

    run = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    mask_at = 3 + len(OPTIONS) + Scores._fields.index("mask")
    for padding, computed in (("none", True), ("left", True), ("left", False), ("right", True)):
        inputs = inputs_of(padding, device) | ({} if name == "bert" else {"use_cache": False})
        counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        torch._dynamo.reset()
        operators.clear()
        with torch.no_grad(), monkeypatch.context() as patch:
            wanted = model(**inputs)[0][counts]
            if not computed:
                patch.setattr(fattn.transformers, "_computed", lambda *_: False)
            got = run(**inputs)[0][counts]
        if device == "cpu":
            near(got, wanted, "float32")
        else:  # kernels with a mask and without round otherwise; twice the error of standard attention is allowed
            error, allowed = errors_in_bf16(model, inputs, counts, got)
            assert error <= allowed
        if computed:
            assert [of(node, 7, -1) for node in operators] == {"mistral": [6, 6], "gemma2": [6, -1], "gpt_oss": [6, -1]}.get(name, [-1, -1])
            masks = [of(node, mask_at, None) for node in operators]
            assert [x is not None for x in masks] == [padding != "none"] * 2
            assert all(x.meta["example_value"].shape == (4, 1, 1, 23) for x in masks if x is not None)


def test_refused():
    model = model_of("gpt2", causal_lm=True).train()
    with pytest.raises(ValueError, match="the model is in training mode"):
        fattn.transformers.compare(model, inputs_of())
    with pytest.raises(TypeError, match="^inputs is a Tensor; it must be the keyword arguments"):
        fattn.transformers.compare(model.eval(), inputs_of()["input_ids"])
    module = torch.nn.Module()
    x = torch.ones(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="a position bias"):
        fattn.transformers.attention(module, x, x, x, None, position_bias=torch.zeros(2))


def test_without_transformers():
    done = forked.python("-c", "import sys; sys.modules['transformers'] = None; import fattn.transformers")
    assert "ImportError: fattn.transformers needs transformers 5 or later" in done.stderr


def test_precision_of_a_model():
    """A policy at work on a whole model: every module keeps to it, and it learns."""
    policy = precision.Policy()
    model = model_of("gpt2", causal_lm=True, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
    inputs = inputs_of()
    wanted = model(**inputs, labels=inputs["input_ids"])
    with precision.apply(model, policy), precision.Tracker(model, policy) as tracker:
        got = model(**inputs, labels=inputs["input_ids"])
        got.loss.backward()
    assert got.logits.dtype == torch.float32 and type(got) is type(wanted)
    # Both factors and the result of nine products, in two layers and of the logits.
    torch.testing.assert_close(got.logits, wanted.logits, **rounded("bfloat16", 9 * 3, largest=float(wanted.logits.detach().abs().max())))
    assert all(x.grad.dtype == torch.float32 for x in model.parameters())
    assert {violation.rule for violation in tracker.violations} <= {"loss"}, tracker.report()
    assert tracker.check_gradients() == []


def test_memory_on_the_cpu():
    """Standard attention stores matrices of scores, which grow with the square of seqlen; fattn stores none."""
    results = {}
    for seqlen in (256, 512):
        config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=97, n_positions=512, use_cache=False, **TOKENS)
        model = transformers.AutoModel.from_config(config).eval()
        results[seqlen] = fattn.transformers.compare(model, {"input_ids": torch.randint(3, 97, (2, seqlen))}, repeat=1)
    scores = 2 * 4 * 512**2 * 4  # bytes, in float32
    assert results[512].bytes_baseline >= 2 * scores  # they, and their softmax
    assert 3.5 < results[512].bytes_baseline / results[256].bytes_baseline < 4.5
    assert 0 < results[512].bytes < scores and results[512].bytes / results[256].bytes < 2.5
    assert f"{results[512].bytes / 2**20:.1f} MiB" in str(results[512])


def test_memory_that_cannot_be_counted():
    """While another profiler runs there is none."""
    from fattn._memory import most_held

    cpu = torch.device("cpu")
    assert 2**20 <= most_held(lambda: torch.ones(2**18), cpu) < 2**20 + 2**12
    assert most_held(lambda: [torch.ones(2**18).sum() for _ in range(3)], cpu) < 2 * 2**20  # each is freed before the next
    assert most_held(lambda: torch.ones(4), torch.device("meta")) is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert most_held(lambda: torch.ones(4), cpu) is None
    with pytest.raises(RuntimeError, match="of the call"):
        most_held(lambda: (_ for _ in ()).throw(RuntimeError("of the call")), cpu)
