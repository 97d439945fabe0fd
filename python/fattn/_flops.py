"""What torch.utils.flop_counter.FlopCounterMode counts of fattn's operators: all pairs of a query and a key, as torch counts its own attention, so that the
two can be compared. A mask, a window and the lengths of a dense batch take nothing away. Packed sequences count the pairs of each sequence alone; where the
numbers of cu_seqlens are not there, as in a graph, as many as max_seqlen allows.

Forward there are two products, q k^T and p v; backward five, with the scores again (FlashAttention-2, sections 2.3 and 3.1)."""

import importlib.abc
import importlib.util
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import _operators

COUNTER = "torch.utils.flop_counter"
_BHSD = 3  # among the options
_SEQUSED_K, _BLOCK_TABLE = (len(_operators.OPTIONS) + _operators.SCORES.index(name) for name in ("seqused_k", "block_table"))
_PACKED = len(_operators.OPTIONS) + len(_operators.SCORES)  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
_NAMES = {_SEQUSED_K: "seqused_k", _BLOCK_TABLE: "block_table", **dict(enumerate(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _PACKED))}


def _numbers(x: torch.Tensor | None) -> list[int] | None:
    """None where there are none: of a graph, or on no device."""
    from torch._subclasses.fake_tensor import FakeTensor  # which is a while in coming, and here already where it is met

    return None if x is None or isinstance(x, FakeTensor) or x.device.type == "meta" else x.tolist()


def _dense_pairs(q: torch.Tensor, k: torch.Tensor, bhsd: bool, table: torch.Tensor | None) -> int:
    rows = 2 if bhsd else 1
    keys = k.shape[rows] if table is None else table.shape[1] * k.shape[rows]
    return q.shape[0] * q.shape[rows] * keys


def _packed_pairs(k: torch.Tensor, of: Any) -> int:
    cu_q, cu_k, used, table = of(_PACKED), of(_PACKED + 1), of(_SEQUSED_K), of(_BLOCK_TABLE)
    most_q, most_k = of(_PACKED + 2), of(_PACKED + 3)
    ends = _numbers(cu_q)
    if ends is None:
        return (cu_q.shape[0] - 1) * most_q * (most_k if table is None else table.shape[1] * k.shape[1])
    batch = len(ends) - 1
    keys, begins = _numbers(used), _numbers(cu_k)
    if keys is None and table is not None:
        keys = [table.shape[1] * k.shape[1]] * batch
    elif keys is None and begins is None:
        keys = [most_k] * batch
    elif keys is None:
        keys = [begins[n + 1] - begins[n] for n in range(batch)]
    return sum((ends[n + 1] - ends[n]) * keys[n] for n in range(batch))


def _formula(packed: bool, backward: bool, tensors: int) -> Any:
    """Of an operator with so many tensors before its options."""

    def count(*args: Any, out_val: Any = None, **given: Any) -> int:
        def of(i: int) -> Any:
            return args[tensors + i] if tensors + i < len(args) else given.get(_NAMES[i])

        q, k, v = args[1:4] if backward else args[:3]
        bhsd = not packed and bool(args[tensors + _BHSD] if tensors + _BHSD < len(args) else given.get("bhsd", False))
        heads = q.shape[1] if packed or bhsd else q.shape[2]
        pairs = heads * (_packed_pairs(k, of) if packed else _dense_pairs(q, k, bhsd, of(_BLOCK_TABLE)))
        headdim, headdim_v = q.shape[-1], v.shape[-1]
        return 2 * pairs * (3 * headdim + 2 * headdim_v if backward else headdim + headdim_v)

    return count


def _register(counter: Any) -> None:
    operators = {
        "forward": _formula(False, False, 3), "forward_with_scores": _formula(False, False, 3), "forward_out": _formula(False, False, 5),
        "backward": _formula(False, True, 6), "backward_with_scores": _formula(False, True, 6), "backward_with_more": _formula(False, True, 6),
        "backward_out": _formula(False, True, 9), "forward_varlen": _formula(True, False, 3),
        "backward_varlen": _formula(True, True, 6), "backward_varlen_with_more": _formula(True, True, 6),
    }
    formulas = {getattr(torch.ops.fattn, name): formula for name, formula in operators.items()}
    for operator, formula in formulas.items():
        counter.register_flop_formula(operator, get_raw=True)(formula)
    # A counter takes the formulas that there are when it is made; fattn's front comes with the first call, which may be inside.
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(getattr(mode, "counter", None), counter.FlopCounterMode):
            mode.counter.flop_registry.update({operator: counter.flop_registry[operator] for operator in formulas})


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the formulas behind the import of torch's counter, which takes a good part of a second: who does not count does not wait."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
