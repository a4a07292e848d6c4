"""Fréchet distance at 2048 dimensions: ours beside torchmetrics', in one run.

OMP_NUM_THREADS=1 python benchmarks/frechet.py

One thread, because two on two busy cores make both sides up to ten times slower.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torchmetrics.image.fid import _compute_fid

from trueup.metrics import GaussianStatistics, frechet, frechet_distance

from common import table


def timed(function, *args):
    start = time.perf_counter()
    value = function(*args)
    return float(getattr(value, "value", value)), time.perf_counter() - start


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GB, of kilobytes


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dimensions", type=int, default=2048)
    p.add_argument("--images", type=int, default=5000)
    p.add_argument("--out", metavar="FILE", help="also write the numbers as JSON")
    options = p.parse_args()
    d, n = options.dimensions, options.images
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(d, d, generator=generator) / d**0.5 * torch.logspace(0, -2, d)
    rows, other = (
        torch.randn(n, d, generator=generator) @ mix for _ in range(2)
    )  # spectra fall as features' do
    rows = 1.1 * rows.clamp_min(-0.01) + 0.05
    a, b = GaussianStatistics().update(rows), GaussianStatistics().update(other)
    parts = (a.mean, a.covariance, b.mean, b.covariance)
    value, seconds = timed(frechet_distance, *parts)
    with_intervals, interval_seconds = timed(frechet, rows, b)
    memory = peak()  # before theirs, whose own would hide it
    expected, their_seconds = timed(_compute_fid, *parts)
    results = {
        "dimensions": d,
        "images": n,
        "seconds": seconds,
        "seconds_with_influence": interval_seconds,
        "torchmetrics_seconds": their_seconds,
        "ratio": their_seconds / seconds,
        "relative_difference": abs(value - expected) / expected,
        "peak_gb": memory,
        "torchmetrics_peak_gb": peak(),
    }
    print(
        table(
            [
                ["", "value", "seconds", "peak memory of the process"],
                ["frechet_distance", f"{value:.8f}", f"{seconds:.2f}", f"{memory:.2f} GB"],
                [f"frechet, {n:,} images", f"{with_intervals:.8f}", f"{interval_seconds:.2f}", "(the same)"],
                ["torchmetrics", f"{expected:.8f}", f"{their_seconds:.2f}", f"{peak():.2f} GB"],
            ]
        )
    )
    print(f"\n{results['ratio']:.1f} times as fast; relative difference {results['relative_difference']:.1e}")
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
