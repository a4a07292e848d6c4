"""Rules for the steps of a sampler: each state a combination of the last one and of what the network said.

With y = x/alpha and s = sigma/alpha the probability flow is dy/ds = eps(y, s). A rule that puts a polynomial
through what the network said at the last few levels gives the next state as

    x_(i+1) = w_x x_i + w_0 h_i + w_1 h_(i-1) + w_2 h_(i-2)

with h = eps or h = x0 = y - s eps: exponential Adams-Bashforth (in eps it is DEIS), DPM-Solver++, which is
near it and shorter of memory, iPNDM, UniPC, which mends a state by what the network said there before it goes
on (Adams-Moulton), and the singlestep DPM-Solver, whose inner stages are states like any other. The last step
goes to s = 0 by what the network then takes the data to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trueup.fitted import MEMORY
from trueup.process import NoiseProcess
from trueup.sampling.steps import Levels, tableau


@dataclass(frozen=True)
class Rule:
    """How states follow from each other."""

    name: str
    history: str  # "eps" or "x0": what is remembered
    order: int
    singlestep: bool = False
    even: bool = False  # takes the levels to be evenly spaced, as iPNDM does
    plus: bool = False  # DPM-Solver++'s coefficients, not those of the exact integral
    corrected: bool = False  # mends each state by one order before it goes on, as UniPC does

    def weights(self, levels: Levels) -> Tensor:
        """Of every step from level to level and of the last one, to the data: (N, 1 + MEMORY)."""
        steps = len(levels.t)
        weights = torch.zeros(steps, 1 + MEMORY, dtype=torch.float64)
        alpha, sigma = levels.log_alpha.exp(), levels.sigma
        if self.singlestep:
            weights[:-1] = self._singlestep(levels)
        else:
            scale = alpha if self.history == "eps" else sigma  # from y, or z = x/sigma, to x
            lam = levels.lam.tolist()
            for i in range(steps - 1):
                order = min(self.order, i + 1)
                weights[i, 0] = scale[i + 1] / scale[i]
                ahead = self._plus if self.plus else self._adams
                weights[i, 1 : order + 1] = ahead(lam[i + 1 - order : i + 1], lam[i], lam[i + 1])
                if self.corrected and i:
                    known = min(self.order, i)
                    weights[i, 1 : known + 2] += self._mended(lam[i - known : i + 1])
                    weights[i, 2 : known + 2] -= self._plus(lam[i - known : i], lam[i - 1], lam[i])
                weights[i, 1:] *= scale[i + 1]
        last = (1 / alpha[-1], -sigma[-1] / alpha[-1]) if self.history == "eps" else (0.0, 1.0)
        weights[-1, 0], weights[-1, 1] = last
        return weights

    def _adams(self, nodes: Sequence[float], now: float, after: float) -> Tensor:
        """What y (eps) or z (x0) takes of the values at some lam, the newest first, on the way to another."""
        points, quadrature = np.polynomial.legendre.leggauss(16)
        at = now + (after - now) * (points + 1) / 2
        sign = -1.0 if self.history == "eps" else 1.0  # dy = eps ds = -e^-lam eps dlam;  dz = e^lam x0 dlam
        measure = quadrature / 2 * (after - now) * sign * np.exp(sign * at)
        where, knots = at, list(nodes)
        if self.even:
            where, knots = (at - now) / (after - now), list(range(1 - len(nodes), 1))
            measure = quadrature / 2 * (math.exp(-after) - math.exp(-now))
        row = []
        for j in reversed(range(len(knots))):
            others = [k for m, k in enumerate(knots) if m != j]
            basis = np.prod([(where - k) / (knots[j] - k) for k in others], axis=0) if others else 1.0
            row.append(float((measure * basis).sum()))
        return torch.tensor(row, dtype=torch.float64)

    def _plus(self, nodes: Sequence[float], now: float, after: float) -> Tensor:
        """The same of DPM-Solver++'s multistep forms, 2M ("midpoint") and 3M."""
        h, whole = after - now, math.exp(after) - math.exp(now)  # of dz = e^lam x0 dlam
        if len(nodes) == 1:
            return torch.tensor([whole], dtype=torch.float64)
        before = [(a - b) / h for b, a in pairwise(nodes)][::-1]  # the newest first
        values = torch.eye(len(nodes), dtype=torch.float64)
        slopes = [(values[j] - values[j + 1]) / r for j, r in enumerate(before)]
        if len(nodes) == 2:
            return whole * (values[0] + slopes[0] / 2)
        bend = (slopes[0] - slopes[1]) / sum(before)
        first = math.exp(after) - whole / h
        second = math.exp(after) / 2 - first / h
        return whole * values[0] + first * (slopes[0] + before[0] * bend) + second * bend

    def _mended(self, nodes: Sequence[float]) -> Tensor:
        """The last step again, with the value at its end among them: UniC, with bh2."""
        if len(nodes) == 2:
            whole = math.exp(nodes[1]) - math.exp(nodes[0])
            return torch.tensor([whole / 2, whole / 2], dtype=torch.float64)
        return self._adams(nodes, nodes[-2], nodes[-1])

    def _singlestep(self, levels: Levels) -> Tensor:
        """DPM-Solver's steps over levels, a group of `order` after the other."""
        points, count = levels.points(), len(levels.t) - 1
        rows = torch.zeros(count, 1 + MEMORY, dtype=torch.float64)
        done = 0
        while done < count:
            order = min(self.order, count - done)
            if self.order == 3 and count - done == 4:
                order = 2
            group = points[done : done + order + 1]
            # Every value in a group as a combination of (x_s, eps_s, eps_m1, eps_m2), then of the one before.
            made = torch.zeros(order + 1, 4, dtype=torch.float64)
            made[0, 0] = 1.0
            for stage, w in enumerate(tableau(group)):
                on_x, on_first, on_latest = (float(v) for v in w)
                made[stage + 1, 0] = on_x
                made[stage + 1, 1] += on_first
                made[stage + 1, 1 + stage] += on_latest
            for stage in range(order):
                ratio = made[stage + 1, 0] / made[stage, 0]
                rest = made[stage + 1] - ratio * made[stage]
                rows[done + stage, 0] = ratio
                for back in range(stage + 1):
                    rows[done + stage, 1 + back] = rest[1 + stage - back]
            done += order
        return rows


RULES = (
    Rule("ddim", "eps", 1),
    Rule("eps-2", "eps", 2),
    Rule("eps-3", "eps", 3),
    Rule("x0-2", "x0", 2),
    Rule("x0-3", "x0", 3),
    Rule("dpm++-2", "x0", 2, plus=True),
    Rule("dpm++-3", "x0", 3, plus=True),
    Rule("unipc-2", "x0", 2, plus=True, corrected=True),
    Rule("ipndm-2", "eps", 2, even=True),
    Rule("ipndm-3", "eps", 3, even=True),
    Rule("singlestep-2", "eps", 2, singlestep=True),
    Rule("singlestep-3", "eps", 3, singlestep=True),
)


@dataclass(frozen=True)
class Grid:
    """Where a sampler asks the network: spacing, and the noise left at the last evaluation.

    spacing: "time" or "quadratic" (even in time or in its square root), or a number rho for levels even in
    (sigma/alpha)^(1/rho), Karras's; infinity makes them even in lam. rise: how far the last lam is below the
    largest.
    """

    spacing: str | float = math.inf
    rise: float = 0.0

    @property
    def name(self) -> str:
        """In a word or two."""
        if isinstance(self.spacing, str):
            named = {"time": "even in time", "quadratic": "quadratic in time"}[self.spacing]
        else:
            named = "even in log-SNR" if math.isinf(self.spacing) else f"Karras {self.spacing:g}"
        left = math.exp(self.rise)
        return f"{named}, {left:.3g} times the least noise at the end" if left > 1.05 else named

    def times(self, process: NoiseProcess, steps: int) -> Tensor:
        """The times of `steps` evaluations, (N,)."""
        first = torch.tensor(process.t_max, dtype=torch.float64)
        top, low = float(process.lam(process.t_min)), float(process.lam(first))
        lam = max(top - self.rise, low + 0.1)
        last = process.t_of_lam(torch.tensor(lam, dtype=torch.float64))
        share = torch.linspace(0, 1, steps, dtype=torch.float64) if steps > 1 else torch.zeros(1).double()
        if isinstance(self.spacing, str):
            power = 2.0 if self.spacing == "quadratic" else 1.0
            start, end = (process.to_unit(t).clamp_min(0.0) ** (1 / power) for t in (first, last))
            times = process.from_unit((start + share * (end - start)) ** power)
        elif math.isinf(self.spacing):
            times = process.t_of_lam(low + share * (lam - low))
        else:
            near, far = (math.exp(-v / self.spacing) for v in (lam, low))
            times = process.t_of_lam(-self.spacing * (far + share * (near - far)).log())
        times[0] = first
        if steps > 1:
            times[-1] = last
        return times
