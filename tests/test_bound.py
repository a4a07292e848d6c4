"""The likelihood bound, against torch.distributions, diffusers, scipy and closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from scipy import stats
from torch.distributions import Normal, kl_divergence

import trueup
from trueup import Images
from trueup.analytic import GaussianMixture
from trueup.bands import Bands
from trueup.calibration import Correction
from trueup.density import objectives
from trueup.density.bound import decoder_variances, step_times
from trueup.density.levels import Chances, continuous_levels, data_variance, filter_loss
from trueup.density.terms import discrete_decoder, prior, step
from trueup.hf import as_denoiser
from trueup.images import Samples
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow
from trueup.sampling.store import Kept
from trueup.statistics import group_means

from tiny import tiny_unet

SHAPE = (1, 4, 4)
STD = 0.5
PROCESSES = {"continuous_vp": ContinuousVP(), "discrete_vp": DiscreteVP.linear(), "ve": VE(), "flow": Flow()}


def gaussian(process, distortion=None):
    """Data from N(0, STD^2) and its exact denoiser, in single precision as networks are."""
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    return data, data.denoiser(process, distortion=distortion).with_batch_size(500)


def closed_form_bound(process, x0):
    """The exact denoiser's bound in nats: the loss of a Gaussian integrates to a logarithm."""
    size = math.prod(SHAPE)
    lam = [float(process.lam(t)) for t in (process.t_min, process.t_max)]
    gain = [0.5 * size * math.log1p(STD**2 * math.exp(2 * v)) for v in lam]
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    flat = 0.5 * size * math.log(2 * math.pi * math.e * (sigma / alpha) ** 2)
    end = [float(f(process.t_max)) for f in (process.alpha, process.sigma)]
    last = kl_divergence(
        Normal(end[0] * x0.double(), torch.tensor(end[1], dtype=torch.float64)),
        Normal(torch.zeros((), dtype=torch.float64), torch.tensor(process.prior_std, dtype=torch.float64)),
    )
    return gain[0] - gain[1] + flat + float(last.flatten(1).sum(1).mean())


def test_the_prior_is_the_divergence_of_two_gaussians():
    x0 = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    ours = prior(x0, alpha=0.01, sigma=0.9, prior_std=1.1)
    theirs = kl_divergence(Normal(0.01 * x0, 0.9 * torch.ones_like(x0)), Normal(0.0 * x0, 1.1))
    assert torch.allclose(ours, theirs.flatten(1).sum(1), rtol=1e-12)


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned_range"])
@pytest.mark.parametrize("t", [1, 30, 999])
def test_a_step_is_the_divergence_from_diffusers_own_step(variance, t, monkeypatch):
    scheduler = DDPMScheduler(
        beta_schedule="linear", variance_type=variance, clip_sample=False, prediction_type="epsilon"
    )
    scheduler.set_timesteps(1000)
    seed = torch.Generator().manual_seed(t)
    x0, eps, eps_hat, v = (torch.randn(4, 3, 5, 5, generator=seed, dtype=torch.float64) for _ in range(4))
    v = v.tanh()
    bar = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64).neg().add(1).cumprod(0)
    scheduler.alphas_cumprod = bar  # in float32 the first steps are rounded in the third digit
    x_t = bar[t].sqrt() * x0 + (1 - bar[t]).sqrt() * eps
    beta = 1 - bar[t] / bar[t - 1]
    # q(x_{t-1} | x_t, x0), as in Ho et al. 2020, equations 6 and 7
    mean = (bar[t - 1].sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - bar[t - 1]) * x_t) / (1 - bar[t])
    posterior = Normal(mean, ((1 - bar[t - 1]) / (1 - bar[t]) * beta).sqrt().expand_as(mean))
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda shape, **k: torch.zeros(shape)
    )
    learned = variance == "learned_range"
    output = torch.cat([eps_hat, v], 1) if learned else eps_hat
    predicted = scheduler.step(output, t, x_t).prev_sample
    log_or_not = scheduler._get_variance(t, predicted_variance=v if learned else None)
    std = (0.5 * log_or_not).exp() if learned else log_or_not.sqrt()
    theirs = kl_divergence(posterior, Normal(predicted, std.double().expand_as(mean)))
    process = DiscreteVP(bar)
    lam = process.lam(torch.tensor([t - 1.0, float(t)])).expand(4, 2)
    largest = 2 * (process.sigma(t).log() - process.sigma(t - 1).log())
    share = {"fixed_small": 0.0 * v, "fixed_large": 0.0 * v + 1, "learned_range": 0.5 * (v + 1)}[variance]
    squared = (eps_hat - eps).square().flatten(1)
    ours = step(squared, lam[:, 0], lam[:, 1], (largest * share).flatten(1))
    assert torch.allclose(ours, theirs.flatten(1).sum(1), rtol=1e-5)


def test_the_decoder_is_the_mass_scipy_finds():
    values = torch.linspace(-1, 1, 256, dtype=torch.float64)
    x0 = values[torch.tensor([0, 1, 100, 254, 255])].reshape(5, 1, 1, 1)
    mean = torch.tensor([-0.9, -0.98, -0.2, 1.3, 1.5], dtype=torch.float64).reshape(5, 1, 1, 1)
    half = 1 / 255
    low = [-np.inf, *(x0.flatten()[1:] - half).tolist()]
    high = [*(x0.flatten()[:-1] + half).tolist(), np.inf]
    mass = stats.norm.cdf(high, mean.flatten(), 0.05) - stats.norm.cdf(low, mean.flatten(), 0.05)
    ours = discrete_decoder(x0, mean, 0.05, (-1.0, 1.0))
    assert torch.allclose(ours, -torch.from_numpy(mass).log(), rtol=1e-6)


def test_the_decoder_is_finite_where_floats_run_out():
    x0 = torch.tensor([-1.0, 1.0, 0.5], dtype=torch.float64).reshape(3, 1, 1, 1)
    nats = discrete_decoder(x0, -x0, 1e-3, (-1.0, 1.0))
    assert torch.isfinite(nats).all()
    assert nats.min() > 4e5  # half of (distance/std)^2 and more


def test_the_decoder_variance_is_improved_ddpms():
    scheduler = DDPMScheduler(beta_schedule="linear", variance_type="fixed_small")
    expected = float(scheduler._get_variance(1))  # improved DDPM uses that of step 1 for step 0
    assert decoder_variances(DiscreteVP.linear())[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_bound_of_an_exact_denoiser_is_its_closed_form_and_above_the_likelihood(name):
    process = PROCESSES[name]
    data, net = gaussian(process)
    x0 = data.sample(2000)
    found = trueup.likelihood(net, Images(x0), draws=4, progress=False)
    size = math.prod(SHAPE)
    mean = found.mean().scaled(size * math.log(2))
    assert mean.low < closed_form_bound(process, x0) < mean.high
    assert mean.value == pytest.approx(closed_form_bound(process, x0), abs=0.02 * size)
    entropy = 0.5 * size * math.log(2 * math.pi * math.e * STD**2)  # what the likelihood is on average
    assert entropy < closed_form_bound(process, x0) < entropy + 0.01 * size


def test_intervals_of_the_bound_and_of_its_gain_cover_the_closed_forms():
    process = ContinuousVP()
    data, net, calibration, gain = biased(process)
    covered = {"bound": 0, "gain": 0}
    x0 = data.sample(120 * 40, seed=5)
    size = math.prod(SHAPE)
    for repeat in range(120):
        part = x0[40 * repeat : 40 * (repeat + 1)]
        found = trueup.likelihood(
            net, Images(part), calibration, draws=4, seed=repeat, trust=True, progress=False
        )
        # what a bias adds to the exact denoiser's bound is what removing it gains, on average over the data
        expected = closed_form_bound(process, x0) + gain
        bound = found.mean().scaled(size * math.log(2))
        covered["bound"] += bound.low < expected < bound.high
        change = found.difference().scaled(size * math.log(2))
        covered["gain"] += change.low < -gain < change.high
    for name, count in covered.items():
        assert count >= 0.9 * 120, (name, count)  # 95% with a binomial error of 2%; covering more is no fault
    assert covered["gain"] < 120


def biased(process, size=0.3):
    """An exact denoiser off by a constant map, the calibration that removes it, and the bound's gain."""
    pattern = torch.linspace(-1, 1, math.prod(SHAPE)).reshape(SHAPE)
    data, net = gaussian(process, lambda eps, u, lam: size * pattern.to(eps).expand_as(eps))
    rough = trueup.calibrate(net, Images(data.sample(40)), family="shift", trust=True, progress=False)
    bands = rough.correction.bands
    b = bands.dct(size * pattern.double()).flatten(1).expand(len(rough.t), -1, -1)
    zero = torch.zeros(len(rough.t), SHAPE[0], bands.count, dtype=torch.float64)
    exact = Correction(rough.correction.lam, b.clone(), zero, zero.clone(), bands)
    lam = rough.correction.lam
    nats = float((lam[0] - lam[-1]) * (size * pattern.double()).square().sum())  # equation 26
    return data, net, replace(rough, correction=exact), nats


@pytest.mark.parametrize("parametrization", ["noise", "data", "velocity", "flow"])
def test_the_gain_of_the_bound_is_the_paper_s_integral_whatever_is_predicted(parametrization):
    process = Flow() if parametrization == "flow" else ContinuousVP()
    pattern = torch.linspace(-1, 1, 16).reshape(SHAPE)
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    net = data.denoiser(process, parametrization, lambda eps, u, lam: (0.4 * pattern).to(eps).expand_as(eps))
    net = net.with_batch_size(500)
    x0 = data.sample(2000)
    calibration = trueup.calibrate(net, Images(x0[:1000]), family="shift", trust=True, progress=False)
    found = trueup.likelihood(net, Images(x0), calibration, trust=True, progress=False)
    assert found.index == list(range(1000, 2000))  # the calibration's own images are passed over
    assert found.notes[0] == "1000 images made the calibration and are passed over"
    lam = calibration.correction.lam
    expected = float((lam[0] - lam[-1]) * (0.4 * pattern.double()).square().sum())
    change = found.difference().scaled(16 * math.log(2))
    assert -change.value == pytest.approx(expected, abs=change.reach + 0.02 * expected)  # a fitted shift
    assert "they agree" in found.agreement()


def test_levels_drawn_where_the_loss_is_need_a_third_of_the_evaluations():
    process = DiscreteVP.linear()
    smooth = torch.randn(64, 1, 16, 16, generator=torch.Generator().manual_seed(0)).cumsum(2).cumsum(3) / 16
    data = GaussianMixture(smooth[:8], 0.05)
    net = data.denoiser(process).with_batch_size(16)
    x0 = data.sample(16)
    variance = {}
    for importance in (False, True):
        totals = [
            trueup.likelihood(net, x0, draws=4, importance=importance, seed=seed, progress=False).mean().value
            for seed in range(40)
        ]
        variance[importance] = np.var(totals, ddof=1)
    assert variance[False] > 3 * variance[True]


def test_drawn_levels_integrate_any_loss_without_bias():
    process = DiscreteVP.linear()
    bands = Bands((8, 8))
    x0 = torch.randn(64, 1, 8, 8).cumsum(2)
    levels = continuous_levels(process, Chances(data_variance(x0, bands), bands))
    _, lam, weight = levels.draw(torch.arange(4000), 3, seed=1)
    lows, tops = float(process.lam(process.t_max)), float(process.lam(process.t_min))
    assert float(lam.min()) >= lows
    assert float(lam.max()) <= tops
    assert float(weight.sum(1).mean()) == pytest.approx(tops - lows, rel=0.02)
    value = float((weight * lam.sin()).sum(1).mean())
    assert value == pytest.approx(math.cos(lows) - math.cos(tops), abs=0.05)


def test_the_filter_s_loss_is_the_loss_of_a_linear_denoiser():
    data, net = gaussian(ContinuousVP())
    bands = Bands(SHAPE[1:])
    lam = torch.tensor([1.0], dtype=torch.float64)
    x0 = data.sample(4000)
    expected = filter_loss(lam, torch.full((1, bands.count), STD**2, dtype=torch.float64), bands)
    t = net.process.t_of_lam(lam)
    losses = objectives(net, Images(x0), levels=t, progress=False).before
    assert float(losses.mean()) == pytest.approx(float(expected), rel=0.03)


def test_all_steps_of_a_chain_are_improved_ddpms_sum(images):
    """Against a loop over diffusers' schedule written out with torch.distributions."""
    net = tiny_unet()
    scheduler = DDPMScheduler(num_train_timesteps=12, beta_start=0.001, beta_end=0.4, clip_sample=False)
    model = as_denoiser(net, scheduler=scheduler)
    found = trueup.likelihood(model, Images(images, count=3), steps=12, draws=12, progress=False)
    assert "all of 12 steps" in found.description
    process = DiscreteVP(scheduler.alphas_cumprod)
    from trueup.density.bound import _NOISE_KEY
    from trueup.noise import normals

    batch = next(Samples(Images(images, count=3), (1, 8, 8), (-1.0, 1.0)).batches(3))
    bar = scheduler.alphas_cumprod.double()
    total = torch.zeros(3, dtype=torch.float64)
    for t in range(12):
        eps = normals(0, batch.index, torch.tensor([_NOISE_KEY + t]), (1, 8, 8), torch.device("cpu"))[0]
        x_t = (bar[t].sqrt() * batch.x0 + (1 - bar[t]).sqrt() * eps).float()
        with torch.inference_mode():
            out = net(x_t, torch.full((3,), t)).sample.double()
        x0_hat = (x_t.double() - (1 - bar[t]).sqrt() * out) / bar[t].sqrt()
        if t == 0:
            std = math.sqrt(float((1 - bar[0]) / (1 - bar[1]) * (1 - bar[1] / bar[0])))
            total += discrete_decoder(batch.x0, x0_hat, std, (-1.0, 1.0))
            continue
        beta = 1 - bar[t] / bar[t - 1]
        over = 1 - bar[t]
        c0, ct = bar[t - 1].sqrt() * beta / over, (1 - beta).sqrt() * (1 - bar[t - 1]) / over
        std = ((1 - bar[t - 1]) / over * beta).sqrt()
        means = [c0 * x.double() + ct * x_t.double() for x in (batch.x0, x0_hat)]
        total += kl_divergence(*(Normal(m, std.expand_as(m)) for m in means)).flatten(1).sum(1)
    total += prior(batch.x0, float(bar[11].sqrt()), float((1 - bar[11]).sqrt()), 1.0)
    assert torch.allclose(found.before, total, rtol=1e-4)
    assert torch.allclose(step_times(process, 12), torch.arange(12.0, dtype=torch.float64))


@pytest.mark.parametrize("name", [*PROCESSES, "edm"])
def test_more_steps_make_a_tighter_bound(name):
    process = EDM() if name == "edm" else PROCESSES[name]
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    net = data.denoiser(process, "data" if name == "edm" else "noise").with_batch_size(300)
    net.data_range = (-1.0, 1.0)
    pixels = data.sample(300).clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
    bounds = [
        trueup.likelihood(net, Images(pixels), steps=steps, draws=8, progress=False).mean()
        for steps in (20, 100, 1000)
    ]
    continuous = trueup.likelihood(net, Images(pixels), draws=8, progress=False).mean()
    values = [bound.value for bound in (*bounds, continuous)]
    assert values[0] > values[1] > values[2] - 0.01 > continuous.value - 0.03
    assert values[2] < continuous.value + 0.8  # DDPM's first steps are long ones


def test_a_run_keeps_the_bound_of_floating_point_data(tmp_path):
    data, net = gaussian(ContinuousVP())
    x0 = data.sample(40)
    fresh = trueup.likelihood(net, Images(x0, count=40), draws=2, progress=False)
    how = {"draws": 2, "run": tmp_path / "run", "progress": False}
    few = trueup.likelihood(net, Images(x0, count=5), **how)
    assert torch.equal(few.before, fresh.before[:5])  # levels do not depend on how many images are asked for
    more = trueup.likelihood(net, Images(x0, count=40), **how)
    assert more.index == fresh.index
    assert torch.allclose(more.before, fresh.before, rtol=1e-6)


def test_a_run_notices_other_labels(tmp_path):
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    ideal = data.denoiser(ContinuousVP())

    def network(x_t, t, y):
        return ideal.network(x_t, t) + y[:, None, None, None].to(x_t)

    net = trueup.Denoiser(network, ContinuousVP(), "noise", SHAPE, data_range=None, conditional=True)
    how = {"draws": 1, "run": tmp_path / "run", "progress": False}
    trueup.likelihood(net, [(image, 0) for image in data.sample(4)], **how)
    with pytest.raises(trueup.TrueupError, match="is not what it was"):
        trueup.likelihood(net, [(image, 1) for image in data.sample(4)], **how)


def test_a_calibration_of_some_levels_promises_nothing_about_all():
    data, net, calibration, _ = biased(ContinuousVP())
    x0 = data.sample(60)
    assert trueup.likelihood(net, x0, calibration, trust=True, progress=False).agreement() is not None
    some = trueup.calibrate(
        net, data.sample(60, seed=3), levels=[0.2, 0.4, 0.6], family="shift", trust=True, progress=False
    )
    assert trueup.likelihood(net, x0, some, trust=True, progress=False).agreement() is None


def test_learned_variances_are_read_and_asked_for(images):
    net = tiny_unet(out_channels=2)
    model = as_denoiser(net, scheduler=DDPMScheduler(variance_type="learned_range"))
    two = Images(images, count=2)
    learned, small = (
        trueup.likelihood(model, two, steps=100, draws=4, variance=v, progress=False) for v in (None, "small")
    )
    assert "learned_range" in learned.description
    assert not torch.allclose(learned.before, small.before)
    plain = as_denoiser(tiny_unet(), scheduler=DDPMScheduler())
    with pytest.raises(trueup.TrueupError, match="no learned variance"):
        trueup.likelihood(plain, two, steps=50, variance="learned_range", progress=False)


@pytest.mark.parametrize(("said", "meant"), [(-1.0, "small"), (1.0, "large")])
def test_learned_variances_reach_from_the_smallest_to_the_largest(said, meant):
    data, net = gaussian(DiscreteVP.linear())

    def network(x_t, t):
        eps = net.network(x_t, t)
        return torch.cat([eps, torch.full_like(eps, said)], 1)

    learning = trueup.Denoiser(network, net.process, "noise", SHAPE)
    pixels = data.sample(4).clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
    plain = trueup.Denoiser(net.network, net.process, "noise", SHAPE)
    how = {"steps": 50, "draws": 50, "progress": False}
    ours = trueup.likelihood(learning, pixels, variance="learned_range", **how)
    theirs = trueup.likelihood(plain, pixels, variance=meant, **how)
    assert torch.allclose(ours.terms["diffusion"][0], theirs.terms["diffusion"][0], rtol=1e-5)
    if meant == "small":  # improved DDPM's fixed variances decode alike
        assert torch.allclose(ours.before, theirs.before, rtol=1e-5)


def test_what_an_image_gets_does_not_depend_on_its_batch():
    data, net = gaussian(ContinuousVP())
    x0 = data.sample(50)
    one, other = (trueup.likelihood(net.with_batch_size(size), x0, progress=False).before for size in (50, 7))
    assert torch.allclose(one, other, rtol=1e-6)


def test_a_conditional_network_needs_labels_and_gets_them():
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    ideal = data.denoiser(ContinuousVP())
    seen = []

    def network(x_t, t, y):
        seen.append(y.clone())
        return ideal.network(x_t, t) + 0.1 * y[:, None, None, None].to(x_t)

    net = trueup.Denoiser(network, ContinuousVP(), "noise", SHAPE, data_range=None, conditional=True)
    x0 = data.sample(6)
    with pytest.raises(trueup.TrueupError, match="labels"):
        trueup.likelihood(net, x0, progress=False)
    pairs = [(image, index % 2) for index, image in enumerate(x0)]
    found = trueup.likelihood(net, Images(pairs), draws=2, progress=False)
    assert len(found.index) == 6
    assert {tuple(y.tolist()) for y in seen} == {(0, 1, 0, 1, 0, 1)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "guess"}, "method"),
        ({"steps": 1}, "2 to 1000"),
        ({"steps": 2000}, "2 to 1000"),
        ({"variance": "large"}, "T steps"),
        ({"variance": "tiny", "steps": 9}, "variance is one of"),
        ({"draws": 0}, "draws"),
        ({"tolerance": 0.0, "method": "ode"}, "tolerance"),
        ({"trace": "guess", "method": "ode"}, "trace is one of"),
        ({"probes": 0, "method": "ode"}, "probe"),
        ({"start": "middle", "method": "ode"}, "start is one of"),
    ],
)
def test_nonsense_is_refused_in_one_line(options, words):
    data, net = gaussian(DiscreteVP.linear())
    with pytest.raises(trueup.TrueupError, match=words) as error:
        trueup.likelihood(net, data.sample(3), progress=False, **options)
    assert "\n" not in str(error.value)


def test_an_edm_network_has_the_bound_of_the_same_data():
    data = GaussianMixture(torch.zeros(1, *SHAPE), STD)
    x0 = data.sample(1000)
    found = [
        trueup.likelihood(
            data.denoiser(process, "data").with_batch_size(500), Images(x0), progress=False
        ).mean()
        for process in (VE(), EDM())
    ]
    assert found[0].value == pytest.approx(found[1].value, abs=1e-4)


def test_a_sure_loss_is_called_one():
    """Item 7: it read as no sure gain."""
    data, net, calibration, gain = biased(ContinuousVP())
    thrice = replace(calibration, correction=replace(calibration.correction, b=3 * calibration.correction.b))
    found = trueup.likelihood(net, Images(data.sample(60, seed=1)), thrice, trust=True, progress=False)
    assert found.difference().sign > 0  # more nats
    assert found.difference("diffusion").value * 16 * math.log(2) == pytest.approx(3 * gain, rel=0.1)
    total = next(line for line in found.table().splitlines() if line.strip().startswith("total"))
    assert total.endswith("WORSE")
    assert "WORSE" in repr(found)
    assert "DISAGREE" in found.agreement()


def test_the_correction_is_measured_as_it_is_attached(monkeypatch):
    """Item 6: a table beside the network told what the calibration gains, whatever its hook did."""
    from trueup.calibration.hook import CorrectOutput

    data, net, calibration, _ = biased(ContinuousVP())
    correct = CorrectOutput.correct
    monkeypatch.setattr(
        CorrectOutput, "correct", lambda self, out, x_t, t, y=None: 2 * out - correct(self, out, x_t, t, y)
    )
    found = trueup.likelihood(net, Images(data.sample(60, seed=1)), calibration, trust=True, progress=False)
    assert found.difference().sign > 0
    assert found.evaluations == [8.0, 8.0]
    assert not net.corrected


def test_images_without_others_say_so(tmp_path):
    data, net, _, _ = biased(ContinuousVP())
    x0 = data.sample(60)
    calibration = trueup.calibrate(net, Images(x0), family="shift", trust=True, progress=False)
    found = trueup.likelihood(net, x0, calibration, trust=True, progress=False)
    assert len(found.index) == 60
    assert "made from these very images" in found.notes[0]


def test_images_count_once_and_groups_as_one_each():
    data, net = gaussian(ContinuousVP())
    x0 = data.sample(30)
    twice = torch.cat([x0, x0[:10]])
    how = {"draws": 2, "progress": False}
    once = trueup.likelihood(net, Images(x0), **how)
    found = trueup.likelihood(net, Images(twice), **how)
    assert torch.equal(found.before, once.before)
    assert found.notes[0] == "10 images are there more than once, and count once"
    keys = [min(i, 20) for i in range(30)]  # 20 alone, and ten that belong together
    grouped = trueup.likelihood(net, Images(x0, groups=keys), **how)
    assert torch.equal(grouped.before, once.before)
    values = once.bits_per_dim(once.before)
    means = torch.cat([values[:20], values[20:].mean()[None]])
    assert grouped.mean().value == pytest.approx(float(means.mean()))
    assert grouped.mean().error == pytest.approx(float(means.std()) / math.sqrt(21))
    losses, alone = (
        objectives(net, Images(x0, groups=groups), levels=[0.5], progress=False) for groups in (keys, None)
    )
    assert losses.total("uniform").error != alone.total("uniform").error
    assert losses.losses("before").shape == (21, 1)
    assert torch.allclose(
        losses.losses("before").mean(), group_means(alone.before, torch.tensor(keys)).mean()
    )


def test_what_a_run_kept_is_read_once(tmp_path, monkeypatch):
    data, net = gaussian(ContinuousVP())
    x0, net = data.sample(40), net.with_batch_size(4)
    groups = [i // 2 for i in range(40)]
    how = {"draws": 1, "run": tmp_path / "run", "progress": False}
    first = trueup.likelihood(net, Images(x0), **how)
    reads, tensors = [], Kept.tensors
    monkeypatch.setattr(Kept, "tensors", lambda self, *what: reads.append(what) or tensors(self, *what))
    again = trueup.likelihood(net, Images(x0, groups=groups), **how)  # groups may come later
    assert torch.equal(again.before, first.before)
    assert again.mean().error != first.mean().error
    assert len(reads) == 2  # to compare with, and at the end


def test_a_misused_network_is_refused_before_there_is_a_run(tmp_path):
    data, net = gaussian(ContinuousVP(), lambda eps, u, lam: -2 * eps)
    x0 = data.sample(40)
    run = {"draws": 1, "run": tmp_path / "run", "progress": False}
    for measure, how in ((trueup.likelihood, run), (objectives, {"progress": False})):
        with pytest.raises(trueup.TrueupError, match="trust=True"):
            measure(net, Images(x0, count=32), **how)
    assert not (tmp_path / "run").exists()
    trueup.likelihood(net, Images(x0, count=32), trust=True, **run)
    assert len(trueup.likelihood(net, Images(x0, count=33), **run).index) == 33  # gone on with
