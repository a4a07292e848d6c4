"""A known error, found and removed: the whole flow on a model whose truth is known in closed form.

    python examples/known_bias.py [FOLDER]

The data is a mixture of Gaussians around three small pictures, so the ideal denoiser is exact. We spoil it
with a colour cast that depends on the noise level and outputs that are too large, calibrate it from 100
images, and sample before and after. Writes the calibration and a picture to FOLDER (default: out).
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import trueup
from trueup.analytic import GaussianMixture
from trueup.process import DiscreteVP

PROCESS = DiscreteVP.linear()


def shapes(size: int = 16) -> torch.Tensor:
    """A disc, a bar and a ramp in colour, (3, 3, size, size)."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, size, dtype=torch.float64)] * 2, indexing="ij")
    disc = ((x**2 + y**2) < 0.4).double() * 1.4 - 0.7
    bar = (x.abs() < 0.3).double() * 1.4 - 0.7
    ramp = 0.7 * (x + y) / 2
    tint = torch.tensor([[0.9, 0.5, 0.3], [0.3, 0.9, 0.4], [0.5, 0.4, 0.9]], dtype=torch.float64)
    return torch.stack([disc, bar, ramp])[:, None] * tint[:, :, None, None]


def spoil(eps: torch.Tensor, u: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
    """A cast that darkens green, strongest at high noise, and outputs 10% too large."""
    cast = torch.tensor([0.0, 0.04, 0.01]).reshape(1, 3, 1, 1).to(eps)
    return cast * torch.sigmoid(-lam) + 0.1 * eps


@torch.no_grad()
def sample(denoiser, count: int, steps: int = 20) -> torch.Tensor:
    """DDIM, written out; the same starting noise every time."""
    x = torch.randn(count, *denoiser.shape, generator=torch.Generator().manual_seed(0))
    times = torch.linspace(999, 0, steps + 1).round().long()
    for now, after in pairwise(times):
        alpha, sigma = PROCESS.alpha(now).float(), PROCESS.sigma(now).float()
        eps = denoiser(x, now.expand(count))
        x0 = (x - sigma * eps) / alpha
        x = PROCESS.alpha(after).float() * x0 + PROCESS.sigma(after).float() * eps
    return x0


def strip(images: torch.Tensor) -> np.ndarray:
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().byte()
    return np.concatenate(list(pixels.permute(0, 2, 3, 1).numpy()), 1)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = GaussianMixture(shapes(), std=0.1)
    ideal, spoiled = data.denoiser(PROCESS), data.denoiser(PROCESS, distortion=spoil)
    spoiled = spoiled.with_batch_size(100)
    # Trusted: a spoiled network is worse than a filter, and would be refused as one that is used wrongly.
    cal = trueup.calibrate(spoiled, data.sample(100), trust=True, progress=True)
    print(cal.summary())
    path = folder / "known-bias.trueup.safetensors"
    cal.save(path)

    rows, colours = [], {}
    for name, denoiser in (("spoiled", spoiled), ("calibrated", spoiled), ("ideal", ideal)):
        handle = trueup.attach(spoiled, path) if name == "calibrated" else None
        images = sample(denoiser, 24)
        if handle is not None:
            handle.remove()
        rows.append(strip(images))
        colours[name] = images.mean((0, 2, 3))
    picture = folder / "known-bias.png"
    Image.fromarray(np.concatenate(rows)).resize((24 * 48, 3 * 48), Image.Resampling.NEAREST).save(picture)
    print("\nmean colour of 24 samples (-1..1), same seeds")
    for name, colour in colours.items():
        print(f"  {name:10}", "  ".join(f"{float(v):+.3f}" for v in colour))
    print(f"\nwrote {path} and {picture} (rows: spoiled, calibrated, ideal)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
