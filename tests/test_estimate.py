"""The estimators against exact models: known biases must be found, absent ones must not."""

import math

import pytest
import torch
from torch import nn

import trueup
from trueup.analytic import GaussianMixture
from trueup.bands import Bands
from trueup.estimate import fit
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow
from trueup.statistics import squared_norm, student_cdf, student_quantile, threshold

from measuring import calibrate, measure

PROCESS = ContinuousVP()


def smooth_bias(shape, size=0.1, seed=3):
    """b(lam) = size * (1 + sin(lam)/2) * a fixed low-frequency map."""
    generator = torch.Generator().manual_seed(seed)
    bands = Bands(shape[1:])
    z = torch.randn(shape[0], math.prod(shape[1:]), generator=generator, dtype=torch.float64)
    z *= (bands.index.flatten() <= 2).double()
    fixed = bands.idct(z.reshape(shape))
    fixed /= fixed.norm()
    return lambda lam: size * (1 + 0.5 * torch.sin(lam.double())) * fixed


def biased(mixture, process=PROCESS, kind="noise", size=0.3):
    bias = smooth_bias(mixture.shape, size)
    return mixture.denoiser(process, kind, lambda eps, u, lam: bias(lam).to(eps)), bias


def output_power(moments):
    """Sum of eps_hat^2, (L, C, bands): eps_hat is the departure from k u, plus k u."""
    second, k = moments.second.sum((0, 1)), moments.filter_gain[:, None, None]
    return second[:, 3] + 2 * k * second[:, 4] + k**2 * second[:, 5]


def held_out_gain(denoiser, calibration, x0, seed=99):
    """Loss without and with the correction on new noise, per level: (mean gain, standard error)."""
    moments = measure(denoiser, x0, images=None, levels=calibration.t, seed=seed)
    gains = []
    for level in range(len(calibration.t)):
        t = torch.full((len(x0),), float(calibration.t[level]), dtype=torch.float64)
        alpha, sigma = moments.alpha[level], moments.sigma[level]
        eps = torch.randn(
            x0.shape, generator=torch.Generator().manual_seed(seed + level), dtype=torch.float64
        )
        x_t = alpha * x0 + sigma * eps
        eps_hat = denoiser.parametrization.to_eps(denoiser(x_t.float(), t).double(), x_t, alpha, sigma)
        lam = calibration.correction.lam[level].expand(len(x0))
        corrected = calibration.correction.apply(eps_hat, x_t / sigma, lam)
        drop = (eps_hat - eps).square().flatten(1).sum(1) - (corrected - eps).square().flatten(1).sum(1)
        gains.append((drop.mean(), drop.std() / len(drop) ** 0.5))
    mean, error = (torch.stack(column) for column in zip(*gains, strict=True))
    return mean, error


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        (ContinuousVP(), "noise"),
        (ContinuousVP(), "data"),
        (ContinuousVP(), "velocity"),
        (ContinuousVP(), "score"),
        (DiscreteVP.linear(), "noise"),
        (VE(0.02, 20.0), "data"),
        (EDM(0.5, 0.02, 20.0), trueup.Parametrization("edm", 0.5)),
        (Flow(1000.0, 0.02, 0.98), "flow"),
    ],
)
def test_a_known_bias_is_found_under_every_process_and_parametrization(mixture, process, kind):
    denoiser, bias = biased(mixture, process, kind)
    cal = calibrate(denoiser, mixture.sample(300), family="shift", batch_size=300)
    truth = torch.stack([bias(lam) for lam in cal.correction.lam])
    found = cal.correction.shift_map()
    error = (found - truth).square().flatten(1).sum(1)
    # 300 images of unit noise in 8 coefficients at worst: 8/300 = 0.03, and the truth is 0.02 to 0.2
    assert error.max() < 0.03
    assert error.mean() < 0.1 * truth.square().flatten(1).sum(1).mean()


@pytest.mark.parametrize("estimator", ["plain", "paired", "regressed"])
def test_unshrunk_estimates_miss_by_their_own_standard_error(mixture, estimator):
    denoiser, bias = biased(mixture)
    moments = measure(denoiser, mixture.sample(400), images=None, levels=[0.05, 0.3, 0.8])
    cal = fit(moments, family="shift", estimator=estimator)
    truth = torch.stack([bias(lam) for lam in cal.correction.lam])
    squared = (cal.correction.shift_map() - truth).square().flatten(1).sum(1)
    outputs = output_power(moments).sum((1, 2)) / 400  # E|eps_hat|^2
    expected = {"plain": outputs, "paired": cal.evidence.loss.value, "regressed": cal.evidence.loss.value}[
        estimator
    ] / 400
    # the mean of 96 squared normals has a relative spread of sqrt(2/96) = 0.14; regression can only lower it
    assert (squared < 1.6 * expected).all()
    if estimator != "regressed":
        assert (squared > 0.55 * expected).all()


def test_pairing_beats_plain_averaging_by_the_denoising_loss(mixture):
    denoiser, bias = biased(mixture)
    moments = measure(denoiser, mixture.sample(200), images=None, levels=[0.6])
    truth = bias(moments.lam[0])
    plain, paired = (
        (fit(moments, family="shift", estimator=name).correction.shift_map()[0] - truth).square().sum()
        for name in ("plain", "paired")
    )
    loss = fit(moments, family="shift").evidence.loss.value[0] / 96
    # errors are in the ratio 1 : loss; each is a chi-square of 96 degrees of freedom
    assert float(paired / plain) == pytest.approx(float(loss), rel=0.6)


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_an_ideal_denoiser_gets_no_correction(mixture, family):
    exact, false_alarms = mixture.denoiser(PROCESS), 0
    for seed in range(8):
        moments = measure(exact, mixture.sample(100, seed), seed=seed, batch_size=100)
        cal = fit(moments, family=family)
        false_alarms += not cal.empty
        # and what slips through must be negligible at its level
        assert (cal.correction.b.square().sum((1, 2)) < 1e-3 * cal.evidence.loss.value).all()
    assert false_alarms <= 2  # held-out confirmation is set to be fooled once in about twenty fits


def test_the_verdict_on_an_ideal_denoiser_is_that_there_is_nothing_to_do():
    data = GaussianMixture(torch.zeros(1, 1, 8, 8, dtype=torch.float64), std=1.0)
    cal = calibrate(data.denoiser(PROCESS), data.sample(64), batch_size=64)
    assert cal.empty
    assert cal.verdict() == "calibrated within noise: nothing to do."


def test_spectral_finds_gains_that_a_shift_cannot(mixture):
    distortion = lambda eps, u, lam: 0.3 * eps - 0.05 * u  # noqa: E731
    denoiser = mixture.denoiser(PROCESS, distortion=distortion)
    moments = measure(denoiser, mixture.sample(200), images=None, levels=[0.1, 0.2, 0.3, 0.4, 0.5])
    spectral = fit(moments, family="spectral")
    shift = fit(moments, family="shift")
    # the best linear correction undoes eps_hat = 1.3 eps* - 0.05 u: a = 0.3/1.3, d = -0.05/1.3
    powerful = output_power(moments) > 0.05 * moments.second.sum((0, 1))[:, 5]
    a, d = spectral.correction.a, spectral.correction.d
    assert (a - 0.3 / 1.3).abs()[powerful].median() < 0.05
    assert (d + 0.05 / 1.3).abs()[powerful].median() < 0.02
    gain, error = held_out_gain(denoiser, spectral, mixture.sample(2000, 5))
    assert (gain > 5 * error).all()
    assert (spectral.evidence.gain.value > 3 * shift.evidence.gain.value).all()


def test_the_predicted_gain_is_the_gain_on_new_images(mixture):
    denoiser, _ = biased(mixture, size=0.5)
    cal = calibrate(
        denoiser, mixture.sample(200), levels=[0.1, 0.3, 0.5, 0.7], family="shift", batch_size=200
    )
    gain, error = held_out_gain(denoiser, cal, mixture.sample(4000, 5))
    spread = (cal.evidence.gain.error**2 + error**2).sqrt()
    assert ((cal.evidence.gain.value - gain).abs() < 4 * spread).all()


def test_the_gain_of_a_shift_is_the_squared_size_of_the_bias(mixture):
    """Paper, equation 36, in eps space; and the bound's gain is its integral over lam."""
    denoiser, bias = biased(mixture, size=0.5)
    cal = calibrate(denoiser, mixture.sample(400), family="shift", batch_size=400)
    truth = torch.stack([bias(lam).square().sum() for lam in cal.correction.lam])
    e = cal.evidence
    assert ((e.eta2.value - truth).abs() < 4 * e.eta2.error).all()
    lam = torch.linspace(
        float(cal.correction.lam[-1]), float(cal.correction.lam[0]), 2001, dtype=torch.float64
    )
    integral = torch.trapezoid(torch.stack([bias(v).square().sum() for v in lam]), lam)
    area = e.shift_bound_gain
    assert abs(area.value - float(integral)) < area.high - area.low
    # half the integral of g^2/sigma^2 |eta|^2 dt, equation 21 of the paper, is the same number
    t = torch.linspace(PROCESS.t_min, PROCESS.t_max, 20001, dtype=torch.float64)
    sizes = 0.25 * (1 + 0.5 * torch.sin(PROCESS.lam(t))) ** 2
    paper = 0.5 * torch.trapezoid(PROCESS.g2(t) / PROCESS.sigma(t) ** 2 * sizes, t)
    assert float(paper) == pytest.approx(float(integral), rel=1e-3)  # trapezoid rule on 20,000 points


def test_batch_size_changes_nothing(mixture):
    denoiser, _ = biased(mixture)
    x0 = mixture.sample(30)
    fits = [calibrate(denoiser, x0, levels=[0.1, 0.4, 0.9], batch_size=b) for b in (1, 7, 30)]
    for other in fits[1:]:
        for name in ("b", "a", "d"):
            mine, theirs = getattr(fits[0].correction, name), getattr(other.correction, name)
            assert (mine - theirs).abs().max() <= 1e-6 * max(float(mine.abs().max()), 1e-12)
        assert torch.equal(fits[0].data_digests, other.data_digests)


def test_batch_size_changes_nothing_for_a_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)).double()

    def call(x_t, t):
        return net(x_t)

    denoiser = trueup.Denoiser(net, PROCESS, "noise", (3, 8, 8), call=call, data_range=None)
    x0 = torch.rand(24, 3, 8, 8) * 2 - 1
    one, two = (calibrate(denoiser, x0, levels=[0.2, 0.7], batch_size=b) for b in (24, 5))
    assert torch.allclose(one.correction.b, two.correction.b, rtol=1e-6, atol=1e-9)
    assert torch.allclose(one.correction.a, two.correction.a, rtol=1e-6, atol=1e-9)


def test_the_seed_changes_the_noise_and_nothing_else(mixture):
    denoiser, _ = biased(mixture)
    x0 = mixture.sample(20)
    same, again, other = (measure(denoiser, x0, levels=[0.5], seed=s) for s in (1, 1, 2))
    assert torch.equal(same.first, again.first)
    assert not torch.allclose(same.first, other.first)
    assert same.data_digest == other.data_digest


def test_moments_with_other_settings_do_not_add(mixture):
    x0 = mixture.sample(4)
    one = measure(mixture.denoiser(PROCESS), x0, levels=[0.2])
    other = measure(mixture.denoiser(PROCESS), x0, levels=[0.2], seed=5)
    with pytest.raises(trueup.TrueupError, match="other settings"):
        one + other


@pytest.mark.parametrize("images", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_any_number_of_images_gives_finite_corrections(mixture, images, family):
    denoiser, _ = biased(mixture)
    cal = calibrate(denoiser, mixture.sample(images), family=family, levels=[0.3, 0.6])
    for part in (cal.correction.b, cal.correction.a, cal.correction.d):
        assert torch.isfinite(part).all()
    assert cal.evidence.images == images
    assert str(images) in cal.summary()
    if images < 4:
        assert cal.empty
        assert "cannot confirm" in cal.verdict()


def test_one_level_is_enough(mixture):
    denoiser, _ = biased(mixture)
    cal = calibrate(denoiser, mixture.sample(200), levels=[0.5], family="shift")
    assert cal.correction.b.shape[0] == 1
    assert not cal.empty


@pytest.mark.parametrize("shape", [(1, 16), (2, 5, 9), (1, 4, 4, 6)])
def test_any_spatial_rank_and_size(shape):
    data = GaussianMixture(torch.zeros(1, *shape, dtype=torch.float64), std=0.7)
    denoiser = data.denoiser(PROCESS, distortion=lambda eps, u, lam: 0.2 + 0.2 * eps)
    cal = calibrate(denoiser, data.sample(200), levels=[0.3, 0.5], batch_size=200)
    gain, error = held_out_gain(denoiser, cal, data.sample(1000, 8))
    assert (gain > 4 * error).all()


def test_knowing_the_data_mean_better_sharpens_the_shift(mixture):
    """The x0 control of equation 16: more images for the mean, no more network evaluations."""
    denoiser, bias = biased(mixture)
    errors = {}
    for extra in (0, 4000):
        total = 0.0
        for seed in range(4):
            moments = measure(
                denoiser, mixture.sample(4040, seed), images=40, mean_images=extra, seed=seed, levels=[0.75]
            )
            cal = fit(moments, family="shift", estimator="regressed")
            total += float((cal.correction.shift_map()[0] - bias(moments.lam[0])).square().sum())
        errors[extra] = total
        assert moments.images == 40
    assert errors[4000] < 0.7 * errors[0]


def test_levels_outside_the_process_are_refused(mixture):
    with pytest.raises(trueup.TrueupError, match=r"between 0\.001 and 1"):
        measure(mixture.denoiser(PROCESS), mixture.sample(2), levels=[1.5])


def test_a_network_that_returns_nan_is_refused(mixture):
    bad = trueup.Denoiser(lambda x_t, t: x_t * math.nan, PROCESS, "noise", mixture.shape, data_range=None)
    with pytest.raises(trueup.TrueupError, match="not finite at t ="):
        measure(bad, mixture.sample(2), levels=[0.5])


@pytest.mark.parametrize(
    ("family", "estimator", "words"),
    [
        ("shape", "shrunk", "unknown family"),
        ("shift", "best", "unknown estimator"),
        ("spectral", "plain", "shift"),
    ],
)
def test_unknown_settings_are_named(mixture, family, estimator, words):
    with pytest.raises(trueup.TrueupError, match=words):
        calibrate(mixture.denoiser(PROCESS), mixture.sample(2), family=family, estimator=estimator)


def test_student_t_agrees_with_scipy():
    from scipy import stats

    for dof in (1, 2, 3, 7, 15, 30):
        for t in (-3.1, -0.4, 0.0, 1.7, 12.0):
            assert student_cdf(t, dof) == pytest.approx(stats.t.cdf(t, dof), abs=1e-12)
        for probability in (0.025, 0.5, 0.9, 0.975, 0.999):
            expected = stats.t.ppf(probability, dof)
            assert student_quantile(probability, dof) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert threshold(2.0, 16) == pytest.approx(stats.t.isf(stats.norm.sf(2.0), 15), rel=1e-9)


@pytest.mark.parametrize("size", [0.0, 0.3, 3.0, 30.0])
def test_squared_norm_is_unbiased_and_its_interval_covers(size):
    """2,000 repetitions of 16 folds of correlated noise around a vector of known size."""
    generator = torch.Generator().manual_seed(1)
    dims, folds = 100, 16
    mix = torch.randn(dims, dims, generator=generator, dtype=torch.float64) / dims**0.5
    mix *= torch.linspace(2.0, 0.2, dims, dtype=torch.float64)
    eta = torch.ones(dims, dtype=torch.float64) * (size / dims) ** 0.5
    means = eta + torch.randn(2000, folds, dims, generator=generator, dtype=torch.float64) @ mix
    rows = torch.full((folds,), 3.0, dtype=torch.float64)
    sums = means * 3.0
    norm = squared_norm(sums @ sums.transpose(1, 2), rows)
    assert float(norm.value.mean()) == pytest.approx(size, abs=4 * float(norm.value.std()) / 2000**0.5)
    covered = ((norm.low <= size) & (size <= norm.high)).double().mean()
    # 0.95 aimed at and reached at both ends; 16 folds cost a little where noise and signal are alike
    assert 0.91 < float(covered) < 0.98


@pytest.mark.parametrize("common", [0.0, 0.5])
def test_the_interval_of_nothing_covers_with_folds_of_very_different_size(common):
    """As groups deal them: sixteen, each 0.7 of the one before; common: of the variance, within a fold."""
    rows = (100 * 0.7 ** torch.arange(16, dtype=torch.float64)).floor().clamp_min(1)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2000, 16, 64, generator=generator, dtype=torch.float64)
    sums = noise * (rows.square() * common + rows * (1 - common)).sqrt()[:, None]
    norm = squared_norm(sums @ sums.transpose(1, 2), rows)
    assert float((norm.low > 0).double().mean()) < 0.04  # 0.025 aimed at
    assert float(norm.value.mean()) == pytest.approx(0, abs=4 * float(norm.value.std()) / 2000**0.5)


def test_folds_that_are_worth_fewer_than_four_say_nothing():
    rows = torch.tensor([150.0] + 15 * [3.0], dtype=torch.float64)
    sums = rows[:, None] * torch.ones(16, 8, dtype=torch.float64)
    assert math.isnan(squared_norm(sums @ sums.T, rows).low)
    four = torch.full((4,), 7.0, dtype=torch.float64)
    assert not math.isnan(squared_norm((sums @ sums.T)[:4, :4], four).low)


@pytest.mark.parametrize(("run", "more"), [(40, 200), (200, 40)])
def test_a_better_known_mean_of_the_data_is_no_evidence_of_a_miss(mixture, run, more):
    """Its error is the same whatever the network says, and must not look like what folds have in common."""
    exact, surely = mixture.denoiser(PROCESS), 0.0
    for seed in range(6):
        data = mixture.sample(run + more, seed)
        moments = measure(exact, data, images=run, mean_images=more, seed=seed)
        cal = fit(moments, family="shift")
        assert cal.correction.empty
        surely += float((cal.evidence.eta2.low > 0).double().mean()) / 6
    assert surely < 0.15  # 0.025 of levels, which are alike in a run; half of them before


def test_held_out_gains_of_unshrunk_estimates_are_unbiased(mixture):
    """On an ideal denoiser every correction harms by its own size, and the held-out gain must say so."""
    exact, stated, true = mixture.denoiser(PROCESS), 0.0, 0.0
    for seed in range(12):
        moments = measure(exact, mixture.sample(48, seed), seed=seed, levels=[0.1, 0.4])
        cal = fit(moments, family="shift", estimator="regressed")
        stated = stated + cal.evidence.gain.value / 12
        true = true - cal.correction.b.square().sum((1, 2)) / 12
    # held-out fits have 15/16 of the images, so err 7% more; the average of 12 is known to about 15%
    assert torch.allclose(stated, true, rtol=0.35)


def test_two_or_three_images_never_yield_a_correction(mixture):
    denoiser, _ = biased(mixture, size=0.5)
    for images in (2, 3):
        for seed in range(6):
            assert calibrate(denoiser, mixture.sample(images, seed), levels=[0.3, 0.6], seed=seed).empty


def test_a_constant_residual_is_fitted_without_complaint(mixture):
    exact = trueup.Denoiser(
        lambda x_t, t: (
            (x_t - PROCESS.alpha(t.double()).reshape(-1, 1, 1, 1).float())
            / PROCESS.sigma(t.double()).reshape(-1, 1, 1, 1).float()
            + 0.3
        ),
        PROCESS,
        "noise",
        mixture.shape,
        data_range=None,
    )
    nearly = 1 + 1e-6 * torch.arange(32.0).reshape(-1, 1, 1, 1)  # equal images would be one
    cal = calibrate(exact, nearly.expand(-1, *mixture.shape), levels=[0.2, 0.5])
    assert cal.correction.shift_map().mean() == pytest.approx(0.3, abs=0.01)
