#!/usr/bin/env python3
"""Holds the counters of a profile of plain attention against the models of `fattn memory`.

    check_profile.py DIR [--within 0.10] [--side fattn]

For each pass: dram_bytes against the level between L2 and DRAM, l2_bytes against the one between multiprocessors and L2. Exit 1 if one is farther
from its model than allowed; a counter that the machine refused is recorded as refused, and is no failure. Exit 2 if there is nothing to hold."""
import argparse
import json
import sys
from pathlib import Path

HELD = ("dram_bytes", "l2_bytes", "memory_bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--within", type=float, default=0.10)
    parser.add_argument("--side", default="fattn")
    arguments = parser.parse_args()
    record = json.loads((arguments.folder / "profile.json").read_text())
    held = refused = failed = 0
    for part in record["counters"]:
        if part["side"] != arguments.side:
            continue
        for counter in part["counters"]:
            if counter["name"] not in HELD:
                continue
            name = f"{part['side']} {part['pass']} {counter['name']}"
            if counter["value"] is None:
                refused += 1
                print(f"refused  {name}: {counter['reason']}")
            elif counter["difference_fraction"] is None:
                print(f"no model {name}: {counter['value']:.4g} B")
            else:
                held += 1
                good = abs(counter["difference_fraction"]) <= arguments.within
                failed += not good
                print(f"{'ok' if good else 'FAILED':8} {name}: counted {counter['value']:.4g} B, model {counter['model']:.4g} B, {counter['difference_fraction']:+.1%}")
    print(f"{held} held, {failed} failed, {refused} refused")
    return 1 if failed else 0 if held + refused else 2


if __name__ == "__main__":
    sys.exit(main())
