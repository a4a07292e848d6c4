"""Networks and pictures small enough to make for a test."""

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DModel
from PIL import Image


def tiny_unet(**settings) -> UNet2DModel:
    """8x8, one channel, random weights, always the same."""
    torch.manual_seed(0)
    defaults = {
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "layers_per_block": 1,
        "block_out_channels": (8, 8),
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }
    return UNet2DModel(**{**defaults, **settings}).eval()


def save(net, folder):
    """Write a network with the scheduler it was trained with."""
    net.save_pretrained(folder)
    DDPMScheduler(num_train_timesteps=1000).save_pretrained(folder)
    return folder


def blobs(folder, count=40, size=8):
    """Pictures of smooth blobs."""
    rng = np.random.default_rng(0)
    i, j = np.mgrid[:size, :size]
    for k in range(count):
        cy, cx, width = rng.uniform(1, 6), rng.uniform(1, 6), rng.uniform(1, 3)
        blob = 255 * np.exp(-((i - cy) ** 2 + (j - cx) ** 2) / (2 * width**2))
        Image.fromarray(blob.astype(np.uint8)).save(folder / f"{k:03}.png")
    return folder
