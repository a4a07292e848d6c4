"""Listening to pipelines: in any precision and state, with any scheduler, and without leaving a trace."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file

import trueup
from test_pipelines import PROMPTS, run
from test_scheduler import random_solver
from trueup.denoiser.binding import time_line
from trueup.denoiser.layout import restored
from trueup.errors import DataError, MismatchError, ModelError
from trueup.hf import as_denoiser
from trueup.hf.prompts import _number

import pipelines
from calibrations import make
from matrix import Model

SMALL = {"height": 16, "width": 16}
COG = {**SMALL, "num_frames": 8, "max_sequence_length": 12}
SVD = {**SMALL, "num_frames": 2, "decode_chunk_size": 2}
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
    assert as_denoiser(pipe, arguments=COG).binding().layout == "frames_first"


def pix2pix():
    network = pipelines.unet(in_channels=8)
    return pipelines.sd(diffusers.StableDiffusionInstructPix2PixPipeline, network=network)


@pytest.mark.parametrize(
    ("make_pipe", "arguments", "advice"),
    [
        (pipelines.sd, {"guidance_rescale": 0.7}, "arguments={'guidance_rescale': 0.0}"),
        (pipelines.lumina2, SMALL, "arguments={'cfg_normalization': False}"),
        (pipelines.cogvideo, {**COG, "use_dynamic_cfg": True}, "arguments={'use_dynamic_cfg': False}"),
        (pix2pix, {}, "do without"),  # a second scale, of the picture
    ],
)
def test_guidance_that_is_no_line_is_refused_and_said_how_to_switch_off(make_pipe, arguments, advice):
    denoiser = as_denoiser(make_pipe(), arguments=arguments)
    pictures = {name: Image.new("RGB", (16, 16)) for name in denoiser.vocabulary.pictures}
    how = {"labels": [{"prompt": "a cat", **pictures}], "nfe": 3, "progress": False}
    assert trueup.sample(denoiser, 1, **how).shape == (1, *denoiser.shape)
    with pytest.raises(ModelError, match=r"does not guide by null \+ guidance \(prompt - null\): ") as error:
        trueup.sample(denoiser, 1, guidance=3.0, **how)
    assert advice in str(error.value)


@pytest.mark.parametrize(
    ("make_pipe", "arguments", "scale"),
    [(pipelines.sd, {}, "guidance_scale"), (pipelines.flux, FLUX, "true_cfg_scale")],
)
def test_a_condition_says_what_it_is_guided_away_from(make_pipe, arguments, scale):
    """As the pipeline does that is called with both, and one beside it that says nothing of the kind."""
    pipe = make_pipe()
    pipe.set_progress_bar_config(disable=True)
    denoiser = as_denoiser(pipe, arguments=arguments)
    negative = ["the dog", "small"]
    said = [{"prompt": p, "negative_prompt": n} for p, n in zip(PROMPTS, negative, strict=True)]
    y = denoiser.vocabulary.numbers([*said, "red house"])
    nulls = denoiser.vocabulary.nulls(y)
    assert int(nulls[2]) == denoiser.vocabulary.null
    model = Model("", "", make_pipe, arguments, {scale: 3.0, "negative_prompt": negative})
    _, calls, ((output, t, _), *_) = run(model, pipe)
    args, kwargs, _ = calls[0]
    binding, shape = denoiser.binding(), denoiser.shape
    x_t = restored(binding.x.of(args, kwargs)[:2], binding.layout, shape[1:])
    with torch.inference_mode():
        null, told = (denoiser.predict(x_t, torch.as_tensor(t), part[:2]) for part in (nulls, y))
    found = null + 3.0 * (told - null)
    torch.testing.assert_close(restored(output, binding.layout, shape[1:]), found, rtol=1e-3, atol=1e-4)


def test_guidance_in_half_precision_is_a_line():
    """But for rounding, which a pipeline does in another order than we."""
    for dtype in (torch.float16, torch.bfloat16):
        denoiser = as_denoiser(pipelines.sd().to(dtype))
        denoiser.vocabulary.check_guidance()


@pytest.mark.parametrize("frames", [9, 13])  # of latents 3 and 4, with 4 channels
def test_frames_are_told_from_channels_though_there_are_as_many(frames):
    """What its autoencoder makes of a video is told as its pipeline tells it: frames first."""
    pipe = pipelines.cogvideo()
    denoiser = as_denoiser(pipe, arguments={**COG, "num_frames": frames})
    video = torch.randn(1, 3, frames, 16, 16, generator=torch.Generator().manual_seed(0))
    words = pipe.encode_prompt(["a cat"], None, False, 1, max_sequence_length=12)[0]
    t = torch.tensor([500])
    with torch.no_grad():
        latents = pipe.vae.encode(video).latent_dist.mode()  # (1, C, T, H, W)
        told = {"hidden_states": latents.transpose(1, 2), "encoder_hidden_states": words, "timestep": t}
        expected = pipe.transformer(**told).sample.transpose(1, 2)
        found = denoiser.predict(latents, t, denoiser.vocabulary.numbers(["a cat"]))
    torch.testing.assert_close(found, expected)


def test_channels_stay_channels_though_there_are_as_many_frames():
    denoiser = as_denoiser(pipelines.animate(), arguments={"num_frames": 4})
    assert denoiser.binding().layout is None


def test_frames_that_cannot_be_told_from_channels_are_refused():
    class Fixed(diffusers.CogVideoXPipeline):
        """Whose number of frames is no argument."""

        def __call__(self, prompt=None, **more):
            own = {"num_frames": 13, "num_inference_steps": 3, "guidance_scale": 1.0, "output_type": "latent"}
            return super().__call__(prompt, **{**COG, **own, **more})

    pipe = Fixed(**pipelines.cogvideo().components)
    with pytest.raises(ModelError, match=r"as many frames as channels \(4\), and which are which cannot be"):
        as_denoiser(pipe)


@pytest.mark.parametrize(
    ("make_pipe", "arguments", "shape", "scales"),
    [
        (pipelines.deepfloyd, {}, (3, 8, 8), ["guidance_scale"]),
        (pipelines.deepfloyd_fixed, {}, (3, 8, 8), ["guidance_scale"]),
        (pipelines.deepfloyd_larger, SMALL, (3, 16, 16), ["guidance_scale"]),
        (pipelines.upscale, {}, (4, 8, 8), ["guidance_scale"]),
        (pipelines.svd, SVD, (4, 2, 8, 8), ["min_guidance_scale", "max_guidance_scale"]),
        (pipelines.svd, {**SVD, "num_frames": 8}, (4, 8, 8, 8), ["min_guidance_scale", "max_guidance_scale"]),
    ],
    ids=["IF", "IF, fixed variance", "IF, second stage", "upscale", "SVD", "SVD, as many frames as channels"],
)
def test_what_a_scheduler_steps_is_x_t_whatever_a_network_takes_and_returns(
    make_pipe, arguments, shape, scales
):
    """A picture's channels come with x_t, a variance's with the output; and guidance may be on by default."""
    pipe = make_pipe()
    pipe.set_progress_bar_config(disable=True)
    denoiser = as_denoiser(pipe, arguments=arguments)
    told = denoiser.vocabulary
    assert denoiser.shape == shape
    known = inspect.signature(pipe.__call__).parameters
    picture = Image.new("RGB", (16, 16), (9, 90, 200))
    said = {name: value for name, value in {"prompt": "a cat", "image": picture}.items() if name in known}
    y = told.numbers([{name: value for name, value in said.items() if name in ("prompt", *told.pictures)}])
    more = {"clean_caption": False, "output_type": "latent", "num_inference_steps": 3}
    calls, stepped, step = [], [], pipe.scheduler.step

    @functools.wraps(step)
    def noted(model_output, timestep, *args, **kwargs):
        stepped.append((model_output.clone(), torch.as_tensor(timestep)))
        return step(model_output, timestep, *args, **kwargs)

    def channels_first(values):
        return restored(values, denoiser.binding().layout, shape[1:])[:, : shape[0]]

    for scale in (1.0, 3.0):
        calls.clear(), stepped.clear()
        pipe.scheduler.step = noted
        hook = pipe.unet.register_forward_hook(lambda _, args, output: calls.append((args[0], output[0])))
        given = {**said, **{name: value for name, value in more.items() if name in known}, **arguments}
        pipe(**given, **dict.fromkeys(scales, scale), generator=torch.Generator().manual_seed(0))
        hook.remove()
        del pipe.scheduler.step
        for (x, output), (handed, t) in zip(calls, stepped, strict=True):
            assert len(output) == (1 if scale == 1.0 else 2)
            x_t = channels_first(x)[-1:]
            with torch.inference_mode():
                null, found = (denoiser.predict(x_t, t, part) for part in (told.nulls(y), y))
            torch.testing.assert_close(found, channels_first(output)[-1:], rtol=1e-3, atol=1e-4)
            guided = null + scale * (found - null)
            torch.testing.assert_close(channels_first(handed), guided, rtol=1e-3, atol=1e-3)
    told.check_guidance()


def test_dropout_and_place_do_not_change_what_a_prompt_says():
    pipe = pipelines.pixart()
    pipe.text_encoder.train()
    told = as_denoiser(pipe).vocabulary
    first = told.rows(told.numbers(["a cat"]).tolist())[0].network
    other = as_denoiser(pipe).vocabulary
    again = other.rows(other.numbers(["the dog", "two", "a cat"]).tolist())[2].network
    for one, another in zip(first, again, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-6)


def test_a_pipeline_that_enlarges_is_calibrated_at_its_own_size():
    """Pictures of 16 pixels, of which it is given 8: as many as its latents have."""
    denoiser = as_denoiser(pipelines.upscale())
    size = denoiser.network.config.sample_size
    assert denoiser.shape == (4, size, size)
    assert denoiser.vocabulary.pictures == ("image",)
    noise = np.random.default_rng(0).integers(0, 256, (16, 2 * size, 2 * size, 3), dtype=np.uint8)
    photos = [Image.fromarray(one) for one in noise]
    said = [{"prompt": "a cat", "image": photo.resize((size, size))} for photo in photos]
    images = trueup.Images(noise, labels=said)
    moments = trueup.estimate.measure(denoiser, images, levels=[400], trust=True, progress=False)
    assert moments.images == 16
    assert trueup.sample(denoiser, 1, labels=said[:1], nfe=3, progress=False).shape == (1, 4, size, size)


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


def test_what_a_helper_makes_of_a_prompt_stays_where_the_network_is_told_none():
    """Flux's ControlNet is told the prompt once, for both halves: that of one is not the null of another."""
    told = as_denoiser(pipelines.flux_controlled(), arguments=FLUX).vocabulary
    picture = Image.new("RGB", (16, 32), (9, 90, 200))
    y = told.numbers([{"prompt": prompt, "control_image": picture} for prompt in PROMPTS])
    for null, row in zip(told.rows(told.nulls(y).tolist()), told.rows(y.tolist()), strict=True):
        pairs = zip(null.helper, row.helper, strict=True)
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
        k = told.interface.network.own("encoder_hidden_states")
        assert not torch.allclose(null.network[k], row.network[k], atol=1e-3)


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


def test_a_network_that_peft_wraps_is_told_what_it_was_told_before():
    pipe = pipelines.sd()
    bare = as_denoiser(pipelines.sd())
    pipe.unet = get_peft_model(pipe.unet, LoraConfig(target_modules=["to_q", "to_v"]))  # at first zero
    denoiser = as_denoiser(pipe)
    assert denoiser.binding() == bare.binding()
    x_t, t = torch.randn(2, *bare.shape, generator=torch.Generator().manual_seed(0)), torch.tensor([500, 20])
    y = bare.vocabulary.numbers(PROMPTS)
    denoiser.vocabulary.numbers(PROMPTS)
    with torch.inference_mode():
        torch.testing.assert_close(denoiser.predict(x_t, t, y), bare.predict(x_t, t, y))


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
