"""Attention of sequences that are spread over the ranks of torch.distributed (context parallelism).

    ring_attention        fattn.attention, each rank with its own rows
    shard, unshard        a tensor of all positions to each rank's rows,
                          and back
    positions             where a rank's rows are, for embeddings
    decode_attention      one query on a cache that is spread over ranks

docs/DISTRIBUTED.md says which layout and method to take, and what errors mean.
"""

from ._decode import decode_attention
from ._front import ring_attention
from ._shard import positions, shard, unshard

__all__ = ["decode_attention", "positions", "ring_attention", "shard", "unshard"]
