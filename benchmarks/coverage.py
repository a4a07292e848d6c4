"""Do 95% intervals cover? Repetitions on a Gaussian mixture with a known bias.

    python benchmarks/coverage.py

Each repetition draws new images and new noise, calibrates, and checks every interval it states: the size of
the mean residual and the held-out gain at every level, and both totals. Truth is the bias itself, and for
gains the loss that repetition's own correction removes on 20,000 other images.
"""

from __future__ import annotations

import argparse

import torch

import trueup
from trueup.analytic import GaussianMixture
from trueup.bands import Bands
from trueup.estimate import fit, measure
from trueup.statistics import trapezoid_weights

from common import gains, table

PROCESS = trueup.process.ContinuousVP()
LEVELS = PROCESS.t_of_lam(torch.linspace(3.0, -4.0, 15, dtype=torch.float64))


def biased_model(size: float):
    """The mixture, a denoiser off by b = size (1 + sin(lam)/2) m with |m| = 1, and |b|^2 at each level."""
    generator = torch.Generator().manual_seed(0)
    means = torch.nn.functional.interpolate(
        torch.randn(4, 3, 3, 3, generator=generator), size=8, mode="bilinear"
    )
    mixture = GaussianMixture(0.7 * means.double(), std=0.4)
    bands = Bands((8, 8))
    z = torch.randn(3, 64, generator=generator, dtype=torch.float64) * (bands.index.flatten() <= 2)
    fixed = bands.idct(z.reshape(3, 8, 8))
    fixed = fixed / fixed.norm()

    def bias(eps, u, lam):
        return (size * (1 + 0.5 * torch.sin(lam.double())) * fixed).to(eps)

    truth = (size * (1 + 0.5 * torch.sin(PROCESS.lam(LEVELS)))) ** 2
    return mixture, mixture.denoiser(PROCESS, distortion=bias), truth


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repetitions", type=int, default=200)
    p.add_argument("--images", type=int, default=100)
    p.add_argument("--size", type=float, default=0.3)
    options = p.parse_args()
    mixture, denoiser, truth = biased_model(options.size)
    many = denoiser.with_batch_size(2000)
    others = trueup.Images(mixture.sample(20000, seed=10**6))
    held_out = measure(many, others, levels=LEVELS, seed=10**6, trust=True)
    hits: dict[str, list[torch.Tensor]] = {}
    for repetition in range(options.repetitions):
        x0 = mixture.sample(options.images, seed=repetition)
        moments = measure(many, trueup.Images(x0), levels=LEVELS, seed=repetition, trust=True)
        weights = trapezoid_weights(moments.lam)
        for family in ("shift", "spectral"):
            cal = fit(moments, family=family)
            e = cal.evidence
            gain, _ = gains(held_out, cal.correction)
            covered = (e.gain.low <= gain) & (gain <= e.gain.high)
            hits.setdefault(f"held-out gain, {family}", []).append(covered)
            inside = e.bound_gain.low <= float(gain @ weights) <= e.bound_gain.high
            hits.setdefault(f"gain of the bound, {family}", []).append(torch.tensor([inside]))
        hits.setdefault("size of the mean residual", []).append(
            (e.eta2.low <= truth) & (truth <= e.eta2.high)
        )
        inside = e.shift_bound_gain.low <= float(truth @ weights) <= e.shift_bound_gain.high
        hits.setdefault("gain of the bound, ideal shift", []).append(torch.tensor([inside]))
    rows = [["95% interval of", "intervals", "covered"]]
    for name, values in hits.items():
        covered = torch.cat(values).double()
        rows.append([name, f"{len(covered):,}", f"{100 * float(covered.mean()):.1f}%"])
    print(f"{options.repetitions} repetitions, {options.images} images each, |b| about {options.size}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
