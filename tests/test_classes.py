"""A correction for every class: against closed forms, direct measurement, and images nobody has seen."""

from dataclasses import replace

import pytest
import torch

from trueup.calibration import Correction, Innovation
from trueup.density import objectives
from trueup.errors import DataError, TrueupError
from trueup.estimate import classes_of, fit
from trueup.estimate.confirm import score
from trueup.estimate.moments import SUMS, Moments
from trueup.estimate.stored import PAIRS
from trueup.images import Images

from by_class import LEVELS, NULL, SHAPE, VP, Gaussians, calibrate, fresh_gain, maps, measure
from calibrations import make


def of(cal, label):
    return next(found for found in cal.classes if found.label == label)


def shuffled(*counts):
    """So many labels 0, so many 1, ..., in no order."""
    y = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]


# The network with a correction, as a network


def test_moments_of_the_corrected_network_are_those_measured_with_it_attached():
    """At levels of the correction, where it is whole: sums that nobody measured against sums that were."""
    network, y = Gaussians(0.3 * maps(3), 0.5 * maps(3, 1), gain=0.2), shuffled(20, 15, 9)
    network.dtype = torch.float64
    moments = measure(network, y)
    correction = make(SHAPE, VP, LEVELS, keep=(0, 1, 2), gain=0.2).correction
    corrected = moments.corrected(correction)

    class Corrected(Gaussians):
        def eps(self, x_t, t, y):
            eps_hat, (_, sigma) = super().eps(x_t, t, y), VP.scales(t, x_t)
            # A row at a time, since their lam are the same; in float64.
            at = correction.at(VP.lam(t[:1].double()))
            return (eps_hat - at.delta(eps_hat, x_t / sigma)).to(x_t)

    direct = measure(Corrected(network.bias, network.means, gain=network.gain), y)
    for name in SUMS:
        mine, theirs = getattr(corrected, name), getattr(direct, name)
        # The network answers in float32; the sum over folds is that of few rows.
        assert float((mine - theirs).abs().max()) < 1e-6 * max(float(theirs.abs().max()), 1e-30), name
    assert not torch.allclose(corrected.second, moments.second, rtol=0.1)


def test_moments_of_the_corrected_network_are_those_of_its_outputs():
    """The same from rows made by hand, in float64, for every product."""
    correction = make(SHAPE, VP, LEVELS[:2], keep=(0, 1, 2), gain=0.2).correction
    bands = correction.bands
    moments = Moments.empty(VP, LEVELS[:2], SHAPE, folds=2)
    generator = torch.Generator().manual_seed(0)
    r, o, u = torch.randn(3, 5, *SHAPE, generator=generator, dtype=torch.float64)  # one fold at one level
    k = moments.filter_gain[1]

    def sums(residual, departure):
        z = bands.dct(torch.stack([residual, departure, u])).flatten(3)  # (3, n, C, K)
        return z.sum(1), torch.stack([bands.sum(z[i] * z[j]).sum(0) for i, j in PAIRS])

    moments.rows[0, 1, 1] = 5
    moments.first[0, 1, 1], moments.second[0, 1, 1] = sums(r, o)
    corrected = moments.corrected(correction)
    taken = correction.at(moments.lam[1:]).delta(o + k * u, u)
    first, second = sums(r - taken, o - taken)
    assert torch.allclose(corrected.first[0, 1, 1], first, rtol=1e-12, atol=1e-12)
    assert torch.allclose(corrected.second[0, 1, 1], second, rtol=1e-12, atol=1e-11)
    assert not corrected.first[0, 0].any()  # no rows, nothing to correct


def test_one_correction_after_another_is_one():
    first, second = (make(SHAPE, VP, LEVELS, seed=seed).correction for seed in (1, 2))
    first.support = second.support = None
    eps_hat, u = maps(len(LEVELS), 5), maps(len(LEVELS), 6)
    both = second.apply(first.apply(eps_hat, u, first.lam), u, first.lam)
    assert torch.allclose(first.then(second).apply(eps_hat, u, first.lam), both, rtol=1e-12, atol=1e-12)
    nothing = first.with_gains("none")
    for same in (first.then(nothing), nothing.then(first)):
        assert torch.allclose(same.apply(eps_hat, u, first.lam), first.apply(eps_hat, u, first.lam))


@pytest.mark.parametrize("form", ["sqrt", "response"])
def test_other_gains_keep_the_mean_and_response_of_a_composed_correction(form):
    """Of outputs rho u + c + i with any innovation i: those without one are corrected as by least squares."""
    first, second = (make(SHAPE, VP, LEVELS, seed=seed, gain=0.2).correction for seed in (1, 2))
    whole = first.then(second)
    whole.support = None
    bands, rho = whole.bands, 0.1 + 0 * whole.a
    c = torch.randn(whole.b.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole.innovation = Innovation(rho, c)
    u = maps(len(LEVELS), 6)
    grid = (len(LEVELS), *SHAPE)
    eps_hat = bands.idct((c + bands.spread(rho) * bands.dct(u).flatten(2)).reshape(grid))
    other = whole.with_gains(form)
    assert not torch.allclose(other.a, whole.a)
    assert torch.allclose(other.delta(eps_hat, u), whole.delta(eps_hat, u), atol=1e-12)


# Who gets a correction of its own


@pytest.fixture(scope="module", params=["shift", "spectral"])
def unlike(request):
    """Four classes of different errors, with 400, 300, 60 and 5 images."""
    network = Gaussians(0.2 * maps(4), 0.5 * maps(4, 5))
    return network, calibrate(network, shuffled(400, 300, 60, 5), family=request.param)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_class_with_images_enough_gets_its_own(unlike, label):
    network, cal = unlike
    found = of(cal, label)
    gain, error = fresh_gain(network, found.correction, label, over=cal.correction)
    assert gain > 5 * error  # on images nobody has seen
    bare, error = fresh_gain(network, found.correction, label)
    assert bare > 5 * error
    assert found.gain.low > 0
    assert found.images == (400, 300, 60)[label]


def test_its_own_is_right_within_its_noise(unlike):
    """What is left of the mean is what so many images know it to: the ideal residual's variance over n."""
    network, cal = unlike
    for label, images in enumerate((400, 300, 60)):
        count = 2000
        y = torch.full((count,), label)
        x0, eps = network.sample(y, 8), maps(count, 9)
        for t in (LEVELS[2], LEVELS[6]):
            times = torch.full((count,), t, dtype=torch.float64)
            alpha, sigma = VP.scales(times, x0)
            x_t = alpha * x0 + sigma * eps
            after = of(cal, label).correction.apply(network.eps(x_t, times, y), x_t / sigma, VP.lam(times))
            left = (after - eps).mean(0).square().sum()
            known = (after - eps).var(0).sum() * (1 / images + 1 / count)
            bias = float(network.error(y[:1], VP.lam(times[:1])).square().sum())
            assert float(left) < 4 * float(known) + 0.02 * bias  # shrinking leaves a little
            assert float(left) < (0.1 if images > 100 else 0.5) * bias


def test_a_class_of_five_images_gets_exactly_the_pooled_one(unlike):
    _, cal = unlike
    assert of(cal, 3).correction is None
    assert of(cal, 3).images == 5
    assert cal.for_class(3) is cal.correction
    assert cal.for_class(1234) is cal.correction


@pytest.mark.parametrize("family", ["shift", "spectral"])
@pytest.mark.parametrize("seed", [1, 2])
def test_classes_that_are_alike_get_no_more_than_noise(family, seed):
    network = Gaussians(0.2 * maps(1).expand(10, *SHAPE), 0.5 * maps(10, 3))
    cal = calibrate(network, torch.arange(600) % 10, seed, family=family)
    assert not cal.correction.empty
    for found in cal.classes:
        assert found.correction is None or not found.gain.sign > 0
        harm, error = fresh_gain(network, cal.for_class(found.label), found.label, over=cal.correction)
        assert harm >= -3 * error
        assert abs(harm) < 0.01 * fresh_gain(network, cal.correction, found.label)[0]


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_one_class_off_is_found_and_the_nine_others_are_left(family):
    bias = torch.zeros(10, *SHAPE, dtype=torch.float64)
    bias[3] = 0.2 * maps(1)[0]
    network = Gaussians(bias, 0.5 * maps(10, 3))
    cal = calibrate(network, torch.arange(600) % 10, family=family)
    gain, error = fresh_gain(network, of(cal, 3).correction, 3, over=cal.correction)
    assert gain > 10 * error
    assert of(cal, 3).gain.low > 0.5
    for found in cal.classes:
        if found.label != 3:
            assert not found.gain.low > 0
            change, error = fresh_gain(network, cal.for_class(found.label), found.label, over=cal.correction)
            assert change >= -3 * error
            assert abs(change) < 0.02 * gain


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_the_null_label_is_a_class_of_its_own_and_no_part_of_the_others(family):
    network = Gaussians(0.1 * maps(1).expand(10, *SHAPE), null=0.2 * maps(1, 9)[0])
    y = torch.arange(200) % 10
    cal = calibrate(network, y, null=True, family=family)
    alone = calibrate(network, y, family=family)
    assert torch.equal(cal.correction.b, alone.correction.b)
    assert of(cal, NULL).images == 200  # every image is run with it as well
    assert cal.evidence.images == cal.data_images == 200
    assert cal.provenance["null_label"] == NULL
    gain, error = fresh_gain(network, of(cal, NULL).correction, 0, over=cal.correction, told=NULL)
    assert gain > 5 * error
    assert f"label {NULL} (null), 200 images" in cal.summary()


def test_images_that_have_the_null_label_themselves_are_run_once():
    network = Gaussians(0.1 * maps(2))
    y = torch.tensor([0, 1, NULL, NULL, 1] * 8)
    network.sample = lambda y, seed: maps(len(y), seed)
    moments = measure(network, y, null=True, classes=[0, 1, NULL])
    assert moments.of_class(NULL).rows.sum((0, 1)).tolist() == [40.0] * len(LEVELS)
    assert moments.of_class(1).rows.sum((0, 1)).tolist() == [16.0] * len(LEVELS)


def test_only_the_null_label_may_be_off():
    network = Gaussians(torch.zeros(2, *SHAPE), null=0.3 * maps(1)[0])
    cal = calibrate(network, torch.arange(60) % 2, null=True)
    assert cal.correction.empty
    assert not cal.empty
    assert cal.verdict() == f"calibrated within noise over all classes; label {NULL} has a correction apart."


@pytest.mark.parametrize("estimator", ["shrunk", "paired"])
def test_a_class_without_images_divides_nothing(estimator):
    network = Gaussians(0.2 * maps(3))
    moments = measure(network, shuffled(40, 30), classes=[0, 1, 2, 7])
    cal = fit(moments, estimator=estimator)
    for label in (2, 7):
        assert (of(cal, label).images, of(cal, label).correction) == (0, None)
    for made in (cal.correction, *(found.correction for found in cal.classes if found.correction)):
        assert all(torch.isfinite(part).all() for part in (made.b, made.a, made.d, made.support))
    assert "label 7, 0 images: none of its own" in cal.summary()


def test_one_level_is_enough():
    network = Gaussians(0.2 * maps(2), 0.5 * maps(2, 5))
    cal = calibrate(network, shuffled(200, 200), levels=[0.3], family="shift")
    assert all(found.correction is not None for found in cal.classes)
    assert all(str(found.gain.value) == "nan" for found in cal.classes)  # there is no integral to speak of


@pytest.mark.parametrize("estimator", ["plain", "paired", "regressed"])
def test_unshrunk_estimators_are_those_of_the_class_alone(estimator):
    """Fitted to a class after that of all, or to the class at once: the same mean residual is removed."""
    network = Gaussians(0.2 * maps(2), 0.5 * maps(2, 5))
    moments = measure(network, shuffled(60, 40))
    cal = fit(moments, family="shift", estimator=estimator)
    for label in (0, 1):
        alone = fit(moments.of_class(label), family="shift", estimator=estimator)
        assert torch.allclose(of(cal, label).correction.b, alone.correction.b, atol=1e-9)
        assert not torch.allclose(of(cal, label).correction.b, cal.correction.b, atol=0.01)


def test_no_family_has_no_classes():
    assert fit(measure(Gaussians(maps(2)), shuffled(20, 20)), family="none").classes == ()


# Rounding


def perturbed(moments, size, seed):
    generator = torch.Generator().manual_seed(seed)

    def noisy(sums):
        return sums * (1 + size * torch.randn(sums.shape, generator=generator, dtype=torch.float64))

    return replace(moments, **{name: noisy(getattr(moments, name)) for name in SUMS if "rows" not in name})


@pytest.mark.parametrize("family", ["shift", "spectral"])
@pytest.mark.parametrize("size", [0.03, 0.2])
def test_rounding_in_the_sums_is_rounding_in_the_classes(family, size):
    """At sizes where some classes keep all of it, some a part, and some nothing."""
    network = Gaussians(size * maps(3), 0.5 * maps(3, 5), gain=0.3, null=size * maps(1)[0])
    moments = measure(network, shuffled(60, 30, 12), null=True)
    cal, other = (fit(made, family=family) for made in (moments, perturbed(moments, 1e-9, 0)))
    assert any(found.correction is not None for found in cal.classes)
    for mine, theirs in zip(cal.classes, other.classes, strict=True):
        assert (mine.correction is None) == (theirs.correction is None)
        if mine.correction is None:
            continue
        own = moments.of_class(mine.label)
        loss = own.second[:, :, :, 0].sum((0, 1, 3, 4))  # (L,)
        for form in ("least-squares", "sqrt", "response"):
            one, two = mine.correction.with_gains(form), theirs.correction.with_gains(form)
            apart = replace(one, b=one.b - two.b, a=one.a - two.a, d=one.d - two.d)
            square = score(own, apart).square.sum((0, 2)).clamp_min(0)
            assert float((square / loss).sqrt().max()) < 5e-7, form  # as for all classes: test_smooth.py
            assert float((one.support - two.support).abs().max()) < 5e-7
        assert mine.gain.value == pytest.approx(theirs.gain.value, abs=1e-6)


# Which classes there are


def labelled(y, **settings):
    return Images(maps(len(y)).float(), labels=y, data_range=None, **settings)


def test_the_classes_are_those_of_the_data_and_the_null_label():
    network = Gaussians(maps(6))
    y = torch.tensor([5, 3, 3, 0] * 5)
    assert classes_of(labelled(y), network.denoiser()) == [0, 3, 5]
    assert classes_of(labelled(y), network.denoiser(null=True)) == [0, 3, 5, NULL]


def test_data_without_classes_are_refused_in_a_line():
    network = Gaussians(maps(2))
    denoiser, images = network.denoiser(), maps(20).float()
    with pytest.raises(DataError, match="all images have the label 1: classes need two or more"):
        classes_of(labelled(torch.ones(20, dtype=torch.int64)), denoiser)
    with pytest.raises(DataError, match="labels"):
        classes_of(Images(images, data_range=None), denoiser)
    with pytest.raises(DataError, match="whole numbers, one a sample"):
        classes_of(labelled(torch.rand(20, 3)), denoiser)
    with pytest.raises(DataError, match="read only once"):
        classes_of(Images(((image, 0) for image in images), data_range=None), denoiser)
    plain = network.denoiser(conditional=False)
    with pytest.raises(DataError, match="takes no labels"):
        classes_of(labelled(torch.arange(20)), plain)
    with pytest.raises(TrueupError, match="label 1 is not among the classes 0"):
        measure(network, torch.arange(20) % 2, classes=[0])
    for classes in (["a", "b"], [0.5, 1], "ab", 10):
        with pytest.raises(TrueupError, match=r"classes are a list of labels, such as range\(10\), not "):
            measure(network, torch.arange(20) % 2, classes=classes)
    for null in ("none", torch.zeros(3)):
        denoiser.null_label = null
        with pytest.raises(
            DataError, match="classes are whole numbers, and the null label of this network is "
        ):
            classes_of(labelled(torch.arange(20) % 2), denoiser)


def test_labels_that_no_file_holds_are_refused_before_anything_is_measured():
    network, largest = Gaussians(maps(2)), 2**62
    with pytest.raises(TrueupError, match=f"at most 2\\*\\*62, not {largest + 1}"):
        measure(network, torch.arange(20) % 2, classes=[0, largest + 1])
    assert Moments.empty(VP, LEVELS, SHAPE, classes=[0, -largest]).classes == (0, -largest)


def test_a_correction_is_a_correction():
    """`then` forgets what it does not know: the innovation is of the bare network, support of data."""
    first = make(SHAPE, VP, LEVELS).correction
    assert isinstance(first.then(first), Correction)
    assert first.then(first).innovation is None


@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_the_drop_that_is_predicted_is_that_of_each_class(family):
    """What a calibration says it takes off the loss, row by row, against what it does when attached."""
    network, y = Gaussians(0.3 * maps(2), 0.5 * maps(2, 5)), shuffled(200, 200)
    cal, denoiser = calibrate(network, y, family=family), network.denoiser()
    assert all(found.correction is not None for found in cal.classes)
    images = Images(network.sample(y, 5).float(), labels=y, data_range=None)
    found = objectives(denoiser, images, cal, levels=LEVELS, trust=True, progress=False)
    drop = found.before - found.after  # (n, L)
    error = (drop - found.predicted).std(0) / len(y) ** 0.5
    assert float(((drop - found.predicted).mean(0).abs() / error).max()) < 4
    assert float(drop.mean()) > 0.1


# What a review found


@pytest.mark.parametrize("largest", [200, 16000])
def test_a_class_far_larger_than_the_others_does_not_decide_for_them(largest):
    """Four small classes off by much; the large one, of which the correction of all is made, by nothing."""
    sign = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    network = Gaussians(0.25 * sign[:, None, None, None].expand(5, *SHAPE))
    y = shuffled(largest, 200, 200, 200, 200)
    cal = fit(measure(network, y), family="shift")
    for label in (1, 2, 3, 4):
        middle = cal.for_class(label).shift_map()[4]
        expected = network.error(torch.tensor([label]), VP.lam(torch.tensor([LEVELS[4]]).double()))[0]
        assert float((middle - expected).square().sum()) < 0.2 * float(expected.square().sum())


def test_a_level_that_few_classes_know_is_left_to_the_correction_of_all():
    """As where training draws few times of nearly no noise."""
    network = Gaussians(maps(3) * 0.3)
    moments = measure(network, shuffled(150, 150, 150))
    whole = fit(moments, family="shift")
    for sums in (moments.rows, moments.squares, moments.first, moments.second):
        sums[:2, 2:, 0] = 0.0  # of two classes two folds are left at the first level
    cal = fit(moments, family="shift")
    for label in range(3):
        ours, before = cal.for_class(label), whole.for_class(label)
        assert torch.equal(ours.b[0], cal.correction.b[0])
        assert torch.allclose(ours.b[2:], before.b[2:], atol=0.1)
        assert not torch.allclose(ours.b[3], cal.correction.b[3], atol=0.02)


def test_levels_of_another_take_the_place_of_its_own():
    one, other = (Gaussians(maps(2, seed) * 0.3) for seed in (1, 2))
    first, second = (fit(measure(network, shuffled(60, 60))).correction for network in (one, other))
    where = torch.tensor([i not in (0, 4) for i in range(len(LEVELS))])
    made = first.with_levels(where, second.at_levels(where))
    for name in ("b", "a", "d"):
        ours, before, theirs = (getattr(part, name) for part in (made, first, second))
        assert torch.equal(ours[where], theirs[where])
        assert torch.equal(ours[~where], before[~where])
    assert first.with_levels(torch.ones(len(LEVELS), dtype=torch.bool), second) is second
