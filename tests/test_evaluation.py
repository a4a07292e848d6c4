"""Comparing before and after: on data whose ideal denoiser is known, so that what is better is known too."""

import json
import math

import pytest
import torch

import trueup
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.comparison import Change
from trueup.data import Samples
from trueup.errors import DataError, MismatchError, TrueupError
from trueup.evaluation import build_reference, image_maker
from trueup.metrics import Estimate, ModuleFeatures, Pixels

VP = processes.DiscreteVP.linear()
LEVELS = [0, 50, 150, 300, 500, 700, 850, 950, 999]


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
    return data.denoiser(VP, distortion=off)


@pytest.fixture(scope="module")
def calibration(biased, images):
    return trueup.calibrate(biased, images, images=200, levels=LEVELS)


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


def test_the_loss_is_measured_on_images_the_calibration_has_not_seen(comparison, calibration, biased, images):
    assert comparison.reference["loss_images"] == 200
    assert not comparison.notes
    gain = {level["t"]: level for level in comparison.loss}
    # E|eps_hat - eps|^2 falls by |0.25|^2 over 48 values once the bias is gone.
    for t in (300.0, 700.0):
        assert gain[t]["gain"] == pytest.approx(48 * 0.25**2, rel=0.15)
        assert gain[t]["before"] - gain[t]["after"] == pytest.approx(gain[t]["gain"])
    held = trueup.measure(biased, images[200:400], images=None, levels=[300], seed=1)
    assert gain[300.0]["before"] == pytest.approx(
        float(held.second[:, 0, 0].sum() / held.rows.sum()), rel=1e-6
    )


def test_other_data_is_noticed(biased, calibration, images):
    found = trueup.evaluate(biased, calibration, images.flip(0), samples=40, nfe=[6], features="pixels")
    assert any("cannot tell which images" in note for note in found.notes)
    assert "other images" not in found.table()


def test_bad_images_among_the_held_out_are_skipped_where_asked(biased, calibration, images):
    spoiled = [*images[:240]]
    spoiled[220] = torch.full((3, 4, 4), torch.nan)
    found = trueup.evaluate(
        biased, calibration, spoiled, samples=8, nfe=[4], features="pixels", skip_bad=True
    )
    assert found.reference["loss_images"] == 39


def test_too_few_samples_are_not_called_noise(biased, calibration, images):
    with pytest.raises(TrueupError, match="8 samples or more"):
        trueup.evaluate(biased, calibration, images, samples=6, nfe=4, features="pixels")
    still = torch.zeros(16, dtype=torch.float64)  # a recall that no group of images moves alone
    change = Change.of(Estimate(1.0, still), Estimate(0.875, still), more_is_better=True)
    assert change.better is None
    assert math.isnan(change.difference.low)


def test_another_decoder_is_not_mixed_into_a_run(tmp_path, biased, calibration, images):
    settings = {"samples": 8, "nfe": [4], "features": "pixels", "run": tmp_path}
    trueup.evaluate(biased, calibration, images, **settings)
    with pytest.raises(TrueupError, match="another decoder"):
        trueup.evaluate(biased, calibration, images, decode=torch.tanh, **settings)
    trueup.evaluate(biased, calibration, images, decode=torch.tanh, force=True, **settings)


def test_one_solver_one_number_and_a_function_will_do(biased, calibration, images):
    found = trueup.evaluate(
        biased, calibration, images, solvers="ddim", nfe=4, samples=8, features=lambda x: x.flatten(1)[:, :5]
    )
    assert [(row.solver, row.nfe) for row in found.rows] == [("ddim", 4)]
    assert found.features["dimensions"] == 5


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
    ideal = data.denoiser(VP)
    nothing = trueup.calibrate(ideal, images, images=100, levels=[100, 500, 900])
    assert nothing.empty
    found = trueup.evaluate(ideal, nothing, images, samples=40, nfe=[6], features="pixels")
    assert all(change.better is None for change in found.rows[0].changes.values())
    assert all(change.difference.value == 0 for change in found.rows[0].changes.values())
    assert "within noise" in found.table()
    assert "better" not in found.table().replace("better at", "")


def test_json_is_plain_and_names_everything(comparison):
    plain = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert plain["features"]["name"] == "pixels"
    assert plain["samples"] == 300
    assert plain["seed"] == 0
    assert plain["reference"]["images"] == 600
    assert plain["calibration"]["images"] == 200
    first = plain["rows"][0]["changes"]["frechet"]
    assert first["difference"]["value"] == pytest.approx(first["after"]["value"] - first["before"]["value"])
    assert len(plain["loss"]) == len(LEVELS)


def test_the_table_shows_every_measure_with_its_interval(comparison):
    text = comparison.table()
    for words in (
        "Fréchet distance",
        "precision",
        "recall",
        "colour drift",
        "95% interval",
        "pixels",
        "600 images",
    ):
        assert words in text
    assert "worse at none" in text


def test_few_images_are_warned_about(biased, calibration, images):
    found = trueup.evaluate(biased, calibration, images, samples=20, nfe=[6], features="pixels")
    assert any("fewer than the 48 feature dimensions" in note for note in found.notes)
    assert "note:" in found.table()


def test_an_interrupted_evaluation_goes_on(tmp_path, biased, calibration, images):
    made = []

    class Counting(Pixels):
        def __call__(self, batch):
            made.append(len(batch))
            if len(made) == stop:
                raise KeyboardInterrupt
            return super().__call__(batch)

    settings = {"samples": 24, "nfe": [6], "batch_size": 8}
    reference = build_reference(Samples(images, (3, 4, 4), None), Pixels(), image_maker(biased))
    stop = 0
    whole = trueup.evaluate(biased, calibration, features=Counting(), reference=reference, **settings)
    assert sum(made) == 48
    made.clear()
    stop = 3
    with pytest.raises(KeyboardInterrupt):
        trueup.evaluate(
            biased, calibration, features=Counting(), reference=reference, run=tmp_path, **settings
        )
    made.clear()
    stop = 0
    again = trueup.evaluate(
        biased, calibration, features=Counting(), reference=reference, run=tmp_path, **settings
    )
    assert sum(made) == 48 - 16
    for name, change in whole.rows[0].changes.items():
        assert again.rows[0].changes[name].after.value == pytest.approx(change.after.value, rel=1e-4)


def test_a_saved_reference_stands_in_for_the_data(tmp_path, biased, calibration, images):
    reference = build_reference(Samples(images, (3, 4, 4), None), Pixels(), image_maker(biased))
    reference.save(tmp_path / "r.safetensors")
    settings = {"samples": 40, "nfe": [6], "features": "pixels"}
    from_file = trueup.evaluate(biased, calibration, reference=tmp_path / "r.safetensors", **settings)
    from_data = trueup.evaluate(biased, calibration, images, **settings)
    assert from_file.loss == []
    assert from_file.reference["fingerprint"] == from_data.reference["fingerprint"]
    for name, change in from_data.rows[0].changes.items():
        assert from_file.rows[0].changes[name].after.value == pytest.approx(change.after.value)
    other = ModuleFeatures(torch.nn.Flatten(), "mine")
    with pytest.raises(MismatchError, match="pixels"):
        trueup.evaluate(biased, calibration, reference=reference, samples=40, nfe=[6], features=other)


def test_without_data_or_reference_there_is_nothing_to_compare_with(biased, calibration):
    with pytest.raises(DataError, match="needs data"):
        trueup.evaluate(biased, calibration, features="pixels")


def test_latents_are_decoded_before_features_are_taken(biased, calibration, images):
    """A decoder that maps latents to 8x8 pictures: features and colours are those of the pictures."""

    def decode(x):
        return torch.nn.functional.interpolate(x.clamp(-1, 1), scale_factor=2)

    found = trueup.evaluate(
        biased, calibration, images, samples=40, nfe=[6], features="pixels", decode=decode
    )
    assert found.features["dimensions"] == 3 * 8 * 8
    assert all(0 <= v <= 255 for v in found.reference["mean_colour"])
    assert max(found.reference["mean_colour"]) > 10


def test_more_is_better_only_where_it_is():
    n = 40
    little = 1e-3 * torch.arange(n).double() - 1e-3 * (n - 1) / 2
    low, high = (Estimate(v, s * little) for v, s in ((1.0, 1), (2.0, 2)))
    noisy = Estimate(2.0, 50 * (-1.0) ** (torch.arange(n) // 2).double())
    assert Change.of(low, high, more_is_better=True).better is True
    assert Change.of(low, high, more_is_better=False).better is False
    assert Change.of(low, noisy, more_is_better=False).better is None
    unknown = Change.of(Estimate(1.0), Estimate(2.0), more_is_better=True)
    assert unknown.better is None
    assert math.isnan(unknown.difference.low)
