"""Listening to pipelines: in any precision and state, with any scheduler, and without leaving a trace."""

from __future__ import annotations

import copy
import warnings

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import trueup
from test_pipelines import run
from test_scheduler import random_solver
from trueup.denoiser.binding import time_line
from trueup.errors import DataError, MismatchError, ModelError
from trueup.hf import as_denoiser
from trueup.hf.prompts import _number

import pipelines
from calibrations import make
from matrix import Model

SMALL = {"height": 16, "width": 16}
FLUX = {"height": 32, "width": 16, "max_sequence_length": 12}


@pytest.fixture(autouse=True)
def _quiet():
    warnings.filterwarnings("ignore", message=".*float32: \\[\\].*")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scale", "offset"), [(1e-3, 0.0), (-1e-3, 1.0), (1.0, 0.0)])
def test_times_are_found_in_half_precision(dtype, scale, offset):
    """Pipelines round them to the latents' dtype before they divide by 1000, and after."""
    for times in ([1000.0, 666.67, 333.33], [1000.0, 857.14, 600.0], [987.0, 659.0, 330.0]):
        t = torch.tensor(times, dtype=torch.float64)[:, None].expand(-1, 2)
        rounded = t.to(dtype)
        told = (offset - rounded / 1000 if scale < 0 else rounded / 1000) if abs(scale) < 1 else rounded
        assert time_line(list(told.to(dtype)), t) == (scale, offset)
    assert time_line(list(torch.rand(3, 2).to(dtype)), t) is None


@pytest.mark.parametrize(
    "name",
    [
        "DDIM",
        "PNDM",
        "EulerDiscrete",
        "EulerAncestralDiscrete",
        "HeunDiscrete",
        "LMSDiscrete",
        "UniPCMultistep",
    ]
    + ["DPMSolverMultistep", "DEISMultistep", "KDPM2Discrete", "DDPM"],
)
def test_any_scheduler_is_listened_to_and_left_alone(name):
    pipe = pipelines.sd()
    more = {"skip_prk_steps": True} if name == "PNDM" else {}
    kind = getattr(diffusers, f"{name}Scheduler")
    pipe.scheduler = own = kind.from_config(pipe.scheduler.config, **more)
    pipe.text_encoder.train()
    own.set_timesteps(7)
    times, state = own.timesteps.clone(), torch.get_rng_state()
    bar = dict(getattr(pipe, "_progress_bar_config", {}))
    hooks = [len(pipe.unet._forward_hooks), len(pipe.unet._forward_pre_hooks)]
    denoiser = as_denoiser(pipe)
    denoiser.vocabulary.rows(denoiser.vocabulary.numbers(["a cat", "the dog"]).tolist())
    assert (denoiser.binding().scale, denoiser.binding().offset) == (1.0, 0.0)
    assert pipe.scheduler is own
    assert torch.equal(own.timesteps, times)
    assert "step" not in vars(own)
    assert torch.equal(torch.get_rng_state(), state)
    assert pipe.text_encoder.training
    assert dict(getattr(pipe, "_progress_bar_config", {})) == bar
    assert [len(pipe.unet._forward_hooks), len(pipe.unet._forward_pre_hooks)] == hooks
    pipe.unet(torch.randn(1, 4, 8, 8), 3, torch.randn(1, 12, 16)).sample.sum().backward()  # can be trained


def test_a_scheduler_whose_step_has_another_order():
    pipe = pipelines.cogvideo()
    pipe.scheduler = diffusers.CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
    arguments = {**SMALL, "num_frames": 8, "max_sequence_length": 12}
    assert as_denoiser(pipe, arguments=arguments).binding().layout == "frames_first"


def test_dropout_and_place_do_not_change_what_a_prompt_says():
    pipe = pipelines.pixart()
    pipe.text_encoder.train()
    told = as_denoiser(pipe).vocabulary
    first = told.rows(told.numbers(["a cat"]).tolist())[0].network
    other = as_denoiser(pipe).vocabulary
    again = other.rows(other.numbers(["the dog", "two", "a cat"]).tolist())[2].network
    for one, another in zip(first, again, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-6)


def test_a_picture_says_the_same_beside_others_and_for_the_null_prompt():
    """With latents that are drawn: those of a row must not depend on who is in its batch."""
    pipe = pipelines.inpaint()
    torch.nn.init.zeros_(pipe.vae.quant_conv.bias)
    told = as_denoiser(pipe).vocabulary
    pictures = [Image.new("RGB", (16, 16), (50 * k, 9, 90)) for k in range(3)]
    mask = Image.new("L", (16, 16), 255)
    said = [{"prompt": "a cat", "image": picture, "mask_image": mask} for picture in pictures]
    y = told.numbers(said)
    together = told.rows(y.tolist())
    null = told.rows(told.nulls(y).tolist())
    alone = as_denoiser(pipe).vocabulary
    alone.numbers(said)
    for k in (2, 1):
        apart = alone.rows([int(y[k])])[0]
        torch.testing.assert_close(apart.channels, together[k].channels)
        torch.testing.assert_close(null[k].channels, together[k].channels)


def test_conditions_are_told_apart_by_what_is_seen():
    gray, palette = Image.new("L", (4, 4), 7), Image.new("P", (4, 4), 1)
    other = palette.copy()
    palette.putpalette([0, 0, 0, 255, 0, 0])
    other.putpalette([0, 0, 0, 0, 255, 0])
    said = [
        gray,
        palette,
        other,
        [gray],
        [torch.zeros(2000)],
        [torch.arange(2000.0)],
        "7",
        7,
        None,
        [7, [7]],
        [[7], 7],
    ]
    numbers = [_number({"image": value}) for value in said]
    assert len(set(numbers)) == len(said)
    assert [_number({"image": value}) for value in copy.deepcopy(said)] == numbers
    with pytest.raises(DataError, match="a condition holds text, numbers, pictures and tensors, not set"):
        _number({"image": {1}})


def test_a_run_goes_on_only_with_the_same_prompts_arguments_and_encoders(tmp_path):
    latents = torch.randn(40, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    words = ["a cat", "the dog", "red house", "two"]
    how = {"levels": [500], "trust": True, "run": tmp_path / "run", "progress": False}

    def measured(count, denoiser=None, labels=None):
        labels = labels or [words[k % 4] for k in range(40)]
        images = trueup.Images(latents, count=count, labels=labels)
        return trueup.estimate.measure(denoiser or as_denoiser(pipelines.sdxl()), images, **how)

    measured(20)
    assert measured(24).images == 24
    with pytest.raises(DataError, match=r"labels are not what they were|is not what it was"):
        measured(28, labels=[words[k % 4] if k % 10 else "small" for k in range(40)])
    sizes = {"original_size": (99, 99)}
    with pytest.raises(trueup.TrueupError, match="begun with another set of text encoders or arguments"):
        measured(28, as_denoiser(pipelines.sdxl(), arguments=sizes))
    larger = as_denoiser(pipelines.sdxl(), arguments={"height": 32, "width": 32})
    more = trueup.Images(torch.randn(28, *larger.shape), labels=words * 7)
    with pytest.raises(trueup.TrueupError, match="begun with another size of pictures: repeat"):
        trueup.estimate.measure(larger, more, **how)
    pipe = pipelines.sdxl()
    torch.nn.init.ones_(next(p for n, p in pipe.text_encoder.named_parameters() if n.endswith("norm.bias")))
    with pytest.raises(trueup.TrueupError, match="begun with another set of text encoders or arguments"):
        measured(28, as_denoiser(pipe))


@pytest.fixture
def flux():
    """A pipeline with a calibration of its network, of pictures that are 32 high and 16 wide."""
    pipe = pipelines.flux()
    pipe.set_progress_bar_config(disable=True)
    denoiser = as_denoiser(pipe, arguments=FLUX)
    how = {"kind": "flow", "binding": denoiser.binding(), "network": pipe.transformer}
    calibration = make(denoiser.shape, denoiser.process, **how)
    calibration.solvers = (random_solver(denoiser.shape, denoiser.process, nfe=3),)
    return pipe, calibration


TURNED = Model("Flux", "", pipelines.flux, {**FLUX, "height": 16, "width": 32})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gains", [None, "none"])
def test_a_scheduler_steps_packed_latents_of_other_proportions(flux, gains, compiled):
    """As many tokens as it was fitted for, the other way round: the network, corrected or not, was told."""
    pipe, calibration = flux
    pipe.scheduler = calibration.scheduler(nfe=3)
    with trueup.attach(pipe, calibration, gains=gains):
        if compiled:
            pipe.transformer.compile(backend="eager")
        stepped = run(TURNED, pipe, guided=False)[2]
    by_hand = calibration.scheduler(nfe=3)
    by_hand.spatial = (8, 16)
    by_hand.set_timesteps(3)
    for k in range(2):
        torch.testing.assert_close(by_hand.step(*stepped[k]).prev_sample, stepped[k + 1][2])


@pytest.mark.parametrize("size", [(32, 16), (16, 32), (16, 16)])
def test_a_compiled_transformer_of_packed_latents_is_corrected_as_it_is_otherwise(flux, size):
    pipe, calibration = flux
    model = Model("Flux", "", pipelines.flux, {**FLUX, "height": size[0], "width": size[1]})
    with trueup.attach(pipe, calibration):
        expected = run(model, pipe, guided=False)[2][-1][0]
        pipe.transformer.compile(backend="eager")
        torch.testing.assert_close(run(model, pipe, guided=False)[2][-1][0], expected)


def test_a_graph_without_a_break_cannot_know_the_size_of_packed_latents(flux):
    pipe, calibration = flux
    pipe.transformer.compile(backend="eager", fullgraph=True)
    words = "in the values of img_ids: compile without fullgraph=True"
    with trueup.attach(pipe, calibration), pytest.raises(Exception, match=words):
        run(TURNED, pipe, guided=False)


def test_a_pipeline_that_turns_signs_takes_what_was_measured_of_the_network_itself():
    """Its scheduler says flow, its network predicts the reverse: the correction of a flow would be added."""
    pipe = pipelines.lumina2()
    denoiser = as_denoiser(pipe, arguments=SMALL)
    own = {"binding": denoiser.binding(), "network": denoiser.network}
    forward, backward = (
        make(denoiser.shape, denoiser.process, kind=kind, **own) for kind in ("flow", "reversed_flow")
    )
    assert (denoiser.binding().turned, denoiser.parametrization.name) == (True, "reversed_flow")
    for model in (pipe, denoiser):
        with pytest.raises(MismatchError, match="is of a flow prediction, the scheduler says reversed_flow"):
            trueup.attach(model, forward)
        trueup.attach(model, backward).remove()


def test_a_device_that_is_not_there_is_said_in_a_line():
    with pytest.raises(ModelError, match="device nowhere cannot be used: "):
        as_denoiser(pipelines.sd(), device="nowhere")


def test_what_a_network_was_told_is_forgotten_after_its_step(flux):
    """A scheduler alone, later, is not told: as many tokens may be pictures that are high or wide."""
    pipe, calibration = flux
    pipe.scheduler = calibration.scheduler(nfe=3)
    with trueup.attach(pipe, calibration):
        run(TURNED, pipe, guided=False)
    model = Model("Flux", "", pipelines.flux, FLUX)
    with pytest.raises(MismatchError, match=r"attach the calibration, or set scheduler\.spatial"):
        run(model, pipe, guided=False)
    pipe.scheduler.spatial = (16, 8)
    stepped = run(model, pipe, guided=False)[2]
    by_hand = calibration.scheduler(nfe=3)
    by_hand.spatial = (16, 8)
    by_hand.set_timesteps(3)
    for k in range(2):
        torch.testing.assert_close(by_hand.step(*stepped[k]).prev_sample, stepped[k + 1][2])


def test_copies_know_their_prompts():
    denoiser = as_denoiser(pipelines.sd())
    other = copy.deepcopy(denoiser)
    y, x = other.vocabulary.numbers(["a cat"]), torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        for weight in denoiser.network.parameters():
            weight.zero_()
        assert other.predict(x, torch.tensor(500), y).abs().sum() > 0


def test_a_text_encoder_without_its_weights_is_refused(tmp_path):
    pipelines.sd().save_pretrained(tmp_path)
    file = next((tmp_path / "text_encoder").glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "token_embedding" in name))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights of its text encoder: .*token_embedding"):
        as_denoiser(tmp_path)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"text_encoder": None, "tokenizer": None}, {}, "has no text encoder for prompts: load it with one"),
        ({}, {"num_images_per_prompt": 2}, "num_images_per_prompt is no argument to fix"),
        ({}, {"guidance_scale": 7.5}, "guidance_scale is no argument to fix"),
        ({}, {"hight": 8}, "takes no argument hight"),
    ],
)
def test_what_cannot_be_listened_to_is_said_in_a_line(change, arguments, message):
    pipe = pipelines.sd()
    for name, value in change.items():
        setattr(pipe, name, value)
    with pytest.raises(ModelError, match=message) as error:
        as_denoiser(pipe, arguments=arguments)
    assert "\n" not in str(error.value)
