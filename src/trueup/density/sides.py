"""A network as it is and as calibrated, from one evaluation: a correction needs output and input alone."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.hook import CorrectOutput
from trueup.sampling.network import Network, takes_whole_times_only


class Sides:
    """`sides(x0, eps, t, y)`: eps_hat before and after calibration at x_t = alpha x0 + sigma eps."""

    def __init__(self, denoiser: Denoiser, calibration: Calibration | None, at_once: int | None = None):
        self.denoiser = denoiser
        with torch.inference_mode(False):
            self.hook = None if calibration is None else CorrectOutput(calibration)
        self.network = Network(denoiser, at_once=at_once)
        self.rest: Tensor | None = None  # channels of a learned variance in the last output

    def __call__(self, x0: Tensor, eps: Tensor, t: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both, (B, *shape); t (B,) is exact in the noise, and rounded for networks that take whole times."""
        denoiser, process = self.denoiser, self.denoiser.process
        wide = (-1, *[1] * (x0.ndim - 1))
        alpha, sigma = (v.to(x0).reshape(wide) for v in (process.alpha(t), process.sigma(t)))
        x_t = alpha * x0 + sigma * eps  # equation 1
        whole = process.integer_times and bool((t == t.round()).all())
        whole = whole or takes_whole_times_only(denoiser, y)
        times = (t.round() if whole else t).to(x0.device, torch.int64 if whole else torch.float32)
        self.network.y = y
        raw = self.network(x_t, times, variance=True)
        channels = denoiser.shape[0]
        mean, self.rest = raw[:, :channels], raw[:, channels:]
        after = mean if self.hook is None or self.hook.empty else self.hook.correct(mean, x_t, times)
        before_eps, after_eps = (
            denoiser.parametrization.to_eps(output, x_t.to(output), alpha.to(output), sigma.to(output))
            for output in (mean, after)
        )
        return before_eps, after_eps
