#!/usr/bin/env python3
"""Provider torch-sdpa: torch.nn.functional.scaled_dot_product_attention, each backend by its name."""

from _provider import Provider, Refusal, main, needed, refuse_scores


class Sdpa(Provider):
    name = "torch-sdpa"
    heads_first = True

    def load(self):
        self.torch = needed("torch", "PyTorch")
        attention = needed("torch.nn.attention", "a newer PyTorch")
        self.sdpa_kernel = attention.sdpa_kernel
        backend = attention.SDPBackend
        self.backends = {
            "flash": backend.FLASH_ATTENTION,
            "efficient": backend.EFFICIENT_ATTENTION,
            "cudnn": backend.CUDNN_ATTENTION,
            "math": backend.MATH,
        }
        return self.torch.__version__

    def variants(self):
        # What a variant cannot do is its row's reason.
        return {"cpu": ["auto", "flash", "math"], "cuda": ["auto", "flash", "efficient", "cudnn", "math"]}

    def accept(self, p):
        self.mask = None
        self.is_causal = p["causal"] and p["seqlen_q"] == p["seqlen_k"]
        if p["causal"] and not self.is_causal and p["seqlen_q"] > 1:
            # is_causal aligns to the top left; the mask wanted is aligned to the bottom right.
            if p["seqlen_q"] > p["seqlen_k"]:
                raise Refusal("unsupported", "SDPA gives NaN or zeros by backend for rows that see no key (causal, seqlen_q > seqlen_k)")
            if p["device"] == "cuda":
                from torch.nn.attention.bias import causal_lower_right

                self.mask = causal_lower_right(p["seqlen_q"], p["seqlen_k"])
        self.check_size()

    def scores_held(self):
        """Whether this variant surely holds the whole score matrix."""
        p = self.problem
        return p["variant"] == "math" or (p["device"] == "cpu" and p["headdim"] != p["headdim_v"])

    def check_size(self):
        """Refuses what there is no memory for."""
        p = self.problem
        if p["device"] != "cpu" or not self.scores_held():
            return
        size = self.torch.empty((), dtype=self.dtype).element_size()
        scores = p["batch"] * p["nheads"] * p["seqlen_q"] * p["seqlen_k"] * max(size, 4)
        refuse_scores(scores * (3 if p["grad"] else 2), p)  # scores and weights; their gradient too

    def prepare(self, request):
        torch, p = self.torch, self.problem
        answer = super().prepare(request)
        if p["device"] == "cpu" and p["causal"] and not self.is_causal and p["seqlen_q"] > 1:
            q, k = torch.arange(p["seqlen_q"]), torch.arange(p["seqlen_k"])
            # A tensor, since the CPU's fused kernel takes no causal_lower_right.
            self.mask = k[None, :] <= q[:, None] + (p["seqlen_k"] - p["seqlen_q"])
        return answer

    def kernel(self):
        return f"sdpa {self.problem['variant']}"

    def forward(self):
        p, t = self.problem, self.tensors
        arguments = {"attn_mask": self.mask, "is_causal": self.is_causal, "scale": p["softmax_scale"], "enable_gqa": p["nheads"] != p["nheads_k"]}
        function = self.torch.nn.functional.scaled_dot_product_attention
        if p["variant"] == "auto":
            return function(t["q"], t["k"], t["v"], **arguments)
        with self.sdpa_kernel(self.backends[p["variant"]]):
            return function(t["q"], t["k"], t["v"], **arguments)


if __name__ == "__main__":
    main(Sdpa())
