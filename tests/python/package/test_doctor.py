"""fattn.doctor: what runs fattn and what does not, why, the times, and that nothing is left changed."""

import importlib.util
import json
import random
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import fattn
import fattn.sdpa
from fattn import _doctor, _operators
from fattn._doctor import prices
from fattn._doctor.reasons import fattns_mask

STANDARD = "standard attention, which stores the matrix of scores"
ACTIVATE = "fattn.sdpa.activate()"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    """What is priced is priced a few times; by one thread of torch, since several wait for each other on a machine with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(prices, "_SECONDS", 0.0)
    monkeypatch.setattr(prices, "_SAMPLES", 2)
    before = F.scaled_dot_product_attention, _operators.forward_out
    yield
    torch.set_num_threads(threads)
    fattn.sdpa.deactivate()
    assert before == (F.scaled_dot_product_attention, _operators.forward_out), "a function is not back in its place"
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks and torch._C._len_torch_dispatch_stack() == 0


def q_of(*shape: int, device: str = "cpu", dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return torch.randn(shape or (2, 4, 32, 16), device=device, dtype=dtype, requires_grad=requires_grad)


def only(result: _doctor.Diagnosis) -> _doctor.Layer:
    assert len(result.layers) == 1, str(result)
    check(result)
    return result.layers[0]


def check(result) -> None:
    """What is true of every diagnosis."""
    assert max(map(len, str(result).splitlines())) <= 80
    again = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert again["layers"][0]["name"] == result.layers[0].name and again["share"] == result.share
    assert 0 < result.expected_seconds <= result.seconds and 0 <= result.share <= 1
    for layer in result.layers:
        assert layer.fattn == (not layer.why) and layer.seconds > 0
        assert not layer.fattn or (layer.runs == "fattn" and layer.speedup is None and not layer.change)


@pytest.mark.parametrize("backward", [False, True])
def test_function_of_torch(device, backward):
    q = q_of(device=device, requires_grad=backward)

    def function(q):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    layer = only(fattn.doctor(function, q, backward=backward, repeat=1))
    assert not layer.fattn and layer.change == ACTIVATE and "until fattn is put in their place" in layer.why and "flash" in layer.runs
    assert layer.where.startswith("test_doctor.py:") and layer.causal and not layer.masked and layer.q == (2, 4, 32, 16) and layer.speedup > 0
    fattn.sdpa.activate()
    result = fattn.doctor(function, q, backward=backward, repeat=1)
    assert only(result).fattn and "All of it runs fattn" in " ".join(str(result).split()) and result.expected_speedup == 1
    assert q.grad is None


def flash_is_off(q):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


# Of each what is called, whether fattn computes it once it is activated, and a part of the reason why it does not.
CALLS = {
    "unequal": (lambda q: F.scaled_dot_product_attention(q[:, :, :9], q, q, is_causal=True), False, "torch aligns to the top left"),
    "float64": (lambda q: F.scaled_dot_product_attention(q.double(), q.double(), q.double()), False, "float64 stays with torch"),
    "another backend": (lambda q: F.scaled_dot_product_attention(q, q, q[..., :8]), False, "gave it to another backend than flash"),
    "flash is off": (flash_is_off, False, "switched off"),
    "dropout": (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), True, "until fattn is put"),
    "mask": (lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(32, 32, dtype=torch.bool)), True, "until fattn is put"),
    "3 dimensions": (lambda q: F.scaled_dot_product_attention(q[0], q[0], q[0]), True, "until fattn is put"),
    "gqa": (lambda q: F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True), True, "until fattn is put"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inference", [False, True])
def test_reasons_of_torchs_function(name, inference):
    """That what doctor expects of fattn.sdpa.activate is what it does."""
    function, taken, why = CALLS[name]
    with torch.inference_mode(inference):
        layer = only(fattn.doctor(function, q_of(), repeat=1))
        assert why in layer.why and not layer.fattn and (layer.change == ACTIVATE) == taken
        fattn.sdpa.activate()
        assert only(fattn.doctor(function, q_of(), repeat=1)).fattn == taken


def test_a_problem_that_fattn_does_not_compute(monkeypatch):
    from fattn._doctor import reasons

    monkeypatch.setattr(reasons, "support", lambda *_, **__: fattn.Support(False, "a reason of the planner"))
    layer = only(fattn.doctor(lambda q: F.scaled_dot_product_attention(q, q, q), q_of(), repeat=1))
    assert layer.why == "a reason of the planner" and layer.change == "" and layer.speedup is None
    layer = only(fattn.doctor(lambda q: F.scaled_dot_product_attention(q, q, q), q_of(device="meta"), repeat=1))
    assert "on the device meta; fattn computes on the CPU and on CUDA devices" in layer.why


@pytest.mark.parametrize("backward", [False, True])
def test_fattns_own(device, backward):
    result = fattn.doctor(lambda q: fattn.attention(q, q, q, layout="bhsd"), q_of(device=device, requires_grad=backward), backward=backward, repeat=1)
    assert only(result).fattn and result.layers[0].function.startswith("fattn.") and result.layers[0].q == (2, 4, 32, 16)
    result = fattn.doctor(lambda q: fattn.attention(q, q, q, causal=True), q_of(device=device), repeat=1)
    assert only(result).causal and result.layers[0].q == (2, 32, 4, 16)
    packed = fattn.doctor(lambda q, ends: fattn.attention_varlen(q, q, q, cu_seqlens_q=ends, max_seqlen_q=9, max_seqlen_k=9),
                          (q_of(14, 4, 16), torch.tensor([0, 5, 14], dtype=torch.int32)), repeat=1)
    assert only(packed).fattn


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the operators of flash_attn are there")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_other_libraries():
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("_flash_attn_forward", lambda q, k, v: q.clone(), "CompositeExplicitAutograd")
    layer = only(fattn.doctor(lambda q: torch.ops.flash_attn._flash_attn_forward(q, q, q), q_of(), repeat=1))
    assert layer.function == "flash_attn._flash_attn_forward" and "another library" in layer.why and layer.q == (2, 32, 4, 16)
    layer = only(fattn.doctor(flex_attention, (q_of(), q_of(), q_of()), repeat=1))
    assert layer.function == "flex_attention" and "FlexAttention is called" in layer.why


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_inside_of_functorch():
    """What is mapped is called as often as torch calls it."""
    layer = only(fattn.doctor(lambda q: torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(q), q_of(), repeat=1))
    assert layer.q == (2, 4, 32, 16) and layer.calls == 1 and layer.change == ACTIVATE
    layer = only(fattn.doctor(lambda q: torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q), q_of(3, 2, 4, 8, 16), repeat=1))
    assert layer.q == (2, 4, 8, 16) and layer.calls == 3


class Written(nn.Module):
    """As many models have it; with what a run leaves behind."""

    def __init__(self, hide: float | None = float("-inf")) -> None:
        super().__init__()
        self.qkv, self.norm, self.hide, self.fails = nn.Linear(64, 192), nn.BatchNorm1d(32), hide, False

    def forward(self, x):
        q, k, v = (y.unflatten(2, (4, 16)).transpose(1, 2) for y in self.qkv(x).split(64, 2))
        scores = q @ k.transpose(2, 3) / 4
        if self.hide is not None:
            scores = scores.masked_fill(torch.ones(32, 32, dtype=torch.bool, device=x.device).triu(1), self.hide)
        weights = F.dropout(scores.softmax(-1), 0.25, self.training)
        if self.fails:
            raise KeyError("of the model")
        return self.norm((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("hide", [None, float("-inf"), -1e9])
@pytest.mark.parametrize("training", [False, True])
def test_written_out(device, training, hide):
    model = nn.Sequential(Written(hide)).train(training).to(device)
    result = fattn.doctor(model, q_of(2, 32, 64, device=device, dtype=torch.float32), backward=training, repeat=1)
    layer = only(result)
    assert (layer.name, layer.module, layer.function) == ("0", "Written", "matmul, softmax and matmul")
    assert layer.runs == STANDARD and "call fattn.attention" in layer.change and layer.where.startswith("test_doctor.py:")
    assert (layer.q, layer.k, layer.v) == ((2, 4, 32, 16),) * 3
    assert (layer.causal, layer.masked, round(layer.dropout_p, 6)) == (hide is not None, False, 0.25 if training else 0)
    assert layer.speedup > 0 or device == "cuda"


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_as_it_was(fails):
    model, x = nn.Sequential(Written()), q_of(2, 32, 64, requires_grad=True)
    model[0].fails = fails
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hook = model[0].register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    if fails:
        with pytest.raises(KeyError, match="of the model"):
            fattn.doctor(model, x, backward=True, repeat=1)
    else:
        fattn.doctor(model, x, backward=True, repeat=1)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters()) and x.grad is None
    assert torch.equal(numbers[0], torch.get_rng_state()) and numbers[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert model.training and list(model[0]._forward_hooks.values()) == list({hook.id: model[0]._forward_hooks[hook.id]}.values())


def test_modules_of_torch():
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), q_of(2, 32, 64)
    layer = only(fattn.doctor(attention, (x, x, x), repeat=1))
    assert "need_weights=False" in layer.change and layer.runs == STANDARD
    layer = only(fattn.doctor(lambda x: attention(x, x, x, need_weights=False), x, repeat=1))
    assert layer.change == ACTIVATE and layer.name == layer.module == "MultiheadAttention"
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 2)
    result = fattn.doctor(encoder, x, backward=True, repeat=1)
    assert [layer.name for layer in result.layers] == ["layers.0.self_attn", "layers.1.self_attn"] and "layers.{0..1}.self_attn (MultiheadAttention)" in str(result)
    with torch.no_grad():
        result = fattn.doctor(encoder.eval(), x, repeat=1)
        check(result)
        assert all("fast path" in layer.why and layer.q == (2, 4, 32, 16) for layer in result.layers)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert {layer.change for layer in fattn.doctor(encoder, x, repeat=1).layers} == {ACTIVATE}
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.scaled_dot_product_attention(x * self.scale, x, x)


@pytest.mark.parametrize("how", ["module", "in place", "method", "function"])
def test_compiled(how):
    torch._dynamo.reset()
    model, graphs = Attention(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if how == "module":
        model = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    elif how == "method":
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        model = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=backend)
    result = fattn.doctor(model, q_of(requires_grad=True), backward=True, repeat=1)
    assert only(result).change == ACTIVATE and result.compiled and "looked at uncompiled" in " ".join(str(result).split())
    assert len(graphs) == 1, "what is watched is compiled, too"
    assert result.layers[0].name == "" and result.model == ("<lambda>" if how == "function" else "Attention")


def test_the_compiler_finds_torchs_function():
    """It remembers for good what it finds under this name when it first looks."""
    original, found = torch._C._nn.scaled_dot_product_attention, []
    fattn.doctor(lambda q: found.append(torch._C._nn.scaled_dot_product_attention) or F.scaled_dot_product_attention(q, q, q), q_of(), repeat=1)
    assert set(found) == {original}


def test_other_threads_are_not_looked_at():
    def function(q):
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        thread.start()
        thread.join()
        return F.scaled_dot_product_attention(q, q, q)

    assert only(fattn.doctor(function, q_of(), repeat=1)).calls == 1


def test_by_another_name():
    from torch.nn.functional import scaled_dot_product_attention  # here in this function, where nobody can put another

    layer = only(fattn.doctor(lambda q: scaled_dot_product_attention(q, q, q), q_of(), repeat=1))
    assert layer.function == "aten._scaled_dot_product_flash_attention_for_cpu" and layer.change == ACTIVATE and layer.speedup > 0
    fattn.sdpa.activate()
    assert only(fattn.doctor(lambda q: scaled_dot_product_attention(q, q, q), q_of(), repeat=1)).fattn


def test_many_kinds_of_calls(monkeypatch):
    """As a generation has them; those that take most are priced first."""
    def function(q):
        for n in range(1, 12):
            F.scaled_dot_product_attention(q[:, :, :1], q[:, :, :n], q[:, :, :n])
        return F.scaled_dot_product_attention(*[q.repeat(1, 1, 32, 1)] * 3)

    result = fattn.doctor(function, q_of(), repeat=1)
    check(result)
    assert len(result.layers) == 12 and all(layer.speedup for layer in result.layers) and "And 4 more kinds of calls" in str(result)
    assert str(result).count("\n  computes ") == 8
    monkeypatch.setattr(_doctor, "price_of", lambda call, ways, backward: time.sleep(0.1) or dict.fromkeys(ways, prices.Price(1.0, None)))
    monkeypatch.setattr(_doctor, "_PATIENCE", 0.05)
    result = fattn.doctor(function, q_of(), repeat=1)
    assert [layer.speedup for layer in result.layers] == [None] * 11 + [1.0] and "11 of 12 kinds of calls" in str(result)


def test_no_attention():
    result = fattn.doctor(nn.Linear(4, 4), q_of(2, 4), repeat=1)
    assert not result.layers and "no attention was found" in str(result) and result.share == 0 and result.expected_speedup == 1


def test_refused():
    with pytest.raises(TypeError, match="model is a list; it must be a torch.nn.Module or a function"):
        fattn.doctor([], q_of())
    with pytest.raises(ValueError, match="repeat is 0; allowed: 1 and more"):
        fattn.doctor(Attention(), q_of(), repeat=0)
    with torch.no_grad(), pytest.raises(ValueError, match="no result asks for a gradient"):
        fattn.doctor(Attention(), q_of(), backward=True)


class _Slow(torch.autograd.Function):
    """Takes 20 ms in each direction."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


@pytest.mark.parametrize("backward", [False, True])
def test_times_and_what_is_expected(monkeypatch, backward):
    """Attention of 20 ms in each direction, in a model of 60."""
    original = F.scaled_dot_product_attention

    def model(q):
        q = _Slow.apply(q)
        return _Slow.apply(F.scaled_dot_product_attention(q, q, q))

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *x, **options: _Slow.apply(original(*x, **options)))
        result = fattn.doctor(model, q_of(requires_grad=backward), backward=backward, repeat=3)
    (layer,) = result.layers
    directions = 2 if backward else 1
    assert 0.02 * directions <= result.attention_seconds == layer.seconds < 0.04 * directions and 0.06 * directions <= result.seconds < 0.1 * directions
    assert result.share == pytest.approx(1 / 3, abs=0.12) and layer.speedup > 3
    saved = layer.seconds * (1 - 1 / layer.speedup)
    assert result.expected_seconds == pytest.approx(result.seconds - saved) and 1.2 < result.expected_speedup < result.limit
    assert f"{result.expected_speedup:.2f} times as fast" in " ".join(str(result).split())


def pairs(mask: torch.Tensor, additive: bool) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask


@pytest.mark.parametrize("additive", [False, True])
def test_masks_that_fattn_need_not_be_given(additive):
    """Those that are its own, and those that are padding."""
    seen = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    assert fattns_mask(pairs(seen, additive), 8, 8, True, None) is None
    assert fattns_mask(pairs(seen[:, :, 5:], additive), 3, 8, True, None) is None
    assert fattns_mask(pairs(seen & seen.mT.tril(2), additive), 8, 8, True, None) is not None
    assert fattns_mask(pairs(seen.triu(-2), additive), 8, 8, True, 3) is None
    assert fattns_mask(pairs(seen.triu(-3), additive), 8, 8, True, 3) is not None
    there = torch.ones(2, 8, dtype=torch.int64)
    there[0, :3] = 0
    assert torch.equal(fattns_mask(pairs(seen & there[:, None, None].bool(), additive), 8, 8, True, None), there)
    assert torch.equal(fattns_mask(pairs(there[:, None, None].bool(), additive), 8, 8, False, None), there)
    odd = seen.clone()
    odd[1, 0, 7, 2] = False
    assert fattns_mask(pairs(odd, additive), 8, 8, True, None).dim() == 4
