"""A fitted correction with its evidence and its origin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import Tensor

from trueup.calibration.artifact import KIND, identity_of, pack_calibration, unpack_calibration
from trueup.calibration.correction import Correction, check_gains
from trueup.calibration.evidence import Evidence
from trueup.calibration.trajectory import Trajectory
from trueup.denoiser.network import same_weights
from trueup.files import load_as, save_tensors, unpacked
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess, from_settings
from trueup.statistics import Number, trapezoid_weights

FEWEST_IMAGES = 20  # fewer cannot say that there is nothing to correct


@dataclass(eq=False, repr=False)
class Calibration:
    """What `calibrate` returns: put it on a model with `trueup.attach`, keep it with `save`."""

    correction: Correction
    t: Tensor  # (L,) the levels as times of the network's process
    shape: tuple[int, ...]
    evidence: Evidence
    family: str
    estimator: str
    data_mean: Tensor  # (C, K) DCT of the data's mean
    data_variance: Tensor  # (C, bands)
    data_variance_se: Tensor  # (C, bands)
    data_images: int
    data_digests: Tensor  # (n,) int64, of the images it was made from, where there are not too many to keep
    provenance: dict[str, Any] = field(default_factory=dict)
    trajectories: tuple[Trajectory, ...] = ()  # what keeps samplers on the marginals, see `calibrate_sampler`
    gains: str = "sqrt"  # of the correction that samples are drawn with, see `Correction.with_gains`

    def __post_init__(self) -> None:
        check_gains(self.gains)

    def __repr__(self) -> str:
        return f"<{self._headline()}: {self.verdict()}>"

    def _headline(self) -> str:
        model = self.provenance.get("model", "a network")
        noun = "generated image" if self.generated else "image"
        images, levels = _count(self.evidence.images, noun), _count(len(self.t), "noise level")
        return f"{self.family} calibration ({self.estimator}) of {model}, {images}, {levels}"

    @property
    def process(self) -> NoiseProcess:
        """The noise the network was trained on."""
        return from_settings(self.provenance["process"])

    @property
    def parametrization(self) -> Parametrization:
        """What the network predicts."""
        return Parametrization(**self.provenance["parametrization"])

    @property
    def identity(self) -> str:
        """A short hash of what it does: the same for a calibration and what was loaded from its file."""
        return identity_of(self.correction, self.gains, self.provenance)

    @property
    def for_samples(self) -> Correction:
        """The correction that samples are drawn with; `correction` is the one of the lowest loss."""
        return self.correction.with_gains(self.gains)

    @property
    def generated(self) -> dict[str, Any] | None:
        """How the images behind it were sampled from the model itself; None if they are data."""
        return self.provenance.get("generated")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to correct."""
        return self.correction.empty

    def fits(self, weights: dict[str, str]) -> bool:
        """Whether it was made for a network with these weights (see `trueup.denoiser.fingerprint`)."""
        ours = self.provenance.get("weights") or {}
        return same_weights(ours, weights) if ours and weights else not ours and not weights

    def explained(self) -> float:
        """Share of the denoising loss, integrated over lam, that the correction removes.

        The score matching loss is the denoising loss less a constant nobody can measure, so this is a lower
        bound on the share of the score matching loss.
        """
        weights = trapezoid_weights(self.correction.lam)
        if len(weights) == 1:
            weights = weights + 1.0
        return float((weights * self.evidence.gain.value).sum() / (weights * self.evidence.loss.value).sum())

    @property
    def uncalibration(self) -> Number:
        """How uncalibrated the network is: bits/dim by which correcting it raises the likelihood bound.

        That is the bound's diffusion term; what a decoder gains comes on top. Unknown (nan) where too few
        images could have confirmed a correction.
        """
        nats = self.evidence.bound_gain if self._confirmable else Number(math.nan)
        return nats.scaled(self.evidence.bits_per_dim(1.0))

    @property
    def _confirmable(self) -> bool:
        e = self.evidence
        return self.family != "none" and e.folds >= 4 and not (self.empty and e.images < FEWEST_IMAGES)

    @property
    def uncalibration_share(self) -> Number:
        """The same as a share of the score matching loss, of which it is at least that (see `explained`)."""
        e, weights = self.evidence, trapezoid_weights(self.correction.lam)
        loss = float((weights * e.loss.value).sum())
        if not self._confirmable:
            return Number(math.nan)
        if len(weights) == 1 or not loss > 0:
            return Number(self.explained())
        # Levels share their images, so their errors are taken to add up, not to cancel.
        share, relative = e.bound_gain.value / loss, float((weights * e.loss.error).sum()) / loss
        return Number.of(share, math.hypot(e.bound_gain.error / loss, share * relative), e.folds)

    def verdict(self) -> str:
        """What to make of it, in one or two sentences."""
        e, bits = self.evidence, self.uncalibration
        if self.family == "none":
            return "the network is left as it is."
        if not self._confirmable:
            few = e.images < FEWEST_IMAGES
            more = (
                f"cannot confirm a correction: use {FEWEST_IMAGES}"
                if few
                else "are in too few groups: use 20"
            )
            return f"{_count(e.images, 'image')} {more} or more."
        if self.empty:
            return "calibrated within noise: nothing to do."
        removed = 100 * self.explained()
        if math.isnan(bits.value):
            at_level = e.gain[0]
            if at_level.sign < 0:
                return f"WORSE: this correction adds {-removed:.2g}% to the loss measured; do not attach it."
            if not at_level.sign:
                return f"no sure gain: the loss measured falls by {removed:.2g}%, within noise."
            return f"miscalibrated: correcting it removes {removed:.2g}% of the loss at the level measured."
        gain = f"{bits.value:.2g} ± {bits.reach:.1g} bits/dim"
        if bits.sign < 0:
            return f"WORSE: this correction changes the likelihood bound by {gain}; do not attach it."
        if not bits.sign:
            return f"no sure gain: the likelihood bound moves by {gain}, within noise."
        if removed < 1e-6:
            return "off by rounding alone: nothing to do."
        if removed < 0.01:
            return f"off by a measurable but negligible amount: correcting it gains {gain}."
        return (
            f"miscalibrated: correcting it lowers the denoising loss, by at least {removed:.2g}% of the "
            f"score matching loss, and raises the likelihood bound by {gain}. Whether samples get better is "
            "for `trueup evaluate` to say."
        )

    def summary(self) -> str:
        """A table of what was measured at every level, the totals, and the verdict."""
        e = self.evidence
        heads = ("t", "lam", "loss", "|mean residual|^2", "held-out gain", "of loss")
        widths = (9, 7, 10, 24, 18, 8)
        header = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        lines = [self._headline(), "", header]
        for row in range(len(self.t)):
            loss, gain = float(e.loss.value[row]), e.gain[row]
            share = gain.value / loss if loss else math.nan
            lines.append(
                f"{float(self.t[row]):9.4g} {float(self.correction.lam[row]):7.2f} {loss:10.4g} "
                f"{_range(e.eta2[row]):>24} {_pm(gain):>18} {percent(share):>8}"
            )
        bits, share = self.uncalibration, self.uncalibration_share.scaled(100)
        score = f"{_pm(bits)} bits/dim of the bound, at least {_pm(share)}% of the score matching loss"
        lines += [
            "",
            "loss: E|eps_hat - eps|^2 summed over a sample; intervals and ± are 95%",
            f"gain of the likelihood bound: {_pm(e.bound_gain)} nats",
            f"uncalibration score: {'unknown' if math.isnan(bits.value) else score}",
        ]
        if self.generated:
            lines.append("measured on the model's own samples: errors that these share with it do not show")
        lines += [made.summary() for made in self.trajectories]
        if self.trajectories and self.generated:
            lines.append("trajectories are brought to the moments of the model's own samples, not of data")
        lines.append(f"verdict: {self.verdict()}")
        return "\n".join(lines)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one .safetensors file, atomically; see docs/format.md."""
        meta, tensors = pack_calibration(self)
        unpacked(unpack_calibration, meta, tensors, "cannot save this calibration")
        save_tensors(path, KIND, meta, tensors)


def load(path: str | PathLike[str]) -> Calibration:
    """Read a calibration; anything damaged, inconsistent or unknown raises ArtifactError with the reason."""
    return Calibration(**load_as(path, KIND, unpack_calibration))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _pm(number: Number) -> str:
    if math.isnan(number.value):
        return "unknown"
    if math.isnan(number.low):
        return f"{number.value:.3g} ± unknown"
    return f"{number.value:.3g} ± {number.reach:.2g}"


def _range(number: Number) -> str:
    if math.isnan(number.value):
        return "unknown"
    return f"{number.value:.3g} ({max(number.low, 0.0):.2g} to {max(number.high, 0.0):.2g})"


def percent(share: float) -> str:
    """A share in print."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
