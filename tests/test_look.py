"""Samples that are kept to be looked at: from the same noise, with the bands they have, small."""

from dataclasses import replace

import pytest
import torch

import trueup
from trueup.analytic import GaussianMixture
from trueup.calibration import Drawn
from trueup.fitting import judge
from trueup.fitting.gains import INTERVALS
from trueup.fitting.look import look_at, shown, with_solvers
from trueup.fitting.moments import Moments
from trueup.fitting.teacher import FINE
from trueup.sampling import pictures
from trueup.sampling.fitted import plan
from trueup.sampling.rules import Grid

from measuring import calibrate

SHAPE = (1, 6, 8)
VP = trueup.process.ContinuousVP()
HOW = {"gains": "none", "fitted": False, "nfe": 25, "seed": 0}


@pytest.fixture(scope="module")
def world():
    """Blobs, a network that is off by a map and a gain, and its calibration."""
    means = 0.4 * torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = GaussianMixture(means, std=0.2)
    data.data_range = (-1.0, 1.0)
    net = data.denoiser(VP, distortion=lambda eps, u, lam: 0.15 * eps + 0.1)
    cal = calibrate(net, data.sample(200).float().clamp(-1, 1))
    return data, net, judge(net, cal, trajectories=32)


def test_judging_keeps_what_it_saw(world):
    cal = world[2]
    assert [(one.gains, one.fitted, one.samples) for one in cal.drawn] == [
        ("none", False, 32),
        (cal.gains, False, 32),
    ]
    before, after = cal.drawn
    assert before.before
    assert before.pictures.shape == after.pictures.shape == (16, *SHAPE)
    assert before.pictures.dtype == torch.uint8
    assert not torch.equal(before.pictures, after.pictures)
    assert float(after.off.sum()) < 0.2 * float(before.off.sum())  # the map is gone


def test_a_solver_that_is_the_limit_draws_the_same_pictures(world):
    """From the same noise and labels: the fine rule as a fitted solver is what judged the correction."""
    _, net, cal = world
    fine = replace(plan(net, FINE, Grid(), INTERVALS + 1), gains=cal.gains)
    made = with_solvers(net, replace(cal, solvers=(fine,)), [fine], None, False)
    assert [one.fitted for one in made.drawn] == [False, False, True]
    limit, fitted = made.drawn[1:]
    assert torch.equal(fitted.pictures, limit.pictures)
    assert torch.allclose(fitted.variance, limit.variance)
    again = with_solvers(net, made, [fine], None, False)
    assert len(again.drawn) == 3  # in the place of the old


def test_guided_solvers_and_other_labels_are_not_compared(world):
    _, net, cal = world
    fine = plan(net, FINE, Grid(), INTERVALS + 1)
    for solver, labels in ((replace(fine, guidance=2.0), None), (fine, torch.tensor([0]))):
        made = with_solvers(net, replace(cal, solvers=(solver,)), [solver], labels, False)
        assert len(made.drawn) == 2


def test_a_guided_solver_leaves_the_samples_of_the_other_alone(world):
    _, net, cal = world
    fine = replace(plan(net, FINE, Grid(), INTERVALS + 1), gains=cal.gains)
    both = (fine, replace(fine, guidance=2.0))
    made = with_solvers(net, replace(cal, solvers=both), [fine], None, False)
    assert [one.fitted for one in with_solvers(net, made, [both[1]], None, False).drawn] == [
        False,
        False,
        True,
    ]


def test_a_file_holds_samples_of_the_solvers_that_were_fitted_last(world, tmp_path):
    _, net, cal = world
    made, numbers = replace(cal, solvers=()), range(2, 18)
    for nfe in numbers:
        solver = replace(plan(net, FINE, Grid(), nfe), gains=cal.gains)
        made = with_solvers(net, replace(made, solvers=(*made.solvers, solver)), [solver], None, False)
    made.save(tmp_path / "made.trueup.safetensors")
    kept = trueup.load(tmp_path / "made.trueup.safetensors")
    assert [one.nfe for one in kept.drawn[2:]] == list(numbers)[2:]
    assert [solver.nfe for solver in kept.solvers] == list(numbers)


def test_bands_of_the_data_itself_are_the_datas(world):
    data, net, cal = world
    fresh = data.sample(400, seed=9).float().clamp(-1, 1)
    found = look_at(fresh, net, Moments.of(cal), **HOW)
    assert isinstance(found, Drawn)
    error = (found.variance_se.square() + cal.data_variance_se.square()).sqrt()
    assert ((found.variance - cal.data_variance).abs() < 4 * error).all()
    # Unbiased: no further off than the noise of a mean over so many coefficients.
    assert (found.off.abs() < 4 * cal.data_variance * (1 / 200 + 1 / 400)).all()


def test_pictures_are_samples_as_they_are_shown(world):
    _, net, _ = world
    x = 2 * torch.randn(3, *SHAPE)
    assert torch.equal(shown(x, net), pictures(x, (-1.0, 1.0)))


class Decoder:
    """Makes pictures of 100 x 50 pixels of latents."""

    identity = "stand-in"

    def decode(self, x):
        assert len(x) == 1  # one at a time: they are large
        return x[:, :1, :1, :1].expand(1, 3, 100, 50).clone()


def test_latents_are_decoded_or_not_shown():
    net = trueup.Denoiser(lambda x, t: x, VP, "noise", (4, 5, 5), data_range=None)
    x = torch.full((2, 4, 5, 5), 0.5)
    assert shown(x, net) is None
    net.autoencoder = Decoder()
    made = shown(x, net)
    assert made.shape == (2, 3, 64, 32)
    assert made.unique().tolist() == [191]


def test_samples_of_two_channels_are_no_pictures():
    net = trueup.Denoiser(lambda x, t: x, VP, "noise", (2, 5, 5))
    assert shown(torch.zeros(1, 2, 5, 5), net) is None
