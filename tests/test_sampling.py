"""Sampling: every scheduler on data whose distribution is known, seeds per image, guidance, files."""

import gc
import json
import re

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import trueup
from by_hand import calibration_of
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.calibration.attachment import detach
from trueup.errors import AttachError, MismatchError, TrueupError
from trueup.files import load_tensors, save_tensors
from trueup.hf import as_denoiser
from trueup.hf.schedulers import make_scheduler
from trueup.noise import normal
from trueup.parametrization import Parametrization
from trueup.sampling import (
    DPMSolver,
    Solver,
    as_solver,
    generate,
    pictures,
    register,
    sample_batches,
    solver_names,
    solvers_for,
    store,
)
from trueup.sampling import solver as registry
from trueup.sampling.schedulers import SchedulerSolver
from trueup.sampling.store import Kept, Output, grid
from trueup.solvers import DPM_SOLVERS, NAMES, SCHEDULERS, check_name

from tiny import tiny_unet

MEAN = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]])
STD = 0.4
GAUSSIAN = GaussianMixture(MEAN, STD)
VP = processes.DiscreteVP.linear()
CPU = torch.device("cpu")


# Every kind of noise, and what its networks predict.
KINDS = {
    "discrete": (VP, "noise"),
    "continuous": (processes.ContinuousVP(), "velocity"),
    "ve": (processes.VE(), "data"),
    "edm": (processes.EDM(), Parametrization("edm", 0.5)),
    "flow": (processes.Flow(), "flow"),
    "flow in 1000 steps": (processes.Flow(time_scale=1000.0), "reversed_flow"),
}
OFFERED = [
    (kind, name)
    for kind, (process, prediction) in KINDS.items()
    for name in solvers_for(GAUSSIAN.denoiser(process, prediction))
]


def exact_for(kind, batch_size=2000):
    """The ideal network for data N(MEAN, STD^2) under some noise."""
    return GAUSSIAN.denoiser(*KINDS[kind]).with_batch_size(batch_size)


@pytest.mark.parametrize(("kind", "name"), OFFERED)
def test_an_ideal_network_gives_the_data_under_every_solver_that_is_offered(kind, name):
    """Wrong input scaling, starting noise, times or predictions would show in the mean or the spread."""
    told = []
    inner = exact_for(kind)
    process = inner.process

    def network(x, t):
        told.append((float(t.min()), float(t.max())))
        return inner(x, t)

    denoiser = trueup.Denoiser(network, process, inner.parametrization, inner.shape, batch_size=2000)
    x = trueup.sample(denoiser, 2000, solver=name, nfe=100)
    assert float((x.mean(0) - MEAN[0]).abs().max()) < 0.12 * STD
    # 100 evaluations leave each sampler an error of its own in the spread, Euler's the largest.
    assert torch.allclose(x.std(0), torch.full_like(x[0], STD), rtol=0.12)
    low, high = min(t[0] for t in told), max(t[1] for t in told)
    slack = 1e-5 * (process.t_max - process.t_min)
    assert process.t_min - slack <= low <= high <= process.t_max + slack  # no time it was not trained on


def test_every_solver_is_offered_for_some_noise_and_every_noise_has_some():
    assert {name for _, name in OFFERED} == {*NAMES} == {*solver_names()}
    assert all((kind, "dpm-solver-3") in OFFERED and (kind, "unipc") in OFFERED for kind in KINDS)
    assert ("flow", "flow-euler") in OFFERED
    assert ("ve", "edm-euler") in OFFERED
    assert ("discrete", "flow-euler") not in OFFERED


@pytest.mark.parametrize(("kind", "name"), [("flow", "ddim"), ("flow", "edm-euler"), ("edm", "flow-heun")])
def test_a_solver_that_is_not_offered_is_refused_with_those_that_are(kind, name):
    denoiser = exact_for(kind)
    with pytest.raises(TrueupError) as refused:
        as_solver(name, denoiser)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith(", ".join(solvers_for(denoiser)))
    with pytest.raises(TrueupError, match="noise"):
        as_solver(SCHEDULERS[name][0], denoiser)


@pytest.mark.parametrize("kind", ["continuous", "ve", "edm", "flow"])
def test_a_carried_solver_agrees_with_the_exact_flow(kind):
    """In many steps DPM-Solver++ follows the path of DPM-Solver, in another scale and other times."""
    denoiser = exact_for(kind)
    ours, theirs = (trueup.sample(denoiser, 16, solver=name, nfe=500) for name in ("dpm-solver-3", "dpm++2m"))
    assert float((ours - theirs).abs().max()) < 0.05 * STD


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["unipc", "dpm++2m"])
def test_a_solver_that_was_made_of_a_name_is_what_the_name_is(kind, name):
    """The command line makes it once, to say early what cannot work, and hands it on."""
    denoiser = exact_for(kind)
    made = as_solver(as_solver(name, denoiser), denoiser)
    by_name, handed = (trueup.sample(denoiser, 4, solver=solver, nfe=8) for solver in (name, made))
    assert torch.equal(by_name, handed)


@pytest.mark.parametrize("name", ["pndm", "euler-a", "kdpm2"])
def test_a_solver_that_was_made_of_a_name_translates_for_predictions_it_does_not_take(name):
    pipe = diffusers.DDPMPipeline(tiny_unet(), diffusers.DDPMScheduler(prediction_type="sample"))
    denoiser = as_denoiser(pipe)
    made = as_solver(name, denoiser)
    assert made.parametrization != denoiser.parametrization
    by_name, handed = (trueup.sample(denoiser, 2, solver=solver, nfe=8) for solver in (name, made))
    assert torch.equal(by_name, handed)


class Halves(Solver):
    """A solver of somebody else: two steps of DDIM, by hand."""

    name, adaptive = "halves", False

    def evaluations(self, nfe, denoiser, y=None):
        return 2

    def settings(self):
        return {"kind": "halves"}

    def solve(self, network, noise, nfe):
        x, process = noise, network.process
        for t, s in ((999.0, 500.0), (500.0, 0.0)):
            eps = network(x, t)
            x0 = (x - process.sigma(t) * eps) / process.alpha(t)
            x = (process.alpha(s) * x0 + process.sigma(s) * eps).float()
        return x


@pytest.fixture
def halves():
    register("halves", lambda denoiser: Halves(), offered=lambda denoiser: denoiser.process.integer_times)
    yield "halves"
    del registry._KNOWN["halves"]


def test_somebody_elses_solver_works_by_name(halves):
    denoiser = exact_for("discrete")
    assert "halves" in solvers_for(denoiser)
    assert "halves" not in solvers_for(exact_for("flow"))
    x = trueup.sample(denoiser, 8, solver="halves", nfe=2)
    by_hand = trueup.sample(denoiser, 8, solver=DPMSolver(1, grid="uniform", end=1e-3), nfe=2)
    assert torch.allclose(x.mean(), by_hand.mean(), atol=0.1)
    cal = calibration_of(denoiser, GAUSSIAN.sample(64))
    assert torch.equal(trueup.sample(denoiser, 8, solver="halves", nfe=2, calibration=cal), x)
    assert len(generate(denoiser, 4, solver="halves", nfe=2)) == 4
    with pytest.raises(TrueupError, match="did you mean halves"):
        trueup.sample(denoiser, 1, solver="halve")


def test_somebody_elses_solver_is_evaluated_by_name(halves):
    denoiser, data = exact_for("discrete"), GAUSSIAN.sample(64)
    cal = calibration_of(denoiser, data)
    found = trueup.evaluate(
        denoiser, cal, data, solvers=("halves",), nfe=(2,), samples=16, features="pixels", loss=False
    )
    assert [row.solver for row in found.rows] == ["halves"]


def test_a_mistyped_name_is_understood():
    for typed, meant in (("dpm-solver3", "dpm-solver-3"), ("unipcc", "unipc"), ("dpmpp2m", "dpm++2m")):
        with pytest.raises(TrueupError, match=f"did you mean {meant.replace('+', '[+]')}"):
            check_name(typed)
    with pytest.raises(TrueupError, match="unknown solver 'zzz': use dpm-solver-1"):
        check_name("zzz")
    assert len(DPM_SOLVERS) == 8


@pytest.mark.parametrize("kind", ["data", "velocity", "score"])
@pytest.mark.parametrize("name", ["ddim", "dpm++2m", "euler", "unipc"])
def test_schedulers_are_told_what_the_network_predicts(kind, name):
    x = trueup.sample(GAUSSIAN.denoiser(VP, kind), 8, solver=name, nfe=20)
    same = trueup.sample(GAUSSIAN.denoiser(VP), 8, solver=name, nfe=20)
    assert float((x - same).abs().max()) < 2e-3 * float(same.abs().max())  # alpha is 0.006 where it starts


@pytest.mark.parametrize("name", ["ddim", "dpm++2m", "unipc", "euler", "heun", "kdpm2", "pndm", "deis"])
def test_the_loop_is_the_one_diffusers_documents(name):
    net = tiny_unet()
    kind, settings = SCHEDULERS[name]
    scheduler = getattr(diffusers, kind)(**settings)
    denoiser = as_denoiser(net, scheduler=scheduler)
    found = trueup.sample(denoiser, 2, solver=scheduler, nfe=9)
    steps = next(n for n in range(9, 0, -1) if evaluations(scheduler, n) <= 9)
    scheduler.set_timesteps(steps)
    x = normal(0, torch.arange(2), -1, (1, 8, 8), CPU) * scheduler.init_noise_sigma
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(net(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
    assert float((found - x).abs().max()) < 1e-4 * float(x.abs().max())


def evaluations(scheduler, steps):
    scheduler.set_timesteps(steps)
    return len(scheduler.timesteps)


@pytest.mark.parametrize(
    "name", ["dpm-solver-3", "dpm-solver-2-adaptive", "ddpm", "ddim", "euler-a", "dpm++2m-sde"]
)
def test_an_image_does_not_depend_on_its_batch(name):
    together, apart = (
        trueup.sample(exact_for("discrete", size), 10, solver=name, nfe=12, seed=3) for size in (10, 3)
    )
    denoiser = exact_for("discrete", 4)
    fewer = trueup.sample(denoiser, 4, solver=name, nfe=12, seed=3)
    slack = 1e-5 * float(together.abs().max())
    assert torch.allclose(together, apart, rtol=0, atol=slack)
    assert torch.allclose(together[:4], fewer, rtol=0, atol=slack)
    other = trueup.sample(denoiser, 4, solver=name, nfe=12, seed=4)
    assert not torch.allclose(fewer, other, atol=0.1)


def test_noise_a_scheduler_draws_is_new_at_every_step_and_for_every_image():
    drawn = []
    scheduler = diffusers.DDPMScheduler(clip_sample=False)
    solver = as_solver(scheduler, GAUSSIAN.denoiser(VP))
    step = type(scheduler).step
    try:
        type(scheduler).step = lambda self, *a, **k: (
            drawn.append(torch.randn(3, 1, 2, 2)),
            step(self, *a, **k),
        )[1]
        trueup.sample(GAUSSIAN.denoiser(VP), 3, solver=solver, nfe=5)
    finally:
        type(scheduler).step = step
    flat = torch.cat(drawn).flatten(1)
    assert len({tuple(row.tolist()) for row in flat}) == len(flat) == 15


def off_by(amount):
    """A network whose noise is off by a constant, and the calibration that takes it away."""
    denoiser = GAUSSIAN.denoiser(VP, distortion=lambda eps, u, lam: 0 * eps + amount).with_batch_size(4)
    return denoiser, calibration_of(denoiser, GAUSSIAN.sample(64), shift=amount)


def test_calibrated_samples_start_from_the_same_noise():
    denoiser, cal = off_by(0.3)
    before = trueup.sample(denoiser, 64, nfe=20)
    after = trueup.sample(denoiser, 64, nfe=20, calibration=cal)
    ideal = trueup.sample(GAUSSIAN.denoiser(VP), 64, nfe=20)
    assert (after - ideal).abs().mean() < 0.05 * (before - ideal).abs().mean()
    assert torch.equal(trueup.sample(denoiser, 64, nfe=20), before)  # and it is off again


def module_off_by(amount):
    """The same as a module, which carries its correction itself."""
    inner, _ = off_by(amount)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, t):
            return self.weight * inner(x, t)

    denoiser = trueup.Denoiser(Net(), VP, "noise", GAUSSIAN.shape, data_range=None, batch_size=4)
    return denoiser, calibration_of(denoiser, GAUSSIAN.sample(64), shift=amount)


@pytest.mark.parametrize("make", [off_by, module_off_by], ids=["function", "module"])
class TestModelIsCorrectedOnlyWhileItDraws:
    X, T = torch.full((2, 1, 2, 2), 0.5), torch.tensor([500.0, 500.0])

    def test_calling_without_iterating_leaves_it_untouched(self, make):
        denoiser, cal = make(0.3)
        plain = denoiser(self.X, self.T)
        batches = sample_batches(denoiser, 8, nfe=6, calibration=cal)
        assert not denoiser.corrected
        assert torch.equal(denoiser(self.X, self.T), plain)
        next(batches)
        batches.close()
        assert not denoiser.corrected

    def test_it_is_bare_between_batches(self, make):
        denoiser, cal = make(0.3)
        plain = denoiser(self.X, self.T)
        whole = trueup.sample(denoiser, 8, nfe=6, calibration=cal)
        uncorrected = trueup.sample(denoiser, 8, nfe=6)
        found = []
        for _, x in sample_batches(denoiser, 8, nfe=6, calibration=cal):
            assert torch.equal(denoiser(self.X, self.T), plain)
            assert torch.equal(trueup.sample(denoiser, 8, nfe=6), uncorrected)
            found.append(x)
        assert torch.equal(torch.cat(found), whole)
        assert not torch.allclose(whole, uncorrected, atol=1e-2)
        assert not denoiser.corrected

    def test_forgotten_and_failed_ones_let_go(self, make):
        denoiser, cal = make(0.3)
        batches = sample_batches(denoiser, 8, nfe=6, calibration=cal)
        next(batches)
        del batches
        gc.collect()
        assert not denoiser.corrected
        batches = sample_batches(denoiser, 8, nfe=6, calibration=cal)
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
        assert not denoiser.corrected

    def test_mistakes_are_said_at_the_call(self, make):
        denoiser, cal = make(0.3)
        other = GaussianMixture(torch.zeros(1, 1, 4, 4), STD).denoiser(processes.Flow(), "flow")
        with pytest.raises(TrueupError):
            sample_batches(other, 8, nfe=6, calibration=cal)
        for changes in ({"nfe": 0}, {"solver": "nosuch"}, {"labels": 3}, {"count": 0}):
            with pytest.raises(TrueupError):
                sample_batches(denoiser, **{"count": 8, "nfe": 6, "calibration": cal, **changes})
        assert not denoiser.corrected

    def test_two_draw_in_turn_and_others_may_come_between(self, make):
        denoiser, cal = make(0.3)
        how = {"nfe": 6, "calibration": cal}
        wholes = [trueup.sample(denoiser, 8, seed=seed, **how) for seed in (0, 1)]
        pairs = zip(*(sample_batches(denoiser, 8, seed=seed, **how) for seed in (0, 1)), strict=True)
        found = []
        for one, other in pairs:
            assert not denoiser.corrected
            found.append((one[1], other[1]))
        for whole, parts in zip(wholes, zip(*found, strict=True), strict=True):
            assert torch.equal(torch.cat(parts), whole)
        batches = sample_batches(denoiser, 8, **how)
        first = next(batches)[1]
        trueup.calibrate(denoiser, GAUSSIAN.sample(32), trust=True)  # which a corrected one is refused
        with trueup.attach(denoiser, cal):
            assert denoiser.corrected
        detach(denoiser)
        assert torch.equal(torch.cat([first, next(batches)[1]]), wholes[0])
        batches = sample_batches(denoiser, 8, **how)
        next(batches)
        with trueup.attach(denoiser, cal), pytest.raises(AttachError, match="already attached"):
            next(batches)
        assert not denoiser.corrected

    def test_one_calibration_at_a_time(self, make):
        denoiser, cal = make(0.3)
        with trueup.attach(denoiser, cal), pytest.raises(AttachError, match="already attached"):
            next(sample_batches(denoiser, 8, nfe=6, calibration=cal))


@pytest.mark.parametrize("seed", [1.5, "1", None, True, -1, 2**53, torch.tensor(1), np.arange(2)])
def test_a_seed_is_a_whole_number(seed):
    denoiser, _ = off_by(0.3)
    for draws in (
        lambda: trueup.sample(denoiser, 2, nfe=3, seed=seed),
        lambda: sample_batches(denoiser, 2, nfe=3, seed=seed),
        lambda: generate(denoiser, 2, nfe=3, seed=seed),
    ):
        with pytest.raises(TrueupError, match="a seed is a whole number"):
            draws()
    if not isinstance(seed, int) or seed is True:  # where noise is drawn it may be the hash of one
        with pytest.raises(TrueupError, match="a seed is a whole number"):
            normal(seed, torch.arange(2), 0, (1,), CPU)


def test_numpys_whole_numbers_are_seeds():
    denoiser, _ = off_by(0.3)
    one, other = (trueup.sample(denoiser, 2, nfe=3, seed=seed, progress=False) for seed in (1, np.int64(1)))
    assert torch.equal(one, other)
    noise = (normal(seed, torch.arange(2), 0, (4,), CPU) for seed in (1, np.int64(1)))
    assert torch.equal(*noise)


def test_heun_is_not_offered_where_its_first_step_is_too_large():
    """Cosine noise begins at sigma 20,000: 20 evaluations of Heun's ended at 15 times the spread."""
    denoiser = GAUSSIAN.denoiser(processes.DiscreteVP.cosine(), "velocity").with_batch_size(500)
    for name in ("heun", "HeunDiscreteScheduler"):
        with pytest.raises(TrueupError, match=f"{name} does not"):
            as_solver(name, denoiser)
    for name in ("kdpm2", "euler", "euler-a", "unipc"):
        x = trueup.sample(denoiser, 500, solver=name, nfe=20)
        assert torch.allclose(x.std(0), torch.full_like(x[0], STD), rtol=0.25), name


def test_a_scheduler_whose_times_are_not_finite_is_refused(monkeypatch):
    from diffusers import KDPM2AncestralDiscreteScheduler as Scheduler

    usual = Scheduler.set_timesteps

    def set_timesteps(self, *args, **kwargs):
        usual(self, *args, **kwargs)
        self.timesteps[2] = float("nan")

    monkeypatch.setattr(Scheduler, "set_timesteps", set_timesteps)
    with pytest.raises(TrueupError, match="kdpm2-a cannot sample in 20 evaluations: its times are not fin"):
        trueup.sample(GAUSSIAN.denoiser(VP, "noise"), 1, solver="kdpm2-a", nfe=20)


def test_drawing_in_batches_compiles_the_network_once():
    """The first batch has a hook on; between batches it rests, and nobody forgets the code."""
    torch.compiler.reset()
    denoiser, cal = module_off_by(0.3)
    net, compiled = denoiser.network, []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    fast = torch.compile(net, backend=backend)
    denoiser = trueup.Denoiser(fast, VP, "noise", GAUSSIAN.shape, data_range=None, batch_size=2)
    counts = [len(compiled) for _ in sample_batches(denoiser, 10, nfe=3, calibration=cal)]
    assert counts[0] > 0
    assert counts == counts[:1] * 5
    torch.compiler.reset()


def test_a_suspended_generator_leaves_a_network_in_training():
    denoiser, _ = module_off_by(0.0)
    denoiser.network.train()
    batches = sample_batches(denoiser, 8, nfe=6)
    next(batches)
    assert denoiser.network.training
    batches.close()


def conditional():
    """Labels 0, 1, 2 have means -1, 0, 1; label 3 stands for none and means 0 with a wider spread."""
    kinds = [
        GaussianMixture(torch.full((1, 1, 2, 2), m), s)
        for m, s in ((-1.0, 0.1), (0.0, 0.1), (1.0, 0.1), (0.0, 0.9))
    ]

    def network(x, t, y):
        alpha, sigma = VP.alpha(t), VP.sigma(t)
        outputs = torch.stack([kind.eps_given(x, alpha, sigma) for kind in kinds])
        return outputs[y, torch.arange(len(x))]

    denoiser = trueup.Denoiser(
        network, VP, "noise", (1, 2, 2), conditional=True, null_label=3, data_range=None, dtype=torch.float32
    )
    return denoiser, kinds


def test_labels_go_round_whatever_the_batch():
    denoiser, _ = conditional()
    for size in (3, 4, 7):
        x = trueup.sample(denoiser.with_batch_size(size), 7, labels=[0, 2], nfe=12)
        assert [round(float(v)) for v in x.mean((1, 2, 3))] == [-1, 1, -1, 1, -1, 1, -1]


@pytest.mark.parametrize("solver", ["dpm-solver-2", "ddim"])
def test_guidance_is_null_plus_scale_times_the_difference(solver):
    denoiser, kinds = conditional()

    def guided(x, t):
        alpha, sigma = VP.alpha(t), VP.sigma(t)
        label, null = (kinds[i].eps_given(x, alpha, sigma) for i in (2, 3))
        return null + 1.5 * (label - null)

    by_hand = trueup.Denoiser(guided, VP, "noise", (1, 2, 2), data_range=None)
    expected = trueup.sample(by_hand, 6, nfe=10, solver=solver)
    found = trueup.sample(denoiser, 6, nfe=10, solver=solver, labels=2, guidance=1.5)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_every_row_is_guided_by_its_own_label_however_memory_splits_them():
    """Null and labelled rows are evaluated together: halves of a batch must not be taken for them."""
    denoiser, _ = conditional()
    whole = trueup.sample(denoiser, 6, nfe=8, labels=[0, 1, 2], guidance=1.5)
    inner = denoiser._call

    def tight(x, t, y):
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(x, t, y)

    small = trueup.Denoiser(
        tight, VP, "noise", (1, 2, 2), conditional=True, null_label=3, data_range=None, batch_size=6
    )
    split = trueup.sample(small, 6, nfe=8, labels=[0, 1, 2], guidance=1.5)
    assert float((split - whole).abs().max()) < 1e-4 * float(whole.abs().max())
    for i in range(3):
        alone = trueup.sample(denoiser, 6, nfe=8, labels=i, guidance=1.5)
        assert float((whole[i::3] - alone[i::3]).abs().max()) < 1e-4 * float(whole.abs().max())


def test_a_learned_variance_reaches_the_scheduler_that_wants_it():
    torch.manual_seed(0)
    net = tiny_unet(out_channels=2)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False)
    denoiser = as_denoiser(net, scheduler=scheduler)
    found = trueup.sample(denoiser, 2, solver=scheduler, nfe=4)
    scheduler.set_timesteps(4)
    x = normal(0, torch.arange(2), -1, (1, 8, 8), CPU)
    with torch.no_grad():
        for draw, t in enumerate(scheduler.timesteps):
            noise = normal(0, torch.arange(2), -2 - draw, (1, 8, 8), CPU)
            output = net(x, t).sample
            drift = scheduler.step(output, t, x, generator=torch.Generator().manual_seed(0)).prev_sample
            if t > 0:  # its own noise, replaced by ours
                theirs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
                spread = scheduler._get_variance(t, predicted_variance=output[:, 1:])
                drift = drift + torch.exp(0.5 * spread) * (noise - theirs)
            x = drift
    assert float((found - x).abs().max()) < 1e-3 * float(x.abs().max())


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    "name", ["ddim", "euler", "unipc", "pndm", "dpm++2m", "dpm++2s", "deis", "dpm-solver-2"]
)
def test_other_samplers_leave_a_learned_variance_out(name, channels):
    torch.manual_seed(0)
    net = tiny_unet(in_channels=channels, out_channels=2 * channels)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False)
    denoiser = as_denoiser(net, scheduler=scheduler)
    x = trueup.sample(denoiser, 2, solver=name, nfe=4)
    mean = trueup.Denoiser(lambda x, t: net(x, t).sample[:, :channels], VP, "noise", (channels, 8, 8))
    mean.scheduler_config = diffusers.DDPMScheduler(clip_sample=False).config
    other = trueup.sample(mean, 2, solver=name, nfe=4)
    assert float((x - other).abs().max()) < 1e-4 * float(x.abs().max())


def test_networks_in_half_precision_keep_float32_states():
    net = tiny_unet().half()
    x = trueup.sample(as_denoiser(net, scheduler=diffusers.DDIMScheduler()), 2, solver="ddim", nfe=3)
    assert x.dtype == torch.float32


def test_running_out_of_memory_halves_what_is_evaluated_at_once():
    sizes = []

    def network(x, t):
        sizes.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return GAUSSIAN.eps_given(x, VP.alpha(t), VP.sigma(t))

    denoiser = trueup.Denoiser(network, VP, "noise", GAUSSIAN.shape, data_range=None, batch_size=8)
    x = trueup.sample(denoiser, 8, nfe=6)
    same = trueup.sample(GAUSSIAN.denoiser(VP), 8, nfe=6)
    assert float((x - same).abs().max()) < 1e-5 * float(x.abs().max())
    assert max(sizes[-4:]) <= 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"solver": "dpm-solver-4"}, "unknown solver"),
        ({"solver": "AutoencoderKL"}, "unknown solver"),
        ({"solver": "nonsense"}, "unknown solver"),
        ({"solver": "flow-euler"}, "discrete_vp noise.*: use dpm-solver-1"),
        ({"solver": "edm-euler"}, "discrete_vp noise.*: use dpm-solver-1"),
        ({"solver": object()}, "no diffusers scheduler"),
        ({"nfe": 2}, "at least 3"),
        ({"nfe": 0}, "whole number"),
        ({"nfe": 2.5}, "whole number"),
        ({"nfe": None}, "whole number"),
        ({"labels": 3}, "takes no labels"),
        ({"guidance": 2.0}, "takes no labels"),
        ({"count": 0}, "at least 1"),
    ],
)
def test_bad_requests_say_what_to_do(settings, words):
    with pytest.raises(TrueupError, match=words):
        trueup.sample(GAUSSIAN.denoiser(VP), **{"count": 1, **settings})


@pytest.mark.parametrize(
    ("name", "nfe", "made"),
    [("ddim", 2000, 1000), ("heun", 10, 9), ("heun", 9, 9), ("pndm", 10, 10), ("dpm++2s", 7, 7)],
)
def test_as_many_evaluations_as_fit(name, nfe, made):
    assert SchedulerSolver.named(name, GAUSSIAN.denoiser(VP)).evaluations(nfe) == made


def test_labels_that_are_none():
    denoiser, _ = conditional()
    with pytest.raises(TrueupError, match="fewer classes"):
        trueup.sample(denoiser, 1, labels=99)
    with pytest.raises(TrueupError, match="cannot be told prompts: pass numbers"):
        trueup.sample(denoiser, 1, labels=["cat"])
    with pytest.raises(TrueupError, match="guidance is a number"):
        trueup.sample(denoiser, 1, labels=0, guidance="much")


def test_conditional_networks_need_labels_and_guidance_needs_a_null():
    denoiser, _ = conditional()
    with pytest.raises(TrueupError, match="say which labels"):
        trueup.sample(denoiser, 1)
    denoiser.null_label = None
    with pytest.raises(TrueupError, match="stands for none"):
        trueup.sample(denoiser, 1, labels=0, guidance=2.0)


def test_a_scheduler_with_another_schedule_is_refused():
    with pytest.raises(MismatchError, match="not what the network was trained on"):
        trueup.sample(
            GAUSSIAN.denoiser(VP), 1, solver=diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2")
        )
    with pytest.raises(MismatchError, match="predict velocity"):
        trueup.sample(
            GAUSSIAN.denoiser(VP), 1, solver=diffusers.DDIMScheduler(prediction_type="v_prediction")
        )


@pytest.mark.parametrize("name", ["UnCLIPScheduler", "DDIMInverseScheduler", "DDPMWuerstchenScheduler"])
def test_schedulers_of_other_noise_are_refused_though_they_take_any_config(name):
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler())
    with pytest.raises(TrueupError):
        trueup.sample(denoiser, 1, solver=name, nfe=5)


def test_a_prediction_type_given_by_hand_reaches_the_scheduler():
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler(), prediction="velocity")
    assert as_solver("ddim", denoiser).scheduler.config.prediction_type == "v_prediction"


def test_a_flow_models_shift_is_kept():
    denoiser = GAUSSIAN.denoiser(processes.Flow(time_scale=1000.0), "flow")
    denoiser.scheduler_config = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True}
    assert as_solver("flow-euler", denoiser).scheduler.config.shift == 3.0
    unipc = as_solver("unipc", denoiser)
    assert unipc.scheduler.config.flow_shift == 3.0
    trueup.sample(denoiser, 1, solver=unipc, nfe=4)
    assert make_scheduler("flow-euler", denoiser)[1]  # the model's own, and told its very times


def test_a_scheduler_takes_over_the_models_own_config():
    own = diffusers.DDPMScheduler(
        clip_sample=True, timestep_spacing="trailing", beta_schedule="squaredcos_cap_v2"
    )
    denoiser = as_denoiser(tiny_unet(), scheduler=own)
    config = as_solver("ddim", denoiser).scheduler.config
    assert (config.clip_sample, config.timestep_spacing, config.beta_schedule) == (
        True,
        "trailing",
        "squaredcos_cap_v2",
    )


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_agree_with_a_pipeline_made_in_memory(name):
    """Whose config lists its defaults, which diffusers would replace by another scheduler's defaults."""
    if name.startswith(("edm", "flow")):
        return
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler(num_train_timesteps=1000))
    solver = as_solver(name, denoiser)  # which checks it
    assert as_solver(type(solver.scheduler), denoiser).scheduler.config.beta_start == 1e-4


def test_the_scheduler_given_is_left_as_it_was():
    scheduler = diffusers.DPMSolverMultistepScheduler()
    before = dict(scheduler.__dict__)
    trueup.sample(GAUSSIAN.denoiser(VP), 1, solver=scheduler, nfe=4)
    assert scheduler.num_inference_steps == before["num_inference_steps"]


def test_a_divergence_is_reported_and_not_written():
    broken = trueup.Denoiser(lambda x, t: x * torch.inf, VP, "noise", (1, 2, 2), data_range=None)
    with pytest.raises(TrueupError, match="not finite"):
        trueup.sample(broken, 1, nfe=6)


def test_pictures_are_rounded_and_clipped():
    x = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).reshape(1, 1, 2, 3)
    assert pictures(x, (-1.0, 1.0)).flatten().tolist() == [0, 0, 128, 255, 255, 255]
    assert pictures(torch.tensor([[[[0.0, 0.5]]]]), (0.0, 1.0)).flatten().tolist() == [0, 128]


def test_a_grid_has_every_picture_in_reading_order():
    images = torch.arange(1, 6, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 1, 2, 2)
    sheet = grid(images, columns=3, gap=1)
    assert sheet.shape == (1, 5, 8)
    assert sheet[0, 0].tolist() == [1, 1, 255, 2, 2, 255, 3, 3]
    assert sheet[0, 3].tolist() == [4, 4, 255, 5, 5, 255, 255, 255]


def fill(output, images, size=2):
    for start in range(output.kept.done, len(images), size):
        index = torch.arange(start, min(start + size, len(images)))
        output.add(index, images[index])
    output.finish()


def test_what_is_written_can_be_read_back(tmp_path):
    images = (torch.arange(5 * 3 * 4 * 4) % 251).to(torch.uint8).reshape(5, 3, 4, 4)
    fill(Output(tmp_path / "x.npz", 5, {"seed": 0}), images)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert np.array_equal(archive["images"], images.permute(0, 2, 3, 1).numpy())
        assert json.loads(str(archive["settings"])) == {"seed": 0}
    fill(Output(tmp_path / "folder", 5, {}), images)
    read = np.stack([np.asarray(Image.open(tmp_path / "folder" / f"{i:06d}.png")) for i in range(5)])
    assert np.array_equal(read, images.permute(0, 2, 3, 1).numpy())
    fill(Output(tmp_path / "x.png", 5, {}), images)
    assert np.asarray(Image.open(tmp_path / "x.png")).shape == (10, 16, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "x.npz", "x.png"]  # nothing left over


def test_a_picture_that_was_taken_away_is_drawn_again(tmp_path):
    images = (torch.arange(5 * 4 * 4) % 251).to(torch.uint8).reshape(5, 1, 4, 4)
    fill(Output(tmp_path / "folder", 5, {}), images)
    (tmp_path / "folder" / "000003.png").unlink()
    fill(Output(tmp_path / "folder", 5, {}), images)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "folder" / "000003.png")), images[3, 0].numpy())


def test_interrupted_sampling_goes_on_and_ends_the_same(tmp_path):
    denoiser = exact_for("discrete", batch_size=3)
    settings = {"solver": "ddim", "nfe": 4, "progress": False}

    def draw(path, stop=None):
        output = Output(path, 8, {"seed": 0})
        for number, (index, x) in enumerate(sample_batches(denoiser, 8, start=output.kept.done, **settings)):
            if number == stop:
                return
            output.add(index, x)
        output.finish()

    draw(tmp_path / "once.npz")
    draw(tmp_path / "twice.npz", stop=1)
    assert not (tmp_path / "twice.npz").exists()
    draw(tmp_path / "twice.npz")
    once, twice = (np.load(tmp_path / name)["images"] for name in ("once.npz", "twice.npz"))
    assert np.abs(once - twice).max() < 1e-6 * np.abs(once).max()


# What is in a folder and not ours stays as it is


def everything(folder):
    """Every file and link below a folder, with what it holds; but for our note."""
    return {
        str(p.relative_to(folder)): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if (p.is_symlink() or p.is_file()) and p.name != "samples.json"
    }


def with_belongings(folder):
    """Things a user may keep beside samples."""
    (folder.parent / "precious.png").write_bytes(b"precious")
    for name in (
        "cal.safetensors",
        "000099.safetensors",
        "photo.png",
        "000123.png",
        ".x.tmp-deadbeef",
        "a.txt",
    ):
        (folder / name).write_bytes(name.encode())
    (folder / "000124.png").symlink_to(folder.parent / "precious.png")
    (folder / "000125.png").mkdir()
    return everything(folder)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("drawn", [0, 4])
def test_nothing_but_our_own_samples_is_ever_deleted(tmp_path, force, drawn):
    """As after an early kill, nothing drawn yet; and with samples there."""
    images = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
    folder = tmp_path / "out"
    kept = Kept(folder, {"seed": 0})
    if drawn:
        kept.add_pictures(torch.arange(4), images)
    del kept
    ours = {f"{i:06d}.png" for i in range(drawn)}
    belongings = {name: held for name, held in with_belongings(folder).items() if name not in ours}
    if drawn and not force:
        with pytest.raises(TrueupError, match=r"another seed: .* force=True to replace them"):
            Kept(folder, {"seed": 1})
    else:
        new = Kept(folder, {"seed": 1}, force=force)
        assert new.done == 0
        assert everything(folder) == belongings
        new.add_pictures(torch.arange(3), images[:3])
        new.add(torch.arange(3), rows=torch.zeros(3))
        assert set(everything(folder)) - set(belongings) == {
            *(f"{i:06d}.png" for i in range(3)),
            "000000-000002.safetensors",
        }
        new.remove()
        assert everything(folder) == belongings
    assert {n: held for n, held in everything(folder).items() if n not in ours} == belongings
    assert (tmp_path / "precious.png").read_bytes() == b"precious"


def test_a_file_in_the_way_is_not_overwritten(tmp_path):
    kept = Kept(tmp_path / "out", {})
    (tmp_path / "out" / "000001.png").write_bytes(b"mine")
    with pytest.raises(TrueupError, match=r"000001.png is in the way, and not by trueup"):
        kept.add_pictures(torch.arange(2), torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    assert (tmp_path / "out" / "000001.png").read_bytes() == b"mine"


def test_links_are_not_followed(tmp_path):
    """One of our samples was replaced by a link, the folder is one, or its note is."""
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    Kept(tmp_path / "out", {"seed": 0}).add_pictures(torch.arange(2), images)
    target = tmp_path / "elsewhere.png"
    target.write_bytes(b"mine")
    (tmp_path / "out" / "000001.png").unlink()
    (tmp_path / "out" / "000001.png").symlink_to(target)
    assert Kept(tmp_path / "out", {"seed": 0}).done == 1
    new = Kept(tmp_path / "out", {"seed": 1}, force=True)
    assert (tmp_path / "out" / "000001.png").is_symlink()
    with pytest.raises(TrueupError, match="in the way"):
        new.add_pictures(torch.arange(2), images)
    assert target.read_bytes() == b"mine"
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(TrueupError, match="is a symbolic link: name the folder itself"):
        Kept(tmp_path / "link", {"seed": 1})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "samples.json").symlink_to(tmp_path / "out" / "samples.json")
    with pytest.raises(TrueupError, match="not empty, and not by trueup"):
        Kept(tmp_path / "other", {"seed": 2}, force=True)


@pytest.mark.parametrize("name", ["../precious.png", "/etc/passwd", "cal.safetensors", "000001.txt", 3, None])
def test_a_note_cannot_claim_what_is_not_ours(tmp_path, name):
    Kept(tmp_path / "out", {"seed": 0})
    note = tmp_path / "out" / "samples.json"
    claims = {"settings": {"seed": 0}, "files": [name]}
    note.write_text(json.dumps({**claims, "checksum": store._checksum(*claims.values())}))
    with pytest.raises(TrueupError, match="cannot be read"):
        Kept(tmp_path / "out", {"seed": 1}, force=True)


def test_an_edited_note_is_noticed(tmp_path):
    Kept(tmp_path / "out", {"seed": 0})
    note = tmp_path / "out" / "samples.json"
    note.write_text(note.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(TrueupError, match="checksum does not match"):
        Kept(tmp_path / "out", {"seed": 1})
    note.write_text("[" * 100_000)  # which Python's parser does not get out of by itself
    with pytest.raises(TrueupError, match="cannot be read"):
        Kept(tmp_path / "out", {"seed": 1})


def tripled(part):
    tensors = load_file(part)
    with safe_open(part, "pt") as file:
        save_file({name: 3 * values for name, values in tensors.items()}, part, file.metadata())


def lacking(part):
    tensors = {name: values for name, values in load_file(part).items() if name != "b"}
    save_file(tensors, part, {})


def rewritten(**tensors):
    """Somebody who writes files as we do, but not these."""

    def write(part):
        about, held = load_tensors(part, store._KIND)
        held |= tensors
        save_tensors(part, store._KIND, about, {name: v for name, v in held.items() if v is not None})

    return write


def from_another_run(part):
    Kept(part.parent.parent / "other", {"seed": 1}).add(torch.arange(4), a=torch.zeros(4), b=torch.ones(4))
    part.write_bytes((part.parent.parent / "other" / part.name).read_bytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tripled, "checksum"),
        (lacking, "not a file of trueup's"),
        (lambda part: part.write_bytes(part.read_bytes()[:-3]), "cannot be read"),
        (rewritten(b=None), "different things"),
        (rewritten(b=torch.zeros(3)), "does not hold 4 samples"),
        (rewritten(b=torch.tensor(1.0)), "does not hold 4 samples"),
        (rewritten(b=torch.full((4,), torch.nan)), "not finite"),
        (from_another_run, "of another run"),
    ],
)
def test_a_changed_part_is_not_gone_on_from(tmp_path, damage, words):
    kept = Kept(tmp_path / "k", {"seed": 0})
    kept.add(torch.arange(4), a=torch.arange(4.0), b=torch.ones(4))
    kept.add(torch.arange(4, 8), a=torch.arange(4.0), b=torch.ones(4))
    damage(tmp_path / "k" / "000000-000003.safetensors")
    with pytest.raises(TrueupError, match=words) as refused:
        kept.tensors(8)
    assert "\n" not in str(refused.value)
    assert re.search("delete .* to start over", str(refused.value))


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_other_labels_are_noticed_however_many_there_are(tmp_path, kind):
    """A tensor of more than 1,000 prints its ends alone."""
    labels = [i % 10 for i in range(5000)]
    other = [*labels[:2500], 7, *labels[2501:]]
    Kept(tmp_path / "k", {"set of labels": kind(labels)}).add(torch.arange(4), rows=torch.zeros(4))
    assert Kept(tmp_path / "k", {"set of labels": kind(labels)}).done == 4
    with pytest.raises(TrueupError, match="another set of labels"):
        Kept(tmp_path / "k", {"set of labels": kind(other)})


def test_what_a_kill_left_half_written_is_cleared(tmp_path):
    kept = Kept(tmp_path / "k", {})
    kept.add(torch.arange(4), rows=torch.zeros(4))
    for name in (".samples.json.tmp-00000000", ".000000-000003.safetensors.tmp-00000000"):
        (tmp_path / "k" / name).write_bytes(b"half")
    del kept
    assert Kept(tmp_path / "k", {}).done == 4
    assert {p.name for p in (tmp_path / "k").iterdir()} == {"samples.json", "000000-000003.safetensors"}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".samples.json.tmp-00000000").write_bytes(b"half")  # killed before anything else
    assert Kept(tmp_path / "new", {}).done == 0


def test_one_file_leaves_what_somebody_put_beside_its_parts(tmp_path):
    output = Output(tmp_path / "x.npz", 2, {})
    output.add(torch.arange(2), torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    (tmp_path / "x.npz.run" / "mine.txt").write_text("mine")
    output.finish()
    assert (tmp_path / "x.npz").exists()
    assert [p.name for p in (tmp_path / "x.npz.run").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("prepare", "path", "words"),
    [
        (lambda p: (p / "full").mkdir() or (p / "full" / "a.txt").write_text("mine"), "full", "not empty"),
        (lambda p: (p / "x.npz").write_text("mine"), "x.npz", "exists"),
        (lambda p: (p / "x").write_text("mine"), "x", "is a file"),
        (lambda p: (p / "x.png").mkdir(), "x.png", "is a directory"),
        (lambda p: None, "nowhere/x.npz", "not a directory"),
        (
            lambda p: Kept(p / "old", {"seed": 1}).add(torch.arange(1), rows=torch.zeros(1)),
            "old",
            "another seed",
        ),
        (lambda p: None, "x.jpg", "folder of PNGs"),
    ],
)
def test_nothing_of_the_users_is_overwritten(tmp_path, prepare, path, words):
    prepare(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(TrueupError, match=words):
        Output(tmp_path / path, 4, {"seed": 0})
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_parts_of_other_sizes_fit_together(tmp_path):
    kept = Kept(tmp_path / "k", {})
    rows = torch.arange(10)
    kept.add(torch.arange(4), rows=rows[:4])
    kept.add(torch.arange(2, 7), rows=rows[2:7])  # written again in larger batches
    kept.add(torch.arange(7, 10), rows=rows[7:])
    assert kept.tensors(9)["rows"].tolist() == list(range(9))
    del kept
    assert Kept(tmp_path / "k", {}).done == 10


def test_a_missing_part_is_noticed(tmp_path):
    kept = Kept(tmp_path / "k", {})
    kept.add(torch.arange(4), rows=torch.arange(4))
    kept.add(torch.arange(6, 9), rows=torch.arange(6, 9))
    with pytest.raises(TrueupError, match="lacks sample 4"):
        kept.tensors(9)


def test_samples_being_replaced_are_never_taken_for_new_ones(tmp_path, monkeypatch):
    old = Kept(tmp_path / "k", {"seed": 0})
    old.add(torch.arange(4), rows=torch.zeros(4))
    del old

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trueup.sampling.store.Kept._delete", killed)  # while the old ones go
        with pytest.raises(KeyboardInterrupt):
            Kept(tmp_path / "k", {"seed": 1}, force=True)
    new = Kept(tmp_path / "k", {"seed": 1})
    assert new.done == 0
    assert not list((tmp_path / "k").glob("*.safetensors"))


def test_settings_that_came_to_nothing_do_not_stand_in_the_way(tmp_path):
    Kept(tmp_path / "k", {"seed": 0})
    assert Kept(tmp_path / "k", {"seed": 1}).done == 0


def test_two_at_once_are_refused(tmp_path):
    first = Kept(tmp_path / "k", {})
    with pytest.raises(TrueupError, match="another process"):
        Kept(tmp_path / "k", {})
    del first
    Kept(tmp_path / "k", {})


def test_generated_images_stand_in_for_data_and_the_calibration_says_so(tmp_path):
    mixture = GaussianMixture(torch.zeros(1, 1, 8, 8), 0.3)
    denoiser = mixture.denoiser(VP, distortion=lambda eps, u, lam: 0 * eps + 0.1)
    denoiser.data_range = (-1.0, 1.0)
    data = generate(denoiser, 60, nfe=12, folder=tmp_path / "g")
    assert data.images.dtype == torch.uint8
    assert data.images.shape == (60, 1, 8, 8)
    again = generate(denoiser, 60, nfe=12, folder=tmp_path / "g")
    assert torch.equal(again.images, data.images)
    cal = trueup.calibrate(denoiser, data, trust=True)
    assert cal.generated["nfe"] == 12
    assert cal.generated["solver"] == repr(DPMSolver(3))
    assert "60 generated images" in cal.summary()
    assert "model's own samples" in cal.summary()
    cal.save(tmp_path / "c.trueup.safetensors")
    assert trueup.load(tmp_path / "c.trueup.safetensors").generated == cal.generated
    # Where little is left of the images, any will do to see that eps is off by 0.1.
    assert float(cal.correction.shift_map()[-1].mean()) == pytest.approx(0.1, rel=0.2)


def test_a_mistake_makes_no_folder(tmp_path):
    with pytest.raises(TrueupError, match="at least 3"):
        generate(GAUSSIAN.denoiser(VP), 4, nfe=2, folder=tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_generated_images_are_not_those_that_are_judged_later():
    denoiser = GAUSSIAN.denoiser(VP)
    data = generate(denoiser, 8, nfe=6)
    judged = trueup.sample(denoiser, 8, nfe=6)
    assert float((data.images[:, None] - judged[None]).flatten(2).abs().amax(2).min()) > 1e-3


def test_generated_images_of_a_conditional_network_carry_their_labels():
    denoiser, _ = conditional()
    data = generate(denoiser, 4, nfe=6, labels=[0, 2])
    assert [int(data[i][1]) for i in range(4)] == [0, 2, 0, 2]
    assert float(data[1][0].mean()) == pytest.approx(1.0, abs=0.3)


def test_solvers_describe_themselves():
    assert DPMSolver(2, allocation="adaptive").name == "dpm-solver-2-adaptive"
    assert "DDIMScheduler(" in repr(as_solver("ddim", GAUSSIAN.denoiser(VP)))
