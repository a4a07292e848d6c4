"""A calibration file gives back what was put in it, or says why it does not."""

from __future__ import annotations

import errno
import json
import math
import os
import random
from dataclasses import fields, replace
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
from trueup import fitted, process
from trueup.bands import Bands, kept_frequencies
from trueup.calibration import Calibration, Evidence, FittedSolver
from trueup.errors import ArtifactError, TrueupError
from trueup.statistics import Number

from calibrations import PLAIN, emptied
from calibrations import make as make_any
from forged import refused, resign

PARTS = ("value", "error", "low", "high")


def make(*args, **settings) -> Calibration:
    """A calibration with a solver."""
    return make_any(*args, **{"solvers": True, **settings})


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.nan_to_num(nan=-12345.0), second.nan_to_num(nan=-12345.0))


def parts(c: Calibration) -> dict:
    """Everything a calibration holds, by name."""
    # By its fields, so that a measurement added to the evidence and forgotten by the file is noticed.
    found = {field.name: getattr(c.evidence, field.name) for field in fields(Evidence)}
    k = c.correction
    found |= {"lam": k.lam, "b": k.b, "a": k.a, "d": k.d, "support": k.support}
    found |= {"bands": k.bands.index, "t": c.t}
    if k.innovation is not None:
        found |= {f"innovation {name}": value for name, value in vars(k.innovation).items()}
    found |= {"edges": k.bands.edges, "spatial": k.bands.spatial}
    found |= {
        field.name: getattr(c, field.name)
        for field in fields(Calibration)
        if field.name not in ("correction", "evidence", "solvers")
    }
    for i, made in enumerate(c.solvers):
        held = {field.name: getattr(made, field.name) for field in fields(FittedSolver)}
        held |= {
            "bands": made.bands.index,
            "edges": made.bands.edges,
            "evidence": str(sorted(made.evidence.items())),
        }
        found |= {f"solver {i} {name}": value for name, value in held.items()}
    plain = {}
    for name, value in found.items():
        if isinstance(value, Number):
            plain |= {f"{name} {part}": torch.as_tensor(getattr(value, part)) for part in PARTS}
        else:
            plain[name] = value
    return plain


def same(first: Calibration, second: Calibration) -> bool:
    mine, theirs = parts(first), parts(second)
    return mine.keys() == theirs.keys() and all(
        equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file of a small calibration."""
    make().save(tmp_path / "good.trueup.safetensors")
    return tmp_path / "good.trueup.safetensors"


# Round trips


@pytest.mark.parametrize(
    ("shape", "noise", "kind", "keep"),
    [
        ((1, 4, 4), process.ContinuousVP(), "noise", (0,)),
        ((3, 32, 32), process.DiscreteVP.linear(), "velocity", (1, 2, 5)),
        ((2, 8, 6), process.VE(), "score", ()),
        ((2, 17), process.EDM(), "edm", range(99)),
        ((1, 4, 3, 5), process.Flow(1000.0), "reversed_flow", (0, 1, 2)),
        ((1, 1), process.DiscreteVP.cosine(steps=50), "data", (0,)),
    ],
)
@pytest.mark.parametrize("levels", [1, 4])
def test_round_trip(tmp_path, shape, noise, kind, keep, levels):
    saved = make(shape, noise, levels, kind, keep, binding=None if levels == 1 else PLAIN)
    saved.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    was, now = parts(saved), parts(loaded)
    assert was.keys() == now.keys()
    rounded = ("b", "a", "d", "support", "scale", "data_mean", "data_variance", "data_variance_se")
    rounded += ("innovation rho", "innovation mean", "innovation support")
    rounded += ("solver 0 tables", "solver 0 offset")  # these are kept as float32
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
    assert loaded.summary() == saved.summary()


def test_what_was_loaded_corrects_alike(tmp_path):
    saved = make((2, 8, 6))
    saved.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    eps_hat, u = torch.randn(2, 5, 2, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lam = torch.linspace(3, -5, 5, dtype=torch.float64)
    expected = saved.correction.apply(eps_hat, u, lam)
    # The numbers were rounded to float32, relative error 6e-8; a few dozen of them are added.
    size = float(expected.abs().max())
    assert torch.allclose(loaded.correction.apply(eps_hat, u, lam), expected, rtol=0, atol=1e-6 * size)
    one, other = (c.solvers[0].step(1, eps_hat, [u, u.flip(0)]) for c in (saved, loaded))
    assert torch.allclose(one, other, rtol=0, atol=1e-6 * float(one.abs().max()))


def test_support_that_is_whole_needs_no_saying(tmp_path):
    one, other = make(), make()
    one.correction.support, other.correction.support = None, torch.ones_like(other.correction.support)
    one.save(tmp_path / "a")
    assert one.identity == other.identity == trueup.load(tmp_path / "a").identity


def test_empty_correction_stays_empty(tmp_path):
    emptied(make(keep=())).save(tmp_path / "a")
    assert trueup.load(tmp_path / "a").empty


def test_saving_what_was_loaded_writes_the_same_bytes(path, tmp_path):
    trueup.load(path).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


# Identity: what a calibration does


def test_the_identity_is_that_of_the_file(path):
    made, loaded = make(), trueup.load(path)
    assert made.identity == loaded.identity
    assert made.solvers[0].identity == loaded.solvers[0].identity


def test_negative_zeros_are_zeros(tmp_path):
    """A file keeps no bands of zeros, of whatever sign: their identity must not depend on it."""
    made = make(keep=(0,))
    outside = made.correction.b == 0
    assert outside.any()
    made.correction.b[outside] = -0.0
    made.solvers[0].offset[made.solvers[0].offset == 0] = -0.0
    made.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert loaded.identity == made.identity == make(keep=(0,)).identity
    loaded.correction.b[:, 0, 0] = -1e-60  # zero as float32
    loaded.save(tmp_path / "b")
    trueup.load(tmp_path / "b").save(tmp_path / "c")


IDENTIFYING = {
    "b": lambda c: c.correction.b[0, 0].mul_(1.001),
    "a": lambda c: c.correction.a.mul_(1.001),
    "d": lambda c: c.correction.d.mul_(1.001),
    "lam": lambda c: c.correction.lam.mul_(1.001),
    "support": lambda c: c.correction.support.mul_(0.999),
    "rho": lambda c: c.correction.innovation.rho.mul_(1.001),
    "innovation": lambda c: c.correction.innovation.mean.mul_(1.001),
    "changed support": lambda c: c.correction.innovation.support.mul_(0.999),
    "gains": lambda c: setattr(c, "gains", "response"),
    "process": lambda c: c.provenance.update(process=process.VE().settings()),
    "prediction": lambda c: c.provenance.update(parametrization={"name": "velocity"}),
    "binding": lambda c: c.provenance["binding"].update(scale=2.0),
}


@pytest.mark.parametrize("name", IDENTIFYING)
def test_another_correction_has_another_identity(name):
    one, other = make(), make()
    IDENTIFYING[name](other)
    assert one.identity != other.identity


def test_what_changes_nothing_does_not_change_the_identity():
    one, other = make(), make()
    other.evidence.images, other.family, other.data_images = 7, "shift", 9
    other.provenance |= {"seed": 5, "model": "another", "weights": {}}
    assert one.identity == other.identity


SOLVER = {
    "t": lambda v: v * (1 + 1e-12),
    "alpha": lambda v: v * torch.tensor([1 + 1e-12, 1, 1], dtype=torch.float64),
    "sigma": lambda v: v * (1 + 1e-12),
    "weights": lambda v: v * (1 + 1e-12),
    "tables": lambda v: v * (1 + 1e-6),
    "offset": lambda v: v * (1 + 1e-6),
    "guidance": lambda v: 2.0,
    "gains": lambda v: "none",
    "history": lambda v: "eps",
    "bands": lambda v: Bands(v.spatial, [0.6, *v.edges[1:]]),
}


@pytest.mark.parametrize("name", SOLVER)
def test_another_solver_has_another_identity(name):
    """Every field counts, to the last digit that a file keeps."""
    one = make().solvers[0]
    assert replace(one).identity == one.identity
    other = replace(one, **{name: SOLVER[name](getattr(one, name))})
    assert one.identity != other.identity


def test_what_is_said_of_a_solver_does_not_change_its_identity():
    one = make().solvers[0]
    assert replace(one, evidence={}, provenance={}).identity == one.identity


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
    # Two maps of 25 levels x 3072 coefficients x 4 bytes = 307 kB, and the schedule's 1000 numbers as text.
    assert (tmp_path / "a").stat().st_size < 710_000
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
    assert equal(loaded.evidence.loss.value, make().evidence.loss.value)
    assert torch.equal(loaded.t, make().t)


# Saving


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("quota"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("target", [(os, "fsync"), (Path, "replace")])
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
    assert equal(trueup.load(path).evidence.loss.value, make(seed=1).evidence.loss.value)
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

    monkeypatch.setattr(Path, "open", forbid)  # a read-only folder does not stop root
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
    refused(tmp_path, "holds no calibration")


def test_empty_file(tmp_path):
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", "cannot be read")


def test_file_cut_short_at_any_length(path):
    content = path.read_bytes()
    cut = path.with_name("cut")
    for length in (*range(0, len(content), 23), *range(16), *range(len(content) - 16, len(content))):
        cut.write_bytes(content[:length])
        refused(cut, "cannot be read")


def test_file_with_something_appended(path):
    for tail in (b"\0", b" ", b"x" * 1000):
        longer = path.with_name("longer")
        longer.write_bytes(path.read_bytes() + tail)
        refused(longer, "cannot be read")


def test_random_bytes(tmp_path):
    rng = random.Random(0)
    junk = tmp_path / "junk"
    for _ in range(300):
        content = rng.randbytes(rng.randrange(1, 400))
        if rng.random() < 0.7:  # a header length that could be true
            content = rng.randrange(0, len(content) + 9).to_bytes(8, "little") + content
        junk.write_bytes(content)
        refused(junk, "cannot be read")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"Trueup": "{}"}])
def test_other_safetensors_file(tmp_path, metadata):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata)
    refused(tmp_path / "model.safetensors", "is not a file of trueup's")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "null", "{}", "[" * 100_000, "9" * 5000),
        *('{"format": "3"}', '{"format": null}', '{"format": 3.0}', '{"format": [3]}'),
        *('{"format": 3, "images": NaN}', '{"format": 3, "images": -Infinity}'),
    ],
    ids=lambda text: text[:40],
)
def test_unreadable_metadata(path, text):
    save_file({"t": torch.zeros(2)}, path, {"trueup": text})
    refused(path, "read")  # cannot be read, or has unreadable metadata


def test_metadata_without_content(path):
    save_file({"t": torch.zeros(2)}, path, {"trueup": '{"format": 3, "kind": "a calibration"}'})
    refused(path, "checksum does not match")


def test_other_formats_are_refused_with_what_to_do(path):
    refused(resign(path, _set("format", 4)), "has format 4, this trueup reads 3: upgrade trueup")
    for older in (1, 2):
        refused(
            resign(path, _set("format", older)), f"has format {older}, this trueup reads 3: make it again"
        )
    for nonsense in (0, -1, 10**4000):
        refused(resign(path, _set("format", nonsense)), "has unreadable metadata")


def test_other_files_of_ours_are_no_calibrations(path):
    refused(resign(path, _set("kind", "moments")), "holds moments, not a calibration")
    refused(resign(path, _set("kind", "\x1b[2J\nverdict: all fine")), "\\x1b[2J\\nverdict: all fine")


# Damage


def test_no_flipped_bit_passes(path):
    """One bit at a time: every bit of the first bytes, and fifteen hundred anywhere."""
    good = trueup.load(path)
    content = path.read_bytes()
    bits = len(content) * 8
    damaged = path.with_name("damaged")
    rng = random.Random(0)
    passed, said = 0, []
    for bit in (*range(128), *rng.sample(range(128, bits), 1500)):
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


def test_no_damaged_stretch_passes(path):
    content, good = path.read_bytes(), trueup.load(path)
    damaged = path.with_name("damaged")
    rng = random.Random(0)
    for _ in range(300):
        start, stretch = rng.randrange(len(content)), rng.randbytes(rng.randrange(1, 40))
        damaged.write_bytes(content[:start] + stretch + content[start + len(stretch) :])
        try:
            assert same(trueup.load(damaged), good)
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


def _binding(name, value):
    return lambda meta, tensors: meta["provenance"]["binding"].update({name: value})


def _tensor(name, change):
    return lambda meta, tensors: tensors.update({name: change(tensors[name])})


def _at(name, value):
    def change(meta, tensors):
        tensors[name].view(-1)[-1] = value

    return change


def _longer(tensors, levels):
    for name in tensors:
        if not name.startswith(("data_", "solver")):
            tensors[name] = tensors[name][:1].repeat(levels, *[1] * (tensors[name].dim() - 1))


def _entry(name, value):
    return lambda meta, tensors: meta["solvers"][0].update({name: value})


def _again(meta, tensors):
    meta["solvers"] *= 2


def _twice(meta, tensors):
    meta["solvers"] *= 2
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("solver.0")}
    tensors |= {name.replace("solver.0", "solver.1"): tensor.clone() for name, tensor in own.items()}


def _other_solver(**changes):
    """With an identity that is right."""

    def change(meta, tensors):
        own = {name: tensor for name, tensor in tensors.items() if name.startswith("solver.0")}
        made = fitted.unpack(meta["solvers"][0], own, "solver.0", tuple(meta["shape"]))
        how = {name: change(getattr(made, name)) for name, change in changes.items()}
        meta["solvers"][0], held = fitted.pack(replace(made, **how), "solver.0")
        tensors |= held

    return change


def _crossed(meta, tensors):
    tensors["gain.low"], tensors["gain.high"] = tensors["gain.high"] + 1, tensors["gain.low"]


NOT_SAVED = "its correction is not the one that was saved"
VP = {"kind": "continuous_vp", "beta_min": 0.1, "beta_max": 20.0, "t_min": 1e-3, "t_max": 1.0}
SCREEN = "\x1b[2Jfine\nverdict: all fine"
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
    "shape of text": (_set("shape", "144"), "shape is '144', expected a list"),
    "shape is a number": (_set("shape", 16), "shape is '16', expected a list"),
    "shape without end": (_set("shape", [1] * 100_000), "sample shape makes no sense"),
    # bands
    "band missing": (_set("kept_bands", [0]), "b is torch.float32"),
    "other bands kept": (_set("kept_bands", [0, 3]), "b is torch.float32"),
    "bands out of order": (_set("kept_bands", [2, 0]), "kept bands is out of order"),
    "band twice": (_set("kept_bands", [0, 2, 2]), "kept bands is out of order"),
    "band out of range": (_set("kept_bands", [0, 99]), "kept bands makes no sense"),
    "negative band": (_set("kept_bands", [-3, 0]), "kept bands makes no sense"),
    "band is a fraction": (_set("kept_bands", [0.0, 2.0]), "kept bands makes no sense"),
    "bands are text": (_set("kept_bands", "02"), "kept bands makes no sense"),
    "bands are nothing": (_set("kept_bands", None), "kept bands makes no sense"),
    "edges fall": (_set("band_edges", [3.5, 2.5, 1.5, 0.5]), "band edges must rise"),
    "fewer edges": (_set("band_edges", [0.5]), "scale is torch.float32"),
    "other edges, same bands": (_set("band_edges", [0.6, 1.5, 2.5, 3.5]), NOT_SAVED),
    "edges are text": (_set("band_edges", ["0.5", "1.5"]), "band_edges holds 0.5"),
    "edges without end": (
        _set("band_edges", list(range(10_000))),
        "band_edges is no list of 1 to 1000",
    ),
    "edges are missing": (lambda meta, tensors: meta.pop("band_edges"), "band_edges"),
    # levels
    "levels out of order": (_tensor("t", lambda t: t[[0, 2, 1]]), "noise levels are out of order"),
    "level twice": (_tensor("t", lambda t: t[[0, 1, 1]]), "noise levels are out of order"),
    "lam out of order": (_tensor("lam", lambda lam: lam.flip(0)), "noise levels are out of order"),
    "lam elsewhere": (_tensor("lam", lambda lam: lam - 0.01), "do not belong to its noise process"),
    "one level less": (_tensor("t", lambda t: t[:2]), "expected torch.float64 (2,)"),
    "no level": (lambda meta, tensors: _longer(tensors, 0), "0 levels"),
    "level is a number": (_tensor("t", lambda t: t[0]), "t is torch.float64 ()"),
    # the correction
    "b scaled": (_tensor("b", lambda v: 1.01 * v), NOT_SAVED),
    "a swapped with d": (lambda meta, tensors: tensors.update(a=tensors["d"], d=tensors["a"]), NOT_SAVED),
    "a of 1e38": (_at("a", 1e38), "a holds values out of range, -100 to 100"),
    "d of -1e38": (_at("d", -1e38), "d holds values out of range, -100 to 100"),
    "b of 1e30": (_at("b", 1e30), "b holds values out of range, -1e+06 to 1e+06"),
    "support of 2": (_at("support", 2.0), "support holds values out of range, 0 to 1"),
    "support scaled": (_tensor("support", lambda v: 0.9 * v), NOT_SAVED),
    "identity missing": (lambda meta, tensors: meta.pop("identity"), NOT_SAVED),
    # process and parametrization
    "another process": (
        _provenance("process", {"kind": "ve", "sigma_min": 0.002, "sigma_max": 80.0}),
        "do not belong to its noise process",
    ),
    "another schedule": (_provenance("process", {**VP, "beta_max": 19.0}), "do not belong"),
    "longer schedule": (_provenance("process", {**VP, "t_max": 2.0}), NOT_SAVED),
    "infinite schedule": (_provenance("process", {**VP, "beta_max": 1e999}), "cannot be read"),
    "unknown process": (_provenance("process", {"kind": "brownian"}), "unknown noise process"),
    "process of unhashable kind": (_provenance("process", {"kind": []}), "unknown noise process"),
    "impossible process": (_provenance("process", {**VP, "beta_min": -1}), "beta_min"),
    "process with text": (_provenance("process", {**VP, "beta_min": "low"}), "damaged"),
    "process with more": (_provenance("process", {**VP, "gamma": 1}), "damaged"),
    "schedule is an object": (
        _provenance("process", {"kind": "discrete_vp", "alphas_cumprod": {"a": 1}}),
        "damaged",
    ),
    "schedule without end": (
        _provenance(
            "process", {"kind": "discrete_vp", "alphas_cumprod": [1 - k / 2e5 for k in range(1, 150_000)]}
        ),
        "timesteps",
    ),
    "process is text": (_provenance("process", "vp"), "process is 'vp', expected a dict"),
    "process is nothing": (_provenance("process", None), "process is 'None', expected a dict"),
    "no process": (lambda meta, tensors: meta["provenance"].pop("process"), "process"),
    "no provenance": (lambda meta, tensors: meta.pop("provenance"), "provenance"),
    "provenance is a list": (_set("provenance", []), "provenance is '[]', expected a dict"),
    "unknown prediction": (_provenance("parametrization", {"name": "dreams"}), "unknown prediction"),
    "another prediction": (_provenance("parametrization", {"name": "data"}), NOT_SAVED),
    "prediction is text": (
        _provenance("parametrization", "noise"),
        "parametrization is 'noise'",
    ),
    "edm of text": (_provenance("parametrization", {"name": "edm", "sigma_data": "x"}), "damaged"),
    "edm of zero": (_provenance("parametrization", {"name": "edm", "sigma_data": 0.0}), "sigma_data"),
    # where the network's call holds what
    "time elsewhere": (_binding("t", {"position": 2, "name": None}), NOT_SAVED),
    "time in other units": (_binding("scale", 1000.0), NOT_SAVED),
    "time in no units": (_binding("scale", 0.0), "the scale of the network's time is 0"),
    "time in units of text": (_binding("scale", "nan"), "scale holds nan"),
    "offset beyond measure": (_binding("offset", 1e12), "offset holds 1000000000000.0"),
    "x nowhere": (_binding("x", None), "x is 'None', expected a dict"),
    "t nowhere": (_binding("t", {"position": None, "name": None}), "the place of t"),
    "t at -1": (_binding("t", {"position": -1, "name": "t"}), "position is -1"),
    "t by a number": (_binding("t", {"position": 1, "name": 7}), "the place of t"),
    "y in two places": (_binding("y", {"position": 1, "name": "y", "more": 1}), "damaged"),
    "binding is text": (_provenance("binding", "x, t"), "binding is 'x, t', expected a dict"),
    # who it is of
    "weights are a list": (_provenance("weights", ["ab"]), "weights is \"['ab']\", expected a dict"),
    "weights are numbers": (_provenance("weights", {"float32": 7}), "the fingerprint float32 of its weights"),
    "model is a number": (_provenance("model", 3), "the model's name makes no sense"),
    "range of text": (_provenance("data_range", ["a", "b"]), "data_range holds a"),
    "range upside down": (_provenance("data_range", [1.0, -1.0]), "data_range makes no sense"),
    "transform is a list": (_provenance("transform", [1]), "transform is '[1]', expected a dict"),
    "generated is text": (_provenance("generated", "yes"), "generated is 'yes', expected a dict"),
    # numbers
    "images are text": (_set("images", "many"), "images is many"),
    "images are negative": (_set("images", -3), "images is -3"),
    "images are 10**4000": (_set("images", 10**4000), "images is 10000000000000000000, out of range"),
    "images are 2**50": (_set("images", 2**50), "images is 1125899906842624"),
    "folds are a fraction": (_set("folds", 2.5), "folds is 2.5"),
    "folds are true": (_set("folds", True), "folds is True"),
    "folds are 10**9": (_set("folds", 10**9), "folds is 1000000000, expected a whole number from 1 to 1,024"),
    "folds are 10**400": (_set("folds", 10**400), "folds is 10000000000000000000, out of range"),
    "folds are nested": (_set("folds", [[[[[[[[[1]]]]]]]]]), "folds is nested too deeply"),
    "folds are a list": (_set("folds", [16]), "folds is [16]"),
    "data images are nothing": (_set("data_images", None), "data_images is None"),
    "five bounds": (_set("bound_gain", [1.0] * 5), "bound_gain is no list of 4 to 4 numbers"),
    "two ideal bounds": (
        _set("shift_bound_gain", [1.0, 2.0]),
        "shift_bound_gain is no list",
    ),
    "bound is text": (_set("bound_gain", ["x", 1.0, 1.0, 1.0]), "bound_gain holds x"),
    "bound is beyond measure": (
        _set("bound_gain", [1e15, 1.0, 1.0, 1.0]),
        "bound_gain holds 1000000000000000.0",
    ),
    "error is negative": (_set("bound_gain", [1.0, -1.0, 0.0, 2.0]), "bound_gain has an impossible error"),
    "interval is crossed": (_set("bound_gain", [1.0, 1.0, 2.0, 0.0]), "bound_gain has an impossible error"),
    "bound is missing": (lambda meta, tensors: meta.pop("shift_bound_gain"), "shift_bound_gain"),
    "family is a sentence": (_set("family", "all is fine, really"), "family is 'all is fine, really'"),
    "estimator is a list": (_set("estimator", ["shrunk"]), "estimator is"),
    # texts that do something to a terminal
    "family clears the screen": (
        _set("family", SCREEN),
        "family is a text that is too long or not printable",
    ),
    "model clears the screen": (
        _provenance("model", SCREEN),
        "model is a text that is too long or not printable",
    ),
    "model right to left": (_provenance("model", "\u202egnp.exe"), "model is a text"),
    "a name clears the screen": (_provenance(SCREEN, 1), "a name in its metadata is a text"),
    "base clears the screen": (_entry("provenance", {"base": SCREEN}), "base is a text"),
    "evidence clears the screen": (_entry("evidence", {SCREEN: 1.0}), "a name in its metadata is a text"),
    "process clears the screen": (_provenance("process", {"kind": SCREEN}), "kind is a text"),
    "weights clear the screen": (_provenance("weights", {"float32": SCREEN}), "float32 is a text"),
    "model without end": (_provenance("model", "x" * 10**6), "model is a text"),
    # solvers
    "solvers not listed": (_set("solvers", []), "solvers are not those it lists"),
    "solvers are no list": (_set("solvers", {"0": {}}), "solvers is"),
    "solver is a number": (_set("solvers", [3]), "list of solvers makes no sense"),
    "solvers without end": (_set("solvers", [{}] * 200), "list of solvers makes no sense"),
    "solvers missing": (lambda meta, tensors: meta.pop("solvers"), "it lacks solvers"),
    "solver without tensors": (_again, "solvers are not those it lists"),
    "two for the same": (_twice, "two of its solvers are for 2 evaluations (guidance 1.5)"),
    "tensor too many in a solver": (
        lambda meta, tensors: tensors.update({"solver.0.junk": torch.zeros(1)}),
        "'solver.0.junk' is no tensor of",
    ),
    "solver without tables": (lambda meta, tensors: tensors.pop("solver.0.tables"), "lacks solver.0.tables"),
    "solver without times": (lambda meta, tensors: tensors.pop("solver.0.t"), "lacks solver.0.t"),
    "weights of 1e10": (_at("solver.0.weights", 1e10), "solver.0.weights holds values out of range"),
    "tables of 1e7": (_at("solver.0.tables", 1e7), "solver.0.tables holds values out of range"),
    "offset of 1e10": (_at("solver.0.offset", 1e10), "solver.0.offset holds values out of range"),
    "negative level": (_at("solver.0.sigma", -1.0), "solver.0.sigma holds values out of range"),
    "level beyond measure": (_at("solver.0.alpha", 1e7), "solver.0.alpha holds values out of range"),
    "levels of another number": (
        _tensor("solver.0.alpha", lambda v: v[:1]),
        "solver.0.alpha is torch.float64 (1,)",
    ),
    "noise that rises": (_tensor("solver.0.alpha", lambda v: v[[1, 0, 2]]), "does not fall"),
    "times that rise": (_tensor("solver.0.t", lambda v: v.flip(0)), "do not fall"),
    "times of another process": (_other_solver(t=lambda v: v * 999), "asks at times that its noise"),
    "a sample with noise": (_tensor("solver.0.sigma", lambda v: v + 0.1), "is no sample"),
    "offset of another shape": (_tensor("solver.0.offset", lambda v: v[..., :2]), "solver.0.offset is"),
    "offset in half": (_tensor("solver.0.offset", lambda v: v.half()), "solver.0.offset is torch.float16"),
    "weights in single": (
        _tensor("solver.0.weights", lambda v: v.float()),
        "solver.0.weights is torch.float32",
    ),
    **{
        f"solver.0.{name} is not finite": (
            _at(f"solver.0.{name}", math.nan),
            f"solver.0.{name} holds values out",
        )
        for name in ("t", "alpha", "sigma", "weights", "tables", "offset")
    },
    **{
        f"{name} is another": (_tensor(f"solver.0.{name}", change), "solver.0 is not the one that was saved")
        for name, change in (
            ("t", lambda v: v * (1 - 1e-12)),
            ("alpha", lambda v: v * torch.tensor([1 - 1e-12, 1, 1], dtype=torch.float64)),
            ("sigma", lambda v: v * (1 + 1e-12)),
            ("weights", lambda v: v * (1 + 1e-12)),
            ("tables", lambda v: v * (1 + 1e-6)),
            ("offset", lambda v: v * (1 + 1e-6)),
        )
    },
    "another guidance": (_entry("guidance", 2.5), "solver.0 is not the one that was saved"),
    "another history": (_entry("history", "eps"), "solver.0 is not the one that was saved"),
    "history of nothing": (_entry("history", "score"), "a solver remembers eps or x0"),
    "other gains": (_entry("gains", "none"), "solver.0 is not the one that was saved"),
    "gains that nobody has": (
        _other_solver(gains=lambda _: "mine"),
        "gains of solver.0 are 'mine', expected one of least-squares",
    ),
    "no evaluations": (_entry("nfe", 0), "nfe is 0"),
    "evaluations without end": (_entry("nfe", 10**6), "nfe is 1000000"),
    "another number of evaluations": (_entry("nfe", 3), "solver.0.t is torch.float64 (2,)"),
    "guidance is text": (_entry("guidance", "much"), "guidance holds much"),
    "guidance is not finite": (_entry("guidance", 1e999), "cannot be read"),
    "evidence is a list": (_entry("evidence", []), "evidence is '[]', expected a dict"),
    "evidence is text": (_entry("evidence", {"error": "none"}), "error holds none"),
    "evidence beyond measure": (_entry("evidence", {"error": 1e13}), "error holds 1"),
    "base is a number": (_entry("provenance", {"base": 3}), "what solver.0 says of itself makes no sense"),
    "provenance is text": (_entry("provenance", "mine"), "provenance is 'mine', expected a dict"),
    "bands of a solver": (_entry("kept_bands", [0, 99]), "kept bands makes no sense"),
    "edges of a solver": (_entry("band_edges", [0.5]), "kept bands makes no sense"),
    "identity of a solver missing": (_entry("identity", None), "solver.0 is not the one that was saved"),
    # without data
    "measured on nothing": (_set("images", 0), "corrects what was measured on no images"),
    "of no data": (_set("data_images", 0), "corrects what was measured on no images"),
    # tensors
    "tensor missing": (lambda meta, tensors: tensors.pop("d"), "it lacks d"),
    "no time": (lambda meta, tensors: tensors.pop("t"), "it lacks t"),
    "tensor too many": (lambda meta, tensors: tensors.update(extra=torch.zeros(1)), "'extra' is no tensor"),
    "tensor of a strange name": (
        lambda meta, tensors: tensors.update({"\x1b[2J\n": torch.zeros(1)}),
        r"'\x1b[2J\n' is no tensor",
    ),
    "evidence too short": (_tensor("loss.value", lambda v: v[:2]), "loss.value is"),
    "loss is not known": (_at("loss.value", math.nan), "loss.value holds values out of range, 0 to 1e+12"),
    "loss is negative": (_at("loss.value", -1.0), "loss.value holds values out of range, 0 to 1e+12"),
    "error of the loss is negative": (_at("loss.error", -1.0), "loss.error holds values out of range"),
    "gain is infinite": (_at("gain.value", math.inf), "gain.value holds values out of range"),
    "intervals are crossed": (_crossed, "gain has intervals that end below where they begin"),
    "variance is negative": (_at("data_variance", -1.0), "data_variance holds values out of range"),
    "error of the variance is negative": (_at("data_variance_se", -1.0), "data_variance_se holds"),
    "scale of -1": (_at("scale", -1.0), "scale holds values out of range, 0 to 1"),
    "scale of 2": (_at("scale", 2.0), "scale holds values out of range, 0 to 1"),
    "b transposed": (_tensor("b", lambda v: v.movedim(0, -1)), "b is"),
    "b flat": (_tensor("b", lambda v: v.flatten()), "b is"),
    "digests in two dimensions": (_tensor("data_digests", lambda v: v[None]), "data_digests is"),
    **{
        f"{name} holds {value}": (_at(name, value), f"{name} holds values out of range")
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
            ("data_digests", torch.float64),
            ("t", torch.float32),
            ("lam", torch.int64),
            ("gain.value", torch.float32),
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
        tensors["data_mean"] = torch.zeros(1, math.prod(map(len, kept_frequencies((1, 1024, 1024)))))
        tensors["b"] = tensors["b"][..., :0]
        for name in ("a", "d", "scale", "data_variance", "data_variance_se"):
            tensors[name] = tensors[name][..., :1]

    forged = resign(path, change)
    with Largest() as largest:
        refused(forged, "10000 levels")
    assert largest.bytes < 2e7  # the maps of the file itself


def test_what_is_printed_of_a_file_is_printable_line_by_line(path):
    """Texts that could be more are refused (above); what is left can only take its place in a line."""
    forged = resign(path, _provenance("model", "fine: verdict: all fine"))
    loaded = trueup.load(forged)
    lines = loaded.summary().split("\n")
    assert all(text.isprintable() for text in (repr(loaded), *lines))
    assert [text for text in lines if text.startswith("verdict")] == [f"verdict: {loaded.verdict()}"]


def test_control_characters_are_written_as_what_they_are_called(tmp_path):
    """A network described by a file's name, say."""
    made = make()
    made.provenance["model"] = "net\x1b[2J\n"
    made.save(tmp_path / "a")
    assert trueup.load(tmp_path / "a").provenance["model"] == r"net\x1b[2J\n"


def test_artifact_error_is_one_of_ours():
    assert issubclass(ArtifactError, TrueupError)
