"""Fits the three constants per chip that hardware files mark as fitted: `python -m benchmarks.fit_steps`.

`step_compute_fraction`, `overlap_fraction` and `step_stream_fraction` minimise
the mean absolute logarithm of predicted ÷ measured step time over the rows of
odd position (the second, fourth, …) among the priceable rows of their chip; variants of one
chip are fitted together. A weak pull towards PRIOR keeps constants that the rows
do not determine at a plausible value. The best point of a coarse grid is refined
by coordinate descent to 0.01.
"""

import json
from collections import defaultdict
from itertools import product

import numpy as np

from benchmarks import published_steps
from benchmarks.published_steps import Run

NAMES = ("step_compute_fraction", "overlap_fraction", "step_stream_fraction")
PRIOR = (0.8, 0.6, 0.5)
PULL = 0.03
LOWEST = (0.3, 0.0, 0.1)
TOGETHER = {"h200": "h100", "a100-40": "a100", "b300": "b200", "gb300": "gb200"}


def fit_half(runs: list[Run]) -> list[Run]:
    """The rows on which constants may be fitted: every second row within each chip, never more than half."""
    by_chip: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_chip[run.chip].append(run)
    return [run for chip_runs in by_chip.values() for run in chip_runs[1::2]]


def loss(runs: list[Run], constants: tuple[float, ...]) -> float:
    """Mean |log(predicted / measured)|, and the pull."""
    changed = dict(zip(NAMES, constants, strict=True))
    logs = [np.log(run.predict(run.hardware.replaced("candidate", **changed)).seconds / run.measured_s) for run in runs]
    return float(np.mean(np.abs(logs))) + PULL * sum((c - p) ** 2 for c, p in zip(constants, PRIOR, strict=True))


def fit(runs: list[Run]) -> tuple[float, ...]:
    """The constants of one chip, in the order of NAMES."""
    coarse = product(*(np.linspace(low, 1.0, 6).round(2).tolist() for low in LOWEST))
    best_loss, best = min((loss(runs, start), start) for start in coarse)
    for width in (0.05, 0.02, 0.01):
        improved = True
        while improved:
            improved = False
            for i in range(len(NAMES)):
                for step in (-width, width):
                    moved = float(np.clip(round(best[i] + step, 2), LOWEST[i], 1.0))
                    candidate = (*best[:i], moved, *best[i + 1 :])
                    if candidate != best and (found := loss(runs, candidate)) < best_loss - 1e-9:
                        best, best_loss, improved = candidate, found, True
    return best


def main() -> None:
    """Print the constants of every chip."""
    rows = json.loads(published_steps.ROWS.read_text(encoding="utf-8"))
    runs = [run for run in map(published_steps.read, rows) if isinstance(run, Run)]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in fit_half(runs):
        groups[TOGETHER.get(run.chip, run.chip)].append(run)
    for chip, chosen in sorted(groups.items()):
        constants = fit(chosen)
        print(
            f"{chip:8s} {len(chosen):3d} rows  "
            + "  ".join(f"{n} {c:.2f}" for n, c in zip(NAMES, constants, strict=True))
        )


if __name__ == "__main__":
    main()
