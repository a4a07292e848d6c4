"""A calibration file gives back what was put in it, or says why it does not."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trueup
from trueup import artifact, process
from trueup.bands import Bands
from trueup.calibration import Calibration, Evidence
from trueup.correction import Correction
from trueup.errors import ArtifactError, TrueupError
from trueup.trajectory import Sampler, States, Trajectory
from trueup.trajectory.maps import EVIDENCE, TOTALS

V1, V2 = (Path(__file__).parent / "data" / f"v{n}.trueup.safetensors" for n in (1, 2))
# By its fields, so that a measurement added to the evidence and forgotten by the file is noticed.
PER_LEVEL = [field.name for field in fields(Evidence) if field.type == "Tensor" and field.name != "scale"]


def make(
    shape=(1, 4, 4), noise=None, levels=3, parametrization="noise", keep=(0, 2), seed=0, edges=None, **changes
) -> Calibration:
    """A calibration of random numbers whose map lives in the bands `keep`."""
    noise = noise or process.ContinuousVP()
    bands = Bands(shape[1:], edges)
    generator = torch.Generator().manual_seed(seed)

    def normal(*dims):
        return torch.randn(*dims, generator=generator, dtype=torch.float64)

    t = noise.snap(torch.linspace(noise.t_min, noise.t_max, levels, dtype=torch.float64))
    kept = torch.tensor([float(k in keep) for k in range(bands.count)], dtype=torch.float64)
    b = normal(levels, shape[0], math.prod(shape[1:])) * bands.spread(kept)
    a, d = (normal(levels, shape[0], bands.count) for _ in range(2))
    values = {name: normal(levels) for name in PER_LEVEL}
    values["gain_se"][0] = math.nan
    evidence = Evidence(
        images=40,
        folds=16,
        dimensions=math.prod(shape),
        scale=normal(levels, bands.count).abs(),
        bound_gain=(float(normal(1)), math.nan),
        shift_bound_gain=(float(normal(1)), math.nan, float(normal(1))),
        **values,
    )
    settings_of = {"name": parametrization}
    if parametrization.startswith("edm"):
        settings_of["sigma_data"] = 0.5
    made = Calibration(
        correction=Correction(noise.lam(t), b, a, d, bands),
        t=t,
        shape=shape,
        evidence=evidence,
        family="spectral",
        estimator="shrunk",
        data_mean=normal(shape[0], math.prod(shape[1:])),
        data_variance=normal(shape[0], bands.count).abs(),
        data_variance_se=normal(shape[0], bands.count).abs(),
        data_images=50,
        data_fingerprint="00ff00ff00ff00ff",
        provenance={
            "model": "Réseau",
            "weights": {"float32": "ab" * 16},
            "process": noise.settings(),
            "parametrization": settings_of,
            "data_range": [-1.0, 1.0],
            "seed": 0,
        },
    )
    shift = normal(2, shape[0], math.prod(shape[1:])) * bands.spread(kept)
    made.trajectories = (
        Trajectory(
            Sampler("ddim", 2, {"kind": "DDIMScheduler", "trained_betas": [0.1, 0.2], "eta": None}, 1.5),
            States(*(normal(2).abs() for _ in range(3))),
            bands,
            made.data_mean,
            shift,
            normal(2, shape[0], bands.count).exp(),
            {name: normal(2, *([] if name in TOTALS else [bands.count])) for name in (*EVIDENCE, *TOTALS)},
            64,
            {"seed": 3, "labels": [0, 1]},
        ),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.nan_to_num(nan=-12345.0), second.nan_to_num(nan=-12345.0))


def parts(c: Calibration) -> dict:
    """Everything a calibration holds, by name."""
    e, k = c.evidence, c.correction
    tensors = {name: getattr(e, name) for name in (*PER_LEVEL, "scale")}
    tensors |= {"lam": k.lam, "b": k.b, "a": k.a, "d": k.d, "bands": k.bands.index, "t": c.t}
    tensors |= {"data_mean": c.data_mean, "data_variance": c.data_variance}
    tensors["data_variance_se"] = c.data_variance_se
    tensors |= {
        f"trajectory {i} {name}": value
        for i, made in enumerate(c.trajectories)
        for name, value in {
            **vars(made.states),
            **made.evidence,
            "shift": made.shift,
            "gain": made.gain,
        }.items()
    }
    tensors["bounds"] = torch.tensor([*e.bound_gain, *e.shift_bound_gain], dtype=torch.float64)
    others = {name: getattr(e, name) for name in ("images", "folds", "dimensions")}
    for name in ("shape", "family", "estimator", "data_images", "data_fingerprint", "provenance"):
        others[name] = getattr(c, name)
    others["trajectories"] = [(made.sampler, made.trajectories, made.provenance) for made in c.trajectories]
    return {**tensors, **others, "edges": k.bands.edges, "spatial": k.bands.spatial}


def same(first: Calibration, second: Calibration) -> bool:
    mine, theirs = parts(first), parts(second)
    return all(
        equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file of a small calibration."""
    make().save(tmp_path / "good.trueup.safetensors")
    return tmp_path / "good.trueup.safetensors"


def refused(path: Path, reason: str) -> None:
    """Loading raises ArtifactError: one line that names the file and holds the reason."""
    with pytest.raises(ArtifactError) as caught:
        trueup.load(path)
    message = str(caught.value)
    assert reason in message
    assert path.name in message
    assert "\n" not in message


def resign(path: Path, change) -> Path:
    """Edit a file's metadata and tensors and sign it again, as a careful forger would."""
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["trueup"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(meta, tensors)
    meta.pop("checksum", None)
    meta["checksum"] = artifact._checksum(tensors, meta)
    forged = path.with_name("forged.trueup.safetensors")
    save_file({name: v.contiguous() for name, v in tensors.items()}, forged, {"trueup": json.dumps(meta)})
    return forged


# Round trips


@pytest.mark.parametrize(
    ("shape", "noise", "parametrization", "keep"),
    [
        ((1, 4, 4), process.ContinuousVP(), "noise", (0,)),
        ((3, 32, 32), process.DiscreteVP.linear(), "velocity", (1, 2, 5)),
        ((2, 8, 6), process.VE(), "score", ()),
        ((2, 17), process.EDM(), "edm", range(99)),
        ((1, 4, 3, 5), process.Flow(1000.0), "flow", (0, 1, 2)),
        ((1, 1), process.DiscreteVP.cosine(steps=50), "data", (0,)),
    ],
)
@pytest.mark.parametrize("levels", [1, 4])
def test_round_trip(tmp_path, shape, noise, parametrization, keep, levels):
    saved = make(shape, noise, levels, parametrization, keep)
    saved.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    was, now = parts(saved), parts(loaded)
    rounded = ("b", "a", "d", "scale", "data_mean", "data_variance", "data_variance_se")
    rounded += ("trajectory 0 shift", "trajectory 0 gain")  # these are kept as float32
    for name, value in was.items():
        if name in rounded:
            assert torch.equal(now[name], value.float().double()), name
        elif isinstance(value, torch.Tensor):
            assert equal(now[name], value), name
        else:
            assert now[name] == value, name
        if isinstance(value, torch.Tensor):
            assert now[name].dtype == value.dtype, name
    assert loaded.process.agrees_with(noise)
    assert loaded.parametrization == saved.parametrization


def test_calibration_of_a_network_survives_and_corrects_alike(tmp_path):
    denoiser = trueup.Denoiser(
        lambda x_t, t: 0.4 * x_t + 0.2, process.ContinuousVP(), "noise", shape=(2, 8, 6)
    )
    x0 = 2 * torch.rand(32, 2, 8, 6, generator=torch.Generator().manual_seed(0)) - 1
    calibration = trueup.calibrate(denoiser, x0, levels=[0.05, 0.3, 0.9], progress=False)
    assert not calibration.empty
    calibration.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert loaded.summary() == calibration.summary()
    eps_hat, u = torch.randn(2, 5, 2, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lam = torch.linspace(3, -5, 5, dtype=torch.float64)
    expected = calibration.correction.apply(eps_hat, u, lam)
    # The numbers were rounded to float32, relative error 6e-8; a few dozen of them of size 1 are added.
    assert torch.allclose(loaded.correction.apply(eps_hat, u, lam), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("images", [1, 2, 3])
def test_calibrations_of_too_few_images_can_be_kept(tmp_path, images):
    denoiser = trueup.Denoiser(lambda x_t, t: x_t, process.ContinuousVP(), "noise", shape=(1, 4, 4))
    x0 = torch.linspace(-1, 1, 48).reshape(3, 1, 4, 4)
    calibration = trueup.calibrate(denoiser, x0, images=images, levels=[0.1, 0.5], progress=False)
    calibration.save(tmp_path / "a")
    assert trueup.load(tmp_path / "a").summary() == calibration.summary()


def test_empty_correction_stays_empty(tmp_path):
    empty = make(keep=())
    empty.correction.a.zero_()
    empty.correction.d.zero_()
    empty.save(tmp_path / "a")
    assert trueup.load(tmp_path / "a").empty


def test_saving_what_was_loaded_writes_the_same_bytes(path, tmp_path):
    trueup.load(path).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    levels=st.integers(1, 5),
    keep=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 2**16),
    edges=st.none() | st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_what_was_loaded_is_saved_and_loaded_unchanged(tmp_path_factory, shape, levels, keep, seed, edges):
    folder = tmp_path_factory.mktemp("roundtrip")
    make(shape, None, levels, "noise", keep, seed, edges).save(folder / "a")
    once = trueup.load(folder / "a")
    once.save(folder / "b")
    assert same(trueup.load(folder / "b"), once)


def test_file_is_small(tmp_path):
    largest = make((3, 32, 32), process.DiscreteVP.linear(), 25, keep=range(99))
    largest.save(tmp_path / "a")
    # 25 levels x 3072 coefficients x 4 bytes = 307 kB, and the schedule's 1000 numbers as text.
    assert (tmp_path / "a").stat().st_size < 400_000
    make((3, 32, 32), process.DiscreteVP.linear(), 25, keep=(0, 1)).save(tmp_path / "b")
    assert (tmp_path / "b").stat().st_size < 70_000


def test_numbers_of_numpy_and_torch_in_the_provenance_are_written_as_numbers(tmp_path):
    made = make()
    made.provenance |= {"seed": np.int64(3), "scale": np.float32(0.5), "n": torch.tensor(4), 10: 1, 9: (1, 2)}
    made.save(tmp_path / "a")
    provenance = trueup.load(tmp_path / "a").provenance
    assert (provenance["seed"], provenance["scale"], provenance["n"]) == (3, 0.5, 4)
    assert (provenance["10"], provenance["9"]) == (1, [1, 2])


def test_loaded_calibration_does_not_depend_on_its_file(path):
    loaded = trueup.load(path)
    with path.open("r+b") as file:  # overwritten in place, as cp does
        file.write(bytes(path.stat().st_size))
    assert equal(loaded.evidence.loss, make().evidence.loss)
    assert torch.equal(loaded.t, make().t)


def test_stored_v1_file_keeps_loading():
    loaded = trueup.load(V1)
    assert V1.stat().st_size < 4096
    assert (loaded.shape, loaded.family, loaded.estimator) == ((1, 4, 4), "spectral", "shrunk")
    assert loaded.t.tolist() == [0.5, 1.0, 2.0]
    assert loaded.correction.lam.tolist() == pytest.approx([math.log(2), 0.0, -math.log(2)])
    b = torch.zeros(3, 4, 4, dtype=torch.float64)
    b[:, 0, 0] = torch.tensor([0.5, -0.25, 0.125])
    for row, column in ((0, 1), (1, 0), (1, 1)):
        b[:, row, column] = torch.tensor([0.03125, 0.0, -0.0625])
    assert torch.equal(loaded.correction.b.reshape(3, 4, 4), b)
    assert loaded.correction.bands.sizes.tolist() == [1, 3, 4, 5, 3]
    assert loaded.correction.a[:, 0].tolist() == [[g, 0, 0, 0, 0] for g in (0.25, 0.5, 0.75)]
    assert torch.equal(loaded.correction.d, -loaded.correction.a / 2)
    evidence = loaded.evidence
    assert (evidence.images, evidence.folds, evidence.dimensions) == (48, 16, 16)
    assert evidence.loss.tolist() == [8, 16, 24]
    assert evidence.loss_se.tolist() == [0.125, 0.25, 0.375]
    assert evidence.eta2.tolist() == [0.5, 1, 1.5]
    assert evidence.eta2_se.tolist() == [0.0625, 0.125, 0.1875]
    assert evidence.eta2_low.tolist() == [0.25, 0.5, 0.75]
    assert evidence.eta2_high.tolist() == [1, 2, 3]
    assert evidence.gain.tolist() == [1, 2, 3]
    assert evidence.gain_se.isnan().all()
    assert evidence.shift_se.tolist() == [0.25, 0.5, 0.75]
    assert (evidence.scale == 0.5).all()
    assert evidence.bound_gain == (2.5, 0.125)
    assert evidence.shift_bound_gain[:2] == (1.5, 0.5)
    assert math.isnan(evidence.shift_bound_gain[2])
    assert loaded.data_mean.tolist() == [[k / 16 for k in range(16)]]
    assert loaded.data_variance.tolist() == [[0.25] * 5]
    assert (loaded.data_images, loaded.data_fingerprint) == (64, "0123456789abcdef")
    assert loaded.process.settings() == {"kind": "ve", "sigma_min": 0.125, "sigma_max": 8.0}
    assert loaded.parametrization == trueup.Parametrization("noise")
    assert loaded.provenance["seed"] == 7
    assert loaded.fits({"float32": "00112233445566778899aabbccddeeff"})


def test_stored_v1_file_says_how_well_it_knows_the_variance():
    """It does not hold the error: taken as that of 64 Gaussian numbers."""
    loaded = trueup.load(V1)
    assert loaded.data_variance_se[0].tolist() == pytest.approx([0.25 * (2 / 64) ** 0.5] * 5)
    assert loaded.trajectories == ()


def test_stored_v2_file_keeps_loading():
    loaded = trueup.load(V2)
    assert V2.stat().st_size < 6144
    assert loaded.data_variance_se.tolist() == [[0.0625] * 5]
    first, second = loaded.trajectories
    assert str(first.sampler) == "dpm-solver-3 (logsnr) at 2 evaluations"
    assert str(second.sampler) == "ddim at 2 evaluations, guidance 2"
    assert second.sampler.settings == {"kind": "DDIMScheduler", "clip_sample": False}
    assert (first.trajectories, first.provenance) == (64, {"seed": 7, "labels": None})
    assert first.states.t.tolist() == [2.0, 1.0]
    assert first.states.alpha.tolist() == [1.0, 1.0]
    assert first.states.sigma.tolist() == [0.5, 0.125]
    assert first.gain[:, 0].tolist() == [[0.5, 1, 1, 1, 1], [1, 1, 1, 1, 2]]
    assert first.shift[0].nonzero().tolist() == [[0, 0]]
    assert float(first.shift[0, 0, 0]) == 0.25
    assert (first.evidence["before"] == 3).all()
    assert second.empty


def test_stored_v2_file_restores_as_it_did():
    """State 0 of a flat image of ones: 4 is its first coefficient, mu is 0, and (4 - 1/4) / 2 comes out."""
    flat = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    restored = trueup.load(V2).trajectories[0](0, flat)
    assert torch.allclose(restored, flat * (4 - 0.25) / 2 / 4, rtol=0, atol=1e-12)


def test_stored_v1_file_corrects_as_it_did():
    correction = trueup.load(V1).correction
    flat = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    lam = torch.zeros(1, dtype=torch.float64)  # the middle level: b = -1/4 at the mean, a = 1/2, d = -1/4
    # A flat image of ones has 4 as its first coefficient, so the corrected one has 4 + 1/4 - 4/2 + 4/4.
    assert torch.allclose(correction.apply(flat, flat, lam), flat * 3.25 / 4, rtol=0, atol=1e-12)


# Saving


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("quota"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("target", [(os, "fsync"), (Path, "replace"), (Path, "chmod")])
def test_failure_while_writing_leaves_the_old_file(monkeypatch, path, error, target):
    before = path.read_bytes()

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(*target, fail)
    with pytest.raises(ArtifactError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        make(seed=1).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    if isinstance(error, OSError):
        assert str(caught.value) == f"cannot write {path}: {error.strerror or 'quota'}"


def test_saving_replaces_the_old_file(path):
    make(seed=1).save(str(path))
    assert equal(trueup.load(path).evidence.loss, make(seed=1).evidence.loss)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_file_gets_the_permissions_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        make().save(tmp_path / "a")
        (tmp_path / "b").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_places_that_cannot_be_written_are_named_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    cases = {
        tmp_path / "missing" / "a": "No such file or directory",
        tmp_path / "file" / "a": "Not a directory",
        tmp_path / "folder": "Is a directory",
    }
    for place, reason in cases.items():
        with pytest.raises(ArtifactError) as caught:
            make().save(place)
        assert str(caught.value) == f"cannot write {place}: {reason}"

    def forbid(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", forbid)  # a read-only folder does not stop root
    with pytest.raises(ArtifactError) as caught:
        make().save(tmp_path / "a")
    assert str(caught.value) == f"cannot write {tmp_path / 'a'}: Permission denied"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_what_could_not_be_loaded_is_not_saved(path):
    before = path.read_bytes()
    infinite, foreign, unwritable, backwards, huge = (make() for _ in range(5))
    infinite.correction.b[1, 0, 0] = math.inf
    foreign.provenance["process"] = process.VE().settings()
    unwritable.provenance["model"] = object()
    backwards.t = backwards.t.flip(0)
    huge.correction.a[0] = 1e300  # infinite as float32
    for broken in (infinite, foreign, unwritable, backwards, huge, make(provenance={})):
        with pytest.raises(ArtifactError, match="cannot save this calibration") as caught:
            broken.save(path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# Files that are not calibrations


def test_file_that_is_not_there(tmp_path):
    refused(tmp_path / "missing", "does not exist")


def test_directory(tmp_path):
    refused(tmp_path, "is a directory, not a calibration file")


def test_empty_file(tmp_path):
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", "cannot be read as a calibration")


def test_file_cut_short_at_any_length(path):
    content = path.read_bytes()
    cut = path.with_name("cut")
    for length in (*range(0, len(content), 5), *range(16), *range(len(content) - 16, len(content))):
        cut.write_bytes(content[:length])
        refused(cut, "cannot be read as a calibration")


def test_file_with_something_appended(path):
    for tail in (b"\0", b" ", b"x" * 1000):
        longer = path.with_name("longer")
        longer.write_bytes(path.read_bytes() + tail)
        refused(longer, "cannot be read as a calibration")


def test_random_bytes(tmp_path):
    rng = random.Random(0)
    junk = tmp_path / "junk"
    for _ in range(300):
        content = rng.randbytes(rng.randrange(1, 400))
        if rng.random() < 0.7:  # a header length that could be true
            content = rng.randrange(0, len(content) + 9).to_bytes(8, "little") + content
        junk.write_bytes(content)
        refused(junk, "cannot be read as a calibration")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"Trueup": "{}"}])
def test_other_safetensors_file(tmp_path, metadata):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata)
    refused(tmp_path / "model.safetensors", "is not a trueup calibration")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "null", "{}", "[" * 100_000, "9" * 5000),
        *('{"format": "1"}', '{"format": null}', '{"format": 1.0}', '{"format": [1]}'),
        *('{"format": 1, "images": NaN}', '{"format": 1, "images": -Infinity}'),
    ],
    ids=lambda text: text[:40],
)
def test_unreadable_metadata(path, text):
    save_file({"t": torch.zeros(2)}, path, {"trueup": text})
    refused(path, "has unreadable metadata")


def test_metadata_without_content(path):
    save_file({"t": torch.zeros(2)}, path, {"trueup": '{"format": 1}'})
    refused(path, "checksum does not match")


def test_newer_format_asks_for_an_upgrade(path):
    forged = resign(path, lambda meta, tensors: meta.update(format=3))
    refused(forged, "has format 3; trueup")
    refused(forged, "reads up to 2: upgrade trueup")


@pytest.mark.parametrize("number", [0, -1, False])
def test_unknown_format(path, number):
    refused(resign(path, lambda meta, tensors: meta.update(format=number)), "unknown format")


# Damage


def test_no_flipped_bit_passes(path):
    """One bit at a time: every bit of the first bytes, and three thousand anywhere."""
    good = trueup.load(path)
    content = path.read_bytes()
    bits = len(content) * 8
    damaged = path.with_name("damaged")
    rng = random.Random(0)
    passed, said = 0, []
    for bit in (*range(128), *rng.sample(range(128, bits), 3000)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        try:
            loaded = trueup.load(damaged)
        except ArtifactError as error:
            said.append(str(error))
            continue
        passed += 1
        assert same(loaded, good), f"bit {bit} changed the calibration unnoticed"
    assert not any("\n" in message for message in said)
    assert passed < 30  # only what JSON leaves open, such as the 17th digit of a number, may pass


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_no_damaged_stretch_passes(tmp_path_factory, data):
    content = V1.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=40))
    damaged = tmp_path_factory.getbasetemp() / "stretch"
    damaged.write_bytes(content[:start] + stretch + content[start + len(stretch) :])
    try:
        assert same(trueup.load(damaged), trueup.load(V1))
    except ArtifactError:
        pass  # noticed


def test_swapped_tensors_are_noticed(path):
    """Two tensors of one shape change places in the header: every byte is where it was."""
    content = path.read_bytes()
    assert content.count(b'"a":') == content.count(b'"d":') == 1
    swapped = content.replace(b'"a":', b'"#":').replace(b'"d":', b'"a":').replace(b'"#":', b'"d":')
    path.write_bytes(swapped)
    refused(path, "checksum does not match")


# Forgeries: signed, and still nonsense


def _set(name, value):
    return lambda meta, tensors: meta.update({name: value})


def _provenance(name, value):
    return lambda meta, tensors: meta["provenance"].update({name: value})


def _tensor(name, change):
    return lambda meta, tensors: tensors.update({name: change(tensors[name])})


def _at(name, value):
    def change(meta, tensors):
        tensors[name].view(-1)[-1] = value

    return change


def _longer(tensors, levels):
    for name in tensors:
        if not name.startswith(("data_", "trajectory")):
            tensors[name] = tensors[name][:1].repeat(levels, *[1] * (tensors[name].dim() - 1))


def _entry(name, value):
    return lambda meta, tensors: meta["trajectories"][0].update({name: value})


def _again(meta, tensors):
    meta["trajectories"] *= 2


VP = {"kind": "continuous_vp", "beta_min": 0.1, "beta_max": 20.0, "t_min": 1e-3, "t_max": 1.0}
FORGERIES = {
    # shapes
    "no shape": (lambda meta, tensors: meta.pop("shape"), "shape"),
    "shape of another model": (_set("shape", [1, 4, 8]), "data_mean is"),
    "same pixels, other shape": (_set("shape", [1, 8, 2]), "expected"),
    "same pixels, other channels": (_set("shape", [4, 2, 2]), "data_mean is"),
    "shape without space": (_set("shape", [16]), "sample shape makes no sense"),
    "shape of zeros": (_set("shape", [0, 4, 4]), "sample shape makes no sense"),
    "negative shape": (_set("shape", [-1, -4, 4]), "sample shape makes no sense"),
    "shape of fractions": (_set("shape", [1, 4.0, 4]), "sample shape makes no sense"),
    "shape of booleans": (_set("shape", [True, 4, 4]), "sample shape makes no sense"),
    "shape of text": (_set("shape", "144"), "sample shape makes no sense"),
    "shape is a number": (_set("shape", 16), "damaged"),
    # bands
    "band missing": (_set("kept_bands", [0]), "b is torch.float32"),
    "other bands kept": (_set("kept_bands", [0, 3]), "b is torch.float32"),
    "bands out of order": (_set("kept_bands", [2, 0]), "kept bands makes no sense"),
    "band twice": (_set("kept_bands", [0, 2, 2]), "kept bands makes no sense"),
    "band out of range": (_set("kept_bands", [0, 99]), "kept bands makes no sense"),
    "negative band": (_set("kept_bands", [-3, 0]), "kept bands makes no sense"),
    "band is a fraction": (_set("kept_bands", [0.0, 2.0]), "kept bands makes no sense"),
    "bands are text": (_set("kept_bands", "02"), "kept bands makes no sense"),
    "bands are nothing": (_set("kept_bands", None), "damaged"),
    "edges fall": (_set("band_edges", [3.5, 2.5, 1.5, 0.5]), "band edges must rise"),
    "fewer edges": (_set("band_edges", [0.5]), "kept bands makes no sense"),
    "edges are text": (_set("band_edges", ["low", "high"]), "damaged"),
    "edges are missing": (lambda meta, tensors: meta.pop("band_edges"), "band_edges"),
    # levels
    "levels out of order": (_tensor("t", lambda t: t[[0, 2, 1]]), "noise levels are out of order"),
    "level twice": (_tensor("t", lambda t: t[[0, 1, 1]]), "noise levels are out of order"),
    "lam out of order": (_tensor("lam", lambda lam: lam.flip(0)), "noise levels are out of order"),
    "lam elsewhere": (_tensor("lam", lambda lam: lam - 0.01), "do not belong to its noise process"),
    "one level less": (_tensor("t", lambda t: t[:2]), "expected torch.float64 (2,)"),
    "no level": (lambda meta, tensors: _longer(tensors, 0), "0 levels"),
    "level is a number": (_tensor("t", lambda t: t[0]), "damaged"),
    # process and parametrization
    "another process": (
        _provenance("process", {"kind": "ve", "sigma_min": 0.002, "sigma_max": 80.0}),
        "do not belong to its noise process",
    ),
    "another schedule": (_provenance("process", {**VP, "beta_max": 19.0}), "do not belong"),
    "infinite schedule": (_provenance("process", {**VP, "beta_max": 1e999}), "unreadable metadata"),
    "unknown process": (_provenance("process", {"kind": "brownian"}), "unknown noise process"),
    "process of unhashable kind": (_provenance("process", {"kind": []}), "damaged"),
    "impossible process": (_provenance("process", {**VP, "beta_min": -1}), "beta_min"),
    "process with text": (_provenance("process", {**VP, "beta_min": "low"}), "damaged"),
    "process with more": (_provenance("process", {**VP, "gamma": 1}), "damaged"),
    "schedule is an object": (
        _provenance("process", {"kind": "discrete_vp", "alphas_cumprod": {"a": 1}}),
        "damaged",
    ),
    "process is text": (_provenance("process", "vp"), "damaged"),
    "process is nothing": (_provenance("process", None), "damaged"),
    "no process": (lambda meta, tensors: meta["provenance"].pop("process"), "process"),
    "no provenance": (lambda meta, tensors: meta.pop("provenance"), "provenance"),
    "provenance is a list": (_set("provenance", []), "damaged"),
    "unknown prediction": (_provenance("parametrization", {"name": "dreams"}), "unknown parametrization"),
    "prediction is text": (_provenance("parametrization", "noise"), "damaged"),
    "edm of text": (_provenance("parametrization", {"name": "edm", "sigma_data": "x"}), "damaged"),
    "edm of zero": (_provenance("parametrization", {"name": "edm", "sigma_data": 0.0}), "sigma_data"),
    "weights are a list": (_provenance("weights", ["ab"]), "fingerprint of the weights"),
    # numbers
    "images are text": (_set("images", "many"), "number of images is 'many'"),
    "images are negative": (_set("images", -5), "number of images is -5"),
    "folds are a fraction": (_set("folds", 2.5), "number of folds is 2.5"),
    "data images are nothing": (_set("data_images", None), "number of data_images is None"),
    "three bounds": (_set("bound_gain", [1.0, 2.0, 3.0]), "totals make no sense"),
    "two ideal bounds": (_set("shift_bound_gain", [1.0, 2.0]), "totals make no sense"),
    "bound is text": (_set("bound_gain", ["x", 1.0]), "damaged"),
    "bound is missing": (lambda meta, tensors: meta.pop("shift_bound_gain"), "shift_bound_gain"),
    # trajectories
    "trajectories not listed": (_set("trajectories", []), "trajectories are not those it lists"),
    "trajectory without tensors": (_again, "trajectories are not those it lists"),
    "tensor too many in a trajectory": (
        lambda meta, tensors: tensors.update({"trajectory.0.junk": torch.zeros(1)}),
        "trajectory.0 has tensors that are not those of a trajectory",
    ),
    "error of the variance is negative": (_at("data_variance_se", -1.0), "error of the variance is negative"),
    "trajectory without its gain": (
        lambda meta, tensors: tensors.pop("trajectory.0.gain"),
        "trajectory.0 lacks gain",
    ),
    "gain of nothing": (_at("trajectory.0.gain", 0.0), "makes no sense"),
    "negative level": (_at("trajectory.0.sigma", -1.0), "makes no sense"),
    "states of another number": (_tensor("trajectory.0.alpha", lambda v: v[:1]), "trajectory.0.alpha is"),
    "shift of another shape": (_tensor("trajectory.0.shift", lambda v: v[..., :2]), "trajectory.0.shift is"),
    "shift in half": (
        _tensor("trajectory.0.shift", lambda v: v.half()),
        "trajectory.0.shift is torch.float16",
    ),
    "shift is not finite": (_at("trajectory.0.shift", math.nan), "trajectory.0.shift holds"),
    "no evaluations": (_entry("nfe", 0), "what trajectory.0 is for makes no sense"),
    "guidance is text": (_entry("guidance", "much"), "what trajectory.0 is for makes no sense"),
    "guidance is not finite": (_entry("guidance", 1e999), "unreadable metadata"),
    "settings are a list": (_entry("settings", []), "what trajectory.0 is for makes no sense"),
    "bands of a trajectory": (_entry("kept_bands", [0, 99]), "kept bands of trajectory.0"),
    # tensors
    "tensor missing": (lambda meta, tensors: tensors.pop("d"), "tensors are not those of a calibration"),
    "no time": (lambda meta, tensors: tensors.pop("t"), "tensors are not those of a calibration"),
    "tensor too many": (
        lambda meta, tensors: tensors.update(extra=torch.zeros(1)),
        "tensors are not those of a calibration",
    ),
    "evidence too short": (_tensor("evidence.loss", lambda v: v[:2]), "evidence.loss is"),
    "b transposed": (_tensor("b", lambda v: v.movedim(0, -1)), "b is"),
    "b flat": (_tensor("b", lambda v: v.flatten()), "b is"),
    **{
        f"{name} holds {value}": (_at(name, value), f"{name} holds values that are not finite")
        for name in ("t", "lam", "b", "a", "d", "scale", "data_mean", "data_variance", "data_variance_se")
        for value in (math.nan, math.inf)
    },
    **{
        f"{name} as {dtype}": (_tensor(name, lambda v, dtype=dtype: v.to(dtype)), f"{name} is {dtype}")
        for name, dtype in (
            ("b", torch.float64),
            ("b", torch.float16),
            ("b", torch.bfloat16),
            ("a", torch.int32),
            ("d", torch.bool),
            ("scale", torch.float8_e4m3fn),
            ("data_mean", torch.uint8),
            ("t", torch.float32),
            ("lam", torch.int64),
            ("evidence.gain", torch.float32),
        )
    },
}


def test_helper_signs_as_saving_does(path):
    forged = resign(path, lambda meta, tensors: None)
    assert same(trueup.load(forged), trueup.load(path))


@pytest.mark.parametrize("name", FORGERIES)
def test_signed_nonsense_is_refused_with_its_reason(path, name):
    change, reason = FORGERIES[name]
    refused(resign(path, change), reason)


def test_edited_metadata_without_a_new_signature_is_refused(path):
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["trueup"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for name, value in (("images", 10_000), ("family", "shift"), ("checksum", None), ("checksum", "0" * 32)):
        save_file(tensors, path, {"trueup": json.dumps({**meta, name: value})})
        refused(path, "checksum does not match: the file was damaged or edited")


class Largest(TorchDispatchMode):
    """The largest tensor torch makes inside the block, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return out


@pytest.mark.parametrize(
    "shape",
    [
        [1, 2**19, 2**19],
        [1, 20_000, 20_000],
        [2**19, 4, 4],
        [3, 512, 512, 512],
        [1, 2**19, 1],
        [2**62, 2**62],
    ],
    ids=str,
)
def test_a_forged_shape_allocates_nothing(path, shape):
    forged = resign(path, _set("shape", shape))
    with Largest() as largest:
        refused(forged, "forged")
    assert largest.bytes < 1e5


def test_many_levels_of_a_large_map_allocate_nothing(path):
    """Each tensor is in the file and modest; only their product is not."""

    def change(meta, tensors):
        _longer(tensors, 10_000)
        meta.update(shape=[1, 1024, 1024], band_edges=[1e9], kept_bands=[])
        tensors["data_mean"] = torch.zeros(1, 2**20)
        tensors["b"] = tensors["b"][..., :0]
        for name in ("a", "d", "scale", "data_variance", "data_variance_se"):
            tensors[name] = tensors[name][..., :1]

    forged = resign(path, change)
    with Largest() as largest:
        refused(forged, "10000 levels")
    assert largest.bytes < 2e7  # the maps of the file itself


def test_artifact_error_is_one_of_ours():
    assert issubclass(ArtifactError, TrueupError)
