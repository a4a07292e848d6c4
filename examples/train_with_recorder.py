"""diffusers' training loop with two recorders: one of the weights as they are, one of their moving average.

    python examples/train_with_recorder.py images.npy out --steps 5000

The loop is that of diffusers' examples/unconditional_image_generation: a UNet2DModel, a DDPMScheduler and an
EMAModel, through accelerate where it is installed. What was added is marked with `recorder`. While it trains
it prints how uncalibrated both are; at the end OUT/raw and OUT/ema are pipelines, and OUT/raw.safetensors and
OUT/ema.safetensors their calibrations:

    pipe = DDPMPipeline.from_pretrained("out/ema")
    with trueup.attach(pipe, "out/ema.safetensors"):
        ...
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

import trueup

try:
    from accelerate import Accelerator
except ImportError:  # one process, then, in full precision
    Accelerator = None


def build(size: int, channels: int, width: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=2,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=min(32, width),
    )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", help=".npy of uint8 images, (N, H, W, C)")
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=5000)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--learning-rate", type=float, default=2e-4)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--ema", type=float, default=0.999, help="largest decay of the moving average")
    p.add_argument("--half-life", type=float, default=1000, help="steps after which the record counts half")
    p.add_argument("--every", type=int, default=10, help="steps between evaluations of the moving average")
    p.add_argument("--log-every", type=int, default=500)
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(argv)

    torch.manual_seed(options.seed)
    accelerator = Accelerator() if Accelerator is not None else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = accelerator.device if accelerator is not None else device
    images = torch.from_numpy(np.load(options.data)).permute(0, 3, 1, 2)  # (N, C, H, W)
    data = torch.utils.data.TensorDataset(images, torch.arange(len(images)))
    loader = torch.utils.data.DataLoader(data, options.batch_size, shuffle=True, drop_last=True)
    scheduler = DDPMScheduler()
    model = build(images.shape[2], images.shape[1], options.width).to(device)
    ema = EMAModel(model.parameters(), decay=options.ema, use_ema_warmup=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    about = {"shape": tuple(images.shape[1:]), "half_life": options.half_life}
    recorder = trueup.Recorder(scheduler, **about, model="raw weights")
    ema_recorder = trueup.Recorder(scheduler, **about, every=options.every, model="EMA weights")
    averaged = copy.deepcopy(model)  # a network for EMAModel's weights, which the recorder evaluates

    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema.to(device)
    step = 0
    while step < options.steps:
        for batch, index in loader:
            clean = batch.to(device).float() / 127.5 - 1
            noise = torch.randn_like(clean)
            timesteps = torch.randint(scheduler.config.num_train_timesteps, (len(clean),), device=device)
            noisy = scheduler.add_noise(clean, noise, timesteps)
            output = model(noisy, timesteps).sample
            loss = F.mse_loss(output.float(), noise)
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.step(model.parameters())

            recorder.update(noisy, timesteps, output, noise, index=index)
            if ema_recorder.due:
                ema.copy_to(averaged.parameters())
            ema_recorder.observe(averaged, noisy, timesteps, noise, index=index)

            step += 1
            if step % options.log_every == 0 or step == options.steps:
                both = {"raw": recorder.all_reduce(), "ema": ema_recorder.all_reduce()}
                if accelerator is None or accelerator.is_main_process:
                    told = ", ".join(f"{name} {one.uncalibration()}" for name, one in both.items())
                    print(
                        f"step {step}: loss {loss.item():.4f}, uncalibration in bits/dim: {told}", flush=True
                    )
            if step == options.steps:
                break

    recorders = {"raw": recorder.all_reduce(), "ema": ema_recorder.all_reduce()}
    if accelerator is None or accelerator.is_main_process:
        raw = model if accelerator is None else accelerator.unwrap_model(model)
        ema.copy_to(averaged.parameters())
        for name, network in (("raw", raw), ("ema", averaged)):
            DDPMPipeline(network.eval(), scheduler).save_pretrained(options.out / name)
            recorders[name].calibration(network).save(options.out / f"{name}.safetensors")
        print(f"wrote {options.out}/raw, {options.out}/ema and their calibrations")


if __name__ == "__main__":
    main()
