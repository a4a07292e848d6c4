"""Comparing before and after: on data whose ideal denoiser is known, so that what is better is known too."""

import json
import math

import numpy as np
import pytest
import torch

import trueup
from trueup import Images
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.calibration.hook import CorrectOutput
from trueup.comparison import Change, _loss_line
from trueup.density import Objectives, objectives
from trueup.errors import DataError, MismatchError, ModelError, TrueupError
from trueup.estimate import default_levels
from trueup.evaluation import build_reference
from trueup.metrics import MEASURES, ModuleFeatures, Pixels, measure
from trueup.sampling import generate
from trueup.statistics import Number

VP = processes.DiscreteVP.linear()
LEVELS = sorted({*default_levels(VP).tolist(), 300.0, 700.0})


def off(eps, u, lam):
    return 0 * eps + 0.25


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(4, 3, 4, 4, generator=generator)
    return GaussianMixture(means, 0.3)


@pytest.fixture(scope="module")
def images(data):
    return data.sample(600, seed=2)


@pytest.fixture(scope="module")
def biased(data):
    return data.denoiser(VP, distortion=off).with_batch_size(200)


@pytest.fixture(scope="module")
def calibration(biased, images):
    return trueup.calibrate(biased, Images(images, count=200), levels=LEVELS, progress=False)


@pytest.fixture(scope="module")
def comparison(biased, calibration, images):
    return trueup.evaluate(
        biased,
        calibration,
        images,
        solvers=["dpm-solver-2", "ddim"],
        nfe=[10, 20],
        samples=300,
        features="pixels",
        progress=False,
    )


def test_a_calibration_that_helps_is_said_to_help(comparison):
    assert [(row.solver, row.nfe) for row in comparison.rows] == [
        ("dpm-solver-2", 10),
        ("dpm-solver-2", 20),
        ("ddim", 10),
        ("ddim", 20),
    ]
    for row in comparison.rows:
        for name in ("frechet", "kernel", "colour"):
            change = row.changes[name]
            assert change.better is True, (row.solver, name)
            assert change.difference.high < 0
            assert change.before.value > change.after.value
        assert row.evaluations == row.nfe
        drift = [
            max(
                abs(a - b)
                for a, b in zip(row.mean_colour[w], comparison.reference["mean_colour"], strict=True)
            )
            for w in ("before", "after")
        ]
        assert drift[1] < 0.3 * drift[0]


def test_the_loss_is_that_of_the_network_on_images_the_calibration_has_not_seen(
    comparison, calibration, biased, images
):
    loss = comparison.loss
    assert loss.before.shape == (200, len(LEVELS))
    assert loss.held_out
    assert comparison.notes[-1] == "200 images made the calibration and are passed over"
    # E|eps_hat - eps|^2 falls by |0.25|^2 over 48 values once the bias is gone.
    for t in (300.0, 700.0):
        drop = Number.mean(loss.losses("drop")[:, LEVELS.index(t)])
        assert drop.value == pytest.approx(48 * 0.25**2, rel=0.15)
    alone = objectives(biased, Images(images, count=200), calibration, levels=LEVELS, progress=False)
    assert torch.equal(alone.before, loss.before)
    assert torch.equal(alone.after, loss.after)
    # and the network that is corrected by hand has the loss that was found
    at = LEVELS.index(300.0)
    with trueup.attach(biased, calibration):
        by_hand = loss_of(biased, images, 300.0)
    bare = loss_of(biased, images, 300.0)
    assert float(loss.before[:, at].mean()) == pytest.approx(bare, rel=0.05)  # other images, other noise
    assert float(loss.after[:, at].mean()) == pytest.approx(by_hand, rel=0.1)


def loss_of(denoiser, x0, t):
    """The denoising loss as anyone would write it."""
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(5))
    alpha, sigma = (float(f(t)) for f in (VP.alpha, VP.sigma))
    output = denoiser(alpha * x0 + sigma * eps, torch.full((len(x0),), t))
    return float((output - eps).square().flatten(1).sum(1).mean())


def test_a_correction_at_the_wrong_level_is_seen_in_the_loss(data, images, monkeypatch):
    """Item 6: the loss came from moments, and printed a gain whatever the attached hook did."""

    def late(eps, u, lam):
        return 0.5 * torch.sigmoid(-2 * lam) + 0 * eps

    net = data.denoiser(VP, distortion=late).with_batch_size(200)
    made = trueup.calibrate(net, Images(images, count=200), levels=LEVELS, trust=True, progress=False)
    settings = {"samples": 8, "nfe": 4, "features": "pixels", "progress": False}
    right = trueup.evaluate(net, made, images, **settings)
    assert "WORSE" not in right.table().splitlines()[-4]
    correct = CorrectOutput.correct

    def reversed_time(self, output, x_t, t, y=None):
        return correct(self, output, x_t, 999 - t, y)

    monkeypatch.setattr(CorrectOutput, "correct", reversed_time)
    wrong = trueup.evaluate(net, made, images, **settings)
    assert torch.equal(wrong.loss.before, right.loss.before)
    drop = Number.mean(wrong.loss.losses("drop").sum(1))
    assert drop.sign < 0
    line = next(line for line in wrong.table().splitlines() if line.startswith("denoising loss"))
    assert line.split(";")[0].endswith("WORSE")
    assert "WORSE at t = " in line


def test_the_loss_can_be_left_out_and_what_was_run_is_said(biased, calibration, images, comparison):
    found = trueup.evaluate(
        biased, calibration, images, solvers="ddim", nfe=4, samples=8, features="pixels", loss=False
    )
    assert found.loss is None
    assert found.evaluations == {"samples by ddim-4": 2 * 8 * 4}
    assert "64 for samples by ddim-4" in found.table()
    assert "denoising loss" not in found.table()
    assert comparison.evaluations["the denoising loss"] == 2 * 200 * len(LEVELS)


def test_the_model_is_left_as_it_was(biased, calibration, images):
    trueup.evaluate(biased, calibration, images, samples=8, nfe=4, features="pixels", progress=False)
    assert not biased.corrected


def test_images_that_all_made_the_calibration_are_not_called_other_ones(biased, images):
    few = images[:60]
    made = trueup.calibrate(biased, few, levels=LEVELS, progress=False)
    found = trueup.evaluate(biased, made, few, samples=8, nfe=[4], features="pixels", progress=False)
    assert any("made from these very images" in note for note in found.notes)
    assert not found.loss.held_out
    assert "other images" not in found.table()
    other = trueup.evaluate(biased, made, images, samples=8, nfe=[4], features="pixels", progress=False)
    assert "other images" in other.table()


def test_a_stream_has_no_loss(biased, calibration, images):
    found = trueup.evaluate(
        biased, calibration, iter(images[:50]), samples=8, nfe=4, features="pixels", progress=False
    )
    assert found.loss is None
    assert any("read once" in note for note in found.notes)
    assert found.reference["images"] == 50


def test_bad_images_among_the_held_out_are_skipped_where_asked(biased, images):
    spoiled = [*images[:240]]
    spoiled[220] = torch.full((3, 4, 4), torch.nan)
    made = trueup.calibrate(biased, images[:200], levels=LEVELS, progress=False)
    found = trueup.evaluate(
        biased, made, Images(spoiled, skip_bad=True), samples=8, nfe=[4], features="pixels", progress=False
    )
    assert len(found.loss.before) == 39


def test_too_few_samples_are_not_called_noise(biased, calibration, images):
    with pytest.raises(TrueupError, match="8 samples or more"):
        trueup.evaluate(biased, calibration, images, samples=6, nfe=4, features="pixels")
    still = torch.zeros(16, dtype=torch.float64)  # a recall that no group of images moves alone
    change = Change(Number.influenced(1.0, still), Number.influenced(0.875, still), more_is_better=True)
    assert change.better is None
    assert math.isnan(change.difference.low)


def test_one_solver_one_number_and_a_function_will_do(biased, calibration, images):
    found = trueup.evaluate(
        biased, calibration, images, solvers="ddim", nfe=4, samples=8, features=lambda x: x.flatten(1)[:, :5]
    )
    assert [(row.solver, row.nfe) for row in found.rows] == [("ddim", 4)]
    assert found.features["dimensions"] == 5


def test_a_fitted_solver_is_compared_with_usual_ones_on_the_network_as_it_is(
    biased, calibration, images, tmp_path, monkeypatch
):
    """Fitted to the corrected network, it would make the uncorrected one look worse than it is."""
    fitted = trueup.fit_solver(biased, calibration, nfe=[2, 5], trajectories=32, progress=False)
    how = {"samples": 40, "features": "pixels", "loss": False, "progress": False}
    solvers = ["fitted", "ddim", "dpm-solver-2"]
    found = trueup.evaluate(biased, fitted, images, solvers=solvers, nfe=np.array([5]), **how)
    own, *usual = found.rows
    assert [row.solver for row in found.rows] == solvers
    best = min(usual, key=lambda row: row.changes["frechet"].before.value)
    assert own.uncalibrated == best.solver
    assert [row.uncalibrated for row in usual] == [None, None]
    for name, change in own.changes.items():
        assert change.before.value == best.changes[name].before.value
    assert own.mean_colour["before"] == best.mean_colour["before"]
    assert own.changes["frechet"].better
    assert found.evaluations["samples by fitted-5"] == 40 * 5  # its other side was drawn already
    assert f"fitted, 5 evaluations, 40 samples, seed 0; uncalibrated by {best.solver}" in found.table()
    assert "made for the calibrated network" in found.notes[-1]
    alone = trueup.evaluate(biased, fitted, images, solvers="fitted", nfe=[2, 5], run=tmp_path, **how)
    assert [row.uncalibrated for row in alone.rows] == ["unipc", "unipc"]
    assert alone.evaluations["samples by unipc-5"] == 40 * 5
    assert {path.name for path in tmp_path.iterdir()} == {
        "unipc-2-uncalibrated",
        "unipc-5-uncalibrated",
        "fitted-2-calibrated",
        "fitted-5-calibrated",
    }
    plain = trueup.evaluate(biased, fitted, images, solvers="unipc", nfe=5, **how)
    before = [rows[-1].changes["frechet"].before.value for rows in (alone.rows, plain.rows)]
    assert before[0] == before[1]
    monkeypatch.setattr("trueup.evaluation.solvers_for", lambda denoiser: ["dpm-solver-1", "dpm-solver-3"])
    without = trueup.evaluate(biased, fitted, images, solvers="fitted", nfe=[2, 5], **how)
    assert [row.uncalibrated for row in without.rows] == ["dpm-solver-1", "dpm-solver-3"]


def test_an_adaptive_solver_is_one_row(biased, calibration, images):
    found = trueup.evaluate(
        biased,
        calibration,
        images,
        solvers=["dpm-solver-2-adaptive"],
        nfe=[4, 5],
        samples=8,
        features="pixels",
    )
    assert [(row.nfe, row.evaluations) for row in found.rows] == [(None, None)]


def test_doing_nothing_is_within_noise(data, images):
    """An ideal network's calibration is empty, so before and after are the same samples."""
    ideal = data.denoiser(VP).with_batch_size(100)
    nothing = trueup.calibrate(ideal, Images(images, count=100), levels=[100, 500, 900], progress=False)
    assert nothing.empty
    found = trueup.evaluate(ideal, nothing, images, samples=40, nfe=[6], features="pixels")
    assert all(change.better is None for change in found.rows[0].changes.values())
    assert all(change.difference.value == 0 for change in found.rows[0].changes.values())
    assert found.table().count("none") >= 6
    assert "better" not in found.table()


def test_json_is_plain_and_names_everything(comparison):
    plain = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert plain["features"]["name"] == "pixels"
    assert plain["samples"] == 300
    assert plain["seed"] == 0
    assert plain["reference"]["images"] == 600
    assert plain["calibration"]["images"] == 200
    first = plain["rows"][0]["changes"]["frechet"]
    assert first["difference"]["value"] == pytest.approx(first["after"]["value"] - first["before"]["value"])
    assert len(plain["loss"]["levels"]) == len(LEVELS)
    assert plain["loss"]["levels"][-3]["drop"]["low"] > 0


def test_the_table_shows_every_measure_with_its_interval(comparison):
    text = comparison.table()
    for words in (
        "Fréchet distance",
        "precision",
        "recall",
        "colour drift",
        "95% interval",
        "pixels",
        "600 samples as they are",
    ):
        assert words in text
    assert "worse at none" in text


def test_few_images_are_warned_about(biased, calibration, images):
    found = trueup.evaluate(biased, calibration, images, samples=20, nfe=[6], features="pixels")
    assert any("no more than the 48 feature dimensions" in note for note in found.notes)
    assert "note:" in found.table()


def test_an_interrupted_evaluation_goes_on(tmp_path, biased, calibration, images):
    made = []

    class Counting(Pixels):
        def __call__(self, batch):
            made.append(len(batch))
            if len(made) == stop:
                raise KeyboardInterrupt
            return super().__call__(batch)

    biased = biased.with_batch_size(8)
    settings = {"samples": 24, "nfe": [6], "progress": False}
    reference = build_reference(images, biased, Pixels(), progress=False)
    stop = 0
    whole = trueup.evaluate(biased, calibration, reference, features=Counting(), **settings)
    assert sum(made) == 48
    made.clear()
    stop = 3
    with pytest.raises(KeyboardInterrupt):
        trueup.evaluate(biased, calibration, reference, features=Counting(), run=tmp_path, **settings)
    made.clear()
    stop = 0
    again = trueup.evaluate(biased, calibration, reference, features=Counting(), run=tmp_path, **settings)
    assert sum(made) == 48 - 16
    for name, change in whole.rows[0].changes.items():
        assert again.rows[0].changes[name].after.value == pytest.approx(change.after.value, rel=1e-4)


def test_a_saved_reference_stands_in_for_the_data(tmp_path, biased, calibration, images):
    reference = build_reference(images, biased, Pixels(), progress=False)
    reference.save(tmp_path / "r.safetensors")
    settings = {"samples": 40, "nfe": [6], "features": "pixels", "progress": False}
    from_file = trueup.evaluate(biased, calibration, tmp_path / "r.safetensors", **settings)
    from_data = trueup.evaluate(biased, calibration, images, **settings)
    assert from_file.loss is None
    assert from_file.reference == from_data.reference
    for name, change in from_data.rows[0].changes.items():
        assert from_file.rows[0].changes[name].after.value == pytest.approx(change.after.value)
    other = ModuleFeatures(torch.nn.Flatten(), "mine")
    with pytest.raises(MismatchError, match="pixels"):
        trueup.evaluate(biased, calibration, reference, samples=40, nfe=[6], features=other)


def test_without_images_there_is_nothing_to_compare_with(biased, calibration):
    with pytest.raises(DataError, match="cannot read images"):
        trueup.evaluate(biased, calibration, None, features="pixels")


class Doubling:
    """An autoencoder of latents (3, 4, 4) and pictures (3, 8, 8), which darkens what it decodes."""

    identity: dict[str, str] = {}  # noqa: RUF012

    def picture_shape(self, latent):
        return (latent[0], *(2 * n for n in latent[1:]))

    def encode(self, pictures):
        return torch.nn.functional.avg_pool2d(pictures, 2)

    def decode(self, latents):
        return torch.nn.functional.interpolate(0.5 * latents.clamp(-1, 1) - 0.5, scale_factor=2)


@pytest.fixture(scope="module")
def latent(biased, calibration):
    """The network as one of latents; what made its calibration does not matter."""
    from copy import copy

    net = copy(biased)
    net.autoencoder = Doubling()
    return net


def test_samples_of_a_latent_model_are_compared_with_the_pictures_of_the_data(latent, calibration, images):
    """Item 11: they were compared with decoded latents of the data: that hid what a decoder does to both."""
    pictures = torch.nn.functional.interpolate(images.clamp(-1, 1), scale_factor=2)
    pictures = pictures.add(1).mul(127.5).round().to(torch.uint8)
    settings = {"samples": 8, "nfe": [6], "features": "pixels", "progress": False}
    found = trueup.evaluate(latent, calibration, pictures, **settings)
    assert found.features["dimensions"] == 3 * 8 * 8
    assert found.reference["made_of"] == "pictures"
    mean = pictures.double().mean((0, 2, 3)).tolist()
    assert found.reference["mean_colour"] == pytest.approx(mean)  # as they are, not darkened
    assert found.rows[0].mean_colour["after"][0] < 0.7 * mean[0]
    assert found.loss.before.shape == (200, len(LEVELS))  # of what is encoded from them
    assert not any("latents" in note for note in found.notes)
    from_latents = trueup.evaluate(latent, calibration, images, **settings)
    assert from_latents.reference["made_of"] == "decoded latents"
    assert from_latents.reference["mean_colour"][0] < 0.7 * mean[0]
    assert any("the data holds latents" in note for note in from_latents.notes)
    assert "600 decoded latents" in from_latents.table()


def test_another_decoder_is_not_mixed_into_a_run(tmp_path, biased, latent, calibration, images):
    settings = {"samples": 8, "nfe": [4], "features": "pixels", "run": tmp_path, "progress": False}
    trueup.evaluate(biased, calibration, images, loss=False, **settings)
    with pytest.raises(TrueupError, match="another decoder"):
        trueup.evaluate(latent, calibration, images, loss=False, **settings)
    trueup.evaluate(latent, calibration, images, loss=False, force=True, **settings)


def test_a_measure_of_ones_own_is_in_table_and_json(biased, calibration, images):
    try:

        @measure("largest", "largest value", more_is_better=False)
        def largest(generated, reference):
            values = generated.pooled.double().amax(1)
            return Number.influenced(float(values.mean()), values - values.mean())

        found = trueup.evaluate(
            biased, calibration, images, samples=40, nfe=6, features="pixels", loss=False, progress=False
        )
        assert "largest value" in found.table()
        assert found.as_json()["rows"][0]["changes"]["largest"]["better"] in (True, False, None)
    finally:
        MEASURES.pop("largest", None)


def test_more_is_better_only_where_it_is():
    n = 40
    little = 1e-3 * torch.arange(n).double() - 1e-3 * (n - 1) / 2
    low, high = (Number.influenced(v, s * little) for v, s in ((1.0, 1), (2.0, 2)))
    noisy = Number.influenced(2.0, 50 * (-1.0) ** (torch.arange(n) // 2).double())
    assert Change(low, high, more_is_better=True).better is True
    assert Change(low, high, more_is_better=False).better is False
    assert Change(low, noisy, more_is_better=False).better is None
    unknown = Change(Number(1.0), Number(2.0), more_is_better=True)
    assert unknown.better is None
    assert math.isnan(unknown.difference.low)


def test_a_model_that_carries_a_calibration_is_not_taken_for_the_bare_one(
    biased, calibration, images, tmp_path
):
    how = {"nfe": 4, "progress": False}
    with trueup.attach(biased, calibration):
        for work in (
            lambda: trueup.evaluate(
                biased, calibration, images, samples=8, features="pixels", run=tmp_path / "run", **how
            ),
            lambda: generate(biased, 8, folder=tmp_path / "run", **how),
        ):
            with pytest.raises(ModelError, match="a calibration is attached"):
                work()
    assert not (tmp_path / "run").exists()


def test_levels_are_called_worse_only_where_all_of_them_together_would_hardly_be():
    """At 95% each, one of 25 levels that did not change is called worse in half of all comparisons."""
    t, called = torch.linspace(0, 999, 25).double(), 0
    for repeat in range(200):
        noise = torch.randn(2, 60, 25, generator=torch.Generator().manual_seed(repeat)).double()
        loss = Objectives(VP, t, 48, before=10 + noise[0], after=10 + noise[1], predicted=0 * noise[0])
        called += "WORSE at" in _loss_line(loss)
    assert called <= 12  # 2.5% of 200 are 5
    worse = Objectives(VP, t, 48, before=noise[0], after=noise[1] + 2 * (t == t[3]), predicted=0 * noise[0])
    assert _loss_line(worse).endswith(f"WORSE at t = {float(t[3]):g}")
