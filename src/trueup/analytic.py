"""Data whose ideal denoiser is known in closed form: what the tests and the demonstration measure against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.errors import TrueupError
from trueup.images import Samples
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

Distortion = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Ideal:
    """Data whose ideal denoiser is known: `given` says E[x0 | x_t] and E[eps | x_t]."""

    given: Callable[..., tuple[Tensor, Tensor]]  # of x_t, and one alpha and sigma per row
    shape: tuple[int, ...]
    conditional = False
    data_range: tuple[float, float] | None = None

    def x0_given(self, *condition: Tensor) -> Tensor:
        """E[x0 | x_t]."""
        return self.given(*condition)[0]

    def eps_given(self, *condition: Tensor) -> Tensor:
        """E[eps | x_t]."""
        return self.given(*condition)[1]

    def denoiser(
        self,
        process: NoiseProcess,
        parametrization: Parametrization | str = "noise",
        distortion: Distortion | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Denoiser:
        """The ideal network, or one that errs by `distortion(eps, u, lam)` in eps space."""
        kind = Parametrization(parametrization) if isinstance(parametrization, str) else parametrization

        def network(x_t: Tensor, t: Tensor, *y: Tensor) -> Tensor:
            times = t.to(torch.float64)
            x0, eps = self.given(x_t, process.alpha(times), process.sigma(times), *y)
            alpha, sigma = process.scales(times, x_t)
            if distortion is None:
                return kind.target(x0, eps, alpha, sigma)
            lam = process.lam(times).reshape(-1, *[1] * (x_t.ndim - 1)).to(x_t)
            return kind.from_eps(eps + distortion(eps, x_t / sigma, lam), x_t, alpha, sigma)

        how: dict[str, Any] = {"data_range": self.data_range, "conditional": self.conditional}
        how |= {"device": device, "dtype": dtype, "description": "an exact denoiser"}
        return Denoiser(network, process, kind, self.shape, **how)


class GaussianMixture(_Ideal):
    """x0 drawn from Gaussians of standard deviation `std` around `means` (M, C, *spatial).

    At every noise level x_t is again a mixture, so E[eps | x_t] is exact:

    >>> one = GaussianMixture(torch.zeros(1, 1, 4, 4), std=1.0)
    >>> x_t = torch.full((1, 1, 4, 4), 2.0)
    >>> alpha, sigma = torch.tensor([0.8]), torch.tensor([0.6])
    >>> round(float(one.eps_given(x_t, alpha, sigma).mean()), 5)  # sigma x_t / (alpha^2 + sigma^2)
    1.2
    """

    def __init__(self, means: Tensor, std: float, weights: Tensor | None = None):
        if std <= 0:
            raise TrueupError("a Gaussian mixture needs a positive standard deviation")
        self.means, self.std = means, std
        self.weights = torch.full((len(means),), 1 / len(means)) if weights is None else weights
        self.shape = tuple(means.shape[1:])

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Draws of x0, (count, C, *spatial)."""
        generator = torch.Generator().manual_seed(seed)
        pick = torch.multinomial(self.weights.float(), count, replacement=True, generator=generator)
        noise = torch.randn(count, *self.shape, generator=generator, dtype=self.means.dtype)
        return self.means[pick] + self.std * noise

    def given(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """E[x0 | x_t] and E[eps | x_t]; the first exists where nothing is left of x0, too."""
        logits, offset, variance = self._posterior(x_t, alpha, sigma)
        share = logits.softmax(1)  # (B, M)
        nearest = torch.einsum("bm,bmd->bd", share, offset) / variance[:, None]
        x0 = share @ self.means.to(x_t).flatten(1) + (alpha.to(x_t) * self.std**2)[:, None] * nearest
        return x0.reshape(x_t.shape), (sigma.to(x_t)[:, None] * nearest).reshape(x_t.shape)

    def _posterior(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every Gaussian: its share of x_t as a logit (B, M), x_t less its mean (B, M, D), variance."""
        means = self.means.to(x_t).flatten(1)  # (M, D)
        variance = (alpha**2 * self.std**2 + sigma**2).to(x_t)
        offset = x_t.flatten(1)[:, None, :] - alpha.to(x_t)[:, None, None] * means
        logits = self.weights.to(x_t).log() - 0.5 * offset.square().sum(2) / variance[:, None]
        return logits, offset, variance

    def log_density(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """log q(x_t) in nats, (B,); with alpha = 1 and sigma = 0 that of the data.

        >>> one = GaussianMixture(torch.zeros(1, 1, 2, 2), std=1.0)
        >>> at_zero = one.log_density(torch.zeros(1, 1, 2, 2), torch.ones(1), torch.zeros(1))
        >>> round(float(at_zero), 6)  # -2 log(2 pi)
        -3.675754
        """
        logits, offset, variance = self._posterior(x_t, alpha, sigma)
        return logits.logsumexp(1) - 0.5 * offset.shape[2] * torch.log(2 * math.pi * variance)


class KernelDensity(_Ideal):
    """The ideal network of a finite data set: what perfect training on it would give (paper, section 3.4).

    x0 is drawn from `samples` (N, C, *spatial), each as likely as another. Its error has mean zero over these
    samples, and not over others of the same kind: that is the data set's own bias. Labels, one per
    sample, make it conditional: the posterior is then over the samples of that label.

    >>> points = KernelDensity(torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1))
    >>> x_t = torch.full((1, 1, 1, 1), 0.8)
    >>> alpha, sigma = torch.tensor([0.8]), torch.tensor([0.6])
    >>> round(float(points.x0_given(x_t, alpha, sigma)), 4)  # tanh(alpha x_t / sigma^2)
    0.9445
    """

    data_range: tuple[float, float] | None = (-1.0, 1.0)

    def __init__(self, samples: Tensor, labels: Tensor | None = None):
        if samples.ndim < 3 or not len(samples):
            raise TrueupError(f"samples are (count, channels, *spatial), not {tuple(samples.shape)}")
        if labels is not None and len(labels) != len(samples):
            raise TrueupError(f"there are {len(samples)} samples and {len(labels)} labels")
        self.samples, self.labels = samples, labels
        self._flat: Tensor | None = None  # float64, where it is used
        self.shape, self.conditional = tuple(samples.shape[1:]), labels is not None

    @classmethod
    def of(
        cls, data: Any, shape: Sequence[int], model_range: tuple[float, float] | None = (-1.0, 1.0)
    ) -> KernelDensity:
        """Of `Images`, or anything that holds some."""
        read = Samples(data, shape, model_range)
        if not (batches := list(read.batches(256))):
            raise TrueupError(f"{read.name} holds no samples")
        labels = [batch.y for batch in batches if batch.y is not None]
        y = torch.cat(labels) if len(labels) == len(batches) else None
        found = cls(torch.cat([batch.x0 for batch in batches]), y)
        found.data_range = model_range
        return found

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Draws of x0, (count, C, *spatial)."""
        generator = torch.Generator().manual_seed(seed)
        return self.samples[torch.randint(len(self.samples), (count,), generator=generator)]

    def given(
        self, x_t: Tensor, alpha: Tensor, sigma: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """E[x0 | x_t] and E[eps | x_t]: the samples weighted by how near they are.

        Distances are computed in float64: at low noise they are small differences of large numbers.
        """
        flat, x = self._on(x_t.device), x_t.flatten(1).double()  # (N, D) and (B, D)
        a, s = (v.to(x)[:, None] for v in (alpha, sigma))
        # |x - alpha x0|^2 less |x|^2, which all samples share
        logits = -0.5 * (a**2 * flat.square().sum(1) - 2 * a * (x @ flat.T)) / s**2
        if self.labels is not None and y is not None:
            other = self.labels.to(y)[None, :] != y[:, None]
            if bool(other.all(1).any()):
                raise TrueupError("the data set has no sample with one of these labels")
            logits = logits.masked_fill(other, -math.inf)
        x0 = logits.softmax(1) @ flat
        return x0.reshape(x_t.shape).to(x_t), ((x - a * x0) / s).reshape(x_t.shape).to(x_t)

    def _on(self, device: torch.device) -> Tensor:
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):
                self._flat = self.samples.flatten(1).to(device, torch.float64)
        return self._flat
