"""Keeping samplers on the marginals: few steps, before and after, and what one would do instead.

    python benchmarks/trajectory.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy
    python benchmarks/trajectory.py ... --part counts        # how few trajectories suffice
    python benchmarks/trajectory.py ... --part instead       # epsilon scaling, dynamic thresholding
    python benchmarks/trajectory.py ... --part harm          # many steps: not worse

Every column of a row starts from the same noise. Fréchet distances (EfficientNet-lite0 features, not
Inception's) are to the test images, W1 is the Wasserstein distance of per-image mean colour, 0..255.
Schedulers are diffusers' with their defaults but for clipping, which is off. A trajectory is fitted on
other noise than the samples it is judged by.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

import trueup
from trueup.denoiser import Denoiser
from trueup.estimate import fit, measure
from trueup.sampling import as_solver
from trueup.sampling.schedulers import SchedulerSolver

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table

SOLVERS = ["ddim", "dpm-solver-2", "dpm-solver-3", "dpm++2m", "unipc"]
NFE = [5, 8, 10, 15, 20, 50]
FACTORS = [0.99, 0.995, 0.998, 1.002, 1.004, 1.006, 1.01, 1.02]  # of epsilon scaling; 1 is uncalibrated
PARTS = ("table", "counts", "instead", "harm")


class Setting:
    """A model, its calibrations, and what its samples are compared with."""

    def __init__(self, path: str, options) -> None:
        self.options = options
        self.denoiser = load_model(path, options)
        self.denoiser.scheduler_config = None  # a plain scheduler for this noise, nothing clipped
        images, test = (np.load(file, mmap_mode="r") for file in (options.data, options.test))
        moments = measure(self.denoiser, trueup.Images(images, count=options.images), progress=False)
        self.calibrations = {family: fit(moments, family=family) for family in ("none", "shift", "spectral")}
        self.quality = Quality(self.denoiser, test)

        self.eager = self.fast = self.denoiser.network.forward
        if options.compile:
            self.fast = torch.compile(self.eager)

    def with_trajectory(self, family: str, solver, nfe: int, trajectories: int | None = None):
        """A calibration of the network, and of this sampler."""
        self.denoiser.network.forward = self.eager  # another batch size would be compiled anew
        return trueup.calibrate_sampler(
            self.denoiser,
            self.calibrations[family],
            solver=solver,
            nfe=nfe,
            trajectories=trajectories or self.options.trajectories,
            progress=False,
        )

    def judge(self, calibration, solver, nfe: int, denoiser=None):
        """Fréchet distance and W1 of samples."""
        options = self.options
        self.denoiser.network.forward = self.fast
        return self.quality(
            denoiser or self.denoiser, calibration, solver, nfe, options.samples, options.batch_size
        )


def full_table(setting: Setting, entry: dict) -> list[list[str]]:
    """Uncalibrated, shift, spectral, trajectory alone, spectral and trajectory."""
    heads = ["", "shift", "spectral", "trajectory", "spectral + trajectory"]
    rows = [["sampler", "evaluations"]]
    rows[0] += [f"FD {head or 'uncalibrated'}" for head in heads] + ["against spectral"]
    rows[0] += [f"W1 {head or 'uncalibrated'}" for head in heads]
    for nfe in setting.options.nfe:
        for solver in setting.options.solvers:
            makers = {
                "": lambda *_: None,
                "shift": lambda *_: setting.calibrations["shift"],
                "spectral": lambda *_: setting.calibrations["spectral"],
                "trajectory": partial(setting.with_trajectory, "none"),
                "spectral + trajectory": partial(setting.with_trajectory, "spectral"),
            }
            found = {}
            for head in heads:
                try:
                    found[head] = setting.judge(makers[head](solver, nfe), solver, nfe)
                except trueup.TrueupError:  # values that are not finite
                    found[head] = None
            both = found["spectral"], found["spectral + trajectory"]
            against = change(both[0][0], both[1][0]) if None not in both else ""
            rows.append(
                [solver, f"{nfe}"]
                + [_shown(found[head], 0) for head in heads]
                + [against]
                + [_shown(found[head], 1) for head in heads]
            )
            entry[f"{solver} {nfe}"] = {h or "uncalibrated": _numbers(found[h]) for h in heads}
            print(" | ".join(rows[-1]), flush=True)
    return rows


def counts(setting: Setting, entry: dict) -> list[list[str]]:
    """How few trajectories suffice, and what they cost."""
    sizes = [32, 128, 512]
    rows = [["sampler", "evaluations", "FD spectral"]]
    rows[0] += [f"{size} trajectories" for size in sizes] + ["time to fit 512 over drawing 512"]
    for solver in setting.options.solvers:
        for nfe in setting.options.nfe:
            row = [setting.judge(setting.calibrations["spectral"], solver, nfe)]
            seconds = []
            for size in sizes:
                begun = time.perf_counter()
                made = setting.with_trajectory("spectral", solver, nfe, size)
                seconds.append(time.perf_counter() - begun)
                row.append(setting.judge(made, solver, nfe))
            setting.denoiser.network.forward = setting.eager
            begun = time.perf_counter()
            many = setting.denoiser.with_batch_size(512)
            trueup.sample(many, 512, solver=solver, nfe=nfe, calibration=made)
            ratio = seconds[-1] / (time.perf_counter() - begun)
            rows.append([solver, f"{nfe}", *(plus_minus(cell[0]) for cell in row), f"{ratio:.2f}"])
            entry[f"{solver} {nfe}"] = [_numbers(cell) for cell in row]
            print(" | ".join(rows[-1]), flush=True)
    return rows


def instead(setting: Setting, entry: dict) -> list[list[str]]:
    """Beside it, epsilon scaling with its best factor and dynamic thresholding."""
    rows = [["sampler", "evaluations", "uncalibrated", "epsilon scaling, best of 8", "factor"]]
    rows[0] += [
        "dynamic thresholding",
        "trajectory",
        "spectral + trajectory",
        "twice the steps, uncalibrated",
    ]
    for solver in setting.options.solvers:
        for nfe in setting.options.nfe:
            scaled = {f: setting.judge(None, solver, nfe, _scaled(setting.denoiser, f)) for f in FACTORS}
            best = min(scaled, key=lambda f: scaled[f][0].value)
            cells = [
                setting.judge(None, solver, nfe),
                scaled[best],
                setting.judge(None, thresholded, nfe)
                if (thresholded := _thresholded(solver, setting.denoiser))
                else None,
                setting.judge(setting.with_trajectory("none", solver, nfe), solver, nfe),
                setting.judge(setting.with_trajectory("spectral", solver, nfe), solver, nfe),
                setting.judge(None, solver, 2 * nfe),
            ]
            shown = [_shown(cell, 0) for cell in cells]
            rows.append([solver, f"{nfe}", *shown[:2], f"{best:g}", *shown[2:]])
            entry[f"{solver} {nfe}"] = {"factor": best, "cells": [_numbers(cell) for cell in cells]}
            print(" | ".join(rows[-1]), flush=True)
    return rows


def harm(setting: Setting, entry: dict) -> list[list[str]]:
    """Many steps, where there is least to gain."""
    rows = [
        ["sampler", "evaluations", "FD spectral", "with trajectory", "difference", "W1", "with trajectory"]
    ]
    for solver in setting.options.solvers:
        for nfe in setting.options.nfe:
            before = setting.judge(setting.calibrations["spectral"], solver, nfe)
            after = setting.judge(setting.with_trajectory("spectral", solver, nfe), solver, nfe)
            rows.append(
                [solver, f"{nfe}", plus_minus(before[0]), plus_minus(after[0]), change(before[0], after[0])]
                + [plus_minus(before[1]), plus_minus(after[1])]
            )
            entry[f"{solver} {nfe}"] = [_numbers(before), _numbers(after)]
            print(" | ".join(rows[-1]), flush=True)
    return rows


def _scaled(denoiser: Denoiser, factor: float) -> Denoiser:
    """Epsilon scaling: the network's noise divided by a factor (Ning et al. 2024)."""
    return Denoiser(
        lambda x_t, t: denoiser(x_t, t) / factor,
        denoiser.process,
        denoiser.parametrization,
        denoiser.shape,
        data_range=denoiser.data_range,
        device=denoiser.device,
    )


def _thresholded(solver: str, denoiser: Denoiser):
    """The scheduler with dynamic thresholding (Saharia et al. 2022), where it has it."""
    made = as_solver(solver, denoiser)
    if not isinstance(made, SchedulerSolver) or "thresholding" not in made.scheduler.config:
        return None
    return type(made.scheduler).from_config(made.scheduler.config, thresholding=True, sample_max_value=3.0)


def _shown(estimates, which: int) -> str:
    return plus_minus(estimates[which]) if estimates is not None else "-"


def _numbers(estimates):
    return None if estimates is None else [numbers(e) for e in estimates]


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--part", choices=PARTS, default="table")
    p.add_argument("--images", type=int, default=500, help="behind the calibrations")
    p.add_argument("--trajectories", type=int, default=128)
    p.add_argument("--nfe", type=int, nargs="+", default=NFE)
    p.add_argument("--solvers", nargs="+", default=SOLVERS)
    p.add_argument("--compile", action="store_true", help="compile the network for sampling")
    options = p.parse_args()
    parts = {"table": full_table, "counts": counts, "instead": instead, "harm": harm}
    results = {}
    for path in options.model:
        entry: dict = {}
        rows = parts[options.part](Setting(path, options), entry)
        print(f"\n{path}: {options.samples} samples, {options.images} images\n")
        print(table(rows), flush=True)
        results[path] = entry
        finish(options, results)


if __name__ == "__main__":
    main()
