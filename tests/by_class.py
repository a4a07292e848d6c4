"""Class-conditional networks in closed form, each with an error that is known."""

import torch

from trueup import Denoiser
from trueup.estimate import fit
from trueup.estimate import measure as measure_images
from trueup.images import Images
from trueup.process import ContinuousVP

VP = ContinuousVP()
SHAPE = (1, 4, 4)
LEVELS = [0.05, 0.1, 0.17, 0.25, 0.35, 0.45, 0.6, 0.8]
STD = 0.5
NULL = 99


def maps(count, seed=0):
    """So many maps (count, *SHAPE) of size one."""
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Gaussians:
    """x0 ~ N(means[y], STD²), whose E[eps | x_t, y] is known, and a network that is off by `bias[y]` of it.

    The error is constant in x_t and smooth over noise levels, bias · cos(lam/4). Told NULL, it says what
    it would of class 0, and is off by `null` of its own.
    """

    shape = SHAPE

    def __init__(self, bias, means=None, null=None, gain=0.0):
        self.bias = torch.as_tensor(bias, dtype=torch.float64)
        self.means = torch.zeros_like(self.bias) if means is None else means
        self.null = torch.zeros(SHAPE, dtype=torch.float64) if null is None else null
        self.gain = gain  # the same for all: what the correction of all classes has to find

    def sample(self, y, seed):
        """Images of labels y (n,), float64."""
        noise = torch.randn(
            len(y), *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        return self.means[y] + STD * noise

    def error(self, y, lam):
        """What the network adds to E[eps | x_t], (n, *SHAPE)."""
        none = (y == NULL)[:, None, None, None]
        bias = torch.where(none, self.null, self.bias[torch.where(y == NULL, 0, y)])
        return bias * torch.cos(lam / 4).reshape(-1, 1, 1, 1)

    def eps(self, x_t, t, y):
        alpha, sigma = VP.scales(t.double(), x_t)
        mean = self.means.to(x_t)[torch.where(y == NULL, 0, y)]
        ideal = sigma * (x_t - alpha * mean) / (alpha**2 * STD**2 + sigma**2)
        return ideal + self.gain * ideal.tanh() + self.error(y, VP.lam(t.double())).to(x_t)

    def __call__(self, x_t, t, y):
        return self.eps(x_t, t, y)

    def denoiser(self, null=False, **settings):
        how = {
            "conditional": True,
            "data_range": None,
            "null_label": NULL if null else None,
            "batch_size": 500,
        }
        return Denoiser(self, VP, "noise", SHAPE, **{**how, **settings})


def measure(network, y, seed=1, *, null=False, classes=None, levels=LEVELS, **settings):
    """Moments by class, on images of labels y."""
    classes = sorted(set(y.tolist())) + ([NULL] if null else []) if classes is None else classes
    images = Images(network.sample(y, seed).float(), labels=y, data_range=None)
    how = {"classes": classes, "levels": levels, "trust": True, "progress": False, **settings}
    return measure_images(network.denoiser(null), images, **how)


def calibrate(network, y, seed=1, *, family="spectral", estimator="shrunk", **settings):
    return fit(measure(network, y, seed, **settings), family=family, estimator=estimator)


def fresh_gain(network, correction, label, over=None, count=400, seed=7, told=None):
    """What a correction takes off the loss of a class on fresh images, summed over levels: mean and error.

    over: the correction it is compared with; by default none. told: what the network is told, else the label.
    """
    y = torch.full((count,), label)
    x0, generator = network.sample(y, seed), torch.Generator().manual_seed(seed + 1)
    y = y if told is None else torch.full_like(y, told)
    saved = torch.zeros(count, dtype=torch.float64)
    for level in LEVELS:
        t = torch.full((count,), level, dtype=torch.float64)
        eps = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
        alpha, sigma = VP.scales(t, x0)
        x_t = alpha * x0 + sigma * eps
        eps_hat, lam = network.eps(x_t, t, y), VP.lam(t)
        before = eps_hat if over is None else over.apply(eps_hat, x_t / sigma, lam)
        after = correction.apply(eps_hat, x_t / sigma, lam)
        saved += ((before - eps).square() - (after - eps).square()).flatten(1).sum(1)
    return float(saved.mean()), float(saved.std() / count**0.5)
