"""Trajectories inside a diffusers pipeline, through its own callback."""

from __future__ import annotations

import diffusers
import pytest
import torch

import trueup
from by_hand import calibration_of
from trueup.errors import AttachError, MismatchError
from trueup.noise import normal
from trueup.process import DiscreteVP
from trueup.sampling.draw import STARTING_NOISE

pytest.importorskip("transformers", reason="diffusers has no text-conditioned pipelines without it")
STEPS, GUIDANCE = 5, 3.0
SHAPE = (4, 8, 8)


@pytest.fixture(scope="module")
def embeddings():
    """Of three prompts; the last stands for none."""
    return torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ).eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=4,
        norm_num_groups=2,
    )
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    return {
        "unet": unet,
        "vae": vae,
        "scheduler": scheduler,
        "text_encoder": None,
        "tokenizer": None,
        "safety_checker": None,
        "feature_extractor": None,
    }


@pytest.fixture
def pipe(parts):
    pipe = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def denoiser(parts, embeddings):
    unet = parts["unet"]
    return trueup.Denoiser(
        unet,
        DiscreteVP.scaled_linear(0.00085, 0.012),
        "noise",
        SHAPE,
        call=lambda x_t, t, y: unet(x_t, t, encoder_hidden_states=embeddings[y]).sample,
        conditional=True,
        null_label=2,
        data_range=None,
    )


@pytest.fixture(scope="module")
def calibration(denoiser, parts):
    """Of a random network, with the moments of latents that are wide where its samples are not."""
    generator = torch.Generator().manual_seed(2)
    latents = 0.5 * torch.randn(64, *SHAPE, generator=generator) + torch.randn(
        64, 4, 1, 1, generator=generator
    )
    cal = calibration_of(denoiser, latents, shift=0.02, y=torch.tensor([0, 1]))
    assert cal.provenance["binding"] is not None  # the network itself can be corrected
    return trueup.calibrate_sampler(
        denoiser,
        cal,
        solver=parts["scheduler"],
        nfe=STEPS,
        labels=[0, 1],
        guidance=GUIDANCE,
        trajectories=64,
        progress=False,
    )


def arguments(embeddings, count=4, **changes):
    """What the pipeline is called with for images 0, 1, ... of seed 0, of both prompts in turn."""
    index = torch.arange(count)
    start = normal(0, index, STARTING_NOISE, SHAPE, torch.device("cpu"))
    return {
        "prompt_embeds": embeddings[index % 2],
        "negative_prompt_embeds": embeddings[2].expand(count, -1, -1),
        "latents": start,
        "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE,
        "output_type": "latent",
        **changes,
    }


def test_pipeline_makes_what_our_sampler_makes(pipe, denoiser, calibration, embeddings, parts):
    """One line, and the pipeline's latents are those of `trueup.sample`, trajectory, guidance and all."""
    assert not calibration.trajectories[0].empty
    with trueup.attach(pipe, calibration) as calibrated:
        made = pipe(**arguments(embeddings), callback_on_step_end=calibrated.on_step_end).images
        plain = pipe(**arguments(embeddings)).images
    settings = {"solver": parts["scheduler"], "nfe": STEPS, "labels": [0, 1], "guidance": GUIDANCE}
    ours = trueup.sample(denoiser, 4, calibration=calibration, trajectory=True, **settings)
    slack = 1e-4 * float(ours.abs().max())
    assert torch.allclose(made, ours, rtol=0, atol=slack)
    without = trueup.sample(denoiser, 4, calibration=calibration, trajectory=False, **settings)
    assert torch.allclose(plain, without, rtol=0, atol=slack)
    assert not torch.allclose(made, plain, rtol=0, atol=100 * slack)
    bare = trueup.sample(denoiser, 4, **settings)
    assert not torch.allclose(plain, bare, rtol=0, atol=10 * slack)


def test_other_guidance_or_steps_are_refused(pipe, calibration, embeddings):
    with trueup.attach(pipe, calibration) as calibrated:
        for changes, words in (
            (
                {"guidance_scale": 5.0},
                "no trajectory for DDIMScheduler at 5 evaluations, guidance 5: .*guidance 3",
            ),
            ({"guidance_scale": 1.0}, "no trajectory for DDIMScheduler at 5 evaluations: .*guidance 3"),
            ({"num_inference_steps": 6}, "no trajectory for DDIMScheduler at 6 evaluations"),
        ):
            with pytest.raises(MismatchError, match=words):
                pipe(**arguments(embeddings, **changes), callback_on_step_end=calibrated.on_step_end)
        pipe(**arguments(embeddings), callback_on_step_end=calibrated.on_step_end)  # and goes on working


def test_image_to_image_is_refused(pipe, calibration, embeddings):
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    given = arguments(embeddings)
    given["image"] = given.pop("latents")
    with (
        trueup.attach(other, calibration) as calibrated,
        pytest.raises(MismatchError, match="takes 4 of 5 steps, as from an image it was given"),
    ):
        other(**given, strength=0.8, callback_on_step_end=calibrated.on_step_end)


def test_timesteps_of_ones_own_are_refused(pipe, calibration, embeddings):
    from diffusers import DPMSolverMultistepScheduler

    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    with (
        trueup.attach(pipe, calibration) as calibrated,
        pytest.raises(MismatchError, match="no trajectory for DPMSolverMultistepScheduler"),
    ):
        pipe(**arguments(embeddings), callback_on_step_end=calibrated.on_step_end)
    trajectory = calibration.trajectories[0]
    with pytest.raises(MismatchError, match="step 1 begins at t = 700, that of the trajectory at 601"):
        trajectory.at_step(1, 700.0, torch.zeros(1, *SHAPE))
    with pytest.raises(MismatchError, match="does not exist"):
        trajectory.at_step(5, 1.0, torch.zeros(1, *SHAPE))
    with pytest.raises(MismatchError, match=r"states of shape \(4, 8, 8\), not \(16, 16\)"):
        trajectory.at_step(0, float(trajectory.states.t[0]), torch.zeros(1, 16, 16))


def test_callback_of_a_calibration_that_is_not_on_is_refused(pipe, calibration, embeddings):
    with (
        trueup.attach(pipe, calibration) as calibrated,
        pytest.raises(AttachError, match="needs the latents"),
    ):
        pipe(
            **arguments(embeddings),
            callback_on_step_end=calibrated.on_step_end,
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
        )
    with pytest.raises(AttachError, match="not attached to the network of this pipeline"):
        pipe(**arguments(embeddings), callback_on_step_end=calibrated.on_step_end)
