"""The fit is a smooth function of its moments: rounding in the sums is rounding in the correction."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from trueup.calibration import GAINS
from trueup.estimate.confirm import score
from trueup.estimate.moments import SUMS
from trueup.files import bundled
from trueup.process import ContinuousVP

from measuring import fit, measure

PROCESS = ContinuousVP()
LEVELS = [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8]


def network(mixture, size):
    """The ideal denoiser with errors of a given size: a constant, a gain, and what only a network makes."""

    def distortion(eps, u, lam):
        own = torch.tanh(3 * eps.roll(1, -1)) * torch.cos(2 * u.roll(2, -2))
        return size * (0.1 * torch.cos(lam) + 0.3 * eps + 0.3 * own).to(eps)

    return mixture.denoiser(PROCESS, distortion=distortion)


@pytest.fixture(scope="module")
def measured(mixture):
    """Moments of networks from ideal to bad, on the same images."""
    x0 = mixture.sample(60, 4)
    return {
        size: measure(network(mixture, size), x0, levels=LEVELS, batch_size=60)
        for size in (0.0, 0.1, 0.3, 1.0)
    }


@pytest.fixture(scope="module")
def trained():
    """Moments of a real network."""
    images = np.load(bundled("bundled:images"))[:24]
    return measure("bundled:raw", images, levels=[10, 60, 200, 500, 900])


def perturbed(moments, size, seed):
    """Every sum off by its own relative error."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(sums):
        return sums * (1 + size * torch.randn(sums.shape, generator=generator, dtype=torch.float64))

    return replace(moments, **{name: noisy(getattr(moments, name)) for name in SUMS if "rows" not in name})


def difference(moments, one, other):
    """How far two fits are apart, everything in units of its own scale."""
    n, loss, changes = moments.rows.sum((0, 1)), one.evidence.loss.value, []
    for form in GAINS:
        mine, theirs = (fit.correction.with_gains(form) for fit in (one, other))
        apart = replace(mine, b=mine.b - theirs.b, a=mine.a - theirs.a, d=mine.d - theirs.d)
        square = score(moments, apart).square.sum((0, 2)).clamp_min(0)
        changes += [square.div(n * loss).sqrt()]  # what it outputs
        changes += [mine.support - theirs.support]
    for name in ("gain", "eta2", "loss"):
        mine, theirs = getattr(one.evidence, name), getattr(other.evidence, name)
        changes += [(getattr(mine, k) - getattr(theirs, k)) / loss for k in ("value", "low", "high")]
    changes += [one.evidence.scale - other.evidence.scale]
    return max(float(change.abs().max()) for change in changes)


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_rounding_in_the_sums_is_rounding_in_the_fit(measured, trained, family):
    for moments in (*measured.values(), trained):
        cal = fit(moments, family=family)
        for seed in range(3):
            other = fit(perturbed(moments, 1e-9, seed), family=family)
            # Sums are about zero: where a mean is ten times its scatter, the scatter is known to 100 x 1e-9.
            assert difference(moments, cal, other) < 5e-7


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_the_fit_answers_in_proportion_however_small_the_change(measured, trained, family):
    """A slope: out over in is one number from 1e-6 to 1e-11. Of a jump it would grow."""
    for moments in (*measured.values(), trained):
        cal = fit(moments, family=family)
        for seed in range(2):
            ratios = [
                difference(moments, cal, fit(perturbed(moments, size, seed), family=family)) / size
                for size in (1e-6, 1e-9, 1e-11)
            ]
            # Curvature at 1e-6, and rounding (1e-16, through sums of a thousand terms) at 1e-11.
            assert max(ratios) < 1.1 * min(ratios) + 0.05
            assert max(ratios) < 500


def between(one, other, share):
    """The moments of both sets of samples, mixed."""
    mixed = {name: (1 - share) * getattr(one, name) + share * getattr(other, name) for name in SUMS}
    return replace(one, **mixed)


@pytest.mark.parametrize("family", ["shift", "spectral"])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.1), (0.1, 0.3), (0.0, 1.0)])
def test_nothing_jumps_on_the_way_from_one_network_to_another(measured, family, start, end):
    """Halve the steepest stretch again and again: a slope falls with its length, a jump does not."""
    ends = measured[start], measured[end]

    def at(share):
        return fit(between(*ends, share), family=family)

    shares = torch.linspace(0, 1, 33, dtype=torch.float64).tolist()
    fits = [at(share) for share in shares]
    empty = [fit.empty for fit in fits]
    steps = [difference(ends[0], *pair) for pair in pairwise(fits)]
    if start == 0.0:
        assert empty[0]
        assert not empty[-1]
    steepest = sorted(range(32), key=lambda i: -steps[i])[:3]
    onset = [i for i in range(32) if empty[i] != empty[i + 1]]  # where the first threshold is passed
    for i in {*steepest, *onset[:1]}:
        low, high = shares[i], shares[i + 1]
        fit_low, fit_high = fits[i], fits[i + 1]
        for _ in range(20):
            middle = 0.5 * (low + high)
            fit_middle = at(middle)
            halves = difference(ends[0], fit_low, fit_middle), difference(ends[0], fit_middle, fit_high)
            if halves[0] > halves[1]:
                high, fit_high = middle, fit_middle
            else:
                low, fit_low = middle, fit_middle
        # The last step is 3e-8 long; the loss may grow a hundredfold on the way, so in units of its change:
        # a ramp at a threshold is steep, but a jump would be 1e4 times steeper than this.
        change = fit_high.evidence.loss.value / fit_low.evidence.loss.value - 1
        assert max(halves) < 500 * (float(change.abs().max()) + 3e-8)
