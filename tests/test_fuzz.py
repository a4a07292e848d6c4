"""Ten thousand files whose makers knew how to sign them: refused in a line or harmless, nothing else."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

import trueup
from trueup import files
from trueup.calibration import Correction, OfClass, artifact
from trueup.calibration.calibration import Calibration
from trueup.calibration.hook import CorrectOutput
from trueup.errors import ArtifactError, TrueupError
from trueup.estimate import fit, stored
from trueup.estimate.moments import Moments
from trueup.fitted import FittedSolver
from trueup.page import render
from trueup.statistics import Number

from calibrations import make
from mutations import check_line, check_values, mutated, quickly
from pages import drawn


@pytest.fixture(scope="module")
def good():
    """The metadata and tensors of a small but complete calibration, with a class that has its own."""
    made = make((1, 3, 4), solvers=True)
    own = make((1, 3, 4), seed=1).correction
    made.classes = (OfClass(4, 30, Number(0.2, 0.1, 0.0, 0.4), own), OfClass(9, 3, Number(math.nan)))
    made.provenance |= {"null_label": 4, "shares": {"held": [1, 3], "of": 8, "batch": 8, "images": "1f"}}
    made.drawn = (drawn((1, 3, 4), made.correction.bands.count, pictures=2),)
    made.evidence.expected = torch.ones(3, 1, 3, 4)
    meta, tensors = artifact.pack_calibration(made)
    return json.dumps(meta), tensors


def read(meta, tensors) -> Calibration:
    """As from a file whose checksum is right."""
    check_values(meta)
    return Calibration(**files.unpacked(artifact.unpack_calibration, meta, tensors, "file"))


def corrections(calibration: Calibration) -> list[Correction]:
    """That of all classes, and those of classes that have their own."""
    return [
        calibration.correction,
        *(of.correction for of in calibration.classes if of.correction is not None),
    ]


def same(one: Calibration, other: Calibration) -> bool:
    """Whether two calibrations do the same; levels to the accuracy that is asked of them."""
    settings = ("process", "parametrization", "binding", "null_label")
    first, second = (
        [getattr(made, n) for made in corrections(c) for n in ("b", "a", "d", "support")]
        + [getattr(made.innovation, n) for made in corrections(c) for n in ("rho", "mean", "support")]
        + [getattr(s, n) for s in c.solvers for n in ("t", "alpha", "sigma", "weights", "tables", "offset")]
        for c in (one, other)
    )
    return (
        one.shape == other.shape
        and one.gains == other.gains
        and [of.label for of in one.classes if of.correction]
        == [of.label for of in other.classes if of.correction]
        and [one.provenance.get(n) for n in settings] == [other.provenance.get(n) for n in settings]
        and [(s.nfe, s.guidance, s.history, s.gains) for s in one.solvers]
        == [(s.nfe, s.guidance, s.history, s.gains) for s in other.solvers]
        and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        and torch.allclose(one.correction.lam, other.correction.lam, rtol=1e-6)
        and torch.allclose(one.process.lam(one.t), other.correction.lam, rtol=1e-5, atol=1e-5)
    )


def show(calibration: Calibration) -> None:
    """What inspecting it prints stays on its lines."""
    lines = [repr(calibration), *calibration.summary().split("\n")]
    assert all(text.isprintable() for text in lines)
    assert sum(text.startswith("verdict") for text in lines) == 1


def show_page(calibration: Calibration) -> None:
    """And its page has the elements of a page."""
    text = render(calibration)
    assert text.count("<script") == text.count("</script") == 2
    assert all(c.isprintable() or c == "\n" for c in text)


def test_signed_files_are_refused_in_a_line_or_do_what_they_did(good):
    dice, whole = random.Random(0), read(json.loads(good[0]), good[1])
    harmless = 0
    for _ in range(10_000):
        try:
            loaded = quickly(read, *mutated(good, dice))
        except ArtifactError as error:
            check_line(error)
            continue
        harmless += 1
        assert same(loaded, whole)
        show(loaded)
        if harmless % 100 == 0:
            show_page(loaded)
    assert 100 < harmless < 4000  # evidence within its range, names, digests: nothing that corrects


def test_whoever_forges_the_identity_too_gets_a_correction_within_bounds_or_a_line(good, monkeypatch):
    """Then what it does is his to say, but not that it crashes, hangs or is infinite."""
    monkeypatch.setattr(artifact, "identity_of", lambda *_: "forged")
    monkeypatch.setattr(FittedSolver, "identity", "forged")
    meta = json.loads(good[0])
    for part in (meta, *meta["solvers"]):
        part["identity"] = "forged"
    forged, dice, loaded = (json.dumps(meta), good[1]), random.Random(1), []
    for _ in range(3000):
        try:
            loaded.append(quickly(read, *mutated(forged, dice)))
        except ArtifactError as error:
            check_line(error)
            continue
        show(loaded[-1])
    assert len(loaded) > 100
    for calibration in loaded[::20]:
        show_page(calibration)
        x_t = torch.ones(2, *calibration.shape)
        corrected = CorrectOutput(calibration).correct(x_t, x_t, calibration.t[:1], torch.tensor([4, 9]))
        assert torch.isfinite(corrected).all()
        for solver in calibration.solvers:
            for i in range(solver.nfe):
                assert torch.isfinite(solver.step(i, x_t, [x_t] * min(i + 1, 3))).all()


def test_signed_moments_are_refused_in_a_line_or_can_be_fitted():
    """Of sums within their bounds nobody can tell that they are not those that were measured."""
    generator = torch.Generator().manual_seed(0)
    settings = {"parametrization": {"name": "noise"}, "model": "net", "binding": None, "seed": 0}
    process = trueup.process.ContinuousVP()
    moments = Moments.empty(process, [0.2, 0.6], (1, 2, 3), folds=8, provenance=settings)
    index, x0 = torch.arange(30), torch.randn(30, 1, 2, 3, generator=generator)
    moments.add_samples(index, x0, index)
    for level, t in enumerate((0.2, 0.6)):
        eps = torch.randn(x0.shape, generator=generator)
        u = process.noised(x0, eps, t) / process.sigma(t)
        moments.add(torch.full_like(index, level), index, 0.9 * eps + 0.1, eps, u)
    meta, tensors = stored.pack(moments)
    good, dice, loaded = (json.dumps(meta), tensors), random.Random(3), []

    def read(meta, tensors):
        check_values(meta)
        return Moments(**files.unpacked(stored.unpack, meta, tensors, "file"))

    assert fit(read(json.loads(good[0]), tensors)).identity == fit(moments).identity
    for _ in range(3000):
        try:
            loaded.append(quickly(read, *mutated(good, dice)))
        except ArtifactError as error:
            check_line(error)
    assert len(loaded) > 50
    for found in loaded[::10]:
        try:
            fitted = fit(found)
        except TrueupError as error:  # a level or the settings it takes are gone
            check_line(error)
            continue
        assert all(torch.isfinite(v).all() for v in (fitted.correction.b, fitted.correction.a))
        assert all(text.isprintable() for text in fitted.summary().split("\n"))


def test_the_file_around_it_is_read_the_same_way(good, tmp_path, monkeypatch):
    """A tenth as many through whole files, with values that no writer of ours would let pass."""
    monkeypatch.setattr(files, "_check_values", lambda *_: None)
    monkeypatch.setattr(files, "_escaped", lambda value: value)
    monkeypatch.setattr(files.os, "fsync", lambda _: None)  # no power cut is tried here
    dice, path = random.Random(2), tmp_path / "signed.trueup.safetensors"
    written, refused = [], 0
    for _ in range(1000):
        meta, tensors = mutated(good, dice)
        try:
            files.save_tensors(path, artifact.KIND, meta, tensors)
        except ArtifactError as error:  # what safetensors itself does not write
            check_line(error)
            continue
        written.append(path.read_bytes())
    monkeypatch.undo()
    for content in written:
        path.write_bytes(content)
        try:
            quickly(trueup.load, path)
        except ArtifactError as error:
            check_line(error, path.name)
            refused += 1
    assert len(written) > 800
    assert refused > 500
