"""Rules and grids of samplers against diffusers, our own DPM-Solver, integrals by hand and exact flows."""

import math
from dataclasses import dataclass

import diffusers
import numpy as np
import pytest
import torch

import trueup
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.noise import normal
from trueup.parametrization import Parametrization
from trueup.sampling import DPMSolver
from trueup.sampling.fitted import follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid
from trueup.sampling.steps import Levels

from tiny import tiny_unet

MEAN = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]], dtype=torch.float64)
STD = 0.4
GAUSSIAN = GaussianMixture(MEAN, STD)
VP = processes.DiscreteVP.linear()
PROCESSES = {
    "discrete": (VP, "noise"),
    "continuous": (processes.ContinuousVP(), "velocity"),
    "ve": (processes.VE(), "data"),
    "edm": (processes.EDM(), Parametrization("edm", 0.5)),
    "flow": (processes.Flow(), "flow"),
}
RULE = {rule.name: rule for rule in RULES}
ORDERS = {name: rule.order for name, rule in RULE.items() if not (rule.even or rule.plus)}


@dataclass(frozen=True)
class At:
    """A grid of given times."""

    given: torch.Tensor
    name: str = "given"

    def times(self, process, steps):
        assert len(self.given) == steps
        return self.given.double()


def start(count=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *GAUSSIAN.shape, generator=generator, dtype=torch.float64)


def states(rule, denoiser, grid, nfe, noise):
    """All states, and the levels they are at."""
    solver = plan(denoiser, RULE[rule], grid, nfe)
    found = [noise * denoiser.process.prior_std]
    follow(solver, Network(denoiser), noise, lambda i, x: (found.append(x), x)[1])
    return found, solver


def exact(x, solver, i):
    """The probability flow of Gaussian data keeps (x - alpha mean) / std of x_t, from level 0 to i."""
    alpha, sigma = solver.alpha[[0, i]], solver.sigma[[0, i]]
    spread = (alpha**2 * STD**2 + sigma**2).sqrt()
    return alpha[1] * MEAN + (x - alpha[0] * MEAN) * spread[1] / spread[0]


# Against diffusers, on an untrained network, whose values grow to some hundreds


def theirs(scheduler, net, x, steps):
    """All states of the loop that diffusers documents."""
    scheduler.set_timesteps(steps)
    found = [x]
    with torch.inference_mode():
        for t in scheduler.timesteps:
            found.append(scheduler.step(net(found[-1], t).sample, t, found[-1]).prev_sample)
    return found


SAME = {
    "ddim": diffusers.DDIMScheduler(clip_sample=False),
    "x0-2": diffusers.DPMSolverMultistepScheduler(solver_order=2, solver_type="heun"),
    "dpm++-2": diffusers.DPMSolverMultistepScheduler(solver_order=2),
    "dpm++-3": diffusers.DPMSolverMultistepScheduler(solver_order=3),
    "unipc-2": diffusers.UniPCMultistepScheduler(solver_order=2),
    "eps-2": diffusers.DEISMultistepScheduler(solver_order=2),
    "eps-3": diffusers.DEISMultistepScheduler(solver_order=3),
}


@pytest.mark.parametrize("rule", SAME)
def test_a_rule_is_the_scheduler_of_diffusers_on_the_same_levels(rule):
    """DEIS is the polynomial in lam through eps; of DPM-Solver++ "heun" is the exact integral."""
    net, nfe = tiny_unet(), 16  # from 15 on their orders do not fall at the end, but for the last step
    denoiser = trueup.Denoiser(net, VP, "noise", (1, 8, 8))
    x = normal(0, torch.arange(3), -1, (1, 8, 8), torch.device("cpu"))
    scheduler = SAME[rule]
    expected = theirs(scheduler, net, x, nfe)
    found, _ = states(rule, denoiser, At(scheduler.timesteps), nfe, x)
    # DEIS ends elsewhere: at the least noise.
    for ours, their in list(zip(found, expected, strict=True))[: -1 if rule.startswith("eps") else None]:
        assert float((ours - their).abs().max()) < 2e-5 * float(their.abs().max())  # their sigmas are float32


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", PROCESSES)
def test_the_singlestep_rules_are_our_dpm_solver_on_the_same_levels(name, order):
    process, kind = PROCESSES[name]
    denoiser, noise = GAUSSIAN.denoiser(process, kind, dtype=torch.float64), start()
    # 11 evaluations end on a step of order 2 (of 3), or 1 (of 2).
    for allocation, nfe in (("fixed", 12), ("fast", 11)):
        solver = DPMSolver(order, allocation=allocation, end=None if process.ends is None else 1e-2)
        runs = solver.plan(process, nfe)
        times = torch.cat([*(run[:, :-1].flatten() for run in runs), runs[-1][-1, -1:]])
        expected = solver.solve(Network(denoiser), noise, nfe)
        found, _ = states(f"singlestep-{order}", denoiser, At(times), nfe + 1, noise)
        ours = process.to_data(found[nfe], times[-1])
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)


# The published integrals, by the trapezoid rule

UNEVEN = torch.tensor([999.0, 820.0, 700.0, 420.0, 230.0, 90.0], dtype=torch.float64)


def by_hand(history, alpha, sigma, i, order):
    """Weights of the step from level i to i + 1 of the exponential integrators (Lu et al. 2022, DEIS).

    x' = (alpha'/alpha) x - alpha' ∫ e^-lam eps dlam, or x' = (sigma'/sigma) x + sigma' ∫ e^lam x0 dlam, with
    the polynomial in lam through the newest `order` values.
    """
    lam = np.log(alpha / sigma)
    at = np.linspace(lam[i], lam[i + 1], 20001)
    nodes = [lam[i - j] for j in range(order)]
    sign, scale = (-1, alpha) if history == "eps" else (1, sigma)
    row = [scale[i + 1] / scale[i]]
    for j, node in enumerate(nodes):
        basis = np.ones_like(at)
        for other in nodes[:j] + nodes[j + 1 :]:
            basis = basis * (at - other) / (node - other)
        integrand = np.exp(sign * at) * basis
        row.append(sign * scale[i + 1] * ((integrand[1:] + integrand[:-1]) / 2 * np.diff(at)).sum())
    return row


@pytest.mark.parametrize("rule", ["ddim", "eps-2", "eps-3", "x0-2", "x0-3"])
def test_weights_are_the_published_integrals(rule):
    levels, made = Levels.at(VP, UNEVEN), RULE[rule]
    weights = made.weights(levels)
    alpha, sigma = levels.log_alpha.exp().numpy(), levels.sigma.numpy()
    for i in range(len(UNEVEN) - 1):
        order = min(made.order, i + 1)
        expected = np.zeros(4)
        expected[: 1 + order] = by_hand(made.history, alpha, sigma, i, order)
        assert np.allclose(weights[i].numpy(), expected, rtol=1e-6, atol=1e-9)  # 20,000 trapezoids
    last = [1 / alpha[-1], -sigma[-1] / alpha[-1]] if made.history == "eps" else [0.0, 1.0]
    assert np.allclose(weights[-1].numpy(), [*last, 0, 0])


def test_ipndm_is_adams_bashforth_where_its_levels_are_even():
    """Even in s = sigma/alpha, which is time for noise that explodes."""
    process, h = processes.VE(), 0.5
    levels = Levels.at(process, torch.arange(6, 1, -1, dtype=torch.float64) * h)
    two, three = (RULE[f"ipndm-{order}"].weights(levels) for order in (2, 3))
    assert torch.allclose(two[1:-1, 1:] / -h, torch.tensor([1.5, -0.5, 0.0]).double())
    assert torch.allclose(three[2:-1, 1:] / -h, torch.tensor([23.0, -16.0, 5.0]).double() / 12)
    assert torch.allclose(two[:-1, 0], torch.ones(4).double())


def test_ipndm_keeps_its_coefficients_where_they_are_not():
    levels = Levels.at(processes.VE(), torch.tensor([10.0, 3.0, 1.0, 0.5], dtype=torch.float64))
    weights = RULE["ipndm-3"].weights(levels)
    assert torch.allclose(weights[2, 1:], -0.5 * torch.tensor([23.0, -16.0, 5.0]).double() / 12)


# Orders


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("rule", ORDERS)
def test_halving_the_steps_divides_the_error_by_two_to_the_order(rule, name):
    process, kind = PROCESSES[name]
    denoiser, noise, errors = GAUSSIAN.denoiser(process, kind, dtype=torch.float64), start(4), []
    # Ended where the noise is that of the data: over all of it the third order's errors cancel.
    rise = float(process.lam(process.t_min)) + math.log(STD)
    for nfe in (37, 73):
        found, solver = states(rule, denoiser, Grid(math.inf, rise), nfe, noise)
        errors.append(float((found[-2] - exact(found[0], solver, -2)).abs().max()))
    # Third order's steps are of second order and first at the start, where there is nothing to remember.
    assert math.log2(errors[0] / errors[1]) == pytest.approx(ORDERS[rule], abs=0.35)


def test_every_rule_says_what_the_network_takes_the_data_to_be_at_the_end():
    denoiser, noise = GAUSSIAN.denoiser(VP, dtype=torch.float64), start()
    for name in RULE:
        found, solver = states(name, denoiser, Grid(), 9, noise)
        alpha, sigma = (
            torch.full((len(noise),), float(v[-2])).double() for v in (solver.alpha, solver.sigma)
        )
        x0 = GAUSSIAN.x0_given(found[-2], alpha, sigma)
        assert torch.allclose(found[-1], x0, atol=1e-9), name


# Grids

GRIDS = [Grid(), Grid(7.0), Grid("time"), Grid("quadratic"), Grid(math.inf, 1.5), Grid(7.0, 2.0)]


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_grids_fall_from_the_most_noise_to_what_is_asked_for(grid, name):
    process, _ = PROCESSES[name]
    for steps in (2, 3, 20):
        t = grid.times(process, steps)
        lam = process.lam(t)
        assert t.shape == (steps,)
        assert float(t[0]) == process.t_max
        assert (lam.diff() > 0).all()
        assert float(lam[-1]) == pytest.approx(float(process.lam(process.t_min)) - grid.rise, abs=1e-9)


def test_spacings_are_even_in_what_they_say():
    process = processes.ContinuousVP()
    t = {spacing: Grid(spacing).times(process, 12) for spacing in (math.inf, 7.0, "time", "quadratic")}
    even = {
        math.inf: process.lam(t[math.inf]),
        7.0: (-process.lam(t[7.0]) / 7).exp(),
        "time": t["time"],
        "quadratic": t["quadratic"].sqrt(),
    }
    for spacing, values in even.items():
        steps = values.diff()
        assert torch.allclose(steps, steps.mean().expand(11), rtol=1e-6), spacing


@pytest.mark.parametrize("steps", [2, 5, 18])
def test_karras_levels_are_those_of_diffusers(steps):
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, rho=7.0)
    scheduler.set_timesteps(steps)
    expected = scheduler.sigmas[:-1].double()
    for process in (processes.VE(0.002, 80.0), processes.EDM(0.5, 0.002, 80.0)):
        lam = process.lam(Grid(7.0).times(process, steps))
        assert torch.allclose((-lam).exp(), expected, rtol=1e-5)  # float32
    later = (-processes.VE().lam(Grid(7.0, math.log(10)).times(processes.VE(), steps))).exp()
    ended = diffusers.EDMEulerScheduler(sigma_min=0.02, sigma_max=80.0, rho=7.0)
    ended.set_timesteps(steps)
    assert torch.allclose(later, ended.sigmas[:-1].double(), rtol=1e-5)


def test_more_rise_than_there_is_leaves_a_step():
    t = Grid(math.inf, 1e3).times(VP, 4)
    assert float(t[0]) == 999
    assert (t.diff() < 0).all()


def test_a_grid_says_what_it_is():
    names = [grid.name for grid in (*GRIDS[:4], Grid(math.inf, math.log(2)), Grid(7.0, 0.01))]
    assert names == [
        "even in log-SNR",
        "Karras 7",
        "even in time",
        "quadratic in time",
        "even in log-SNR, 2 times the least noise at the end",
        "Karras 7",
    ]


def test_times_between_timesteps_are_moved_to_whole_ones_or_the_plan_is_none():
    """An embedding table knows whole timesteps only: near clean data many levels share one."""
    table = torch.nn.Embedding(1000, 1)

    def network(x_t, t):
        return x_t + table(t.long())[..., None, None]

    denoiser = trueup.Denoiser(network, VP, "noise", (1, 2, 2))
    with torch.no_grad():
        solver = plan(denoiser, RULE["x0-2"], Grid(), 10)
        assert torch.equal(solver.t, solver.t.round())
        assert float(solver.t[0]) == 999
        assert torch.allclose(solver.alpha[:-1], VP.alpha(solver.t))  # the levels are moved as well
        assert plan(denoiser, RULE["x0-2"], Grid(), 200) is None
    between = trueup.Denoiser(lambda x_t, t: x_t * t[:, None, None, None], VP, "noise", (1, 2, 2))
    assert plan(between, RULE["x0-2"], Grid(), 200) is not None
