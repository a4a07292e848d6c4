"""What only a few more calls of the network can show: noise of its own, neighbours, medians for means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup.denoiser import Denoiser
from trueup.denoiser.network import held
from trueup.denoiser.weights import few_values
from trueup.images import Batch
from trueup.noise import level_key, normal
from trueup.statistics import Number, threshold

ROWS = 8  # in one call, of which the neighbours of half are exchanged
LEAST_DIFFERENCE = 1e-4  # of outputs, a thousand roundings of float32: less may be the machine's
ROUNDINGS = 4.0  # of half precision, whose sums are kept in float32
LAM = (1.5, 0.5, -0.5, -1.5)  # where residuals are looked at one by one: as much noise as data
SURE = 4.0  # standard errors
FEW = 256  # values that 8 bits tell apart
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd


@dataclass(frozen=True)
class Mode:
    """How far outputs differ, relative to their size, where nothing that matters was changed."""

    again: Number  # for the same input once more
    neighbours: Number  # for the same row among other rows
    least: float  # what is not rounding

    @property
    def random(self) -> bool:
        """Whether the network draws something."""
        return self.again.value > self.least

    @property
    def mixes(self) -> bool:
        """Whether rows of a batch see each other."""
        return self.neighbours.value > self.least


@dataclass(frozen=True)
class Modes:
    """A network in evaluation mode, as it was measured; and in the mode it was handed over in."""

    evaluated: Mode
    given: Mode  # the same, where it was in evaluation mode
    batch_norms: int  # layers that take their statistics from the batch, as given
    dropouts: int  # layers that drop something, as given
    few: str | None  # in words, how weights or outputs show that they were quantised


@torch.no_grad()
def modes(denoiser: Denoiser, batch: Batch) -> Modes:
    """Call the network a few times with inputs that should not matter to what it says."""
    rows = batch.rows(slice(0, ROWS)).to(denoiser.device)
    process = denoiser.process
    t = _times(denoiser, (0.0,))[0]
    eps = normal(0, rows.index, level_key(float(t)), denoiser.shape, denoiser.device)
    x_t = process.noised(rows.x0, eps, t)
    kept = max(1, len(rows) // 2)
    among = torch.cat([x_t[:kept], process.noised(-rows.x0, eps, t)[kept:]])  # as bright as they were dark
    if len(rows) == 1:
        among = x_t

    def call(x: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return denoiser.predict(x, t, rows.y)[:kept].cpu().double().flatten(1)

    def mode() -> tuple[Mode, Tensor]:
        # With the same seed dropout drops the same: what then differs is due to the neighbours.
        first, other, same, again = call(x_t, 0), call(among, 0), call(x_t, 0), call(x_t, 1)
        own = _apart(first, same)  # noise that no seed of torch's controls
        neighbours = _apart(first, other)
        if float(own.mean()) > 0.5 * float(neighbours.mean()):
            neighbours = torch.zeros_like(neighbours)
        random = torch.maximum(own, _apart(first, again))
        least = max(LEAST_DIFFERENCE, ROUNDINGS * torch.finfo(denoiser.dtype).eps)
        return Mode(Number.mean(random), Number.mean(neighbours), least), first

    found = [one for one in held(denoiser.network) if isinstance(one, nn.Module)]
    modules = [module for one in found for module in one.modules()]
    devices = [denoiser.device] if denoiser.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _unchanged(found):
        with denoiser.evaluating():
            evaluated, output = mode()
        given = mode()[0] if any(module.training for module in modules) else evaluated
    norms = [m for m in modules if isinstance(m, _BATCH_NORMS)]
    batch_norms = sum(m.training or m.running_mean is None for m in norms)
    dropouts = sum(isinstance(m, _DROPOUTS) and m.training and m.p > 0 for m in modules)
    few = few_values(found[0]) if len(found) == 1 else None
    values = len(output.float().unique())
    if few is None and 1 < values <= FEW < output.numel() // 4:
        few = f"its outputs take {values} values"
    return Modes(evaluated, given, batch_norms, dropouts, few)


@contextmanager
def _unchanged(networks: list[nn.Module]) -> Iterator[None]:
    """Put back what calls in training mode leave behind: running means, counters."""
    buffers = [(b, b.clone()) for one in networks for b in one.buffers() if b.device.type != "meta"]
    try:
        yield
    finally:
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Root mean square difference of rows, relative to their size, (B,)."""
    size = one.square().mean(1).sqrt().clamp_min(1e-300)
    return (one - other).square().mean(1).sqrt() / size


@dataclass(frozen=True)
class Signs:
    """How residuals are balanced: their mean, their signs, and their signs once the mean is put right.

    For the direction, constant or along what the network takes the data to be, in which the last is surest.
    """

    mean: float  # a t statistic
    balance: Number  # share of residuals above zero less that of those below
    righted: Number
    images: int

    @property
    def median(self) -> bool:
        """Whether the network predicts medians: signs balance as it is, and do not once the mean is right."""
        sure = threshold(SURE, self.images)
        skewed = abs(self.righted.value) > sure * self.righted.error
        balanced = max(self.balance.high, -self.balance.low) < 0.5 * abs(self.righted.value)
        return abs(self.mean) > sure and skewed and balanced


@torch.no_grad()
def signs(denoiser: Denoiser, batch: Batch) -> Signs:
    """Residuals of a few images at a few levels, one by one.

    A conditional mean has E[residual g] = 0 for every g of what it sees, a conditional median
    E[sign(residual) g] = 0. Where the data are skewed it cannot be both.
    """
    rows = batch.to(denoiser.device)
    process, kind = denoiser.process, denoiser.parametrization
    found = []
    with denoiser.evaluating():
        for lam, t in zip(LAM, _times(denoiser, LAM), strict=True):
            eps = normal(0, rows.index, level_key(lam), denoiser.shape, denoiser.device)
            x_t = process.noised(rows.x0, eps, t)
            output = denoiser.predict(x_t, t, rows.y)
            alpha, sigma = process.scales(t, output)
            # In eps space, whatever the network predicts: its residual is the same up to a factor.
            residual = (kind.to_eps(output, x_t, alpha, sigma) - eps).cpu().double().flatten(1)
            seen = kind.to_x0(output, x_t, alpha, sigma).cpu().double().flatten(1)
            residual = residual / residual.square().mean().sqrt().clamp_min(1e-300)
            seen = (seen - seen.mean()) / seen.std().clamp_min(1e-300)
            by_direction = []
            for g in (torch.ones_like(seen), seen.clamp(-2.0, 2.0)):
                slope = (residual * g).mean() / g.square().mean()
                right = residual - slope * g
                by_direction.append([(v * g).mean(1) for v in (residual, residual.sign(), right.sign())])
            found.append(torch.stack([torch.stack(one) for one in by_direction]))  # (2, 3, B)
    by_image = torch.stack(found).mean(0)  # (2, 3, B)
    made = []
    for mean, balance, righted in by_image:
        m, b, r = (Number.mean(v) for v in (mean, balance, righted))
        made.append(Signs(m.value / max(m.error, 1e-300), b, r, len(batch)))
    return max(made, key=lambda s: abs(s.righted.value) / max(s.righted.error, 1e-300))


def _times(denoiser: Denoiser, lams: tuple[float, ...]) -> Tensor:
    """The network's times nearest to some lam."""
    process = denoiser.process
    lowest, highest = float(process.lam(process.t_max)), float(process.lam(process.t_min))
    lam = torch.tensor(lams, dtype=torch.float64).clamp(lowest, highest)
    return process.snap(process.t_of_lam(lam))
