"""The likelihood by the probability flow, against closed forms, scipy's solver and autograd."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from scipy.integrate import RK45, solve_ivp
from torch.distributions import Normal

import trueup
from trueup import Images
from trueup.analytic import GaussianMixture, KernelDensity
from trueup.bands import full_precision
from trueup.density import ode
from trueup.density.flow import Divergence, with_divergence
from trueup.density.terms import discrete_decoder
from trueup.hf import as_denoiser
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow

from tiny import tiny_unet

SHAPE = (2, 3, 3)
SIZE = 18
STD = 0.4
PROCESSES = {
    "continuous_vp": (ContinuousVP(), "velocity"),
    "discrete_vp": (DiscreteVP.linear(), "noise"),
    "ve": (VE(), "data"),
    "edm": (EDM(), "data"),
    "flow": (Flow(), "flow"),
}


def model_log_density(process, x0):
    """Of Gaussian data's exact flow: it scales x, and the prior is what samplers start from."""
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    end = [float(f(process.t_max)) for f in (process.alpha, process.sigma)]
    start_std = math.hypot(STD, sigma / alpha)  # of x/alpha
    end_std = math.hypot(end[0] * STD, end[1])  # of x
    factor = end_std / start_std
    at_end = Normal(0.0, torch.tensor(process.prior_std, dtype=torch.float64)).log_prob(factor * x0.double())
    return at_end.flatten(1).sum(1) + SIZE * math.log(factor)


@pytest.mark.parametrize("name", PROCESSES)
def test_gaussian_data_s_flow_is_followed_exactly(name):
    process, parametrization = PROCESSES[name]
    data = GaussianMixture(torch.zeros(1, *SHAPE, dtype=torch.float64), STD)
    net = data.denoiser(process, parametrization, dtype=torch.float64)
    x0 = data.sample(6).float()
    how = {"method": "ode", "start": "data", "trace": "exact", "progress": False}
    found = trueup.likelihood(net, Images(x0), tolerance=1e-7, **how)
    error = (found.before + model_log_density(process, x0)) / SIZE
    assert float(error.abs().max()) < 2e-6  # nats per dimension
    loose = trueup.likelihood(net, Images(x0), **how)
    assert float(((loose.before - found.before) / SIZE).abs().max()) < 1e-3  # by default
    assert loose.evaluations[0] < found.evaluations[0]


def test_a_mixture_s_likelihood_is_within_a_thousandth_of_a_nat_per_dimension():
    means = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = GaussianMixture(means - means.mean(0), STD)
    net = data.denoiser(ContinuousVP(), dtype=torch.float64)
    x0 = data.sample(12).float()
    exact = -data.log_density(x0.double(), torch.ones(12), torch.zeros(12))
    for start in ("data", "noise"):
        found = trueup.likelihood(
            net, Images(x0), method="ode", start=start, trace="exact", tolerance=1e-5, progress=False
        )
        error = (found.before - exact) / SIZE
        if start == "data":
            assert float(error.abs().max()) < 1e-3
        else:  # each image with a noise of its own
            assert abs(float(error.mean())) < 1e-3 + 3 * float(error.std()) / math.sqrt(12)


def test_the_stated_bias_of_the_start_is_what_starting_there_leaves_out():
    process = ContinuousVP(t_min=0.02)  # much noise to start with: sigma is a tenth of the data's spread
    data = GaussianMixture(torch.zeros(1, *SHAPE, dtype=torch.float64), STD)
    net = data.denoiser(process, dtype=torch.float64).with_batch_size(50)
    x0 = data.sample(50).float()
    found = trueup.likelihood(
        net, Images(x0), method="ode", start="data", trace="exact", tolerance=1e-6, progress=False
    )
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    smooth = math.hypot(STD, sigma / alpha)
    left_out = Normal(0.0, smooth).log_prob(x0).sub(Normal(0.0, STD).log_prob(x0)).flatten(1).sum(1).double()
    share = (sigma / alpha / STD) ** 2
    assert float(left_out.abs().max()) > 0.05
    assert torch.allclose(found.start_bias[0], left_out, atol=float(left_out.abs().max()) * 3 * share)


@pytest.mark.parametrize(
    "process", [ContinuousVP(t_min=0.02), EDM(sigma_min=0.05)]
)  # alpha near 1, and near 2
def test_starting_with_noise_bounds_the_likelihood_of_clean_data(process):
    data = GaussianMixture(torch.zeros(1, *SHAPE, dtype=torch.float64), STD)
    net = data.denoiser(process, dtype=torch.float64).with_batch_size(400)
    x0 = data.sample(400).float()
    found = trueup.likelihood(net, Images(x0), method="ode", trace="exact", progress=False)
    assert found.start_bias is None
    exact = -Normal(0.0, STD).log_prob(x0).flatten(1).sum(1).double()
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    gap = 0.5 * math.log1p((sigma / alpha / STD) ** 2)  # of a flat decoder, per dimension
    difference = (found.before - exact) / SIZE
    assert float(difference.mean()) == pytest.approx(gap, abs=4 * float(difference.std()) / 20)


def test_hutchinson_s_probes_average_to_the_trace():
    matrix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(3, *SHAPE, dtype=torch.float64)

    def linear(x):
        return (x.flatten(1) @ matrix.T).reshape(x.shape)

    assert torch.allclose(with_divergence(linear, x, None)[1], matrix.trace().expand(3))
    symmetric = 0.5 * (matrix + matrix.T)
    off = symmetric - torch.diag(symmetric.diag())
    spread = {"rademacher": 2 * off.square().sum(), "gaussian": 2 * symmetric.square().sum()}
    for kind, variance in spread.items():
        probes = Divergence(kind, probes=4000).vectors(torch.arange(3), SHAPE, torch.device("cpu"))
        error = with_divergence(linear, x, probes)[1] - matrix.trace()
        assert float(error.abs().max()) < 4 * math.sqrt(float(variance) / 4000)
        one = Divergence(kind).vectors(torch.arange(2000), SHAPE, torch.device("cpu"))
        traces = with_divergence(linear, x[:1].expand(2000, *SHAPE), one)[1]
        assert float(traces.var()) == pytest.approx(float(variance), rel=0.2)


def test_the_exact_trace_of_a_network_is_autograd_s():
    net = as_denoiser(tiny_unet(), scheduler=DDPMScheduler())
    x = torch.randn(2, 1, 8, 8)
    t = torch.tensor([100.0, 400.0])
    jacobian = torch.autograd.functional.jacobian(lambda x: net(x, t), x)
    expected = torch.stack([jacobian[i, :, :, :, i].reshape(64, 64).trace() for i in range(2)])
    assert torch.allclose(with_divergence(lambda x: net(x, t), x, None)[1].float(), expected, atol=1e-4)


def test_the_solver_agrees_with_scipy_s_row_by_row():
    rates = torch.tensor([0.5, 3.0, 8.0], dtype=torch.float64)

    def field(x, time, rows):
        r = rates[rows][:, None]
        return -r * x * torch.cos(time)[:, None], (x**2).sum(1)

    x = torch.ones(3, 2, dtype=torch.float64)
    ours, extra, evaluations = ode.solve(field, x, 0.0, 4.0, 1e-9)
    for row, rate in enumerate(rates.tolist()):
        theirs = solve_ivp(
            lambda t, y, r=rate: [-r * y[0] * np.cos(t), 2 * y[0] ** 2],
            (0, 4),
            [1.0, 0.0],
            rtol=1e-11,
            atol=1e-12,
        )
        assert float(ours[row, 0]) == pytest.approx(theirs.y[0, -1], rel=1e-6)
        assert float(extra[row]) == pytest.approx(theirs.y[1, -1], rel=1e-6)
    assert len(set(evaluations.tolist())) == 3  # each at its own pace
    alone, _, _ = ode.solve(lambda x, t, rows: field(x, t, rows + 2), x[2:], 0.0, 4.0, 1e-9)
    assert torch.equal(alone[0], ours[2])


def test_the_tableau_is_scipy_s():
    stages = np.zeros((6, 5))
    for row, weights in enumerate(ode._STAGES[:6]):
        stages[row, : len(weights)] = weights
    assert np.allclose(stages, RK45.A)
    assert np.allclose(ode._FIFTH[:6], RK45.B)
    assert np.allclose(ode._NODES[:6], RK45.C)
    assert np.allclose(np.abs(ode._ERROR), np.abs(RK45.E))


@pytest.fixture(scope="module")
def calibrated():
    """A network that is wrong in output and input, and its spectral calibration."""
    data = GaussianMixture(torch.zeros(1, 1, 6, 6), STD)
    net = data.denoiser(
        ContinuousVP(), distortion=lambda eps, u, lam: 0.2 * eps.mean((2, 3), keepdim=True) + 0.1
    )
    return (
        data,
        net,
        trueup.calibrate(net.with_batch_size(200), Images(data.sample(200)), trust=True, progress=False),
    )


def test_calibration_changes_path_and_divergence_as_in_a_network_that_has_it_built_in(calibrated):
    data, net, calibration = calibrated
    assert calibration.correction.a.any() or calibration.correction.d.any()
    from trueup.calibration.hook import CorrectOutput

    hook = CorrectOutput(calibration)
    hook.enabled = False  # it is not on a network, but part of one
    built_in = trueup.Denoiser(
        lambda x_t, t: hook.correct(net.network(x_t, t), x_t, t),
        net.process,
        "noise",
        net.shape,
        data_range=None,
    )
    x0 = data.sample(4, seed=9)
    found = trueup.likelihood(net, Images(x0), calibration, method="ode", trace="exact", progress=False)
    other = trueup.likelihood(built_in, Images(x0), method="ode", trace="exact", progress=False)
    assert torch.allclose(found.after, other.before, rtol=1e-6)
    exact = -data.log_density(x0.double(), torch.ones(4), torch.zeros(4))
    assert float((found.before - exact).mean().abs()) > 2 * float((found.after - exact).mean().abs())
    assert not net.corrected  # and it is off again


def test_images_of_eight_bits_get_the_probability_of_their_bins():
    """Against the integral of the model's density over bins, which a Gaussian has in closed form."""
    process = ContinuousVP(t_min=1e-5)
    std = 0.5
    data = GaussianMixture(torch.zeros(1, 1, 4, 4), std)
    net = data.denoiser(process)
    net.data_range = (-1.0, 1.0)
    pixels = data.sample(60, seed=2).clamp(-1, 1).sub(-1).mul(127.5).round().to(torch.uint8)
    pixels = pixels.clamp(2, 253)  # the outermost bins are another matter
    x0 = pixels.double() / 127.5 - 1
    mass = Normal(0.0, torch.tensor(std, dtype=torch.float64))
    exact = -(mass.cdf(x0 + 1 / 255) - mass.cdf(x0 - 1 / 255)).log().flatten(1).sum(1)
    found = trueup.likelihood(
        net, Images(pixels), method="ode", start="data", trace="exact", tolerance=1e-5, progress=False
    )
    assert found.discrete
    assert float((found.before - exact).mean()) / 16 == pytest.approx(0.0, abs=2e-3)
    noisy = data.denoiser(ContinuousVP(t_min=1e-3))
    noisy.data_range = (-1.0, 1.0)
    bound = trueup.likelihood(noisy, Images(pixels), method="ode", trace="exact", progress=False)
    assert float((bound.before - exact).mean()) > 0  # an upper bound


def test_the_decoder_of_a_noisy_start_is_read_from_the_network():
    data = GaussianMixture(torch.zeros(1, 1, 4, 4), 0.5)
    net = data.denoiser(ContinuousVP())
    net.data_range = (-1.0, 1.0)
    pixels = torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8)
    how = {"method": "ode", "trace": "exact", "progress": False}
    found = trueup.likelihood(net, Images(pixels), **how)
    as_floats = Images(pixels.float() / 127.5 - 1, data_range=(-1.0, 1.0))
    floats = trueup.likelihood(net, as_floats, **how)
    # Same noise and path: they differ by the decoders alone.
    from trueup.density.bound import decoder_variances
    from trueup.density.exact import _START_KEY
    from trueup.noise import normals

    process = net.process
    alpha, sigma = (float(f(process.t_min)) for f in (process.alpha, process.sigma))
    eps = normals(0, torch.arange(3), torch.tensor([_START_KEY]), net.shape, torch.device("cpu"))[0]
    x0 = pixels.double() / 127.5 - 1
    z = alpha * x0 + sigma * eps
    x0_hat = alpha * 0.25 * z / (alpha**2 * 0.25 + sigma**2)
    discrete = discrete_decoder(x0, x0_hat, math.sqrt(decoder_variances(process)[0]), (-1.0, 1.0))
    flat = -Normal(z / alpha, sigma / alpha).log_prob(x0).flatten(1).sum(1)
    assert torch.allclose(found.before - floats.before, discrete - flat, atol=2e-3)


def test_what_an_image_gets_does_not_depend_on_its_neighbours(calibrated):
    data, net, calibration = calibrated
    x0 = data.sample(5, seed=3)
    together, alone = (
        trueup.likelihood(net.with_batch_size(size), x0, calibration, method="ode", progress=False)
        for size in (5, 1)
    )
    assert torch.allclose(together.before, alone.before, rtol=1e-6)
    assert torch.allclose(together.after, alone.after, rtol=1e-6)


def test_values_that_are_not_finite_are_named():
    def network(x_t, t):
        return torch.where((t > 0.5)[:, None, None, None], torch.nan, 0.1) * x_t

    net = trueup.Denoiser(network, ContinuousVP(), "noise", (1, 4, 4), data_range=None)
    with pytest.raises(trueup.TrueupError, match=r"not finite at t = 0.* on the path of image 0"):
        trueup.likelihood(net, Images(torch.randn(2, 1, 4, 4)), method="ode", progress=False)


def test_a_tolerance_that_cannot_be_met_says_what_can(monkeypatch):
    monkeypatch.setattr(ode, "_LOOK", 30)  # sooner, for a test
    monkeypatch.setattr(ode, "_MOST", 300)

    def network(x_t, t):
        return x_t + 1e-3 * torch.sin(1e7 * x_t.detach()) + 0 * x_t

    net = trueup.Denoiser(network, ContinuousVP(), "noise", (1, 4, 4), data_range=None)
    x0 = 0.3 * torch.randn(1, 1, 4, 4)
    with pytest.raises(trueup.TrueupError, match="the best reached in steps") as error:
        trueup.likelihood(net, x0, method="ode", tolerance=1e-10, progress=False)
    best = float(str(error.value).split("worth taking is ")[1].split(":")[0])
    assert 1e-10 < best < 1e-2
    monkeypatch.undo()
    found = trueup.likelihood(net, x0, method="ode", tolerance=10 * best, progress=False)
    assert torch.isfinite(found.before).all()


def test_networks_that_cannot_be_differentiated_are_sent_to_the_bound():
    @torch.no_grad()
    def network(x_t, t):
        return 0.5 * x_t

    for parametrization in ("noise", "velocity"):
        net = trueup.Denoiser(network, ContinuousVP(), parametrization, (1, 4, 4), data_range=None)
        with pytest.raises(trueup.TrueupError, match="cannot be differentiated"):
            trueup.likelihood(net, torch.randn(2, 1, 4, 4), method="ode", progress=False)


def test_hard_paths_are_followed_if_slowly():
    """The ideal network of a few points, asked about another: nearly all of the work is at the start."""
    points = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0)).mul(0.3).clamp(-1, 1)
    net = KernelDensity(points[:15]).denoiser(ContinuousVP())
    other = Images(points[15:16], data_range=(-1.0, 1.0))
    found = trueup.likelihood(net, other, method="ode", tolerance=1e-3, progress=False)
    assert torch.isfinite(found.before).all()


def test_what_does_not_fit_in_memory_is_halved(calibrated, monkeypatch):
    from trueup.density import exact

    data, net, calibration = calibrated
    x0 = data.sample(5, seed=3)
    five = net.with_batch_size(5)
    whole = trueup.likelihood(five, x0, calibration, method="ode", progress=False)
    follow, sizes = exact.follow, []

    def small(denoiser, y, *args):
        sizes.append(len(y))
        if len(y) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return follow(denoiser, y, *args)

    monkeypatch.setattr(exact, "follow", small)
    found = trueup.likelihood(five, x0, calibration, method="ode", progress=False)
    assert torch.allclose(found.before, whole.before, rtol=1e-6)
    assert torch.allclose(found.after, whole.after, rtol=1e-6)
    assert sizes[0] == 5
    assert max(sizes[-2:]) <= 2


def test_a_derivative_that_does_not_fit_is_taken_of_fewer_images_at_once():
    """In parts that share a backward pass nothing is gained."""
    data = GaussianMixture(torch.zeros(1, 1, 4, 4), STD)
    ideal, sizes = data.denoiser(ContinuousVP()), []

    def network(x_t, t):
        if x_t.requires_grad:
            sizes.append(len(x_t))
            if len(x_t) > 3:
                raise torch.OutOfMemoryError("out of memory")
        return ideal.network(x_t, t)

    net = trueup.Denoiser(network, ContinuousVP(), "noise", (1, 4, 4), data_range=None, batch_size=6)
    found = trueup.likelihood(net, Images(data.sample(6)), method="ode", tolerance=1e-2, progress=False)
    assert torch.isfinite(found.before).all()
    assert sizes[0] == 6
    assert max(sizes[1:]) == 3


def test_a_calibration_is_put_on_once_for_a_run(calibrated, monkeypatch):
    from trueup.calibration import Attachment

    data, net, calibration = calibrated
    put_on, times = Attachment.put_on, []
    monkeypatch.setattr(Attachment, "put_on", lambda self: (times.append(1), put_on(self))[1])
    trueup.likelihood(
        net.with_batch_size(1),
        data.sample(3, seed=3),
        calibration,
        method="ode",
        tolerance=1e-2,
        progress=False,
    )
    assert len(times) == 1


def test_it_works_where_gradients_are_off_and_leaves_precision_as_it_was(model, images):
    with torch.inference_mode():
        found = trueup.likelihood(
            str(model), Images(images, count=1), method="ode", tolerance=1e-2, progress=False
        )
    assert torch.isfinite(found.before).all()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with full_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = before


def test_networks_of_whole_timesteps_are_sent_to_the_bound():
    table = torch.nn.Embedding(1000, 1)
    net = trueup.Denoiser(
        lambda x_t, t: x_t * table(t.long())[..., None, None].detach(),
        DiscreteVP.linear(),
        "noise",
        (1, 4, 4),
        data_range=None,
    )
    x0 = torch.randn(3, 1, 4, 4)
    with pytest.raises(trueup.TrueupError, match="use the bound"):
        trueup.likelihood(net, x0, method="ode", progress=False)
    assert torch.isfinite(trueup.likelihood(net, x0, progress=False).before).all()


def test_interrupted_work_goes_on_and_changed_images_are_noticed(tmp_path, monkeypatch, calibrated):
    data, net, calibration = calibrated
    x0 = data.sample(7, seed=4)
    net = net.with_batch_size(3)
    whole = trueup.likelihood(net, Images(x0), calibration, method="ode", progress=False)
    from trueup.density import exact

    calls = []
    follow = exact.follow

    def stop(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # before and after of two batches are done
            raise KeyboardInterrupt
        return follow(*args, **kwargs)

    how = {"method": "ode", "run": tmp_path / "run", "progress": False}
    monkeypatch.setattr(exact, "follow", stop)
    with pytest.raises(KeyboardInterrupt):
        trueup.likelihood(net, Images(x0), calibration, **how)
    changed = x0.clone()
    changed[4] += 1
    with pytest.raises(trueup.TrueupError, match=r"sample 4 .* is not what it was"):
        trueup.likelihood(net, Images(changed), calibration, **how)
    with pytest.raises(trueup.TrueupError, match="another"):
        trueup.likelihood(net, Images(x0), calibration, **how, tolerance=1e-3)
    calls.clear()
    found = trueup.likelihood(net, Images(x0), calibration, **how)
    assert len(calls) == 2  # the last batch alone
    assert torch.equal(found.before, whole.before)
    assert torch.equal(found.after, whole.after)
    assert found.index == list(range(7))
