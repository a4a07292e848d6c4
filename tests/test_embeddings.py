"""Corrections that depend on an embedding: against a network whose error is a known function of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import trueup
from trueup.calibration.conditions import FAR, Projection
from trueup.errors import ArtifactError, AttachError, DataError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.estimate.conditions import COEFFICIENTS, FEATURES, FEWEST, Conditions, keys, see
from trueup.files import load_as, save_tensors
from trueup.process import DiscreteVP

VP, SHAPE, WIDTH, STD = DiscreteVP.linear(), (2, 8, 8), 24, 0.3
LEVELS = [0, 30, 109, 302, 535, 722, 871, 999]
MAPS = 0.08 * torch.stack([torch.ones(SHAPE), torch.linspace(-1, 1, 8).expand(SHAPE)])
SAID = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))[0][:, :2]


class Told(nn.Module):
    """The ideal denoiser of Gaussian data, off by a map that depends on the condition."""

    def __init__(self, bent=False):
        super().__init__()
        self.weight, self.bent = nn.Parameter(torch.zeros(1)), bent

    def error(self, c):
        said = (c.mean(1) if c.ndim == 3 else c) @ SAID
        said = said.abs().clamp(max=2.5) - 0.8 if self.bent else said
        return torch.einsum("bq,qchw->bchw", said, MAPS)

    def forward(self, x, t, c):
        alpha, sigma = (v.float().reshape(-1, 1, 1, 1) for v in (VP.alpha(t.double()), VP.sigma(t.double())))
        return x * sigma / (alpha**2 * STD**2 + sigma**2) + self.error(c) + self.weight


def denoiser(**how):
    return trueup.Denoiser(Told(**how), VP, "noise", SHAPE, conditional=True, data_range=None)


def drawn(count, seed, each=2):
    """Images, and conditions of which every one occurs `each` times; two directions stand out in them."""
    generator = torch.Generator().manual_seed(seed)
    c = 0.3 * torch.randn(count // each, WIDTH, generator=generator)
    c = c + torch.randn(count // each, 2, generator=generator) @ SAID.T
    return STD * torch.randn(count, *SHAPE, generator=generator), c.repeat(each, 1)


def measured(network, count=400, **how):
    x, c = drawn(count, 1)
    options = {"levels": LEVELS, "trust": True, "progress": False, "per_embedding": True, **how}
    return measure(network, trueup.Images(x, labels=c), **options)


@pytest.fixture(scope="module")
def linear():
    network = denoiser()
    moments = measured(network)
    return network, moments, fit(moments, family="shift")


def losses(network, calibration, t=535, count=600):
    """Of every fresh sample, at conditions nothing was fitted on."""
    x, c = drawn(count, 2)
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    t = torch.full((count,), t)
    with torch.no_grad(), trueup.attach(network, calibration, gains="least-squares"):
        return (network.network(VP.noised(x, eps, t), t, c) - eps).square().flatten(1).sum(1)


def test_conditions_never_seen_gain_what_was_said(linear):
    network, _, cal = linear
    pooled = replace(cal, conditions=None)
    for t in LEVELS[2:]:
        before, after = losses(network, pooled, t), losses(network, cal, t)
        wrong = network.network.error(drawn(600, 2)[1]).square().flatten(1).sum(1).mean()
        gain = trueup.statistics.Number.mean((before - after).double())
        assert gain.low > 0.7 * float(wrong), t  # nearly all that the maps hold
    # One number for all levels: the gain of the likelihood bound, equation 26.
    assert cal.conditions.gain.low > 0
    span = float(cal.correction.lam[0] - cal.correction.lam[-1])
    assert cal.conditions.gain.value == pytest.approx(span * float(wrong), rel=0.3)


def test_the_maps_are_those_of_the_network(linear):
    _, _, cal = linear
    _, c = drawn(600, 2)
    bands, level = cal.correction.bands, 5
    made = torch.einsum("bq,qck->bck", cal.conditions.projection(c).double(), cal.conditions.maps[level])
    images = bands.idct(made.reshape(-1, *SHAPE))
    expected = Told().error(c)
    expected = expected - expected.mean(0)
    assert float((images - expected).square().mean()) < 0.05 * float(expected.square().mean())


def test_where_nothing_depends_on_the_condition_nothing_is_kept_or_harmed():
    network = denoiser()
    network.network.error = lambda c: torch.full((len(c), *SHAPE), 0.05)
    cal = fit(measured(network), family="shift")
    assert not cal.correction.empty
    before, after = losses(network, replace(cal, conditions=None)), losses(network, cal)
    harm = trueup.statistics.Number.mean((after - before).double())
    assert harm.value < 0.01 * float(before.mean())


def test_a_small_network_where_lines_are_not_enough():
    network = denoiser(bent=True)
    cal = fit(measured(network, 1200), family="shift")
    seen = cal.conditions.projection
    assert seen.count > seen.linear
    gain = (losses(network, replace(cal, conditions=None)) - losses(network, cal)).double()
    assert trueup.statistics.Number.mean(gain).low > 0
    assert "a small network of" in cal.summary()


def test_tokens_are_averaged_and_every_row_has_its_own(linear):
    network, _, cal = linear
    x, c = drawn(8, 5)
    t, noise = torch.tensor([535] * 8), torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    tokens = c[:, None] + noise - noise.mean(1, keepdim=True)
    with torch.no_grad(), trueup.attach(network, cal):
        whole = network.network(x, t, c)
        assert torch.allclose(network.network(x, t, tokens), whole, atol=1e-5)
        assert torch.allclose(network.network(x, t[:1], c=c), whole, atol=1e-5)
        for i in range(8):
            assert torch.allclose(network.network(x[i : i + 1], t[:1], c[i : i + 1])[0], whole[i], atol=1e-5)


def test_it_is_the_correction_of_all_and_then_the_maps():
    """With gains in the correction of all, whose output the maps are taken off."""
    network = denoiser()
    moments = measured(network)
    shift, both = fit(moments, family="shift"), fit(moments)
    made = replace(both, conditions=shift.conditions)
    x, c = drawn(6, 5)
    t = torch.tensor([535] * 6)
    with torch.no_grad():
        bare = network.network(x, t, c)
        with trueup.attach(network, replace(both, conditions=None), gains="least-squares"):
            pooled = network.network(x, t, c)
        with trueup.attach(network, made, gains="least-squares"):
            whole = network.network(x, t, c)
    level = LEVELS.index(535)
    maps = torch.einsum("bq,qck->bck", made.conditions.projection(c).double(), made.conditions.maps[level])
    assert not torch.allclose(bare, pooled)
    expected = pooled - both.correction.bands.idct(maps.reshape(-1, *SHAPE)).float()
    assert torch.allclose(whole, expected, atol=1e-5)


def test_files_hold_it(linear, tmp_path):
    network, moments, cal = linear
    cal.save(tmp_path / "c.safetensors")
    again = trueup.load(tmp_path / "c.safetensors")
    assert again.identity == cal.identity != replace(cal, conditions=None).identity
    assert again.conditions.gain.value == cal.conditions.gain.value
    both = (losses(network, one, count=40) for one in (again, cal))
    assert torch.allclose(*both, rtol=1e-4)  # files are in single precision
    moments.save(tmp_path / "m.safetensors")
    read = Moments.load(tmp_path / "m.safetensors")
    assert fit(read, family="shift").identity == cal.identity


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("condition.maps", lambda v: v[:, :1]),
        ("condition.maps", lambda v: v * 1e9),
        ("condition.mean", lambda v: v[:-1]),
        ("condition.basis", lambda v: v * torch.nan),
        ("condition.support", lambda v: v + 2),
        ("condition.units", lambda v: torch.zeros(5, 5)),
    ],
)
def test_what_makes_no_sense_is_refused(linear, tmp_path, name, change):
    linear[2].save(tmp_path / "c.safetensors")
    kept = load_as(tmp_path / "c.safetensors", "a calibration", lambda meta, tensors: (meta, tensors))
    meta, tensors = kept
    save_tensors(
        tmp_path / "d.safetensors",
        "a calibration",
        meta,
        {**tensors, name: change(tensors[name]).contiguous()},
    )
    with pytest.raises(ArtifactError):
        trueup.load(tmp_path / "d.safetensors")


def test_images_of_one_condition_share_a_fold(linear):
    _, c = drawn(400, 1)
    assert torch.equal(keys(c[:200]), keys(c[200:]))
    assert len(keys(c).unique()) == 200
    moments = linear[1]
    rows = moments.rows[0, :, 0]
    assert (rows % 2 == 0).all()  # both images of a condition, or neither


def test_an_interrupted_run_goes_on(tmp_path):
    x, c = drawn(80, 1)
    how = {"levels": LEVELS[::3], "trust": True, "progress": False, "per_embedding": True}
    network = denoiser().with_batch_size(20)

    def stopping(*args):
        stopping.calls += 1
        if stopping.calls > 8:
            raise KeyboardInterrupt
        return Told.forward(network.network, *args)

    stopping.calls, network.network.forward = 0, stopping
    with pytest.raises(KeyboardInterrupt):
        measure(network, trueup.Images(x, labels=c), run=tmp_path / "run", **how)
    del network.network.forward
    gone_on = measure(network, trueup.Images(x, labels=c), run=tmp_path / "run", **how)
    at_once = measure(network, trueup.Images(x, labels=c), **how)
    for name in ("total", "gram", "sums"):  # products are of single precision
        ours, expected = (getattr(one.conditions, name) for one in (gone_on, at_once))
        assert float((ours - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_features_have_mean_0_and_variance_1_and_stay_near():
    c = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    made, count = see([c[:100], c[100:]])
    assert count == 300
    features = made(c.float())
    assert made.linear == FEATURES < made.count
    assert torch.allclose(features[:, :FEATURES].mean(0), torch.zeros(FEATURES), atol=0.05)
    assert torch.allclose(features[:, :FEATURES].var(0), torch.ones(FEATURES), atol=0.1)
    assert float(made(100 * c.float()).abs().max()) == FAR
    assert COEFFICIENTS >= 1


def test_no_conditions_to_learn_from():
    c = torch.randn(FEWEST - 1, WIDTH)
    with pytest.raises(DataError, match="too few to learn from: use 20 or more"):
        see([c.repeat(10, 1)])
    x, _ = drawn(40, 0)
    network = denoiser()
    with pytest.raises(DataError, match=r"are no embeddings but classes: .*per_class"):
        measure(network, trueup.Images(x, labels=torch.arange(40)), per_embedding=True, trust=True)
    with pytest.raises(DataError, match="labels"):
        measure(network, trueup.Images(x), per_embedding=True, trust=True)


def test_wrong_widths_and_missing_conditions_are_said(linear):
    network, moments, cal = linear
    x, c = drawn(4, 0)
    t = torch.tensor([535] * 4)
    with torch.no_grad(), trueup.attach(network, cal):
        network.network.error = lambda c: 0.0
        try:
            with pytest.raises(AttachError, match=f"for embeddings of width {WIDTH}, not"):
                network.network(x, t, c[:, :5])
            with pytest.raises(AttachError, match="is by embedding, and the network was called without one"):
                network.network(x, t, None)
            with pytest.raises(AttachError, match="is by embedding"):
                network.network(x, t, c[:3])
        finally:
            del network.network.error
    level = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TrueupError, match="needs its own"):
        moments.add(level, level, x, x, x)


def test_a_projection_without_units_has_linear_features_alone():
    made = Projection(torch.zeros(3), torch.eye(3)[:2], torch.zeros(0, 3), torch.zeros(0, 1))
    c = torch.tensor([[1.0, -2.0, 5.0]])
    assert made(c).tolist() == [[1.0, -2.0]]


def test_more_images_are_added_to_a_run(tmp_path):
    x, c = drawn(80, 1, each=1)
    how = {"levels": LEVELS[::3], "trust": True, "progress": False, "per_embedding": True}
    for count in (40, 80):
        images = trueup.Images(x, labels=c, count=count)
        moments = measure(denoiser(), images, run=tmp_path / "run", **how)
    assert moments.images == 80
    assert float(moments.conditions.gram[..., 0, 0].sum()) > 0
    with pytest.raises(TrueupError, match="begun with another per_embedding"):
        measure(
            denoiser(), trueup.Images(x, labels=c), run=tmp_path / "run", **{**how, "per_embedding": False}
        )


def test_one_fold_confirms_nothing():
    x, c = drawn(60, 1, each=1)
    how = {"levels": LEVELS[::3], "trust": True, "progress": False, "per_embedding": True}
    moments = measure(denoiser(), trueup.Images(x, labels=c), **how)
    assert fit(moments.only(0)).conditions is None


def test_groups_would_put_one_condition_on_both_sides_of_a_check():
    x, c = drawn(60, 1)
    images = trueup.Images(x, labels=c, groups=torch.arange(60) // 2)
    with pytest.raises(DataError, match="kept together by groups as well: leave the groups out"):
        measure(denoiser(), images, levels=LEVELS[::3], trust=True, progress=False, per_embedding=True)


def test_embeddings_that_are_not_finite_are_refused():
    c = torch.randn(40, WIDTH)
    c[3, 2] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        see([c])


def test_a_small_file_does_not_ask_for_much_memory(linear, tmp_path):
    linear[2].save(tmp_path / "c.safetensors")
    meta, tensors = load_as(tmp_path / "c.safetensors", "a calibration", lambda *parts: parts)
    q, levels = 900, len(LEVELS)
    tensors["condition.basis"] = torch.zeros(q, WIDTH)
    tensors["condition.units"], tensors["condition.outer"] = torch.zeros(1, q + 1), torch.zeros(900, 2)
    tensors["condition.maps"] = torch.zeros(levels, 2 * q, SHAPE[0], 0)
    meta["condition"]["kept_bands"] = []
    large = {**meta, "shape": meta["shape"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trueup.calibration.conditions.LARGEST", levels * q * 128 * 8)
        save_tensors(tmp_path / "d.safetensors", "a calibration", large, tensors)
        with pytest.raises(ArtifactError, match="features of embeddings make no sense"):
            trueup.load(tmp_path / "d.safetensors")


@pytest.mark.parametrize("k", [2, 13])
def test_how_conditions_are_dealt_to_folds_hardly_matters(linear, k):
    """Conditions that say much are in one fold or in another: that is no noise of what they say."""
    x, c = drawn(400, 1)
    options = {"levels": LEVELS, "trust": True, "progress": False, "per_embedding": True}
    dealt = measure(denoiser(), trueup.Images(x, labels=c * (1 + k * 1e-6)), **options)  # other keys
    one, other = (cal.conditions.maps for cal in (linear[2], fit(dealt, family="shift")))
    assert not torch.equal(dealt.rows, linear[1].rows)
    difference = (one - other).square().sum((1, 2, 3)) / one.square().sum((1, 2, 3))
    assert float(difference.max()) < 0.02  # 0.001 here; of folds' shares of the samples it was up to 0.4


def test_sums_that_were_added_in_another_order_are_no_damage(linear, tmp_path):
    """Features are nearly uncorrelated, so that a rounding may be much of a sum of their products."""
    moments = linear[1]
    gram = moments.conditions.gram.clone()
    gram[0, 0, 0, 1], gram[0, 0, 1, 0] = 1e-14, 2e-14
    honest = replace(moments, conditions=replace(moments.conditions, gram=gram))
    honest.save(tmp_path / "a.safetensors")
    gram = gram.clone()
    gram[0, 0, 0, 1] += 1e-6 * float(gram[0, 0, 0, 0])
    forged = replace(moments, conditions=replace(moments.conditions, gram=gram))
    with pytest.raises(TrueupError, match="gram is not symmetric"):
        forged.save(tmp_path / "b.safetensors")


def test_weights_edges_and_decay_reach_the_features(linear):
    """Rows that count twice are rows that came twice, and bands may be others."""
    x, c = drawn(24, 4)
    rows = torch.arange(24)
    projection, count = see([drawn(200, 1)[1]])

    def summed(*weights, edges=(0.5, 2.5, 4.5)):
        made = Moments.empty(VP, LEVELS[::3], SHAPE, edges=edges)
        cells = (made.folds, made.levels)
        made.conditions = Conditions.empty(projection, count, cells, SHAPE[0], made.bands)
        for weight in weights:
            made.add(rows % made.levels, rows, x, 0.5 * x, 2 * x, y=c, weight=weight)
        return made

    once, twice, double = summed(1.0), summed(1.0, 1.0), summed(2.0)
    for name in ("total", "gram", "sums"):
        one, two, weighted = (getattr(part.conditions, name) for part in (once, twice, double))
        assert torch.allclose(weighted, two)
        assert not torch.allclose(weighted, one)
    double.decay(0.5)
    for name in ("total", "gram", "sums"):
        assert torch.allclose(getattr(double.conditions, name), getattr(once.conditions, name))
