"""What the benchmarks share: the model and data they are given, and how they print tables."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch

import trueup
from trueup.denoiser import Denoiser
from trueup.estimate import default_levels
from trueup.estimate import measure as measure_moments
from trueup.estimate.confirm import score
from trueup.evaluation import build_reference
from trueup.hf import as_denoiser
from trueup.metrics import GaussianStatistics, colours, frechet, load_features, wasserstein
from trueup.sampling import image_maker, sample_batches
from trueup.statistics import Number, mean_and_error

FINDINGS_LEVELS = (999, 852, 673, 440, 177, 44, 8)


def parser(text: str, *, data: bool = True) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, nargs="+", metavar="DIR", help="diffusers model directories")
    if data:
        p.add_argument(
            "--data", required=True, metavar="FILE", help=".npy of uint8 images (examples/cifar10.py)"
        )
    p.add_argument("--beta-schedule", default="linear", help="for directories without a scheduler")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--batch-size", type=int, default=500 if torch.cuda.is_available() else 50)
    p.add_argument("--half", action="store_true", help="the network in half precision")
    p.add_argument("--held-out", type=int, default=2000, help="images the truth is measured on")
    p.add_argument("--out", metavar="FILE", help="also write the numbers as JSON")
    return p


def comparison_parser(text: str) -> argparse.ArgumentParser:
    """For benchmarks that draw samples and compare them with test images."""
    p = parser(text)
    p.add_argument("--test", required=True, metavar="FILE", help=".npy of images to compare with")
    p.add_argument("--samples", type=int, default=2000)
    return p


def load_model(path: str, options: argparse.Namespace) -> Denoiser:
    scheduler = None
    if not any((Path(path) / p).exists() for p in ("model_index.json", "scheduler_config.json")):
        scheduler = {"beta_schedule": options.beta_schedule, "beta_start": 1e-4, "beta_end": 0.02}
    denoiser = as_denoiser(path, scheduler=scheduler, device=options.device, batch_size=options.batch_size)
    if options.half:
        denoiser.network.half().to(memory_format=torch.channels_last)
    return denoiser


def load_images(options: argparse.Namespace) -> np.ndarray:
    return np.load(options.data, mmap_mode="r")


def measure(denoiser: Denoiser, images: np.ndarray, options: argparse.Namespace, levels=None, seed: int = 0):
    data = trueup.Images(images)
    many = denoiser.with_batch_size(options.batch_size)
    return measure_moments(many, data, levels=levels, seed=seed, trust=True, progress=False)


def levels_with(denoiser: Denoiser, extra=FINDINGS_LEVELS) -> torch.Tensor:
    default = default_levels(denoiser.process)
    return torch.unique(torch.cat([default, torch.tensor(extra, dtype=torch.float64)]))


def gains(held_out, correction) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss a correction removes per level on held-out images, with its standard error."""
    held_out = held_out.used()
    return mean_and_error(score(held_out, correction).gain().sum(2), held_out.rows[0])


class Quality:
    """Fréchet distance and colour drift of samples, with what every image did to them.

    Features: EfficientNet-lite0's, against those of the reference images.
    """

    def __init__(self, denoiser: Denoiser, images: np.ndarray, features: str = "efficientnet"):
        self.features = load_features(features, device=denoiser.device)
        self.reference = build_reference(trueup.Images(images), denoiser, self.features, progress=False)
        pooled = self.reference.pooled  # on the network's device: one eigendecomposition for every row
        mean, scatter = (v.to(denoiser.device) for v in (pooled.mean, pooled.covariance * (pooled.count - 1)))
        self.pooled = GaussianStatistics(mean, scatter, pooled.count)

    def of(self, x: torch.Tensor, denoiser: Denoiser) -> Number:
        """The Fréchet distance of samples already drawn."""
        to_images = image_maker(denoiser)
        return frechet(
            torch.cat([self.features(to_images(part)).pooled for part in x.split(250)]), self.pooled
        )

    def __call__(
        self, denoiser: Denoiser, calibration, solver, nfe: int, samples: int, batch_size: int, **how
    ):
        """(Fréchet distance, W1 of mean colour) of `samples` samples."""
        parts, colour = [], []
        to_images = image_maker(denoiser)
        many = denoiser.with_batch_size(batch_size)
        for _, x in sample_batches(
            many, samples, solver=solver, nfe=nfe, calibration=calibration, progress=False, **how
        ):
            images = to_images(x)
            parts.append(self.features(images).pooled)
            colour.append(colours(images))
        pooled = torch.cat(parts)
        return frechet(pooled, self.pooled), wasserstein(torch.cat(colour), self.reference.colours)


def median(values: list[float]) -> list[float]:
    """The median, and the ends of its 95% interval, by ranks."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    ends = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return [statistics.median(ordered), ordered[max(0, ends[0])], ordered[min(len(values) - 1, ends[1])]]


def plus_minus(number: Number) -> str:
    return f"{number.value:.3g} ± {number.reach:.2g}"


def numbers(number: Number) -> list[float]:
    """Value and 95% interval, for the JSON."""
    return [number.value, number.low, number.high]


def change(before: Number, after: Number) -> str:
    """The paired difference, and whether it is more than luck."""
    difference = after.difference(before)
    word = "" if difference.sign else ", within noise"
    return f"{difference.value:+.3g} ± {difference.reach:.2g}{word}"


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def finish(options: argparse.Namespace, results: dict) -> None:
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))
