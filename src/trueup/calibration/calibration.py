"""A fitted correction with its evidence and its origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, resampled
from trueup.calibration import words
from trueup.calibration.artifact import KIND, identity_of, pack_calibration, unpack_calibration
from trueup.calibration.classes import OfClass
from trueup.calibration.conditions import OfConditions
from trueup.calibration.correction import Correction, check_gains
from trueup.calibration.drawn import Drawn
from trueup.calibration.evidence import Evidence, SampleEvidence
from trueup.calibration.pictures import OfPictures
from trueup.calibration.shares import Shares
from trueup.calibration.sharing import find_calibration, push_folder, save_folder
from trueup.denoiser import Denoiser
from trueup.denoiser.weights import same_weights
from trueup.errors import Argument, MismatchError
from trueup.files import load_as, save_tensors, unpacked
from trueup.fitted import FittedSolver, purpose
from trueup.hf.hub import names_of
from trueup.hf.loading import diffusers_module
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess, from_settings
from trueup.statistics import Number, trapezoid_weights


@dataclass(eq=False, repr=False)
class Calibration:
    """What `calibrate` returns: put it on a model with `trueup.attach`, keep it with `save`."""

    correction: Correction
    t: Tensor  # (L,) the levels as times of the network's process
    shape: tuple[int, ...]
    evidence: Evidence
    family: str
    estimator: str
    data_mean: Tensor  # (C, K) DCT of the data's mean, of the coefficients that the bands keep
    data_variance: Tensor  # (C, bands)
    data_variance_se: Tensor  # (C, bands)
    data_images: int
    data_digests: Tensor  # (n,) int64, of the images it was made from, where there are not too many to keep
    provenance: dict[str, Any] = field(default_factory=dict)
    solvers: tuple[FittedSolver, ...] = ()  # for few steps, no two for the same evaluations and guidance
    gains: str = "sqrt"  # of the correction that samples are drawn with, see `Correction.with_gains`
    classes: tuple[OfClass, ...] = ()  # of moments kept by class; `correction` is that of all together
    conditions: OfConditions | OfPictures | None = None  # what depends on conditions, beyond `correction`
    drawn: tuple[Drawn, ...] = ()  # samples that it was judged by, to look at

    def __post_init__(self) -> None:
        check_gains(self.gains)

    @classmethod
    def without_data(cls, denoiser: Denoiser, y: Any = None) -> Calibration:
        """A calibration that was measured on nothing and corrects nothing: what solvers alone are kept in.

        y: a label or more, for a conditional network, to find out how it is called.
        """
        denoiser.check_bare()
        process, shape, bands = denoiser.process, denoiser.shape, Bands.of(denoiser.shape)
        t = process.snap(process.t_of_lam(0.0)).reshape(1)
        size, binding = bands.length, denoiser.binding(y)

        def zeros(*dims: int) -> Tensor:
            return torch.zeros(*dims, dtype=torch.float64)

        nan = torch.full_like(t, math.nan)
        unknown = Number(nan, nan, nan, nan)
        slopes = zeros(1, shape[0], bands.count)
        return cls(
            correction=Correction(process.lam(t), zeros(1, shape[0], size), slopes, slopes.clone(), bands),
            t=t,
            shape=shape,
            evidence=Evidence(
                images=0,
                folds=1,
                dimensions=math.prod(shape),
                loss=Number(zeros(1), nan, nan, nan),
                eta2=unknown,
                gain=unknown,
                shift_se=nan,
                scale=zeros(1, bands.count),
                bound_gain=Number(math.nan),
                shift_bound_gain=Number(math.nan),
            ),
            family="none",
            estimator="none",
            data_mean=zeros(shape[0], size),
            data_variance=zeros(shape[0], bands.count),
            data_variance_se=zeros(shape[0], bands.count),
            data_images=0,
            data_digests=torch.zeros(0, dtype=torch.int64),
            provenance={
                "model": denoiser.description,
                "weights": denoiser.fingerprint(),
                "process": process.settings(),
                "parametrization": denoiser.parametrization.settings(),
                "binding": None if binding is None else binding.settings(),
                "data_range": list(denoiser.data_range) if denoiser.data_range else None,
                **denoiser.told(),
                **names_of(denoiser.network),
            },
            gains="none",
        )

    def __repr__(self) -> str:
        return f"<{words.headline(self)}: {self.verdict()}>"

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
        parts = (self.correction, self.classes, self.conditions)
        return identity_of(*parts, self.gains, self.provenance)

    @property
    def for_samples(self) -> Correction:
        """The correction that samples are drawn with; `correction` is the one of the lowest loss."""
        return self.correction.with_gains(self.gains)

    def for_class(self, y: int) -> Correction:
        """The correction of a class: its own, or that of all classes where it has none."""
        own = {of.label: of.correction for of in self.classes}.get(y)
        return self.correction if own is None else own

    @property
    def measured(self) -> bool:
        """Whether the network was measured on data; else it corrects nothing, and has solvers alone."""
        return self.data_images > 0

    def resized(self, spatial: Sequence[int]) -> Calibration:
        """The same for samples of another size, which `attach` makes by itself; equation 63.

        Evidence stays what it is: of the size that was measured.
        """
        made = self.correction.bands
        if tuple(spatial) == made.spatial:
            return self
        bands, old = made.resized(spatial)
        mean, conditions = self.data_mean, self.conditions
        own = [None if of.correction is None else of.correction.resized(spatial, mean) for of in self.classes]
        return replace(
            self,
            correction=self.correction.resized(spatial, mean),
            shape=(self.shape[0], *bands.spatial),
            evidence=replace(self.evidence, scale=self.evidence.scale[..., old], expected=None),
            data_mean=resampled(mean, made, bands),
            data_variance=self.data_variance[..., old],
            data_variance_se=self.data_variance_se[..., old],
            provenance={**self.provenance, "measured_shape": list(self.shape)},
            solvers=tuple(solver.resized(spatial) for solver in self.solvers),
            classes=tuple(replace(of, correction=c) for of, c in zip(self.classes, own, strict=True)),
            conditions=conditions.resized(spatial, made) if isinstance(conditions, OfConditions) else None,
            drawn=(),
        )

    def solver(self, nfe: int, guidance: float = 1.0) -> FittedSolver:
        """The solver for so many evaluations, or an error that says which there are."""
        found = next((solver for solver in self.solvers if solver.is_for(nfe, guidance)), None)
        if found is not None:
            return found
        guided = next((solver.guidance for solver in self.solvers if solver.nfe == nfe), None)
        if guided is not None:
            problem = f"the solver for {nfe} evaluations is for guidance {guided:g}, not {guidance:g}"
            raise MismatchError(
                problem, "pass {}, or fit one for this (trueup.fit_solver)", Argument("guidance", guided)
            )
        there = ", ".join(solver.purpose for solver in self.solvers)
        has = f"has those for {there}" if there else "has none"
        fit = "fit one (trueup.fit_solver)"
        raise MismatchError(f"no solver for {purpose(nfe, guidance)}: this calibration {has}", fit)

    def scheduler(self, nfe: int, guidance: float = 1.0) -> Any:
        """The solver as a scheduler of diffusers, for any pipeline: `pipe.scheduler = cal.scheduler(nfe=8)`.

        The pipeline then takes `num_inference_steps=8` and the guidance it was fitted for. It goes with the
        correction that it was fitted with: `trueup.attach(pipe, cal)`, where there is one.
        """
        solver = self.solver(nfe, guidance)
        diffusers_module("a scheduler")
        from trueup.hf.fitted import FittedScheduler

        binding, predicts = self.provenance.get("binding") or {}, self.parametrization
        if binding.get("turned"):  # the pipeline does, before the scheduler is told
            predicts = predicts.turned()
        return FittedScheduler.of(solver, self.process, predicts, binding.get("layout"))

    @property
    def generated(self) -> dict[str, Any] | None:
        """How the images behind it were sampled from the model itself; None if they are data."""
        return self.provenance.get("generated")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to correct."""
        by_class = any(of.correction is not None for of in self.classes)
        return self.correction.empty and not by_class and self.conditions is None

    @property
    def samples(self) -> SampleEvidence | None:
        """What samples near the limit said of it, where some were drawn."""
        return SampleEvidence.of(self.provenance)

    @property
    def shares(self) -> Shares | None:
        """Which shares of the images it was made from, where that was not all of them."""
        return Shares.noted(self.provenance)

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
        nats = self.evidence.bound_gain if self.confirmable else Number(math.nan)
        return nats.scaled(self.evidence.bits_per_dim(1.0))

    @property
    def confirmable(self) -> bool:
        """Whether a correction could have been confirmed, had there been one."""
        e = self.evidence
        return self.family != "none" and e.folds >= 4 and not (self.empty and e.images < words.FEWEST_IMAGES)

    @property
    def uncalibration_share(self) -> Number:
        """The same as a share of the score matching loss, of which it is at least that (see `explained`)."""
        e, weights = self.evidence, trapezoid_weights(self.correction.lam)
        loss = float((weights * e.loss.value).sum())
        if not self.confirmable:
            return Number(math.nan)
        if len(weights) == 1 or not loss > 0:
            return Number(self.explained())
        # Levels share their images, so their errors are taken to add up, not to cancel.
        share, relative = e.bound_gain.value / loss, float((weights * e.loss.error).sum()) / loss
        return Number.of(share, math.hypot(e.bound_gain.error / loss, share * relative), e.folds)

    def verdict(self) -> str:
        """What to make of it, in a few sentences: of the network, and of its samples."""
        return words.verdict(self)

    def summary(self) -> str:
        """A table of what was measured at every level, the totals, and the verdict."""
        return words.summary(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one .safetensors file, atomically; see docs/format.md."""
        meta, tensors = pack_calibration(self)
        unpacked(unpack_calibration, meta, tensors, "cannot save this calibration")
        save_tensors(path, KIND, meta, tensors)

    def save_pretrained(self, folder: str | PathLike[str], *, base_model: str | None = None) -> None:
        """Write a directory as the Hugging Face Hub has them: the file, a model card, a config per solver.

        base_model: the model's name on the Hub, where it was not loaded by that. Other files stay.
        """
        save_folder(self, folder, base_model)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        base_model: str | None = None,
    ) -> str:
        """Put what `save_pretrained` writes on the Hub as "owner/name"; returns its address."""
        return push_folder(self, name, private=private, token=token, base_model=base_model)


def load(where: str | PathLike[str], *, revision: str | None = None) -> Calibration:
    """Read a calibration: a file, a directory that `save_pretrained` wrote, or "owner/name" on the Hub.

    revision: a branch, tag or commit there. Anything damaged, inconsistent or unknown raises ArtifactError.
    """
    return Calibration(**load_as(find_calibration(where, revision), KIND, unpack_calibration))
