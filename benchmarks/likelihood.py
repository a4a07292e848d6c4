"""Bits per dimension before and after calibration: bound, chain of steps, probability flow.

    python benchmarks/likelihood.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy

Parts: `bound` (continuous time, and the T-step bound of improved DDPM), `ode`, `levels` (how much importance
sampling of noise levels saves), `figure` (the paper's figure 1 and the uncalibration scores), `martingale`
(theorem 1 on the networks). `benchmarks/theory.py` has what needs no network.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import trueup
from trueup import Images
from trueup.estimate import fit
from trueup.figure import draw
from trueup.statistics import Number

import common
from instruments import martingale_check

PARTS = ("bound", "ode", "levels", "figure", "martingale")


def options():
    p = common.parser(__doc__)
    p.add_argument(
        "--test", required=True, metavar="FILE", help=".npy of images whose likelihood is measured"
    )
    p.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    p.add_argument("--images", type=int, default=500, help="images a calibration is made from")
    p.add_argument("--bound-images", type=int, default=2000)
    p.add_argument("--ode-images", type=int, default=500)
    p.add_argument("--draws", type=int, default=16)
    p.add_argument("--tolerance", type=float, default=1e-4)
    p.add_argument("--start", nargs="+", choices=("data", "noise"), default=("data", "noise"))
    p.add_argument("--families", nargs="+", default=("shift", "spectral"))
    p.add_argument("--reverse-steps", type=int, default=20, help="of martingale: steps of a path")
    p.add_argument("--reverse-draws", type=int, default=32, help="of martingale: paths from each image")
    p.add_argument("--figure", default="figure1.png", metavar="FILE")
    return p.parse_args()


def cell(number: Number, digits: int = 4) -> str:
    return f"{number.value:.{digits}f} ± {number.reach:.{max(digits, 4)}f}"


def change(number: Number) -> str:
    word = "" if number.sign else ", within noise"
    return f"{number.value:+.4f} ± {number.reach:.4f}{word}"


def main() -> None:
    o = options()
    images, test = common.load_images(o), np.load(o.test, mmap_mode="r")
    results: dict = {}
    for path in o.model:
        name = path.rstrip("/").split("/")[-1].upper()
        denoiser = common.load_model(path, o)
        moments = common.measure(denoiser, images[: o.images], o)
        calibrations = {family: fit(moments, family=family) for family in o.families}
        found = results.setdefault(name, {})
        print(f"\n## {name}", flush=True)
        if "bound" in o.part:
            found["bound"] = bound(denoiser, calibrations, test, o)
        if "levels" in o.part:
            found["levels"] = levels(denoiser, test, o)
        if "figure" in o.part:
            found["figure"] = score(denoiser, images, calibrations, o)
        if "martingale" in o.part:
            found["martingale"] = martingale(denoiser, calibrations, test, o)
        if "ode" in o.part:
            found["ode"] = ode(denoiser, calibrations, test, o)
    if "figure" in o.part:
        many = {name: r["figure"].pop("calibration") for name, r in results.items() if "figure" in r}
        for name, calibration in many.items():  # `trueup inspect FILE --figure` draws them one by one
            calibration.save(f"{o.figure}.{name}.trueup.safetensors")
        try:
            draw(many, o.figure)
        except trueup.TrueupError as error:
            print(error)
    common.finish(o, results)


def bound(denoiser, calibrations, test, o) -> dict:
    rows = [
        ["bound", "family", "prior", "diffusion", "decoder", "total", "calibrated", "difference", "predicted"]
    ]
    found = {}
    for steps in (None, 1000):
        for family, calibration in calibrations.items():
            data = Images(test, count=o.bound_images)
            r = trueup.likelihood(denoiser, data, calibration, steps=steps, draws=o.draws, progress=False)
            terms = [float(r.bits_per_dim(r.terms[n][0]).mean()) for n in ("prior", "diffusion", "decoder")]
            name = "continuous" if steps is None else f"{steps} steps"
            parts = [change(r.difference(n)) for n in ("diffusion", "decoder")]
            rows.append(
                [name, family, *(f"{v:.4f}" for v in terms), cell(r.mean(), 3), cell(r.mean(after=True), 3)]
                + [change(r.difference()), r.agreement() or ""]
            )
            found[f"{name} {family}"] = r.as_json() | {"per_image": None, "parts": parts}
            print(rows[-1], parts, flush=True)
    print(common.table(rows), flush=True)
    return found


def ode(denoiser, calibrations, test, o) -> dict:
    rows = [["start", "family", "uncalibrated", "calibrated", "difference", "evaluations", "start-time bias"]]
    found = {}
    for start in o.start:
        for family, calibration in calibrations.items():
            began = time.time()
            r = trueup.likelihood(
                denoiser,
                Images(test, count=o.ode_images),
                calibration,
                method="ode",
                tolerance=o.tolerance,
                start=start,
                progress=False,
            )
            bias = ""
            if r.start_bias is not None:
                bias = ", ".join(f"{float(r.bits_per_dim(v).mean()):+.3f}" for v in r.start_bias)
            calls = ", ".join(f"{v:.0f}" for v in r.evaluations)
            rows.append(
                [
                    start,
                    family,
                    cell(r.mean(), 3),
                    cell(r.mean(after=True), 3),
                    change(r.difference()),
                    calls,
                    bias,
                ]
            )
            found[f"{start} {family}"] = r.as_json() | {"per_image": None}
            print(rows[-1], f"{time.time() - began:.0f} s", flush=True)
    print(common.table(rows), flush=True)
    return found


def levels(denoiser, test, o, images: int = 128, repeats: int = 24) -> dict:
    """Variance of the whole bound of the same images over seeds of noise and levels."""
    rows = [["levels per image", "uniform levels", "importance-sampled", "ratio of variances"]]
    found = {}
    for draws in (1, 4, 16):
        spread = {}
        for importance in (False, True):
            totals = [
                trueup.likelihood(
                    denoiser,
                    Images(test, count=images),
                    draws=draws,
                    importance=importance,
                    seed=seed,
                    progress=False,
                )
                .mean()
                .value
                for seed in range(repeats)
            ]
            spread[importance] = float(np.var(totals, ddof=1))
        ratio = spread[False] / spread[True]
        rows.append([str(draws), f"{spread[False] ** 0.5:.4f}", f"{spread[True] ** 0.5:.4f}", f"{ratio:.0f}"])
        found[draws] = {"uniform": spread[False], "importance": spread[True]}
    print(f"standard deviation of the bound of {images} images over {repeats} seeds, bits/dim")
    print(common.table(rows), flush=True)
    return found


def score(denoiser, images, calibrations, o) -> dict:
    """The uncalibration score, and the curves of figure 1 from more images."""
    many = fit(common.measure(denoiser, images[: o.held_out], o), family="spectral")
    for name, calibration in {**calibrations, f"spectral, {o.held_out} images": many}.items():
        bits, share = calibration.uncalibration, calibration.uncalibration_share.scaled(100)
        print(f"{name}: uncalibration {cell(bits)} bits/dim, at least {share}% of the loss", flush=True)
    area = many.evidence.shift_bound_gain
    print(
        f"area under the second curve (shift): {area.value:.3g} nats ({area.low:.3g} to {area.high:.3g})",
        flush=True,
    )
    found = {name: c.uncalibration.as_json() for name, c in calibrations.items()}
    return {**found, "area": area.as_json(), "calibration": many}


def martingale(denoiser, calibrations, test, o, images: int = 64) -> dict:
    """How far from a martingale the scaled scores are, before and after calibration."""
    x0 = torch.from_numpy(np.array(test[:images])).permute(0, 3, 1, 2).float() / 127.5 - 1
    rows = [["s", "t", "uncalibrated", *calibrations]]
    how = {"draws": o.reverse_draws, "steps": o.reverse_steps}
    found = {}
    for s, t in ((800, 999), (500, 800), (200, 500), (50, 200)):
        sides = {"uncalibrated": martingale_check(denoiser, x0, s, t, **how).share}
        for family, calibration in calibrations.items():
            with trueup.attach(denoiser, calibration, gains="least-squares"):
                sides[family] = martingale_check(denoiser, x0, s, t, **how).share
        rows.append(
            [str(s), str(t), *(f"{v.value:.4f} ({v.low:.4f} to {v.high:.4f})" for v in sides.values())]
        )
        found[f"{s} {t}"] = {name: v.as_json() for name, v in sides.items()}
    print("|E[M_s | x_t] - M_t|^2 in units of |M_t|^2")
    print(common.table(rows), flush=True)
    return found


if __name__ == "__main__":
    main()
