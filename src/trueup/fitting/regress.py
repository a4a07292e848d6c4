"""Each step of a solver fitted to the fine trajectories, in closed form, and brought to where it should be."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.solver import FittedSolver
from trueup.fitting.teacher import Teacher
from trueup.sampling.network import Network
from trueup.sampling.rules import MEMORY
from trueup.statistics import mean_and_error, threshold

FOLDS = 8
RIDGE = 1e-4
SIGMAS = 1.5
_TINY = 1e-300


def fold_members(n: int, device: torch.device) -> Tensor:
    fold = torch.randperm(n, generator=torch.Generator().manual_seed(n)) % FOLDS
    return torch.nn.functional.one_hot(fold, FOLDS).double().to(device)  # (n, F)


def fit_step(bands: Bands, parts: Tensor, base: Tensor, target: Tensor, ridge: float = RIDGE, confirm: bool = True):
    """Tables (J, C, bands) and offset (C, K) that take the base's prediction to the target.

    parts (J, n, C, K): DCTs of x and of what is remembered; base (n, C, K) the rule's own prediction.
    """
    count, n = parts.shape[:2]
    member = fold_members(n, parts.device)
    rows = member.sum(0)
    residual = target - base
    means, off = parts.mean(1, keepdim=True), residual.mean(0)
    r, e = parts - means, residual - off  # centred
    by_fold = lambda v: torch.einsum("nf,ncb->fcb", member, bands.sum(v))
    gram = torch.stack([torch.stack([by_fold(r[i] * r[j]) for j in range(count)]) for i in range(count)])
    cross = torch.stack([by_fold(r[i] * e) for i in range(count)])  # (J, F, C, bands)
    power = by_fold(e * e)

    def solve(g: Tensor, c: Tensor) -> Tensor:  # (J, J, C, b), (J, C, b) -> (J, C, b)
        scale = g.diagonal(dim1=0, dim2=1).movedim(-1, 0).clamp_min(_TINY).sqrt()  # (J, C, b)
        g = g / (scale[:, None] * scale[None])
        g = g.movedim((0, 1), (-2, -1)) + ridge * torch.eye(count, dtype=g.dtype, device=g.device)
        return torch.linalg.solve(g, (c / scale).movedim(0, -1)[..., None])[..., 0].movedim(-1, 0) / scale

    tables = solve(gram.sum(2), cross.sum(1))
    if confirm:
        gains = []
        for f in range(FOLDS):
            w = solve(gram.sum(2) - gram[:, :, f], cross.sum(1) - cross[:, f])
            gains.append(2 * (w * cross[:, f]).sum(0) - torch.einsum("icb,ijcb,jcb->cb", w, gram[:, :, f], w))
        score = torch.stack(gains).cpu()  # (F, C, bands)
        mean, error = mean_and_error(score, rows.cpu())
        surprise = threshold(SIGMAS, FOLDS) * 2**0.5 * error / mean.clamp_min(_TINY)
        scale = torch.where(mean > 0, (1 - surprise.square()).clamp_min(0.0), torch.zeros_like(mean))
        tables = tables * scale.to(tables)
    # The mean of what is left, kept by its evidence (James and Stein, by band).
    left = residual - (bands.spread(tables)[:, None] * parts).sum(0)
    m = left.mean(0)  # (C, K)
    sizes = bands.sizes.to(m)
    noise = bands.sum(left.var(0)) / sizes / n  # (C, bands)
    surprise = bands.sum(m.square()) / sizes / noise.clamp_min(_TINY)
    excess = (surprise - 1 - SIGMAS * (2 / sizes).sqrt()).clamp_min(0.0)
    return tables, bands.spread(excess / (1 + excess)) * m


def fit(
    solver: FittedSolver, network: Network, teacher: Teacher, *, restore: str = "none", last: bool = True,
    data=None, ridge: float = RIDGE, confirm: bool = True, fitted: bool = True,
) -> FittedSolver:
    """Fit all steps; restore: "none", "keep" or "data"; last: the last step as well."""
    bands, tables, offset = solver.bands, solver.tables.clone(), solver.offset.clone()
    x = teacher.noise * network.process.prior_std
    history: list[Tensor] = []
    lam = (solver.alpha / solver.sigma.clamp_min(1e-300)).log()
    steps = len(solver.t)

    def dct(v: Tensor) -> Tensor:
        return bands.dct(v.double()).flatten(2)

    z: list[Tensor] = []
    with torch.inference_mode(), network.denoiser.evaluating():
        for i, t in enumerate(solver.t.tolist()):
            output = network(x, t)
            history.insert(0, solver.remembered(i, output, x, network.parametrization))
            z.insert(0, dct(history[0]))
            del history[MEMORY:], z[MEMORY:]
            final = i == steps - 1
            if not final or last:
                parts = torch.stack([dct(x), *z])  # (J, n, C, K)
                w = solver.weights[i].tolist()
                base = sum(weight * part for weight, part in zip(w, parts, strict=False))
                target = dct(teacher.samples if final else teacher.at(float(lam[i + 1])))
                if fitted:
                    table, off = fit_step(bands, parts, base, target, ridge, confirm)
                else:
                    table, off = torch.zeros_like(parts[:, 0, :, : bands.count]), torch.zeros_like(parts[0, 0])
                made = base + (bands.spread(table)[:, None] * parts).sum(0) + off
                if restore != "none":
                    m = made.mean(0)
                    sizes = bands.sizes.to(m)
                    var = bands.sum((made - m).square().mean(0)) / sizes
                    if restore == "keep":
                        mu = target.mean(0)
                        wanted = bands.sum((target - mu).square().mean(0)) / sizes
                        mu = m
                    else:
                        a, s = float(solver.alpha[i + 1]), float(solver.sigma[i + 1])
                        mu, wanted = (v.to(m) for v in data.at(a, s))
                    g = (wanted / var.clamp_min(1e-12)).sqrt()
                    if restore == "data-careful":
                        noise = s**2 / wanted
                        lg = g.log()
                        g = (torch.where(lg > 0, noise * lg, lg).exp() if not final else g.clamp_max(1.5))
                    wide = torch.tensor(w[: len(parts)], dtype=torch.float64, device=m.device)[:, None, None]
                    table = g * (table + wide) - wide
                    off = bands.spread(g) * (off - m) + mu
                tables[i, : len(table)] = table.cpu()
                offset[i] = off.cpu()
                solver = replace(solver, tables=tables, offset=offset)
            x = solver.step(i, x, history)
    return solver
