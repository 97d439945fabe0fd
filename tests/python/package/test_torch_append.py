"""The operator that appends to a cache, as torch sees it: what is written is counted, and what does not fit is refused."""

import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
from fattn import _operators, compat  # noqa: E402


def problem(device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Caches, new keys and values, a query, and lengths."""
    return ([torch.randn(2, 9, 2, 16, device=device) for _ in range(2)], [torch.randn(2, 1, 2, 16, device=device) for _ in range(2)],
            torch.randn(2, 1, 4, 16, device=device), torch.tensor([6, 0], dtype=torch.int32, device=device))


def angles(device: str) -> dict[str, torch.Tensor]:
    return {"rotary_cos": torch.rand(9, 4, device=device), "rotary_sin": torch.rand(9, 4, device=device)}


WAYS = {
    "operator": lambda caches, new, q, lengths: _operators.append(*new, *caches, 0, lengths),
    "by names": lambda caches, new, q, lengths: _operators.append(k=new[0], v=new[1], k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths),
    "lengths": lambda caches, new, q, lengths: fattn.with_kvcache(q, *caches, *new, cache_seqlens=lengths),
    "pages": lambda caches, new, q, lengths: fattn.with_kvcache(q, *caches, *new, cache_seqlens=lengths, block_table=torch.tensor([[1], [0]], device=q.device)),
    "turned": lambda caches, new, q, lengths: fattn.with_kvcache(q, *caches, *new, cache_seqlens=3, **angles(q.device)),
    "number": lambda caches, new, q, lengths: fattn.with_kvcache(q, *caches, *new, cache_seqlens=3),
    "bhsd": lambda caches, new, q, lengths: fattn.with_kvcache(*(x.transpose(1, 2) for x in (q, *caches, *new)), cache_seqlens=lengths, layout="bhsd"),
    "flash_attn": lambda caches, new, q, lengths: _flash_attn().flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, causal=True, **angles(q.device)),
}


def _flash_attn():
    import flash_attn

    return flash_attn


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_writes_are_counted(device, installed, way, inference):
    caches, new, q, lengths = problem(device)
    with torch.inference_mode() if inference else torch.no_grad():
        before = [x._version for x in caches]
        WAYS[way](caches, new, q, lengths)
        assert all(x._version > n for x, n in zip(caches, before))
        own = [x.clone() for x in caches]  # of inference mode they are not counted, and taken all the same
        WAYS[way](own, new, q, lengths)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_pass_of_what_is_written_over_is_an_error(device, installed, way):
    for i in range(2):
        caches, new, q, lengths = problem(device)
        w = torch.ones_like(caches[i], requires_grad=True)
        y = (w * caches[i]).sum()
        with torch.no_grad():
            WAYS[way](caches, new, q, lengths)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_inputs_are_not_counted(device):
    """A backward pass may need them."""
    caches, new, q, lengths = problem(device)
    before = [x._version for x in (*new, q, lengths)]
    _operators.append(*new, *caches, 0, lengths, None, q, *angles(device).values())
    assert [x._version for x in (*new, q, lengths)] == before


def test_compiled(device):
    """The operator in a compiled graph writes the same, and is counted."""
    caches, new, q, lengths = problem(device)
    wanted = [x.clone() for x in caches]
    _operators.append(*new, *wanted, 0, lengths)
    step = torch.compile(lambda k, v, k_cache, v_cache, lengths: torch.ops.fattn.append(k, v, k_cache, v_cache, 0, lengths)[1] + 1, backend="aot_eager",
                         fullgraph=True)
    before = [x._version for x in caches]
    with torch.no_grad():
        used = step(*new, *caches, lengths)
    assert used.tolist() == [8, 2]
    for cache, x, n in zip(caches, wanted, before):
        assert torch.equal(cache, x) and cache._version > n


def test_refused_in_words(device):
    (k_cache, v_cache), (k, v), q, lengths = problem(device)
    cos, sin = angles(device).values()

    def append(q: torch.Tensor, q_positions: int = 0) -> None:
        _operators.append(k, v, k_cache, v_cache, 0, lengths, None, q, cos, sin, False, q_positions)

    for x in (q[0, 0, 0], q[0, 0], q[None]):
        with pytest.raises(RuntimeError, match=f"invalid_argument: q has {x.dim()} dimensions; allowed: 4"):
            append(x)
    for number in (-1, 3, 2**32, 2**32 + 1, -(2**32)):
        with pytest.raises(RuntimeError, match=rf"invalid_argument: q_positions is {number}; allowed: 0 \(last\), 1 \(first\), 2 \(together\)"):
            append(q, number)
