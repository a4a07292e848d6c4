"""DPM-Solver against exact solutions, scipy's integrator, and diffusers."""

import math

import diffusers
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import trueup
from by_hand import calibration_of
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.errors import TrueupError
from trueup.files import bundled
from trueup.hf import as_denoiser
from trueup.parametrization import Parametrization
from trueup.sampling import DPMSolver, solvers_for
from trueup.sampling.draw import count_evaluations
from trueup.sampling.network import Network
from trueup.sampling.steps import between

from tiny import tiny_unet

MEAN = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]], dtype=torch.float64)
STD = 0.4
GAUSSIAN = GaussianMixture(MEAN, STD)
PROCESSES = {
    "discrete": (processes.DiscreteVP.linear(), "noise"),
    "continuous": (processes.ContinuousVP(), "noise"),
    "ve": (processes.VE(), "noise"),
    "edm": (processes.EDM(), Parametrization("edm", 0.5)),
    "flow": (processes.Flow(), "flow"),
}


def network_of(process, kind="noise", data=GAUSSIAN):
    return Network(data.denoiser(process, kind, dtype=torch.float64))


def start(count=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *GAUSSIAN.shape, generator=generator, dtype=torch.float64)


def exact(process, noise, end):
    """The probability flow of Gaussian data keeps (x - alpha mean) / std of x_t as it is."""
    x = noise * process.prior_std
    spread = [
        math.sqrt(float(process.alpha(t)) ** 2 * STD**2 + float(process.sigma(t)) ** 2)
        for t in (process.t_max, end)
    ]
    first, last = (process.alpha(t) * MEAN for t in (process.t_max, end))
    return process.to_data(last + (x - first) * spread[1] / spread[0], end)


def solve(solver, network, x, nfe):
    return solver.solve(network, x, nfe)


def error(solver, process, kind, nfe):
    x = start()
    y = solve(solver, network_of(process, kind), x, nfe)
    return float((y - exact(process, x, solver.end_time(process, nfe))).abs().max())


@pytest.mark.parametrize("grid", ["logsnr", "uniform", "quadratic"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_halving_the_step_divides_the_error_by_two_to_the_order(order, grid):
    process, kind = PROCESSES["continuous"]
    solver = DPMSolver(order, grid=grid, allocation="fixed", end=1e-2)
    coarse, fine = (error(solver, process, kind, nfe) for nfe in (480, 960))
    # Where lam is uneven over a step the midpoint rule's r is not 1/2, and it takes longer to show its order.
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_noise_process_is_solved_at_the_solvers_order(name, order):
    process, kind = PROCESSES[name]
    solver = DPMSolver(order, allocation="fixed", end=1e-2 if name in ("discrete", "continuous") else None)
    coarse, fine = (error(solver, process, kind, nfe) for nfe in (480, 960))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


def test_a_mixture_ends_where_scipys_integrator_does():
    means = torch.tensor([-0.8, 0.7], dtype=torch.float64).reshape(2, 1, 1, 1) * torch.ones(2, 1, 2, 2)
    mixture = GaussianMixture(means.double(), 0.2)
    process = processes.ContinuousVP()
    network = network_of(process, "velocity", mixture)
    solver = DPMSolver(3, end=1e-3)
    x = start(4)

    def flow(t, flat):  # dx/dt = f x + g^2 eps / (2 sigma)
        state = torch.tensor(flat).reshape(x.shape)
        alpha, sigma = (f(torch.full((len(x),), t)).double() for f in (process.alpha, process.sigma))
        eps = mixture.eps_given(state, alpha, sigma)
        drift = process.f(t) * state + process.g2(t) / (2 * process.sigma(t)) * eps
        return drift.numpy().ravel()

    oracle = solve_ivp(flow, (process.t_max, 1e-3), x.numpy().ravel(), rtol=1e-9, atol=1e-10).y[:, -1]
    found = solve(solver, network, x, 600)
    assert np.abs(found.numpy().ravel() - oracle).max() < 1e-4 * np.abs(oracle).max()


@pytest.mark.parametrize("kind", ["data", "velocity", "score"])
def test_what_the_network_predicts_does_not_matter(kind):
    process = processes.ContinuousVP()
    x = start()
    solver = DPMSolver(3, end=1e-3)  # within the times the network knows
    other = solve(solver, network_of(process, kind), x, 20)
    assert torch.allclose(other, solve(solver, network_of(process), x, 20), rtol=1e-9, atol=1e-9)


def test_the_published_allocations():
    """Lu et al. 2022, section 3.4: K = nfe/3 + 1 steps, the last ones of lower order."""
    fast = DPMSolver(3)
    assert fast.orders(15) == [3, 3, 3, 3, 2, 1]
    assert fast.orders(16) == [3, 3, 3, 3, 3, 1]
    assert fast.orders(17) == [3, 3, 3, 3, 3, 2]
    assert DPMSolver(2).orders(9) == [2, 2, 2, 2, 1]
    assert DPMSolver(3, allocation="fixed").orders(10) == [3, 3, 3]  # the tables' dagger
    assert DPMSolver(3, allocation="fixed").evaluations(10, GAUSSIAN.denoiser(processes.ContinuousVP())) == 9


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("nfe", [3, 10, 15, 20, 25])
@pytest.mark.parametrize("grid", ["logsnr", "uniform", "quadratic"])
def test_exactly_as_many_evaluations_as_asked_for(order, nfe, grid):
    network = network_of(processes.DiscreteVP.linear())
    told = []
    network.advance = told.append
    DPMSolver(order, grid=grid).solve(network, start(), nfe)
    assert network.evaluations == nfe
    assert told == [len(start())] * nfe


def test_progress_counts_the_images_that_are_still_on_their_way():
    """Adaptive steps: whoever has arrived is not evaluated, and was counted nevertheless."""
    network, told, x = network_of(processes.ContinuousVP()), [], start()
    network.advance = told.append
    together = DPMSolver(3, allocation="adaptive").solve(network, x, None)
    alone, each = [], []
    for row in x.split(1):
        network.advance = each.append
        alone.append(DPMSolver(3, allocation="adaptive").solve(network, row, None))
    assert torch.allclose(torch.cat(alone), together)
    assert sum(told) == sum(each) < told[0] * len(told)


def test_the_end_time_depends_on_the_budget():
    process = processes.ContinuousVP()
    assert float(DPMSolver(3).end_time(process, 14)) == pytest.approx(1e-3)
    assert float(DPMSolver(3).end_time(process, 15)) == pytest.approx(1e-4)
    discrete = processes.DiscreteVP.linear()
    assert float(DPMSolver(3).end_time(discrete, 10)) == pytest.approx(0.0)  # t = (i + 1)/1000
    assert float(DPMSolver(3).end_time(discrete, 20)) == pytest.approx(-0.9)


def test_the_three_grids():
    process = processes.ContinuousVP()
    s, t = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64)
    even = lambda values: torch.allclose(values.diff(), values.diff()[0], atol=1e-9)  # noqa: E731
    assert even(process.lam(between("logsnr", process, s, t, 10)))
    assert even(between("uniform", process, s, t, 10))
    assert even(between("quadratic", process, s, t, 10).sqrt())


@pytest.mark.parametrize("name", PROCESSES)
def test_unit_time_can_be_undone(name):
    process, _ = PROCESSES[name]
    t = torch.linspace(process.t_min, process.t_max, 9, dtype=torch.float64)
    assert torch.allclose(process.from_unit(process.to_unit(t)), t, rtol=1e-12, atol=1e-12)


def test_midpoints_are_asked_at_fractional_timesteps():
    asked = []
    denoiser = trueup.Denoiser(
        lambda x, t: (asked.append(t), x)[1], processes.DiscreteVP.linear(), "noise", shape=(1, 4, 4)
    )
    trueup.sample(denoiser, 1, nfe=6)
    times = torch.cat(asked)
    assert bool((times != times.round()).any())
    assert float(times.min()) >= 0


def test_an_embedding_table_is_asked_at_whole_timesteps_with_their_own_noise():
    """On whole times the solver must take the levels it evaluates at, and still be exact to its order."""
    process = processes.DiscreteVP.linear()
    exact_net = GAUSSIAN.denoiser(process)
    table = torch.nn.Embedding.from_pretrained(torch.arange(1000.0)[:, None])
    asked = []

    def network(x, t):
        times = table(t)[:, 0]  # raises for fractions, as an embedding does
        asked.append(times)
        return exact_net(x, times)

    denoiser = trueup.Denoiser(network, process, "noise", GAUSSIAN.shape, data_range=None)
    x = trueup.sample(denoiser, 64, nfe=60, solver="dpm-solver-3")
    times = torch.cat(asked)
    assert torch.equal(times, times.round())
    reference = trueup.sample(exact_net, 64, nfe=600)
    # Moving a level without its noise would leave errors of the size of a timestep's noise, about 0.02.
    assert float((x - reference).abs().max()) < 4e-3


def rounding():
    """A network that truncates its timestep, and what it was asked."""
    inner, asked = GAUSSIAN.denoiser(processes.DiscreteVP.linear()), []

    def network(x, t):
        asked.append(t)
        return inner(x, t.long().float()) + 0.1

    process = processes.DiscreteVP.linear()
    return trueup.Denoiser(network, process, "noise", GAUSSIAN.shape, data_range=None), asked


def test_whole_times_are_noticed_through_a_calibration_too():
    denoiser, asked = rounding()
    cal = calibration_of(denoiser, GAUSSIAN.sample(64), shift=0.1)
    fresh, asked = rounding()
    trueup.sample(fresh, 1, nfe=6, calibration=cal)
    assert all(not t.is_floating_point() for t in asked[3:])


def test_whole_times_cost_no_more_evaluations_than_are_stated():
    denoiser, asked = rounding()
    stated = count_evaluations(DPMSolver(3), 100, denoiser)
    asked.clear()
    trueup.sample(denoiser, 1, nfe=100)
    assert len(asked) == stated < 100


def test_adaptive_steps_are_refused_where_times_are_whole():
    denoiser, _ = rounding()
    with pytest.raises(TrueupError, match="whole ones only"):
        trueup.sample(denoiser, 1, solver=DPMSolver(3, allocation="adaptive"))
    assert not any(name.endswith("adaptive") for name in solvers_for(denoiser))
    with pytest.raises(TrueupError, match=r"does not work with this network .*: use dpm-solver-1"):
        trueup.sample(denoiser, 1, solver="dpm-solver-3-adaptive")


def test_a_network_that_rounds_silently_is_noticed():
    process = processes.DiscreteVP.linear()
    inner = GAUSSIAN.denoiser(process)
    asked = []

    def network(x, t):
        asked.append(t)
        return inner(x, t.long().float())

    trueup.sample(trueup.Denoiser(network, process, "noise", GAUSSIAN.shape, data_range=None), 1, nfe=6)
    assert all(not t.is_floating_point() for t in asked[3:])  # the first three were the question


def test_order_one_is_diffusers_ddim_on_the_same_grid():
    denoiser = as_denoiser(bundled("bundled:ema"))  # trained: its states stay of the size of images
    denoiser.network.double()  # DDIM divides by alpha = 0.006 and multiplies again
    scheduler = diffusers.DDIMScheduler(clip_sample=False, timestep_spacing="trailing")
    scheduler.set_timesteps(10)  # 999, 899, ..., 99: its last step, to clean data, has no finite lam
    x = trueup.noise.normal(0, torch.arange(3), -1, denoiser.shape, torch.device("cpu")).double()
    with torch.inference_mode():
        ours = solve(DPMSolver(1, grid="uniform", end=0.1), Network(denoiser), x, 9)
        for t in scheduler.timesteps[:-1]:
            x = scheduler.step(denoiser.network(x, t).sample, t, x).prev_sample
    assert float((ours - x).abs().max()) < 1e-5 * float(x.abs().max())


def test_order_two_is_diffusers_singlestep_solver_on_the_same_levels():
    net = tiny_unet()
    process = processes.DiscreteVP.linear()
    denoiser = trueup.Denoiser(net, process, "noise", (1, 8, 8))
    solver = DPMSolver(2, allocation="fixed", end=1e-3)
    plan = solver.plan(process, 12, whole_times=True)
    times = [int(t) for run in plan for step in run for t in step[:-1]]
    scheduler = diffusers.DPMSolverSinglestepScheduler(
        beta_schedule="linear",
        algorithm_type="dpmsolver",
        solver_type="midpoint",
        final_sigmas_type="sigma_min",
        lower_order_final=False,
        solver_order=2,
    )
    scheduler.set_timesteps(timesteps=times)
    x = trueup.noise.normal(0, torch.arange(3), -1, (1, 8, 8), torch.device("cpu"))
    denoiser.takes_whole_times_only = lambda y=None: True
    with torch.inference_mode():
        found = solve(solver, Network(denoiser), x, 12)
        for t in scheduler.timesteps:
            x = scheduler.step(net(x, t).sample, t, x).prev_sample
    # Sigmas are float32 there, and an untrained network makes values of some hundreds.
    assert float((found - x).abs().max()) < 1e-5 * float(x.abs().max())


@pytest.mark.parametrize("order", [2, 3])
def test_the_adaptive_solver_meets_its_tolerance_and_tightens_with_it(order):
    process, kind = PROCESSES["continuous"]
    errors = []
    for tolerance in (5e-2, 1e-3):
        solver = DPMSolver(order, allocation="adaptive", atol=tolerance / 5, rtol=tolerance, end=1e-3)
        x = start()
        y = solve(solver, network_of(process, kind), x, None)
        errors.append(float((y - exact(process, x, solver.end_time(process, None))).abs().max()))
    assert errors[0] < 0.05
    assert errors[1] < errors[0] / 5


def test_an_image_takes_its_own_adaptive_steps():
    process = processes.ContinuousVP()
    x = start(8)
    x[3] *= 4  # an image that needs other steps than its neighbours
    solver = DPMSolver(3, allocation="adaptive")
    together = solve(solver, network_of(process), x, None)
    alone = torch.cat([solve(solver, network_of(process), x[i : i + 1], None) for i in range(8)])
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DPMSolver(4), "orders 1, 2 and 3"),
        (lambda: DPMSolver(3, grid="cosine"), "unknown grid"),
        (lambda: DPMSolver(3, allocation="slow"), "unknown allocation"),
        (lambda: DPMSolver(1, allocation="adaptive"), "order 2 or 3"),
        (lambda: DPMSolver(3, atol=0), "positive"),
        (lambda: DPMSolver(3, end=2.0), "between 0 and 1"),
        (lambda: DPMSolver(3).orders(2), "at least 3 evaluations"),
    ],
)
def test_nonsense_is_refused_at_birth(make, words):
    with pytest.raises(TrueupError, match=words):
        make()
