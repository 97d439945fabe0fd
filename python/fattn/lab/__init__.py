"""The lab: what `fattn bench`, `compare`, `sweep` and others measured, as pandas frames and as matplotlib figures.

    frame = fattn.lab.sweep(over="seqlen", from_=256, to=4096, pass_="fwd,bwd", json="sweep.json")
    frame = fattn.lab.read("sweep.json")             # or a list of files, or "results/*.json"
    fattn.lab.figure(frame).savefig("sweep.png")     # lang="zh-TW": in Traditional Chinese
    with fattn.lab.profile(out="profile"):           # around any code that calls fattn or torch: where its time goes
        ...
    fattn.lab.growth(frame)                          # time ~ seqlen^exponent, with its 95 % interval

Columns are named as the keys of the records (docs/RECORD.md), units in the names: `_s` seconds, `_bytes` bytes, `_per_s` per second, `_fraction` a
share of 1. What failed stays a row, with its `status` and `reason`, and has no times; figures say so in words and never draw it as a number.

`pip install fattn[lab]` brings pandas and, for figures, matplotlib. pyplot, its state and its backends are left alone.
"""

from . import _needs  # first: says what to install
from ._frames import read
from ._growth import growth
from ._profile import Profile, profile
from ._records import RecordError
from ._run import CommandError, sweep

__all__ = ["CommandError", "Profile", "RecordError", "figure", "growth", "profile", "read", "sweep"]


def __getattr__(name: str):
    # matplotlib is imported when the first figure is drawn: frames do without it.
    if name == "figure":
        _needs.matplotlib()
        from ._figure import figure

        globals()[name] = figure
        return figure
    raise AttributeError(f"module 'fattn.lab' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__all__"} - (set() if _needs.have_matplotlib() else {"figure"}))
