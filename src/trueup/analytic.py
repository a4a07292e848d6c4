"""Data whose ideal denoiser is known in closed form: what the tests and the demonstration measure against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.errors import TrueupError
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

Distortion = Callable[[Tensor, Tensor, Tensor], Tensor]


class GaussianMixture:
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

    def eps_given(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """E[eps | x_t], with one alpha and sigma per row."""
        share, offset, variance = self._posterior(x_t, alpha, sigma)
        nearest = torch.einsum("bm,bmd->bd", share, offset)
        return (sigma.to(x_t) / variance)[:, None].mul(nearest).reshape(x_t.shape)

    def x0_given(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """E[x0 | x_t]; unlike (x_t - sigma E[eps | x_t]) / alpha it exists where nothing is left of x0."""
        share, offset, variance = self._posterior(x_t, alpha, sigma)
        shrink = alpha.to(x_t) * self.std**2 / variance  # (B,)
        nearest = self.means.to(x_t).flatten(1) + shrink[:, None, None] * offset
        return torch.einsum("bm,bmd->bd", share, nearest).reshape(x_t.shape)

    def _posterior(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every Gaussian: its share in x_t (B, M), x_t less its mean (B, M, D), their variance (B,)."""
        means = self.means.to(x_t).flatten(1)  # (M, D)
        variance = (alpha**2 * self.std**2 + sigma**2).to(x_t)
        offset = x_t.flatten(1)[:, None, :] - alpha.to(x_t)[:, None, None] * means
        logits = self.weights.to(x_t).log() - 0.5 * offset.square().sum(2) / variance[:, None]
        return logits.softmax(1), offset, variance

    def denoiser(
        self,
        process: NoiseProcess,
        parametrization: Parametrization | str = "noise",
        distortion: Distortion | None = None,
        dtype: torch.dtype | None = None,
    ) -> Denoiser:
        """The ideal network, or one that errs by `distortion(eps, u, lam)` in eps space."""
        kind = (
            parametrization
            if isinstance(parametrization, Parametrization)
            else Parametrization(parametrization)
        )

        def network(x_t: Tensor, t: Tensor) -> Tensor:
            times = t.to(torch.float64)
            alpha, sigma = process.alpha(times), process.sigma(times)
            eps = self.eps_given(x_t, alpha, sigma)
            wide = (-1, *[1] * (x_t.dim() - 1))
            alpha_wide, sigma_wide = alpha.reshape(wide).to(x_t), sigma.reshape(wide).to(x_t)
            if distortion is None:
                return kind.target(self.x0_given(x_t, alpha, sigma), eps, alpha_wide, sigma_wide)
            eps = eps + distortion(eps, x_t / sigma_wide, process.lam(times).reshape(wide).to(x_t))
            return kind.from_eps(eps, x_t, alpha_wide, sigma_wide)

        return Denoiser(
            network, process, kind, self.shape, data_range=None, dtype=dtype, description="an exact denoiser"
        )
