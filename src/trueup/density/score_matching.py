"""Score matching objectives per noise level and in total, before and after calibration (50 to 52)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration
from trueup.correction import interpolation_weights
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser
from trueup.density.opening import first_image, open_both
from trueup.density.sides import Sides
from trueup.errors import DataError, ModelError, TrueupError
from trueup.estimate.collect import check_levels
from trueup.estimate.evaluate import default_batch_size
from trueup.noise import level_keys, normal
from trueup.statistics import Number, trapezoid_weights
from trueup.process import NoiseProcess

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


@dataclass
class Objectives:
    """Denoising losses |eps_hat - eps|^2 of every image at every level; objectives are functions of them.

    With the true score known, `sm_before` and `sm_after` are |eps_hat - E[eps | x_t]|^2.
    """

    process: NoiseProcess
    t: Tensor  # (L,)
    dimensions: int
    before: Tensor  # (N, L)
    after: Tensor | None
    explained: Tensor | None  # (N, L) what theory says the drop is, see `predicted`
    family: str | None
    sm_before: Tensor | None = None
    sm_after: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def level(self, which: str = "before") -> list[Number]:
        """J of the paper at every level, half the score's squared error: 1/(2 sigma^2) of the eps loss."""
        scale = 0.5 / self.process.sigma(self.t).square()
        return [Number.mean(column) for column in (self._losses(which) * scale).T]

    def total(self, weighting: Weighting = "g2", which: str = "before") -> Number:
        """The total objective; `which` is before, after, drop, predicted, or sm_before and so on."""
        return Number.mean(self._losses(which) @ weights(weighting, self.process, self.t))

    def _losses(self, which: str) -> Tensor:
        if which == "drop":
            return self._losses("before") - self._losses("after")
        if which == "sm_drop":
            return self._losses("sm_before") - self._losses("sm_after")
        if which == "missed":  # by theory
            return self._losses("drop") - self._losses("predicted")
        values = self.explained if which == "predicted" else getattr(self, which, None)
        if not isinstance(values, Tensor):
            raise TrueupError(f"there is no {which!r}: it needs a calibration, or for sm a truth")
        return values

    def check(self) -> str | None:
        """Whether the drop is what theory says, in words; None without a calibration.

        A shift: E[s]·eta - |eta|^2/2 (the paper's equation 9), which holds for any shift: a difference means
        that something else than the shift in the calibration was applied. A spectral correction: its
        own mean square, the variance it explains, which is what it removes if what is left is uncorrelated
        with it; a cautious (shrunk) one removes more than that.
        """
        if self.after is None:
            return None
        drop, predicted, missed = (self.total("g2", name) for name in ("drop", "predicted", "missed"))
        apart = missed.low > 0 or missed.high < 0
        name = "equation 9" if self.family == "shift" else "explained variance"
        words = f"drop measured {drop} nats, predicted by {name} {predicted}"
        if not apart:
            return f"{words}: they agree"
        if self.family != "shift" and missed.value > 0:
            return f"{words}: the correction is smaller than would be best by {missed}"
        return f"{words}: they DIFFER by {missed}"

    def table(self) -> str:
        """For a terminal."""
        lines = [f"denoising score matching, {len(self.before):,} images; 95% intervals"]
        head = f"{'t':>9} {'lam':>7} {'|eps_hat - eps|^2':>22}"
        lines.append(
            head + (f" {'calibrated':>22} {'drop':>20} {'predicted':>20}" if self.after is not None else "")
        )
        shown = ["before"] if self.after is None else ["before", "after", "drop", "predicted"]
        columns = [[str(Number.mean(v)) for v in self._losses(which).T] for which in shown]
        lam = self.process.lam(self.t)
        for row in range(len(self.t)):
            cells = [f"{c[row]:>{22 if i < 2 else 20}}" for i, c in enumerate(columns)]
            lines.append(f"{float(self.t[row]):9.4g} {float(lam[row]):7.2f} {' '.join(cells)}")
        for weighting in WEIGHTINGS:
            name = "g2 (nats)" if weighting == "g2" else weighting
            cells = [str(self.total(weighting, which)) for which in shown]
            lines.append(
                f"{'total, ' + name:>17} "
                + " ".join(f"{c:>{22 if i < 2 else 20}}" for i, c in enumerate(cells))
            )
        told = self.check()
        return "\n".join([*lines, *([told] if told else []), *(f"note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""
        shown = ["before"] if self.after is None else ["before", "after", "drop", "predicted"]
        shown += [name for name in ("sm_before", "sm_after") if getattr(self, name) is not None]

        lam = self.process.lam(self.t)
        levels = [
            {
                "t": float(t),
                "lam": float(lam[i]),
                **{n: Number.mean(self._losses(n)[:, i]).as_json() for n in shown},
            }
            for i, t in enumerate(self.t)
        ]
        totals = {w: {n: self.total(w, n).as_json() for n in shown} for w in WEIGHTINGS}
        return {
            "images": len(self.before),
            "dimensions": self.dimensions,
            "levels": levels,
            "totals": totals,
            "check": self.check(),
            "notes": self.notes,
        }


def objectives(
    model: Any,
    data: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    truth: Denoiser | None = None,
    images: int = 200,
    levels: Sequence[float] | Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    skip_bad: bool = False,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Objectives:
    """Denoising score matching losses of a model, and with a calibration those of the calibrated one.

    truth: the ideal denoiser, where it is known (see `trueup.analytic`): then also the score matching loss,
    which is the denoising one less a constant. levels: times; the default covers the whole process.
    """
    from tqdm import tqdm

    denoiser, calibration = open_both(model, calibration, scheduler, device)
    process = denoiser.process
    t = check_levels(process, levels)
    if truth is not None and not process.agrees_with(truth.process):
        raise ModelError("the truth is a denoiser of another noise process than the model's")
    samples = Samples(
        data, denoiser.shape, denoiser.data_range, Transform(resize, crop, flip, data_range), skip_bad
    )
    notes: list[str] = []
    first = first_image(calibration, samples, notes)
    sides = Sides(denoiser, calibration, batch_size)
    ideal = None if truth is None else Sides(truth, None, batch_size)
    size = batch_size or default_batch_size(denoiser)
    names = ["before"] + (["after", "explained"] if calibration is not None else [])
    names += [f"sm_{n}" for n in names[:2]] if truth is not None else []
    shift = calibration is not None and not (calibration.correction.a.any() or calibration.correction.d.any())
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    shown = sys.stderr.isatty() if progress is None else progress
    total = min(images, max(0, len(samples) - first)) if samples.indexed else images
    bar = tqdm(total=total * len(t), desc="objectives", unit="eval", disable=not shown, file=sys.stderr)
    with bar, denoiser.evaluating(), torch.inference_mode():
        for batch in samples.batches(size, first, limit=images):
            if denoiser.conditional and batch.y is None:
                raise DataError("the network is conditional: the data must come with labels")
            x0 = batch.x0.to(denoiser.device)
            y = batch.y.to(denoiser.device) if batch.y is not None else None
            rows: dict[str, list[Tensor]] = {name: [] for name in names}
            for time, key in zip(t, level_keys(t).tolist(), strict=True):
                # Another seed than a calibration of the same seed used.
                eps = normal(seed + 1, batch.index, key, denoiser.shape, x0.device)
                times = time.expand(len(x0))
                before, after = (v.double() for v in sides(x0, eps, times, y))
                targets = {"": eps.double()}
                if ideal is not None:
                    targets["sm_"] = ideal(x0, eps, times, y)[0].double()
                for prefix, target in targets.items():
                    for name, value in (("before", before), ("after", after)):
                        if prefix + name in rows:
                            rows[prefix + name].append(_squared(value - target))
                if calibration is not None:  # by the definition, not by what `after` was corrected with
                    c = before - _by_definition(calibration, process, before, x0, eps, time)
                    inner = 2 * (before * c).flatten(1).sum(1) - _squared(c) if shift else _squared(c)
                    rows["explained"].append(inner)
                bar.update(len(x0))
            for name, columns in rows.items():
                parts[name].append(torch.stack(columns, 1).cpu())
    if not parts["before"]:
        raise DataError(f"{samples.name} holds no samples")
    found = {name: torch.cat(values) for name, values in parts.items()}
    if not torch.isfinite(found["before"]).all():
        where = float(t[~torch.isfinite(found["before"]).all(0)][0])
        raise ModelError(f"the network returned values that are not finite at t = {where:g}")
    family = None if calibration is None else "shift" if shift else "spectral"
    return Objectives(
        process=process,
        t=t,
        dimensions=math.prod(denoiser.shape),
        before=found["before"],
        after=found.get("after"),
        explained=found.get("explained"),
        family=family,
        sm_before=found.get("sm_before"),
        sm_after=found.get("sm_after"),
        notes=notes,
    )


def _by_definition(
    calibration: Calibration, process: NoiseProcess, eps_hat: Tensor, x0: Tensor, eps: Tensor, t: Tensor
) -> Tensor:
    """Equation 12 on the CPU, as it is written."""
    u = (float(process.alpha(t) / process.sigma(t)) * x0 + eps).double().cpu()
    corrected = calibration.correction.apply(eps_hat.cpu(), u, process.lam(t).expand(len(u)))
    return corrected.to(eps_hat)


def _squared(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)
