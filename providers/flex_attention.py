#!/usr/bin/env python3
"""Provider flex-attention: torch.nn.attention.flex_attention, compiled, as it is meant to be used."""

import importlib

from _provider import Provider, Refusal, main, needed


class Flex(Provider):
    name = "flex-attention"
    compiles = True
    heads_first = True

    def load(self):
        self.torch = needed("torch", "PyTorch")
        self.flex = needed("torch.nn.attention.flex_attention", "PyTorch 2.5 or later")
        # The backward pass is timed alone, several times after one forward pass, so its buffers cannot be those of what that saved.
        config = importlib.import_module("torch._functorch.config")
        if hasattr(config, "donated_buffer"):
            config.donated_buffer = False
        self.compiled = self.torch.compile(self.flex.flex_attention, dynamic=False)
        return self.torch.__version__

    def variants(self):
        return {"cpu": ["compiled"], "cuda": ["compiled"]}

    def forward_only(self, device):
        return "FlexAttention has no backward pass on the CPU" if device == "cpu" else ""

    def accept(self, p):
        if p["causal"] and p["seqlen_q"] > p["seqlen_k"]:
            raise Refusal("unsupported", "FlexAttention leaves open what rows that see no key are (causal, seqlen_q > seqlen_k)")
        self.mask = None

    def prepare(self, request):
        p = self.problem
        answer = super().prepare(request)
        if p["causal"]:
            before = p["seqlen_k"] - p["seqlen_q"]
            self.mask = self.flex.create_block_mask(lambda b, h, i, j: j <= i + before, None, None, p["seqlen_q"], p["seqlen_k"], device=self.device)
        return answer

    def forward(self):
        p, t = self.problem, self.tensors
        return self.compiled(t["q"], t["k"], t["v"], block_mask=self.mask, scale=p["softmax_scale"], enable_gqa=p["nheads"] != p["nheads_k"])


if __name__ == "__main__":
    main(Flex())
