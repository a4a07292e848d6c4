"""Sums that say what they are: any sample at any level, merged, decayed, kept by class, read from files."""

import json
from dataclasses import replace

import pytest
import torch

from trueup.calibration.shares import Shares
from trueup.errors import ArtifactError, TrueupError
from trueup.estimate import fit, merge
from trueup.estimate.moments import SUMS, Moments, fold_of
from trueup.estimate.stored import pack, unpack
from trueup.files import unpacked
from trueup.process import ContinuousVP

PROCESS = ContinuousVP()
SHAPE = (2, 4, 6)
LEVELS = torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
SETTINGS = {"parametrization": {"name": "noise"}}


def empty(**settings):
    return Moments.empty(PROCESS, LEVELS, SHAPE, provenance=SETTINGS, **settings)


def rows(count, seed=0):
    """Evaluations of a network that is off by 0.3 and a tenth of what it says: index, eps_hat, eps, u."""
    generator = torch.Generator().manual_seed(seed)
    eps, x0 = torch.randn(2, count, *SHAPE, generator=generator)
    u = eps + 0.5 * x0
    return torch.arange(count), 1.1 * eps + 0.05 * u + 0.3, eps, u, x0


def filled(count=40, seed=0, first=0, real=False, **settings):
    """All levels of some samples; real: with the noise that the levels have."""
    moments = empty(**settings)
    index, *vectors, x0 = rows(count, seed)
    y = index % max(len(moments.classes), 1) if moments.classes else None
    for level in range(len(LEVELS)):
        if real:
            eps = vectors[1]
            u = eps + float(moments.alpha[level] / moments.sigma[level]) * x0
            vectors = [1.1 * eps + 0.05 * u + 0.3, eps, u]
        moments.add(torch.full((count,), level), index + first, *vectors, y=y)
    moments.add_samples(index + first, x0, [1000 * seed + int(i) for i in index + first], y=y)
    return moments


def assert_same(one, other):
    for name in SUMS:  # float64 sums of the same float32 numbers, in another order
        assert torch.allclose(getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-10), name


def test_the_order_of_rows_and_how_they_are_batched_change_nothing():
    whole = filled()
    index, *vectors, x0 = rows(40)
    level = torch.arange(3).repeat_interleave(40)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5))
    other = empty()
    for part in order.split(7):
        other.add(level[part], index.repeat(3)[part], *(v.repeat(3, 1, 1, 1)[part] for v in vectors))
    other.add_samples(index, x0, index.tolist())
    assert_same(whole, other)
    assert whole.images == other.images == 40


def test_the_sums_are_those_of_the_definition():
    moments, (_, eps_hat, eps, u, x0) = filled(), rows(40)
    bands = moments.bands
    residual, at_u = (bands.dct((v).double()).flatten(2) for v in (eps_hat - eps, u))
    departure = bands.dct((eps_hat - moments.filter_gain[1].float() * u).double()).flatten(2)
    # float32 on the way in
    assert torch.allclose(moments.first[0, :, 1, 0].sum(0), residual.sum(0), rtol=1e-5, atol=1e-4)
    assert torch.allclose(
        moments.second[0, :, 1, 4].sum(0), bands.sum(departure * at_u).sum(0), rtol=1e-5, atol=1e-4
    )
    z = bands.dct(x0.double()).flatten(2)
    assert torch.allclose(moments.data_second[0].sum(0), bands.sum(z.square()).sum(0), rtol=1e-5)
    assert moments.rows.sum((0, 1)).tolist() == [40, 40, 40]


@pytest.mark.parametrize("period", [2, 3, 4, 8, 16, 32])
def test_no_period_in_the_data_survives_the_dealing(period):
    """`index % 16` put labels that cycle with a period of 2, 4, 8 or 16 into folds of their own."""
    index = torch.arange(16 * 400)
    fold = fold_of(index, 16)
    counts = torch.zeros(16, period).index_put_(
        (fold, index % period), torch.ones(len(index)), accumulate=True
    )
    expected = len(index) / 16 / period
    # a chi-square of 15 (period - 1) degrees of freedom, or less: blocks are dealt without replacement
    chi2 = float(((counts - expected).square() / expected).sum())
    freedom = 15 * (period - 1)
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_dealing_is_even_stateless_and_of_any_key():
    assert fold_of(torch.arange(160), 16).bincount().tolist() == [10] * 16
    keys = torch.tensor([5, 2**62, -3, -(2**63), 2**63 - 1])
    assert fold_of(keys, 16).tolist() == [int(fold_of(key[None], 16)) for key in keys]
    assert 0 <= int(fold_of(keys, 7).min()) <= int(fold_of(keys, 7).max()) < 7


def test_a_group_is_never_split_over_folds():
    index, *vectors, _ = rows(60)
    moments, group = empty(), torch.arange(60) // 20 * 1_000_003
    moments.add(torch.zeros(60, dtype=torch.int64), index, *vectors, group=group)
    assert sorted(moments.rows[0, :, 0][moments.rows[0, :, 0] > 0].tolist()) in ([20, 20, 20], [20, 40], [60])


def test_classes_are_kept_apart_and_add_up():
    apart, together = filled(classes=(0, 1, 2)), filled()
    assert_same(apart.pooled(), together)
    parts = [apart.of_class(y) for y in (0, 1, 2)]
    assert [part.images for part in parts] == [14, 13, 13]
    assert torch.allclose(sum(part.second for part in parts), together.second)
    with pytest.raises(TrueupError, match="label 7 is not among the classes 0, 1, 2"):
        apart.of_class(7)


def test_a_label_that_is_no_class_is_refused():
    moments, (index, *vectors, _) = empty(classes=(3, 5)), rows(4)
    with pytest.raises(TrueupError, match="label 4 is not among the classes 3, 5"):
        moments.add(torch.zeros(4, dtype=torch.int64), index, *vectors, y=torch.tensor([3, 5, 4, 3]))
    with pytest.raises(TrueupError, match="needs its label"):
        moments.add(torch.zeros(4, dtype=torch.int64), index, *vectors)
    assert not moments.rows.any()


def test_a_level_that_is_none_is_refused():
    moments, (index, *vectors, _) = empty(), rows(4)
    with pytest.raises(TrueupError, match="among the 3 noise levels"):
        moments.add(torch.tensor([0, 1, 2, 3]), index, *vectors)


def test_shards_add_up():
    whole, parts = filled(40), [empty(), empty()]
    index, *vectors, x0 = rows(40)
    for part, here in zip(parts, (slice(0, 15), slice(15, 40)), strict=True):
        for level in range(3):
            part.add(torch.full((here.stop - here.start,), level), index[here], *(v[here] for v in vectors))
        part.add_samples(index[here], x0[here], index[here].tolist())
    added = parts[0] + parts[1]
    assert_same(added, whole)
    assert added.indices.tolist() == list(range(40))
    assert added.data_digest == whole.data_digest
    assert_same(empty() + whole, whole)


def test_shards_that_overlap_are_refused():
    one = filled(20)
    with pytest.raises(TrueupError, match="both hold sample 17: shards need indices of their own"):
        one + filled(20, seed=1, first=17)
    again = filled(20, first=100)
    again.digests = one.digests.clone()  # the same images under other indices
    with pytest.raises(TrueupError, match="the same image is in both"):
        one + again
    untracked = filled(20, seed=1, first=100)
    untracked.indices = untracked.digests = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(TrueupError, match="may overlap"):
        one + untracked
    with pytest.raises(TrueupError, match="other settings"):
        one + filled(20, first=100, classes=(0,))


def test_decay_leaves_means_and_lowers_the_effective_number():
    moments = filled(40)
    moments.decay(0.5)
    assert moments.effective.tolist() == [40, 40, 40]  # all weigh the same, only less
    index, *vectors, _ = rows(40, seed=1)
    moments.add(torch.zeros(40, dtype=torch.int64), index + 40, *vectors)
    # weights of 40 times 1/2 and 40 times 1: 60^2 / (10 + 40)
    assert moments.effective.tolist() == pytest.approx([72, 40, 40])
    with pytest.raises(TrueupError, match="decay"):
        moments.decay(1.5)


def test_a_decayed_fit_is_as_sure_as_its_effective_number():
    plain, decayed = filled(64), filled(64)
    decayed.decay(1e-3)
    one, other = fit(plain), fit(decayed)
    assert torch.allclose(one.correction.b, other.correction.b, rtol=1e-9, atol=1e-12)
    assert torch.allclose(one.evidence.gain.error, other.evidence.gain.error, rtol=1e-9)
    assert torch.allclose(one.evidence.shift_se, other.evidence.shift_se, rtol=1e-9)
    old = filled(32, seed=3, first=64)
    old.decay(1e-6)  # long forgotten
    late = fit(plain + old)
    assert torch.allclose(late.evidence.shift_se, one.evidence.shift_se, rtol=1e-4)


def test_a_training_loop_adds_one_level_per_image():
    """Each image at one level of its own: levels of different counts, and folds empty at some of them."""
    moments, truth = empty(), 0.3
    generator = torch.Generator().manual_seed(2)
    index, _, eps, _, x0 = rows(900)
    level = torch.multinomial(torch.tensor([0.6, 0.37, 0.03]), 900, replacement=True, generator=generator)
    u = eps + moments.lam.exp().float()[level].reshape(-1, 1, 1, 1) * x0
    own = 0.5 * torch.randn(eps.shape, generator=generator)  # the network's own error
    vectors = (1.1 * eps + 0.01 * u + own + truth, eps, u)
    for part in torch.arange(900).split(32):
        moments.add(level[part], index[part], *(v[part] for v in vectors))
        moments.add_samples(index[part], x0[part], None)
    assert not len(moments.indices)
    assert (moments.rows[0] == 0).any()  # 27 rows in 16 folds
    cal = fit(moments, family="shift")
    assert torch.isfinite(cal.correction.b).all()
    assert all(torch.isfinite(getattr(cal.evidence.gain, part)).all() for part in ("value", "low", "high"))
    # off by 0.3 on every pixel, and by nothing else: |eta|^2 = 0.09 x 48
    size = truth**2 * 48
    assert ((cal.evidence.eta2.value - size).abs() < 4 * cal.evidence.eta2.error).all()
    counts = level.bincount(minlength=3).double()
    width = cal.evidence.loss.error * counts.sqrt()
    assert width.max() < 2 * width.min()  # errors go with the root of each level's own count
    assert cal.correction.shift_map()[:2].mean() == pytest.approx(truth, abs=0.03)


def test_levels_with_too_few_folds_are_left_out():
    moments = filled(64)
    index, *vectors, _ = rows(2, seed=8)
    lonely = replace(moments, **{name: getattr(moments, name).clone() for name in SUMS})
    for name in ("rows", "squares", "first", "second"):
        getattr(lonely, name)[:, :, 1] = 0
    lonely.add(torch.ones(2, dtype=torch.int64), index, *vectors)
    cal = fit(lonely)
    assert cal.t.tolist() == [0.1, 0.8]
    assert not cal.empty


def test_without_and_only_make_the_whole():
    moments = filled()
    for fold in (0, 7):
        for name in ("rows", "first", "second", "data_first"):
            parts = getattr(moments.only(fold), name).sum(1) + getattr(moments.without(fold), name).sum(1)
            assert torch.allclose(parts, getattr(moments, name).sum(1))


def test_a_file_holds_all_of_it(tmp_path):
    moments = filled(real=True, classes=(0, 1))
    moments.skipped = ["bad.png is no image"]
    moments.save(tmp_path / "moments.safetensors")
    again = Moments.load(tmp_path / "moments.safetensors")
    for name in (*SUMS, "indices", "digests", "t"):
        assert torch.equal(getattr(moments, name), getattr(again, name))
    assert (again.classes, again.skipped, again.provenance) == (
        (0, 1),
        moments.skipped,
        json.loads(json.dumps(moments.provenance)),
    )
    more = again + filled(10, seed=4, first=40, real=True, classes=(0, 1))
    assert more.images == 50


def share(number, of=4, first=None, batch=8, images="abc"):
    """The moments of one share of a set of images."""
    moments = filled(10, seed=number, first=10 * number if first is None else first, real=True)
    moments.provenance["shares"] = {"held": [number], "of": of, "batch": batch, "images": images}
    return moments


def test_shares_are_merged_when_all_are_there():
    merged = merge([share(2), share(4), merge([share(1), share(3)], partial=True)])
    assert merged.images == 40
    assert merged.provenance == filled(real=True).provenance  # as if nobody had dealt anything


def test_shares_of_one_model_may_know_it_by_different_names():
    one, two = share(1, of=2), share(2, of=2)
    one.provenance["name"] = "my-model"
    two.provenance["base_model"] = "me/my-model"
    for parts in ([one, two], [two, one]):
        assert merge(parts).provenance["base_model"] == "me/my-model"


def test_a_share_that_is_missing_is_named_unless_some_will_do():
    parts = [share(2), share(4)]
    with pytest.raises(TrueupError, match=r"^shares 1 and 3 of 4 are missing: .* partial=True"):
        merge(parts)
    some = merge(parts, partial=True)
    assert Shares.noted(some.provenance) == ((2, 4), 4, 8, "abc")
    with pytest.raises(TrueupError, match=r"^share 3 of 4 is missing"):
        merge([some, share(1)])


def test_shares_that_do_not_belong_together_are_refused():
    other = filled(10, seed=2, first=50, real=True)  # of other images
    same, more = share(2, first=50), share(3, of=8)
    for two, words in (
        (same, "both hold share 2 of 4: count it once"),
        (more, "shares of 4 and of 8 do not belong together"),
        (other, "share 2 of 4 cannot be added to what is no share"),
        (share(3, batch=6), "^share 2 of 4 was dealt in batches of 8, share 3 of 4 of 6, so .* batch_size"),
        (share(3, images="abd"), "share 2 of 4 and share 3 of 4 are not of the same images"),
    ):
        two.digests = two.digests + 7_000_000
        with pytest.raises(TrueupError, match=words):
            merge([share(2), two], partial=True)


def _shares(held, of, batch=8, images="abc"):
    said = {"held": held, "of": of, "batch": batch, "images": images}
    return lambda m, t: m["provenance"].update(shares=said)


DAMAGE = {
    "no share": (_shares([], 3), "its list of shares"),
    "share 0": (_shares([0, 1], 3), "its list of shares"),
    "share 4 of 3": (_shares([1, 4], 3), "its list of shares"),
    "a share twice": (_shares([1, 1], 3), "its list of shares"),
    "half a share": (_shares([1.5], 3), "its list of shares"),
    "too many shares": (_shares([1], 10**9), "of is 1000000000, expected a whole number from 1 to 99,999"),
    "batches of none": (_shares([1], 3, batch=0), "batch is 0, expected a whole number from 1 to"),
    "other images": (_shares([1], 3, images="<b>"), "digest of the images"),
    "shares as text": (_shares("1", 3), "held is '1', expected a list"),
    "rows": (lambda m, t: t["rows"].mul_(-1), "rows holds values out of range, 0 to"),
    "squares": (lambda m, t: t["squares"].mul_(3), "squares are not those of weights"),
    "power": (lambda m, t: t["second"][..., 0, :, :].mul_(-1), r"residual\^2 is negative"),
    "cross": (lambda m, t: t["second"][..., 4, :, :].mul_(9), "departure u is larger"),
    "first": (lambda m, t: t["first"][..., 2, :, :].mul_(9), "sum of u is larger"),
    "data": (lambda m, t: t["data_first"].mul_(9), "data_first is larger"),
    "nan": (lambda m, t: t["second"].fill_(float("nan")), "second holds values out of range"),
    "counts": (lambda m, t: t["data_rows"].mul_(2), "more samples than the 40"),
    "twice": (lambda m, t: t["indices"].fill_(3), "a sample is in it twice"),
    "digest": (lambda m, t: m.update(data_digest="00ff"), "data_digest is not that"),
    "mean": (lambda m, t: m.update(mean_only=-3), "mean_only is -3"),
    "levels": (lambda m, t: t["lam"].add_(1), "lam does not belong"),
    "order": (lambda m, t: t["t"].copy_(t["t"].flip(0)), "out of order"),
    "type": (lambda m, t: t.update(rows=t["rows"].float()), "rows is torch.float32"),
    "shape": (
        lambda m, t: t.update(second=t["second"][..., :1]),
        r"second is torch.float64 \(.*, expected",
    ),
    "missing": (lambda m, t: t.pop("squares"), "it lacks squares"),
    "sample shape": (lambda m, t: m.update(shape=[2, -4, 6]), "sample shape makes no sense"),
    "large": (lambda m, t: m.update(shape=[2, 2**19, 2**19]), "sample shape makes no sense"),
    "larger than its sums": (
        lambda m, t: m.update(shape=[2, 2**10, 2**10]),
        "do not belong to its sample shape",
    ),
    "classes": (lambda m, t: m.update(classes=[1, 1]), "classes make no sense"),
    "process": (lambda m, t: m["provenance"].update(process={"kind": "none"}), "damaged"),
    "no provenance": (lambda m, t: m.pop("provenance"), "it lacks provenance"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_makes_no_sense_is_named(what):
    meta, tensors = pack(filled(real=True))
    meta, tensors = json.loads(json.dumps(meta)), {name: tensor.clone() for name, tensor in tensors.items()}
    spoil, words = DAMAGE[what]
    spoil(meta, tensors)
    with pytest.raises(ArtifactError, match=words):
        unpacked(unpack, meta, tensors, "moments")


def test_nonsense_is_not_saved(tmp_path):
    moments = filled(real=True)
    moments.rows[0, 0, 0] = -1
    with pytest.raises(ArtifactError, match="cannot save these moments: rows holds values out of range"):
        moments.save(tmp_path / "moments.safetensors")
    assert not list(tmp_path.iterdir())
