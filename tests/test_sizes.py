"""One calibration at other heights, widths and lengths: what is resampled, and that the miss goes too."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import trueup
from trueup.analytic import GaussianMixture
from trueup.bands import Bands, resampled
from trueup.calibration.classes import OfClass
from trueup.calibration.conditions import OfConditions, Projection
from trueup.calibration.hook import CorrectOutput
from trueup.errors import MismatchError, TrueupError
from trueup.estimate import fit, measure
from trueup.fitted import MEMORY
from trueup.process import DiscreteVP
from trueup.statistics import Number

from calibrations import by_definition, make

LINEAR = DiscreteVP.linear()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gain_of(cycles):
    """A gain by frequency in cycles per pixel: too much of the low ones, too little of the high ones."""
    return 0.3 * (math.pi * cycles).cos() - 0.1


def frequencies(spatial):
    """Cycles per pixel of every coefficient of a DCT: k half-cycles over n pixels are k/(2n)."""
    axes = [torch.arange(n, dtype=torch.float64) / (2 * n) for n in spatial]
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0).sqrt()


class Broken:
    """The ideal network of white noise, off by a colour and by a gain per frequency, at any size."""

    colour = torch.tensor([0.2, -0.1])

    def __init__(self, spatial):
        self.data = GaussianMixture(torch.zeros(1, 2, *spatial), std=0.5)
        self.spatial, self.gains = spatial, gain_of(frequencies(spatial))

    def miss(self, eps, u, lam):
        bands = Bands(self.spatial)
        shown = bands.idct(self.gains.to(eps) * bands.dct(eps - 0.3 * u))
        return shown + self.colour.to(eps).reshape(1, 2, *[1] * len(self.spatial))

    def denoiser(self):
        return self.data.denoiser(LINEAR, "noise", self.miss)

    def left(self, calibration=None):
        """What remains of the network's own error, as a share of what it was."""
        found = self.data.denoiser(LINEAR, "noise")
        x0, t = self.data.sample(64, seed=9), torch.tensor(400.0)
        x_t = LINEAR.noised(x0, randn(*x0.shape, seed=3), t)
        ideal, network = found.eps(x_t, t), self.denoiser()
        before = (network.eps(x_t, t) - ideal).square().sum()
        with trueup.attach(network, calibration, gains="least-squares", force=True):
            return float((network.eps(x_t, t) - ideal).square().sum() / before)


@pytest.fixture(scope="module")
def calibration():
    broken = Broken((16, 16))
    images = trueup.Images(broken.data.sample(400), data_range=None)
    return fit(measure(broken.denoiser(), images, levels=[300.0, 400.0, 500.0], trust=True, progress=False))


@pytest.mark.parametrize("spatial", [(24, 24), (16, 32), (8, 8), (20, 12), (48, 48)])
def test_the_miss_is_removed_at_other_sizes(calibration, spatial):
    """A colour stays that colour and a gain its frequency: as good as where it was measured."""
    at_home = Broken((16, 16)).left(calibration)
    assert at_home < 0.03  # bands are steps, the gain is a curve
    assert Broken(spatial).left(calibration) < 0.03


def test_the_size_it_was_made_for_changes_not_one_bit(calibration):
    assert calibration.resized((16, 16)) is calibration
    assert calibration.correction.resized((16, 16)) is calibration.correction


@pytest.mark.parametrize(
    ("shape", "there"), [((3, 16, 16), (32, 32)), ((1, 12), (30,)), ((2, 4, 6, 8), (8, 9, 10))]
)
def test_there_and_back_is_what_it_was(shape, there):
    cal = make(shape, levels=[0.2, 0.6], keep=range(99))
    back = cal.resized(there).resized(shape[1:])
    for name in ("b", "a", "d", "support"):
        assert torch.allclose(
            getattr(back.correction, name), getattr(cal.correction, name), rtol=0, atol=1e-12
        )
    ours, theirs = cal.correction.innovation, back.correction.innovation
    assert torch.equal(ours.rho, theirs.rho)
    assert torch.allclose(ours.mean, theirs.mean, rtol=0, atol=1e-12)
    assert cal.resized(there).shape == (shape[0], *there)


def test_pictures_are_resampled_as_pictures():
    """A picture of half-cycles is the same function of the place in the picture on any grid."""

    def picture(n, m):
        y, x = (torch.arange(n) + 0.5) / n, (torch.arange(m) + 0.5) / m
        return (2 + (math.pi * y).cos()[:, None] * (2 * math.pi * x).cos()).double()

    small, large = Bands((8, 8)), Bands((12, 20))
    z = small.dct(picture(8, 8)).flatten()
    assert torch.allclose(
        large.idct(resampled(z, small, large).reshape(12, 20)), picture(12, 20), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("spatial", [(24, 24), (8, 40), (5, 6), (64, 48)])
def test_a_coefficient_has_the_band_of_its_frequency(spatial):
    old = Bands((16, 16))
    bands, which = old.resized(spatial)
    nearest = torch.bucketize(
        frequencies(spatial) * 2 * 16, torch.tensor(old.edges, dtype=torch.float64), right=True
    )
    assert torch.equal(old.between[which][bands.index], nearest)
    assert which.max() < old.count


def test_the_mean_of_what_is_taken_off_is_the_same_picture():
    """Whatever the gains: at another size the data's mean is corrected by the same picture."""
    cal = make((1, 8, 8), levels=[0.2, 0.6], keep=range(99))
    means = []
    for spatial in ((8, 8), (16, 16)):
        sized = cal.resized(spatial)
        for form in ("least-squares", "response"):
            c = sized.correction.with_gains(form)
            u = c.lam.exp()[:, None, None] * sized.data_mean
            inner = sized.correction.innovation
            eps_hat = inner.mean + c.bands.spread(inner.rho) * u
            means.append(c.b + c.bands.spread(c.a) * eps_hat + c.bands.spread(c.d) * u)
    for small, large in zip(means[:2], means[2:], strict=True):
        assert torch.allclose(
            resampled(small, Bands((8, 8)), Bands((16, 16))),
            large,
            rtol=0,
            atol=1e-9 * float(small.abs().max()),
        )


@pytest.mark.parametrize("spatial", [(8, 8), (6, 10)])
def test_at_another_size_a_fitted_solver_is_the_rule_it_started_from(spatial):
    (solver, *_) = make((1, 8, 8), solvers=True).solvers
    assert not solver.empty
    x, *history = randn(1 + MEMORY, 2, 1, *spatial).double()
    i = solver.nfe - 1
    rule = sum(w * part for w, part in zip(solver.weights[i], (x, *history), strict=True))
    made = solver.step(i, x, history)
    assert torch.allclose(made, rule, rtol=0, atol=1e-9) == (spatial != (8, 8))
    assert solver.resized(spatial).empty == (spatial != (8, 8))


# The hook


class Net(nn.Module):
    def __init__(self, channels=3):
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, t):
        return self.layer(x)


@torch.no_grad()
def test_an_attached_network_takes_any_size_without_a_word():
    net, t = Net(), torch.tensor([200, 300])
    cal = make((3, 8, 8), LINEAR, [150.0, 250.0, 350.0], network=net, gains="least-squares")
    with trueup.attach(net, cal), warnings.catch_warnings():
        warnings.simplefilter("error")
        for spatial in ((8, 8), (12, 20), (4, 4), (8, 8)):
            x = randn(2, 3, *spatial)
            expected = by_definition(cal.resized(spatial), net.layer(x), x, t)
            assert torch.allclose(
                net(x, t).double(), expected, rtol=0, atol=1e-3 * float(expected.abs().max())
            )


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_compiled_network_takes_any_size_in_one_graph(dynamic):
    torch.compiler.reset()
    net, t = Net(), torch.tensor([200, 300])
    cal = make((3, 8, 8), LINEAR, [150.0, 250.0, 350.0], network=net)
    fast = torch.compile(net, backend="eager", fullgraph=True, dynamic=dynamic)
    with trueup.attach(net, cal):
        for spatial in ((8, 8), (16, 16), (8, 12), (16, 16)):
            x = randn(2, 3, *spatial)
            assert torch.allclose(fast(x, t), net(x, t), rtol=0, atol=1e-5)
            assert not torch.allclose(fast(x, t), net.layer(x), rtol=0, atol=1e-2)
    torch.compiler.reset()


@pytest.mark.parametrize("shape", [(2, 16), (2, 4, 6, 6)])
def test_lengths_and_volumes_too(shape):
    cal = make(shape, levels=[0.3, 0.4], gains="least-squares")
    spatial = tuple(n + 3 for n in shape[1:])
    output, x_t = randn(2, 2, shape[0], *spatial)
    t = torch.tensor(0.35)
    got = CorrectOutput(cal).correct(output, x_t, t)
    expected = by_definition(cal.resized(spatial), output, x_t, t)
    assert torch.allclose(got.double(), expected, rtol=0, atol=1e-3 * float((expected - output).abs().max()))


def test_corrections_by_class_are_resized_as_well():
    levels, there = [150.0, 250.0, 350.0], (9, 8)
    cal, own = (make((2, 6, 8), LINEAR, levels, seed=seed) for seed in (0, 1))
    cal.classes = (OfClass(7, 40, Number(0.5), own.correction),)
    output, x_t = randn(2, 2, 2, *there)
    t, y = torch.tensor(300), torch.tensor([7, 3])  # its own, and that of all
    got = CorrectOutput(cal).correct(output, x_t, t, y)
    sized = cal.resized(there)
    for row, of in enumerate((sized.classes[0].correction, sized.correction)):
        alone = replace(sized, correction=of, classes=())
        expected = CorrectOutput(alone).correct(output, x_t, t)[row]
        assert torch.allclose(got[row], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_what_depends_on_an_embedding_is_a_picture():
    """A map for one feature, here a brightness: the same brightness at any size."""
    cal = make((1, 8, 8), LINEAR, [250.0, 350.0], gain=0.0, keep=())
    maps = torch.zeros(2, 1, 1, 64, dtype=torch.float64)
    maps[..., 0] = 8 * 0.25  # of 64 pixels of 0.25
    one = torch.ones(1, 1)
    seen = Projection(torch.zeros(1), one, torch.zeros(0, 2), torch.zeros(0, 0))
    cal.conditions = OfConditions(
        seen, maps, torch.ones(1, cal.correction.bands.count).double(), 40, Number(1.0)
    )
    output, x_t = randn(2, 1, 1, 12, 4)
    got = CorrectOutput(cal).correct(output, x_t, torch.tensor(300), one)
    assert torch.allclose(output - got, torch.full_like(output, 0.25), rtol=0, atol=1e-5)


def test_a_grid_with_no_room_for_the_map_is_left_alone():
    cal = make((1, 8, 8), levels=[0.2, 0.6], family="shift", keep=(4,))
    output, x_t = randn(2, 2, 1, 2, 2)
    assert torch.allclose(
        CorrectOutput(cal).correct(output, x_t, torch.tensor(0.4)), output, rtol=0, atol=1e-6
    )


def test_other_channels_and_axes_are_refused():
    net = Net(4)
    cal = make((3, 8, 8), LINEAR, 5)
    with (
        trueup.attach(net, cal, force=True),
        pytest.raises(MismatchError, match=r"\(3, 8, 8\), or with as many channels and axes; .* \(4, 8, 8\)"),
    ):
        net(randn(1, 4, 8, 8), torch.tensor(10))
    net = Net()
    cal = make((3, 8, 8), LINEAR, 5, network=net)
    for shape in ((4, 8, 8), (3, 8), (3, 8, 8, 8)):
        with pytest.raises(MismatchError, match=r"or with as many channels and axes, not "):
            trueup.attach(trueup.Denoiser(net, LINEAR, "noise", shape), cal)
    with pytest.raises(TrueupError, match=r"bands of 2 axes cannot be resized to \(8,\)"):
        Bands((8, 8)).resized((8,))


def test_objectives_are_those_of_the_resized_correction(calibration):
    """What is attached at another size lowers the loss, and by what theory says."""
    broken = Broken((24, 24))
    denoiser, images = broken.denoiser(), trueup.Images(broken.data.sample(60, seed=5), data_range=None)
    found = trueup.density.objectives(
        denoiser, images, calibration, levels=[300.0, 400.0, 500.0], trust=True, progress=False
    )
    drop = found.total("g2", "drop")
    assert drop.sign > 0
    assert found.total("g2", "predicted").value == pytest.approx(drop.value, rel=0.05)
