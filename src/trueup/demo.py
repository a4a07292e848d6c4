"""`trueup demo`: the bundled model before and after, in one picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.doctor import check
from trueup.errors import TrueupError
from trueup.estimate import fit, measure
from trueup.files import BUNDLED, write
from trueup.fitting import fit_solver, judge
from trueup.fitting.kept import clear
from trueup.hf import as_denoiser
from trueup.hf.loading import diffusers_module
from trueup.images import Images
from trueup.metrics import wasserstein
from trueup.page import write as write_page
from trueup.report import as_text, plain_output
from trueup.sampling import sample

IMAGES = 200
STEPS = 20
FEW = 8  # evaluations of the solver that is fitted
TRAJECTORIES = 64  # it is fitted to, and half as many that samples are judged by
SAMPLES = 64  # to measure brightness on; the picture shows the first SHOWN
SHOWN = 12
_ZOOM = 3


def run(out: Path, kept: Path, *, seed: int = 0, device: str = "cpu", progress: bool | None = None) -> None:
    """Calibrate the raw weights, sample before and after with the same seeds, and draw it."""
    diffusers = diffusers_module("the demo")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrueupError(f"cannot use {out}: {error.strerror or error}") from None
    print("A small diffusion model trained on Fashion-MNIST, its raw last weights.", end=" ")
    print(f"Measuring how it misses on {IMAGES} images:\n")
    raw, ema = (as_denoiser(BUNDLED / name, device=device, batch_size=32) for name in ("raw", "ema"))
    pictures = np.load(BUNDLED / "images.npy")
    images = Images(pictures, count=IMAGES, seed=seed)
    moments = measure(raw, images, seed=seed, run=kept, progress=progress)
    shift, spectral = (fit(moments, family=family) for family in ("shift", "spectral"))
    spectral = judge(raw, spectral, trajectories=TRAJECTORIES // 2, seed=seed, progress=progress)
    how: dict[str, Any] = {"seed": seed, "progress": progress}
    fitted_to = {"trajectories": TRAJECTORIES, "run": kept / "solvers", "keep": True, **how}
    spectral = fit_solver(raw, spectral, nfe=FEW, **fitted_to)
    file = out / "demo.trueup.safetensors"
    spectral.save(file)
    clear(kept / "solvers")
    print(f"{as_text(spectral, plain=plain_output())}\n")

    ddim = diffusers.DDIMScheduler(clip_sample=False)  # clipping hides what the weights do
    rows: list[tuple[str, Denoiser, Calibration | None, Any, int]] = [
        ("uncalibrated", raw, None, ddim, STEPS),
        ("shift", raw, shift, ddim, STEPS),
        ("spectral", raw, spectral, ddim, STEPS),
        (f"in {FEW} steps", raw, spectral, "fitted", FEW),
        ("EMA weights", ema, None, ddim, STEPS),
    ]
    drawn = {
        name: sample(net, SAMPLES, solver=solver, nfe=nfe, calibration=used, **how)
        for name, net, used, solver, nfe in rows
    }
    data = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    print(f"{SAMPLES} samples each from the same seeds, DDIM in {STEPS} steps, and the solver fitted to the")
    print(f"calibrated model in {FEW}; mean brightness of an image, 0..255:")
    print(f"\n{'':14} {'mean':>6} {'s.d.':>6} {'distance to the data (W1)':>27}")
    for name, x in drawn.items():
        mean, spread, distance = brightness(x, data)
        print(f"{name:14} {mean:6.1f} {spread:6.1f} {distance:27.1f}")
    mean, spread, _ = brightness(data, data)
    print(f"{'data':14} {mean:6.1f} {spread:6.1f}\n")
    picture = out / "samples.png"
    draw({name: x[:SHOWN] for name, x in drawn.items()}, picture)
    page = out / "report.html"
    write_page(spectral, page, measured=[check(raw, images, moments=moments, seed=seed)])
    print(f"wrote {file} (put it on the model with trueup.attach), {picture} (look at it)")
    print(f"and {page} (open it in a browser: all of this, and every noise level)")


def brightness(x: Tensor, data: Tensor) -> tuple[float, float, float]:
    """Mean and spread of the images' mean brightness, and its Wasserstein distance to the data's."""
    ours, theirs = (127.5 * (v.double().flatten(1).mean(1) + 1) for v in (x, data))
    distance = wasserstein(ours[:, None], theirs[:, None]).value
    return float(ours.mean()), float(ours.std()), distance


def draw(rows: dict[str, Tensor], path: Path) -> None:
    """A labelled row of images each."""
    font = ImageFont.load_default(15)
    height, width = (_ZOOM * size for size in next(iter(rows.values())).shape[-2:])
    label, cell_w, cell_h = 110, width + 4, height + 4
    sheet = Image.new("L", (label + SHOWN * cell_w, len(rows) * cell_h), 255)
    pen = ImageDraw.Draw(sheet)
    for i, (name, images) in enumerate(rows.items()):
        pen.text((4, i * cell_h + cell_h / 2 - 10), name, fill=0, font=font)
        for j, image in enumerate(images):
            pixels = ((image[0].clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
            tile = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
            sheet.paste(tile, (label + j * cell_w, i * cell_h))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    write(path, content.getvalue())
