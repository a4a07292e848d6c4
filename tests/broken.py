"""Networks with closed forms, whole and broken on purpose."""

import math

import torch

import trueup
from trueup.analytic import GaussianMixture, _Ideal
from trueup.bands import Bands


def smooth_mixture(size=16, channels=1, mean=0.0, kinds=3):
    """A few smooth shapes with Gaussian grain."""
    generator = torch.Generator().manual_seed(7)
    bands = Bands((size, size))
    z = torch.randn(kinds, channels, size, size, generator=generator, dtype=torch.float64)
    z = z * (bands.index < 5) * 2.0
    return GaussianMixture(bands.idct(z) + mean, std=0.5)


class Exponential(_Ideal):
    """Pixels are independent, exponential and centred: as skewed as data can be, with closed forms for both
    the mean and the median of what noise leaves."""

    def __init__(self, size=8, median=False):
        self.shape, self.median = (1, size, size), median

    def sample(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return -torch.rand(count, *self.shape, generator=generator, dtype=torch.float64).log() - 1.0

    def given(self, x_t, alpha, sigma):
        a, s = (v.double().reshape(-1, 1, 1, 1) for v in (alpha, sigma))
        x, width = x_t.double(), s / a
        z = ((x + a) / a - width**2) / width  # x0 + 1 is N(z width, width^2), cut off at 0
        log_mass = torch.special.log_ndtr(z)
        if self.median:  # log_ndtr(w) = log_ndtr(z) - log 2, by Newton
            w = z.clamp_max(0.0) - 1.0  # concave, and from the left: it never steps over
            for _ in range(30):
                log_w = torch.special.log_ndtr(w)
                slope = torch.exp(-0.5 * w**2 - 0.5 * math.log(2 * math.pi) - log_w)
                w = w - (log_w - log_mass + math.log(2)) / slope
            x0 = width * (z - w) - 1.0
        else:
            far = z.clamp_max(-30.0)
            above = z + torch.exp(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - log_mass)
            above = torch.where(z < -30.0, -(1 - 2 / far**2 + 10 / far**4) / far, above)  # where that cancels
            x0 = width * above - 1.0
        return x0.to(x_t), ((x - a * x0) / s).to(x_t)


class Filter(torch.nn.Module):
    """The ideal network of Gaussian data, whose principal axes are its weights."""

    def __init__(self, process, size=8):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        axes = torch.linalg.qr(torch.randn(size**2, size**2, generator=generator))[0]
        self.axes, self.process, self.size = torch.nn.Parameter(axes), process, size
        self.register_buffer("power", 2.0 * torch.arange(1, size**2 + 1) ** -0.7)

    def sample(self, count, seed=0):
        z = torch.randn(count, self.size**2, generator=torch.Generator().manual_seed(seed))
        return ((z * self.power.sqrt()) @ self.axes.detach().T).reshape(count, 1, self.size, self.size)

    def forward(self, x_t, t):
        alpha, sigma = (v.reshape(-1, 1).float() for v in (self.process.alpha(t), self.process.sigma(t)))
        seen = x_t.flatten(1) @ self.axes
        return ((seen * sigma / (alpha**2 * self.power + sigma**2)) @ self.axes.T).reshape(x_t.shape)


def around(denoiser, layer):
    """A denoiser whose network ends in one more layer, as a module that has modes."""

    class Ended(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = layer, torch.nn.Parameter(torch.ones(()))

        def forward(self, x_t, t):
            return self.scale * self.layer(denoiser.network(x_t, t))

    how = {"data_range": denoiser.data_range}
    return trueup.Denoiser(Ended(), denoiser.process, denoiser.parametrization, denoiser.shape, **how)
