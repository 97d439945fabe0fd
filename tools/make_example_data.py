#!/usr/bin/env python3
"""Writes examples/data/*.safetensors: small inputs for `fattn run`, the same bytes on every machine.

The numbers are N(0, 1), from a 64-bit counter hashed by splitmix64 and the Box-Muller transform, rounded to multiples of
2^-6, so that they are exact in every dtype and do not depend on the machine's logarithm to the last bit.

    make_example_data.py            writes the files
    make_example_data.py --check    exit 1 if a file is not what this script makes
"""
import argparse
import json
import math
import pathlib
import struct
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "examples" / "data"
MASK = (1 << 64) - 1


def splitmix64(counter: int) -> int:
    z = (counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def normal(seed: int, n: int) -> list[float]:
    values = []
    for i in range(n):
        counter = (seed << 32) + 2 * i + 1
        radius = math.sqrt(-2.0 * math.log(((splitmix64(counter) >> 11) + 1) * 2.0**-53))
        angle = 2.0 * math.pi * (splitmix64(counter + 1) >> 11) * 2.0**-53
        values.append(round(radius * math.cos(angle) * 64) / 64)
    return values


def encode(dtype: str, values: list[float]) -> bytes:
    if dtype == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "BF16":  # the upper half of the fp32 bits; exact, because the numbers have at most 8 significant bits here
        return b"".join(struct.pack("<I", struct.unpack("<I", struct.pack("<f", bf16(v)))[0])[2:] for v in values)
    raise ValueError(dtype)


def bf16(value: float) -> float:
    """Rounds to 8 significant bits."""
    if value == 0.0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


def safetensors(dtype: str, shapes: dict[str, list[int]]) -> bytes:
    header, data = {}, b""
    for seed, (name, shape) in enumerate(shapes.items(), start=1):
        part = encode(dtype, normal(seed, math.prod(shape)))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def files() -> dict[str, bytes]:
    batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim = 1, 12, 16, 4, 2, 8
    q, k = [batch, seqlen_q, nheads, headdim], [batch, seqlen_k, nheads_k, headdim]
    return {
        # Grouped-query attention with gradients, (batch, seqlen, heads, headdim).
        "small.safetensors": safetensors("F32", {"q": q, "k": k, "v": k, "do": q}),
        # The same shapes in bf16, forward only.
        "small_bf16.safetensors": safetensors("BF16", {"q": q, "k": k, "v": k}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    check = parser.parse_args().check
    stale = 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        path = FOLDER / name
        if not path.exists() or path.read_bytes() != content:
            stale += 1
            if not check:
                path.write_bytes(content)
            print(f"{'stale' if check else 'wrote'} {path.name}, {len(content)} bytes")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
