"""FlopCounterMode counts fattn's operators as it counts torch's own attention."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

import fattn  # noqa: E402


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("headdim_v", [32, 64])
@pytest.mark.parametrize("nheads_k", [6, 2])
def test_as_torch_counts_its_own(nheads_k, headdim_v):
    q, k = torch.randn(2, 6, 40, 64, requires_grad=True), torch.randn(2, nheads_k, 72, 64, requires_grad=True)
    v = torch.randn(2, nheads_k, 72, headdim_v, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # counted as the products that it makes
        forward = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert forward == 2 * 2 * 6 * 40 * 72 * (64 + headdim_v)
    for options in ({}, {"causal": True}, {"alibi_slopes": torch.rand(6)}, {"softcap": 20.0}):
        assert counted(lambda: fattn.attention(q, k, v, layout="bhsd", **options)) == forward
    whole = counted(lambda: fattn.attention(q, k, v, layout="bhsd").sum().backward())
    assert whole == forward + 2 * 2 * 6 * 40 * 72 * (3 * 64 + 2 * headdim_v)
    rows = [x.detach().transpose(1, 2) for x in (q, k, v)]
    assert counted(lambda: fattn.attention(*rows)) == forward


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi_slopes": torch.rand(6)}, {"return_lse": True}, {"sinks": torch.zeros(6, requires_grad=True)}])
def test_both_passes_by_torchs_own_formulas(options, layout):
    shapes = (2, 6, 40, 64), (2, 2, 72, 64), (2, 2, 72, 32)
    whole = [torch.randn(x, requires_grad=True) for x in shapes]
    inputs = whole if layout == "bhsd" else [x.transpose(1, 2) for x in whole]
    # torch has the heads of q in every tensor
    q, k, v = shapes[0], (2, 6, *shapes[1][2:]), (2, 6, *shapes[2][2:])
    forward, backward = sdpa_flop_count(q, k, v), sdpa_backward_flop_count((2, 6, 40, 32), q, k, v)

    def call():
        o = fattn.attention(*inputs, layout=layout, **options)
        return sum(x.sum() for x in o) if "return_lse" in options else o.sum()

    assert counted(call) == forward and counted(lambda: call().backward()) == forward + backward
    o, lse = (x.detach() for x in fattn.attention(*inputs, layout=layout, **options | {"return_lse": True}))
    with torch.no_grad():
        assert counted(lambda: fattn.attention_backward(torch.ones_like(o), *inputs, o, lse, layout=layout,
                                                        **{name: x for name, x in options.items() if name != "return_lse"})) == backward


class Block(torch.nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.project = heads, torch.nn.Linear(32, 32, bias=False)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (self.heads, -1))
        return fattn.attention(q, q, q, causal=True).flatten(2)


def test_counts_by_module():
    """Of a part of a model, by operator, in both passes."""
    model, x = torch.nn.Sequential(Block(2), Block(4)), torch.randn(3, 10, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    counts = counter.get_flop_counts()
    pairs, product = 2 * 3 * 10 * 10 * 32, 2 * 3 * 10 * 32 * 32  # of one product of attention, whatever the number of heads; of a projection
    for name, modules in (("Global", 2), ("Sequential", 2), ("Sequential.0", 1), ("Sequential.1", 1)):
        of_module = {str(operator): count for operator, count in counts[name].items()}
        assert of_module == {"fattn.forward": 2 * pairs * modules, "fattn.backward": 5 * pairs * modules, "aten.mm": 3 * product * modules}, name


def test_torchs_own_attention_by_fattn():
    """After fattn.sdpa.activate() the counter sees torch's operator, once, as without."""
    import fattn.sdpa

    q = torch.randn(2, 4, 40, 32, requires_grad=True)
    call = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # noqa: E731
    before = counted(call)
    fattn.sdpa.activate()
    try:
        assert counted(call) == before
    finally:
        fattn.sdpa.deactivate()


def test_gradients_of_a_bias_and_sinks():
    q, k, v = (torch.randn(2, 40, 4, 32, requires_grad=True) for _ in range(3))
    bias, sinks = torch.randn(2, 4, 40, 40, requires_grad=True), torch.randn(4, requires_grad=True)
    assert counted(lambda: fattn.attention(q, k, v, bias=bias, sinks=sinks).sum().backward()) == 2 * 2 * 4 * 40 * 40 * 7 * 32


def test_packed_sequences_count_their_own_pairs():
    q, k, v = (torch.randn(100, 4, 32, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 30, 30, 100], dtype=torch.int32)

    def call(**options):
        return fattn.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=70, max_seqlen_k=70, **options)

    pairs = 30 * 30 + 70 * 70
    assert counted(call) == 2 * 4 * pairs * 64
    assert counted(lambda: call().sum().backward()) == 2 * 4 * pairs * 7 * 32
    assert counted(lambda: call(seqused_k=torch.tensor([10, 0, 70], dtype=torch.int32))) == 2 * 4 * (30 * 10 + 70 * 70) * 64


def test_pages_count_what_the_table_has():
    q, pages = torch.randn(3, 2, 4, 32), torch.randn(20, 16, 2, 32)
    table = torch.arange(18).reshape(3, 6)
    assert counted(lambda: fattn.attention(q, pages, pages, block_table=table, seqused_k=torch.tensor([5, 96, 0]))) == 2 * 3 * 4 * 2 * 96 * 64


@pytest.mark.parametrize("counter_is_later", [True, False])
def test_whichever_is_imported_first(counter_is_later):
    begin = "import sys, torch, fattn; q = torch.randn(1, 8, 2, 32)\n"
    late = "fattn.attention(q, q, q); assert 'torch.utils.flop_counter' not in sys.modules\n"
    count = ("from torch.utils.flop_counter import FlopCounterMode\n"
             "with FlopCounterMode(display=False) as counter: fattn.attention(q, q, q)\n"
             "print(counter.get_total_flops())")
    code = begin + (late if counter_is_later else "") + count
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) == 2 * 2 * 8 * 8 * 64


def test_without_numbers():
    """Of fakes nobody knows where sequences end: as many pairs as may be."""
    with torch._subclasses.FakeTensorMode():
        x, packed = torch.randn(2, 40, 4, 32), torch.randn(100, 4, 32)
        cu = torch.zeros(4, dtype=torch.int32)
        assert counted(lambda: fattn.attention(x, x, x)) == 2 * 2 * 4 * 40 * 40 * 64
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 70, "max_seqlen_k": 60}
        assert counted(lambda: fattn.attention_varlen(packed, packed, packed, **options)) == 2 * 4 * 3 * 70 * 60 * 64
