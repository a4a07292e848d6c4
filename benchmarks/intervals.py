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
    Estimate,
    GaussianStatistics,
    frechet,
    inception_score,
    interval,
    kernel_distance,
    paired_difference,
    precision_recall,
    wasserstein,
)

from common import table


def features(count: int, size: int, seed: int, shift: float, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(size)) / size**0.5
    return (scale * torch.randn(count, size, generator=generator) @ mix + shift).clamp_min(0).double()


def spread(estimates: list[Estimate]) -> list[str]:
    values = torch.tensor([e.value for e in estimates], dtype=torch.float64)
    intervals = [interval(e) for e in estimates]
    errors = torch.tensor([error for _, _, error in intervals], dtype=torch.float64)
    middle = float(values.mean())
    covered = sum(low <= middle <= high for low, high, _ in intervals) / len(intervals)
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
            both = [precision_recall(few, x) for x in draws]
            found = {
                "precision": [one for one, _ in both],
                "recall": [other for _, other in both],
                "KID": [kernel_distance(few, x) for x in draws],
                "W1": [wasserstein(x[:, :3], few[:, :3]) for x in draws],
                "Inception Score": [inception_score(3 * x[:, :10]) for x in draws],
            }
            rows += [[name, "512", "128", *spread(values)] for name, values in found.items()]
            changed = [
                0.9 * x + 0.1 * features(count, size, 10**4 + i, 0.0, 1.0) for i, x in enumerate(draws)
            ]
            pairs = [
                paired_difference(frechet(x, statistics), frechet(y, statistics))
                for x, y in zip(draws, changed, strict=True)
            ]
            values, lows, highs, errors = (
                torch.tensor(v, dtype=torch.float64) for v in zip(*pairs, strict=True)
            )
            covered = float(((lows <= values.mean()) & (values.mean() <= highs)).double().mean())
            ratio = float(errors.mean() / values.std())
            rows.append(["Fréchet, pairs", "512", "128", f"{ratio:.2f}", f"{100 * covered:.0f}%"])
    print(table(rows))


if __name__ == "__main__":
    main()
