"""Makes v1.trueup.safetensors, the file that every later version must keep reading.

    python tests/data/make_v1.py

It is kept for what it was when format 1 was fixed: do not make it again for a newer format, add another.
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

PATH = Path(__file__).with_name("v1.trueup.safetensors")


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
    return Calibration(
        correction=Correction(process.lam(t), b, gains, -gains / 2, bands),
        t=t,
        shape=(1, 4, 4),
        evidence=evidence,
        family="spectral",
        estimator="shrunk",
        data_mean=torch.arange(16, dtype=torch.float64).reshape(1, 16) / 16,
        data_variance=torch.full((1, bands.count), 0.25, dtype=torch.float64),
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
    )


if __name__ == "__main__":
    calibration().save(PATH)
    print(f"{PATH.name}: {PATH.stat().st_size} bytes")
