"""Solvers fitted to a model, and what samples say: against exact flows, closed forms and loops by hand."""

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.fft import dctn

import trueup
from by_hand import calibration_of
from trueup import process as processes
from trueup.analytic import GaussianMixture, KernelDensity
from trueup.bands import Bands
from trueup.calibration import Calibration
from trueup.errors import MismatchError, ModelError, TrueupError
from trueup.files import load_tensors, save_tensors
from trueup.fitting import fit_solver, judge, samplers, solve
from trueup.fitting.calibrating import labels_of
from trueup.fitting.gains import MATERIAL, choose
from trueup.fitting.kept import KIND
from trueup.fitting.moments import Miss, Moments, seen, whitened
from trueup.fitting.regress import fitted, regression, restored
from trueup.fitting.samplers import Row, Samplers
from trueup.fitting.search import TRIED, error_between, grids, search, search_cost
from trueup.fitting.solve import Fitter, Judged
from trueup.fitting.teacher import Teacher, deal, intervals_for
from trueup.hf import as_denoiser
from trueup.noise import normal
from trueup.parametrization import Parametrization
from trueup.progress import Progress
from trueup.sampling import DPMSolver, sample_batches
from trueup.sampling.draw import DEFAULT, choose_solver, network_for
from trueup.sampling.fitted import Fitted, follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid
from trueup.statistics import Number

from tiny import tiny_unet

CPU = torch.device("cpu")
VP = processes.ContinuousVP()
QUIET = {"progress": False}
MEAN = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]], dtype=torch.float64)
STD = 0.4
GAUSSIAN = GaussianMixture(MEAN, STD)
PROCESSES = {
    "discrete": (processes.DiscreteVP.linear(), "noise"),
    "continuous": (VP, "velocity"),
    "ve": (processes.VE(), "data"),
    "edm": (processes.EDM(), Parametrization("edm", 0.5)),
    "flow": (processes.Flow(), "flow"),
}


def shapes():
    """Four blurry blobs, 8x8."""
    at = torch.linspace(-1, 1, 8)
    places = ((-0.5, -0.5), (0.5, 0.2), (0.0, 0.6), (0.2, -0.4))
    blobs = [torch.exp(-((at[:, None] - a).square() + (at - b).square()) / 0.3) for a, b in places]
    return 1.6 * torch.stack(blobs)[:, None] - 0.8


BLOBS = GaussianMixture(0.3 * shapes(), 0.25)  # one mode flows into the next
APART = GaussianMixture(shapes(), 0.15)  # a small error sends a sample to another mode


def blobs(batch_size=128, data=BLOBS, **how):
    return data.denoiser(VP, **how).with_batch_size(batch_size)


def without_fit(solver):
    """The rule on its grid that a solver started from."""
    return replace(solver, tables=0 * solver.tables, offset=0 * solver.offset)


def draw(denoiser, solver, count, seed, nfe=None, **how):
    how = {"nfe": nfe or solver.nfe, "solver": Fitted(solver) if nfe is None else solver, **how}
    return trueup.sample(denoiser, count, seed=seed, **how, **QUIET)


def errors_by_hand(x, limit, spatial=(8, 8)):
    """Squared error over the limit's variance, every band of the DCT in its own units, (n,)."""
    bands = Bands(spatial)
    z, goal = (dctn(v.double().numpy(), axes=(2, 3), norm="ortho") for v in (x, limit))
    total = np.zeros(len(z))
    for band in range(bands.count):
        where = (bands.index == band).numpy()
        for channel in range(z.shape[1]):
            off = z[:, channel][:, where] - goal[:, channel][:, where]
            total += (off**2).sum(1) / goal[:, channel][:, where].var(0, ddof=1).mean()
    return torch.from_numpy(total / z[0].size)


# The search


@pytest.mark.parametrize("nfe", [4, 9])
@pytest.mark.parametrize("fit", [True, False])
def test_the_search_finds_what_trying_everything_finds(nfe, fit):
    network = Network(blobs())
    network.index = torch.arange(64)
    teacher = Teacher.of(network, 0)
    spent = []
    network.advance = spent.append
    found = search(network, teacher, nfe, 1.0, 3, fit)
    assert 0.6 * search_cost(nfe) < sum(spent) <= search_cost(nfe)  # fewer where ends coincide
    assert network.index.tolist() == list(range(64))
    bases = [solver.provenance["base"] for solver in found]
    assert len(bases) == 3
    assert fit or len({base.split(",")[0] for base in bases}) == 3
    spread = float(seen(teacher.samples, network.denoiser).std())
    by_hand, half = {}, teacher.rows(slice(32, 64))
    for rule in (rule for rule in RULES if rule.name in TRIED):
        for grid in grids(network.process, spread):
            solver = plan(network.denoiser, rule, grid, nfe)
            made = fitted(solver, network, teacher.rows(slice(32))) if fit else solver
            x = follow(made, network, half.noise)
            by_hand[solver.provenance["base"]] = float(errors_by_hand(x, half.samples).mean())
    # It looked at a few trajectories only, and fitted a few rules.
    assert min(by_hand[base] for base in bases) < (2 if fit else 1.25) * min(by_hand.values())


# The limit


def exact(process, x, t):
    """Where the probability flow of Gaussian data takes noise, at a time; None: at the data."""
    levels = [(process.alpha(s), process.sigma(s)) for s in (process.t_max, t) if s is not None]
    levels += [(torch.tensor(1.0), torch.tensor(0.0))] * (t is None)
    (first, at), spread = [a for a, _ in levels], [(a**2 * STD**2 + s**2).sqrt() for a, s in levels]
    return at * MEAN + (x * process.prior_std - first * MEAN) * spread[1] / spread[0]


@pytest.fixture(scope="module", params=PROCESSES)
def flow(request):
    process, kind = PROCESSES[request.param]
    network = Network(GAUSSIAN.denoiser(process, kind).with_batch_size(16))
    network.index = torch.arange(16)
    return process, Teacher.of(network, 5)


def test_the_limit_of_gaussian_data_is_the_exact_map_of_the_noise(flow):
    process, teacher = flow
    assert torch.equal(teacher.noise, normal(5, torch.arange(16), -1, (1, 2, 2), CPU))
    off = teacher.samples - exact(process, teacher.noise.double(), None)
    # 32 steps of third order; the last one leaves out what is left of the data's spread, (sigma/STD)^2 / 2.
    assert float(off.abs().max()) < 4e-3 * STD


def test_states_on_the_way_are_those_of_the_exact_flow(flow):
    process, teacher = flow
    low, high = float(teacher.lam[0]), float(teacher.lam[-1])
    for share in (0.0, 0.013, 0.3, 0.51, 0.77, 0.99, 1.0):
        lam = low + share * (high - low)
        t = process.t_of_lam(torch.tensor(lam, dtype=torch.float64))
        expected = exact(process, teacher.noise.double(), t)
        off = (teacher.at(lam) - expected).abs().max() / expected.std()
        assert float(off) < 1e-2  # a cubic through four of 41 levels
    assert torch.allclose(teacher.at(float(teacher.lam[7])), teacher.states[7], atol=1e-6)


def test_a_state_is_a_cubic_through_the_four_next_to_it():
    lam = torch.tensor([-3.0, -1.5, -1.0, 0.2, 0.9, 2.0, 2.5], dtype=torch.float64)
    cubic = [0.5 * v**3 - v**2 + 3 * v - 1 for v in lam.tolist()]
    noise = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    teacher = Teacher(noise, lam, [noise + value for value in cubic], noise)
    for at in (-2.9, -0.4, 0.5, 2.4):
        assert float(teacher.at(at)) == pytest.approx(0.5 * at**3 - at**2 + 3 * at - 1)
    for at, near in ((-2.9, range(4)), (-0.4, range(1, 5)), (0.5, range(2, 6)), (2.4, range(3, 7))):
        for node in range(7):
            one = Teacher(noise, lam, [noise + (i == node) for i in range(7)], noise)
            assert (float(one.at(at)) != 0) == (node in near)


def test_rows_and_batches_do_not_change_a_trajectory():
    network = network_for(blobs(5))
    network.index = torch.arange(12)
    whole = Teacher.of(network, 3)
    network.index = torch.arange(4, 9)
    part = Teacher.of(network, 3)
    assert torch.allclose(part.samples, whole.rows(slice(4, 9)).samples, atol=1e-5)
    assert torch.allclose(part.at(0.3), whole.rows(slice(4, 9)).at(0.3), atol=1e-5)


class Tabled(torch.nn.Module):
    """The ideal network of the blobs for whole timesteps, which it looks up."""

    def __init__(self, steps=1000):
        super().__init__()
        process = processes.DiscreteVP.linear(steps=steps)
        self.ideal = BLOBS.denoiser(process).network
        self.table = torch.nn.Embedding.from_pretrained(torch.arange(steps).double()[:, None])

    def forward(self, x_t, t):
        return self.ideal(x_t, self.table(t.long())[:, 0])


def test_a_network_of_whole_timesteps_is_asked_at_these_alone():
    told, net = [], Tabled()
    net.register_forward_pre_hook(lambda _, args: told.extend(args[1].tolist()))
    denoiser = trueup.Denoiser(net, processes.DiscreteVP.linear(), "noise", (1, 8, 8), batch_size=64)
    assert denoiser.takes_whole_times_only()
    told.clear()
    (made,) = fit_solver(denoiser, nfe=4, trajectories=32, **QUIET).solvers
    assert all(isinstance(t, int) for t in told)
    assert torch.equal(made.t, made.t.round())
    assert made.evidence["error"] < 0.2
    short = trueup.Denoiser(Tabled(60), respaced(60), "noise", (1, 8, 8))
    with pytest.raises(
        TrueupError, match=r"its fine solver has (\d+) of them: choose fewer evaluations, not 70"
    ):
        fit_solver(short, nfe=[4, 70], trajectories=32, **QUIET)
    with pytest.raises(TrueupError, match="choose fewer evaluations, not 70"):
        samplers(short, nfe=[4, 70], trajectories=8, **QUIET)
    few = trueup.Denoiser(Tabled(4), processes.DiscreteVP.linear(steps=4), "noise", (1, 8, 8))
    with pytest.raises(TrueupError, match="knows too few timesteps for a fine solver"):
        fit_solver(few, nfe=3, trajectories=32, **QUIET)


def respaced(steps):
    """So many of DDPM's thousand timesteps."""
    kept = torch.linspace(0, 999, steps).round().long()
    return processes.DiscreteVP(processes.DiscreteVP.linear().alphas_cumprod[kept])


@pytest.mark.parametrize(
    ("process", "size"),
    [
        (processes.DiscreteVP.cosine(), 1e-5),  # its last two timesteps are 3.5 apart in lam
        (processes.DiscreteVP.cosine(100), 1e-5),
        (respaced(100), 1e-3),
        (respaced(20), 0.03),
    ],
    ids=["cosine", "cosine of 100", "100 of 1,000", "20 of 1,000"],
)
def test_the_limit_at_whole_timesteps_is_that_of_the_flow(process, size):
    """Gaussian data, whose flow scales every coefficient, to the last timestep and what is expected there."""
    bands = Bands((8, 8))
    v = 0.25 / (1 + bands.index.double()) ** 1.5  # (8, 8)

    def ideal(x, t):
        alpha, sigma = process.scales(t.double().round(), x.double())
        return bands.idct(sigma * bands.dct(x.double()) / (alpha**2 * v + sigma**2)).to(x)

    denoiser = trueup.Denoiser(ideal, process, "noise", (1, 8, 8), data_range=None)
    assert denoiser.takes_whole_times_only()
    network = network_for(denoiser, None)
    deal(network, 64, 5)
    found = Teacher.of(network, 5)
    (a0, s0), (a1, s1) = ((process.alpha(t), process.sigma(t)) for t in (process.t_min, process.t_max))
    left = ((a0**2 * v + s0**2) / (a1**2 * v + s1**2)).sqrt() * a0 * v / (a0**2 * v + s0**2)
    exact = bands.idct(left * bands.dct(found.noise.double()))
    assert float(whitened(bands, found.samples, exact).mean()) < size
    assert len(found.lam) == len(found.lam.unique())


NONSENSE = {
    "nan": (lambda x, t: x * math.nan, "the network diverges even in small steps"),
    "growing": (lambda x, t: x * 1e9, "the network diverges even in small steps"),
    "huge": (lambda x, t: torch.full_like(x, 1e15), "the network diverges even in small steps"),
    "beyond": (lambda x, t: torch.full_like(x, 1e2), "all samples of this network look the same"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_network_that_diverges_gives_one_clear_line(kind, tmp_path):
    network, words = NONSENSE[kind]
    denoiser = trueup.Denoiser(network, VP, "noise", (1, 8, 8), batch_size=64)
    for work in (
        lambda: fit_solver(denoiser, nfe=4, trajectories=32, run=tmp_path / "run", **QUIET),
        lambda: samplers(denoiser, nfe=4, trajectories=8, **QUIET),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            work()
        assert "\n" not in str(caught.value)
        assert "trueup check" in str(caught.value)


# Regression

BANDS = Bands((8, 8))


def normals(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *dims: torch.randn(*dims, generator=generator, dtype=torch.float64)


def test_a_linear_map_of_the_parts_is_found_exactly():
    z = normals(0)
    parts, tables, offset = 3 * z(3, 4000, 2, 64) + 1, z(3, 2, BANDS.count), z(2, 64)
    found, shift = regression(BANDS, parts, (BANDS.spread(tables)[:, None] * parts).sum(0) + offset)
    assert found.shape == tables.shape
    assert shift.shape == offset.shape
    assert torch.allclose(found, tables, rtol=5e-3)
    assert torch.allclose(shift, offset, atol=0.05)


def test_of_few_trajectories_a_map_is_kept_but_for_what_they_cannot_confirm():
    """All of a band's slopes are scaled alike, and by less the more values there are: 1 - O(1/(n size))."""
    z = normals(0)
    parts, tables = z(3, 48, 2, 64), z(3, 2, BANDS.count)
    found, _ = regression(BANDS, parts, (BANDS.spread(tables)[:, None] * parts).sum(0))
    scale = found / tables
    assert torch.allclose(scale, scale[0].expand_as(scale), rtol=2e-3)  # the ridge is 1e-4
    assert (scale < 1).all()
    assert (1 - scale[0] < 24 / (48 * BANDS.sizes)).all()


def test_units_do_not_matter_to_a_regression():
    z = normals(1)
    parts, residual = z(2, 48, 1, 64), z(48, 1, 64)
    residual = residual + 0.7 * parts[0] - 0.4 * parts[1] + 0.5
    tables, offset = regression(BANDS, parts, residual)
    scale = torch.tensor([1e3, 1e-3]).double()
    scaled, shifted = regression(BANDS, parts * scale[:, None, None, None], 10 * residual)
    assert tables.abs().max() > 0.5
    assert torch.allclose(scaled, 10 * tables / scale[:, None, None], rtol=1e-6)
    assert torch.allclose(shifted, 10 * offset, rtol=1e-6)


def test_noise_is_not_fitted():
    """A residual that is independent of the parts: of 40 seeds next to nothing is kept."""
    kept, cost, plain = [], [], []
    for seed in range(40):
        z = normals(seed)
        parts, residual = z(4, 96, 2, 64), z(96, 2, 64)
        tables, offset = regression(BANDS, parts, residual)
        kept.append((tables != 0).any(0).double().mean())
        fresh, other = z(4, 200, 2, 64), z(200, 2, 64)
        change = (other - (BANDS.spread(tables)[:, None] * fresh).sum(0) - offset).square() - other.square()
        cost.append(change.mean())
        # of least squares without a confirmation: 4 slopes of 96 rows, and a mean
        least = other - residual.mean(0)
        plain.append((least.square() - other.square()).mean())
    assert float(torch.stack(kept).mean()) < 0.02
    assert float(torch.stack(cost).mean()) < 0.1 * float(torch.stack(plain).mean())


def test_what_is_not_sure_is_shrunk_and_what_is_sure_is_kept():
    """One band has a slope, the others noise alone; the more noise there is on top, the less is kept."""
    z = normals(2)
    slope = torch.zeros(2, 1, BANDS.count).double()
    slope[0, 0, 3] = 0.5
    parts, noise = z(2, 64, 1, 64), z(64, 1, 64)
    signal = (BANDS.spread(slope)[:, None] * parts).sum(0)
    found = [regression(BANDS, parts, signal + size * noise)[0][0, 0] for size in (0.01, 1.0, 30.0)]
    assert found[0][3] == pytest.approx(0.5, rel=0.1)
    assert 0.2 < found[1][3] < 0.7
    assert found[2][3] == 0
    for tables in found:
        assert float(tables[[0, 1, 2, 4, 5, 6]].abs().max()) < 0.1


def test_parts_that_never_change_explain_nothing():
    z = normals(3)
    parts = torch.stack([torch.ones(1000, 1, 64).double(), z(1000, 1, 64)])
    tables, offset = regression(BANDS, parts, 2.0 + 0.5 * parts[1])
    assert torch.isfinite(tables).all()
    assert torch.allclose(tables[1], torch.tensor(0.5).double(), atol=0.01)
    assert torch.allclose(offset + BANDS.spread(tables[0]), torch.tensor(2.0).double(), atol=0.01)


def test_an_error_beyond_all_numbers_stays_beyond_them():
    network, x = Network(blobs()), torch.zeros(4, 1, 8, 8).double()
    x[1], x[2] = 1e200, math.nan  # a square of the first is infinite
    base = plan(network.denoiser, RULES[0], Grid(), 3)
    limit = normal(0, torch.arange(4), 0, (1, 8, 8), CPU)
    network.denoiser.data_range = None
    errors = error_between(base, network, x, Teacher(limit, torch.zeros(1), [], limit))
    assert torch.isfinite(errors).tolist() == [True, False, False, True]
    assert (errors[1:3] == math.inf).all()


# The fit

FEW = [3, 4, 5, 6, 7, 8]
SEEDS = (0, 1, 2)
COUNT = 64


@pytest.fixture(scope="module")
def fits():
    """Solvers for 3 to 8 evaluations of the blobs' ideal network, for some seeds."""
    return {seed: fit_solver(blobs(), nfe=FEW, trajectories=COUNT, seed=seed, **QUIET) for seed in SEEDS}


@pytest.fixture(scope="module")
def limit():
    """Fresh noise, and where 300 evaluations of another solver take it."""
    return draw(blobs(), DPMSolver(3, end=1e-3), 96, 77, nfe=300)


def compare(data, cal, limit):
    """The errors of every solver and of its base on fresh noise, by hand."""
    for made in cal.solvers:
        x, base = (draw(blobs(data=data), one, len(limit), 77) for one in (made, without_fit(made)))
        yield made, errors_by_hand(x, limit), errors_by_hand(base, limit)


def test_on_fresh_noise_the_fitted_solver_is_better_than_its_base(fits, limit):
    fitted = 0
    for cal in fits.values():
        assert [made.nfe for made in cal.solvers] == FEW
        for made, errors, before in compare(BLOBS, cal, limit):
            if made.empty:  # 16 trajectories were not sure
                continue
            fitted += 1
            assert made.provenance["fitted"] == "steps fitted to the limit"
            if before.mean() < 1e-4:  # at the limit, as far as the teacher's own steps can tell
                assert Number.mean(errors - before).low < 0
                continue
            assert Number.mean(errors - before).high < 0
            assert errors.mean() < 0.7 * before.mean()
    assert fitted >= len(FEW) * len(SEEDS) - 1


def test_it_is_never_surely_worse_and_says_where_it_is_not_surely_better():
    limit = draw(blobs(data=APART), DPMSolver(3, end=1e-3), 96, 77, nfe=300)
    said = []
    for seed in SEEDS:
        cal = fit_solver(blobs(data=APART), nfe=[3, 5, 8], trajectories=COUNT, seed=seed, **QUIET)
        for made, errors, before in compare(APART, cal, limit):
            assert not Number.mean(errors - before).low > 0
            said.append(made.provenance["fitted"])
            assert made.empty == (said[-1] == "not better fitted: steps and rule alone")
    assert {*said} == {
        "steps fitted to the limit",
        "not better fitted: steps and rule alone",
    }


def test_what_is_kept_is_hardly_worse_than_the_best_that_was_tried(monkeypatch):
    """Errors have long tails where samples change over to another mode, and are hardly ever surely less."""
    flow, judged, excess = APART.denoiser(processes.Flow()), Fitter.judged, []
    limit, tried = draw(flow, DPMSolver(3, end=1e-3), 256, 55, nfe=200), []
    monkeypatch.setattr(Fitter, "judged", lambda fitter, one: (tried.append(one), judged(fitter, one))[1])
    for seed in range(1, 4):
        made = fit_solver(flow, nfe=4, trajectories=64, seed=seed, **QUIET).solver(4)
        found = [float(errors_by_hand(draw(flow, one, 256, 55), limit).mean()) for one in (made, *tried)]
        excess.append(math.log(found[0] / min(found[1:])))
        assert len(tried) == 6
        tried.clear()
    assert sum(excess) / len(excess) < math.log(1.5)


def test_what_held_out_trajectories_say_is_true_on_fresh_noise(fits, limit):
    for cal in fits.values():
        made = cal.solver(3)
        found = errors_by_hand(draw(blobs(), made, 96, 77), limit)
        said, error = made.evidence["error"], made.evidence["error_se"]
        theirs = float(found.std()) / math.sqrt(len(found))
        assert abs(float(found.mean()) - said) < 4 * math.hypot(error, theirs)
        assert said < made.evidence["error_base"]


def test_the_last_step_is_never_touched(fits):
    for cal in fits.values():
        for made in cal.solvers:
            assert not made.tables[-1].any()
            assert not made.offset[-1].any()


def test_a_fit_depends_on_its_seed_and_on_nothing_else(fits):
    again = fit_solver(blobs(), nfe=[3, 5], trajectories=COUNT, seed=1, **QUIET)
    for nfe in (3, 5):  # two at once, or six
        assert again.solver(nfe).identity == fits[1].solver(nfe).identity
        assert again.solver(nfe).evidence == fits[1].solver(nfe).evidence
    assert fits[0].solver(3).identity != fits[1].solver(3).identity
    alone = fit_solver(blobs(), nfe=3, trajectories=COUNT, seed=1, **QUIET).solver(3)
    assert alone.identity == again.solver(3).identity
    other = fit_solver(blobs(7), nfe=3, trajectories=COUNT, seed=1, **QUIET).solver(3)
    assert other.provenance == alone.provenance
    # Products of other sizes round otherwise.
    assert torch.allclose(other.tables, alone.tables, atol=1e-3)
    assert torch.allclose(other.offset, alone.offset, atol=1e-3)


def test_solvers_are_added_to_those_there_are_and_replace_their_like(fits):
    cal = replace(fits[0], solvers=(fits[0].solver(3), fits[0].solver(8)))
    more = fit_solver(blobs(), cal, nfe=[3, 4], trajectories=COUNT, seed=1, **QUIET)
    assert sorted(made.nfe for made in more.solvers) == [3, 4, 8]
    assert more.solver(8) is cal.solver(8)
    assert more.solver(3).identity == fits[1].solver(3).identity
    assert [made.nfe for made in cal.solvers] == [3, 8]  # what was given stays as it was


def test_a_guidance_that_files_take_for_the_same_is_replaced(fits):
    near = replace(fits[0].solver(3), guidance=1.0 + 1e-9)
    cal = fit_solver(blobs(), replace(fits[0], solvers=(near,)), nfe=3, trajectories=COUNT, **QUIET)
    assert [made.guidance for made in cal.solvers] == [1.0]


def test_a_solver_that_was_fitted_to_another_form_of_the_correction_says_so():
    cal = fit_solver(blobs(), calibration_of(blobs(), BLOBS.sample(64), shift=0.01), **{**PAIR, "nfe": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trueup.sample(blobs(), 2, nfe=3, calibration=cal, **QUIET)
        trueup.sample(blobs(), 2, nfe=3, solver="ddim", calibration=replace(cal, gains="none"), **QUIET)
    for solver in (None, "fitted"):
        with pytest.warns(
            UserWarning, match="3 evaluations was fitted to the correction as 'sqrt', not 'none'"
        ):
            trueup.sample(blobs(), 2, nfe=3, solver=solver, calibration=replace(cal, gains="none"), **QUIET)


def test_samples_are_those_of_the_fitted_solver_by_default(fits, tmp_path):
    fits[0].save(tmp_path / "a")
    cal, denoiser, how = trueup.load(tmp_path / "a"), blobs(), {"seed": 4, **QUIET}
    made = trueup.sample(denoiser, 8, nfe=3, calibration=cal, **how)
    assert torch.allclose(made, draw(denoiser, fits[0].solver(3), 8, 4), atol=1e-5)
    assert torch.equal(made, trueup.sample(denoiser, 8, nfe=3, solver="fitted", calibration=cal, **how))
    other = trueup.sample(denoiser, 8, nfe=9, calibration=cal, **how)
    assert torch.equal(other, trueup.sample(denoiser, 8, nfe=9, solver="dpm-solver-3", **how))
    with pytest.raises(
        MismatchError, match="no solver for 9 evaluations: this calibration has those for 3 ev"
    ):
        trueup.sample(denoiser, 8, nfe=9, solver="fitted", calibration=cal, **how)
    with pytest.raises(MismatchError, match="fitted for 3 evaluations, not 4"):
        trueup.sample(denoiser, 8, nfe=4, solver=Fitted(cal.solver(3)), **how)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nfe": 1}, "2 to 500 evaluations, not 1"),
        ({"nfe": 600}, "2 to 500 evaluations, not 600"),
        ({"nfe": [4, 2.5]}, "2 to 500 evaluations, not 2.5"),
        ({"nfe": True}, "2 to 500 evaluations, not True"),
        ({"nfe": []}, "say how many evaluations: nfe"),
        ({"trajectories": 8}, "32 trajectories or more, not 8"),
        ({"trajectories": "64"}, "32 trajectories or more, not '64'"),
        ({"labels": [1]}, "takes no labels"),
        ({"guidance": 2.0}, "is unconditional, and takes no labels, prompts or guidance"),
        ({"seed": 1.5}, r"a seed is a whole number, at least 0 and below 2\*\*53, not .1.5."),
        ({"calibration": 7}, "expected a Calibration or its file, not int"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_a_line(changes, words):
    with pytest.raises(TrueupError, match=words) as caught:
        fit_solver(blobs(), **{"nfe": 4, **changes}, **QUIET)
    assert "\n" not in str(caught.value)


def test_a_calibration_of_another_network_is_refused():
    one, other = (
        trueup.Denoiser(tiny_unet(**how), processes.DiscreteVP.linear(), "noise", (1, 8, 8))
        for how in ({}, {"block_out_channels": (4, 8)})
    )
    cal = Calibration.without_data(one)
    with pytest.raises(MismatchError, match="made for other weights"):
        fit_solver(other, cal, nfe=3, trajectories=32, **QUIET)
    with pytest.raises(MismatchError, match="made for other weights"):
        samplers(other, cal, nfe=3, trajectories=8, **QUIET)


def test_a_trajectory_that_runs_away_costs_its_candidate_and_not_the_fit(monkeypatch, fits):
    calls, fitted = [], solve.fitted

    def poisoned(base, network, teacher):
        calls.append(base)
        if len(calls) == 1:
            states = [x.index_fill(0, torch.tensor([20]), math.nan) for x in teacher.states]
            teacher = replace(teacher, states=states)
            assert fitted(base, network, teacher) is base
        return fitted(base, network, teacher)

    monkeypatch.setattr(solve, "fitted", poisoned)
    (made,) = fit_solver(blobs(), nfe=3, trajectories=COUNT, **QUIET).solvers
    assert len(calls) == solve.TRIED
    assert not made.empty

    def singular(*args):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "solve", singular)
    (made,) = fit_solver(blobs(), nfe=3, trajectories=COUNT, **QUIET).solvers
    assert made.empty


def test_what_stays_finite_is_better_than_a_rule_that_does_not(monkeypatch):
    judged = Fitter.judged

    def lost(self, solver):
        found = judged(self, solver)
        return replace(found, errors=found.errors * math.inf) if solver.empty else found

    monkeypatch.setattr(Fitter, "judged", lost)
    (made,) = fit_solver(blobs(), nfe=3, trajectories=COUNT, **QUIET).solvers
    assert not made.empty
    assert math.isnan(made.evidence["error_base"])


@pytest.mark.parametrize("by_data", [False, True])
def test_the_cost_of_a_fit_is_what_it_evaluates_and_the_bar_ends_full(by_data, monkeypatch):
    bars, rows = [], []

    class Counted(Progress):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            bars.append(self)

        def update(self, more):
            rows.append(more)
            super().update(more)

    monkeypatch.setattr(solve, "Progress", Counted)
    data = (GaussianMixture(0.5 * shapes(), 0.07) if by_data else BLOBS).sample(400)
    cal = fit_solver(blobs(), calibration_of(blobs(), data), nfe=[3, 8], trajectories=COUNT, **QUIET)
    assert (cal.solver(8).evidence["limit_miss"] > solve.MATERIAL) == by_data
    (bar,) = bars
    assert sum(rows) == bar.done == bar.total
    assert sum(rows) <= solve.fit_cost(COUNT, 3, 8, by_data=by_data) <= 1.2 * sum(rows)  # ends coincide


# Labels and guidance


class Classes:
    """The ideal network of two classes of pictures, 9 for none of them; it remembers what it was told."""

    def __init__(self):
        kinds = torch.arange(32) % 2
        noise = 0.3 * torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.samples = (shapes()[kinds] + noise).clamp(-1, 1)
        self.each, self.all = KernelDensity(self.samples, kinds), KernelDensity(self.samples)
        self.told = []

    def __call__(self, x_t, t, y):
        self.told.append(y.clone())
        alpha, sigma = VP.alpha(t.double()), VP.sigma(t.double())
        eps = self.each.eps_given(x_t, alpha, sigma, y.clamp_max(1))
        none = (y == 9)[:, None, None, None]
        return torch.where(none, self.all.eps_given(x_t, alpha, sigma), eps)

    def denoiser(self):
        return trueup.Denoiser(
            self,
            VP,
            "noise",
            (1, 8, 8),
            conditional=True,
            null_label=9,
            batch_size=128,
            description="classes",
        )


def test_a_solver_is_for_one_guidance_scale():
    classes = Classes()
    denoiser, how = classes.denoiser(), {"labels": [0, 1], "trajectories": 32, **QUIET}
    cal = fit_solver(denoiser, nfe=3, guidance=2.0, **how)
    assert {*torch.cat(classes.told).tolist()} == {0, 1, 9}
    classes.told.clear()
    cal = fit_solver(denoiser, cal, nfe=3, **how)
    assert {*torch.cat(classes.told).tolist()} == {0, 1}
    assert [made.guidance for made in cal.solvers] == [2.0, 1.0]
    assert cal.solver(3, 2.0).identity != cal.solver(3).identity
    for guidance in (1.0, 2.0):
        chosen = choose_solver(None, denoiser, cal, 3, guidance)
        assert chosen.solver is cal.solver(3, guidance)
    assert choose_solver(None, denoiser, cal, 3, 1.5).name == DEFAULT
    with pytest.raises(MismatchError, match=r"for 3 evaluations is for guidance 2, not 1.5: pass guidance=2"):
        choose_solver("fitted", denoiser, cal, 3, 1.5)
    listed = samplers(denoiser, cal, nfe=3, guidance=2.0, labels=[0, 1], trajectories=8, **QUIET)
    assert [row.sampler for row in listed.rows].count("fitted") == 1


def told_to(labels, trajectories=32, **how):
    """Labels of all trajectories, of those that were fitted to, and of those held out."""
    classes = Classes()
    cal = fit_solver(classes.denoiser(), nfe=3, labels=labels, trajectories=trajectories, **how, **QUIET)
    told = {tuple(y.tolist()) for y in classes.told if len(y) > 1}
    (whole,) = (y for y in told if len(y) == trajectories)
    fitted = whole[: trajectories // 2]
    assert {fitted, whole[trajectories // 2 :]} <= told
    for y in told - {whole, fitted, whole[trajectories // 2 :]}:  # some of them, in the search
        assert any(fitted[i : i + len(y)] == y for i in range(len(fitted)))
    return whole, cal.solver(3)


def test_trajectories_take_labels_in_turn():
    whole, made = told_to([0, 1, 1])
    assert sum(whole) in (21, 22)
    assert all(sum(whole[i : i + 3]) == 2 for i in range(30))
    assert made.provenance["labels"] == [0, 1, 1]
    assert told_to([0] * 2000 + [1] * 2000)[1].provenance["labels"] == "4000 labels"
    classes = Classes()
    with pytest.raises(
        TrueupError, match="this network is conditional: say which labels to sample as labels"
    ):
        fit_solver(classes.denoiser(), nfe=3, **QUIET)


@pytest.mark.parametrize("seed", [0, 1])
def test_labels_of_the_whole_list_are_seen_however_it_is_sorted(seed):
    whole, _ = told_to([0] * 128 + [1] * 128, seed=seed)
    for part in (whole[:16], whole[16:]):
        assert {*part} == {0, 1}
    classes, cal = Classes(), calibration_of(Classes().denoiser(), Classes().samples, shift=0.1, y=[0])
    judge(classes.denoiser(), cal, labels=of_data([0] * 128 + [1] * 128), trajectories=16, seed=seed, **QUIET)
    assert {*torch.cat(classes.told).tolist()} == {0, 1}
    classes.told.clear()
    how = {"labels": [0] * 64 + [1] * 64, "trajectories": 16, "seed": seed}
    samplers(classes.denoiser(), nfe=3, **how, **QUIET)
    assert {*torch.cat(classes.told).tolist()} == {0, 1}


def of_data(labels):
    data = trueup.Images(torch.full((len(labels), 1, 8, 8), -0.9), labels=torch.tensor(labels))
    return labels_of(data, Classes().denoiser())


def test_moments_of_the_data_are_for_labels_as_they_are_in_the_data():
    """Pictures of both classes: those of one alone are not meant to look like them."""
    classes = Classes()
    denoiser, labels = classes.denoiser(), of_data([0, 1] * 16)
    cal = calibration_of(denoiser, classes.samples, shift=0.1, y=[0])
    how = {"nfe": 3, "trajectories": 32, **QUIET}
    alone = fit_solver(denoiser, cal, labels=[0], **how).solver(3)
    assert not {"miss", "limit_miss"} & {*alone.evidence}
    assert alone.provenance["fitted"] != solve.BROUGHT
    assert alone.provenance["labels"] == [0]
    both = fit_solver(denoiser, cal, labels=labels, **how).solver(3)
    assert {"miss", "limit_miss"} <= {*both.evidence}
    assert both.provenance["labels"] == "as in the data"
    for part in (labels[:1], labels.tolist(), labels + 0):
        assert Moments.of(cal, part) is None
    assert judge(denoiser, cal, labels=[0], **QUIET) is cal
    assert judge(denoiser, cal, labels=labels, trajectories=16, **QUIET).samples is not None


def test_labels_make_a_difference_to_what_is_fitted():
    made = [
        fit_solver(Classes().denoiser(), nfe=6, labels=labels, trajectories=128, **QUIET).solver(6)
        for labels in (0, 1)
    ]
    assert [solver.provenance["labels"] for solver in made] == [[0], [1]]
    assert made[0].identity != made[1].identity
    assert made[0].evidence["error_base"] != made[1].evidence["error_base"]


def test_a_solver_alone_can_be_attached_to_a_conditional_network(tmp_path):
    import diffusers

    net = tiny_unet(num_class_embeds=3)
    denoiser = as_denoiser(net, scheduler=diffusers.DDPMScheduler())
    fit_solver(denoiser, nfe=2, labels=[0, 1], trajectories=32, **QUIET).save(tmp_path / "a")
    x, y = torch.randn(1, 1, 8, 8), torch.tensor([1])
    before = net(x, 5, class_labels=y).sample
    with trueup.attach(net, tmp_path / "a"):
        assert torch.equal(net(x, 5, class_labels=y).sample, before)


# Interruptions


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """The run directory of a fit for 3 and 4 evaluations that was interrupted; `after`: so many solvers."""

    def at(after, model=None, **how):
        calls, search = [], solve.search

        def until(*args):
            calls.append(args)
            if len(calls) > after:
                raise KeyboardInterrupt
            return search(*args)

        with monkeypatch.context() as patch:
            patch.setattr(solve, "search", until)
            with pytest.raises(KeyboardInterrupt) as caught:
                fit_solver(model or blobs(), run=tmp_path / "run", **{**PAIR, **how})
        held.append(caught)  # as a notebook does: the traceback keeps the frames
        return tmp_path / "run"

    held = []
    return at


PAIR = {"nfe": [3, 4], "trajectories": 32, **QUIET}


@pytest.fixture(scope="module")
def pair():
    """The same, without an interruption."""
    return fit_solver(blobs(), **PAIR)


def no_trajectories(*args, **kwargs):
    raise AssertionError("trajectories are computed again")


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_fit_goes_on_to_the_same_solver(interrupted, monkeypatch, pair, after):
    run, searched, search = interrupted(after), [], solve.search
    assert (run / "trajectories.safetensors").exists()
    monkeypatch.setattr(Teacher, "of", no_trajectories)
    monkeypatch.setattr(solve, "search", lambda *a: (searched.append(a[2]), search(*a))[1])
    found = fit_solver(blobs(), run=run, **PAIR)
    assert searched == [3, 4][after:]
    assert [made.identity for made in found.solvers] == [made.identity for made in pair.solvers]
    assert [made.provenance for made in found.solvers] == [made.provenance for made in pair.solvers]
    for one, other in zip(found.solvers, pair.solvers, strict=True):
        assert one.evidence == other.evidence
        assert torch.equal(draw(blobs(), one, 4, 0), draw(blobs(), other, 4, 0))
    assert not run.exists()  # nothing needs to be kept


def spoil(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 255
    path.write_bytes(content)


def poison(path):
    """Right in every respect but that its states are nonsense."""
    meta, tensors = load_tensors(path, KIND)
    tensors["states"][:, 3] = math.nan
    save_tensors(path, KIND, {"key": meta["key"]}, tensors)


def shorten(path):
    meta, tensors = load_tensors(path, KIND)
    tensors["states"] = tensors["states"][:-1]
    save_tensors(path, KIND, {"key": meta["key"]}, tensors)


@pytest.mark.parametrize("damage", [spoil, poison, shorten, lambda path: path.write_bytes(b"")])
def test_damaged_trajectories_are_made_again(interrupted, pair, damage):
    run = interrupted(0)
    damage(run / "trajectories.safetensors")
    found = fit_solver(blobs(), run=run, **PAIR)
    assert [made.identity for made in found.solvers] == [made.identity for made in pair.solvers]


def test_damaged_solvers_are_made_again(interrupted, pair):
    run = interrupted(1)
    spoil(run / "solvers.trueup.safetensors")
    found = fit_solver(blobs(), run=run, **PAIR)
    assert [made.identity for made in found.solvers] == [made.identity for made in pair.solvers]


def test_what_another_fit_has_kept_is_not_believed(interrupted, pair):
    run = interrupted(1, seed=9)
    found = fit_solver(blobs(), run=run, **PAIR)
    assert [made.identity for made in found.solvers] == [made.identity for made in pair.solvers]


@pytest.mark.parametrize("other", [{"guidance": 2.0}, {"labels": [1, 0]}])
def test_what_was_kept_for_other_labels_or_guidance_is_not_believed(interrupted, other):
    denoiser, how = Classes().denoiser(), {**PAIR, "nfe": 3, "labels": [0, 1]}
    run = interrupted(0, denoiser, **{**how, **other})
    found, expected = (fit_solver(denoiser, run=where, **how) for where in (run, None))
    assert found.solver(3).identity == expected.solver(3).identity


def test_what_was_kept_for_other_data_is_not_believed(interrupted):
    first, other = (calibration_of(blobs(), data.sample(400)) for data in (BLOBS, APART))
    assert first.identity == other.identity  # neither corrects anything
    run = interrupted(1, calibration=other)
    found, expected = (fit_solver(blobs(), first, run=where, **PAIR) for where in (run, None))
    assert found.solver(3).evidence == expected.solver(3).evidence


def test_what_was_kept_for_labels_that_only_end_otherwise_is_not_believed():
    one, other = ([0] * 1500 + [end] * 1500 for end in (0, 1))
    keys = [
        Fitter(Classes().denoiser(), None, 32, labels, 1.0, 0, False, [3]).settings()
        for labels in (one, other)
    ]
    assert keys[0] != keys[1]
    assert keys[0] == Fitter(Classes().denoiser(), None, 32, one, 1.0, 0, False, [3]).settings()


def test_what_was_kept_for_a_network_without_weights_is_believed_by_its_answers(interrupted, pair):
    assert not blobs().fingerprint()
    other = blobs(data=APART)
    other.description = blobs().description
    run = interrupted(1, other)
    found = fit_solver(blobs(), run=run, **PAIR)
    assert [made.identity for made in found.solvers] == [made.identity for made in pair.solvers]


# The judges


def spectrum():
    return torch.linspace(2, 0.1, BANDS.count, dtype=torch.float64).repeat(2, 1)


def drawn(z, count, mean, variance):
    """Pictures with given moments of their coefficients."""
    coefficients = mean + z(count, 2, 64) * BANDS.spread(variance).sqrt()
    return BANDS.idct(coefficients.reshape(count, 2, 8, 8))


def test_samples_of_the_datas_own_gaussian_miss_nothing():
    """The stated 95% of intervals, or more: a miss of nothing has no first order."""
    numbers = []
    for seed in range(300):
        z = normals(seed)
        mean = z(2, 64)
        moments = Moments(BANDS, mean, spectrum(), 10**9)
        numbers.append(moments.miss(drawn(z, 64, mean, spectrum())).number)
    covered = sum(number.low <= 0 <= number.high for number in numbers) / 300
    assert covered > 0.92
    assert sum(number.low > 0 for number in numbers) / 300 < 0.05
    values = torch.tensor([number.value for number in numbers])
    assert abs(float(values.mean())) < 4 * float(values.std()) / math.sqrt(300)


def test_a_known_miss_is_the_divergence_of_two_gaussians():
    """(shift^2/v + r - 1 - log r)/2 for every coefficient, bands counted alike; 95% of intervals cover it."""
    ratio = torch.tensor([1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7]).double()
    shift = torch.tensor([0.3, 0.0, 0.1, 0.0, 0.05, 0.0, 0.0]).double()
    expected = float((0.5 * (shift.square() / spectrum() + ratio - 1 - ratio.log())).mean())
    inside, values = 0, []
    for seed in range(200):
        z = normals(seed)
        mean = z(2, 64)
        x = drawn(z, 128, mean + BANDS.spread(shift), ratio * spectrum())
        number = Moments(BANDS, mean, spectrum(), 10**9).miss(x).number
        inside += number.low <= expected <= number.high
        values.append(number.value)
    assert 0.9 < inside / 200 < 0.99
    assert sum(values) / 200 == pytest.approx(expected, rel=0.02)


def test_that_the_data_are_few_is_not_held_against_samples():
    """The mean of 20 images is off by v/20: samples of the truth do not miss it on average."""
    values = []
    for seed in range(200):
        z = normals(seed)
        truth = z(2, 64)
        mean = truth + z(2, 64) * (BANDS.spread(spectrum()) / 20).sqrt()
        values.append(Moments(BANDS, mean, spectrum(), 20).miss(drawn(z, 64, truth, spectrum())).number.value)
    found = torch.tensor(values)
    assert abs(float(found.mean())) < 4 * float(found.std()) / math.sqrt(200)
    assert float(found.std()) / math.sqrt(200) < 0.1 * 0.5 / 20  # what it would be otherwise


def test_paired_samples_differ_by_what_differs():
    z = normals(0)
    moments, x = Moments(BANDS, z(2, 64), spectrum(), 10**9), drawn(z, 64, z(2, 64), spectrum())
    miss = moments.miss(x)
    assert miss.less(miss).value == 0
    assert miss.less(miss).high == 0
    further = moments.miss(1.2 * x).less(miss)
    alone = moments.miss(1.2 * x).number.error + miss.number.error
    assert further.low > 0
    assert further.error < 0.5 * alone


def test_moments_at_a_level_are_those_of_noised_data():
    z = normals(1)
    data = drawn(z, 4000, z(2, 64), spectrum())
    mean, variance = dctn(data.numpy(), axes=(2, 3), norm="ortho").reshape(4000, 2, 64).mean(0), spectrum()
    goal, wanted = Moments(BANDS, torch.from_numpy(mean), variance, 100).at(0.8, 0.6)
    noised = BANDS.dct(0.8 * data + 0.6 * z(4000, 2, 8, 8)).flatten(2)
    found = BANDS.sum(noised.var(0)) / BANDS.sizes
    assert torch.allclose(noised.mean(0), goal, atol=0.06)  # 4 sigma/sqrt(4000)
    assert torch.allclose(found, wanted, rtol=0.1)


def test_a_known_perturbation_has_the_error_it_should():
    z = normals(2)
    limit = drawn(z, 50, z(2, 64), spectrum())
    delta = torch.linspace(0.1, 0.7, BANDS.count, dtype=torch.float64)
    x = limit + BANDS.idct(BANDS.spread(delta).reshape(8, 8))
    coefficients = dctn(limit.numpy(), axes=(2, 3), norm="ortho").reshape(50, 2, 64)
    expected = 0.0
    for k, (size, band) in enumerate(zip(BANDS.sizes.tolist(), BANDS.members, strict=True)):
        for channel in range(2):
            variance = coefficients[:, channel, band.numpy()].var(0, ddof=1).mean()
            expected += size * float(delta[k]) ** 2 / variance / 128
    found = whitened(BANDS, x, limit)
    assert found.shape == (50,)
    assert torch.allclose(found, torch.full((50,), expected, dtype=torch.float64), rtol=1e-6)
    noise = z(50, 2, 8, 8)
    assert torch.allclose(whitened(BANDS, limit + noise, limit), errors_by_hand(limit + noise, limit))


def test_what_lies_beyond_the_range_does_not_count():
    z = normals(3)
    limit = torch.where(z(50, 1, 8, 8) > 0, 1.5, -2.0) + 0.1 * z(50, 1, 8, 8)
    denoiser = blobs()
    denoiser.data_range = (-1.0, 1.0)
    x = limit + 0.3 * limit.sign()
    assert float(whitened(BANDS, x, limit).min()) > 0
    assert not whitened(BANDS, *(seen(v, denoiser) for v in (x, limit))).any()
    denoiser.data_range = None
    assert torch.equal(seen(x, denoiser), x)


def test_a_calibration_without_data_judges_nothing():
    assert Moments.of(None) is None
    assert Moments.of(Calibration.without_data(blobs())) is None
    data = BLOBS.sample(64)
    assert Moments.of(calibration_of(blobs(), data, generated={"nfe": 3})) is None
    found = Moments.of(calibration_of(blobs(), data))
    z = dctn(data.double().numpy(), axes=(2, 3), norm="ortho").reshape(64, 1, 64)
    assert np.allclose(found.mean.numpy(), z.mean(0))
    assert found.images == 64


# Gains


def pseudo(values):
    return Miss(torch.as_tensor(values).double())


SCATTER = torch.linspace(-1, 1, 16).double()


@pytest.mark.parametrize(
    ("none", "sqrt", "response", "expected"),
    [
        (0.1, 0.05, None, "sqrt"),
        (0.05, 0.1, None, "none"),
        (0.1, 0.1, None, "none"),  # nothing is gained
        (0.1, 0.05, 0.04, "response"),
        (0.1, 0.05, 0.05 - 0.5 * MATERIAL, "sqrt"),  # closer, but by too little
        (0.1, 0.05, 0.06, "sqrt"),
        (0.02, 0.05, 0.03, "none"),
        (0.035, 0.05, 0.03, "response"),
    ],
)
def test_the_form_that_is_closest_is_chosen_ties_to_the_derived_one(none, sqrt, response, expected):
    common = 0.1 * SCATTER  # which all share, since they start from the same noise
    misses = {"none": pseudo(none + common), "sqrt": pseudo(sqrt + common)}
    if response is not None:
        misses["response"] = pseudo(response + common)
    assert choose(misses) == expected


def test_a_form_that_is_closer_by_luck_is_not_chosen():
    misses = {"none": pseudo(0.3 + 0 * SCATTER), "sqrt": pseudo(0.1 + 0 * SCATTER)}
    assert choose({**misses, "response": pseudo(0.08 + 0.01 * SCATTER)}) == "response"
    assert choose({**misses, "response": pseudo(0.08 + 0.2 * SCATTER)}) == "sqrt"


PHASES = 7 * torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(1))


def noisy(eps, u, lam):
    """An error that nothing linear predicts, the same at every call."""
    return 0.3 * torch.sin(2 * u + PHASES)


@pytest.fixture(scope="module")
def excess():
    """A network whose innovation varies too much, calibrated."""
    denoiser = blobs(distortion=noisy)
    return denoiser, trueup.calibrate(denoiser, trueup.Images(BLOBS.sample(300)), trust=True, **QUIET)


def test_a_network_with_excess_noise_gets_the_square_root(excess):
    _, cal = excess
    assert (cal.correction.a > 0.05).any()
    assert cal.gains == "sqrt"
    told = cal.provenance["samples"]
    misses = told["miss"]
    assert {*misses} == {"none", "sqrt", "response", "change"}
    assert misses["sqrt"][0] < misses["none"][0]
    value, low, high = misses["change"]
    assert value == pytest.approx(misses["sqrt"][0] - misses["none"][0])
    assert low < value < high < 0
    assert misses["sqrt"][1] < 0 < misses["sqrt"][2]  # as near as 64 samples can tell
    assert misses["response"][1] > misses["sqrt"][2]
    assert told["trajectories"] == 64
    assert told["evaluations"] == 25


def test_what_samples_said_is_what_samples_say(excess):
    """Other noise, another solver with many steps, and the divergence of Gaussians by hand."""
    denoiser, cal = excess
    mean = cal.data_mean.reshape(1, 8, 8).numpy()
    for form in ("none", "sqrt"):
        x = draw(denoiser, DPMSolver(3, end=1e-3), 256, 5, nfe=60, calibration=replace(cal, gains=form))
        z = dctn(x.double().numpy(), axes=(2, 3), norm="ortho")
        nats = []
        for band in range(BANDS.count):
            where = (BANDS.index == band).numpy()
            v = float(cal.data_variance[0, band])
            ratio = z[:, 0][:, where].var(0, ddof=1).mean() / v
            off = ((z[:, 0].mean(0) - mean[0])[where] ** 2).mean() - ratio * v / 256 - v / cal.data_images
            nats.append(0.5 * off / v + 0.5 * (ratio - 1 - math.log(ratio)))
        value, low, high = cal.provenance["samples"]["miss"][form]
        assert abs(np.mean(nats) - value) < high - low


def test_what_samples_said_is_kept_in_the_file(excess, tmp_path):
    _, cal = excess
    cal.save(tmp_path / "a")
    assert trueup.load(tmp_path / "a").provenance["samples"] == json.loads(
        json.dumps(cal.provenance["samples"])
    )


def test_a_correction_that_only_worsens_samples_is_left_off():
    """The ideal network, with a correction that takes off what is right."""
    data = BLOBS.sample(300)
    found = judge(blobs(), calibration_of(blobs(), data, shift=0.2), **QUIET)
    assert found.gains == "none"
    misses = found.provenance["samples"]["miss"]
    assert {*misses} == {"none", "sqrt"}  # a shift has one form
    assert misses["none"][0] < misses["sqrt"][1]
    off = blobs(distortion=lambda eps, u, lam: 0.2 + 0 * eps)
    assert judge(off, calibration_of(off, data, shift=0.2), **QUIET).gains == "sqrt"
    assert not off.corrected
    assert not blobs().corrected


def test_what_is_nothing_or_of_no_data_is_not_judged():
    data = BLOBS.sample(64)
    empty = calibration_of(blobs(), data)
    assert judge(blobs(), empty, **QUIET) is empty
    generated = calibration_of(blobs(), data, shift=0.2, generated={"nfe": 3})
    assert judge(blobs(), generated, **QUIET) is generated


# States brought to the data's moments


@pytest.mark.parametrize("rule", ["ddim", "x0-3", "ipndm-3"])
def test_restored_states_have_the_datas_moments_at_every_level(rule):
    z, bands = normals(4), Bands((2, 2))
    denoiser = GAUSSIAN.denoiser(VP, dtype=torch.float64)
    base = plan(denoiser, next(one for one in RULES if one.name == rule), Grid(math.inf, 1.0), 5)
    data = Moments(bands, z(1, 4), 0.1 + torch.rand(1, bands.count).double(), 100)
    network, noise = network_for(denoiser), z(64, 1, 2, 2)
    made, states = restored(base, network, noise, data), []
    follow(made, network, noise, lambda i, x: (states.append(x), x)[1])
    for i, x in enumerate(states[:-1], 1):
        alpha, sigma = float(made.alpha[i]), float(made.sigma[i])
        coefficients = dctn(x.numpy(), axes=(2, 3), norm="ortho").reshape(64, 4)
        for band, members in enumerate(bands.members):
            variance = coefficients[:, members.numpy()].var(0, ddof=1).mean()
            wanted = alpha**2 * float(data.variance[0, band]) + sigma**2
            assert variance == pytest.approx(wanted, rel=1e-6)
            off = coefficients.mean(0)[members] - alpha * data.mean.numpy()[0, members]
            noise = wanted / 64 + alpha**2 * float(data.variance[0, band]) / 100
            # (38): what is left of an excess e is (1 + e)/(1 + bound)^2 of the noise, at its largest where
            # the bound is 0.
            assert (off**2).mean() < (1 + 1.5 * (2 / len(members)) ** 0.5) * noise * 1.01
    assert not made.tables[-1].any()
    assert not made.offset[-1].any()
    at = (torch.full((64,), float(v[-2])).double() for v in (made.alpha, made.sigma))
    assert torch.allclose(states[-1], GAUSSIAN.x0_given(states[-2], *at), atol=1e-9)


def test_means_that_are_noise_are_not_followed():
    """States that have the data's moments already: their mean is off by chance, and stays."""
    z, bands, off, followed = normals(5), Bands((2, 2)), [], []
    denoiser = GAUSSIAN.denoiser(VP, dtype=torch.float64).with_batch_size(4000)
    variance = STD**2 + torch.zeros(1, bands.count)
    exactly = Moments(bands, bands.dct(MEAN[0]).flatten(1), variance.double(), 10**6)
    base, network = plan(denoiser, RULES[0], Grid(math.inf, 1.0), 12), network_for(denoiser)
    for _ in range(20):
        made = restored(base, network, z(48, 1, 2, 2), exactly)
        fresh, bare = (follow(one, network, z(4000, 1, 2, 2)).mean(0) - MEAN[0] for one in (made, base))
        off.append(fresh.square().mean())
        followed.append(bare.square().mean())
    assert sum(off) / 20 < 0.3 * STD**2 / 48 + sum(followed) / 20


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_said_of_states_brought_to_the_data_is_true_on_fresh_noise(seed, monkeypatch):
    """A Gaussian network, and data of another contrast: hundreds of means, a hundred trajectories."""
    mean = 0.1 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).double()
    denoiser = blobs(256, GaussianMixture(mean, 0.4))
    cal = calibration_of(denoiser, GaussianMixture(mean + 0.02, 0.55).sample(400, seed))
    less, judged, changes, solvers = Judged.less, Fitter.judged, [], []

    def looking(fitter, solver):
        solvers.append((solver, judged(fitter, solver)))
        return solvers[-1][1]

    monkeypatch.setattr(Fitter, "judged", looking)
    monkeypatch.setattr(
        Judged, "less", lambda *two: (changes.append((two[1], less(*two))), changes[-1][1])[1]
    )
    made = fit_solver(denoiser, cal, nfe=10, seed=seed, **QUIET).solver(10)
    assert made.provenance["fitted"] == solve.BROUGHT
    data = Moments.of(cal)
    ((other, change),) = changes
    (base,) = (
        solver for solver, found in solvers if found is other
    )  # the best as it is, of another rule maybe
    fresh, bare = (data.miss(draw(denoiser, one, 1024, 9 + seed)) for one in (made, base))
    said, true = made.evidence, fresh.number
    assert abs(said["miss"] - true.value) < 3 * math.hypot(said["miss_se"], true.error)
    found = fresh.less(bare)
    assert change.low < found.high
    assert found.low < change.high


def test_where_the_limit_misses_the_data_states_are_brought_to_them():
    """A network of other pictures: twice as contrasted, say."""
    other = GaussianMixture(0.5 * shapes(), 0.07).sample(400)
    cal = fit_solver(blobs(), calibration_of(blobs(), other), nfe=4, trajectories=COUNT, **QUIET)
    (made,) = cal.solvers
    assert made.provenance["fitted"] == solve.BROUGHT
    assert made.evidence["limit_miss"] > solve.MATERIAL
    assert made.evidence["miss"] < made.evidence["miss_base"]
    fresh = trueup.sample(blobs(), 128, nfe=4, seed=8, calibration=cal, **QUIET)
    bare = draw(blobs(), without_fit(made), 128, 8)
    data = Moments.of(cal)
    assert data.miss(fresh).less(data.miss(bare)).high < 0
    found = samplers(blobs(), cal, nfe=[3, 4], trajectories=8, **QUIET)
    assert found.brought == (4,)
    note = "fitted for 4: brought to the data's moments, away from the limit on purpose"
    assert found.table().splitlines()[-2] == note
    assert found.as_json()["brought to the data"] == [4]


def test_few_images_do_not_say_where_the_data_are():
    """The same network and data of twice its contrast, of which fewer are known."""
    other = GaussianMixture(0.5 * shapes(), 0.07).sample(solve.ENOUGH_IMAGES)
    how = {"nfe": 4, "trajectories": 32, **QUIET}
    for count, brought in ((solve.ENOUGH_IMAGES, True), (solve.ENOUGH_IMAGES - 1, False)):
        made = fit_solver(blobs(), calibration_of(blobs(), other[:count]), **how).solver(4)
        assert (made.provenance["fitted"] == solve.BROUGHT) == brought


def test_the_fine_solver_is_finer_than_what_is_compared_with_it():
    assert [intervals_for(nfe) for nfe in (3, 8, 10, 20, 40, 60)] == [32, 32, 40, 80, 96, 120]
    flow = APART.denoiser(processes.Flow())
    network = network_for(flow)
    deal(network, 64, 3)
    finest = Teacher.of(network, 3, intervals=400, keep=False).samples
    bands = Bands.of(flow.shape)

    def error(nfe):
        """Of the limit that so many evaluations are compared with."""
        found = Teacher.of(network, 3, intervals=intervals_for(nfe), keep=False).samples
        return float(whitened(bands, found, finest).mean())

    assert error(16) < 1e-3
    assert error(40) < error(20) < error(8)


def test_where_the_limit_is_the_data_it_is_what_steps_are_fitted_to(fits):
    cal = fit_solver(blobs(), calibration_of(blobs(), BLOBS.sample(400)), nfe=3, trajectories=COUNT, **QUIET)
    (made,) = cal.solvers
    assert made.provenance["fitted"] == "steps fitted to the limit"
    assert made.evidence["limit_miss"] < solve.MATERIAL
    assert made.identity == fits[0].solver(3).identity  # the data decide between the two, and no more


# Comparing samplers


@pytest.fixture(scope="module")
def compared(fits):
    return samplers(blobs(), fits[0], nfe=[3, 6], trajectories=16, seed=3, **QUIET)


def test_the_error_of_a_sampler_is_the_one_computed_by_hand(compared):
    first = []

    def network(x_t, t):
        first.append((x_t.clone(), float(t[0])))
        return blobs()(x_t, t)

    watched = trueup.Denoiser(network, VP, "noise", (1, 8, 8), batch_size=128)
    samplers(watched, nfe=3, trajectories=16, seed=3, **QUIET)
    noise = next(x for x, t in first if len(x) == 16 and t == VP.t_max)
    limit = DPMSolver(3, end=1e-3).solve(Network(blobs()), noise, 300)
    lam = torch.linspace(float(VP.lam(VP.t_max)), float(VP.lam(VP.t_min)), 6, dtype=torch.float64)
    alpha, sigma = lam.mul(2).sigmoid().sqrt(), (-2 * lam).sigmoid().sqrt()  # alpha^2 + sigma^2 = 1
    x = noise
    for i in range(6):  # DDIM, even in log-SNR
        at = (v[i].expand(16) for v in (alpha, sigma))
        x0, eps = BLOBS.given(x, *at)
        x = x0 if i == 5 else (alpha[i + 1] * x0 + sigma[i + 1] * eps).float()
    expected = errors_by_hand(x, limit)
    (row,) = (r for r in compared.rows if (r.sampler, r.grid, r.nfe) == ("DDIM", "even in log-SNR", 6))
    assert row.error.value == pytest.approx(float(expected.mean()), rel=0.01)  # the limit's own error
    assert row.error.error == pytest.approx(float(expected.std()) / 4, rel=0.01)


def test_the_fitted_solver_is_among_those_compared(compared):
    fitted = [row for row in compared.rows if row.sampler == "fitted"]
    assert [row.nfe for row in fitted] == [3, 6]
    assert compared.best(3) is fitted[0]
    assert compared.numbers == [3, 6]
    assert compared.verdict().startswith("3 evaluations: fitted, its own; 6 evaluations: ")
    names = {row.sampler for row in compared.rows}
    assert names >= {"DDIM", "DPM-Solver++ 2M", "DPM-Solver++ 3M", "iPNDM", "UniPC", "dpm-solver-3"}
    assert compared.calibrated is False  # there is nothing to correct
    assert compared.brought == ()
    assert "brought" not in compared.table()


def test_the_table_and_the_json_say_the_same(compared):
    said = json.loads(json.dumps(compared.as_json()))
    assert said["trajectories"] == 16
    assert said["verdict"] == compared.verdict()
    lines = compared.table().splitlines()
    assert lines[-1] == f"verdict: {compared.verdict()}"
    assert lines[2].split() == ["3", "6"]
    for number, column in ((3, 0), (6, 1)):
        best = min((r for r in said["samplers"] if r["nfe"] == number), key=lambda r: r["error"])
        for row in (r for r in said["samplers"] if r["nfe"] == number):
            (line,) = (text for text in lines if text.startswith(f"{row['sampler']:16} {row['grid']:17}"))
            cell = line[34 + 20 * column : 54 + 20 * column]
            assert cell.endswith("*") == (row is best)
            value, reach = cell.strip(" *").split(" ± ")
            assert float(value) == pytest.approx(row["error"], rel=0.01)
            assert float(reach) == pytest.approx((row["high"] - row["low"]) / 2, rel=0.1)


def test_cells_do_not_run_into_each_other():
    rows = [Row("a", "b", nfe, Number(0.000203, 1.0, -0.001234, 0.001234)) for nfe in (3, 5)]
    line = Samplers(rows, 8, "net", False).table().splitlines()[3]
    assert line.count("0.000203 ± 0.0012") == 2
    assert "*0" not in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nfe": 1}, "2 to 500 evaluations, not 1"),
        ({"trajectories": 4}, "8 trajectories or more, not 4"),
        ({"trajectories": True}, "8 trajectories or more, not True"),
        ({"labels": 3}, "takes no labels"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"calibration": 3}, "expected a Calibration or its file"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(changes, words):
    with pytest.raises(TrueupError, match=words) as caught:
        samplers(blobs(), **changes, **QUIET)
    assert "\n" not in str(caught.value)


def test_calibrate_fits_solvers_to_the_corrected_network(tmp_path):
    denoiser = blobs(distortion=lambda eps, u, lam: 0.2 + 0 * eps)
    data = trueup.Images(BLOBS.sample(100))
    cal = trueup.calibrate(denoiser, data, nfe=[3, 4], trust=True, run=tmp_path / "run", **QUIET)
    assert [(made.nfe, made.gains) for made in cal.solvers] == [(3, "sqrt"), (4, "sqrt")]
    assert cal.gains == "sqrt"
    assert not (tmp_path / "run" / "solvers").exists()
    corrected = [x for _, x in sample_batches(denoiser, 8, nfe=3, calibration=cal, seed=2, **QUIET)]
    with trueup.attach(denoiser, cal):
        assert torch.equal(corrected[0], draw(denoiser, cal.solver(3), 8, 2))
    with pytest.raises(TrueupError, match="2 to 500 evaluations, not 1"):
        trueup.calibrate(denoiser, data, nfe=1, **QUIET)
