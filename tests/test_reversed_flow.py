"""Flows whose code counts time from noise to data: the network is told 1 - t, and everything else stays."""

import pytest
import torch
from torch import nn

import trueup
from trueup import process as processes
from trueup.errors import ModelError

STD, MEAN, SHAPE = 0.5, 0.2, (1, 6, 6)


class Velocity(nn.Module):
    """The velocity of Gaussian data in closed form, s being the noise's share; off by `miss`.

    backwards: told time_scale (1 - s), 0 at noise. sign: 1 for eps - x0, -1 for x0 - eps.
    """

    def __init__(self, sign, backwards, time_scale=1.0):
        super().__init__()
        self.sign, self.backwards, self.time_scale = sign, backwards, time_scale
        self.miss = nn.Parameter(torch.zeros(()))

    def forward(self, x, t):
        s = t.reshape(-1, 1, 1, 1) / self.time_scale
        s = 1 - s if self.backwards else s
        variance = ((1 - s) * STD) ** 2 + s**2
        centred = x - (1 - s) * MEAN
        x0 = MEAN + (1 - s) * STD**2 / variance * centred
        eps = s / variance * centred
        return self.sign * (eps - x0 + self.miss * s)


def names(sign):
    return "flow" if sign > 0 else "reversed_flow"


@pytest.mark.parametrize("time_scale", [1.0, 1000.0])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_convention_finds_the_same_noise(sign, backwards, time_scale):
    process = processes.Flow(time_scale, reversed=backwards)
    net = trueup.Denoiser(Velocity(sign, backwards, time_scale), process, names(sign), SHAPE)
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(5, *SHAPE, generator=generator) for _ in range(2))
    s = torch.tensor([0.01, 0.2, 0.5, 0.8, 0.99])
    x_t = process.noised(MEAN + STD * x0, eps, time_scale * s)
    wide = s.reshape(-1, 1, 1, 1)
    assert torch.allclose(x_t, (1 - wide) * (MEAN + STD * x0) + wide * eps, atol=1e-6)
    truth = wide / (((1 - wide) * STD) ** 2 + wide**2) * (x_t - (1 - wide) * MEAN)
    assert torch.allclose(net.eps(x_t, time_scale * s), truth, atol=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_calibration_is_put_on_the_network_as_its_own_code_calls_it(sign):
    network = Velocity(sign, backwards=True)
    with torch.no_grad():
        network.miss.fill_(0.1)
    generator = torch.Generator().manual_seed(1)
    data = MEAN + STD * torch.randn(200, *SHAPE, generator=generator)
    net = trueup.Denoiser(network, processes.Flow(reversed=True), names(sign), SHAPE, data_range=None)
    by_hand = trueup.Denoiser(
        network, processes.Flow(), names(sign), SHAPE, data_range=None, call=lambda x, t: network(x, 1 - t)
    )
    how = {"levels": [0.1, 0.3, 0.5, 0.7, 0.9], "trust": True, "progress": False}
    cal, other = trueup.calibrate(net, data, **how), trueup.calibrate(by_hand, data, **how)
    assert torch.allclose(cal.correction.b, other.correction.b, atol=1e-6)
    assert cal.provenance["binding"] == other.provenance["binding"]
    right = Velocity(sign, backwards=True)
    x = torch.randn(8, *SHAPE, generator=generator)
    told = torch.full((8,), 0.3)  # s = 0.7
    with torch.no_grad():
        missed = (network(x, told) - right(x, told)).abs().mean()
        with trueup.attach(network, cal, gains="least-squares"):
            left = (network(x, told) - right(x, told)).mean().abs()
        with trueup.attach(net, cal, gains="least-squares"):
            assert torch.allclose(net.eps(x, 0.7), by_hand.eps(x, 0.7), atol=1e-5)
    assert missed == pytest.approx(0.07, abs=1e-4)
    assert left < 0.02


def test_its_fitted_scheduler_hands_out_times_as_the_network_counts_them():
    network = Velocity(-1.0, backwards=True)
    net = trueup.Denoiser(network, processes.Flow(reversed=True), "reversed_flow", SHAPE, data_range=None)
    cal = trueup.fit_solver(net, nfe=4, trajectories=32, progress=False)
    scheduler = cal.scheduler(nfe=4)
    scheduler.set_timesteps(4)
    assert (scheduler.timesteps.diff() > 0).all()  # from noise, 0, to data, 1
    assert scheduler.index_for_timestep(scheduler.timesteps[2]) == 2
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(2))
    at = scheduler.add_noise(torch.zeros(4, *SHAPE), x, scheduler.timesteps)
    assert torch.allclose(at, cal.solver(nfe=4).sigma[:4].reshape(-1, 1, 1, 1).float() * x, atol=1e-5)
    assert torch.allclose(
        scheduler.add_noise(torch.zeros(1, *SHAPE), x[:1], torch.tensor([0.75])), 0.25 * x[:1], atol=1e-5
    )
    noise = torch.randn(256, *SHAPE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = scheduler.step(network(noise, t), t, noise).prev_sample
    assert noise.mean() == pytest.approx(MEAN, abs=0.03)
    assert noise.std() == pytest.approx(STD, rel=0.05)


def test_a_recorder_reads_the_times_of_the_loop():
    recorder = trueup.Recorder(processes.Flow(reversed=True), "reversed_flow", shape=SHAPE)
    plain = trueup.Recorder(processes.Flow(), "reversed_flow", shape=SHAPE)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        x0, eps = torch.randn(2, 32, *SHAPE, generator=generator)
        s = 0.05 + 0.9 * torch.rand(32, generator=generator)
        wide = s.reshape(-1, 1, 1, 1)
        x_t, target = (1 - wide) * x0 + wide * eps, x0 - eps
        recorder.update(x_t, 1 - s, target + 0.1, target)
        plain.update(x_t, s, target + 0.1, target)
    ours, theirs = recorder.moments(), plain.moments()
    assert float(ours.rows.sum()) > 0
    assert torch.allclose(ours.rows, theirs.rows)
    assert torch.allclose(ours.second, theirs.second, rtol=1e-3, atol=1e-3)
    binding = ours.provenance["binding"]
    assert (binding["scale"], binding["offset"]) == (-1.0, 1.0)


def test_settings_and_nonsense():
    process = processes.Flow(reversed=True)
    again = processes.from_settings(process.settings())
    assert again.told == process.told == (-1.0, 1.0)
    older = {"kind": "flow", "time_scale": 2.0}  # files from before
    assert processes.from_settings(older).told == (1.0, 0.0)
    with pytest.raises(ModelError, match="reversed is True or False"):
        processes.Flow(reversed="yes")
