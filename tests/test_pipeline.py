"""Fitted solvers inside pipelines of diffusers: guided, corrected, from images, saved and loaded."""

from __future__ import annotations

import diffusers
import pytest
import torch

import trueup
from by_hand import calibration_of
from test_scheduler import random_solver
from trueup.calibration import Calibration
from trueup.errors import MismatchError
from trueup.noise import normal
from trueup.process import DiscreteVP
from trueup.sampling.draw import STARTING_NOISE
from trueup.sampling.network import Network

pytest.importorskip("transformers", reason="diffusers has no text-conditioned pipelines without it")
STEPS, GUIDANCE = 5, 3.0
SHAPE = (4, 8, 8)
NOT_THERE = dict.fromkeys(("safety_checker", "text_encoder", "tokenizer", "feature_extractor"))


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
def calibration(denoiser):
    """It corrects, and has a solver without guidance and one for it."""
    generator = torch.Generator().manual_seed(2)
    cal = calibration_of(
        denoiser, torch.randn(64, *SHAPE, generator=generator), shift=0.02, y=torch.tensor([0, 1])
    )
    assert cal.provenance["binding"] is not None  # the network itself can be corrected
    noise = denoiser.process
    cal.solvers = tuple(random_solver(SHAPE, noise, STEPS, guidance) for guidance in (1.0, GUIDANCE))
    return cal


def noise_of(count=4):
    """Of images 0, 1, ... of seed 0."""
    return normal(0, torch.arange(count), STARTING_NOISE, SHAPE, torch.device("cpu"))


def arguments(embeddings, guidance=GUIDANCE, count=4, **changes):
    """What the pipeline is called with, of both prompts in turn."""
    return {
        "prompt_embeds": embeddings[torch.arange(count) % 2],
        "negative_prompt_embeds": embeddings[2].expand(count, -1, -1),
        "latents": noise_of(count),
        "num_inference_steps": STEPS,
        "guidance_scale": guidance,
        "output_type": "latent",
        **changes,
    }


def by_hand(denoiser, calibration, solver, x, begin=0):
    """The loop of this project, corrected and guided, from state `begin`."""
    network, history = Network(denoiser, guidance=solver.guidance, y=torch.arange(len(x)) % 2), []
    with torch.inference_mode(), trueup.attach(denoiser, calibration):
        for i in range(begin, solver.nfe):
            output = network(x, float(solver.t[i]))
            history = [solver.remembered(i, output, x, denoiser.parametrization), *history][:3]
            x = solver.step(i, x, history)
    return x


@pytest.mark.parametrize("guidance", [1.0, GUIDANCE])
def test_the_pipeline_makes_what_our_loop_makes(pipe, denoiser, calibration, embeddings, guidance):
    pipe.scheduler = calibration.scheduler(STEPS, guidance)
    plain = pipe(**arguments(embeddings, guidance)).images
    with trueup.attach(pipe, calibration):
        made = pipe(**arguments(embeddings, guidance)).images
    solver = calibration.solver(STEPS, guidance)
    start = noise_of() * denoiser.process.prior_std  # as init_noise_sigma has it
    expected = by_hand(denoiser, calibration, solver, start)
    slack = 1e-4 * float(expected.abs().max())
    assert torch.allclose(made, expected, rtol=0, atol=slack)
    assert not torch.allclose(made, plain, rtol=0, atol=slack)


def test_solvers_for_different_guidance_are_different_schedulers(calibration):
    with pytest.raises(MismatchError, match="the solver for 5 evaluations is for guidance 1, not 5"):
        calibration.scheduler(STEPS, 5.0)
    assert calibration.scheduler(STEPS).solver.guidance == 1.0


def test_other_numbers_of_steps_are_refused(pipe, calibration, embeddings):
    pipe.scheduler = calibration.scheduler(STEPS, GUIDANCE)
    with pytest.raises(MismatchError, match="fitted for 5 steps, not 6: pass num_inference_steps=5"):
        pipe(**arguments(embeddings, num_inference_steps=6))
    pipe(**arguments(embeddings))  # and goes on working


def test_other_sizes_are_stepped_and_corrected_as_resized(pipe, denoiser, calibration, embeddings):
    pipe.scheduler = calibration.scheduler(STEPS, GUIDANCE)
    start = torch.randn(4, 4, 16, 8, generator=torch.Generator().manual_seed(5))
    with trueup.attach(pipe, calibration):
        made = pipe(**arguments(embeddings, latents=start, height=16, width=8)).images
    solver = calibration.solver(STEPS, GUIDANCE).resized((16, 8))
    expected = by_hand(denoiser, calibration.resized((16, 8)), solver, start)
    assert torch.allclose(made, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    pipe(**arguments(embeddings))  # and the first size again


@pytest.mark.parametrize(("strength", "begin"), [(1.0, 0), (0.8, 1), (0.4, 3)])
def test_from_an_image_it_starts_in_the_middle(pipe, denoiser, calibration, embeddings, strength, begin):
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    other.scheduler = calibration.scheduler(STEPS, GUIDANCE)
    given = arguments(embeddings)
    image = given.pop("latents")
    with trueup.attach(other, calibration):
        made = other(
            **given, image=image, strength=strength, generator=torch.Generator().manual_seed(3)
        ).images
    solver = calibration.solver(STEPS, GUIDANCE)
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(3))
    x = (solver.alpha[begin] * image + solver.sigma[begin] * noise).float()
    expected = by_hand(denoiser, calibration, solver, x, begin)
    assert torch.allclose(made, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_states_in_half_precision_stay_so(calibration):
    """As in a pipeline whose network is half; here that would be too slow."""
    scheduler = calibration.scheduler(STEPS, GUIDANCE)
    scheduler.set_timesteps(STEPS)
    x = noise_of().half()
    for t in scheduler.timesteps:
        x = scheduler.step(x.float().tanh().half(), t, x).prev_sample
    assert x.dtype == torch.float16
    assert torch.isfinite(x).all()


def test_the_pipeline_is_saved_and_loaded_with_it(pipe, calibration, embeddings, tmp_path):
    pipe.scheduler = calibration.scheduler(STEPS, GUIDANCE)
    pipe.save_pretrained(tmp_path)
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, **NOT_THERE)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.scheduler.solver.identity == pipe.scheduler.solver.identity
    made, again = (p(**arguments(embeddings)).images for p in (pipe, loaded))
    assert torch.equal(made, again)


def test_a_calibration_of_solvers_alone_leaves_the_network_as_it_is(pipe, denoiser, embeddings):
    cal = Calibration.without_data(denoiser, torch.tensor([0]))
    cal.solvers = (random_solver(SHAPE, denoiser.process, STEPS, GUIDANCE),)
    pipe.scheduler = cal.scheduler(STEPS, GUIDANCE)
    plain = pipe(**arguments(embeddings)).images
    with trueup.attach(pipe, cal):
        assert torch.equal(pipe(**arguments(embeddings)).images, plain)
