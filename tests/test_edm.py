"""Networks of EDM's code bases, as people have them: told sigma and one-hot labels, returning data.

The stand-ins below follow the published formulas (Karras et al. 2022, table 1; EDM2 has EDM's) around the
closed form of Gaussian data, so that what they return is known exactly.
"""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from trueup import process as processes
from trueup.denoiser import is_preconditioned
from trueup.errors import ModelError
from trueup.hf import as_denoiser

STD = 0.5


def ideal(x, sigma, mean):
    """E[x0 | x] of data N(mean, STD^2)."""
    weight = STD**2 / (STD**2 + sigma**2)
    return mean + weight * (x - mean)


class Inside(nn.Module):
    """What the raw network must return for the preconditioned one to be ideal, off by `miss`."""

    def __init__(self, outer, size, channels, label_dim):
        super().__init__()
        self.outer, self.calls = [outer], []  # in a list: not a part of it
        self.means = nn.Parameter(torch.linspace(-0.4, 0.4, max(label_dim, 1)).reshape(-1, 1, 1, 1))
        self.miss = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x_in, c_noise, class_labels):
        outer, sigma = self.outer[0], self.sigma(c_noise).reshape(-1, 1, 1, 1).to(x_in)
        c_skip, c_out, c_in = outer.scales(sigma)
        x = x_in / c_in
        mean = 0 * x if class_labels is None else (class_labels @ self.means.flatten()).reshape(-1, 1, 1, 1)
        self.calls.append(class_labels)
        miss = self.miss * sigma**2 / (sigma**2 + 1)  # as raw weights miss: where noise is high
        return (ideal(x, sigma, mean) + miss - c_skip * x) / c_out

    def sigma(self, c_noise):
        return self.outer[0].sigma_of_noise(c_noise)


class Preconditioned(nn.Module):
    """The common interface."""

    inside = "model"

    def __init__(self, img_resolution=8, img_channels=3, label_dim=0):
        super().__init__()
        self.img_resolution, self.img_channels, self.label_dim = img_resolution, img_channels, label_dim
        self.use_fp16 = False
        setattr(self, self.inside, Inside(self, img_resolution, img_channels, label_dim))

    def labels(self, x, class_labels):
        if self.label_dim == 0:
            return None
        if class_labels is None:
            return torch.zeros(1, self.label_dim, device=x.device)
        return class_labels.to(torch.float32).reshape(-1, self.label_dim)

    def forward(self, x, sigma, class_labels=None, force_fp32=False, **model_kwargs):
        x = x.to(torch.float32)
        sigma = sigma.to(torch.float32).reshape(-1, 1, 1, 1)
        c_skip, c_out, c_in = self.scales(sigma)
        inner = getattr(self, self.inside)
        out = inner(c_in * x, self.noise(sigma).flatten(), self.labels(x, class_labels))
        return c_skip * x + c_out * out

    def round_sigma(self, sigma):
        return torch.as_tensor(sigma)


class EDMPrecond(Preconditioned):
    sigma_min, sigma_max, sigma_data = 0, float("inf"), 0.5

    def scales(self, sigma):
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt(), 1 / total.sqrt()

    def noise(self, sigma):
        return sigma.log() / 4

    def sigma_of_noise(self, c_noise):
        return (4 * c_noise).exp()


class VPPrecond(Preconditioned):
    sigma_min, sigma_max = 1e-3, math.sqrt(math.exp(0.5 * 19.9 + 0.1) - 1)

    def scales(self, sigma):
        return torch.ones_like(sigma), -sigma, 1 / (sigma**2 + 1).sqrt()

    def noise(self, sigma):  # (M - 1) t of sigma(t)
        return 999 * ((0.1**2 + 2 * 19.9 * (1 + sigma**2).log()).sqrt() - 0.1) / 19.9

    def sigma_of_noise(self, c_noise):
        t = (c_noise / 999).double()
        return (torch.expm1(0.5 * 19.9 * t**2 + 0.1 * t)).sqrt()


class VEPrecond(Preconditioned):
    sigma_min, sigma_max = 0.02, 100

    def scales(self, sigma):
        return torch.ones_like(sigma), sigma, torch.ones_like(sigma)

    def noise(self, sigma):
        return (0.5 * sigma).log()

    def sigma_of_noise(self, c_noise):
        return 2 * c_noise.exp()


class IDDPMPrecond(VPPrecond):
    sigma_min, sigma_max = 0.0064, 20291.0


class Precond(EDMPrecond):
    """EDM2: on latents, says nothing of its range, estimates its own uncertainty."""

    inside = "unet"
    sigma_min = property()  # there are none

    def __init__(self, img_resolution=8, img_channels=4, label_dim=10):
        super().__init__(img_resolution, img_channels, label_dim)
        self.sigma_data = 0.5
        self.logvar = nn.Parameter(torch.zeros(1, 1, 1, 1))

    def forward(self, x, sigma, class_labels=None, force_fp32=False, return_logvar=False, **unet_kwargs):
        denoised = super().forward(x, sigma, class_labels)
        return (denoised, self.logvar.expand(len(x), 1, 1, 1)) if return_logvar else denoised


KINDS = [EDMPrecond, VPPrecond, VEPrecond, IDDPMPrecond, Precond]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label_dim", [0, 10])
def test_the_noise_found_is_that_of_the_closed_form(kind, label_dim):
    net = kind(label_dim=label_dim)
    denoiser = as_denoiser(net)
    assert denoiser.shape == (net.img_channels, 8, 8)
    assert denoiser.conditional == (label_dim > 0)
    generator = torch.Generator().manual_seed(0)
    sigma = torch.tensor([0.05, 0.7, 3.0, 60.0])
    y = torch.tensor([0, 3, 9, 10]) if label_dim else None  # 10 stands for none
    mean = torch.zeros(4)
    if label_dim:
        mean[:3] = torch.linspace(-0.4, 0.4, 10)[[0, 3, 9]]
    x0, eps = (torch.randn(4, *denoiser.shape, generator=generator) for _ in range(2))
    x_t = STD * x0 + mean.reshape(-1, 1, 1, 1) + sigma.reshape(-1, 1, 1, 1) * eps
    wide = sigma.reshape(-1, 1, 1, 1).double()
    expected = (x_t - ideal(x_t.double(), wide, mean.reshape(-1, 1, 1, 1))) / wide
    found = denoiser.eps(x_t, sigma, y)
    # The times of VP's network are 999 apart in float32, and the inside divides by sigma
    assert (found - expected).abs().max() < (0.02 if kind in (VPPrecond, IDDPMPrecond) else 1e-3)
    assert isinstance(denoiser.process, processes.VE)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (EDMPrecond, (0.002, 80)),
        (Precond, (0.002, 80)),
        (VEPrecond, (0.02, 100)),
        (IDDPMPrecond, (0.0064, 80)),
        (VPPrecond, (1e-3, VPPrecond.sigma_max)),
    ],
)
def test_a_network_is_used_in_the_range_it_names_or_in_edms(kind, ends):
    made = as_denoiser(kind()).process
    assert (made.sigma_min, made.sigma_max) == pytest.approx(ends)


def test_pictures_are_scaled_and_latents_are_not():
    assert as_denoiser(EDMPrecond()).data_range == (-1, 1)
    assert as_denoiser(EDMPrecond(img_channels=1)).data_range == (-1, 1)
    assert as_denoiser(Precond()).data_range is None
    assert as_denoiser(EDMPrecond(), model_range=(0, 1)).data_range == (0, 1)


def test_other_modules_are_not_taken_for_one():
    class Raw(nn.Module):
        img_resolution, img_channels, label_dim = 8, 3, 0

        def forward(self, x, noise_labels, class_labels):
            return x

    assert is_preconditioned(EDMPrecond())
    assert is_preconditioned(nn.DataParallel(EDMPrecond()))
    assert not is_preconditioned(Raw())
    assert not is_preconditioned(nn.Conv2d(3, 3, 1))
    assert not is_preconditioned(EDMPrecond)
    with pytest.raises(ModelError, match="cannot read Raw as a diffusion model"):
        as_denoiser(Raw())
    with pytest.raises(ModelError, match="cannot read EDMPrecond as a diffusion model"):
        as_denoiser(EDMPrecond(), prediction="noise", process=processes.VE())


def test_labels_arrive_as_one_hot_rows_and_none_as_zeros():
    net = Precond(label_dim=3)
    denoiser = as_denoiser(net)
    assert denoiser.null_label == 3
    denoiser.predict(torch.zeros(3, 4, 8, 8), 1.0, torch.tensor([2, 0, 3]))
    assert net.unet.calls[-1].tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    for y in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(ModelError, match="does not know one of these labels"):
            denoiser.predict(torch.zeros(1, 4, 8, 8), 1.0, y)
    with pytest.raises(ModelError, match="takes class numbers, one a row, and got"):
        denoiser.predict(torch.zeros(1, 4, 8, 8), 1.0, torch.zeros(1, 3))
    other = copy.deepcopy(denoiser)
    other.predict(torch.zeros(1, 4, 8, 8), 1.0, torch.tensor([1]))
    assert len(net.unet.calls) == 1  # refused labels never arrived, and the copy calls its own network


def heun(net, x, sigmas, class_labels=None):
    """EDM's deterministic sampler, as its code base calls networks: float64 states, sigma without a batch."""
    x = x.double() * sigmas[0]
    for now, then in itertools.pairwise(sigmas):
        slope = (x - net(x, now, class_labels).double()) / now
        ahead = x + (then - now) * slope
        if then > 0:
            slope = 0.5 * slope + 0.5 * (ahead - net(ahead, then, class_labels).double()) / then
        x = x + (then - now) * slope
    return x


def test_a_calibrated_network_serves_edms_own_sampler():
    net = EDMPrecond(img_channels=1)
    generator = torch.Generator().manual_seed(1)
    data = (STD * torch.randn(200, 1, 8, 8, generator=generator)).clamp(-1, 1)
    with torch.no_grad():
        net.model.miss.fill_(0.3)  # every image comes out too bright
    # trust: for Gaussian data a linear filter is as good as any network, and this one is off
    cal = trueup.calibrate(net, trueup.Images(data, data_range=(-1, 1)), trust=True, progress=False)
    sigmas = torch.cat([torch.logspace(math.log10(80), math.log10(0.01), 24).double(), torch.zeros(1)])
    noise = torch.randn(64, 1, 8, 8, generator=generator)
    with torch.no_grad():
        before = heun(net, noise, sigmas)
        with trueup.attach(net, cal):
            after = heun(net, noise, sigmas)
            two = heun(net, noise[:2], sigmas)
        assert torch.equal(heun(net, noise, sigmas), before)
    assert before.mean() > 0.15
    assert abs(after.mean()) < 0.05
    assert torch.allclose(two, after[:2], atol=1e-5)
    assert trueup.sample(net, 2, nfe=5, progress=False).shape == (2, 1, 8, 8)


def test_an_edm2_network_is_corrected_beside_its_logvar_and_by_class():
    net = Precond(label_dim=3)
    with torch.no_grad():
        net.unet.miss.fill_(0.3)
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(120) % 3
    mean = torch.linspace(-0.4, 0.4, 3)[y].reshape(-1, 1, 1, 1)
    latents = mean + STD * torch.randn(120, 4, 8, 8, generator=generator)
    cal = trueup.calibrate(net, trueup.Images(latents, labels=y), levels=[0.1, 1.0, 10.0], progress=False)
    x = latents[:6] + torch.randn(6, 4, 8, 8, generator=generator)
    rows = nn.functional.one_hot(y[:6], 3)
    with torch.no_grad(), trueup.attach(net, cal, gains="least-squares"):
        denoised, logvar = net(x, torch.tensor(1.0), rows, return_logvar=True)
        alone = net(x, torch.ones(6), class_labels=rows)
    assert torch.equal(denoised, alone)
    assert logvar.shape == (6, 1, 1, 1)
    truth = ideal(x, torch.tensor(1.0), mean[:6])
    assert (denoised - truth).mean().abs() < 0.03
    with torch.no_grad():
        assert (net(x, torch.tensor(1.0), rows) - truth).mean() == pytest.approx(0.15, abs=1e-4)


def test_the_raw_network_inside_is_edms_prediction():
    net = EDMPrecond(img_channels=1)
    raw = trueup.Denoiser(
        net.model,
        processes.EDM(net.sigma_data),
        "edm",
        (1, 8, 8),
        call=lambda x, t: net.model(x, t, None),
    )
    whole = as_denoiser(net)
    x_t = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    for sigma in (0.1, 1.0, 20.0):
        inside = x_t / math.sqrt(sigma**2 + 0.25)
        expected = whole.eps(x_t, sigma)
        found = raw.eps(inside, 0.25 * np.log(sigma))
        assert torch.allclose(found, expected, atol=1e-3)
