"""`fattn check --accuracy`: the errors of o, lse, dq, dk and dv against float64, over those of FlashAttention-2 on the same inputs."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

import torch

from . import peers
from .problems import OPTIONS, Inputs, Problem, compile_ahead
from .terminal import DTYPES, Parser, Progress, device_of, finite, machine, names, numbers, positive, require_writable, say, until_interrupted, write

TENSORS = ("o", "lse", "dq", "dk", "dv")
# The goals: the RMS error and the largest one over the peer's. At sigma 1 the largest is of few elements, and chance.
RMS_GOAL, MAX_GOAL, MAX_GOAL_SIGMA_1 = 1.10, 1.35, 1.7
LSE_GOAL, LSE_UNITS = 1.06, 4
FP32_GOALS = (1.25, 1.5)
RARE, RARE_HEADDIMS = ("softcap", "alibi"), (64, 128)  # no more than these of all headdims
DECODE_SEEDS = 4  # times as many seeds, of so few rows
FP16_GRADIENTS = 8  # the largest sigma at which gradients in fp16 are finite
ANOTHER_PROBLEM = 20  # an error so many times the emulation's says that a peer computes something else

DESCRIPTION = """Measures how far o, lse, dq, dk and dv are from attention in float64, and how far those of FlashAttention-2 are, on the same inputs:
q, k, v = sigma * randn, dout = randn, all seeds together. Peers: FlashAttention-2 and cuDNN as torch has them, where they run, and an emulation of
FlashAttention-2's rounding everywhere. Ratios are ours over the peer's: of the root of the mean square error (RMS), and of the largest error."""
EPILOG = f"""The goals, against FlashAttention-2 where torch has it for the problem, else against its emulation: RMS at most {RMS_GOAL}, largest error
at most {MAX_GOAL} (sigma 1: {MAX_GOAL_SIGMA_1}); lse {LSE_GOAL}, or {LSE_UNITS} units in its last place, whichever is more; fp32 {FP32_GOALS[0]} and {FP32_GOALS[1]}, against torch.
Exit 1 if one is missed, 130 after Ctrl-C, which keeps what was measured.

Examples:
  fattn check --accuracy --quick
  fattn check --accuracy --dtype bf16 --headdim 64 --sigma 2,3 --option none
  fattn check --accuracy --json docs/results/accuracy.json"""


class Error:
    """Of one tensor, over seeds; sums stay on the device, so that nothing waits."""

    def __init__(self) -> None:
        self.squares = self.largest = self.unit_of = 0.0
        self.count = 0

    def add(self, got: torch.Tensor, exact: torch.Tensor) -> None:
        seen = exact != -math.inf  # an lse of a row that sees nothing
        off = (got.double() - exact).masked_fill_(~seen & (got == -math.inf), 0)
        self.squares = self.squares + off.square().sum()
        largest, unit_of = off.abs().max(), exact.masked_fill(~seen, 0).abs().max()
        self.largest = torch.maximum(self.largest, largest) if self.count else largest  # keeps NaN
        self.unit_of = torch.maximum(self.unit_of, unit_of) if self.count else unit_of
        self.count += off.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(float(self.squares) / self.count) if self.count else math.nan

    @property
    def max(self) -> float:
        return float(self.largest)


@dataclasses.dataclass
class Ratio:
    """Of one tensor of one cell to one peer."""

    problem: Problem
    sigma: float
    tensor: str
    peer: str
    own: Error
    other: Error
    judged: bool  # against this peer

    @property
    def rms(self) -> float:
        return self._ratio(self.own.rms, self.other.rms)

    @property
    def max(self) -> float:
        return self._ratio(self.own.max, self.other.max)

    @staticmethod
    def _ratio(own: float, other: float) -> float:
        return 1.0 if own == other else own / other if other else math.inf

    @property
    def goals(self) -> tuple[float, float]:
        """Of the ratios."""
        if self.tensor == "lse":
            units = LSE_UNITS * 2.0 ** (math.floor(math.log2(max(float(self.own.unit_of), 2.0**-126))) - 23)
            return tuple(max(LSE_GOAL, self._ratio(units, other)) for other in (self.other.rms, self.other.max))
        if self.problem.dtype == "fp32":
            return FP32_GOALS
        return RMS_GOAL, MAX_GOAL_SIGMA_1 if self.sigma <= 1 else MAX_GOAL

    @property
    def met(self) -> bool:
        return self.rms <= self.goals[0] and self.max <= self.goals[1]

    def row(self, where: dict[str, str]) -> dict:
        p = self.problem
        return {"dtype": p.dtype, "headdim": p.headdim, "causal": p.causal, "sigma": self.sigma, "option": p.option, "tensor": self.tensor,
                "rms_ratio": finite(self.rms), "max_ratio": finite(self.max), "peer": self.peer, "rms_error": finite(self.own.rms),
                "max_error": finite(self.own.max), "goal": (("met" if self.met else "missed") if self.judged else "none"), "batch": p.batch,
                "seqlen": p.seqlen, "nheads": p.nheads, **where}

    def __str__(self) -> str:
        rms, largest = self.goals
        return f"{self.problem} sigma {self.sigma:g}: {self.tensor} {self.rms:.2f} (goal {rms:.2f}), {self.max:.2f} (goal {largest:.2f})"


class Measurement:
    """All seeds of one problem at one sigma."""

    def __init__(self, problem: Problem, device: torch.device, without: dict[str, str], algorithm: str = "auto") -> None:
        self.problem, self.device, self.without, self.algorithm = problem, device, without, algorithm

    def ratios(self, sigma: float, seeds: int) -> list[Ratio]:
        p = self.problem
        wanted = [t for t in TENSORS if t in ("o", "lse") or (p.backward and (p.dtype != "fp16" or sigma <= FP16_GRADIENTS))]
        errors: dict[str, dict[str, Error]] = {}
        for seed in range(seeds * (DECODE_SEEDS if p.option == "decode" else 1)):
            generator = torch.Generator(self.device).manual_seed(seed)
            x = Inputs(p, sigma, DTYPES[p.dtype], self.device, generator)
            truth = peers.exact(x)
            self._add(errors, "fattn", peers.fattn(x, algorithm=self.algorithm), truth, wanted)
            self._add(errors, "emulation", peers.emulation(x), truth, wanted)
            for name, peer in peers.PEERS[self.device.type].items():
                if seed > 0 and name not in errors:
                    continue
                try:
                    found = peer(x)
                except (NotImplementedError, RuntimeError) as error:
                    errors.pop(name, None)
                    if not isinstance(error, NotImplementedError) or "No available kernel" in str(error):
                        self.without.setdefault(f"{name}, {p.dtype} d{p.headdim} {p.option}", str(error).splitlines()[0])
                    continue
                self._add(errors, name, found, truth, wanted)
        return self._ratios(sigma, errors, wanted)

    @staticmethod
    def _add(errors: dict[str, dict[str, Error]], who: str, found: peers.Results, truth: peers.Results, wanted: list[str]) -> None:
        for name in wanted:
            if name in found:
                errors.setdefault(who, {}).setdefault(name, Error()).add(found[name], truth[name])

    def _ratios(self, sigma: float, errors: dict[str, dict[str, Error]], wanted: list[str]) -> list[Ratio]:
        own, emulated = errors.pop("fattn"), errors["emulation"]
        for name in [name for name in errors if name != "emulation"]:
            if not errors[name]["o"].rms <= ANOTHER_PROBLEM * emulated["o"].rms:
                self.without.setdefault(f"{name}, {self.problem}", "its o is not that of this problem")
                del errors[name]
        found = []
        for tensor in wanted:
            judges = [name for name in ("torch", "flash") if tensor in errors.get(name, {}) and (name == "flash" or self.problem.dtype == "fp32")]
            judge = judges[0] if judges else "emulation"
            found += [Ratio(self.problem, sigma, tensor, peer, own[tensor], errors[peer][tensor], peer == judge) for peer in errors if tensor in errors[peer]]
        return found


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("fattn check --accuracy", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="cuda, cuda:N, cpu, or auto: cuda if torch sees one [auto]")
    parser.add_argument("--dtype", type=names(tuple(DTYPES)), default=["bf16", "fp16"], metavar="NAME,...", help="dtypes: bf16, fp16 and, on the CPU, fp32 [bf16,fp16]")
    parser.add_argument("--headdim", type=numbers(int), metavar="N,...", help="sizes of a head [64,96,128,192,256; on the CPU and with --quick 64,128]")
    parser.add_argument("--sigma", type=numbers(float), metavar="X,...", help="standard deviations of q, k and v [1,2,3,8,64; with --quick 1,2,3]")
    parser.add_argument("--option", type=names(OPTIONS), metavar="NAME,...", help=f"options of attention: {', '.join(OPTIONS)} [all; with --quick none,bias,packed,decode]")
    parser.add_argument("--causal", choices=("both", "yes", "no"), default="both", metavar="WHICH", help="with a causal mask: yes, no or both [both]")
    parser.add_argument("--seeds", type=positive, metavar="N", help="so many random inputs of each problem [8; with --quick 4]")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size: a whole number, 1 or more [4; on the CPU 1]")
    parser.add_argument("--seqlen", type=positive, metavar="N", help="queries and keys [1024; on the CPU 512]")
    parser.add_argument("--nheads", type=positive, metavar="N", help="heads [8; on the CPU 4]")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help="auto, standard, v1, v2 or v3 [auto]")
    parser.add_argument("--quick", action="store_true", help="part of it, in a minute")
    parser.add_argument("--json", metavar="FILE|-", help="write the ratios as a list of JSON objects, one for each tensor and peer")
    flags = parser.parse_args(arguments)
    flags.device = device_of(flags.device)
    cpu = flags.device.type == "cpu"
    few = cpu or flags.quick
    flags.headdim_given = flags.headdim is not None
    flags.headdim = flags.headdim or ([64, 128] if few else [64, 96, 128, 192, 256])
    flags.sigma = flags.sigma or ([1.0, 2.0, 3.0] if flags.quick else [1.0, 2.0, 3.0, 8.0, 64.0])
    flags.option = flags.option or (["none", "bias", "packed", "decode"] if flags.quick else list(OPTIONS))
    flags.seeds = flags.seeds or (4 if flags.quick else 8)
    flags.batch = flags.batch or (1 if cpu else 4)
    flags.seqlen = flags.seqlen or (512 if cpu else 1024)
    flags.nheads = flags.nheads or (4 if cpu else 8)
    if not all(sigma > 0 for sigma in flags.sigma) or not all(headdim > 0 for headdim in flags.headdim):
        parser.error("--sigma and --headdim must be above 0")
    if not cpu and "fp32" in flags.dtype:
        parser.error("--dtype fp32 is measured on the CPU only, beside torch's own attention there")
    return flags


def _print_line(out, problem: Problem, ratios: list[Ratio]) -> None:
    """The worst ratios of a problem over its sigmas."""
    judged = [r for r in ratios if r.judged]
    cells = []
    for tensor in TENSORS:
        of = [r for r in judged if r.tensor == tensor]
        if of and tensor != "lse":
            cells.append(f"{tensor} {max(r.rms for r in of):4.2f}/{max(r.max for r in of):4.2f}")
    missed = sum(not r.met for r in judged)
    print(f"{str(problem):27}{' '.join(cells)}{' !' if missed else ''}", file=out, flush=True)


def _verdict(out, ratios: list[Ratio], without: dict[str, str], broken: list[str], flags: argparse.Namespace) -> int:
    judged = [r for r in ratios if r.judged]
    missed = sorted((r for r in judged if not r.met), key=lambda r: -max(r.rms / r.goals[0], r.max / r.goals[1]))
    print(file=out)
    for who, why in list(without.items())[:8]:
        say(out, f"without {who}: {why}"[:160])
    for peer in dict.fromkeys(r.peer for r in ratios):
        of = [r for r in ratios if r.peer == peer and r.tensor != "lse" and 0 < r.rms < math.inf]
        if of:
            mean = math.exp(sum(math.log(r.rms) for r in of) / len(of))
            say(out, f"RMS error over that of {peer}: {mean:.3f} in the mean of {len(of)}, {max(r.rms for r in of):.3f} at most")
    for failure in broken[:20]:
        say(out, f"FAILED {failure}")
    for r in missed[:20]:
        say(out, f"MISSED {r}")
    if len(missed) > 20:
        print(f"and {len(missed) - 20} more", file=out)
    failed = len(missed) + len(broken)
    print(f"{len(judged)} tensors on {flags.device}: {len(judged) - len(missed)} passed, {failed} failed, 0 skipped", file=out)
    return 1 if failed or not judged else 0


def run(arguments: Sequence[str]) -> int:
    flags = _flags(arguments)
    require_writable(flags.json)
    out = sys.stderr if flags.json == "-" else sys.stdout
    causal = {"both": (False, True), "yes": (True,), "no": (False,)}[flags.causal]
    problems = [Problem(dtype, headdim, masked, option, flags.batch, flags.seqlen, flags.nheads)
                for dtype in flags.dtype for headdim in flags.headdim for option in flags.option for masked in causal
                if option not in RARE or headdim in RARE_HEADDIMS or flags.headdim_given]
    ratios: list[Ratio] = []
    without: dict[str, str] = {}
    broken: list[str] = []
    where = machine(flags.device)
    progress = Progress("accuracy", len(problems) * len(flags.sigma))
    say(out, "RMS error / largest error over the peer's, the worst of all sigmas; ! misses a goal.")


    def measure() -> None:
        if flags.device.type == "cuda":
            index = flags.device.index or 0
            compile_ahead([{**p.plan_arguments(index), "algorithm": flags.algorithm} for p in problems])
        for problem in problems:
            measurement = Measurement(problem, flags.device, without, flags.algorithm)
            first = len(ratios)
            for sigma in flags.sigma:
                try:
                    ratios.extend(measurement.ratios(sigma, flags.seeds))
                except NotImplementedError as error:  # of the library, which says why
                    without.setdefault(f"fattn, {problem}", str(error).splitlines()[0])
                    break
                except RuntimeError as error:
                    broken.append(f"{problem} sigma {sigma:g}: {str(error).splitlines()[0]}")
                    break
                finally:
                    progress.step(str(problem))
            progress.clear()
            if len(ratios) > first:
                _print_line(out, problem, ratios[first:])

    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    def finish() -> int:
        progress.clear()
        verdict = _verdict(out, ratios, without, broken, flags)
        write([r.row(where) for r in ratios], flags.json)
        return verdict

    try:
        return until_interrupted(measure, finish)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
