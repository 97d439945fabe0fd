#!/usr/bin/env python3
"""Provider xformers: xformers.ops.memory_efficient_attention, with the kernel that xFormers chooses."""

from _provider import Provider, Refusal, main, needed


class XFormers(Provider):
    name = "xformers"
    runs_on = ("cuda",)

    def load(self):
        self.ops = needed("xformers.ops", "xformers")
        return needed("xformers", "xformers").__version__

    def variants(self):
        return {"cuda": ["auto"]}

    def accept(self, p):
        if p["dtype"] == "fp64":
            raise Refusal("unsupported", "xFormers computes bf16, fp16 and fp32, not fp64")
        self.mask = self.ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if p["causal"] else None

    def forward(self):
        p, t = self.problem, self.tensors
        q, k, v = t["q"], t["k"], t["v"]
        if p["nheads"] != p["nheads_k"]:  # five dimensions: groups of query heads that share a key head
            group = p["nheads"] // p["nheads_k"]
            q = q.unflatten(2, (p["nheads_k"], group))
            k, v = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v))
        o = self.ops.memory_efficient_attention(q, k, v, attn_bias=self.mask, scale=p["softmax_scale"])
        return o.flatten(2, 3) if o.dim() == 5 else o


if __name__ == "__main__":
    main(XFormers())
