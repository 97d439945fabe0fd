"""What fattn is given in the place of transformers' masks: `mask_for`, which transformers asks once for all layers, and how mask functions are known again."""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.comptime import comptime

try:
    from transformers import masking_utils as masks
except ImportError as error:
    raise ImportError(f"fattn.transformers needs transformers 5 or later: {error}") from error


class _Known:
    """A mask function of transformers', to be known again: it hides in closures what it is made of."""

    def __init__(self, seen: Callable) -> None:
        self.seen = seen

    def __call__(self, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.seen(batch_idx, head_idx, q_idx, kv_idx)


class _Window(_Known):
    """A causal sliding window."""


class _Remapped(_Known):
    """`within`, asked for positions in the place of places in the row, as transformers 5.23 and later do in packed sequences: within one that is the same."""

    def __init__(self, within: Callable, seen: Callable) -> None:
        super().__init__(seen)
        self.within = within


class _Documents(_Known):
    """Packed sequences: their numbers (batch, seqlen), and what is seen within one."""

    def __init__(self, within: Callable, numbers: torch.Tensor, seen: Callable) -> None:
        super().__init__(seen)
        self.within, self.numbers = within, numbers


def _tell_windows() -> None:
    """Has transformers make its mask functions of sliding windows so; they say the same as before."""
    made = masks.sliding_window_causal_mask_function
    masks.sliding_window_causal_mask_function = lambda sliding_window: _Window(made(sliding_window))


def _tell_documents() -> None:
    """Has transformers make its mask functions of packed sequences so: of a mask function, remapped or not, and being in the same sequence. They say the same as
    before."""
    both, same_sequence = masks.and_masks, masks.packed_sequence_mask_function

    def of_numbers(numbers: torch.Tensor) -> _Documents:
        return _Documents(masks.bidirectional_mask_function, numbers, same_sequence(numbers))

    def and_masks(*functions: Callable) -> Callable:
        documents, others = [f for f in functions if isinstance(f, _Documents)], [f for f in functions if not isinstance(f, _Documents)]
        if len(documents) == len(others) == 1:  # in either order
            within = others[0].within if isinstance(others[0], _Remapped) else others[0]
            return _Documents(within, documents[0].numbers, both(*functions))
        return both(*functions)

    masks.packed_sequence_mask_function, masks.and_masks = of_numbers, and_masks
    if hasattr(masks, "remap_positions_for_packed_sequence"):
        remapped = masks.remap_positions_for_packed_sequence
        masks.remap_positions_for_packed_sequence = lambda function, position_ids: _Remapped(function, remapped(function, position_ids))


_tell_windows()
_tell_documents()


def _name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_VIEWS = ("expand", "unsqueeze", "getitem", "view", "reshape", "narrow", "select", "transpose", "squeeze", "detach")


def _written(node: torch.fx.Node) -> bool:
    """Whether something may have been written into the tensor, or into a view of it."""
    return any(_name(user) == "setitem" or _name(user).endswith("_") or "out" in user.kwargs or (_name(user) in _VIEWS and _written(user)) for user in node.users)


def _counts_up(node: torch.fx.Node) -> bool:
    """Whether each row is known to be one number more from column to column: a range, which models make of the length where no positions are given."""
    if _written(node):
        return False
    if _name(node) == "arange":
        return len(node.args) <= 2 and set(node.kwargs) <= {"device"}
    if _name(node) == "add":
        return len(node.args) == 2 and isinstance(node.args[1], int) and _counts_up(node.args[0])
    ends = {"unsqueeze": 0, "expand": -1}  # a row stays a row
    return _name(node) in ends and node.args[-1] == ends[_name(node)] and _counts_up(node.args[0])


def _of_one(numbers: torch.fx.Node) -> bool:
    """Whether these are transformers' numbers of sequences of positions that count up: all 0."""
    differs = numbers.args[0] if _name(numbers) == "cumsum" and numbers.args[1:] == (-1,) else None
    steps = differs.args[0] if differs is not None and _name(differs) == "ne" and differs.args[1] == 1 else None
    if steps is None or _name(steps) != "diff" or len(steps.args) != 1 or set(steps.kwargs) != {"prepend", "dim"} or steps.kwargs["dim"] != -1:
        return False
    positions, before = steps.args[0], steps.kwargs["prepend"]
    first = before.args[0] if _name(before) == "sub" and before.args[1] == 1 else None
    if first is None or _name(first) != "getitem" or first.args != (positions, (slice(None), slice(None, 1))):
        return False
    return _counts_up(positions) and not any(_written(x) for x in (numbers, differs, steps, before, first))


_answer = [False]


def _look(context: Any) -> None:
    """Asked by torch.compile while it traces `_is_one`. What cannot be read is not known."""
    try:
        _answer[0] = _of_one(context.get_local("numbers").as_proxy().node)
    except Exception:
        _answer[0] = False


@torch.compiler.assume_constant_result
def _answered() -> bool:
    return _answer[0]


def _is_one(numbers: torch.Tensor) -> bool:
    """In torch.compile, where transformers takes its own positions, too, for those of packed sequences, because it cannot look at them: whether how they are
    made says that there is one sequence only."""
    comptime(_look)
    return _answered()


def _is_ours(mask_function: Callable) -> bool:
    """Whether the module's own arguments (is_causal, sliding_window) say all that transformers' mask does."""
    return mask_function in (masks.causal_mask_function, masks.bidirectional_mask_function) or isinstance(mask_function, _Window)


def _is_static_step(q_length: int, options: dict[str, Any]) -> bool:
    """One token behind a cache of fixed size, for which transformers asks for a mask even where it need not have one: what the step is compiled with
    must look the same at the next."""
    return q_length == 1 and not options.get("allow_is_causal_skip", True)


def _lengths(batch_size: int, filled: int | torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """(batch, 1, 1, 1), int32: how many keys there are, the queries being the last of them. Four dimensions, because transformers leaves such a mask alone."""
    if isinstance(filled, torch.Tensor):
        return filled.to(torch.int32).reshape(1, 1, 1, 1).repeat(batch_size, 1, 1, 1)  # a copy: the cache counts in place
    return torch.full((batch_size, 1, 1, 1), filled, dtype=torch.int32, device=device)


def mask_for(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, mask_function: Callable = masks.causal_mask_function,
             attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """What `attention` is given as its mask, once for all layers: None, which of the keys of the cache are there (batch, up to kv_length), how many are
    there (batch, 1, 1, 1), int32, each token's document (batch, 1, q_length, 1), int32, which of the keys are there beside fattn's own masks
    (batch, 1, 1, kv_length), uint8, or a mask of pairs (batch, 1, q_length, kv_length); true: seen."""
    if isinstance(mask_function, _Documents) and attention_mask is None and q_length == kv_length > 1:
        within = mask_function.within
        if torch.compiler.is_dynamo_compiling() and _is_one(mask_function.numbers):
            mask_function = within
        elif _is_ours(within):
            return mask_function.numbers.to(torch.int32)[:, None, :, None]
    causal, filled = mask_function is not masks.bidirectional_mask_function, q_offset + q_length - kv_offset  # a static cache is longer
    ours = _is_ours(mask_function)
    if torch.compiler.is_compiling():  # nothing can be asked of tensors then
        if ours and attention_mask is not None and q_length == kv_length == attention_mask.shape[1]:
            return (attention_mask != 0).to(torch.uint8)[:, None, None]
        ours = ours and attention_mask is None
        if ours and (q_length == kv_length or (causal and not isinstance(filled, torch.Tensor) and filled == kv_length)):
            return None
        if ours and causal:
            return _lengths(batch_size, filled, options.get("device", "cpu"))
        ours = False
    if ours and causal and _is_static_step(q_length, options):
        if attention_mask is None or attention_mask.all():
            return _lengths(batch_size, filled, options.get("device", "cpu"))
        ours = False
    if not ours:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masks.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]  # what a window's cache keeps; `generate` may have cut it before
    if causal and int(filled) < kv_length:
        filled = int(filled)
        return torch.ones(batch_size, filled, dtype=torch.bool, device=options.get("device", "cpu")) if attention_mask is None else attention_mask[:, :filled]
    return None if attention_mask is None or (attention_mask.shape[1] == kv_length and attention_mask.all()) else attention_mask
