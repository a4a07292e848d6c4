"""The variational bound on the likelihood: continuous in time, or of T steps (equations 40 to 45)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.density.levels import Chances, Levels, continuous_levels, data_variance
from trueup.density.terms import discrete_decoder, flat_decoder, prior, step, step_weight
from trueup.errors import Argument, ModelError, TrueupError
from trueup.images import Batch
from trueup.noise import normal
from trueup.process import NoiseProcess

VARIANCES = ("small", "large", "learned_range")
_NOISE_KEY = 0x626F756E64  # of the noise at the levels drawn for a sample; the decoder's comes first


@dataclass
class Bound:
    """How to bound: `steps` None is continuous time; `variance` is that of a chain's reverse steps."""

    denoiser: Denoiser
    steps: int | None = None
    variance: str = "small"
    draws: int = 8  # levels per sample; at least as many as there are steps means every one of them
    importance: bool = True
    seed: int = 0

    terms = ("prior", "diffusion", "decoder")

    def __post_init__(self) -> None:
        if not (isinstance(self.draws, int) and self.draws >= 1):
            raise TrueupError(f"draws is a whole number of at least 1, not {self.draws!r}")
        if self.variance not in VARIANCES:
            raise TrueupError(f"variance is one of {', '.join(VARIANCES)}, not {self.variance!r}")
        if self.steps is None and self.variance != "small":
            problem = "the variance of reverse steps belongs to a bound of T steps"
            raise TrueupError(problem, "pass {}", Argument("steps"))
        self.times = None if self.steps is None else step_times(self.denoiser.process, self.steps)
        self.levels: Levels | None = None

    def prepare(self, x0: Tensor, calibration: Calibration | None) -> None:
        """Choose which levels are drawn how often: by a few samples' frequencies, and by where it gains."""
        process, chances = self.denoiser.process, None
        if self.importance:
            gain, bands = None, Bands(self.denoiser.shape[1:])
            if calibration is not None and not calibration.empty:
                gain = calibration.process.lam(calibration.t), calibration.evidence.gain.value.nan_to_num(0.0)
            chances = Chances(data_variance(x0, bands), bands, gain)
        if self.times is None:
            self.levels = continuous_levels(process, chances)
            return
        lam = process.lam(self.times)
        above, lam = lam[:-1], lam[1:]
        even = torch.full_like(lam, 1 / len(lam))
        mass = even if chances is None else chances.mass(lam, step_weight(above, lam))
        self.levels = Levels(lam, mass, torch.ones_like(lam), continuous=False)

    @torch.inference_mode()
    def __call__(self, batch: Batch, eight_bit: bool, advance: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """Terms in nats of each sample, (B,), under the network as it is now, and what they cost."""
        process, on = self.denoiser.process, batch.to(self.denoiser.device)
        last = process.t_max
        found = {
            "prior": prior(on.x0, float(process.alpha(last)), float(process.sigma(last)), process.prior_std),
            "diffusion": self._diffusion(on, advance),
            "decoder": self._decoder(on, eight_bit),
        }
        finite = torch.stack([torch.isfinite(values).cpu() for values in found.values()]).all(0)
        if not finite.all():
            index = int(batch.index[~finite][0])
            raise ModelError(f"the network returned values that are not finite for image {index}")
        found["evaluations"] = torch.full((len(batch),), float(self._count + eight_bit), dtype=torch.float64)
        return {name: values.cpu() for name, values in found.items()}

    def describe(self) -> str:
        """How it is done, in words."""
        process = self.denoiser.process
        drawn = "importance-sampled" if self.importance else "evenly drawn"
        if self.steps is None:
            how = f"continuous time, {self.draws} {drawn} levels per image"
        elif self._count == self.steps - 1:
            how = f"all of {self.steps} steps, {self.variance} variance"
        else:
            how = f"{self.steps} steps, {self.variance} variance, {self.draws} {drawn} ones per image"
        return f"{how}; prior at t = {process.t_max:.4g}, decoder at {process.t_min:.4g}"

    @property
    def _count(self) -> int:
        return self.draws if self.times is None else min(self.draws, len(self.times) - 1)

    def _diffusion(self, batch: Batch, advance: Callable[[Tensor], None]) -> Tensor:
        """The integral, or the sum over steps, of each sample."""
        assert self.levels is not None
        process, device = self.denoiser.process, batch.x0.device
        if self.times is not None and self._count == len(self.times) - 1:  # every step
            cell = torch.arange(self._count).expand(len(batch), -1)
            lam, weight = self.levels.lam[cell], torch.ones(cell.shape, dtype=torch.float64)
        else:
            cell, lam, weight = self.levels.draw(batch.index, self._count, self.seed)
        if self.times is None:
            t = process.t_of_lam(lam).clamp(process.t_min, process.t_max)
        else:
            t = self.times[1:][cell]
        total = torch.zeros(len(batch), dtype=torch.float64, device=device)
        for slot in range(self._count):
            eps = normal(self.seed, batch.index, _NOISE_KEY + 1 + slot, self.denoiser.shape, device)
            eps_hat, fraction = self._predict(batch, eps, t[:, slot])
            squared = (eps_hat.double() - eps.double()).square().flatten(1)
            counts = weight[:, slot].to(device)
            if self.times is None:
                total += counts * squared.sum(1)
            else:
                before = self.times[:-1][cell[:, slot]]
                lam_s, lam_t = (process.lam(v).to(device) for v in (before, t[:, slot]))
                # Log of the largest variance of a step, that of q(x_t | x_s), over the posterior's.
                growth = 2 * (process.sigma(t[:, slot]) / process.sigma(before)).log()
                ratio = (self.variance != "small") * growth.to(device)[:, None] * fraction
                total += counts * step(squared, lam_s, lam_t, ratio)
            advance(torch.full((len(batch),), (slot + 1) / (self._count + 1)))
        return total

    def _predict(self, batch: Batch, eps: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """eps_hat at x_t, and how far its variances go to the largest: (B, dimensions), or 1 for all."""
        denoiser, channels = self.denoiser, self.denoiser.shape[0]
        x_t = denoiser.process.noised(batch.x0, eps, t)
        raw = denoiser.predict(x_t, t, batch.y, variance=True)
        output, learned = raw[:, :channels], raw[:, channels:]
        eps_hat = denoiser.parametrization.to_eps(output, x_t.to(output), *denoiser.process.scales(t, output))
        if self.variance != "learned_range":
            return eps_hat, torch.ones(1, 1, dtype=torch.float64, device=eps.device)
        if not learned.shape[1]:
            others = (Argument("variance", name) for name in ("small", "large"))
            raise ModelError("this network has no learned variance", "use {} or {}", *others)
        return eps_hat, (0.5 * (learned.double() + 1)).flatten(1)

    def _decoder(self, batch: Batch, eight_bit: bool) -> Tensor:
        """-log p(x0 | the least noisy x_t) of each sample."""
        denoiser, process, x0 = self.denoiser, self.denoiser.process, batch.x0
        first = process.t_min if self.times is None else float(self.times[0])
        alpha, sigma = float(process.alpha(first)), float(process.sigma(first))
        if not eight_bit:
            value = flat_decoder(math.prod(denoiser.shape), alpha, sigma)
            return torch.full((len(batch),), value, dtype=torch.float64)
        assert denoiser.data_range is not None
        eps = normal(self.seed, batch.index, _NOISE_KEY, denoiser.shape, x0.device)
        least, most = decoder_variances(process, self.times)
        eps_hat, fraction = self._predict(batch, eps, torch.full((len(batch),), first, dtype=torch.float64))
        share = fraction if self.variance == "learned_range" else torch.zeros_like(fraction)
        variance = (math.log(least) * (1 - share) + math.log(most) * share).exp()
        std = variance.sqrt().expand(len(batch), x0[0].numel()).reshape(x0.shape)
        mean = ((alpha * x0 + sigma * eps).double() - sigma * eps_hat.double()) / alpha
        return discrete_decoder(x0, mean, std, denoiser.data_range)


def step_times(process: NoiseProcess, steps: int) -> Tensor:
    """The times of a chain of so many steps, rising: whole and evenly spaced, or even in lam."""
    most = int(process.t_max - process.t_min) + 1 if process.integer_times else math.inf
    if not 2 <= steps <= most:
        known = f"2 to {most}" if process.integer_times else "at least 2"
        raise TrueupError(f"a bound of T steps of this model has {known} of them, not {steps}")
    if process.integer_times:
        return torch.linspace(process.t_min, process.t_max, steps, dtype=torch.float64).round()
    top, bottom = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    times = process.t_of_lam(torch.linspace(top, bottom, steps, dtype=torch.float64))
    return times.clamp(process.t_min, process.t_max)


def decoder_variances(process: NoiseProcess, times: Tensor | None = None) -> tuple[float, float]:
    """The decoder's variance, and the largest that a network which learned it may choose.

    As in improved DDPM: the posterior variance of the step above, which for steps of equal size is half of
    sigma^2. A process without steps of its own takes that half, however many steps a chain has.
    """
    if not process.integer_times:
        noise = float(process.sigma(process.t_min) / process.alpha(process.t_min)) ** 2
        return 0.5 * noise, noise
    if times is None:
        times = process.t_min + torch.tensor([0.0, 1.0], dtype=torch.float64)
    alpha, sigma = process.alpha(times[:2]), process.sigma(times[:2])
    added = sigma[1] ** 2 - (alpha[1] / alpha[0]) ** 2 * sigma[0] ** 2  # of q(x_1 | x_0)
    return float(added * sigma[0] ** 2 / sigma[1] ** 2), float(sigma[0] ** 2)
