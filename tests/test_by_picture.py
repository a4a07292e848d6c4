"""Conditions that are pictures: an ideal network's residual has nothing to do with them."""

import math
from dataclasses import replace

import pytest
import torch

import trueup
from trueup.calibration import OfPictures
from trueup.errors import ArtifactError, AttachError, DataError
from trueup.estimate import Moments, fit, measure, merge
from trueup.process import DiscreteVP

SHAPE = (1, 8, 8)
OWN, TOLD = 0.5, (0.7, 0.5)  # of the data's standard deviation: its own, and of each picture
PROCESS = DiscreteVP.linear()
LEVELS = PROCESS.snap(PROCESS.t_of_lam(torch.linspace(1.6, -2, 10).double())).flip(0)


def ideal(x_t, t, y, used=(1.0, 1.0)):
    """E[eps | x_t, what is used of the pictures] for x0 = sum TOLD_m y_m + OWN w, all of them white."""
    alpha, sigma = (part(t).reshape(-1, 1, 1, 1).float() for part in (PROCESS.alpha, PROCESS.sigma))
    known = sum(on * told * y[:, m : m + 1] for m, (on, told) in enumerate(zip(used, TOLD, strict=True)))
    left = OWN**2 + sum((1 - on) * told**2 for on, told in zip(used, TOLD, strict=True))
    return sigma * (x_t - alpha * known) / (alpha**2 * left + sigma**2)


class Told(torch.nn.Module):
    """Ideal for what it uses of its two pictures."""

    def __init__(self, used):
        super().__init__()
        self.used, self.none = used, torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, t, y):
        return ideal(x, t.double().reshape(-1), y, self.used) + self.none


def denoiser(used=(1.0, 0.0), **more):
    return trueup.Denoiser(Told(used), PROCESS, "noise", SHAPE, conditional=True, data_range=None, **more)


def drawn(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y, own = (torch.randn(count, m, 8, 8, generator=generator) for m in (2, 1))
    return sum(told * y[:, m : m + 1] for m, told in enumerate(TOLD)) + OWN * own, y


def images(drawn_from, seed, **more):
    return trueup.Images(list(zip(*drawn(drawn_from, seed), strict=True)), data_range=None, **more)


def loss(net, t, count=2000):
    """|eps_hat - eps|^2 of an image."""
    x0, y = drawn(count, 99)
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(98))
    x_t = PROCESS.noised(x0, eps, torch.tensor(float(t)))
    with torch.no_grad():
        found = net.eps(x_t, float(t), y)
    return (found - eps).square().sum((1, 2, 3))


@pytest.fixture(scope="module")
def half_deaf():
    """A network that hears one of its two pictures, what was measured of it, and its calibration."""
    net = denoiser()
    moments = measure(net, images(300, 0), levels=LEVELS, trust=True, progress=False)
    return net, moments, fit(moments)


def test_a_picture_that_a_network_does_not_hear_is_put_back(half_deaf):
    net, _, cal = half_deaf
    assert isinstance(cal.conditions, OfPictures)
    assert cal.conditions.gain.low > 0
    for t in LEVELS[2:8:2]:
        before, best = loss(net, t), loss(denoiser((1.0, 1.0)), t)
        with trueup.attach(net, cal, gains="least-squares"):
            after = loss(net, t)
        # In closed form: alpha^2 v sigma^0 / (alpha^2 v + sigma^2) a pixel, with v what is not known.
        alpha, sigma = float(PROCESS.alpha(t)), float(PROCESS.sigma(t))
        least, deaf = (64 * alpha**2 * v / (alpha**2 * v + sigma**2) for v in (OWN**2, OWN**2 + TOLD[1] ** 2))
        assert before.mean() == pytest.approx(deaf, rel=0.02)
        assert best.mean() == pytest.approx(least, rel=0.02)
        # From 300 images: nearly all of it, and never below what is possible, but for noise.
        excess = float((after - best).mean() / (before - best).mean())
        assert -0.02 < excess < 0.1


def test_the_gain_that_is_told_is_what_is_found(half_deaf):
    net, _, cal = half_deaf
    lam, gains = cal.correction.lam, []
    for t in LEVELS:
        with trueup.attach(net, cal, gains="least-squares"):
            gains.append(float((loss(denoiser(), t) - loss(net, t)).mean()))
    found = float(torch.trapezoid(torch.tensor(gains).double(), -lam))
    told = cal.conditions.gain.value + cal.evidence.bound_gain.value
    reach = cal.conditions.gain.reach + cal.evidence.bound_gain.reach
    assert abs(found - told) < 1.5 * reach + 0.03 * found


def test_an_ideal_network_gets_nothing():
    for used, seed in (((1.0, 1.0), 1), ((1.0, 1.0), 2)):
        cal = fit(measure(denoiser(used), images(120, seed), levels=LEVELS, trust=True, progress=False))
        assert cal.conditions is None
        assert cal.empty


def test_what_output_and_input_say_already_is_no_part_of_it():
    # It hears both, half as loud as it should: the gain on its output sees to that, and nothing is left.
    class Quiet(Told):
        def forward(self, x, t, y):
            return 0.5 * (super().forward(x, t, y) + ideal(x, t.double().reshape(-1), y, (0.0, 0.0)))

    net = trueup.Denoiser(Quiet((1.0, 1.0)), PROCESS, "noise", SHAPE, conditional=True, data_range=None)
    cal = fit(measure(net, images(300, 3), levels=LEVELS, trust=True, progress=False))
    assert not cal.correction.empty
    best = cal.evidence.bound_gain.value
    assert cal.conditions is None or cal.conditions.gain.value < 0.02 * best


def test_what_is_subtracted_is_the_definition(half_deaf):
    net, _, cal = half_deaf
    of, bands = cal.conditions, cal.correction.bands
    x0, y = drawn(5, 7)
    t = LEVELS[4]
    x_t = PROCESS.noised(x0, torch.randn_like(x0), t)
    bare, as_it_is = net.eps(x_t, float(t), y).double(), net.network(x_t, t.expand(5), y)
    u, at = x_t.double() / PROCESS.sigma(t), cal.correction.lam == PROCESS.lam(t)
    gains, rest, _ = of.at(PROCESS.lam(t)[None])
    made = bare - cal.correction.at_levels(at).delta(bare, u) - rest.delta(bare, u)
    gains = bands.spread_all(gains[0])  # (C, M, *spatial)
    made = made - bands.idct((gains * bands.dct(y.double())[:, None]).sum(2))
    with trueup.attach(net, cal, gains="least-squares"):
        through = net.network(x_t, t.expand(5), y)
        assert torch.allclose(through.double(), made, atol=1e-5)
        assert torch.allclose(net.eps(x_t, float(t), y), through, atol=1e-6)
    assert torch.equal(net.network(x_t, t.expand(5), y), as_it_is)


def test_what_is_subtracted_has_no_mean_and_no_part_in_output_and_input(half_deaf):
    _, _, cal = half_deaf
    of, bands = cal.conditions, cal.correction.bands
    x0, y = drawn(4000, 11)
    t = LEVELS[4]
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(5))
    x_t = PROCESS.noised(x0, eps, t)
    u = (x_t / PROCESS.sigma(t)).double()
    with torch.no_grad():
        bare = denoiser().eps(x_t, float(t), y).double()
    gains, rest, usual = of.at(PROCESS.lam(t)[None])
    gains = bands.spread_all(gains[0])
    q = rest.delta(bare, u) + bands.idct((gains * bands.dct(y.double())[:, None]).sum(2))
    size = q.square().mean().sqrt()
    assert size > 0.01
    assert 64 * float(size**2) == pytest.approx(float(usual), rel=0.1)
    for other in (bare, u, torch.ones_like(u)):
        part = float((q * other).mean() / (size * other.square().mean().sqrt()))
        assert abs(part) < 0.1  # 300 images know it to a percent or two


def test_what_is_nearly_seen_in_the_input_is_right_between_levels_too():
    """x0 = y + w/10, y around 3, and a network that does not hear y: what is left is small."""
    generator = torch.Generator().manual_seed(0)

    def pairs(count):
        y, own = torch.randn(2, count, *SHAPE, generator=generator)
        return 3 + y + 0.1 * own, 3 + y

    def of(left):
        def eps(x_t, t, y):
            alpha, sigma = (part(t).float() for part in (PROCESS.alpha, PROCESS.sigma))
            known = y if left < 1 else 3.0
            return sigma * (x_t - alpha * known) / (alpha**2 * left + sigma**2)

        return eps

    deaf, ideally = of(1.01), of(0.01)
    levels = PROCESS.t_of_lam(torch.arange(3.0, 0.9, -0.4).double()).flip(0)
    how = {"conditional": True, "data_range": None}
    net = trueup.Denoiser(
        lambda x, t, y: deaf(x, t.double().reshape(-1, 1, 1, 1), y), PROCESS, "noise", SHAPE, **how
    )
    images = trueup.Images(list(zip(*pairs(200), strict=True)), data_range=None)
    cal = fit(measure(net, images, levels=levels, trust=True, progress=False))
    x0, y = pairs(1000)
    for lam in (2.8, 2.6, 2.0, 1.8, 1.2):  # of levels, and halfway between two
        t = PROCESS.t_of_lam(torch.tensor(lam).double())
        eps = torch.randn(x0.shape, generator=generator)
        x_t = PROCESS.noised(x0, eps, t)
        before, best = ((one(x_t, t, y) - eps).square().mean() for one in (deaf, ideally))
        with trueup.attach(net, cal, gains="least-squares"):
            after = (net.eps(x_t, float(t), y) - eps).square().mean()
        assert float((after - best) / (before - best)) < 0.05


def test_smaller_pictures_are_those_of_the_same_scene(half_deaf):
    # Low resolution, as in super-resolution: what the larger picture's low frequencies would have said.
    x0, y = drawn(200, 3)
    low = torch.nn.functional.interpolate(y, scale_factor=0.5, mode="area")
    wide = torch.nn.functional.interpolate(low, scale_factor=2, mode="nearest")

    class Deaf(Told):
        def forward(self, x, t, y):
            return super().forward(x, t, torch.zeros(len(x), 2, 8, 8))

    gains = []
    for told in (low, wide):
        net = trueup.Denoiser(Deaf((0.0, 0.0)), PROCESS, "noise", SHAPE, conditional=True, data_range=None)
        pairs = trueup.Images(list(zip(x0, told, strict=True)), data_range=None)
        cal = fit(measure(net, pairs, levels=LEVELS, trust=True, progress=False))
        assert cal.conditions.channels == 2
        gains.append(cal.conditions.gain)
        with trueup.attach(net, cal), torch.no_grad():
            net.eps(x0[:2], 500, told[:2])
    # The larger one has blocks, whose edges say a little more.
    assert gains[0].value == pytest.approx(gains[1].value, rel=0.25)
    assert min(gain.low for gain in gains) > 0


def test_files_moments_runs_and_shares_have_them(half_deaf, tmp_path):
    net, moments, cal = half_deaf
    cal.save(tmp_path / "x.trueup.safetensors")
    back = trueup.load(tmp_path / "x.trueup.safetensors")
    assert back.identity == cal.identity
    assert back.conditions.channels == 2
    assert "bands of the condition's picture (2 channels)" in back.summary()
    moments.save(tmp_path / "m")
    again = fit(Moments.load(tmp_path / "m"))
    assert again.identity == cal.identity

    how = {"levels": LEVELS[::3], "trust": True, "progress": False}
    for count in (40, 80):
        grown = measure(net, images(100, 4, count=count), run=tmp_path / "run", **how)
    whole = measure(net, images(100, 4, count=80), **how)
    net = denoiser(batch_size=16)
    shares = [measure(net, images(100, 4, count=80), share=(k, 2), **how) for k in (1, 2)]
    for other in (grown, merge(shares)):
        for name in whole.conditions.NAMES:
            ours, theirs = (getattr(one.conditions, name) for one in (whole, other))
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * float(ours.abs().max()))
    assert whole.conditions.size == (2, 8, 8)


def test_a_changed_file_is_refused(half_deaf, tmp_path):
    from safetensors.torch import load_file

    _, moments, _ = half_deaf
    moments.save(tmp_path / "m")
    assert "condition.gram" in load_file(tmp_path / "m")
    moments = Moments.load(tmp_path / "m")
    for name in moments.conditions.NAMES:
        changed = Moments.load(tmp_path / "m")
        sums = getattr(changed.conditions, name)
        at = (0, 0, 0, 1) if name == "gram" else (0, 0, 0)  # of two pictures: of one, it may be any size
        sums[at] += 1000 * sums.abs().max()
        with pytest.raises((ArtifactError, trueup.TrueupError), match=f"condition.{name}"):
            changed.save(tmp_path / "n")


def test_at_other_sizes_it_is_left_out(half_deaf):
    net, _, cal = half_deaf
    assert cal.resized((12, 8)).conditions is None
    large = trueup.Denoiser(net.network, PROCESS, "noise", (1, 16, 16), conditional=True, data_range=None)
    x_t, y = torch.randn(2, 1, 16, 16), torch.randn(2, 2, 16, 16)
    with torch.no_grad():
        found = []
        for one in (cal, replace(cal, conditions=None)):
            with trueup.attach(large, one):
                found.append(large.eps(x_t, 500, y))
    assert torch.equal(*found)


def test_a_blank_and_what_is_unlike_all_pictures_change_nothing(half_deaf):
    """Guidance tells a blank where it tells nothing."""
    net, _, cal = half_deaf
    x0, y = drawn(4, 0)
    t = float(LEVELS[4])
    for told in (0 * y, 0 * y + 3.0, 50 * y):
        with torch.no_grad():
            bare = net.eps(x0, t, told)
            with trueup.attach(net, cal, gains="least-squares"):
                assert torch.allclose(net.eps(x0, t, told), bare, atol=1e-5)  # the rest corrects nothing here
                both = net.eps(torch.cat([x0, x0]), t, torch.cat([y, told]))
                assert torch.allclose(both[:4], net.eps(x0, t, y), atol=1e-6)
                assert not torch.allclose(both[:4], net.network(x0, torch.full((4,), t), 0 * y), atol=1e-2)


def test_channels_that_are_one_another_say_no_less():
    """A gray picture as three channels, and one that is always the same."""

    class Deaf(Told):
        def forward(self, x, t, y):
            return super().forward(x, t, torch.zeros(len(x), 2, *x.shape[2:]))

    net = trueup.Denoiser(Deaf((0.0, 0.0)), PROCESS, "noise", SHAPE, conditional=True, data_range=None)
    x0, y = drawn(200, 3)
    found = []
    for told in (y[:, :1], y[:, [0, 0, 0]], torch.cat([y[:, :1], 0 * y + 280.0], 1)):
        pairs = trueup.Images(list(zip(x0, told, strict=True)), data_range=None)
        found.append(
            fit(measure(net, pairs, levels=LEVELS, trust=True, progress=False)).conditions.gain.value
        )
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[2] == pytest.approx(found[0], rel=1e-3)


def test_what_is_no_picture_of_that_size_is_refused(half_deaf):
    net, moments, cal = half_deaf
    x0, y = drawn(4, 0)
    with trueup.attach(net, cal):
        hook = next(iter(net.network._forward_hooks.values()))
        for told in (y[:, :1], y[:, :, 0], y[:3], None):
            with pytest.raises(AttachError, match="a condition's picture, 2 channels of one for each row"):
                hook.correct(x0, x0, 500.0, told)
    level = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(trueup.TrueupError, match="needs its own"):
        moments.add(level, level, x0, x0, x0)
    with pytest.raises(DataError, match=r"a condition is \(1, 8, 8\), and others are \(2, 8, 8\)"):
        moments.add(level, level, x0, x0, x0, y=y[:, :1])
    with pytest.raises(DataError, match="pictures, whose bands are looked at unasked"):
        measure(net, images(40, 0), levels=LEVELS, per_embedding=True, trust=True, progress=False)


def test_only_pictures_are_taken_for_some():
    from trueup.calibration.pictures import size_of_picture

    def size(*dims, shape=SHAPE, dtype=torch.float32):
        return size_of_picture(torch.zeros(2, *dims, dtype=dtype), shape)

    assert size(3, 4, 4) == (3, 4, 4)
    assert size(1, 8, 8, dtype=torch.uint8) == (1, 8, 8)
    assert size(16) is None  # an embedding
    assert size(77, 768) is None  # tokens
    assert size(77, 768, shape=(1, 500)) is None  # beside a signal
    assert size(2, 500, shape=(1, 500)) == (2, 500)
    assert size(17, 8, 8) is None  # features of another network
    assert size(2, 8, 8, dtype=torch.int64) is None  # numbers of something
    assert size_of_picture(None, SHAPE) is None
    assert math.prod(size(1, 8, 8)) == 64
