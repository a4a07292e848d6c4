"""Networks that are told pictures: what a correction by the condition's bands adds, on images held out.

    python benchmarks/pictures.py fashion.npy

Two small U-Nets (examples/train.py) are trained from nothing on 16,000 garments, box-resized to 16 x 16, 700
steps each: super-resolution, told the garment at 4 x 4 pixels, and inpainting, told it without one
half and which half that is. Raw last weights and their moving average are each calibrated from 300 other
images. Told is the likelihood bound, in nats an image, of 1,000 images that are neither: what the correction
takes off it, and what the part that depends on the condition takes off beyond that, with 95% intervals; and
what the calibration said it would be.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import trueup
from trueup.estimate import fit, measure
from trueup.process import DiscreteVP
from trueup.statistics import Number, trapezoid_weights

from common import finish, numbers, plus_minus, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train import build

PROCESS, SIZE = DiscreteVP.linear(), 16
TASKS = {"super-resolution": 1, "inpainting": 2}  # channels of the condition


def told(task: str, x0: Tensor, generator: torch.Generator) -> Tensor:
    """The condition of every image."""
    if task == "super-resolution":
        return torch.nn.functional.interpolate(x0, size=(SIZE // 4, SIZE // 4), mode="area")
    known, which = torch.ones_like(x0), torch.randint(4, (len(x0),), generator=generator)
    half = SIZE // 2
    for k, (rows, columns) in enumerate(
        (
            (slice(half), slice(None)),
            (slice(half, None), slice(None)),
            (slice(None), slice(half)),
            (slice(None), slice(half, None)),
        )
    ):
        hidden = torch.zeros_like(known)
        hidden[:, :, rows, columns] = 1
        known = torch.where((which == k)[:, None, None, None], known - hidden, known)
    return torch.cat([x0 * known, known], 1)


class Told(torch.nn.Module):
    """A U-Net of an image and its condition."""

    def __init__(self, channels: int):
        super().__init__()
        self.network = build(SIZE, 1, 32, dropout=0.0)
        self.network.conv_in = torch.nn.Conv2d(1 + channels, 32, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """What diffusers' network says of both, one beside the other."""
        y = torch.nn.functional.interpolate(y, size=x.shape[2:], mode="nearest")
        return self.network(torch.cat([x, y], 1), t).sample


def trained(task: str, images: Tensor, steps: int) -> dict[str, Told]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    raw = Told(TASKS[task])
    ema = copy.deepcopy(raw).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=5e-4)
    for step in range(1, steps + 1):
        x0 = images[torch.randint(len(images), (64,), generator=generator)]
        t = torch.randint(1000, (64,), generator=generator)
        eps = torch.randn(x0.shape, generator=generator)
        x_t = PROCESS.noised(x0, eps, t.double())
        loss = (raw(x_t, t, told(task, x0, generator)) - eps).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            keep = min(0.995, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(ema.parameters()), list(raw.parameters()), 1 - keep)
    print(f"{task}: loss {float(loss.detach()):.4f}", flush=True)
    return {"raw": raw.eval().requires_grad_(False), "EMA": ema}


@torch.no_grad()
def bound(net: trueup.Denoiser, t: Tensor, x0: Tensor, y: Tensor) -> Tensor:
    """The diffusion term of the bound, by image, from the same noise every time."""
    generator, total = torch.Generator().manual_seed(9), torch.zeros(len(x0), dtype=torch.float64)
    for at, weight in zip(t, trapezoid_weights(PROCESS.lam(t)), strict=True):
        eps = torch.randn(x0.shape, generator=generator)
        x_t = PROCESS.noised(x0, eps, at)
        parts = zip(x_t.split(100), y.split(100), strict=True)
        found = torch.cat([net.eps(a, float(at), b) for a, b in parts])
        total += weight * (found - eps).square().sum((1, 2, 3))
    return total


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", help=".npy of uint8 images (examples/fashion_mnist.py)")
    p.add_argument("--steps", type=int, default=700, help="of training, each")
    p.add_argument("--images", type=int, default=300)
    p.add_argument("--held-out", type=int, default=1000)
    p.add_argument("--out", metavar="FILE", help="also write the numbers as JSON")
    options = p.parse_args()
    every = torch.from_numpy(np.load(options.data)[: 16_000 + options.images + options.held_out])
    every = torch.nn.functional.interpolate(every.permute(0, 3, 1, 2).float(), size=(SIZE, SIZE), mode="area")
    every = every / 127.5 - 1
    fitted_to, held_out = every[16_000 : 16_000 + options.images], every[16_000 + options.images :]
    rows, results = [["network", "weights", "bound", "correction", "by the condition, beyond", "as told"]], {}
    for task in TASKS:
        generator = torch.Generator().manual_seed(1)
        y, other = (told(task, x0, generator) for x0 in (fitted_to, held_out))
        for weights, network in trained(task, every[:16_000], options.steps).items():
            net = trueup.Denoiser(
                network, PROCESS, "noise", (1, SIZE, SIZE), conditional=True, data_range=(-1, 1)
            )
            pairs = trueup.Images(list(zip(fitted_to, y, strict=True)), data_range=(-1, 1))
            cal = fit(measure(net, pairs, trust=True, progress=False))
            before, found = bound(net, cal.t, held_out, other), {}
            for name, one in (("correction", replace(cal, conditions=None)), ("both", cal)):
                with trueup.attach(net, one, gains="least-squares"):
                    found[name] = bound(net, cal.t, held_out, other)
            gains = [
                Number.mean(before - found["correction"]),
                Number.mean(found["correction"] - found["both"]),
            ]
            gain = Number(0.0) if cal.conditions is None else cal.conditions.gain
            results[f"{task}, {weights}"] = [numbers(one) for one in (Number.mean(before), *gains, gain)]
            cells = [f"{float(before.mean()):.0f}", *map(plus_minus, (*gains, gain))]
            rows.append([task, weights, *cells])
            print(rows[-1], flush=True)
    print(table(rows))
    finish(options, results)


if __name__ == "__main__":
    main()
