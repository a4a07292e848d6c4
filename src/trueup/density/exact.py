"""The likelihood of images by the probability flow (equations 46 to 49).

A calibration changes the path, and a spectral one the divergence as well: it is followed anew for each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import full_precision
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.density.bound import decoder_variances
from trueup.density.flow import Divergence, as_fed, follow
from trueup.density.ode import Failure
from trueup.density.terms import discrete_decoder
from trueup.errors import ModelError, TrueupError
from trueup.images import Batch
from trueup.noise import mix, normal

STARTS = ("data", "noise")
TOLERANCE = 1e-4
_START_KEY = 0x7374617274


@dataclass
class Exact:
    """How to follow the flow: to what tolerance, its divergence by what trace, and from where."""

    denoiser: Denoiser
    divergence: Divergence
    tolerance: float = TOLERANCE
    start: str = "noise"
    seed: int = 0

    terms = ("total",)

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise TrueupError(f"start is one of {', '.join(STARTS)}, not {self.start!r}")
        if not isinstance(self.tolerance, (int, float)) or not 0 < self.tolerance < 1:
            raise TrueupError(f"tolerance is a number between 0 and 1, not {self.tolerance!r}")

    def prepare(self, x0: Tensor, calibration: Calibration | None) -> None:
        """Nothing to choose: every image finds its own steps."""

    def describe(self) -> str:
        """How it is done, in words."""
        process, kind = self.denoiser.process, self.divergence.kind
        probes = f"{self.divergence.probes} {kind} probe{'s' * (self.divergence.probes > 1)}"
        trace = "exact trace" if kind == "exact" else f"Hutchinson's trace with {probes}"
        at = "the image itself" if self.start == "data" else "the image with that level's noise"
        way = f"from t = {process.t_min:.4g} at {at} to {process.t_max:.4g}"
        return f"probability flow, Dormand-Prince 5(4), tolerance {self.tolerance:g}; {trace}; {way}"

    def __call__(self, batch: Batch, eight_bit: bool, advance: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """Negative log-likelihoods in nats, (B,), under the network as it is now, and what they cost."""
        denoiser, on = self.denoiser, batch.to(self.denoiser.device)
        if denoiser.takes_whole_times_only(on.y):
            problem = "the probability flow needs times between the timesteps"
            raise ModelError(f"{problem}, and this network knows whole ones only: use the bound")
        probes = self.divergence.vectors(batch.index, denoiser.shape, denoiser.device)
        y, constant = self._start(on, eight_bit)
        try:
            with full_precision():
                log_density, bias, made = follow(denoiser, y, on.y, probes, self.tolerance, advance)
                decoded = self._decode(on, y, eight_bit)
        except Failure as failure:
            row, lam, best = failure.args
            t = float(denoiser.process.t_of_lam(lam))
            where = f"at t = {t:.4g} on the path of image {int(batch.index[row])}"
            if math.isnan(best):
                raise ModelError(f"the network returned values that are not finite {where}") from None
            advice = f"ask for {best:.1g} or more" if best < 0.1 else "use the bound"
            problem = f"a tolerance of {self.tolerance:g} cannot be met: {where} the best reached in steps"
            raise ModelError(f"{problem} worth taking is {best:.1g}: {advice}") from None
        made = made + float(eight_bit and self.start == "noise")  # the decoder's
        found = {"total": constant - log_density + decoded, "bias": bias, "evaluations": made}
        return {name: values.cpu().double() for name, values in found.items()}

    def _start(self, batch: Batch, eight_bit: bool) -> tuple[Tensor, Tensor]:
        """y at the least noise, and what of the negative log-likelihood does not depend on the network."""
        denoiser, process, size = self.denoiser, self.denoiser.process, batch.x0[0].numel()
        alpha, sigma = (float(v) for v in (process.alpha(process.t_min), process.sigma(process.t_min)))
        rho, x0 = math.hypot(alpha, sigma), batch.x0.double()

        def noise(key: int) -> Tensor:
            return normal(self.seed, batch.index, key, denoiser.shape, x0.device).double()

        constant = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
        if self.start == "noise":
            eps = noise(_START_KEY)
            # -log p(x0) <= E[-log p(z) + log q(z | x0) - log p(x0 | z)], z = alpha x0 + sigma eps
            constant += size * math.log(rho)  # from y to z
            if eight_bit:
                constant -= size * (0.5 * math.log(2 * math.pi) + math.log(sigma))
                constant -= 0.5 * eps.square().flatten(1).sum(1)
            else:
                constant -= size * math.log(alpha)
            return (alpha * x0 + sigma * eps) / rho, constant
        constant -= size * math.log(alpha / rho)  # from y to x0
        if eight_bit:
            assert denoiser.data_range is not None
            width = (denoiser.data_range[1] - denoiser.data_range[0]) / 255
            x0 = x0 + width * (torch.special.ndtr(noise(mix(self.seed) >> 2 | 1)) - 0.5)
            constant -= size * math.log(width)
        return x0 * (alpha / rho), constant

    @torch.no_grad()
    def _decode(self, batch: Batch, y: Tensor, eight_bit: bool) -> Tensor:
        """-log p(x0 | z) of 8-bit images that start with noise; else nothing."""
        denoiser, process, t = self.denoiser, self.denoiser.process, self.denoiser.process.t_min
        if self.start == "data" or not eight_bit:
            return torch.zeros(len(y), dtype=torch.float64, device=y.device)
        assert denoiser.data_range is not None
        z = as_fed(denoiser, y * math.hypot(float(process.alpha(t)), float(process.sigma(t))))
        output = denoiser.predict(z, t, batch.y)
        mean = denoiser.parametrization.to_x0(output, z.to(output), *process.scales(t, output))
        std = math.sqrt(decoder_variances(process)[0])
        return discrete_decoder(batch.x0, mean, std, denoiser.data_range)
