"""Measures against torchmetrics, prdc, scipy and closed forms; intervals against repeated draws."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from prdc import compute_prdc
from scipy.stats import wasserstein_distance
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore as TheirScore
from torchmetrics.image.kid import KernelInceptionDistance

from trueup.errors import DataError, TrueupError
from trueup.metrics import (
    MEASURES,
    FeatureBatch,
    GaussianStatistics,
    Pixels,
    Reference,
    colours,
    frechet,
    frechet_distance,
    inception_score,
    kernel_distance,
    measure,
    measures,
    precision,
    recall,
    wasserstein,
)
from trueup.statistics import Number, group_index


class Flat(nn.Module):
    """What torchmetrics calls an Inception network: here the values themselves."""

    num_features = 12

    def forward(self, x):
        return x.flatten(1)


def draw(n, d, seed, scale=1.0, shift=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=dtype) / d**0.5
    return torch.randn(n, d, generator=generator, dtype=dtype) @ mix * scale + shift


def statistics(rows):
    return GaussianStatistics().update(rows)


def distance(a, b):
    return frechet_distance(a.mean, a.covariance, b.mean, b.covariance)


def images(rows):
    return rows.reshape(len(rows), 3, 2, 2)


# Fréchet distance


def test_frechet_of_commuting_gaussians_has_a_closed_form():
    a, b = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([4.0, 1.0, 0.0])
    expected = 9 + (a.sqrt() - b.sqrt()).square().sum()
    found = frechet_distance(torch.zeros(3), a.diag(), torch.tensor([0.0, 3.0, 0.0]), b.diag())
    assert found == pytest.approx(float(expected), rel=1e-12)


def test_frechet_agrees_with_torchmetrics():
    a, b = draw(300, 12, 0).float(), draw(200, 12, 1, 1.3, 0.4).float()
    theirs = FrechetInceptionDistance(feature=Flat()).set_dtype(torch.float64)
    theirs.update(images(a), real=True)
    theirs.update(images(b), real=False)
    found = frechet(b, statistics(a))
    assert found.value == pytest.approx(float(theirs.compute()), rel=1e-6)
    assert found.value == pytest.approx(distance(statistics(a), statistics(b)), rel=1e-12)


@pytest.mark.parametrize("n", [100, 20])
def test_frechet_agrees_with_the_matrix_root(n):
    a, b = statistics(draw(n, 30, 2)), statistics(draw(n, 30, 3, 1.5, 0.2))
    root = scipy.linalg.sqrtm((a.covariance @ b.covariance).numpy()).real
    expected = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance).trace() - 2 * np.trace(root)
    # Of singular covariances each null direction is known to the root of rounding only.
    assert distance(a, b) == pytest.approx(float(expected), rel=1e-10 if n > 30 else 1e-6)
    assert distance(a, b) == pytest.approx(distance(b, a), rel=1e-10 if n > 30 else 1e-6)


def test_frechet_from_itself_is_zero():
    a = statistics(draw(50, 8, 0))
    assert distance(a, a) == pytest.approx(0, abs=1e-12)


def test_frechet_between_points_is_the_squared_distance_of_means():
    zero = torch.zeros(3, 3)
    assert frechet_distance(torch.zeros(3), zero, torch.ones(3), zero) == 3
    assert frechet_distance(torch.zeros(3), zero, torch.ones(3), torch.eye(3)) == pytest.approx(6)


def test_statistics_are_those_of_numpy_whatever_the_batches():
    rows = draw(1000, 5, 4) * 1e-3 + 1e5  # raw second moments lose these variances
    streamed = GaussianStatistics()
    for part in rows.split([1, 400, 7, 592]):
        streamed.update(part)
    merged = statistics(rows[:300]).merge(statistics(rows[300:])).merge(GaussianStatistics())
    expected = torch.from_numpy(np.cov((rows - 1e5).numpy().T))
    for found in (streamed, merged, statistics(rows)):
        assert found.count == 1000
        torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-14, atol=0)
        torch.testing.assert_close(found.covariance, expected, rtol=1e-8, atol=1e-14)  # 1e5 has 1e-11


def test_merging_leaves_the_other_as_it_was():
    a, b = statistics(draw(20, 3, 0)), statistics(draw(20, 3, 1))
    before = b.covariance.clone()
    GaussianStatistics().merge(b).merge(a)
    assert torch.equal(b.covariance, before)


@pytest.mark.parametrize(("n", "d", "m"), [(30, 8, 90), (8, 8, 90), (6, 10, 90), (6, 10, 7)])
def test_frechet_influence_is_the_exact_jackknife(n, d, m):
    """Whether or not the covariances are singular."""
    rows, reference = draw(n, d, 5, 1.2, 0.3), statistics(draw(m, d, 6))
    left_out = [distance(statistics(torch.cat([rows[:i], rows[i + 1 :]])), reference) for i in range(n)]
    expected = -(n - 1) * torch.tensor(left_out, dtype=torch.float64)
    found = frechet(rows, reference).influence
    scale = float(expected.std())
    torch.testing.assert_close(found, expected - expected.mean(), rtol=1e-5, atol=1e-5 * scale)


# The other measures


def test_inception_score_agrees_with_torchmetrics(monkeypatch):
    logits = draw(200, 12, 7, 3.0).float()
    theirs = TheirScore(feature=Flat(), splits=1)
    theirs.update(images(logits))
    found = inception_score(logits)
    assert found.value == pytest.approx(float(theirs.compute()[0]), rel=1e-5)  # theirs is float32
    monkeypatch.setattr("trueup.metrics.score._ROWS", 70)
    assert inception_score(logits).value == pytest.approx(found.value, rel=1e-12)


def test_inception_score_of_one_answer_is_one():
    assert inception_score(torch.tensor([[5.0, 1.0, 0.0]]).repeat(9, 1)).value == pytest.approx(1)


def test_kernel_distance_agrees_with_torchmetrics():
    a, b = draw(60, 12, 8), draw(60, 12, 9, 1.3, 0.4)
    theirs = KernelInceptionDistance(feature=Flat(), subsets=1, subset_size=60)
    theirs.set_dtype(torch.float64)
    theirs.update(images(a), real=True)
    theirs.update(images(b), real=False)
    assert kernel_distance(a, b).value == pytest.approx(float(theirs.compute()[0]), rel=1e-6)


def test_kernel_distance_is_unbiased():
    """Coins of probability p and q: MMD² = 1 + 7 p² + ... in closed form, which is 7 (p - q)²."""
    p, q = 0.3, 0.7
    generator = torch.Generator().manual_seed(0)
    coins = [
        (torch.rand(2, 40, 1, generator=generator) < torch.tensor([p, q])[:, None, None]) for _ in range(400)
    ]
    values = torch.tensor([kernel_distance(a.double(), b.double()).value for a, b in coins])
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - 7 * (p - q) ** 2) < 4 * error  # (xy + 1)³ = 1 + 7 xy for coins


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_and_recall_agree_with_prdc(k):
    """Which counts the image itself among its neighbours and adds one for it."""
    a, b = draw(150, 5, 10), draw(120, 5, 11, 0.8, 0.5)
    a[:30] = a[30:60]  # twins: the nearest is at zero
    b[:20] = b[20:40]
    if k == 1:
        a, b = a[30:], b[20:]  # balls of no radius: prdc calls even their centre outside
    theirs = compute_prdc(a.numpy(), b.numpy(), nearest_k=k)
    found = precision(a, b, k).value, recall(a, b, k).value
    assert found == pytest.approx((theirs["precision"], theirs["recall"]), abs=1e-12)


def test_precision_and_recall_see_copies_at_zero_distance():
    rows = draw(30, 2000, 12).float() + 100  # float32 distances of these are off by more than the radii
    copies = rows.repeat(2, 1)
    assert precision(copies, copies, k=1).value == recall(copies, copies, k=1).value == 1


def test_precision_and_recall_do_not_depend_on_the_chunks(monkeypatch):
    a, b = draw(70, 4, 13), draw(50, 4, 14, 1.2)
    whole = precision(a, b), recall(a, b)
    monkeypatch.setattr("trueup.metrics.manifold._ENTRIES", 64)
    monkeypatch.setattr("trueup.metrics.kernel._ENTRIES", 64)
    for one, other in zip(whole, (precision(a, b), recall(a, b)), strict=True):
        assert one.value == other.value
        assert torch.equal(one.influence, other.influence)


def test_recall_influence_is_the_jackknife_over_groups():
    a, b = draw(80, 4, 15), draw(61, 4, 16, 0.9)
    found = recall(a, b)
    groups = group_index(61)
    expected = torch.zeros(61, dtype=torch.float64)
    for group in range(20):
        kept = groups != group
        m = int((~kept).sum())
        expected[~kept] = (61 - m) / m * (found.value - recall(a, b[kept]).value)
    torch.testing.assert_close(found.influence, expected - expected.mean())


def test_wasserstein_agrees_with_scipy():
    a, b = draw(57, 3, 17), draw(101, 3, 18, 1.4, 0.2)
    b[:30] = b[30:60].round()  # ties
    expected = np.mean([wasserstein_distance(a[:, i], b[:, i]) for i in range(3)])
    assert wasserstein(a, b).value == pytest.approx(expected, rel=1e-12)
    assert wasserstein(a, a).value == 0


def test_wasserstein_influence_of_a_shift_is_the_value_itself():
    """Where all generated values are above the reference, the distance is a difference of means."""
    a, b = draw(40, 1, 19), draw(50, 1, 20) + 100
    found = wasserstein(b, a)
    torch.testing.assert_close(found.influence, (b - b.mean())[:, 0])


def test_colours_are_channel_means():
    pictures = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    torch.testing.assert_close(colours(pictures), pictures.double().mean((2, 3)))
    assert colours(pictures.float() - 300).min() < -40


# Intervals

REFERENCE = draw(2000, 6, 21)
DRAWN = {
    "frechet": lambda rows: frechet(rows, statistics(REFERENCE)),
    "kernel": lambda rows: kernel_distance(REFERENCE[:300], rows),
    "precision": lambda rows: precision(REFERENCE[:300], rows),
    "recall": lambda rows: recall(REFERENCE[:300], rows),
    "score": lambda rows: inception_score(4 * rows),
    "wasserstein": lambda rows: wasserstein(rows, REFERENCE),
}


@pytest.mark.parametrize("name", DRAWN)
def test_intervals_cover_as_often_as_they_say(name):
    """95% ones, over 150 draws: 0.88 is four standard deviations off. Recall's may be too wide."""
    found = [DRAWN[name](draw(120, 6, 1000 + seed, 1.2, 0.2)) for seed in range(150)]
    ratio, covered = spread(found)
    assert covered > 0.88
    assert 0.8 < ratio < (2.0 if name == "recall" else 1.3)


def spread(found):
    """Standard errors over the real scatter, and how often intervals hold the mean of all."""
    values = np.array([number.value for number in found])
    covered = np.mean([number.low < values.mean() < number.high for number in found])
    return np.sqrt(np.mean([number.error**2 for number in found])) / values.std(), covered


def test_frechet_interval_holds_with_fewer_images_than_dimensions():
    reference = statistics(draw(3000, 48, 22))
    ratio, covered = spread([frechet(draw(36, 48, 2000 + s, 1.2, 0.1), reference) for s in range(100)])
    assert covered > 0.88
    assert 0.8 < ratio < 1.6


def test_paired_differences_cancel_what_both_share():
    reference = statistics(REFERENCE)
    found, alone = [], []
    for seed in range(150):
        rows = draw(120, 6, 3000 + seed, 1.2, 0.2)
        alone.append(frechet(rows, reference))
        found.append(frechet(rows * 0.97, reference).difference(alone[-1]))
    assert spread(found)[1] > 0.88
    assert np.mean([n.error for n in found]) < 0.5 * np.mean([n.error for n in alone])


def test_too_few_images_have_no_interval():
    few = Number.influenced(1.0, torch.zeros(7))
    for number in (few, few.difference(few), Number.influenced(1.0, None)):
        assert all(math.isnan(x) for x in (number.error, number.low, number.high))
    assert not math.isnan(Number.influenced(1.0, torch.randn(8)).low)


# All of them together


def reference_of(n, d):
    pictures = draw(n, d, 23).reshape(n, 1, 1, d)
    return Reference.build(Pixels(), pictures.split(16), fingerprint="drawn")


def test_measures_are_those_the_features_allow():
    found, warnings = measures(FeatureBatch(draw(40, 6, 24).float()), reference_of(50, 6))
    assert list(found) == ["frechet", "kernel", "precision", "recall"]
    assert warnings == []
    reference = reference_of(50, 6)
    reference.spatial = statistics(draw(50, 4, 25))
    whole = FeatureBatch(draw(40, 6, 24), draw(40, 4, 26), draw(40, 9, 27))
    assert set(measures(whole, reference)[0]) == {*found, "sfid", "inception_score"}
    coloured = whole._replace(colours=draw(40, 1, 28))
    assert set(measures(coloured, reference)[0]) == {*found, "sfid", "inception_score", "brightness"}


def test_a_measure_of_ones_own_is_measured_like_the_others():
    def note(generated, reference):
        return ["nobody knows what it means"]

    try:

        @measure("width", "width of the features", more_is_better=True, notes=note)
        def width(generated, reference):
            if generated.pooled.shape[1] < 6:
                return None
            spread = generated.pooled.double().square().sum(1)
            return Number.influenced(float(spread.mean()), spread - spread.mean())

        rows = draw(40, 6, 24)
        found, notes = measures(FeatureBatch(rows), reference_of(50, 6))
        assert found["width"].value == pytest.approx(float(rows.square().sum(1).mean()))
        assert found["width"].low < found["width"].value < found["width"].high
        assert notes == ["nobody knows what it means"]
        assert "width" not in measures(FeatureBatch(rows[:, :5]), reference_of(50, 5))[0]
        with pytest.raises(TrueupError, match="already"):
            measure("width", "another one")(width)
    finally:
        MEASURES.pop("width", None)


def test_fewer_images_than_dimensions_are_warned_about():
    _, warnings = measures(FeatureBatch(draw(10, 20, 24)), reference_of(50, 20))
    assert len(warnings) == 1
    assert warnings[0].startswith("10 generated images are no more than the 20 feature dimensions")
    assert "biased upward" in warnings[0]


def test_a_reference_keeps_the_first_rows():
    rows = draw(10, 3, 28)
    kept = Reference.build(Pixels(), rows.reshape(10, 1, 1, 3).split(4), limit=7)
    assert kept.count == 10
    assert torch.equal(kept.rows, rows[:7].float())


GOOD = torch.randn(10, 3)
BAD = {
    "one dimension": torch.zeros(5),
    "not finite": torch.full((10, 3), math.nan),
    "other width": torch.randn(10, 4),
    "too few": GOOD[:1],
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_features_are_refused(bad):
    reference = statistics(GOOD)
    for call in (
        lambda rows: frechet(rows, reference),
        lambda rows: kernel_distance(GOOD, rows),
        lambda rows: kernel_distance(rows, GOOD),
        lambda rows: precision(GOOD, rows),
        lambda rows: precision(rows, GOOD),
        lambda rows: recall(GOOD, rows),
        lambda rows: recall(rows, GOOD),
    ):
        with pytest.raises(DataError):
            call(BAD[bad])


@pytest.mark.parametrize(
    "call",
    [
        lambda: GaussianStatistics().mean,
        lambda: statistics(GOOD[:1]).covariance,
        lambda: statistics(GOOD).merge(statistics(torch.randn(5, 4))),
        lambda: frechet_distance(torch.zeros(3), torch.eye(3), torch.zeros(2), torch.eye(2)),
        lambda: inception_score(GOOD[:0]),
        lambda: wasserstein(GOOD[:0], GOOD),
        lambda: wasserstein(GOOD, GOOD[:, :2]),
        lambda: colours(GOOD),
        lambda: measures(FeatureBatch(GOOD[:2]), reference_of(10, 3)),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(DataError):
        call()
