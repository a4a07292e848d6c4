"""Do the intervals of the measures cover? Repeated draws of samples against one reference.

    python benchmarks/intervals.py [--draws 200]

Features are rectified normal ones with correlations; the generated ones are shifted and wider. For every
measure: the mean standard error over the real scatter of its value between draws, and how often the 95%
interval holds the mean over all draws. "pairs" are paired differences of sets that share most of their noise.
"""

from __future__ import annotations

import argparse

import torch

from trueup.metrics import (
    GaussianStatistics,
    frechet,
    inception_score,
    kernel_distance,
    precision,
    recall,
    wasserstein,
)
from trueup.statistics import Number

from common import table


def features(count: int, size: int, seed: int, shift: float, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(size)) / size**0.5
    return (scale * torch.randn(count, size, generator=generator) @ mix + shift).clamp_min(0).double()


def spread(found: list[Number]) -> list[str]:
    values, errors = (
        torch.tensor(v, dtype=torch.float64) for v in zip(*((n.value, n.error) for n in found), strict=True)
    )
    middle = float(values.mean())
    covered = sum(n.low <= middle <= n.high for n in found) / len(found)
    return [f"{float(errors.mean() / values.std()):.2f}", f"{100 * covered:.0f}%"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--draws", type=int, default=200)
    options = p.parse_args()
    rows = [["measure", "images", "dimensions", "standard error / scatter", "covered"]]
    for count, size in ((64, 128), (128, 128), (512, 128), (1024, 64)):
        reference = features(4000, size, 10**6, 0.0, 1.0)
        statistics = GaussianStatistics().update(reference)
        draws = [features(count, size, seed, 0.1, 1.1) for seed in range(options.draws)]
        rows.append(["Fréchet", f"{count}", f"{size}", *spread([frechet(x, statistics) for x in draws])])
        if (count, size) == (512, 128):
            few = reference[:1000]
            found = {
                "precision": [precision(few, x) for x in draws],
                "recall": [recall(few, x) for x in draws],
                "KID": [kernel_distance(few, x) for x in draws],
                "W1": [wasserstein(x[:, :3], few[:, :3]) for x in draws],
                "Inception Score": [inception_score(3 * x[:, :10]) for x in draws],
            }
            rows += [[name, "512", "128", *spread(values)] for name, values in found.items()]
            changed = [
                0.9 * x + 0.1 * features(count, size, 10**4 + i, 0.0, 1.0) for i, x in enumerate(draws)
            ]
            pairs = [
                frechet(y, statistics).difference(frechet(x, statistics))
                for x, y in zip(draws, changed, strict=True)
            ]
            rows.append(["Fréchet, pairs", "512", "128", *spread(pairs)])
    print(table(rows))


if __name__ == "__main__":
    main()
