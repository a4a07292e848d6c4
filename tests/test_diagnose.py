"""Every usual mistake, made on purpose with a real network, is named; the right use is not."""

import math

import numpy as np
import pytest
import torch

import trueup
import trueup.analytic
from trueup.errors import Argument, ModelError
from trueup.estimate import measure
from trueup.estimate.diagnose import diagnose
from trueup.files import BUNDLED
from trueup.hf import as_denoiser
from trueup.images import Batch, Images, Samples
from trueup.parametrization import Parametrization
from trueup.process import DiscreteVP, Flow

LINEAR = DiscreteVP.linear()
COUNT = 12


@pytest.fixture(scope="module")
def ema():
    return as_denoiser(BUNDLED / "ema")


@pytest.fixture(scope="module")
def batch(ema):
    return next(Samples(np.load(BUNDLED / "images.npy"), ema.shape, ema.data_range).batches(COUNT))


def axes(values):
    return values.reshape(-1, 1, 1, 1).float()


def of_unit_range(network):
    """The network as it would be had it been trained on data in 0..1, exactly.

    With y = (x + 1) / 2, y_t = alpha y + sigma eps is, stretched, x at the level with twice the noise.
    """

    def call(y_t, t):
        t = t.double()
        alpha, sigma = LINEAR.alpha(t), LINEAR.sigma(t)
        lowest = float(LINEAR.lam(LINEAR.t_max))
        noisier = LINEAR.t_of_lam((LINEAR.lam(t) - math.log(2)).clamp_min(lowest))
        x_t = (2 * y_t - axes(alpha)) / axes((alpha**2 + 4 * sigma**2).sqrt())
        return network(x_t, noisier.float()).sample

    return call


def of_velocity(network):
    def call(x_t, t):
        alpha, sigma = axes(LINEAR.alpha(t.double())), axes(LINEAR.sigma(t.double()))
        return Parametrization("velocity").from_eps(network(x_t, t).sample, x_t, alpha, sigma)

    return call


def used(network, process=LINEAR, parametrization="noise", data_range=(-1.0, 1.0), shape=(1, 28, 28)):
    return trueup.Denoiser(network, process, parametrization, shape, data_range=data_range)


def changed(batch, x0):
    return Batch(batch.index, x0, batch.y, batch.digests)


def told(problem):
    """What the command line says of it."""
    return problem.phrased(Argument.option)


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_the_right_use_has_no_problem(weights, batch):
    found = diagnose(as_denoiser(BUNDLED / weights), batch)
    assert found.problem is None
    assert found.score < 0.8
    assert found.hints == []  # trained without flips, and it shows


def test_the_range_of_the_model(ema, batch):
    found = diagnose(used(of_unit_range(ema.network)), batch)
    assert "--model-range 0,1" in told(found.problem)
    right = used(of_unit_range(ema.network), data_range=(0.0, 1.0))
    assert diagnose(right, changed(batch, (batch.x0 + 1) / 2)).problem is None
    wrong = used(ema.network, data_range=(0.0, 1.0))
    assert "--model-range -1,1" in told(diagnose(wrong, changed(batch, (batch.x0 + 1) / 2)).problem)


def test_the_range_of_the_data(ema, batch):
    found = diagnose(ema, changed(batch, (batch.x0 + 1) / 2))
    assert "--data-range 0,1" in told(found.problem)


def test_the_prediction_type(ema, batch):
    found = diagnose(used(of_velocity(ema.network)), batch)
    assert "--prediction velocity" in told(found.problem)
    found = diagnose(used(ema.network, parametrization="velocity"), batch)
    assert "--prediction noise" in told(found.problem)


@pytest.mark.parametrize("process", [DiscreteVP.scaled_linear(), DiscreteVP.cosine()])
def test_the_betas(ema, batch, process):
    found = diagnose(used(ema.network, process), batch)
    assert "linear betas" in str(found.problem)
    assert "--scheduler" in told(found.problem)


def test_mirrored_images(ema):
    samples = Samples(np.load(BUNDLED / "images.npy"), ema.shape, ema.data_range)
    batch = next(samples.batches(32))
    found = diagnose(ema, changed(batch, batch.x0.flip(-1)))
    assert "mirror" in str(found.problem)


def test_a_forgotten_flip_is_a_hint(mixture):
    """A mixture that holds every shape with its mirror image denoises both alike."""
    means = torch.cat([mixture.means, mixture.means.flip(-1)])
    both = trueup.analytic.GaussianMixture(means, std=0.5)
    denoiser = both.denoiser(trueup.process.ContinuousVP())
    denoiser.data_range = (-1.0, 1.0)
    x0 = both.sample(COUNT).float()
    batch = Batch(torch.arange(COUNT), x0, None, torch.arange(COUNT))
    found = diagnose(denoiser, batch)
    assert found.problem is None
    assert any("flip" in hint for hint in found.hints)
    assert diagnose(denoiser, batch, flip=True).hints == []


class Channels(torch.nn.Module):
    """A colour network out of a grey one: blue is the dark channel."""

    gains = (1.0, 0.6, 0.2)

    def __init__(self, grey):
        super().__init__()
        self.grey = grey

    def forward(self, x_t, t):
        out = []
        for channel, gain in zip(x_t.unbind(1), self.gains, strict=True):
            # channel = alpha g x + sigma eps = (noisier x), exactly, as in of_unit_range
            alpha, sigma = LINEAR.alpha(t.double()), LINEAR.sigma(t.double())
            lowest = float(LINEAR.lam(LINEAR.t_max))
            noisier = LINEAR.t_of_lam((LINEAR.lam(t.double()) + math.log(gain)).clamp_min(lowest))
            scaled = channel[:, None] / axes((gain**2 * alpha**2 + sigma**2).sqrt())
            out.append(self.grey(scaled, noisier.float()).sample)
        return torch.cat(out, 1)


def test_bgr_for_rgb(ema, batch):
    network, batch = Channels(ema.network), Batch(batch.index[:8], batch.x0[:8], None, batch.digests[:8])
    rgb = torch.cat([gain * batch.x0 for gain in network.gains], 1)
    denoiser = used(network, shape=(3, 28, 28))
    assert diagnose(denoiser, changed(batch, rgb)).problem is None
    assert "BGR" in str(diagnose(denoiser, changed(batch, rgb.flip(1))).problem)


def test_unscaled_latents(ema, batch):
    latents = used(ema.network, data_range=None)
    assert diagnose(latents, batch).problem is None
    found = diagnose(latents, changed(batch, batch.x0 / 0.18215))
    assert "0.18215" in str(found.problem)


def test_another_network_altogether(batch):
    found = diagnose(used(lambda x_t, t: torch.tanh(x_t)), batch)
    assert "worse than a linear filter" in str(found.problem)


def test_few_images_say_nothing(ema, batch):
    few = batch.rows(slice(0, 3))
    found = diagnose(ema, few)
    assert found.problem is None
    assert "fewer than 8" in found.hints[0]


def of_flow(network, sign=1.0, backwards=False):
    """The network as a rectified flow would have it, exactly: x_s is a scaled x_t of the same lam."""

    def call(x_s, t):
        s = 1 - t.double() if backwards else t.double()
        lam = torch.log1p(-s) - s.log()
        size = ((1 - s) ** 2 + s**2).sqrt()
        at = LINEAR.t_of_lam(lam.clamp(float(LINEAR.lam(999)), float(LINEAR.lam(0))))
        eps = network(x_s / axes(size), at.float()).sample
        return sign * (eps - (x_s - axes(s) * eps) / axes(1 - s))

    return call


@pytest.mark.parametrize(
    ("sign", "backwards", "words"),
    [(-1.0, False, "reversed_flow"), (1.0, True, "from noise to data"), (-1.0, True, "from noise to data")],
)
def test_a_flow_the_other_way_round(ema, batch, sign, backwards, words):
    """x0 - eps for eps - x0, and times that run from noise to data, as in much flow-matching code."""
    assert diagnose(used(of_flow(ema.network), Flow(), "flow"), batch).problem is None
    found = diagnose(used(of_flow(ema.network, sign, backwards), Flow(), "flow"), batch)
    assert words in str(found.problem)
    if sign < 0 and backwards:
        assert "reversed_flow" in str(found.problem)


@pytest.mark.parametrize(
    ("process", "prediction", "words"),
    [
        (Flow(reversed=True), "flow", "fit a reversed_flow prediction, not flow"),
        (Flow(), "reversed_flow", "counts time from noise to data"),
        (Flow(reversed=True), "noise", "fit a reversed_flow prediction, not noise"),
    ],
)
def test_a_mistake_is_named_though_nothing_denoises_better_than_a_linear_filter(process, prediction, words):
    """Gaussian data: used rightly, the ideal network is a linear filter, which 32 images know roughly."""
    data = trueup.analytic.GaussianMixture(torch.zeros(1, 1, 12, 12), 0.5)
    inner = data.denoiser(Flow(), "reversed_flow").network

    def net(x_t, t):
        return inner(x_t, 1 - t)

    for seed in range(5):
        batch = next(Samples(data.sample(32, seed), (1, 12, 12), None).batches(32))
        right = trueup.Denoiser(net, Flow(reversed=True), "reversed_flow", (1, 12, 12), data_range=None)
        assert diagnose(right, batch).problem is None
        wrong = trueup.Denoiser(net, process, prediction, (1, 12, 12), data_range=None)
        assert words in str(diagnose(wrong, batch).problem)


@pytest.mark.parametrize("prediction", ["noise", "data", "velocity", "flow"])
@pytest.mark.parametrize(("share", "error"), [(0.0, 0.0), (0.2, 0.1), (0.6, 0.0)])
def test_a_young_network_is_not_told_that_it_predicts_something_else(prediction, share, error):
    """White data: read otherwise, a network that says little may be as good as a filter that says nothing."""
    process = Flow() if prediction == "flow" else DiscreteVP.scaled_linear()
    data = trueup.analytic.GaussianMixture(torch.zeros(1, 4, 16, 16), 1.0)
    ideal = data.denoiser(process, prediction).network
    noise = torch.Generator().manual_seed(0)

    def young(x_t, t):
        return share * ideal(x_t, t) + error * torch.randn(x_t.shape, generator=noise)

    batch = next(Samples(data.sample(32, 0), (4, 16, 16), None).batches(32))
    network = trueup.Denoiser(young, process, prediction, (4, 16, 16), data_range=None)
    found = diagnose(network, batch)
    assert found.problem is None or "surely worse than a linear filter" in str(found.problem)


def test_python_refuses_misuse_too(ema):
    """Offered a calibration before: only the command line looked."""
    wrong = used(ema.network, parametrization="velocity")
    images = Images(BUNDLED / "images.npy", count=32)
    with pytest.raises(
        ModelError, match=r'fit a noise prediction.*Denoiser\(..., "noise", ...\) \(or pass trust=True'
    ):
        trueup.calibrate(wrong, images, levels=[500], progress=False)
    assert measure(wrong, images, levels=[500], trust=True, progress=False).images == 32
