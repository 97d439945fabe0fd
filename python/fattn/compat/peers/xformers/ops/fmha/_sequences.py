"""Where sequences that lie behind each other begin, and how long they are."""

from dataclasses import dataclass, replace

import torch


def _starts(lengths):
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


@dataclass
class _SeqLenInfo:
    """seqstart (batch + 1) int32, and the same as a list."""

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        lengths = list(seqlens)
        starts = _starts(lengths)
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths, default=0), min(lengths, default=0), starts)

    def intervals(self):
        """(begin, end) of each."""
        return list(zip(self.seqstart_py, self.seqstart_py[1:]))

    def lengths(self):
        return [end - begin for begin, end in self.intervals()]

    def to(self, device):
        return replace(self, seqstart=self.seqstart.to(device))

    def split(self, x, batch_sizes=None):
        """The sequences of x (1, total, ...); batch_sizes: how many of them, of one length, are one tensor."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"the tensor has the shape {tuple(x.shape)}; allowed: (1, {self.seqstart_py[-1]}, ...), the rows of all sequences")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes
        parts, first = [], 0
        for n in sizes:
            part = x[0, self.seqstart_py[first] : self.seqstart_py[first + n]]
            parts.append(part.unflatten(0, (n, part.shape[0] // n)))
            first += n
        return parts


@dataclass
class _UsedSeqLenInfo(_SeqLenInfo):
    """Of keys that are used in part: from seqstart[b] on, seqlen[b] of them."""

    seqlen: torch.Tensor
    seqlen_py: list

    @classmethod
    def of(cls, starts, lengths, device=None):
        lengths, starts = [int(n) for n in lengths], [int(n) for n in starts]
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths, default=0), min(lengths, default=0), starts,
                   torch.tensor(lengths, dtype=torch.int32, device=device), lengths)

    def intervals(self):
        return [(begin, begin + n) for begin, n in zip(self.seqstart_py, self.seqlen_py)]

    def to(self, device):
        return replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))
