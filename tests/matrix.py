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
    Model(
        "FluxControlNetPipeline",
        "ControlNet of Flux, told the prompt alone",
        pipelines.flux_controlled,
        {**SMALL, "max_sequence_length": 12},
        {"true_cfg_scale": 3.0, "negative_prompt": ["", ""]},
        pictures=("control_image",),
    ),
    Model("AuraFlowPipeline", "AuraFlow, time over 1000", pipelines.aura, SMALL),
    Model(
        "Lumina2Pipeline",
        "Lumina, time and sign reversed",
        pipelines.lumina2,
        {**SMALL, "cfg_normalization": False},
        note='guidance with `arguments={"cfg_normalization": False}`, there and in the pipeline\'s call',
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


@dataclass(eq=False)
class Other:
    """A model without text."""

    name: str
    like: str
    make: Callable[[], Any]  # whatever as_denoiser takes
    labels: int = 0  # how many classes it has
    how: dict[str, Any] = field(default_factory=dict)  # of as_denoiser
    note: str = ""


OTHERS = [
    Other("DDPMPipeline", "DDPM", pipelines.ddpm),
    Other("DDIMPipeline", "the same with DDIM", pipelines.ddim),
    Other(
        "ScoreSdeVePipeline",
        "score SDE, variance exploding",
        pipelines.score_sde,
        note="told sigma, pictures in 0..1; few steps through `trueup sample`",
    ),
    Other(
        "DDPMPipeline, learned variance",
        "improved DDPM",
        pipelines.improved,
        note="the variance's channels are left alone",
    ),
    Other(
        "UNet2DModel with an EDM scheduler", "the raw network inside EDM's preconditioner", pipelines.edm_raw
    ),
    Other("net(x, sigma)", "EDM's preconditioned network, by its attributes", pipelines.edm),
    Other("net(x, sigma, class_labels)", "EDM2's, one-hot labels told as numbers", pipelines.edm2, labels=4),
    Other("DiTPipeline", "DiT, null label, learned sigma, latents", pipelines.dit, labels=4),
    Other("UNet2DModel, class-embedded", "class-conditional U-Nets", pipelines.by_class, labels=3),
    Other("UNet1DModel", "audio, (C, L)", pipelines.audio),
    Other(
        "Denoiser, reversed flow",
        "flow-matching research code: x0 − eps, t = 1 at the data",
        pipelines.reversed_flow,
    ),
    Other("Denoiser, fields", "spectra and fields: not square, many channels, unbounded", pipelines.fields),
]

REFUSED = [
    ("FluxPipeline with `guidance_embeds`", "distilled from guided outputs", pipelines.flux_distilled),
    (
        "StableDiffusionPipeline with `time_cond_proj_dim`",
        "the network of latent consistency models",
        pipelines.lcm,
    ),
    (
        "any pipeline with LCM, TCD, SCM or another consistency scheduler",
        "consistency models",
        pipelines.consistent,
    ),
    ("WanPipeline with two networks", "each has half of the noise levels", pipelines.two_networks),
]

_OPENING = """# Models

What is here was tried with diffusers' own classes, small and untrained, by the suite: every row is a test,
and this page is written from them (`python tests/matrix.py`). A pipeline's network is called as the pipeline
calls it: `trueup` listens to a few of its steps, and finds where x_t and the time are, how latents are
packed, which way time runs, and what the network is told.

```py
photos, prompts = trueup.Images("photos", captions="captions.csv"), ["a cat", "a red house"]
cal = trueup.calibrate(pipe, photos, nfe=8, labels=prompts, guidance=7.5)
trueup.attach(pipe, cal)
pipe.scheduler = cal.scheduler(nfe=8, guidance=7.5)
pipe("a red house", num_inference_steps=8, guidance_scale=7.5)
```

A solver is for the guidance it was fitted with. [The guide](guide.md#text-to-image) has the command line.

## Pipelines with text

| pipeline | what people have | told as it tells | guided row by row | fitted scheduler | saved and loaded | |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """docs/models.md."""
    lines = [_OPENING.rstrip("\n")]
    for model in TEXT:
        more = (
            f"conditions have {' and '.join(f'`{name}`' for name in model.pictures)}"
            if model.pictures
            else ""
        )
        note = "; ".join(part for part in (model.note, more) if part)
        lines.append(f"| {model.name} | {model.like} | yes | yes | yes | yes | {note} |")
    lines += [
        "",
        "*Told as it tells*: the network's output is that of the pipeline's own call. *Guided row by row*:",
        "with a calibration attached, what reaches the scheduler is guidance between corrected halves.",
        "Pipelines that make something else of guidance (`guidance_rescale`, `use_dynamic_cfg`, a scale for",
        "a picture) are heard doing so, and refused where guidance is not 1.",
        "*Fitted scheduler*: the pipeline's states are those of trueup's own loop. *Saved and loaded*:",
        "`save_pretrained`, `from_pretrained` and `attach` again give the same output, and the directory is",
        "read from the command line as well.",
        "",
        "## Others",
        "",
        "| model | what people have | measured | corrected | fitted solver | |",
        "|---|---|---|---|---|---|",
    ]
    for other in OTHERS:
        lines.append(f"| {other.name} | {other.like} | yes | yes | yes | {other.note} |")
    lines += [
        "",
        "## Refused",
        "",
        "Their outputs are not conditional expectations, or nobody can tell which network made them:",
        "",
        "| model | why |",
        "|---|---|",
    ]
    lines += [f"| {name} | {why} |" for name, why, _ in REFUSED]
    lines += [
        "",
        "A model distilled for few steps that does not say so (Turbo, Lightning, schnell) looks like any",
        "other: do not calibrate it.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
