"""Solvers fitted to a model: what they are for, what they refuse, and calibrations that are theirs alone."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

import trueup
from trueup import bands
from trueup.bands import Bands, along_last_axes, dct_matrix
from trueup.calibration import Calibration, FittedSolver
from trueup.errors import MismatchError, TrueupError
from trueup.figure import curves
from trueup.fitted import MEMORY
from trueup.parametrization import Parametrization
from trueup.process import EDM, ContinuousVP, DiscreteVP
from trueup.report import as_json, as_text
from trueup.sampling.rules import RULES, Grid
from trueup.sampling.steps import Levels

from calibrations import fitted_solver, make
from tiny import tiny_unet

SHAPE = (1, 4, 4)
VP = DiscreteVP.linear()


def random_solver(seed=0, noise=VP, shape=SHAPE, **changes) -> FittedSolver:
    generator = torch.Generator().manual_seed(seed)
    return fitted_solver(shape, noise, torch.ones(Bands(shape[1:]).count).double(), generator, **changes)


def of_rule(name, noise, nfe, shape=SHAPE) -> FittedSolver:
    """A rule as it is."""
    rule = next(rule for rule in RULES if rule.name == name)
    levels = Levels.at(noise, Grid().times(noise, nfe))
    how = {"nfe": nfe, "history": rule.history, "weights": rule.weights(levels), "t": levels.t}
    how |= {"alpha": torch.cat([levels.log_alpha.exp(), torch.ones(1)])}
    how |= {"sigma": torch.cat([levels.sigma, torch.zeros(1)]), "provenance": {"base": name}}
    made = random_solver(noise=noise, shape=shape, **how)
    return replace(made, tables=0 * made.tables, offset=0 * made.offset)


def test_a_calibration_finds_its_solvers():
    solvers = tuple(random_solver(nfe=n, guidance=g) for n, g in ((5, 1.0), (8, 1.0), (8, 2.0)))
    cal = make(SHAPE, VP, solvers=solvers)
    cal.solvers = solvers
    assert cal.solver(8) is solvers[1]
    assert cal.solver(8, 2) is solvers[2]
    there = "has those for 5 evaluations, 8 evaluations, 8 evaluations \\(guidance 2\\)"
    with pytest.raises(
        MismatchError, match=f"^no solver for 6 evaluations: this calibration {there}: fit one"
    ):
        cal.solver(6)
    with pytest.raises(MismatchError, match="for 5 evaluations is for guidance 1, not 3: pass guidance=1"):
        cal.solver(5, 3.0)
    with pytest.raises(MismatchError, match="no solver for 8 evaluations: this calibration has none"):
        make().solver(8)
    with pytest.raises(MismatchError, match="has none"):
        make().scheduler(8)


def test_many_solvers_are_kept_in_one_file(tmp_path):
    solvers = tuple(random_solver(n, nfe=n, guidance=g) for n, g in ((1, 1.0), (8, 1.0), (8, 2.0), (30, 1.0)))
    cal = make(SHAPE, VP)
    cal.solvers = solvers
    cal.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert [s.identity for s in loaded.solvers] == [s.identity for s in solvers]
    cal.solvers = (*solvers, random_solver(nfe=8, guidance=1.0))
    with pytest.raises(TrueupError, match="cannot save this calibration: two of its solvers are for 8 evalu"):
        cal.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["shape", "process"])
def test_a_solver_of_something_else_is_not_saved(tmp_path, kind):
    cal = make(SHAPE, VP)
    cal.solvers = (random_solver(shape=(1, 8, 8)) if kind == "shape" else random_solver(noise=EDM()),)
    if kind == "process":
        cal = make(SHAPE, ContinuousVP())
        cal.solvers = (random_solver(),)
    with pytest.raises(TrueupError, match="cannot save this calibration"):
        cal.save(tmp_path / "a")


def test_the_summary_says_what_a_solver_is_for():
    made = random_solver(nfe=8, guidance=2.0)
    expected = "solver for 8 evaluations (guidance 2): x0-3, even in log-SNR, fitted"
    assert made.summary() == f"{expected}; whitened error to the limit 0.21 -> 0.08"
    assert repr(made) == f"<{made.summary()}>"
    assert replace(made, evidence={}).summary() == expected
    assert replace(made, evidence={"error": 0.5}).summary() == f"{expected}; whitened error to the limit 0.5"
    known = {"error": 0.5, "error_se": 0.04}
    told = f"{expected}; whitened error to the limit 0.5 ± 0.08"
    assert replace(made, evidence=known).summary() == told
    plain = replace(made, tables=0 * made.tables, offset=0 * made.offset, guidance=1.0, evidence={})
    assert plain.summary() == "solver for 8 evaluations: x0-3, even in log-SNR, as it is"
    few, enough = (
        replace(plain, provenance={**plain.provenance, "trajectories": count}).summary()
        for count in (32, 128)
    )
    assert few == f"{plain.summary()} (by 32 trajectories; 128 may improve it)"
    assert enough == plain.summary()
    cal = make(SHAPE, VP)
    cal.solvers = (made,)
    assert made.summary() in cal.summary()
    (said,) = as_json(cal)["solvers"]
    assert said["nfe"] == 8
    assert said["evidence"] == {"error_base": 0.21, "error": 0.08, "unknown": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nfe": 0}, "1 to 1000 evaluations, not 0"),
        (
            {"t": torch.zeros(3)},
            r"t of a solver for 2 evaluations \(guidance 1.5\) has shape \(2,\), not \(3,\)",
        ),
        ({"history": "score"}, "remembers eps or x0, not 'score'"),
        ({"gains": {"base": "x"}}, "gains are a form of the correction, not dict"),
        ({"guidance": math.nan}, "guidance of a solver is a number, not nan"),
        ({"guidance": "2"}, "guidance of a solver is a number, not '2'"),
        ({"evidence": {"error": math.inf}}, "error of a solver is a number, not inf"),
        ({"evidence": {"error": "low"}}, "error of a solver is a number, not 'low'"),
        ({"weights": torch.zeros(2, 3)}, r"weights of a solver .* has shape \(2, 4\), not \(2, 3\)"),
        ({"tables": torch.zeros(2, 4, 1, 3)}, "tables of a solver"),
        ({"tables": torch.zeros(2, 4, 2, 5)}, "tables of a solver"),
        ({"offset": torch.zeros(2, 1, 15)}, "offset of a solver"),
        ({"alpha": torch.ones(2)}, "alpha of a solver"),
        (
            {"weights": torch.full((2, 4), math.nan)},
            "weights of a solver .* holds values that are not finite",
        ),
        ({"t": torch.tensor([1.0, 2.0])}, "times of a solver .* do not fall"),
        ({"t": torch.tensor([1.0, 1.0])}, "times of a solver .* do not fall"),
        ({"sigma": torch.tensor([2.0, 1.0, 0.5])}, "the last state of .* is no sample"),
        ({"alpha": torch.tensor([0.1, 0.2, 0.9])}, "the last state of .* is no sample"),
        ({"alpha": torch.tensor([0.9, 0.01, 1.0])}, "noise of a solver .* does not fall"),
    ],
)
def test_nonsense_is_refused_at_birth(changes, words):
    with pytest.raises(TrueupError, match=words) as caught:
        random_solver(**changes)
    assert "\n" not in str(caught.value)


# Steps


@pytest.mark.parametrize("noise", [VP, ContinuousVP(), EDM()], ids=lambda p: p.kind)
@pytest.mark.parametrize("name", ["eps-3", "x0-3", "singlestep-3"])
def test_where_too_little_is_remembered_a_step_is_of_first_order(noise, name):
    """Of data that are a point every network knows everything, and first order is exact."""
    solver = of_rule(name, noise, 7)
    x0, eps = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for start in range(7):
        x, history = solver.alpha[start] * x0 + solver.sigma[start] * eps, []
        for i in range(start, 7):
            history = [eps if solver.history == "eps" else x0, *history][:3]
            x = solver.step(i, x, history)
            assert torch.allclose(x, solver.alpha[i + 1] * x0 + solver.sigma[i + 1] * eps, atol=1e-8)


def test_a_short_memory_leaves_tables_out_and_a_full_one_does_not():
    solver = random_solver(nfe=4)
    x, *history = torch.randn(4, 2, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    on_x, on_h = solver.first_order(2)
    assert torch.allclose(solver.step(2, x, history[:1]), on_x * x + on_h * history[0])
    assert torch.allclose(solver.step(2, x, history[:2]), on_x * x + on_h * history[0])
    bands, parts = solver.bands, torch.stack([x, *history])
    spread = bands.spread(solver.tables[2]).reshape(4, 1, *SHAPE)
    made = bands.idct((bands.dct(parts) * spread).sum(0) + solver.offset[2].reshape(SHAPE))
    expected = torch.einsum("j,jbchw->bchw", solver.weights[2], parts) + made
    assert torch.allclose(solver.step(2, x, history), expected)


def test_a_step_that_uses_one_answer_needs_no_other():
    solver = of_rule("ddim", VP, 5)
    assert [solver.memory(i) for i in range(5)] == [1] * 5
    assert [of_rule("x0-3", VP, 5).memory(i) for i in range(5)] == [1, 2, 3, 3, 1]
    x, h = torch.randn(2, 2, *SHAPE, dtype=torch.float64)
    for i in range(5):
        on_x, on_h = solver.first_order(i)
        assert torch.allclose(solver.step(i, x, [h]), on_x * x + on_h * h)


@pytest.mark.parametrize("kind", ["noise", "data", "velocity", "flow"])
@pytest.mark.parametrize("history", ["eps", "x0"])
def test_what_is_remembered_is_what_the_network_means(kind, history):
    solver, parametrization = random_solver(history=history), Parametrization(kind)
    x0, eps = torch.randn(2, 2, *SHAPE, dtype=torch.float64)
    alpha, sigma = solver.alpha[1], solver.sigma[1]
    output = parametrization.target(x0, eps, alpha, sigma)
    found = solver.remembered(1, output, alpha * x0 + sigma * eps, parametrization)
    assert torch.allclose(found, eps if history == "eps" else x0)


def by_definition(solver, i, x, history):
    """A step in float64, term by term, and how large its terms are."""
    parts = torch.stack([x, *history]).double()
    tables, offset = solver.bands.spread_all(solver.tables[i]), solver.bands.fill(solver.offset[i])
    matrices = [dct_matrix(size) for size in solver.bands.spatial]
    z = (along_last_axes(parts, matrices) * tables[: len(parts), None]).sum(0) + offset
    added = along_last_axes(z, [matrix.T for matrix in matrices])
    terms = solver.weights[i, : len(parts)].reshape(-1, *[1] * x.ndim) * parts
    return terms.sum(0) + added, terms.abs().sum(0), float(z.abs().max())


@pytest.mark.parametrize("shape", [(4, 64, 64), (3, 48, 40), (2, 9), (2, 3, 6, 5)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_in_single_precision_is_its_definition_but_for_rounding(shape, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(bands, "WHOLE", 1)
        monkeypatch.setattr(bands, "KEPT", math.prod(shape) // 2)
    frequencies = bands.kept_frequencies(shape)
    of = Bands(shape[1:], None, frequencies)
    assert of.whole == whole
    generator = torch.Generator().manual_seed(2)
    tables = torch.randn(2, 1 + MEMORY, shape[0], of.count, generator=generator, dtype=torch.float64)
    offset = torch.randn(2, shape[0], of.length, generator=generator, dtype=torch.float64)
    x, *history = torch.randn(1 + MEMORY, 2, *shape, generator=generator)
    for size in (1e-3, 1.0):
        solver = random_solver(shape=shape, bands=of, tables=size * tables, offset=size * offset)
        expected, rule, largest = by_definition(solver, 1, x, history)
        made = solver.step(1, x, history)
        assert made.dtype == torch.float32
        assert made.is_contiguous()
        # The rule's part rounds like a sum of pixels; what was fitted, like a product of 2 x 2 matrices.
        slack = 2.0**-23 * (4 * rule + 8 * largest)
        assert ((made - expected).abs() <= slack).all()


def test_a_step_is_the_same_in_parts_and_of_any_memory_format(monkeypatch):
    solver = random_solver(shape=(2, 8, 8))
    parts = torch.randn(1 + MEMORY, 5, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    x, *history = parts
    made = solver.step(1, x, history)
    x, *history = (part.contiguous(memory_format=torch.channels_last) for part in parts)
    assert torch.allclose(solver.step(1, x, history), made, atol=1e-5)
    monkeypatch.setattr("trueup.fitted._AT_ONCE", 2 * 128)  # two samples
    assert torch.allclose(solver.step(1, x, history), made, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_has_gradients_whatever_the_first_ran_in(context):
    """What is kept for later steps does not come from inference mode."""
    solver = random_solver()
    x, *history = torch.randn(1 + MEMORY, 2, *SHAPE, generator=torch.Generator().manual_seed(1)).double()
    with context():
        solver.step(1, x, history)
    assert torch.autograd.gradcheck(
        lambda x, *history: solver.step(1, x, history), [part.requires_grad_() for part in (x, *history)]
    )


def test_copies_of_a_solver_leave_its_tables_behind():
    """They may be on a GPU, and are made again."""
    solver = random_solver()
    x, *history = torch.randn(1 + MEMORY, 2, *SHAPE)
    made = solver.step(1, x, history)
    for other in (copy.copy(solver), copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
        assert not other._ready
        assert torch.equal(other.step(1, x, history), made)


# Without data


@pytest.fixture
def denoiser():
    return trueup.Denoiser(tiny_unet(), VP, "noise", (1, 8, 8))


def test_a_calibration_without_data_has_solvers_alone(denoiser, tmp_path):
    cal = Calibration.without_data(denoiser)
    assert (cal.family, cal.gains, cal.data_images, cal.measured, cal.empty) == (
        "none",
        "none",
        0,
        False,
        True,
    )
    cal.solvers = (random_solver(shape=(1, 8, 8), nfe=8),)
    cal.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert loaded.identity == cal.identity
    assert loaded.solver(8, 1.5).identity == cal.solvers[0].identity
    assert loaded.process.agrees_with(VP)
    assert loaded.verdict() == "nothing was measured: the network is left as it is, with 1 solver for it."
    assert loaded.summary() == cal.summary()
    assert "without data" in loaded.summary()
    assert cal.solvers[0].summary() in loaded.summary()
    text = as_text(loaded)
    assert "loss" not in text
    assert text.splitlines()[-1].startswith("verdict: nothing was measured")
    assert as_json(loaded)["images"] == 0
    assert math.isnan(loaded.uncalibration.value)
    assert math.isnan(loaded.uncalibration_share.value)
    with pytest.raises(TrueupError, match="made without data"):
        curves(loaded)


@pytest.mark.parametrize(("noise", "kind"), [(VP, "noise"), (EDM(), "edm"), (ContinuousVP(), "velocity")])
def test_it_is_attached_and_changes_nothing(noise, kind, tmp_path):
    net = tiny_unet()
    parametrization = Parametrization(kind, 0.5 if kind == "edm" else None)
    denoiser = trueup.Denoiser(net, noise, parametrization, (1, 8, 8))
    Calibration.without_data(denoiser).save(tmp_path / "a")
    x, t = torch.randn(2, 1, 8, 8), float(noise.t_max)
    before, told = denoiser.predict(x, t), net(x, t).sample
    with trueup.attach(net, tmp_path / "a"):
        assert torch.equal(net(x, t).sample, told)
    with trueup.attach(denoiser, tmp_path / "a"):
        assert torch.equal(denoiser.predict(x, t), before)
    other = tiny_unet(block_out_channels=(4, 8))
    with pytest.raises(MismatchError, match="made for other weights"):
        trueup.attach(other, tmp_path / "a")


def test_a_conditional_network_is_bound_by_a_label():
    net = tiny_unet(num_class_embeds=3)
    from trueup.hf import as_denoiser

    denoiser = as_denoiser(net, scheduler={"_class_name": "DDPMScheduler", "beta_schedule": "linear"} | BETAS)
    assert Calibration.without_data(denoiser).provenance["binding"] is None  # nobody can tell
    cal = Calibration.without_data(denoiser, torch.tensor([1]))
    with trueup.attach(net, cal):
        net(torch.randn(1, 1, 8, 8), 5, class_labels=torch.tensor([1]))


BETAS = {"beta_start": 0.0001, "beta_end": 0.02}
