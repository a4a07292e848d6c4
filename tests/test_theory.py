"""Theorem 1 and appendix A of the paper, on models whose scores are known and on networks.

The instruments are those that benchmarks/theory.py draws its figures with.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler

import trueup
from trueup import Images
from trueup.analytic import GaussianMixture, KernelDensity
from trueup.estimate import fit, measure
from trueup.hf import as_denoiser
from trueup.process import VE, ContinuousVP, DiscreteVP

from tiny import tiny_unet

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import instruments as theory

SHAPE = (1, 3, 3)


@pytest.fixture(scope="module")
def data():
    means = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return GaussianMixture(means, 0.4)


def posterior_draws(data, process, x_t, s, t, count):
    """Draws of x_s given x_t, exactly: first which Gaussian, then x0, then x_s."""
    alpha, sigma = (float(f(t)) for f in (process.alpha, process.sigma))
    one = torch.ones(1, dtype=torch.float64)
    logits, offset, variance = data._posterior(x_t[None], alpha * one, sigma * one)
    pick = torch.multinomial(logits[0].softmax(0), count, replacement=True)
    gain = alpha * data.std**2 / variance[0]
    mean = data.means.flatten(1)[pick] + gain * offset[0][pick]
    std = math.sqrt(data.std**2 * sigma**2 / float(variance[0]))
    x0 = (mean + std * torch.randn(count, 9, dtype=torch.float64)).reshape(count, *SHAPE)
    alpha_s, sigma_s = (float(f(s)) for f in (process.alpha, process.sigma))
    ratio = alpha / alpha_s
    added = sigma**2 - ratio**2 * sigma_s**2
    mean = (alpha_s * added * x0 + ratio * sigma_s**2 * x_t) / sigma**2
    return mean + math.sqrt(sigma_s**2 * added) / sigma * torch.randn(count, *SHAPE, dtype=torch.float64)


@pytest.mark.parametrize(
    ("process", "s", "t"), [(ContinuousVP(), 0.2, 0.6), (DiscreteVP.linear(), 100, 400), (VE(), 0.5, 3.0)]
)
def test_the_scaled_score_is_a_martingale(data, process, s, t):
    torch.manual_seed(0)
    net = data.denoiser(process, dtype=torch.float64)
    x0 = data.sample(1)[0]
    x_t = float(process.alpha(t)) * x0 + float(process.sigma(t)) * torch.randn(SHAPE, dtype=torch.float64)
    draws = posterior_draws(data, process, x_t, s, t, 40_000)
    values = theory.martingale(net, draws, s).flatten(1)
    expected = theory.martingale(net, x_t[None], t).flatten()
    error = values.std(0) / math.sqrt(len(values))
    assert bool(((values.mean(0) - expected).abs() < 4.5 * error).all())


def test_the_martingale_is_the_score_scaled(data):
    process = ContinuousVP()
    net = data.denoiser(process, "velocity", dtype=torch.float64)
    x_t = torch.randn(2, *SHAPE, dtype=torch.float64).requires_grad_(True)
    t = torch.tensor([0.3, 0.7], dtype=torch.float64)
    density = data.log_density(x_t, process.alpha(t), process.sigma(t)).sum()
    (score,) = torch.autograd.grad(density, x_t)
    expected = process.alpha(t)[:, None, None, None] * score
    assert torch.allclose(
        theory.martingale(net, x_t.detach(), t), expected, rtol=1e-4, atol=1e-6
    )  # t in float32


def test_monte_carlo_finds_no_gap_in_an_exact_network_and_one_in_a_biased_network(data):
    process = ContinuousVP()
    x0 = data.sample(100)
    net = data.denoiser(process, dtype=torch.float64)
    exact = theory.martingale_check(net, x0, 0.3, 0.6, draws=40, steps=20)
    assert exact.share.low < 0 < exact.share.high
    assert exact.share.reach < 0.1

    def off(eps, u, lam):
        return 0.5 * lam.tanh() + 0 * eps

    wrong = data.denoiser(process, dtype=torch.float64, distortion=off)
    gap = theory.martingale_check(wrong, x0, 0.3, 0.6, draws=40, steps=20)
    assert gap.share.low > 0.1
    assert gap.gap.shape == gap.gap_error.shape == gap.size.shape == (100,)
    with pytest.raises(trueup.TrueupError, match="s < t"):
        theory.martingale_check(wrong, x0, 0.6, 0.3)
    with pytest.raises(trueup.TrueupError, match="tensor of clean samples"):
        theory.martingale_check(wrong, x0[:, :, :2], 0.3, 0.6)


def test_the_standard_error_of_the_gap_is_right(data):
    net = data.denoiser(ContinuousVP(), dtype=torch.float64)
    x0 = data.sample(1).expand(1, *SHAPE)
    found = [
        theory.martingale_check(net, x0, 0.3, 0.4, draws=12, steps=6, seed=0)
        if seed == 0
        else _same_start(net, x0, seed)
        for seed in range(40)
    ]
    gaps = torch.cat([f.gap for f in found])
    stated = torch.cat([f.gap_error for f in found]).square().mean().sqrt()
    assert 0.6 < float(gaps.std() / stated) < 1.6


def _same_start(net, x0, seed):
    """The same x_t with other draws: the start's noise comes first among the keys, whatever the draws."""
    from unittest.mock import patch

    first = theory.normals(
        0, torch.arange(1), torch.tensor([theory._REVERSE_KEY]), SHAPE, torch.device("cpu")
    )

    def normals(s, index, keys, shape, device):
        return first if int(keys[0]) == theory._REVERSE_KEY else _normals(s, index, keys, shape, device)

    _normals = theory.normals
    with patch.object(theory, "normals", normals):
        return theory.martingale_check(net, x0, 0.3, 0.4, draws=12, steps=6, seed=seed)


def test_concentration_bounds_hold_along_paths(data):
    process = ContinuousVP(t_min=0.05)
    net = data.denoiser(process, dtype=torch.float64)
    times = torch.linspace(0.05, 1.0, 60, dtype=torch.float64)
    found = theory.paths(net, data.sample(600), times)
    assert found.values.shape == (60, 600, 9)
    assert found.t[0] == 1.0
    # mean zero at every time: what the shift restores
    error = found.values.std(1) / math.sqrt(600)
    assert float((found.values.mean(1).abs() < 4.5 * error).double().mean()) == 1.0
    # variance grows towards the data, as a martingale's must
    assert bool((found.values.square().mean((1, 2)).diff() > -0.02).all())
    level = torch.linspace(0.5, 12, 20, dtype=torch.float64)
    observed, bound = found.doob(level)
    assert bool((observed <= bound).all())
    assert float(observed.max()) > 0.05
    observed, bound = found.azuma(level)
    assert bool((observed <= bound).all())
    assert float(bound.min()) < 1.0


def test_paths_are_noised_data(data):
    process = ContinuousVP()
    net = trueup.Denoiser(lambda x_t, t: x_t, process, "score", SHAPE, data_range=None, dtype=torch.float64)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    values = (
        theory.paths(net, data.sample(4000), t).values.flip(0) / process.alpha(t)[:, None, None]
    )  # x_t itself
    second = data.std**2 + data.means.flatten(1).square().mean(0)
    expected = process.alpha(t)[:, None] ** 2 * second + process.sigma(t)[:, None] ** 2
    assert torch.allclose(values.square().mean(1), expected, rtol=0.12)


@pytest.fixture(scope="module")
def network():
    """A network with random weights and two calibrations of it."""
    net = as_denoiser(tiny_unet(), scheduler=DDPMScheduler())
    x0 = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    data = Images(x0, data_range=(-1.0, 1.0))
    moments = measure(net, data, levels=[100, 400, 800], trust=True, progress=False)
    return net, x0, {f: fit(moments, family=f, estimator="paired") for f in ("shift", "spectral")}


def test_an_exact_score_is_conservative(data):
    net = data.denoiser(ContinuousVP(), dtype=torch.float64)
    assert theory.asymmetry(theory.jacobian(net, torch.randn(SHAPE, dtype=torch.float64), 0.4)) < 1e-12


def test_a_shift_leaves_every_derivative_and_a_spectral_correction_does_not(network):
    net, x0, calibrations = network
    before = theory.jacobian(net, x0[0], 400)
    third = theory.trace_gradient(net, x0[0], 400)
    trace = theory.divergence(net, x0[:1], 400)
    assert float(trace) == pytest.approx(float(before.trace()), rel=1e-4)
    with trueup.attach(net, calibrations["shift"]):
        after = theory.jacobian(net, x0[0], 400)
        assert torch.allclose(after, before, atol=1e-6)
        assert theory.asymmetry(after) == pytest.approx(theory.asymmetry(before), rel=1e-4)
        assert torch.allclose(theory.trace_gradient(net, x0[0], 400), third, atol=1e-5)
    with trueup.attach(net, calibrations["spectral"]):
        assert float((theory.jacobian(net, x0[0], 400) - before).norm() / before.norm()) > 0.01


def test_a_shift_keeps_an_exact_score_conservative(data):
    net = data.denoiser(ContinuousVP(), distortion=lambda eps, u, lam: 0.3 + 0 * eps)
    calibration = trueup.calibrate(
        net, Images(data.sample(100).float()), family="shift", trust=True, progress=False
    )
    assert not calibration.empty
    x = torch.randn(SHAPE)
    with trueup.attach(net, calibration):
        assert theory.asymmetry(theory.jacobian(net, x, 0.4)) < 1e-5


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.randn(count, 1, 6, 6, generator=generator).cumsum(2).cumsum(3) / 6
    return smooth.tanh()


def test_the_ideal_network_of_a_data_set_is_a_mixture_of_vanishing_width():
    samples = points(20, 0)
    kernel = KernelDensity(samples)
    mixture = GaussianMixture(samples.double(), 1e-6)
    x_t = torch.randn(5, 1, 6, 6)
    alpha, sigma = torch.full((5,), 0.8), torch.tensor([0.05, 0.2, 0.6, 1.0, 3.0])
    for name in ("eps_given", "x0_given"):
        ours = getattr(kernel, name)(x_t, alpha, sigma)
        assert torch.allclose(ours.double(), getattr(mixture, name)(x_t.double(), alpha, sigma), atol=1e-4)


def test_its_error_has_mean_zero_over_its_own_samples_and_not_over_others():
    """Section 3.4: even perfect training leaves the bias of a finite data set."""
    kernel = KernelDensity(points(30, 0))
    net = kernel.denoiser(ContinuousVP()).with_batch_size(200)
    how = {"family": "shift", "trust": True, "progress": False}
    drawn = kernel.sample(1200, seed=2)
    drawn = drawn + 1e-5 * torch.randn(
        drawn.shape, generator=torch.Generator().manual_seed(0)
    )  # twins count once
    own = trueup.calibrate(net, Images(drawn.clamp(-1, 1), data_range=(-1.0, 1.0)), **how)
    other = trueup.calibrate(net, Images(points(1200, 7), data_range=(-1.0, 1.0)), **how)
    assert own.evidence.shift_bound_gain.low < 1e-3
    assert other.evidence.shift_bound_gain.low > 0.1
    assert "miscalibrated" in other.verdict()
    assert own.empty or own.evidence.bound_gain.value < 1e-3 * other.evidence.bound_gain.value


def test_it_is_usable_wherever_a_network_is():
    kernel = KernelDensity(points(12, 0))
    net = kernel.denoiser(ContinuousVP(), "velocity")
    drawn = trueup.sample(net, 6, nfe=40, progress=False)
    distance = torch.cdist(drawn.flatten(1), kernel.samples.flatten(1)).min(1).values
    assert float(distance.max()) < 0.2  # what perfect training makes of samplers: a copying machine
    own, other = (
        trueup.likelihood(net, Images(x, data_range=(-1.0, 1.0)), trust=True, progress=False).mean().value
        for x in (kernel.samples, points(12, 7))
    )
    assert own < other


def test_labels_restrict_it_to_their_samples():
    samples = points(10, 0)
    labels = torch.arange(10) % 2
    net = KernelDensity(samples, labels).denoiser(ContinuousVP())
    x_t, t = torch.randn(4, 1, 6, 6), torch.full((4,), 0.3)
    alone = KernelDensity(samples[labels == 1]).denoiser(ContinuousVP())
    assert torch.allclose(net(x_t, t, torch.ones(4, dtype=torch.int64)), alone(x_t, t), atol=1e-5)
    with pytest.raises(trueup.TrueupError, match="no sample"):
        net(x_t, t, torch.full((4,), 7))


def test_it_reads_what_calibrate_reads(images):
    kernel = KernelDensity.of(Images(images, count=9), (1, 8, 8))
    assert kernel.samples.shape == (9, 1, 8, 8)
    assert -1 <= float(kernel.samples.min()) < float(kernel.samples.max()) <= 1
    with pytest.raises(trueup.TrueupError):
        KernelDensity(torch.zeros(0, 1, 4, 4))


def test_the_ideal_network_of_latents_has_no_range():
    latents = 3 * points(4, 0)
    assert KernelDensity.of(latents, (1, 6, 6), None).denoiser(ContinuousVP()).data_range is None
    assert KernelDensity(latents).denoiser(ContinuousVP()).data_range == (-1.0, 1.0)
