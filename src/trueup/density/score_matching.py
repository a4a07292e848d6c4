"""Score matching objectives per noise level and in total, before and after calibration (50 to 52)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Calibration
from trueup.calibration.correction import Correction, interpolation_weights
from trueup.denoiser import Denoiser
from trueup.density.opening import SIDES, Sides
from trueup.errors import ModelError, TrueupError
from trueup.estimate.levels import check_levels
from trueup.images import Batch
from trueup.noise import level_keys, normal
from trueup.process import NoiseProcess
from trueup.progress import Progress
from trueup.statistics import Number, group_means, told, trapezoid_weights

IMAGES = 200
MIN_SNR = 5.0  # gamma of min-SNR weighting
_FINE = 20001  # points of the integral over time
Weighting = str | Callable[[Tensor], Tensor]


def weights(weighting: Weighting, process: NoiseProcess, t: Tensor) -> Tensor:
    """What E|eps_hat - eps|^2 at each of rising times t counts in a total, (L,); equation 51.

    The total is the integral of lambda(t)/2 E|score error|^2 dt, the eps loss being linear in lam between
    levels. "g2": lambda = g^2, the likelihood's. The others are averages over time (of a discrete process,
    over its timesteps) of w/2 E|eps_hat - eps|^2: "uniform", w = 1; "snr", w = SNR; "min-snr",
    w = min(SNR, 5)/SNR. Or lambda itself, a function of t.
    """
    levels = process.lam(t)
    if weighting == "g2":  # g^2/sigma^2 dt = -2 dlam, exactly
        return trapezoid_weights(levels)
    if process.integer_times and not callable(weighting):
        fine = torch.arange(math.ceil(float(t[0])), math.floor(float(t[-1])) + 1, dtype=torch.float64)
        measure = torch.ones_like(fine)
    else:
        lam = torch.linspace(float(levels[0]), float(levels[-1]), _FINE, dtype=torch.float64)
        fine = process.t_of_lam(lam).clamp(float(t[0]), float(t[-1]))
        measure = -trapezoid_weights(lam) / process.dlam(fine)
    lam = process.lam(fine)
    hats = interpolation_weights(levels, lam)  # (fine, L)
    if callable(weighting):
        density = torch.as_tensor(weighting(fine), dtype=torch.float64) / process.sigma(fine).square()
        return 0.5 * (measure * density) @ hats
    snr = (2 * lam).exp()
    known = {"uniform": torch.ones_like(snr), "snr": snr, "min-snr": snr.clamp_max(MIN_SNR) / snr}
    if weighting not in known:
        raise TrueupError(f"weighting is g2, uniform, snr, min-snr or a function of t, not {weighting!r}")
    return 0.5 * (measure * known[weighting]) @ hats / measure.sum()


WEIGHTINGS = ("g2", "uniform", "snr", "min-snr")
# What theory missed is the drop less what it predicted.
_DIFFERENCES = {"drop": SIDES, "sm_drop": ("sm_before", "sm_after"), "missed": ("drop", "predicted")}


@dataclass
class Objectives:
    """Denoising losses |eps_hat - eps|^2 of every image at every level; objectives are functions of them.

    With the true score known, `sm_before` and `sm_after` are |eps_hat - E[eps | x_t]|^2.
    """

    process: NoiseProcess
    t: Tensor  # (L,)
    dimensions: int
    before: Tensor  # (N, L)
    after: Tensor | None = None
    predicted: Tensor | None = None  # (N, L) what theory says the drop is, see `check`
    family: str | None = None
    sm_before: Tensor | None = None
    sm_after: Tensor | None = None
    group: Tensor | None = None  # (N,) which images belong together: means and intervals are over groups
    held_out: bool = True  # whether no image made the calibration
    evaluations: int = 0  # of the network, one image each
    notes: list[str] = field(default_factory=list)

    def level(self, which: str = "before") -> list[Number]:
        """J of the paper at every level, half the score's squared error: 1/(2 sigma^2) of the eps loss."""
        scale = 0.5 / self.process.sigma(self.t).square()
        return [Number.mean(column) for column in (self.losses(which) * scale).T]

    def total(self, weighting: Weighting = "g2", which: str = "before") -> Number:
        """The total objective; `which` is before, after, drop, predicted, or sm_before and so on."""
        return Number.mean(self.losses(which) @ weights(weighting, self.process, self.t))

    def losses(self, which: str) -> Tensor:
        """What every image, or every group of them, lost at every level, (N, L); `which` as in `total`."""
        if which in _DIFFERENCES:
            first, second = _DIFFERENCES[which]
            return self.losses(first) - self.losses(second)
        values = getattr(self, which, None)
        if not isinstance(values, Tensor):
            raise TrueupError(f"there is no {which!r}: it needs a calibration, or for sm a truth")
        return group_means(values, self.group)

    def check(self) -> str | None:
        """Whether the drop is what theory says, in words; None without a calibration.

        A shift: E[s]·eta - |eta|^2/2 (the paper's equation 9), which holds for any shift: a difference means
        that something else than the shift in the calibration was applied. A spectral correction: its
        own mean square, the variance it explains, which is what it removes if what is left is uncorrelated
        with it; a cautious (shrunk) one removes more than that. With other gains than those of least squares
        what they keep of that variance, by equation 52.
        """
        if self.after is None:
            return None
        drop, predicted, missed = (self.total("g2", name) for name in ("drop", "predicted", "missed"))
        name = "equation 9" if self.family == "shift" else "explained variance"
        words = f"drop measured {drop} nats, predicted by {name} {predicted}"
        if missed.sign == 0:
            return f"{words}: they agree"
        if self.family != "shift" and missed.value > 0:
            return f"{words}: the correction is smaller than would be best by {missed}"
        return f"{words}: they DIFFER by {missed}"

    def _shown(self) -> list[str]:
        return ["before"] if self.after is None else ["before", "after", "drop", "predicted"]

    def table(self) -> str:
        """For a terminal."""
        shown, titles = self._shown(), ["|eps_hat - eps|^2", "calibrated", "drop", "predicted"]
        lines = [f"denoising score matching, {len(self.before):,} images; 95% intervals"]
        lines.append(f"{'t':>9} {'lam':>7}" + _cells(titles[: len(shown)]))
        columns = [[str(Number.mean(v)) for v in self.losses(which).T] for which in shown]
        for t, lam, *cells in zip(self.t, self.process.lam(self.t), *columns, strict=True):
            lines.append(f"{float(t):9.4g} {float(lam):7.2f}" + _cells(cells))
        for weighting in WEIGHTINGS:
            name = "g2 (nats)" if weighting == "g2" else weighting
            totals = _cells([str(self.total(weighting, which)) for which in shown])
            lines.append(f"{'total, ' + name:>17}{totals}")
        if self.after is not None:
            change = told(self.total("g2", "drop").scaled(-1))
            lines += [f"change of the total in nats: {change}", str(self.check())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""
        shown = self._shown() + [n for n in ("sm_before", "sm_after") if getattr(self, n) is not None]
        lam = self.process.lam(self.t)
        levels: list[dict[str, Any]] = []
        for i, t in enumerate(self.t):
            numbers = {n: Number.mean(self.losses(n)[:, i]).as_json() for n in shown}
            levels.append({"t": float(t), "lam": float(lam[i]), **numbers})
        totals = {w: {n: self.total(w, n).as_json() for n in shown} for w in WEIGHTINGS}
        plain = {n: getattr(self, n) for n in ("held_out", "dimensions", "evaluations", "notes")}
        counted = {"images": len(self.before), "check": self.check()}
        return {**plain, **counted, "levels": levels, "totals": totals}


def _cells(cells: Sequence[str]) -> str:
    return "".join(f" {cell:>21}" for cell in cells)


def objectives(
    model: Any,
    data: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    truth: Denoiser | None = None,
    levels: Sequence[float] | Tensor | None = None,
    gains: str = "least-squares",
    seed: int = 0,
    trust: bool = False,
    progress: bool | None = None,
) -> Objectives:
    """Denoising score matching losses of a model, and with a calibration those of the calibrated one.

    Each is that of the network itself, run without the calibration and with it attached. data: 200 images,
    unless `Images` says otherwise; those that the calibration was made from are passed over. truth: the ideal
    denoiser, where it is known (see `trueup.analytic`): then also the score matching loss, which is the
    denoising one less a constant. levels: times; the default covers the whole process. gains: the form of the
    correction, as in `attach`. A network that seems to be used wrongly is refused, unless `trust`.
    """
    sides = Sides(model, calibration, gains)
    denoiser, process = sides.denoiser, sides.denoiser.process
    t = check_levels(process, levels)
    if truth is not None and not process.agrees_with(truth.process):
        raise ModelError("the truth is a denoiser of another noise process than the model's")
    samples, made = sides.open(data, IMAGES, trust=trust), sides.calibration
    expected, each = samples.expected(), len(t) * len(sides.names)
    # What the calibration says of each level, of the lowest loss and in this form, not what runs in `after`.
    says = {} if made is None else _says(made, gains, process.lam(t), denoiser.device)
    parts: list[dict[str, Tensor]] = []
    bar = Progress(None if expected is None else expected * each, "denoising loss", show=progress)

    def measured(batch: Batch) -> dict[str, Tensor]:
        on = batch.to(denoiser.device)
        rows = []
        for i, level in enumerate(t):
            said = {label: (best[i], form[i]) for label, (best, form) in says.items()}
            rows.append(_losses(sides, truth, on, level, said, seed))
            bar.update(len(batch) * len(sides.names) * distributed.size())
        return {name: torch.stack([row[name] for row in rows], 1).cpu() for name in rows[0]}

    with sides.attached, denoiser.evaluating(), torch.inference_mode(), bar:
        for batch in sides.batches(denoiser.batch_size, own=True):
            parts.append(measured(batch))
            if batch.group is not None and samples.images.groups is not None:
                parts[-1]["group"] = batch.group
    parts = distributed.in_turn(parts)
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if not torch.isfinite(found["before"]).all():
        where = float(t[~torch.isfinite(found["before"]).all(0)][0])
        raise ModelError(f"the network returned values that are not finite at t = {where:g}")
    return Objectives(
        process=process,
        t=t,
        dimensions=math.prod(denoiser.shape),
        family=None if made is None else "shift" if _constant(made) else "spectral",
        held_out=made is None or made.generated is not None or bool(sides.without),
        evaluations=len(found["before"]) * each,
        notes=sides.notes,
        **found,
    )


def _says(
    made: Calibration, gains: str, lam: Tensor, device: torch.device
) -> dict[int | None, tuple[list[Correction], list[Correction]]]:
    """The corrections of labels that have their own, and under None that of the others, level by level."""
    corrections: dict[int | None, Correction] = {None: made.correction}
    corrections.update({of.label: of.correction for of in made.classes if of.correction is not None})
    return {
        label: (one.at(lam).each(device), one.with_gains(gains).at(lam).each(device))
        for label, one in corrections.items()
    }


def _losses(
    sides: Sides,
    truth: Denoiser | None,
    batch: Batch,
    t: Tensor,
    said: dict[int | None, tuple[Correction, Correction]],
    seed: int,
) -> dict[str, Tensor]:
    """Squared errors of each row of a batch at one level, {name: (B,)}."""
    denoiser, process = sides.denoiser, sides.denoiser.process
    # Another seed than a calibration of the same seed used.
    eps = normal(seed + 1, batch.index, int(level_keys(t)), denoiser.shape, batch.x0.device)
    x_t = process.noised(batch.x0, eps, t)
    outputs: dict[str, Tensor] = {}
    for name in sides.names:
        with sides.on(name):
            outputs[name] = denoiser.eps(x_t, t, batch.y).double()
    rows = {name: _squared(eps_hat - eps) for name, eps_hat in outputs.items()}
    if truth is not None:
        ideal = truth.eps(x_t, t, batch.y).double()
        rows |= {f"sm_{name}": _squared(eps_hat - ideal) for name, eps_hat in outputs.items()}
    if said:
        before, u = outputs["before"], x_t / process.scales(t, x_t)[1]
        best, c = (form.delta(before, u) for form in said[None])  # equation 12, as it is written
        for label in said.keys() - {None}:
            own = batch.y == label  # or there were no classes
            for all_rows, form in zip((best, c), said[label], strict=True):
                all_rows[own] = form.delta(before[own], u[own])
        shift = sides.calibration is not None and _constant(sides.calibration)
        rows["predicted"] = 2 * ((before if shift else best) * c).flatten(1).sum(1) - _squared(c)
    return rows


def _constant(calibration: Calibration) -> bool:
    """Whether it shifts, and does nothing else."""
    made = [calibration.correction, *(of.correction for of in calibration.classes)]
    return not any(one is not None and (one.a.any() or one.d.any()) for one in made)


def _squared(x: Tensor) -> Tensor:
    return x.double().square().flatten(1).sum(1)
