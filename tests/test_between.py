"""Between and beyond measured levels: only what the neighbours support, and nothing far from them."""

from dataclasses import replace

import pytest
import torch

from trueup.bands import Bands
from trueup.calibration.correction import LEVEL_SPACING, Correction
from trueup.calibration.hook import CorrectOutput
from trueup.estimate.confirm import score
from trueup.process import ContinuousVP, DiscreteVP
from trueup.statistics import mean_and_error

from measuring import calibrate, fit, measure

PROCESS = ContinuousVP()


def flat(lam, values, support=None):
    """A correction by a constant image at each level."""
    bands, levels = Bands((4, 4)), len(lam)
    b = torch.zeros(levels, 1, 16, dtype=torch.float64)
    b[:, 0, 0] = 4 * torch.tensor(values, dtype=torch.float64)  # of 4 x 4 pixels
    none = torch.zeros(levels, 1, bands.count, dtype=torch.float64)
    if support is not None:
        support = torch.tensor(support, dtype=torch.float64)[:, None].expand(-1, bands.count)
    return Correction(torch.tensor(lam, dtype=torch.float64), b, none, none, bands, support)


def removed(correction, lam):
    """What it takes off a prediction at one lam."""
    zero = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    return -float(correction.apply(zero, zero, torch.tensor([lam], dtype=torch.float64)).mean())


def test_at_a_measured_level_it_is_whole():
    correction = flat([1.0, 0.6, 0.2], [0.3, -0.2, 0.1], [0.0, 0.5])
    assert [removed(correction, lam) for lam in (1.0, 0.6, 0.2)] == pytest.approx([0.3, -0.2, 0.1])


def test_neighbours_that_agree_are_interpolated():
    correction = flat([1.0, 0.6], [0.3, 0.1], [1.0])
    assert removed(correction, 0.9) == pytest.approx(0.25)


def test_halfway_only_what_both_support_is_left():
    correction = flat([1.0, 0.6], [0.3, 0.1], [0.25])
    assert removed(correction, 0.8) == pytest.approx(0.25 * 0.2)
    assert removed(correction, 0.9) == pytest.approx(0.5 * (0.3 + 0.25 * 0.2))


def test_beyond_the_last_level_it_fades_to_nothing():
    correction = flat([0.0], [0.3])
    reach = LEVEL_SPACING
    for sign in (1, -1):
        distances = (0.5 * reach, reach, 1.5 * reach, 2 * reach, 9.0)
        found = [removed(correction, sign * distance) for distance in distances]
        assert found == pytest.approx([0.3, 0.3, 0.15, 0.0, 0.0], abs=1e-12)


def test_levels_far_apart_leave_the_middle_alone():
    correction = flat([2.0, -2.0], [0.3, 0.3], [1.0])
    assert removed(correction, 0.0) == 0
    assert removed(correction, 2.0 - LEVEL_SPACING) == pytest.approx(0.3)
    assert removed(correction, 2.0 - 2 * LEVEL_SPACING) == pytest.approx(0.0, abs=1e-12)


def test_one_level_does_nothing_at_the_other_end(mixture):
    """`levels=[500]` used to take 0.296 off every pixel at t = 0, where nothing was wrong."""
    process = DiscreteVP.linear()
    at = process.lam(500)
    biased = mixture.denoiser(
        process, distortion=lambda eps, u, lam: 0.3 * torch.exp(-((lam - at) ** 2)).to(eps)
    )
    cal = calibrate(biased, mixture.sample(100), levels=[500], family="shift", batch_size=100)
    assert not cal.empty
    eps, t = torch.randn(2, *mixture.shape), torch.tensor([0, 500])
    removed_here = eps - cal.correction.apply(eps, eps, process.lam(t))
    assert removed_here[0].abs().max() == 0
    assert removed_here[1].mean() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("levels", [[0.5], [0.2, 0.25, 0.8], None])
def test_the_hook_follows_the_definition_at_every_time(mixture, levels):
    network = mixture.denoiser(
        PROCESS, distortion=lambda eps, u, lam: 0.3 * torch.sin(2 * lam).to(eps) + 0.2 * eps
    )
    cal = calibrate(network, mixture.sample(100), levels=levels, batch_size=100)
    assert not cal.empty
    generator = torch.Generator().manual_seed(0)
    t = PROCESS.t_min + (PROCESS.t_max - PROCESS.t_min) * torch.rand(
        64, generator=generator, dtype=torch.float64
    )
    output, x_t = torch.randn(2, 64, *mixture.shape, generator=generator, dtype=torch.float64)
    expected = cal.for_samples.apply(output, x_t / PROCESS.sigma(t).reshape(-1, 1, 1, 1), PROCESS.lam(t))
    found = CorrectOutput(cal).correct(output, x_t, t)
    # 8,192 nodes over 12 of lam: the nearest is within 1e-3, where the correction bends by 0.4 per 0.2
    assert (found - expected).abs().max() < 0.01 * (output - expected).abs().max()


@pytest.mark.parametrize("family", ["shift", "spectral"])
@pytest.mark.parametrize("course", ["changes sign", "dies", "one level only"])
def test_a_bias_that_turns_between_levels_harms_nowhere(mixture, family, course):
    levels = PROCESS.t_of_lam(torch.tensor([1.2, 0.8, 0.4, 0.0, -0.4, -0.8, -1.2], dtype=torch.float64))
    shapes = {
        "changes sign": lambda lam: torch.sign(lam - 0.2) * (lam - 0.2).abs().clamp(0.1, 0.2) / 0.2,
        "dies": lambda lam: ((lam - 0.15) / 0.25).clamp(0.0, 1.0),
        "one level only": lambda lam: (1 - (lam - 0.4).abs() / 0.25).clamp_min(0.0),
    }

    def distortion(eps, u, lam):
        return (0.4 * shapes[course](lam.double())).to(eps).expand_as(eps)

    network = mixture.denoiser(PROCESS, distortion=distortion)
    cal = calibrate(network, mixture.sample(200), levels=levels, family=family, batch_size=200)
    assert not cal.empty
    between = torch.linspace(2.5, -2.5, 81, dtype=torch.float64)
    truth = measure(
        network, mixture.sample(400, 9), images=None, levels=PROCESS.t_of_lam(between), seed=9, batch_size=400
    )

    def harmed(correction):
        by_fold = score(truth, correction.at(truth.lam)).gain().sum(2)
        gain, error = mean_and_error(by_fold, truth.rows[0])
        return (gain < -3 * error).sum()

    assert harmed(cal.correction) == 0
    if course != "changes sign":  # of a line from one sign to the other little is left where it matters
        assert harmed(replace(cal.correction, support=None)) > 2


def test_support_is_the_share_that_neighbours_have_in_common(mixture):
    """Equal, half, none, opposite: 2 c c' / (c^2 + c'^2)."""
    size = {0: 0.4, 1: 0.4, 2: 0.2, 3: 0.0, 4: -0.4, 5: 0.4}
    lam_of = torch.tensor([1.0, 0.6, 0.2, -0.2, -0.6, -1.0], dtype=torch.float64)

    def distortion(eps, u, lam):
        nearest = (lam.double()[..., None] - lam_of).abs().argmin(-1)
        return torch.tensor(list(size.values()))[nearest].to(eps).expand_as(eps)

    network = mixture.denoiser(PROCESS, distortion=distortion)
    moments = measure(
        network, mixture.sample(3000), images=None, levels=PROCESS.t_of_lam(lam_of), batch_size=500
    )
    cal = fit(moments, family="shift", estimator="regressed")
    # band 0 is the constant; 3,000 images know it to 0.01, a fortieth of it
    assert cal.correction.support[:, 0].tolist() == pytest.approx([1.0, 0.8, 0.0, 0.0, 0.0], abs=0.08)
