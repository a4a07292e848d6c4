"""The paper's theory, measured: what docs/theory.md shows. Needs no model but the bundled one, and no GPU.

python benchmarks/theory.py --out docs/images
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import trueup
from trueup import Images
from trueup.analytic import GaussianMixture, KernelDensity
from trueup.estimate import fit, measure
from trueup.figure import curves
from trueup.files import bundled
from trueup.hf import as_denoiser
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow

import common
import instruments

SHAPE = (1, 4, 4)
BOTH = ("uncalibrated", "shift", "spectral")


def mixture() -> GaussianMixture:
    means = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return GaussianMixture(means - means.mean(0), 0.4)


def save(figure: Figure, folder: Path, name: str) -> None:
    figure.savefig(folder / name, dpi=110)
    print(f"wrote {folder / name}", flush=True)


def martingale(folder: Path) -> None:
    """Paths of the scaled score, and theorem 1 on an exact and on a biased network."""
    data, process = mixture(), ContinuousVP(t_min=0.02)
    net = data.denoiser(process, dtype=torch.float64)
    biased = data.denoiser(process, dtype=torch.float64, distortion=lambda eps, u, lam: 0.2 + 0 * eps)
    t = torch.linspace(0.02, 1.0, 200, dtype=torch.float64)
    found = instruments.paths(net, data.sample(2000), t)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(found.t, found.values[:, :25, 0], color="C0", alpha=0.35, linewidth=0.8)
    left.plot(found.t, found.values[:, :, 0].mean(1), color="black", label="mean of 2,000")
    left.set(xlabel="t, read from right to left", ylabel=r"$\alpha_t s_t(x_t)$, first entry", title="paths")
    left.legend()
    x0 = data.sample(200)
    rows = [["s", "exact network", "biased by 0.2", "shift removed again"]]
    calibration = trueup.calibrate(
        biased, Images(data.sample(400).float()), family="shift", trust=True, progress=False
    )
    places = (0.7, 0.5, 0.3, 0.1)
    shares: dict[str, list] = {"exact": [], "biased": [], "calibrated": []}
    for s in places:
        shares["exact"].append(instruments.martingale_check(net, x0, s, 0.8, draws=64, steps=40).share)
        shares["biased"].append(instruments.martingale_check(biased, x0, s, 0.8, draws=64, steps=40).share)
        with trueup.attach(biased, calibration):
            shares["calibrated"].append(
                instruments.martingale_check(biased, x0, s, 0.8, draws=64, steps=40).share
            )
        rows.append([str(s), *(f"{v[-1].value:.3f} ± {v[-1].reach:.3f}" for v in shares.values())])
    for name, values in shares.items():
        right.errorbar(places, [v.value for v in values], [v.reach for v in values], marker=".", label=name)
    right.axhline(0, color="black", linewidth=0.6)
    right.set(
        xlabel="s, from t = 0.8", ylabel=r"$|E[M_s|x_t]-M_t|^2 / |M_t|^2$", title="theorem 1 by Monte Carlo"
    )
    right.legend()
    save(figure, folder, "theory-martingale.png")
    print(common.table(rows), flush=True)


def concentration(folder: Path) -> None:
    """Azuma's and Doob's bounds beside what happens."""
    data, process = mixture(), ContinuousVP(t_min=0.02)
    t = torch.linspace(0.02, 1.0, 200, dtype=torch.float64)
    found = instruments.paths(data.denoiser(process, dtype=torch.float64), data.sample(4000), t)
    level = torch.logspace(-0.5, 2.2, 60, dtype=torch.float64)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("doob", "azuma"), strict=True):
        observed, bound = getattr(found, name)(level)
        axis.loglog(level, bound, label="bound")
        axis.loglog(level, observed.clamp_min(1e-5), label="observed")
        axis.set(ylim=(1e-5, 2), xlabel={"doob": "C", "azuma": r"$\epsilon$"}[name])
        axis.set_title({"doob": r"$P(\sup_t M_t \geq C)$", "azuma": r"$P(|M_0 - M_T| \geq \epsilon)$"}[name])
        axis.legend()
        print(f"{name}: observed above the bound at {int((observed > bound).sum())} of {len(level)} places")
    save(figure, folder, "theory-concentration.png")


def dataset_bias(folder: Path) -> None:
    """The ideal network of n images: its mean error on them, and on others (section 3.4)."""
    images = np.load(bundled("bundled:images"))
    shape = (1, *images.shape[1:3])
    process = DiscreteVP.linear()
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    rows = [["images", "own: nats (interval)", "held out: nats (interval)"]]
    for colour, count in enumerate((20, 60, 200)):
        ideal = KernelDensity.of(images[:count], shape)
        net = ideal.denoiser(process)
        cells = []
        for name, data in (("own", images[:count]), ("held out", images[200:])):
            found = curves(trueup.calibrate(net, Images(data, count=1000), trust=True, progress=False))
            value, low, high = (2 * found.size).clamp_min(1e-6)
            style = {"label": f"{count} images, {name}", "color": f"C{colour}"}
            axis.plot(process.lam(found.t), value, linestyle="--" if name == "own" else "-", **style)
            if name == "held out":
                axis.fill_between(process.lam(found.t), low, high, color=f"C{colour}", alpha=0.2)
            area = found.area
            cells.append(f"{area.value:.3g} ({area.low:.3g} to {area.high:.3g})")
        rows.append([str(count), *cells])
    axis.set(yscale="log", ylim=(1e-6, None), xlabel="lam", ylabel=r"$\|E[\epsilon] - E[\hat\epsilon]\|^2$")
    axis.legend(fontsize="x-small")
    save(figure, folder, "theory-dataset.png")
    print(common.table(rows), flush=True)


def derivatives() -> None:
    """What a calibration does to the Jacobian of the bundled network's scores."""
    net = as_denoiser(bundled("bundled:raw"))
    images = np.load(bundled("bundled:images"))
    moments = measure(net, Images(images, count=100), progress=False)
    x0 = torch.from_numpy(np.array(images[200])).reshape(net.shape).float() / 127.5 - 1
    noise = torch.randn(net.shape, generator=torch.Generator().manual_seed(0))
    rows = [["t", *(f"asymmetry, {name}" for name in BOTH), "change of the Jacobian: shift", "spectral"]]
    fitted = {name: fit(moments, family=name) for name in BOTH[1:]}
    for t in (50, 400):
        x_t = float(net.process.alpha(t)) * x0 + float(net.process.sigma(t)) * noise
        before = instruments.jacobian(net, x_t, t)
        found, moved = [instruments.asymmetry(before)], []
        for calibration in fitted.values():
            with trueup.attach(net, calibration, gains="least-squares"):
                after = instruments.jacobian(net, x_t, t)
            found.append(instruments.asymmetry(after))
            moved.append(float((after - before).norm() / before.norm()))
        rows.append([str(t), *(f"{v:.4f}" for v in found), *(f"{v:.2g}" for v in moved)])
    print(common.table(rows), flush=True)


def exact_likelihood() -> None:
    """The error of the probability flow's log-likelihood on mixture data, in nats per dimension."""
    data = mixture()
    x0 = data.sample(32).float()
    exact = -data.log_density(x0.double(), torch.ones(32), torch.zeros(32))
    size = math.prod(SHAPE)
    rows = [["process", "tolerance", "largest error", "error of the mean", "evaluations", "with noise: mean"]]
    for process, kind in (
        (ContinuousVP(), "noise"),
        (DiscreteVP.linear(), "noise"),
        (VE(), "data"),
        (EDM(), "data"),
        (Flow(), "flow"),
    ):
        net = data.denoiser(process, kind, dtype=torch.float64)
        for tolerance in (1e-3, 1e-4, 1e-5):
            how = {"method": "ode", "trace": "exact", "tolerance": tolerance, "progress": False}
            found = trueup.likelihood(net, Images(x0), start="data", **how)
            noisy = trueup.likelihood(net, Images(x0), **how)
            error = (found.before - exact) / size
            apart = (noisy.before - exact) / size
            rows.append(
                [
                    process.kind,
                    f"{tolerance:g}",
                    f"{float(error.abs().max()):.1e}",
                    f"{float(error.mean()):+.1e}",
                ]
                + [f"{found.evaluations[0]:.0f}"]
                + [f"{float(apart.mean()):+.1e} ± {2 * float(apart.std()) / math.sqrt(32):.0e}"]
            )
    print(common.table(rows), flush=True)


def coverage(repeats: int = 400) -> None:
    """How often 95% intervals of the bound and of its gain hold the closed forms."""
    data = GaussianMixture(torch.zeros(1, *SHAPE), 0.5)
    process = ContinuousVP()
    pattern = 0.3 * torch.linspace(-1, 1, 16).reshape(SHAPE)
    net = data.denoiser(process, distortion=lambda eps, u, lam: pattern.to(eps).expand_as(eps))
    net = net.with_batch_size(200)
    calibration = trueup.calibrate(net, Images(data.sample(4000)), family="shift", trust=True, progress=False)
    lam = [float(process.lam(t)) for t in (process.t_min, process.t_max)]
    gain = (lam[0] - lam[1]) * float(pattern.double().square().sum())
    size = math.prod(SHAPE)
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    area = 0.5 * size * (math.log1p(0.25 * math.exp(2 * lam[0])) - math.log1p(0.25 * math.exp(2 * lam[1])))
    flat = 0.5 * size * math.log(2 * math.pi * math.e * (sigma / alpha) ** 2)
    end = [float(f(process.t_max)) for f in (process.alpha, process.sigma)]
    prior = 0.5 * size * (end[0] ** 2 * 0.25 + end[1] ** 2 - 1 - 2 * math.log(end[1]))
    truth = {"bound": area + flat + prior + gain, "gain": gain}
    rows = [["images", "levels per image", "bound", "gain"]]
    for images, draws in ((20, 2), (20, 8), (100, 8)):
        hits = {"bound": 0, "gain": 0}
        for repeat in range(repeats):
            found = trueup.likelihood(
                net,
                Images(data.sample(images, seed=10_000 + repeat)),
                calibration,
                draws=draws,
                seed=repeat,
                progress=False,
            )
            scale = size * math.log(2)
            for name, number in (("bound", found.mean()), ("gain", found.difference())):
                value = number.scaled(scale if name == "bound" else -scale)
                hits[name] += min(value.low, value.high) < truth[name] < max(value.low, value.high)
        rows.append(
            [str(images), str(draws), *(f"{100 * hits[n] / repeats:.1f}%" for n in ("bound", "gain"))]
        )
    print(common.table(rows), flush=True)


PARTS = {
    "martingale": martingale,
    "concentration": concentration,
    "dataset": dataset_bias,
    "derivatives": derivatives,
    "exact": exact_likelihood,
    "coverage": coverage,
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    p.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    options = p.parse_args()
    for name in options.part:
        print(f"\n## {name}", flush=True)
        drawn = name in ("martingale", "concentration", "dataset")
        PARTS[name](options.out) if drawn else PARTS[name]()


if __name__ == "__main__":
    main()
