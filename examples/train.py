"""Train a small diffusion model and keep it twice: its raw last weights, and their moving average.

    python examples/train.py cifar10.npy models/cifar10-small --flip

Noise prediction, 1,000 linear timesteps, a diffusers UNet2DModel: 6.5M parameters at width 64, 1.6M at 32.
Writes OUT/raw and OUT/ema, each a directory with its scheduler's config, ready for `trueup.calibrate`.
src/trueup/bundled/README.md states the options that made the model that comes with trueup. On a GPU the
default takes minutes; raw weights are what calibration helps most.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DModel
from tqdm import tqdm


def build(size: int, channels: int, width: int, **options) -> UNet2DModel:
    return UNet2DModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(width, 2 * width, 2 * width),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        **{"dropout": 0.1, **options},
    )


def as_graph(train: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The training step as one CUDA graph: a small network's time on a GPU is all launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def fit(
    raw: torch.nn.Module,
    ema: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    steps: Iterable[int],
    learning_rate: float,
    minutes: float,
    decay: float = 0.999,
    ramp: bool = True,
) -> None:
    """Lower `loss()`, of a batch it draws; `ema` follows, ramp: at first faster than by `decay`."""
    raw.train()
    ema.eval().requires_grad_(False)
    averages, weights = list(ema.parameters()), list(raw.parameters())
    gpu = weights[0].is_cuda
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, capturable=gpu)

    def train() -> torch.Tensor:
        value = loss()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return value.detach()

    step = as_graph(train) if gpu else train
    end = time.monotonic() + 60 * minutes
    bar = tqdm(steps, unit="step")
    for index in bar:
        value = step()
        keep = min(decay, (1 + index) / (10 + index)) if ramp else decay
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - keep)
        if index % 20 == 0:
            bar.set_postfix(loss=f"{float(value):.4f}")
            if time.monotonic() > end:
                break


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", help=".npy of uint8 images, (N, H, W, C)")
    p.add_argument("out", type=Path)
    p.add_argument("--images-seen", type=int, default=1_500_000)
    p.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--learning-rate", type=float, default=2e-4)
    p.add_argument("--ema", type=float, default=0.999, help="decay of the moving average per step")
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--start", type=Path, help="go on from OUT of an earlier run")
    p.add_argument("--flip", action="store_true", help="mirror half of the images")
    p.add_argument("--half", action="store_true", help="write the weights in half precision")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args()

    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    images = np.load(options.data, mmap_mode="r")
    _, size, _, channels = images.shape
    x = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).to(device)
    scheduler = DDPMScheduler()
    alphas_cumprod = scheduler.alphas_cumprod.to(device)
    if options.start:
        raw, ema = (UNet2DModel.from_pretrained(options.start / name).to(device) for name in ("raw", "ema"))
    else:
        raw = build(size, channels, options.width).to(device)
        ema = copy.deepcopy(raw)

    def loss() -> torch.Tensor:
        pick = torch.randint(len(x), (options.batch_size,), device=device)
        x0 = x[pick].float() / 127.5 - 1
        if options.flip:
            flip = torch.rand(len(x0), 1, 1, 1, device=device) < 0.5
            x0 = torch.where(flip, x0.flip(-1), x0)
        t = torch.randint(len(alphas_cumprod), (len(x0),), device=device)
        alpha2 = alphas_cumprod[t].reshape(-1, 1, 1, 1)
        eps = torch.randn_like(x0)
        x_t = alpha2.sqrt() * x0 + (1 - alpha2).sqrt() * eps
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu, cache_enabled=False):
            return (raw(x_t, t).sample.float() - eps).square().mean()

    steps = range(max(1, options.images_seen // options.batch_size))
    ramp = not options.start
    fit(raw, ema, loss, steps, options.learning_rate, options.minutes, decay=options.ema, ramp=ramp)
    for name, network in (("raw", raw), ("ema", ema)):
        network = network.half() if options.half else network
        network.eval().save_pretrained(options.out / name, safe_serialization=True)
        scheduler.save_pretrained(options.out / name)
    print(f"wrote {options.out}/raw and {options.out}/ema")


if __name__ == "__main__":
    main()
