"""Pipelines of diffusers as people have them: measured, corrected and stepped as they call their networks."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from test_scheduler import random_solver
from trueup.denoiser import prediction
from trueup.denoiser.layout import restored
from trueup.errors import DataError, ModelError
from trueup.hf import as_denoiser
from trueup.hf.models import network_of

import pipelines
from calibrations import by_definition, make
from matrix import OTHERS, PAGE, REFUSED, TEXT, page

PROMPTS = ["a cat", "the red house"]
MODELS = pytest.mark.parametrize("model", TEXT, ids=lambda model: model.name.replace(" ", "-"))


@pytest.fixture(autouse=True)
def _quiet():
    warnings.filterwarnings("ignore", message=".*steps_offset.*")


@functools.lru_cache(maxsize=32)
def opened(model):
    """A pipeline with its denoiser."""
    pipe = model.make()
    pipe.set_progress_bar_config(disable=True)
    return pipe, as_denoiser(pipe, arguments=model.arguments)


def conditions(model):
    """Two of them, as arguments of the pipeline."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    pictures = [Image.fromarray(one) for one in noise]
    mask = Image.fromarray(np.tril(np.full((16, 16), 255, dtype=np.uint8)))
    made = {name: [mask] * 2 if "mask" in name else pictures for name in model.pictures}
    return [{"prompt": PROMPTS[k], **{name: made[name][k] for name in made}} for k in range(2)]


def run(model, pipe, guided=True, steps=3):
    """The pipeline as it is run, and what reached its network and its scheduler."""
    network, calls, stepped = network_of(pipe), [], []
    step = pipe.scheduler.step

    @functools.wraps(step)
    def noted(model_output, timestep, sample, *args, **kwargs):
        stepped.append((model_output.clone(), timestep, sample.clone()))
        return step(model_output, timestep, sample, *args, **kwargs)

    rows = conditions(model)
    given = {name: [row[name] for row in rows] for name in rows[0]}
    given |= (model.guided or {}) if guided else {"guidance_scale": 1.0}
    given = {"image": [Image.new("RGB", (16, 16))] * 2, "strength": 1.0, **given}  # where they change nothing
    given |= {"clean_caption": False, "use_resolution_binning": False}
    known = inspect.signature(pipe.__call__).parameters
    given = {name: value for name, value in given.items() if name in known}
    hook = network.register_forward_hook(
        lambda m, args, kwargs, output: calls.append((args, kwargs, prediction(output).clone())),
        with_kwargs=True,
    )
    pipe.scheduler.step = noted
    try:
        made = pipe(
            **given,
            **model.arguments,
            num_inference_steps=steps,
            output_type="latent",
            generator=torch.Generator().manual_seed(1),
        )
    finally:
        hook.remove()
        del pipe.scheduler.step
    return made, calls, stepped


def samples(denoiser, x):
    """Of whatever a network or a scheduler is given: channels first."""
    binding = denoiser.binding()
    return restored(x, binding.layout, denoiser.shape[1:])[:, : denoiser.shape[0]]


def calibration_of(denoiser, y=None):
    """Made up, of random numbers."""
    how = {"kind": denoiser.parametrization.name, "binding": denoiser.binding(y)}
    return make(denoiser.shape, denoiser.process, **how, network=denoiser.network, gain=0.1)


def close(one, other, more=0.0):
    """To the rounding of float32 through a network."""
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + more)


@MODELS
def test_the_network_is_told_what_its_pipeline_tells_it(model):
    pipe, denoiser = opened(model)
    _, calls, stepped = run(model, pipe, guided=False)
    y = denoiser.vocabulary.numbers(conditions(model))
    for (args, kwargs, output), (_, t, _) in zip(calls, stepped, strict=True):
        x_t = samples(denoiser, denoiser.binding().x.of(args, kwargs))
        with torch.inference_mode():
            found = denoiser.predict(x_t, torch.as_tensor(t), y)
        close(found, samples(denoiser, output))


@MODELS
def test_guiding_a_corrected_pipeline_is_guiding_corrected_halves(model):
    pipe, denoiser = opened(model)
    calibration = calibration_of(denoiser)
    with trueup.attach(pipe, calibration):
        _, calls, stepped = run(model, pipe)
        denoiser.vocabulary.check_guidance()
    y = denoiser.vocabulary.numbers(conditions(model))
    null = denoiser.vocabulary.nulls(y)
    scale = next(value for value in model.guided.values() if isinstance(value, float))
    assert len(calls) in (3, 6)  # both halves at once, or one after the other
    for k, (output, t, _) in enumerate(stepped):
        args, kwargs, _ = calls[k * len(calls) // 3]
        x_t = samples(denoiser, denoiser.binding().x.of(args, kwargs))[:2]
        bare, halves = [], []
        for told in (null, y):
            with torch.inference_mode():
                bare.append(denoiser.predict(x_t, torch.as_tensor(t), told))
            halves.append(by_definition(calibration, bare[-1], x_t, min(float(t), denoiser.process.t_max)))
        uncorrected, guided = (of[0].double() + scale * (of[1].double() - of[0]) for of in (bare, halves))
        sign = -1 if denoiser.binding().turned else 1
        expected = restored(sign * output.double(), denoiser.binding().layout, denoiser.shape[1:])[
            :, : denoiser.shape[0]
        ]
        # A row is corrected as at the nearest of some thousand times.
        close(expected.reshape_as(guided), guided, more=0.01 * float((guided - uncorrected).abs().max()))


@MODELS
def test_the_fitted_scheduler_steps_a_pipeline_as_our_own_loop_does(model):
    pipe, denoiser = opened(model)
    own, calibration = pipe.scheduler, trueup.calibration.Calibration.without_data(denoiser)
    calibration.solvers = (random_solver(denoiser.shape, denoiser.process, nfe=3),)
    pipe.scheduler = calibration.scheduler(nfe=3)
    try:
        with trueup.attach(pipe, calibration):  # of nothing: packed latents alone do not say their size
            _, _, stepped = run(model, pipe, guided=False)
    finally:
        pipe.scheduler = own
    y = denoiser.vocabulary.numbers(conditions(model))
    x, history = samples(denoiser, stepped[0][2]), []
    solver = calibration.solver(3)
    with torch.inference_mode():
        for i, t in enumerate(solver.t):
            output = denoiser.predict(x, t, y)
            history = [solver.remembered(i, output, x, denoiser.parametrization), *history][:3]
            x = solver.step(i, x, history)
            if i < 2:
                close(samples(denoiser, stepped[i + 1][2]), x)


@MODELS
def test_a_pipeline_is_saved_loaded_and_corrected_again(model, tmp_path):
    pipe, denoiser = opened(model)
    calibration = calibration_of(denoiser)
    with trueup.attach(pipe, calibration):
        before = run(model, pipe)[2][-1][0]
        pipe.save_pretrained(tmp_path)
    calibration.save(tmp_path / "a.trueup.safetensors")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    bare = run(model, again)[2][-1][0]
    with trueup.attach(again, tmp_path / "a.trueup.safetensors"):
        close(run(model, again)[2][-1][0], before)
    assert not torch.allclose(bare, before)
    found = as_denoiser(tmp_path, arguments=model.arguments)
    assert found.fingerprint() == denoiser.fingerprint()
    assert found.shape == denoiser.shape
    assert replace(found.binding()) == denoiser.binding()


def test_a_correction_by_prompt_is_attached_to_the_pipeline():
    """Of a network that misses by what its prompt says: its text is what it answers with."""
    model = TEXT[0]
    pipe = model.make()
    pipe.set_progress_bar_config(disable=True)
    told = []

    def answer(module, args, kwargs, output):
        told.append(kwargs["encoder_hidden_states"])
        miss = told[-1].mean(1)[:, :4, None, None]
        return (args[0] if args else kwargs["sample"]) * 0.7 + miss

    pipe.unet.register_forward_hook(lambda *call: (answer(*call),), with_kwargs=True)
    denoiser = as_denoiser(pipe)
    words = [" ".join(three) for three in itertools.permutations(pipelines.WORDS[:6], 3)]
    latents = torch.randn(240, *denoiser.shape, generator=torch.Generator().manual_seed(0))
    data = trueup.Images(latents, labels=[words[k % len(words)] for k in range(240)])
    how = {"levels": [300, 500, 700], "per_embedding": True, "trust": True, "progress": False}
    # A gain would take all of such an output for noise.
    found = trueup.estimate.fit(trueup.estimate.measure(denoiser, data, **how), family="shift")
    assert found.conditions is not None
    y = denoiser.vocabulary.numbers(words[:2])
    close(denoiser.vocabulary.embedding(y), pipe.encode_prompt(words[:2], "cpu", 1, False)[0])
    with pytest.raises(DataError, match=r"prompts, which are no classes.*per_embedding=True"):
        trueup.estimate.classes_of(data, denoiser)
    x_t, t = torch.randn(2, *denoiser.shape), torch.tensor([500, 500])
    bare = denoiser.predict(x_t, t, y)
    with trueup.attach(pipe, found, gains="least-squares"):
        corrected = denoiser.predict(x_t, t, y)
        told.clear()
        run(model, pipe)  # as the pipeline calls it, halves of guidance and all
    apart = bare[0].mean((1, 2)) - bare[1].mean((1, 2))
    left = corrected[0].mean((1, 2)) - corrected[1].mean((1, 2))
    assert float(left.norm()) < 0.5 * float(apart.norm())


# Models without text

OTHER = pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name.replace(" ", "-"))


@functools.lru_cache(maxsize=32)
def opened_other(other):
    model = other.make()
    return model, as_denoiser(model, **other.how)


def labels_of(other, count):
    return torch.arange(count) % other.labels if other.labels else None


def x_and_t(denoiser, count=4):
    generator = torch.Generator().manual_seed(2)
    process = denoiser.process
    t = process.snap(process.t_of_lam(torch.linspace(2, -2, count, dtype=torch.float64)))
    return torch.randn(count, *denoiser.shape, generator=generator), t


@OTHER
def test_other_models_are_measured(other):
    _, denoiser = opened_other(other)
    images = 0.4 * torch.randn(24, *denoiser.shape, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    if denoiser.data_range == (0.0, 1.0):
        images = 0.5 + 0.5 * images
    data = trueup.Images(images, labels=labels_of(other, 24), data_range=denoiser.data_range)
    moments = trueup.estimate.measure(denoiser, data, levels=x_and_t(denoiser)[1], trust=True, progress=False)
    found = trueup.estimate.fit(moments)
    assert found.evidence.images == 24
    assert bool((found.evidence.loss.value > 0).all())


@OTHER
def test_other_models_are_corrected_by_definition(other):
    model, denoiser = opened_other(other)
    y = labels_of(other, 4)
    calibration = calibration_of(denoiser, y)
    x_t, t = x_and_t(denoiser)
    with torch.inference_mode():
        bare = denoiser.predict(x_t, t, y)
        with trueup.attach(model, calibration):
            found = denoiser.predict(x_t, t, y)
        expected = by_definition(calibration, bare, x_t, t)
        close(found.double(), expected, more=0.01 * float((expected - bare).abs().max()))
        assert torch.equal(denoiser.predict(x_t, t, y), bare)


@OTHER
def test_other_models_are_stepped_by_fitted_solvers(other):
    _, denoiser = opened_other(other)
    y = labels_of(other, 2)
    solver = random_solver(denoiser.shape, denoiser.process, nfe=3)
    scheduler = trueup.Scheduler.of(solver, denoiser.process, denoiser.parametrization)
    scheduler.set_timesteps(3)
    x, history = torch.randn(2, *denoiser.shape) * denoiser.process.prior_std, []
    ours = theirs = x
    with torch.inference_mode():
        for i, t in enumerate(solver.t):
            output = denoiser.predict(ours, t, y)
            history = [solver.remembered(i, output, ours, denoiser.parametrization), *history][:3]
            ours = solver.step(i, ours, history)
            theirs = scheduler.step(
                denoiser.predict(theirs, t, y), scheduler.timesteps[i], theirs
            ).prev_sample
            close(theirs, ours)


@pytest.mark.parametrize(
    ("name", "why", "refused"), REFUSED, ids=lambda value: str(value)[:20].replace(" ", "-")
)
def test_models_that_cannot_be_calibrated_are_refused(name, why, refused):
    said = "distilled|not conditional expectations|two networks"
    with pytest.raises(ModelError, match=said):
        as_denoiser(refused())


def test_the_page_of_models_is_that_of_the_tests():
    assert PAGE.read_text(encoding="utf-8") == page()
