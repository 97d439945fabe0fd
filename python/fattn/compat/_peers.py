"""The libraries that fattn.compat stands in for: their top-level modules, and the distributions that importlib.metadata is asked for."""

from pathlib import Path
from typing import NamedTuple

# Where the modules of their names are.
FOLDER = Path(__file__).parent / "peers"
# The distribution that is the name flash_attn alone; its module says so.
STAND_IN = b"flash-attn-fattn"


class Distribution(NamedTuple):
    name: str
    version: str  # whose functions and arguments the modules have


PEERS: dict[str, tuple[Distribution, ...]] = {
    "flash_attn": (Distribution("flash-attn", "2.8.3"), Distribution("flash-attn-4", "4.0.0")),
    "flash_attn_interface": (Distribution("flash-attn-3", "3.0.0"),),
    "xformers": (Distribution("xformers", "0.0.33"),),
}


def version_of(distribution: str) -> str:
    return next(x.version for peers in PEERS.values() for x in peers if x.name == distribution)
