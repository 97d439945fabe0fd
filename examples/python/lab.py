"""Why attention without the score matrix is faster: measured here, as a frame, exponents and a figure. Needs `pip install fattn[lab]`.

    python examples/python/lab.py [--device cuda] [--to 4096] [--lang zh-TW] [--figure lab.png]
"""

import argparse
import warnings

import fattn.lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--to", type=int, default=1024, help="the longest sequence")
    parser.add_argument("--lang", default="en", choices=["en", "zh-TW"])
    parser.add_argument("--figure", help="where to draw: .png, .svg or .pdf")
    arguments = parser.parse_args()
    warnings.simplefilter("default", UserWarning)  # rows that failed, other programs that ran: once each

    # Every row was checked against float64 before it was timed; what failed is a row, too, with the reason.
    frame = fattn.lab.sweep("seqlen", from_=128, to=arguments.to, batch=1, nheads=4, headdim=64, causal=True, no_grad=True, device=arguments.device,
                            repeats=10, min_time=0, max_time=0.2)
    measured = frame[frame["status"] == "ok"]
    print(measured.pivot(index="value", columns="contestant", values=["time_median_s", "extra_bytes"]).to_string(float_format="{:.3g}".format))
    print()
    for sentence in frame.attrs["findings"]:
        print(sentence)

    # Time ~ seqlen^exponent; short sequences have costs that do not grow, so the longest say most.
    longest = frame[frame["value"] >= arguments.to // 4]
    print("\nHow time grows, of the longest sequences:")
    print(fattn.lab.growth(longest)[["contestant", "points", "exponent", "exponent_low", "exponent_high"]].to_string(index=False, float_format="{:.2f}".format))

    figure = fattn.lab.figure(frame, lang=arguments.lang)
    if arguments.figure:
        figure.savefig(arguments.figure)
        print(f"\nfigure: {arguments.figure}")


if __name__ == "__main__":
    main()
