"""Makes v2.trueup.safetensors, the file that every later version must keep reading.

    python tests/data/make_v2.py

It is kept for what it was when format 2 was fixed: do not make it again for a newer format, add another.
Every number is exact in float32; tests/test_artifact.py repeats them.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from trueup.bands import Bands
from trueup.calibration import Calibration, Evidence
from trueup.correction import Correction
from trueup.process import VE
from trueup.trajectory import Sampler, States, Trajectory
from trueup.trajectory.maps import EVIDENCE, TOTALS

PATH = Path(__file__).with_name("v2.trueup.safetensors")


def calibration() -> Calibration:
    bands = Bands((4, 4))  # three bands and more; the two lowest are kept
    process = VE(0.125, 8.0)
    t = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    b = torch.zeros(3, 1, 16, dtype=torch.float64)
    b[:, 0, 0] = torch.tensor([0.5, -0.25, 0.125])
    b[:, 0, bands.members[1]] = torch.tensor([0.03125, 0.0, -0.0625], dtype=torch.float64)[:, None]
    gains = torch.zeros(3, 1, bands.count, dtype=torch.float64)
    gains[:, 0, 0] = torch.tensor([0.25, 0.5, 0.75])
    column = torch.arange(1, 4, dtype=torch.float64)
    evidence = Evidence(
        images=48,
        folds=16,
        dimensions=16,
        loss=8 * column,
        loss_se=column / 8,
        eta2=column / 2,
        eta2_se=column / 16,
        eta2_low=column / 4,
        eta2_high=column,
        gain=column,
        gain_se=torch.full((3,), math.nan, dtype=torch.float64),
        shift_se=column / 4,
        scale=torch.full((3, bands.count), 0.5, dtype=torch.float64),
        bound_gain=(2.5, 0.125),
        shift_bound_gain=(1.5, 0.5, math.nan),
    )
    states = States(*(torch.tensor(v, dtype=torch.float64) for v in ([2.0, 1.0], [1.0, 1.0], [0.5, 0.125])))
    gain = torch.ones(2, 1, bands.count, dtype=torch.float64)
    gain[0, 0, 0], gain[1, 0, -1] = 0.5, 2.0
    shift = torch.zeros(2, 1, 16, dtype=torch.float64)
    shift[0, 0, 0] = 0.25
    proof = {name: torch.full((2, bands.count), 3.0, dtype=torch.float64) for name in EVIDENCE}
    proof |= {name: torch.full((2,), 1.0, dtype=torch.float64) for name in TOTALS}
    mean = torch.arange(16, dtype=torch.float64).reshape(1, 16) / 16
    singlestep = {"kind": "DPMSolver", "order": 3, "grid": "logsnr", "allocation": "fast", "end": None}
    ddim = {"kind": "DDIMScheduler", "clip_sample": False}
    origin = {"seed": 7, "labels": None}
    trajectories = (
        Trajectory(
            Sampler("dpm-solver-3", 2, singlestep), states, bands, mean, shift, gain, proof, 64, origin
        ),
        Trajectory(Sampler("ddim", 2, ddim, 2.0), states, bands, mean, 0 * shift, gain**0, proof, 64, origin),
    )
    return Calibration(
        correction=Correction(process.lam(t), b, gains, -gains / 2, bands),
        t=t,
        shape=(1, 4, 4),
        evidence=evidence,
        family="spectral",
        estimator="shrunk",
        data_mean=mean,
        data_variance=torch.full((1, bands.count), 0.25, dtype=torch.float64),
        data_variance_se=torch.full((1, bands.count), 0.0625, dtype=torch.float64),
        data_images=64,
        data_fingerprint="0123456789abcdef",
        provenance={
            "model": "Tiny",
            "weights": {"float32": "00112233445566778899aabbccddeeff"},
            "process": process.settings(),
            "parametrization": {"name": "noise"},
            "data_range": [-1.0, 1.0],
            "seed": 7,
            "antithetic": False,
            "transform": {"resize": None, "crop": None, "flip": False},
        },
        trajectories=trajectories,
    )


if __name__ == "__main__":
    calibration().save(PATH)
    print(f"{PATH.name}: {PATH.stat().st_size} bytes")
