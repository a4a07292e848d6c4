"""Dormand and Prince's Runge-Kutta 5(4) for a batch of systems, each with steps of its own.

Kept libraries step a batch as one system: what an image gets then depends on its neighbours, and the whole
batch takes the steps of its worst member. Here every row has its own step, error and end, as in torchode
(which is no longer kept); a row that cannot be integrated is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, table II.5.2.
_NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_FOURTH = (5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40)
_FIFTH = (*_STAGES[-1], 0.0)
_ERROR = tuple(a - b for a, b in zip(_FIFTH, _FOURTH, strict=True))
_SAFETY, _SHRINK, _GROW = 0.9, 0.2, 5.0
_FIRST = 0.01  # of the interval
_SMALLEST = 1e-5  # of the interval: a step that would have to be smaller is no step
_USEFUL = 0.004  # of the interval: 250 steps to the end
_LOOK = 200  # steps after which the pace must be one that arrives
_MOST = 4000  # steps of a row, rejected ones included; networks take 10 to 50

# (x (B, d), time (B,), rows (B,)) -> (dx, dextra)
Field = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Advance = Callable[[Tensor], None]  # told how far along each row is, 0 to 1


class Failure(Exception):
    """(row, time, best): what could not be integrated, how far it got, and the error of steps worth taking.

    `best` is nan where values are not finite.
    """


def solve(
    field: Field, x: Tensor, start: float, end: float, tolerance: float, advance: Advance | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate (x, extra) from `start` to `end`, extra from 0, to a relative and absolute tolerance.

    `field(x, time, rows)` gets the rows that are still going. The error of a step is that of x in root mean
    square, or that of extra if larger; `advance` is told how far along rows are, 0 to 1. Returns x (B, d) and
    extra (B,) at the end, and evaluations (B,) of the field, rejected steps included.

    >>> exact = lambda x, time, rows: (-x, x[:, 0])
    >>> x, extra, _ = solve(exact, torch.ones(1, 1, dtype=torch.float64), 0.0, 1.0, 1e-9)
    >>> bool((x - math.exp(-1)).abs() < 1e-9), bool((extra - (1 - math.exp(-1))).abs() < 1e-9)
    (True, True)
    """
    count, span = len(x), end - start
    z = torch.cat([x, x.new_zeros(count, 1)], 1)  # extra is one more column
    done = x.new_zeros(count)  # share of the interval
    h = torch.full_like(done, _FIRST)
    rejected = torch.zeros_like(done)  # steps worth taking that were not, and the log of their errors, summed
    missed = torch.zeros_like(done)
    rows = torch.arange(count, device=x.device)
    evaluations = torch.zeros_like(rows)

    def slopes(z: Tensor, share: Tensor, rows: Tensor) -> Tensor:
        dx, de = field(z[:, :-1], start + span * share, rows)
        evaluations[rows] += 1
        return span * torch.cat([dx.to(z), de.to(z)[:, None]], 1)

    first = slopes(z, done, rows)  # of the coming step of every row in `rows`
    for attempt in range(1, _MOST + 1):
        step = torch.minimum(h[rows], 1 - done[rows])
        ks = [first]
        for node, weights in zip(_NODES[1:], _STAGES[1:], strict=True):
            at = z[rows] + step[:, None] * _combine(weights, ks)
            ks.append(slopes(at, done[rows] + node * step, rows))
        # The last stage is the step itself.
        errors = step[:, None] * _combine(_ERROR, ks) / (1 + torch.maximum(z[rows].abs(), at.abs()))
        error = torch.maximum(errors[:, :-1].square().mean(1).sqrt(), errors[:, -1].abs())
        if not torch.isfinite(error).all():
            bad = int((~torch.isfinite(error)).nonzero()[0])
            raise Failure(int(rows[bad]), start + span * float(done[rows[bad]]), math.nan)
        ratio = error / tolerance
        accepted = ratio <= 1
        factor = (_SAFETY * ratio.clamp_min(1e-10) ** -0.2).clamp(_SHRINK, _GROW)
        wanted = (step >= _USEFUL) & ~accepted
        rejected[rows] += wanted.to(done)
        missed[rows] += torch.where(wanted, error.log(), torch.zeros_like(error))
        taken = rows[accepted]
        z[taken] = at[accepted]
        done[taken] = torch.where(step[accepted] >= 1 - done[taken], 1.0, done[taken] + step[accepted])
        # A last step cut short by the end says nothing about the next; there is none.
        h[rows] = torch.where(accepted, step * factor, step * factor.clamp_max(1.0))
        if advance is not None:
            advance(done)
        stuck = (h[rows] < _SMALLEST) & (done[rows] < 1)
        stuck |= (attempt >= _LOOK) & (done[rows] * _MOST < attempt)  # it will not get there
        if stuck.any():
            row = int(rows[stuck][0])
            typical = math.exp(float(missed[row] / rejected[row].clamp_min(1)))
            raise Failure(row, start + span * float(done[row]), typical)
        going = done[rows] < 1
        first, rows = torch.where(accepted[:, None], ks[-1], first)[going], rows[going]
        if not len(rows):
            return z[:, :-1], z[:, -1], evaluations
    raise AssertionError("a row that is never stuck arrives")


def _combine(weights: tuple[float, ...], values: list[Tensor]) -> Tensor:
    """The weighted sum; weights of zero cost nothing."""
    total = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        if weight:
            total.add_(value, alpha=weight)
    return total
