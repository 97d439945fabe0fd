#!/usr/bin/env python3
"""Provider torch-sdpa: torch.nn.functional.scaled_dot_product_attention, each backend by its name.

Speaks the protocol of providers/README.md on stdin and stdout.
"""

import ctypes
import gc
import json
import mmap
import os
import sys
import time

PROTOCOL = 1
# Variants by device, the default first. What a variant cannot do is its row's reason.
VARIANTS = {
    "cpu": ["auto", "flash", "math"],
    "cuda": ["auto", "flash", "efficient", "cudnn", "math"],
}


class Refusal(Exception):
    """An answer {"ok": false}: status is unsupported, unavailable, out_of_memory or failed."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status
        self.reason = reason


def protocol_streams():
    """The host's lines. Whatever a library prints on stdout later goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sys.stdin, answers


def resident_bytes(key):
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise Refusal("failed", f"/proc/self/status has no {key}")


def reset_resident_peak():
    """Returns freed memory to the system, resets VmHWM, and says what is resident now."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
    except OSError as error:
        raise Refusal("failed", f"the resident set's peak cannot be reset here: {error}") from error
    return resident_bytes("VmRSS")


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


class Provider:
    def __init__(self):
        self.torch = None
        self.problem = None
        self.tensors = {}
        self.results = None

    # hello: import the framework, say what is here.
    def hello(self, request):
        if request.get("protocol") != PROTOCOL:
            raise Refusal("failed", f"speaks protocol {PROTOCOL}, was asked for {request.get('protocol')}")
        try:
            import torch
            from torch.nn.attention import SDPBackend, sdpa_kernel
        except ImportError as error:
            raise Refusal("unavailable", f"{sys.executable} cannot import torch: {error}") from error
        self.torch = torch
        self.sdpa_kernel = sdpa_kernel
        self.backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }
        devices = {"cpu": VARIANTS["cpu"]}
        if torch.cuda.is_available():
            devices["cuda"] = VARIANTS["cuda"]
        return {"protocol": PROTOCOL, "provider": "torch-sdpa", "version": torch.__version__, "devices": devices}

    # problem: can it be computed? Allocates nothing.
    def take_problem(self, p):
        torch = self.torch
        self.drop()
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
        if p["dtype"] not in dtypes:
            raise Refusal("unsupported", f"no dtype {p['dtype']}; there are {', '.join(dtypes)}")
        if p["variant"] not in VARIANTS.get(p["device"], []):
            raise Refusal("unsupported", f"no variant {p['variant']} on {p['device']}")
        self.problem = p
        self.dtype = dtypes[p["dtype"]]
        self.device = torch.device("cpu") if p["device"] == "cpu" else torch.device(p["device"], p.get("device_index", 0))
        if self.device.type == "cuda":
            if self.device.index >= torch.cuda.device_count():
                raise Refusal("unsupported", f"no device {self.device}; torch sees {torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
        self.mask = None
        self.is_causal = p["causal"] and p["seqlen_q"] == p["seqlen_k"]
        if p["causal"] and not self.is_causal and p["seqlen_q"] > 1:
            # is_causal aligns to the top left; the mask wanted is aligned to the bottom right.
            if p["seqlen_q"] > p["seqlen_k"]:
                raise Refusal("unsupported", "SDPA gives NaN or zeros by backend for rows that see no key (causal, seqlen_q > seqlen_k)")
            if p["device"] == "cuda":
                from torch.nn.attention.bias import causal_lower_right

                self.mask = causal_lower_right(p["seqlen_q"], p["seqlen_k"])
        torch.set_num_threads(p["threads"])
        self.check_size()
        return {}

    def scores_held(self):
        """Whether this variant surely holds the whole score matrix."""
        p = self.problem
        return p["variant"] == "math" or (p["device"] == "cpu" and p["headdim"] != p["headdim_v"])

    def check_size(self):
        """The CPU's allocator is given more than there is and the process dies later, so large sizes are refused before."""
        p = self.problem
        if p["device"] != "cpu" or not self.scores_held():
            return
        size = self.torch.empty((), dtype=self.dtype).element_size()
        scores = p["batch"] * p["nheads"] * p["seqlen_q"] * p["seqlen_k"] * max(size, 4)
        wanted = scores * (3 if p["grad"] else 2)  # scores and weights; their gradient too
        allowed = available_bytes()
        if p["memory_limit_bytes"] > 0:
            allowed = min(allowed, p["memory_limit_bytes"])
        if wanted > allowed:
            raise Refusal("out_of_memory", f"the score matrices need {wanted / 2**20:.1f} MiB; allowed are {allowed / 2**20:.1f} MiB")

    # prepare: copy the inputs to tensors of torch's own.
    def prepare(self, request):
        torch, p = self.torch, self.problem
        shapes = {
            "q": (p["batch"], p["seqlen_q"], p["nheads"], p["headdim"]),
            "k": (p["batch"], p["seqlen_k"], p["nheads_k"], p["headdim"]),
            "v": (p["batch"], p["seqlen_k"], p["nheads_k"], p["headdim_v"]),
            "dout": (p["batch"], p["seqlen_q"], p["nheads"], p["headdim_v"]),
        }
        for name, path in request["inputs"].items():
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as raw:
                view = torch.frombuffer(bytearray(raw), dtype=self.dtype).view(shapes[name])
            # (batch, heads, seqlen, headdim) contiguous: the layout that SDPA likes best.
            tensor = view.transpose(1, 2).contiguous().to(self.device)
            self.tensors[name] = tensor.requires_grad_(p["grad"] and name != "dout")
        if p["device"] == "cpu" and p["causal"] and not self.is_causal and p["seqlen_q"] > 1:
            q, k = torch.arange(p["seqlen_q"]), torch.arange(p["seqlen_k"])
            # A tensor, since the CPU's fused kernel takes no causal_lower_right.
            self.mask = k[None, :] <= q[:, None] + (p["seqlen_k"] - p["seqlen_q"])
        return {"kernel": f"sdpa {p['variant']}"}

    def forward(self):
        p, t = self.problem, self.tensors
        arguments = {"attn_mask": self.mask, "is_causal": self.is_causal, "scale": p["softmax_scale"], "enable_gqa": p["nheads"] != p["nheads_k"]}
        function = self.torch.nn.functional.scaled_dot_product_attention
        if p["variant"] == "auto":
            return function(t["q"], t["k"], t["v"], **arguments)
        with self.sdpa_kernel(self.backends[p["variant"]]):
            return function(t["q"], t["k"], t["v"], **arguments)

    def backward(self, o):
        t = self.tensors
        return self.torch.autograd.grad(o, (t["q"], t["k"], t["v"]), t["dout"], retain_graph=True)

    def synchronize(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    # check: one forward and backward, the results in the host's layout to its files.
    def check(self, request):
        o = self.forward()
        results = {"o": o}
        if self.problem["grad"]:
            results.update(zip(("dq", "dk", "dv"), self.backward(o)))
        for name, path in request["outputs"].items():
            result = results[name].detach().transpose(1, 2).contiguous().cpu().flatten().view(self.torch.uint8)
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
                self.torch.frombuffer(raw, dtype=self.torch.uint8).copy_(result)
                # The tensor of frombuffer is gone here; mmap refuses to close while one exists.
        return {}

    def calls(self, name):
        """The function to time, and what must be called before the clock starts."""
        if name == "fwd":
            if self.problem["grad"]:
                return self.forward_without_graph
            return self.forward_inference
        if name == "bwd":
            if self.results is None:
                self.results = self.forward()
            return lambda: self.backward(self.results)
        return lambda: self.backward(self.forward())

    def forward_without_graph(self):
        # What training pays: the forward keeps what the backward needs.
        self.forward()

    def forward_inference(self):
        with self.torch.no_grad():
            self.forward()

    # memory: the peak that a call adds over the inputs, its results included.
    def memory(self, request):
        name = request["pass"]
        self.release({})
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
            self.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
            before = self.torch.cuda.memory_allocated()
            kept = self.run_once(name)
            self.synchronize()
            extra = self.torch.cuda.max_memory_allocated() - before
            method = "allocator"
        else:
            self.run_once(name)  # threads, code and workspaces that stay are no memory of the call
            before = reset_resident_peak()
            kept = self.run_once(name)
            extra = max(0, resident_bytes("VmHWM") - before)
            method = "resident set"
        del kept
        return {"extra_bytes": extra, "method": method}

    def run_once(self, name):
        """As time does, but holding the results: for bwd the forward's are part of what it adds."""
        if name == "fwd":
            if self.problem["grad"]:
                return self.forward()
            with self.torch.no_grad():
                return self.forward()
        o = self.forward()
        return o, self.backward(o)

    # time: seconds a call, by the rules of the README.
    def time(self, request):
        call = self.calls(request["pass"])
        seconds = self.time_cuda(call, request) if self.device.type == "cuda" else self.time_cpu(call, request)
        return {"seconds": seconds}

    def time_cpu(self, call, request):
        for _ in range(request["warmup"]):
            call()
        clock = time.perf_counter
        start = clock()
        call()
        once = clock() - start
        least = self.problem["min_sample_s"]
        calls = 1 if once >= least else min(int(least / max(once, 1e-9)) + 1, 10000)
        seconds = [once] if calls == 1 else []
        while len(seconds) < request["samples"]:
            start = clock()
            for _ in range(calls):
                call()
            seconds.append((clock() - start) / calls)
        return seconds

    def time_cuda(self, call, request):
        torch = self.torch
        flush = torch.empty(self.problem.get("flush_bytes", 0), dtype=torch.uint8, device=self.device)
        for _ in range(request["warmup"]):
            call()
        seconds = []
        for _ in range(request["samples"]):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.synchronize()
            for _ in range(self.problem.get("flush_repeats", 1)):  # so long that the call is queued before it begins
                flush.zero_()
            begin.record()
            call()
            end.record()
            self.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return seconds

    def release(self, _request):
        self.results = None
        gc.collect()
        if self.problem and self.device.type == "cuda":
            self.torch.cuda.empty_cache()  # others on this device need it
        return {}

    def drop(self):
        self.tensors = {}
        self.problem = None
        self.release({})

    def answer(self, request):
        operations = {
            "hello": self.hello,
            "problem": self.take_problem,
            "prepare": self.prepare,
            "check": self.check,
            "memory": self.memory,
            "time": self.time,
            "release": self.release,
        }
        operation = operations.get(request.get("op"))
        if operation is None:
            raise Refusal("failed", f"unknown op {request.get('op')!r}")
        if request["op"] != "hello" and self.torch is None:
            raise Refusal("failed", "hello comes first")
        return operation(request)

    def refusal(self, error):
        """Out of memory by the allocator's own exception type; everything else is a failure with its text."""
        torch = self.torch
        if isinstance(error, Refusal):
            return {"ok": False, "status": error.status, "reason": error.reason}
        if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
            return {"ok": False, "status": "out_of_memory", "reason": f"{type(error).__name__} from the allocator"}
        return {"ok": False, "status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}


def main():
    lines, answers = protocol_streams()
    provider = Provider()
    for line in lines:
        try:
            request = json.loads(line)
            if request.get("op") == "quit":
                return
            answer = {"ok": True, **provider.answer(request)}
        except Exception as error:  # pylint: disable=broad-except  # every failure is an answer
            answer = provider.refusal(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
