"""Networks small enough to make for a test."""

import torch
from diffusers import UNet2DModel


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
