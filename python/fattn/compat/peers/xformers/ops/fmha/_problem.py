"""A call of xFormers as one of fattn: the order of dimensions, and what a bias is there."""

from typing import Any, NamedTuple

import torch

from fattn._backward import attention_backward, attention_varlen_backward
from fattn.compat._calls import attention, attention_varlen

from .attn_bias import AttentionBias, BlockDiagonalMask, LowerTriangularMaskWithTensorBias, _Paged


class Problem(NamedTuple):
    """q (batch, seqlen, heads, headdim) or packed (total, heads, headdim), k and v likewise, and fattn's options."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]


def _four_dimensions(x: torch.Tensor, is_key: bool) -> torch.Tensor:
    if x.dim() == 3:
        return x[:, :, None]
    if x.dim() == 5:  # groups of heads, of which keys are one, expanded
        return x[:, :, :, 0] if is_key and (x.stride(3) == 0 or x.shape[3] == 1) else x.flatten(2, 3)
    return x


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(f"{name} has {x.dim()} dimensions and query {query.dim()}; allowed: the same, 3 (batch, seqlen, headdim), 4 (batch, seqlen, heads, "
                             "headdim) or 5 (batch, seqlen, groups, heads, headdim)")


def _tensor_bias(bias: torch.Tensor, dimensions: int) -> torch.Tensor:
    if not bias.is_floating_point():
        raise ValueError(f"attn_bias is a tensor of {bias.dtype}, which would be added to scores; allowed: floating point, -inf where a key is hidden")
    if dimensions == 3 and bias.dim() == 3:
        return bias[:, None]
    return bias.flatten(1, 2) if dimensions == 5 and bias.dim() == 5 else bias


def _without_last_keys(problem: Problem, left: int | None, right: int) -> Problem:
    """Where no query sees the last -right keys: without them the masks align again."""
    seen = max(problem.k.shape[1] + right, 0)
    options = dict(problem.options)
    if options.get("bias") is not None and options["bias"].shape[-1] != 1:
        options["bias"] = options["bias"][..., :seen]
    return Problem(problem.q, problem.k[:, :seen], problem.v[:, :seen], options | {"window": (left, 0)})


def _dense(problem: Problem, bias: AttentionBias | None) -> Problem:
    if bias is None:
        return problem
    left, right = bias._limits(problem.q.shape[1], problem.k.shape[1])
    if isinstance(bias, LowerTriangularMaskWithTensorBias):
        problem.options["bias"] = bias._bias
    if right is not None and right < 0:
        return _without_last_keys(problem, left, right)
    return problem._replace(options=problem.options | {"window": None if left is right is None else (left, right)})


def _packed(problem: Problem, bias: BlockDiagonalMask) -> Problem:
    for name, x, info in (("query", problem.q, bias.q_seqinfo), ("key", problem.k, bias.k_seqinfo)):
        if x.shape[0] != 1:
            raise ValueError(f"{name} has a batch of {x.shape[0]} and attn_bias is a {type(bias).__name__}; allowed: 1, all sequences behind each other")
        if info.intervals() and x.shape[1] < max(end for _, end in info.intervals()):
            raise ValueError(f"{name} has {x.shape[1]} rows and attn_bias needs {max(end for _, end in info.intervals())}")
    device = problem.q.device
    starts_q, starts_k = bias.q_seqinfo.seqstart.to(device), bias.k_seqinfo.seqstart.to(device)
    lengths_q = [end - begin for begin, end in bias.q_seqinfo.intervals()]
    lengths_k = [end - begin for begin, end in bias.k_seqinfo.intervals()]
    left, right = bias._limits(0, 0)
    options = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": bias.q_seqinfo.max_seqlen, "max_seqlen_k": max(lengths_k, default=0)}
    used = getattr(bias.k_seqinfo, "seqlen", None)
    window: tuple[int | None, int | None] | None = None if left is right is None else (left, right)
    if bias._from_top_left and lengths_q != lengths_k:
        if all(q <= k for q, k in zip(lengths_q, lengths_k)):  # no query sees keys behind the length of queries
            used, options["max_seqlen_k"] = starts_q.diff(), bias.q_seqinfo.max_seqlen
        else:
            place = torch.arange(options["max_seqlen_k"], device=device) - torch.arange(options["max_seqlen_q"], device=device)[:, None]
            options["mask"] = ((place <= 0) if left is None else (place <= 0) & (place >= -left))[None, None]
            window = None
    if used is not None:
        options["seqused_k"] = used.to(device)
    return Problem(problem.q[0], problem.k[0], problem.v[0], problem.options | options | {"window": window})


def _paged(problem: Problem, bias: _Paged) -> Problem:
    q, k, v, options = problem
    size, device = bias.page_size, q.device
    if q.shape[0] != 1 or k.shape[0] != 1 or q.shape[1] != bias.q_seqinfo.seqstart_py[-1] or k.shape[1] % size:
        raise ValueError(f"query has the shape {tuple(q.shape)} and key {tuple(k.shape)}; attn_bias allows (1, {bias.q_seqinfo.seqstart_py[-1]}, ...) and "
                         f"(1, pages * {size}, ...)")
    left, right = bias._limits(0, 0)
    tables, used = bias.block_tables.to(device), bias.k_seqinfo.seqlen.to(device)
    skipped = [begin // size for begin in bias._firsts()]  # whole pages are left out of the table, and a mask hides the rest of the first one
    rest = [begin % size for begin in bias._firsts()]
    if any(skipped):
        columns = max(1, *(-(-end // size) - pages for end, pages in zip(bias.k_seqinfo.seqlen_py, skipped)))
        begin = torch.tensor(skipped, device=device)[:, None]
        tables = tables.gather(1, (begin + torch.arange(columns, device=device)).clamp(max=tables.shape[1] - 1))
        used = used - begin[:, 0].to(used.dtype) * size
    paged = {"cu_seqlens_q": bias.q_seqinfo.seqstart.to(device), "max_seqlen_q": bias.q_seqinfo.max_seqlen, "seqused_k": used, "block_table": tables,
             "window": None if left is right is None else (left, right)}
    if any(rest):
        paged["mask"] = torch.arange(tables.shape[1] * size, device=device) >= torch.tensor(rest, device=device)[:, None, None, None]
    return Problem(q[0], k[0].unflatten(0, (-1, size)), v[0].unflatten(0, (-1, size)), options | paged)


def _problem(query, key, value, attn_bias, scale) -> Problem:
    _check(query, key, value)
    q, k, v = _four_dimensions(query, False), _four_dimensions(key, True), _four_dimensions(value, True)
    if k.shape[2] != v.shape[2]:
        k, v = (x.flatten(2, 3) for x in (key, value))
    problem = Problem(q, k, v, {"softmax_scale": scale})
    if isinstance(attn_bias, torch.Tensor):
        return problem._replace(options=problem.options | {"bias": _tensor_bias(attn_bias, query.dim())})
    if isinstance(attn_bias, BlockDiagonalMask):
        return _packed(problem, attn_bias)
    if isinstance(attn_bias, _Paged):
        return _paged(problem, attn_bias)
    if attn_bias is None or isinstance(attn_bias, AttentionBias):
        return _dense(problem, attn_bias)
    raise NotImplementedError(f"attn_bias is a {type(attn_bias).__name__}; allowed: None, a torch.Tensor, and the classes of xformers.ops.fmha.attn_bias")


def run(query, key, value, attn_bias, p, scale, output_dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
    """o in query's order of dimensions, and lse (batch, heads, seqlen_q) or (batch, groups, heads, seqlen_q)."""
    problem = _problem(query, key, value, attn_bias, scale)
    wide = output_dtype == torch.float32 and problem.q.dtype in (torch.float16, torch.bfloat16)
    options = {"out_dtype": torch.float32 if wide else None, "dropout_p": p or 0, "return_lse": True, **problem.options}
    if problem.q.dim() == 3:
        o, lse = attention_varlen(*problem[:3], **options)
        o, lse = o[None], lse[None]
    else:
        o, lse = attention(*problem[:3], **options)
    o = o if output_dtype is None else o.to(output_dtype)
    if query.dim() == 3:
        return o[:, :, 0], lse
    return (o, lse) if query.dim() == 4 else (o.unflatten(2, query.shape[2:4]), lse.unflatten(1, query.shape[2:4]))


def gradients_of(grad, output, lse, query, key, value, attn_bias, scale) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv by one backward pass, from the output and lse of all keys."""
    if query.dim() == 5:
        raise NotImplementedError("query has 5 dimensions; the backward pass by itself takes 3 or 4. o.backward() of memory_efficient_attention takes groups")
    if isinstance(attn_bias, _Paged):
        raise NotImplementedError(f"attn_bias is a {type(attn_bias).__name__}; keys in pages have no gradient")
    problem = _problem(query, key, value, attn_bias, scale)
    packed = problem.q.dim() == 3
    dout, o = (_four_dimensions(x, False).to(problem.q.dtype) for x in (grad, output))
    if packed:
        dout, o, lse = dout[0], o[0], lse[0]
    dq, dk, dv = (attention_varlen_backward if packed else attention_backward)(dout, *problem[:3], o, lse, **problem.options)
    results = []
    for x, of in ((dq, query), (dk, key), (dv, value)):
        whole = of.new_zeros(_four_dimensions(of, False).shape)  # keys that no query sees have none
        (whole[0] if packed else whole)[(slice(None),) * (0 if packed else 1) + (slice(0, x.shape[0 if packed else 1]),)] = x
        results.append(whole.reshape(of.shape))
    return tuple(results)
