"""The likelihood of images by the probability flow, before and after calibration (equations 46 to 49).

A calibration changes the path, and a spectral one the divergence as well: both are followed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.data import Batch
from trueup.denoiser import Denoiser
from trueup.density.bound import decoder_variances
from trueup.density.flow import Divergence, coordinates, dequantization_noise, follow, full_precision
from trueup.density.ode import Failure
from trueup.density.terms import discrete_decoder
from trueup.errors import ModelError
from trueup.estimate.evaluate import out_of_memory
from trueup.noise import normals
from trueup.process import NoiseProcess
from trueup.sampling.network import takes_whole_times_only

STARTS = ("data", "noise")
_START_KEY = 0x7374617274


class Exact:
    """Likelihoods by the flow, of one batch after the other."""

    def __init__(
        self,
        denoiser: Denoiser,
        calibration: Calibration | None,
        divergence: Divergence,
        tolerance: float,
        start: str,
        seed: int,
    ):
        self.denoiser, self.calibration, self.divergence = denoiser, calibration, divergence
        self.tolerance, self.start, self.seed = tolerance, start, seed

    def prepare(self, x0: Tensor) -> None:
        """Nothing to choose: every image finds its own steps."""

    def describe(self) -> str:
        """How it is done, in words."""
        process, kind = self.denoiser.process, self.divergence.kind
        probes = f"{self.divergence.probes} {kind} probe{'s' * (self.divergence.probes > 1)}"
        trace = "exact trace" if kind == "exact" else f"Hutchinson's trace with {probes}"
        at = "the image itself" if self.start == "data" else "the image with that level's noise"
        return (
            f"probability flow, Dormand-Prince 5(4), tolerance {self.tolerance:g}; {trace}; from "
            f"t = {process.t_min:.4g} at {at} to {process.t_max:.4g}"
        )

    def __call__(self, batch: Batch, eight_bit: bool, advance: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """Negative log-likelihoods in nats, (B,) each, and their cost; what memory cannot hold is halved."""
        try:
            return self._measure(batch, eight_bit, advance)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if len(batch.index) == 1:
                raise ModelError(
                    "not enough memory to differentiate the network for a single image"
                ) from None
        if self.denoiser.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(batch.index) // 2
        parts = []
        for rows in (slice(0, half), slice(half, None)):
            y = None if batch.y is None else batch.y[rows]
            parts.append(self(Batch(batch.index[rows], batch.x0[rows], y), eight_bit, lambda _: None))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _measure(self, batch: Batch, eight_bit: bool, advance: Callable[[Tensor], None]) -> dict[str, Tensor]:
        denoiser, process = self.denoiser, self.denoiser.process
        labels = batch.y.to(denoiser.device) if batch.y is not None else None
        if takes_whole_times_only(denoiser, labels):
            raise ModelError(
                "the probability flow needs times between the timesteps, and this network knows whole ones "
                "only: use the bound"
            )
        probes = self.divergence.vectors(batch.index, denoiser.shape, denoiser.device)
        y, constant = self._start(batch, eight_bit)
        sides = (None,) if self.calibration is None else (None, self.calibration)
        found: dict[str, Tensor] = {}
        for turn, (name, calibration) in enumerate(zip(("before", "after"), sides, strict=False)):

            def tell(share: Tensor, turn: int = turn) -> None:
                advance((share + turn) / len(sides))

            try:
                with _calibrated(denoiser, calibration), full_precision():
                    traced = follow(denoiser, y, labels, probes, self.tolerance, tell)
                    decoded = self._decode(batch, y, labels, eight_bit)
            except Failure as failure:
                where = f"image {int(batch.index[failure.row])}"
                raise _failed(failure, where, process, self.tolerance) from None
            found[f"nats_{name}"] = (constant - traced.log_density.cpu() + decoded.cpu()).double()
            found[f"bias_{name}"] = traced.start_bias.cpu().double()
            decoding = float(eight_bit and self.start == "noise")
            found[f"evaluations_{name}"] = traced.evaluations.cpu().double() + decoding
        return found

    def _start(self, batch: Batch, eight_bit: bool) -> tuple[Tensor, Tensor]:
        """y at the least noise, and what of the negative log-likelihood does not depend on the network."""
        denoiser, process, size = self.denoiser, self.denoiser.process, batch.x0[0].numel()
        alpha, sigma = (float(v) for v in (process.alpha(process.t_min), process.sigma(process.t_min)))
        rho = math.hypot(alpha, sigma)
        x0 = batch.x0.to(denoiser.device).double()
        constant = torch.zeros(len(x0), dtype=torch.float64)
        if self.start == "noise":
            eps = self._noise(batch.index).double()
            # -log p(x0) <= E[-log p(z) + log q(z | x0) - log p(x0 | z)], z = alpha x0 + sigma eps
            constant += size * math.log(rho)  # from y to z
            if eight_bit:
                constant -= size * (0.5 * math.log(2 * math.pi) + math.log(sigma))
                constant -= 0.5 * eps.square().flatten(1).sum(1).cpu()
            else:
                constant -= size * math.log(alpha)
            return (alpha * x0 + sigma * eps) / rho, constant
        constant -= size * math.log(alpha / rho)  # from y to x0
        if eight_bit:
            assert denoiser.data_range is not None
            width = (denoiser.data_range[1] - denoiser.data_range[0]) / 255
            x0 = x0 + width * dequantization_noise(self.seed, batch.index, denoiser.shape, denoiser.device)
            constant -= size * math.log(width)
        return x0 * (alpha / rho), constant

    def _noise(self, index: Tensor) -> Tensor:
        return normals(
            self.seed, index, torch.tensor([_START_KEY]), self.denoiser.shape, self.denoiser.device
        )[0]

    @torch.no_grad()
    def _decode(self, batch: Batch, y: Tensor, labels: Tensor | None, eight_bit: bool) -> Tensor:
        """-log p(x0 | z) of 8-bit images that start with noise; else nothing."""
        denoiser, process = self.denoiser, self.denoiser.process
        if self.start == "data" or not eight_bit:
            return torch.zeros(len(y), dtype=torch.float64)
        assert denoiser.data_range is not None
        lam = process.lam(torch.full((len(y),), process.t_min, dtype=torch.float64))
        t, scale, _ = coordinates(process, lam)
        alpha, sigma = float(process.alpha(process.t_min)), float(process.sigma(process.t_min))
        z = (y * float(scale[0])).to(torch.float64 if denoiser.dtype == torch.float64 else torch.float32)
        output = denoiser(z, t.to(z.device, torch.float32), labels)
        output = output if output.dtype == torch.float64 else output.float()
        wide = torch.ones(1, *[1] * (z.ndim - 1), device=z.device, dtype=output.dtype)
        mean = denoiser.parametrization.to_x0(output, z.to(output), alpha * wide, sigma * wide)
        std = math.sqrt(decoder_variances(process)[0])
        return discrete_decoder(batch.x0.to(z.device), mean, std, denoiser.data_range)


def _calibrated(denoiser: Denoiser, calibration: Calibration | None) -> AbstractContextManager[Any]:
    return nullcontext() if calibration is None else attach(denoiser, calibration)


def _failed(failure: Failure, name: str, process: NoiseProcess, tolerance: float) -> ModelError:
    """A failed integration in words."""
    t = float(process.t_of_lam(failure.time))
    if math.isnan(failure.best):
        return ModelError(
            f"the network returned values that are not finite at t = {t:.4g} on the path of {name}"
        )
    advice = f"ask for {failure.best:.1g} or more" if failure.best < 0.1 else "use the bound"
    return ModelError(
        f"a tolerance of {tolerance:g} cannot be met: at t = {t:.4g} on the path of {name} the best reached "
        f"in steps worth taking is {failure.best:.1g}: {advice}"
    )
