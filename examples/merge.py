#!/usr/bin/env python3
"""Adds the histograms of an array of jobs, and draws the sum.

    merge.py OUT_PREFIX HIST.csv [HIST.csv ...]

writes OUT_PREFIX.csv and OUT_PREFIX.png.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

Bins = dict[tuple[int, int], int]


def read(path: Path) -> Bins:
    """The bins of one job's histogram: (low edge, high edge) to number of events."""
    with path.open(newline="") as file:
        return {(int(r["low"]), int(r["high"])): int(r["events"]) for r in csv.DictReader(file)}


def add(histograms: list[Bins]) -> Bins:
    """The sum; all must have the same bins."""
    first, *others = histograms
    for other in others:
        if other.keys() != first.keys():
            raise SystemExit("merge.py: the histograms have different bins")
    return {edges: sum(h[edges] for h in histograms) for edges in first}


def write(path: Path, total: Bins) -> None:
    """The sum as CSV, in the form of its parts."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("low", "high", "events"))
        writer.writerows((low, high, events) for (low, high), events in total.items())


def draw(path: Path, total: Bins, jobs: int) -> None:
    """The sum as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lows = [low for low, _ in total]
    edges = [*lows, max(high for _, high in total)]
    events = sum(total.values())
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.stairs(list(total.values()), edges, fill=True, color="#3b6ea5", alpha=0.85)
    axes.set_xlabel(r"charged particles per event, $|\eta| < 2.5$")
    axes.set_ylabel("events")
    axes.set_xlim(0, edges[-1])
    axes.set_title(f"pp at 13 TeV, Pythia 8 minimum bias: {events} events from {jobs} VMs", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main(prefix: str, *paths: str) -> None:
    """Merge, write, draw."""
    histograms = [read(Path(p)) for p in paths]
    total = add(histograms)
    write(Path(f"{prefix}.csv"), total)
    draw(Path(f"{prefix}.png"), total, len(histograms))
    print(f"{sum(total.values())} events of {len(histograms)} jobs: {prefix}.csv, {prefix}.png")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
