"""fattn.precision: the failures of 16 bits that the rules are about, found and mended; policies at work; attention on mixed dtypes."""

import pytest
import torch

import fattn
from attention_reference import rounded
from fattn import precision
from fattn.precision import Policy, Tracker

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class NaiveLayerNorm(torch.nn.Module):
    """As it is written by hand."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class NaiveAttention(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + (1 - mask.to(q.dtype)) * -1e9
        return torch.softmax(scores, dim=-1) @ v


class Block(torch.nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, width)
        self.norm = NaiveLayerNorm(width)
        self.attn = NaiveAttention(width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Linear(32, 11))

    def forward(self, tokens, mask):
        x = self.embedding(tokens)
        return self.mlp(x + self.attn(self.norm(x), mask))


def block() -> Block:
    torch.manual_seed(0)
    return Block()


TOKENS, MASK = torch.arange(10).view(2, 5), torch.ones(2, 5, 5).tril()


def rules_of(tracker: Tracker) -> set[str]:
    return {violation.rule for violation in tracker.violations}


def test_variance_in_float16():
    norm = torch.nn.Sequential(NaiveLayerNorm(8))
    x = torch.linspace(-400, 400, 8, dtype=F16)[None]
    wanted = norm(x.double())
    halved = NaiveLayerNorm(8).to(F16)
    with Tracker(halved) as tracker:
        assert torch.equal(halved(x), torch.zeros_like(x)), "divided by Inf"
    (found,) = [violation for violation in tracker.violations if violation.operation == "pow"]
    assert found.rule == "layernorm" and found.shapes == ((1, 8),) and found.dtypes == (F16,)
    assert "256" in tracker.report() and "pow on (1, 8) float16" in tracker.report()
    model = torch.nn.Sequential(halved)
    with precision.apply(model, Policy()), Tracker(model, Policy()) as tracker:
        torch.testing.assert_close(model(x).double(), wanted.to(F32).double(), **rounded("float32", 8, 8, 5))  # mean, variance, and what is left
    assert rules_of(tracker) == {"optimizer"}, "the parameters are in 16 bits still"


def test_masks_of_minus_1e9():
    model = NaiveAttention(8).to(F16)
    x = torch.randn(1, 5, 8, dtype=F16)
    mask = MASK[:1].clone()
    mask[0, 0] = 0  # padding, which sees nothing
    with Tracker(model) as tracker:
        assert model(x, mask)[0, 0].isnan().all(), "a row of -Inf"
    assert {"mask", "attention_weights"} <= rules_of(tracker)
    (found,) = [violation for violation in tracker.violations if violation.rule == "mask"]
    assert found.operation == "mul" and found.shapes == ((1, 5, 5),)
    safe = model.float()
    with Tracker(safe) as tracker:
        assert safe(x.float(), mask).isfinite().all()
    assert "mask" not in rules_of(tracker)


def test_scale_of_the_loss():
    def gradients(scale: float):
        model = torch.nn.Linear(4, 1).to(F16)
        with Tracker(model) as tracker:
            (model(torch.full((1, 4), 1e-3, dtype=F16)) * 1e-5).float().mul(scale).sum().backward()
        return tracker.check_gradients()

    assert [x.operation for x in gradients(1)] == ["a gradient of zeros"]
    assert gradients(1024) == []
    assert {x.operation for x in gradients(1e11)} == {"a gradient with Inf or NaN"}


def test_losses_in_16_bits():
    model = torch.nn.Linear(4, 3).to(BF16)
    with Tracker(model) as tracker:
        torch.nn.functional.cross_entropy(model(torch.randn(2, 4, dtype=BF16)), torch.tensor([0, 1]))
    assert "loss" in rules_of(tracker)


@pytest.mark.parametrize("policy", [Policy(), Policy(qkv=F16, mlp=F16, embeddings=BF16), Policy(qkv=F32, mlp=F32)])
def test_apply(policy):
    model = block()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    wanted = model(TOKENS, MASK)
    wanted.square().mean().backward()
    gradients = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    seen = {}
    for name in ("embedding", "norm", "attn.qkv", "mlp.0"):
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: seen.__setitem__(name, output.dtype))
    with precision.apply(model, policy):
        got = model(TOKENS, MASK)
    got.square().mean().backward()
    assert seen == {"embedding": policy.embeddings, "norm": policy.layernorm, "attn.qkv": policy.qkv, "mlp.0": policy.mlp}
    assert got.dtype == F32
    # Of each of three products in 16 bits both factors and the result are rounded, and the embedding is; in the backward pass as much once more.
    agree = lambda x, y, times: torch.testing.assert_close(x, y, **rounded("bfloat16", 10 * times, largest=float(y.detach().abs().max())))  # noqa: E731
    if policy.mlp == F32:
        agree = lambda x, y, times: torch.testing.assert_close(x, y, rtol=0, atol=0)  # noqa: E731
    agree(got, wanted, 1)
    for parameter, gradient in zip(model.parameters(), gradients):
        assert parameter.grad.dtype == F32
        agree(parameter.grad, gradient, 2)
    for name, x in model.state_dict().items():
        assert x.dtype == F32 and torch.equal(x, before[name])
    assert all(isinstance(x, torch.nn.Parameter) for x in model.parameters())
    assert torch.equal(model(TOKENS, MASK), wanted), "the hooks are gone"


def test_an_error_inside_leaves_the_parameters():
    model = block()
    with precision.apply(model, Policy()), pytest.raises(RuntimeError):
        model.mlp(torch.ones(2, 5, 3))
    assert all(x.dtype == F32 and isinstance(x, torch.nn.Parameter) for x in model.parameters())


def test_two_policies_leave_the_parameters():
    module, x = torch.nn.Linear(3, 3), torch.ones(1, 3)
    weight = module.weight
    with precision.apply(module, Policy()), precision.apply(module, Policy(mlp=F16)):
        module(x).sum().backward()
        assert module.weight is weight
    assert module.weight is weight and weight.dtype == F32 and weight.grad.dtype == F32


def test_apply_to_modules_of_torch():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    wanted = layer(x)
    policy = Policy()
    with precision.apply(layer, policy), Tracker(layer, policy) as tracker:
        got = layer(x)
    assert got.dtype == F32
    torch.testing.assert_close(got, wanted, **rounded("bfloat16", 4 * 3))  # both factors and the result of four products
    assert "policy" not in rules_of(tracker), tracker.report()


def test_tracker_says_where_a_policy_is_not_kept():
    model = block()
    with Tracker(model, Policy()) as tracker:
        model(TOKENS, MASK)
    assert {violation.name for violation in tracker.violations} == {"attn.qkv", "mlp.0", "mlp.2"}
    assert rules_of(tracker) == {"policy"}
    with precision.apply(model, Policy()), Tracker(model, Policy()) as tracker:
        for _ in range(2):
            model(TOKENS, MASK)
    (found,) = tracker.violations  # the softmax of the hand-made attention
    assert (found.rule, found.name, found.count) == ("attention_weights", "attn", 2)
    assert str(found) == "attention_weights: attn: _softmax on (2, 5, 5) bfloat16, 2 times"


def test_a_model_that_keeps_the_rules():
    model = torch.nn.Linear(4, 4)
    policy = Policy(mlp=F32)
    with Tracker(model, policy) as tracker:
        model(torch.randn(2, 4)).sum().backward()
    assert tracker.check_gradients() == [] and tracker.report() == "no violation"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layernorm": F16}, "layernorm is torch.float16; allowed: torch.float32, torch.float64: a variance is a mean of squares"),
        ({"loss": BF16}, "loss is torch.bfloat16"),
        ({"optimizer": BF16}, "optimizer is torch.bfloat16"),
        ({"attention_weights": F16}, "attention_weights is torch.float16"),
        ({"mlp": torch.int8}, "mlp is torch.int8; allowed: torch.float32, torch.float64, torch.float16, torch.bfloat16$"),
    ],
)
def test_policies_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Policy(**options)


@pytest.mark.parametrize(("dtypes", "common"), [((F16, BF16, BF16), F32), ((BF16, F32, BF16), F32), ((F32, F16, F16), F32), ((F16, torch.float64, F32), torch.float64)])
def test_safe_attention(dtypes, common):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8).to(dtype) for dtype in dtypes)
    with pytest.warns(UserWarning, match=f"is computed in {str(common).removeprefix('torch.')}, its result is in q's dtype"):
        o, lse = precision.safe_attention(q, k, v, causal=True, return_lse=True)
    wanted, wanted_lse = fattn.attention(q.to(common), k.to(common), v.to(common), causal=True, return_lse=True)
    assert o.dtype == dtypes[0] and torch.equal(o, wanted.to(dtypes[0])) and torch.equal(lse, wanted_lse)


def test_attention_on_two_dtypes_names_the_function_that_casts():
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match="k is fp16 but q is fp32; .*fattn.precision.safe_attention"):
        fattn.attention(q, q.half(), q)


def test_safe_attention_of_one_dtype_is_attention(recwarn):
    q = torch.randn(1, 9, 2, 8, dtype=BF16)
    assert torch.equal(precision.safe_attention(q, q, q), fattn.attention(q, q, q))
    assert not recwarn.list
    with pytest.raises(TypeError, match="k is a NoneType"):
        precision.safe_attention(q, None, q)


def test_safe_attention_of_integers_is_refused():
    """A result in q's dtype would have no digits."""
    q = torch.ones(1, 9, 2, 8)
    with pytest.raises(ValueError, match="q has the dtype int32; allowed: float32"):
        precision.safe_attention(q.int(), q, q)


@pytest.mark.parametrize("return_lse", [False, True])
def test_safe_attention_returns_the_state_of_dropout(return_lse):
    q, k = torch.ones(1, 9, 2, 8, dtype=BF16), torch.ones(1, 9, 2, 8)
    state = torch.tensor([3, 4])
    options = {"dropout_p": 0.5, "dropout_state": state, "return_dropout_state": True, "return_lse": return_lse}
    with pytest.warns(UserWarning, match="is computed in float32"):
        o, *rest = precision.safe_attention(q, k, k, **options)
    wanted, *wanted_rest = fattn.attention(q.float(), k, k, **options)
    assert torch.equal(o, wanted.to(BF16)) and len(rest) == len(wanted_rest) == 1 + return_lse
    assert all(torch.equal(x, y) for x, y in zip(rest, wanted_rest)) and torch.equal(rest[-1], state)
