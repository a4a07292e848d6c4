"""Large samples: means of some coefficients alone, and what that leaves as it was."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import trueup
from trueup import bands
from trueup.bands import KEPT, Bands, kept_frequencies
from trueup.calibration import Correction
from trueup.doctor.maps import grid
from trueup.doctor.parts import Parts
from trueup.estimate import Moments, fit, measure
from trueup.estimate.confirm import score
from trueup.fitting import fit_solver
from trueup.process import DiscreteVP

from calibrations import make

SHAPES = {
    "SD3 and Flux at 1024 pixels": (16, 128, 128),
    "pixels": (3, 1024, 1024),
    "video": (16, 21, 60, 104),
}
SMALL = (2, 16, 12)  # large, once it is said to be
LINEAR = DiscreteVP.linear()


@pytest.fixture
def low(monkeypatch):
    """Samples of more than 100 values are large, and keep 80 means."""
    monkeypatch.setattr(bands, "WHOLE", 100)
    monkeypatch.setattr(bands, "KEPT", 80)
    bands._usual.cache_clear()
    yield
    bands._usual.cache_clear()


class Scaled(nn.Module):
    """A network that answers with so much of its input, and a fixed picture."""

    def __init__(self, picture=0.0, share=0.9):
        super().__init__()
        self.share = nn.Parameter(torch.tensor(share))
        self.register_buffer("picture", torch.as_tensor(picture))

    def forward(self, x, t):
        return self.share * x + self.picture


def normal(*dims, seed=0):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


# --- what is kept


@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 128, 128), (16, 64, 64), (3, 128, 128), (1, 256, 256)])
def test_up_to_65536_values_everything_is_kept(shape):
    assert kept_frequencies(shape) is None
    assert Bands.of(shape).whole
    assert Bands.of(shape).length == math.prod(shape[1:])


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), (3, 256, 256), (64, 40, 40), (2, 2**17), (5, 3, 900, 70)]
)
def test_of_larger_ones_the_lowest_and_those_of_patches_are_kept(shape):
    axes = kept_frequencies(shape)
    assert KEPT / 2 < shape[0] * math.prod(map(len, axes)) <= KEPT
    for axis, size in zip(axes, shape[1:], strict=True):
        assert axis == sorted(set(axis))
        assert 0 <= axis[0] <= axis[-1] < size
        lowest = next(k for k, frequency in enumerate([*axis, None]) if frequency != k)
        assert lowest >= len(axis) / 2
        if len(axis) >= 3:
            assert axis[-1] == size - 1  # what alternates


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_moments_of_25_levels_take_a_fifth_of_a_gigabyte(shape):
    moments = Moments.empty(LINEAR, range(0, 1000, 40), shape)
    sums = sum(getattr(moments, name).nbytes for name in ("first", "second", "data_first", "data_second"))
    assert moments.folds == 16
    assert sums < 0.25e9


def test_grids_that_no_file_could_hold_are_refused():
    with pytest.raises(trueup.TrueupError, match="at most 4,194,304 places"):
        Bands.of((1, 2**13, 2**13))


# --- patterns of patches


@pytest.mark.parametrize(
    ("size", "channels", "period"), [(1024, 3, 16), (1024, 3, 4), (128, 16, 8), (128, 16, 2)]
)
def test_what_repeats_with_the_patches_is_kept(size, channels, period):
    """All of a pattern that is symmetric within a patch, and most of the power of any, its mean aside."""
    made, count = Bands.of((channels, size, size)), size // period
    pattern = normal(period, period).double()
    pattern -= pattern.mean()
    whole = made.dct(pattern.tile(count, count))
    assert made.keep(whole).square().sum() > 0.6 * whole.square().sum()
    if period > 2:  # else nothing is symmetric
        even = pattern + pattern.flip(0) + pattern.flip(1) + pattern.flip((0, 1))
        whole = made.dct(even.tile(count, count))
        assert made.keep(whole).square().sum() > 0.999 * whole.square().sum()


def test_a_patch_grid_and_a_drift_are_corrected_in_large_samples(monkeypatch):
    """Half of the coefficients kept, or all: what is taken off the loss is the same."""
    tile = torch.tensor([[1.0, 0.2, 0.2, 1.0]]).T @ torch.tensor([[1.0, -0.5, -0.5, 1.0]])
    drift = torch.cos(math.pi * (torch.arange(32) + 0.5) / 32)[:, None].expand(32, 32)
    network = Scaled(0.1 * tile.tile(8, 8) + 0.2 * drift, 1.0)
    denoiser = trueup.Denoiser(network, LINEAR, "noise", (1, 32, 32), data_range=None, batch_size=32)
    gains = []
    for whole, kept in ((2**16, KEPT), (100, 512)):
        monkeypatch.setattr(bands, "WHOLE", whole)
        monkeypatch.setattr(bands, "KEPT", kept)
        bands._usual.cache_clear()
        moments = measure(
            denoiser, 0.5 * normal(64, 1, 32, 32), levels=[600, 800, 950], trust=True, progress=False
        )
        assert moments.bands.whole == (kept == KEPT)
        gains.append(fit(moments, family="shift").evidence.gain.value)
        found = grid(Parts(moments))
        assert found.found
        assert found.period == 4
    bands._usual.cache_clear()
    power = float((0.1 * tile.tile(8, 8) + 0.2 * drift).square().sum())
    assert torch.allclose(gains[0], gains[1], rtol=0.05)
    assert (gains[1] > 0.9 * power).all()


# --- what is said of them is exact


def moments_of(eps_hat, eps, u):
    moments = Moments.empty(LINEAR, [200, 700], SMALL)
    level, index = torch.arange(len(u)) % 2, torch.arange(len(u)) // 2
    moments.add(level, index, eps_hat, eps, u)
    moments.add_samples(index[::2], u[::2], None)
    return moments, level


def test_moments_know_the_loss_of_a_corrected_network(low):
    eps, u = normal(40, *SMALL, seed=1), normal(40, *SMALL, seed=2) + 0.3
    eps_hat = 0.8 * eps + 0.3 * u + 0.1 * normal(*SMALL, seed=3)
    moments, level = moments_of(eps_hat, eps, u)
    made = moments.bands
    assert not made.whole
    assert moments.first.shape[-1] == made.length < math.prod(SMALL[1:])
    b, a = normal(2, 2, made.length, seed=4).double(), 0.1 * normal(2, 2, made.count, seed=5).double()
    correction = Correction(moments.lam, 0.1 * b, a, -0.5 * a, made)
    after = torch.stack([correction.apply(*(v[i : i + 1] for v in (eps_hat, u)), moments.lam[k : k + 1])[0]
                         for i, k in enumerate(level.tolist())])  # fmt: skip
    brute, _ = moments_of(after, eps, u)
    found = moments.corrected(correction)
    assert torch.allclose(found.second, brute.second, rtol=1e-4, atol=1e-3)
    assert torch.allclose(found.first, brute.first, rtol=1e-4, atol=1e-3)
    before, now = (m.second[0, :, :, 0].sum((0, 2, 3)) for m in (moments, brute))
    assert torch.allclose(score(moments, correction).gain().sum((0, 2)), before - now, rtol=1e-4)


def test_what_was_kept_is_what_would_be_without_the_rest(low):
    vectors = [normal(40, *SMALL, seed=k) for k in range(3)]
    large, _ = moments_of(*vectors)
    bands.WHOLE = 2**16
    bands._usual.cache_clear()
    whole, _ = moments_of(*vectors)
    kept = large.bands.places
    assert torch.allclose(large.first, whole.first[..., kept])
    assert torch.allclose(large.data_first, whole.data_first[..., kept])
    for name in ("rows", "second", "data_second"):
        assert torch.allclose(getattr(large, name), getattr(whole, name))


def test_rows_are_added_in_parts_or_together(low, monkeypatch):
    vectors = [normal(40, *SMALL, seed=k) for k in range(3)]
    together, _ = moments_of(*vectors)
    monkeypatch.setattr("trueup.estimate.moments._AT_ONCE", 3 * math.prod(SMALL))
    parts, _ = moments_of(*vectors)
    assert torch.allclose(parts.first, together.first, rtol=1e-12)
    assert torch.allclose(parts.second, together.second, rtol=1e-6)


# --- the hook, files, other sizes


@pytest.mark.parametrize("family", ["spectral", "shift"])
@pytest.mark.parametrize("spatial", [SMALL[1:], (24, 12), (8, 20)], ids=str)
def test_attached_is_as_defined(low, family, spatial):
    net = Scaled()
    cal = make(SMALL, LINEAR, 4, keep=range(20), family=family, network=net)
    assert not cal.correction.bands.whole
    x_t, t = normal(3, 2, *spatial), torch.tensor([10, 333, 820])
    before = net(x_t, t)
    sized = cal.resized(spatial).for_samples
    sigma = LINEAR.sigma(t).float().reshape(-1, 1, 1, 1)
    order = LINEAR.lam(t).argsort(descending=True)
    expected = sized.apply(before[order], (x_t / sigma)[order], LINEAR.lam(t)[order])
    with trueup.attach(net, cal), torch.no_grad():
        assert torch.allclose(net(x_t, t)[order], expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_files_hold_them(low, tmp_path):
    cal = make(SMALL, LINEAR, keep=range(20), solvers=True)
    cal.save(tmp_path / "x")
    again = trueup.load(tmp_path / "x")
    assert again.identity == cal.identity
    assert torch.equal(again.correction.b, cal.correction.b.float().double())
    denoiser = trueup.Denoiser(Scaled(), LINEAR, "noise", SMALL, data_range=None)
    moments = measure(denoiser, normal(5, *SMALL), levels=[200, 700], trust=True, progress=False)
    moments.save(tmp_path / "y")
    assert torch.equal(Moments.load(tmp_path / "y").first, moments.first)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_file_with_everything_in_it_is_below_5_megabytes(shape, tmp_path):
    cal = make(shape, LINEAR, range(0, 1000, 40), keep=range(99), solvers=True)
    cal.save(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 5e6
    hook = trueup.calibration.hook.CorrectOutput(cal)
    tables = hook._tables(torch.device("cpu"), torch.float32, shape[1:])
    parts = [part for one in tables for part in (one if isinstance(one, list) else [one])]
    assert sum(part.nbytes for part in parts if isinstance(part, torch.Tensor)) < 40e6


@pytest.mark.parametrize("gains", ["sqrt", "response"])
def test_a_large_sample_goes_through_calibrate_samples_and_solver(low, gains, tmp_path):
    net = Scaled(0.2, 0.8)
    denoiser = trueup.Denoiser(net, LINEAR, "noise", SMALL, data_range=None, batch_size=40)
    data = 0.3 * normal(40, *SMALL) + 0.1
    cal = trueup.calibrate(denoiser, data, levels=[300, 500, 700, 900], progress=False, trust=True)
    assert not cal.correction.empty
    cal = fit_solver(denoiser, replace(cal, gains=gains), nfe=3, trajectories=32, progress=False)
    cal.save(tmp_path / "x")
    kept = trueup.load(tmp_path / "x")
    ours, theirs = (trueup.sample(denoiser, 4, nfe=3, calibration=c, progress=False) for c in (cal, kept))
    assert torch.isfinite(ours).all()
    assert torch.allclose(ours, theirs, atol=1e-4)  # a file keeps single precision


def test_embeddings_of_samples_of_which_some_bands_are_not_kept(low):
    """The lowest bands up to the first that holds nothing: those beyond it would have no mean."""
    generator, shape = torch.Generator().manual_seed(0), (2, 16, 12)
    x, c = torch.randn(60, *shape, generator=generator), torch.randn(60, 6, generator=generator)

    def said(x, t, y):
        return 0.9 * x + 0.3 * y[:, :1, None, None]

    process = trueup.process.DiscreteVP.linear()
    net = trueup.Denoiser(said, process, "noise", shape, data_range=None, conditional=True)
    how = {"levels": [300, 500, 700], "per_embedding": True, "trust": True, "progress": False}
    moments = trueup.estimate.measure(net, trueup.Images(x, labels=c), **how)
    assert (moments.bands.kept == 0).any()
    assert trueup.estimate.fit(moments).evidence.gain.value.isfinite().all()
