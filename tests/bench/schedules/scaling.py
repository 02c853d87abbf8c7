"""Scaling: the tokens per second of each schedule on several numbers of devices, as a table.

The share of perfect scaling on N devices is (s_N / N) / (s_M / M), with s the tokens per second and M the fewest devices.
"""

from collections.abc import Collection, Mapping

from headrace.launch.lab.figures import Figures

Curves = dict[str, dict[int, float]]
"""Tokens per second by schedule and number of devices."""


def curves_of(results: Mapping[int, Mapping[str, Figures]]) -> Curves:
    """The curve of each schedule that ran on every number of devices; `results` are by devices and schedule."""
    names = [name for name in next(iter(results.values())) if all(name in each for each in results.values())]
    return {name: {num: each[name].tokens_per_s for num, each in sorted(results.items())} for name in names}


def scaling_table(curves: Curves, base: str, doubtful: Collection[tuple[str, int]] = ()) -> str:
    """In each cell tokens/s, the ratio over the schedule `base` if it is among them, and the share of perfect scaling.

    doubtful: schedules and numbers of devices whose runs were too short or disturbed; their cells end with a star.
    """
    sizes = list(next(iter(curves.values())))
    lines = [["schedule", *(f"{num} GPUs" for num in sizes)], ["---"] * (len(sizes) + 1)]
    for name, curve in curves.items():
        cells = [name]
        for num, speed in curve.items():
            over = f"{speed / curves[base][num]:.2f}, " if base in curves else ""
            star = "*" if (name, num) in doubtful else ""
            cells.append(f"{speed:,.0f} ({over}{perfect_share(curve, num):.0%}){star}")
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def perfect_share(curve: Mapping[int, float], num_devices: int) -> float:
    """The share of perfect scaling from the fewest devices of a curve to `num_devices`."""
    fewest = min(curve)
    return (curve[num_devices] / num_devices) / (curve[fewest] / fewest)
