"""The kinds of models that trueup takes, each with a small one: what the tests try, and docs/models.md lists.

`python tests/matrix.py` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pipelines

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


@dataclass(eq=False)
class Model:
    """One row of the table."""

    name: str
    like: str  # what people have
    make: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)  # of its pipeline's call, to keep it small
    guided: dict[str, Any] | None = field(
        default_factory=lambda: {"guidance_scale": 3.0}
    )  # None: it cannot be
    pictures: tuple[str, ...] = ()  # that conditions have beside a prompt
    note: str = ""


SMALL = {"height": 16, "width": 16}
TEXT = [
    Model("StableDiffusionPipeline", "Stable Diffusion 1.x, noise prediction", pipelines.sd),
    Model("StableDiffusionPipeline, v-prediction", "Stable Diffusion 2.x", pipelines.sd_velocity),
    Model(
        "StableDiffusionPipeline, zero terminal SNR",
        "fine-tunes with rescaled betas",
        pipelines.sd_zero_snr,
        note="at the last level, where there is no signal, nothing is corrected",
    ),
    Model(
        "StableDiffusionXLPipeline", "SDXL, with sizes and pooled text as added conditions", pipelines.sdxl
    ),
    Model("StableDiffusionImg2ImgPipeline", "image to image", pipelines.img2img),
    Model(
        "StableDiffusionInpaintPipeline",
        "inpainting with 9 channels",
        pipelines.inpaint,
        pictures=("image", "mask_image"),
    ),
    Model("StableDiffusionControlNetPipeline", "ControlNet", pipelines.controlled, pictures=("image",)),
    Model("PixArtAlphaPipeline", "PixArt, learned variance", pipelines.pixart),
    Model("StableDiffusion3Pipeline", "SD3, shifted flow", pipelines.sd3),
    Model(
        "FluxPipeline",
        "Flux without guidance distillation, packed latents",
        pipelines.flux,
        {"height": 32, "width": 16, "max_sequence_length": 12},
        {"true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
    ),
    Model("AuraFlowPipeline", "AuraFlow, time over 1000", pipelines.aura, SMALL),
    Model(
        "Lumina2Pipeline",
        "Lumina, time and sign reversed",
        pipelines.lumina2,
        SMALL,
        {"guidance_scale": 3.0, "cfg_normalization": False},
    ),
    Model(
        "SanaPipeline",
        "Sana, linear attention, deep autoencoder",
        pipelines.sana,
        {"height": 32, "width": 32, "max_sequence_length": 12, "complex_human_instruction": None},
    ),
    Model(
        "WanPipeline",
        "video latents, (C, T, H, W)",
        pipelines.wan,
        {**SMALL, "num_frames": 9, "max_sequence_length": 12},
    ),
    Model(
        "CogVideoXPipeline",
        "video latents, frames before channels",
        pipelines.cogvideo,
        {**SMALL, "num_frames": 8, "max_sequence_length": 12},
    ),
    Model(
        "AnimateDiffPipeline",
        "video from an image model with motion modules",
        pipelines.animate,
        {"num_frames": 4},
    ),
]
