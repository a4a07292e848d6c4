"""Train a small diffusion model and keep it twice: its raw last weights, and their moving average.

    python examples/train.py cifar10.npy models/cifar10-small --images-seen 1500000

Noise prediction, 1,000 linear timesteps, a diffusers UNet2DModel of 6.5M parameters at 32x32. Writes
OUT/raw and OUT/ema, each a directory with its scheduler's config, ready for `trueup.calibrate`. On a GPU the
default takes minutes; raw weights are what calibration helps most.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DModel
from tqdm import tqdm


def build(size: int, channels: int, width: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(width, 2 * width, 2 * width),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", help=".npy of uint8 images, (N, H, W, C)")
    p.add_argument("out", type=Path)
    p.add_argument("--images-seen", type=int, default=1_500_000)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--learning-rate", type=float, default=2e-4)
    p.add_argument("--ema", type=float, default=0.999, help="decay of the moving average per step")
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args()

    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    images = np.load(options.data, mmap_mode="r")
    _, size, _, channels = images.shape
    x = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).to(device)
    scheduler = DDPMScheduler()
    alphas_cumprod = scheduler.alphas_cumprod.to(device)
    raw = build(size, channels, options.width).to(device).train()
    ema = copy.deepcopy(raw).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=options.learning_rate)
    steps = max(1, options.images_seen // options.batch_size)
    half = device.type == "cuda"
    bar = tqdm(range(steps), unit="step")
    for step in bar:
        pick = torch.randint(len(x), (options.batch_size,), device=device)
        x0 = x[pick].float() / 127.5 - 1
        flip = torch.rand(len(x0), 1, 1, 1, device=device) < 0.5
        x0 = torch.where(flip, x0.flip(-1), x0)
        t = torch.randint(len(alphas_cumprod), (len(x0),), device=device)
        alpha2 = alphas_cumprod[t].reshape(-1, 1, 1, 1)
        eps = torch.randn_like(x0)
        x_t = alpha2.sqrt() * x0 + (1 - alpha2).sqrt() * eps
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = (raw(x_t, t).sample.float() - eps).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        decay = min(options.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), raw.parameters(), strict=True):
                average.lerp_(weight, 1 - decay)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{float(loss):.4f}")
    for name, network in (("raw", raw), ("ema", ema)):
        network.eval().save_pretrained(options.out / name, safe_serialization=True)
        scheduler.save_pretrained(options.out / name)
    print(f"wrote {options.out}/raw and {options.out}/ema")


if __name__ == "__main__":
    main()
