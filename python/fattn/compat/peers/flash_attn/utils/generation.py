"""flash_attn.utils.generation: the state of decoding that flash_attn.modules.mha takes."""

from dataclasses import dataclass, field

import torch

__all__ = ["InferenceParams"]


@dataclass
class InferenceParams:
    """How far decoding is: the caches by the number of their layer, and the keys that they have, one number (seqlen_offset) or one a sequence."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen, max_batch_size):
        """For other sequences; the caches stay."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
