"""Thousands of run directories that somebody changed and signed again: refused in a line, or harmless."""

import json
import random
import shutil

import pytest
import torch

import trueup
from trueup import files
from trueup.analytic import GaussianMixture
from trueup.errors import TrueupError
from trueup.estimate import fit, measure
from trueup.estimate.stored import SUMS
from trueup.fitting.kept import Kept as KeptFit
from trueup.fitting.teacher import Teacher
from trueup.images import Images
from trueup.noise import normal
from trueup.sampling import store

from forged import content, sign
from mutations import change_values, check_line, mutated, quickly

PROCESS = trueup.process.ContinuousVP()
MEANS = torch.randn(3, 1, 3, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
MIXTURE = GaussianMixture(MEANS, std=0.5)
X0 = MIXTURE.sample(44).float()
EMBEDDINGS = torch.randn(44, 3, generator=torch.Generator().manual_seed(8))
WAYS_OUT = ("delete", "use a new run directory", "name another")
# What the images come with, how they are measured, how many are there and how many in the end.
RUNS = {
    "plain": ({}, {}, 12, 16),
    "groups": ({"groups": [i // 2 for i in range(44)]}, {}, 12, 16),
    "classes": ({"labels": [i % 2 for i in range(44)]}, {"classes": (0, 1)}, 12, 16),
    "embeddings": ({"labels": EMBEDDINGS}, {"per_embedding": True}, 40, 44),
}


def denoiser(conditional=False):
    exact = MIXTURE.denoiser(PROCESS)

    def network(x_t, t, y=None):
        return 1.1 * exact(x_t, t) + 0.05 * (
            1 if y is None else y.reshape(len(y), -1).sum(1)[:, None, None, None]
        )

    call = network if conditional else lambda x_t, t: network(x_t, t)
    return trueup.Denoiser(
        call, PROCESS, "noise", MIXTURE.shape, data_range=None, conditional=conditional, batch_size=4
    )


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    monkeypatch.setattr(files.os, "fsync", lambda _: None)  # none is tried here


def outcome(work, *args):
    """What comes of it, None where it is refused: in a line that says how to go on."""
    try:
        return quickly(work, *args)
    except TrueupError as error:
        check_line(error)
        said = str(error)
    assert any(way in said for way in WAYS_OUT), said
    return None


def forge(path, good, dice):
    """Whether a changed file could be written at all."""
    try:
        sign(path, *mutated(good, dice))
    except Exception:  # what JSON or safetensors do not write
        return False
    return True


@pytest.mark.parametrize("kind", RUNS)
def test_no_checkpoint_is_gone_on_from_that_is_not_of_its_samples(kind, tmp_path):
    images, settings, few, all_of_them = RUNS[kind]

    def run(count):
        given = Images(X0, count=count, **images)
        own = {"levels": [0.2, 0.6], "trust": True, "progress": False, "run": tmp_path, **settings}
        return measure(denoiser("labels" in images), given, **own)

    run(few)
    file = tmp_path / "checkpoint.safetensors"
    meta, tensors = content(file)
    good, dice, whole, taken = (json.dumps(meta), tensors), random.Random(0), run(all_of_them), []
    for _ in range(350):
        if forge(file, good, dice):
            made = outcome(run, all_of_them)
            taken += [] if made is None else [made]
    assert 5 < len(taken) < 60
    for made in taken:
        for name in ("indices", "digests", "t", "rows", "squares", "data_rows"):
            assert torch.equal(getattr(made, name), getattr(whole, name)), name
        for name in SUMS:  # which other sums confirm, to a thousandth
            size = float(getattr(whole, name).abs().max())
            assert torch.allclose(getattr(made, name), getattr(whole, name), rtol=0, atol=2e-3 * size)
        assert (made.skipped, made.mean_only, made.classes) == ([], 0, whole.classes)
        assert json.dumps(made.provenance) == json.dumps(whole.provenance)  # 0 is not False
    fit(taken[0])


def likelihood(folder, count):
    found = trueup.likelihood(denoiser(), Images(X0[:count]), run=folder, trust=True, draws=2, progress=False)
    return {"index": torch.tensor(found.index), **{name: pair[0] for name, pair in found.terms.items()}}


def samples(folder, count):
    kept = store.Kept(folder, {"model": "net", "seed": 0})
    while kept.done < count:
        index = torch.arange(kept.done, min(kept.done + 4, count))
        kept.add(index, images=index[:, None, None, None].expand(-1, 1, 3, 4).to(torch.uint8))
    try:
        return kept.tensors(count, "images")
    finally:
        kept._lock.release()


@pytest.mark.parametrize("before", [4, 8])
@pytest.mark.parametrize("go", [likelihood, samples])
def test_parts_of_samples_and_likelihoods_are_of_their_form_or_refused(go, before, tmp_path):
    """Nobody can tell a pixel that was drawn from another; but how many, of what, and of which images."""
    good = tmp_path / "good"
    go(good, before)
    shutil.copytree(good, tmp_path / "kept")
    whole, dice, work = go(good, before), random.Random(before), tmp_path / "work"
    parts = {p.name: content(p) for p in sorted((tmp_path / "kept").glob("*.safetensors"))}
    note, taken = (tmp_path / "kept" / store.NOTE).read_text(), 0
    for _ in range(200):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", work)
        if dice.random() < 0.3:
            said = json.loads(note)
            change_values(said, dice)
            said["checksum"] = store._checksum(said.get("settings"), said.get("files"))
            (work / store.NOTE).write_text(json.dumps(said))
        else:
            name = dice.choice(sorted(parts))
            meta, tensors = parts[name]
            if not forge(work / name, (json.dumps(meta), tensors), dice):
                continue
        made = outcome(go, work, before)
        if made is not None:
            taken += 1
            form = {name: (value.dtype, value.shape) for name, value in made.items()}
            assert len(parts) == 1 or form == {n: (v.dtype, v.shape) for n, v in whole.items()}
            assert "index" not in made or torch.equal(made["index"], whole["index"])
    assert taken > 5


def test_trajectories_are_from_the_noise_that_is_drawn_or_made_again(tmp_path):
    noise = normal(3, torch.arange(6), -1, (1, 3, 4), torch.device("cpu"))
    lam = torch.linspace(-3, 3, 5, dtype=torch.float64)
    dice, taken = random.Random(0), 0
    with KeptFit(tmp_path, {"seed": 3}) as kept:
        kept.keep_teacher(Teacher(noise, lam, [noise * k for k in range(5)], noise + 1))
        file = next(tmp_path.glob("*.safetensors"))
        meta, tensors = content(file)
        for _ in range(1000):
            if not forge(file, (json.dumps(meta), tensors), dice):
                continue
            made = quickly(kept.teacher, noise)
            if made is not None:
                taken += 1
                assert torch.allclose(made.noise, noise, atol=1e-4)
                assert made.lam.dtype == torch.float64
                assert (made.lam.diff() > 0).all()
                parts = [made.samples, *made.states]
                assert all(x.shape == noise.shape and x.dtype == noise.dtype for x in parts)
                assert all(torch.isfinite(x).all() for x in parts)
                made.at(0.5)
    assert taken > 5
