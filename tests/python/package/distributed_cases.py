"""Random problems for fattn.distributed, and the comparison of what ranks compute with one process: against float64, at most 1.25 times the error of one call."""

import random
from typing import Any

import torch
import torch.distributed as distributed

import fattn
from fattn.distributed import ring_attention, shard

EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LUCK = {torch.float64: 64, torch.float32: 8, torch.float16: 0.25, torch.bfloat16: 0.25}  # in last places


def random_case(seed: int, nranks: int) -> dict[str, Any]:
    """Shapes and options, of plain numbers."""
    r = random.Random(seed)
    method = r.choice(["ring", "ring", "all_gather", "ulysses", "mixed", "mixed"])
    degree = {"ulysses": nranks, "mixed": r.choice([d for d in range(1, nranks + 1) if nranks % d == 0])}.get(method)
    nheads_k = r.choice([1, 2, 3]) if degree is None else degree * (r.choice([1, 2]) if method == "mixed" else 1)
    packed = r.random() < 0.35
    case = {"seed": seed, "method": method, "layout": r.choice(["contiguous", "zigzag"]), "batch": 1 if packed else r.choice([1, 2]), "nheads_k": nheads_k,
            "nheads": nheads_k * r.choice([1, 2]), "headdim": r.choice([8, 16]), "headdim_v": r.choice([8, 12]), "causal": r.random() < 0.6,
            "dtype": r.choice(["float64", "float32", "float32", "bfloat16", "float16"]), "packed": packed}
    case["seqlen_q"] = r.choice([0, 1, 3, 17, 40, 61])
    case["seqlen_k"] = case["seqlen_q"] if r.random() < 0.6 else r.choice([0, 2, 19, 45])
    if r.random() < 0.3:
        case["dropout_p"] = 0.25
        factor = r.choice([1, 3])  # several blocks of random numbers
        case["seqlen_q"], case["seqlen_k"] = factor * case["seqlen_q"], factor * case["seqlen_k"]
    if r.random() < 0.4:
        case["window"] = (r.choice([-1, 0, 3, 11]), r.choice([-1, 0, 4]))
    case["softmax_scale"] = r.choice([None, None, 0.3] if case["dtype"] != "float64" else [None, 0.0, 1000.0])  # log-sum-exps are thousands apart then
    case["softcap"] = r.choice([0.0, 0.0, 5.0])
    case["given"] = [name for name, chance in (("alibi", 0.3), ("sinks", 0.3), ("bias", 0.25), ("mask", 0.2), ("documents", 0.25)) if r.random() < chance]
    if packed:
        for length, name in ((case["seqlen_q"], "cu_q"), (case["seqlen_k"], "cu_k")):
            case[name] = [0, *sorted(r.randint(0, length) for _ in range(3))]
        if case["seqlen_q"] == case["seqlen_k"]:
            case["cu_k"] = case["cu_q"]
    if packed:
        case["given"] = [x for x in case["given"] if x not in ("bias", "mask")]
    if method == "mixed":
        case["ulysses_degree"] = r.choice([degree, None])
    case["shapes"] = [r.choice([True, False]) for _ in range(7)]
    return case


def tensors_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of all positions, in the case's dtype; the gradients that come in, too."""
    torch.manual_seed(case["seed"])
    dtype, wide = getattr(torch, case["dtype"]), torch.float64 if case["dtype"] == "float64" else torch.float32
    b, n, m, h = case["batch"], case["seqlen_q"], case["seqlen_k"], case["nheads"]
    x = {"q": torch.randn(b, n, h, case["headdim"]), "k": torch.randn(b, m, case["nheads_k"], case["headdim"]),
         "v": torch.randn(b, m, case["nheads_k"], case["headdim_v"]), "dout": torch.randn(b, n, h, case["headdim_v"])}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x["dlse"] = torch.randn(b, h, n).to(wide)
    of, given = case["shapes"], case["given"]
    pairs = (b if of[0] else 1, h if of[1] else 1, n if of[2] else 1, m)
    if "alibi" in given:
        x["alibi_slopes"] = torch.rand((b, h) if of[3] and not case["packed"] else (h,))
    if "sinks" in given:
        x["sinks"] = torch.randn(h).to(wide)
        if of[4]:
            x["sinks"][0] = -torch.inf
    if "bias" in given and m != 1:
        x["bias"] = torch.randn(pairs).to(dtype if of[5] else wide)
    if "mask" in given and m != 1:
        x["mask"] = torch.rand(pairs) > 0.3
    if "documents" in given:
        x["document_q"], x["document_k"] = (torch.randint(0, 3, (b, length)).sort().values.to(torch.int32) for length in (n, m))
    if "dropout_p" in case:
        x["dropout_state"] = torch.randint(-(2**63), 2**63 - 1, (2,))
    return x


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {"causal": case["causal"], "window": case.get("window"), "softcap": case["softcap"], "softmax_scale": case["softmax_scale"], "dropout_p": case.get("dropout_p", 0),
            "backend": "reference" if case["dtype"] == "float64" else "auto"}


_WITH_GRADIENT = ("q", "k", "v", "bias", "sinks")


def _differentiated(function, x: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """o, lse and gradients of function(q, k, v, ...). dlse of rows that see nothing is not looked at."""
    leaves = {name: tensor.detach().clone().requires_grad_() if name in _WITH_GRADIENT else tensor for name, tensor in x.items()}
    dout, dlse = leaves.pop("dout"), leaves.pop("dlse")
    others = {name: tensor for name, tensor in leaves.items() if name not in ("q", "k", "v")}
    o, lse = function(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **others, **options)
    torch.autograd.backward([o, lse], [dout, dlse])
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{name}": leaves[name].grad for name in _WITH_GRADIENT if name in leaves}


def _packed(case: dict[str, Any], x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the batch of 1."""
    names = ("q", "k", "v", "dout", "dlse", "document_q", "document_k")
    return {name: tensor.squeeze(0) if case["packed"] and name in names else tensor for name, tensor in x.items()}


def one_process(case: dict[str, Any], x: dict[str, torch.Tensor], double: bool) -> dict[str, torch.Tensor]:
    options = _options(case)
    if double:
        x = {name: tensor.double() if tensor.is_floating_point() and name != "alibi_slopes" else tensor for name, tensor in x.items()}
        options["backend"] = "reference"
    x = _packed(case, x)
    if case["packed"]:
        options |= {f"cu_seqlens_{name}": torch.tensor(case[f"cu_{name}"], dtype=torch.int32) for name in "qk"}
        return _differentiated(fattn.attention_varlen, x, **options)
    return _differentiated(fattn.attention, x, **options)


# The dimension of positions in what a rank gets or gives, of tensors with a batch.
_ROWS_OF_Q = {"q": 1, "dout": 1, "dlse": 2, "document_q": 1, "o": 1, "lse": 2, "dq": 1}
_ROWS_OF_K = {"k": 1, "v": 1, "document_k": 1, "dk": 1, "dv": 1}


def mine(case: dict[str, Any], name: str, x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of a tensor or result of all positions."""
    dim = (_ROWS_OF_Q | _ROWS_OF_K).get(name)
    if name in ("bias", "mask", "dbias"):
        dim = 2 if x.shape[2] != 1 else None
    if dim is not None and case["packed"] and x.dim() < (4 if name not in ("dlse", "lse", "document_q", "document_k") else 3 if "lse" in name else 2):
        dim -= 1
    return x if dim is None else shard(x, dim, group, case["layout"])


def many_processes(case: dict[str, Any], x: dict[str, torch.Tensor], group: Any) -> dict[str, torch.Tensor]:
    here = _packed(case, {name: mine(case, name, tensor, group) for name, tensor in x.items()})
    options = _options(case) | {"layout": case["layout"], "method": case["method"], "group": group, "timeout": 60, "ulysses_degree": case.get("ulysses_degree")}
    if case["packed"]:
        options |= {f"cu_seqlens_{name}": case[f"cu_{name}"] for name in "qk"}
    results = _differentiated(ring_attention, here, **options)
    for name in ("dsinks", "dbias"):  # of what every rank has whole
        if name in results and (name == "dsinks" or case["shapes"][2] is False or x["bias"].shape[2] == 1):
            results[name] = results[name].double()
            distributed.all_reduce(results[name], group=group)
    return results


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN and Inf where they are not wanted are infinite."""
    got = got.double()
    same = (got == wanted) | torch.zeros_like(wanted, dtype=torch.bool)
    difference = torch.where(same, 0, (got - wanted).abs())
    return float(torch.nan_to_num(difference, nan=torch.inf).max()) if difference.numel() else 0.0


def defects(case: dict[str, Any], group: Any = None) -> list[str]:
    """What is wrong with this rank's results."""
    x = tensors_of(case)
    wanted, once, got = one_process(case, x, True), one_process(case, x, False), many_processes(case, x, group)
    found = [] if wanted.keys() == got.keys() else [f"results are {list(got)}, expected {list(wanted)}"]
    for name, whole in wanted.items():
        part, dtype = mine(case, name, whole, group), once[name].dtype
        if got[name].shape != part.shape:
            found.append(f"{name} has the shape {tuple(got[name].shape)}, expected {tuple(part.shape)}")
            continue
        largest = float(whole[whole.isfinite()].abs().max()) if whole.isfinite().any() else 0.0
        # Results are small: one call may be off by next to nothing, by luck.
        luck = LUCK[dtype] * (4 if name == "dbias" and whole.shape[2] == 1 else 1)  # each rank rounds what its rows give
        allowed = 1.25 * _error(once[name], whole) + EPSILON[dtype] * max(largest, 1.0) * luck * max(case["softmax_scale"] or 1, 1)
        error = _error(got[name], part)
        if not error <= allowed:
            found.append(f"{name} is off by {error:.3g}, allowed: {allowed:.3g}")
    return [f"{case}: {text}" for text in found]


def defects_of_many(rank: int, seeds: list[int], nranks: int) -> list[str]:
    """In every rank. All stop together."""
    for seed in seeds:
        found = defects(random_case(seed, nranks))
        count = torch.tensor([len(found)])
        distributed.all_reduce(count)
        if count.item():
            return found
    return []


def rms_shares(rank: int) -> dict[str, float]:
    """RMS errors of a longer problem, as parts of those of one call on the same rows: the largest for each result and dtype."""
    shares = {}
    for dtype in ("float32", "bfloat16"):
        case = {"seed": 1, "method": "ring", "layout": "zigzag", "batch": 1, "nheads_k": 2, "nheads": 4, "headdim": 64, "headdim_v": 64, "causal": True, "dtype": dtype,
                "packed": False, "seqlen_q": 701, "seqlen_k": 701, "softcap": 0.0, "softmax_scale": None, "given": [], "shapes": [True] * 7}
        x = tensors_of(case)
        wanted, once, got = one_process(case, x, True), one_process(case, x, False), many_processes(case, x, None)
        for name, whole in wanted.items():
            error, usual = got[name].double() - mine(case, name, whole, None), mine(case, name, once[name].double() - whole, None)
            shares[f"{name} of {dtype}"] = float(error.square().mean().sqrt() / usual.square().mean().sqrt())
    return shares
