"""The DCT against scipy, and the bands against what they promise."""

import pytest
import torch
from scipy import fft

from trueup.bands import Bands, band_variance, dct_matrix, default_edges
from trueup.errors import TrueupError

GRIDS = [
    (1,),
    (2,),
    (7,),
    (64,),
    (8, 8),
    (6, 9),
    (32, 32),
    (1, 5),
    (5, 1),
    (1, 1),
    (4, 5, 6),
    (3, 1, 8),
    (2, 2, 2),
]


def draw(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_dct_is_scipys(spatial):
    x = draw(2, 3, *spatial)
    axes = tuple(range(2, x.dim()))
    bands = Bands(spatial)
    expected = torch.from_numpy(fft.dctn(x.numpy(), axes=axes, norm="ortho"))
    torch.testing.assert_close(bands.dct(x), expected)
    torch.testing.assert_close(bands.idct(x), torch.from_numpy(fft.idctn(x.numpy(), axes=axes, norm="ortho")))


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_dct_inverts_and_keeps_lengths(spatial):
    bands, x = Bands(spatial), draw(3, *spatial)
    torch.testing.assert_close(bands.idct(bands.dct(x)), x)
    torch.testing.assert_close(bands.dct(x).square().sum(), x.square().sum())  # Parseval


def test_dct_keeps_dtype_and_takes_any_leading_axes():
    bands = Bands((4, 6))
    for dtype in (torch.float32, torch.float64):
        assert bands.dct(draw(4, 6, dtype=dtype)).dtype == dtype
    one = draw(2, 3, 5, 4, 6)
    torch.testing.assert_close(bands.dct(one)[1, 2, 3], bands.dct(one[1, 2, 3]))


def test_dct_can_be_differentiated_after_inference_mode():
    dct_matrix.cache_clear()
    with torch.inference_mode():
        Bands((5, 7)).dct(draw(5, 7))
    x = draw(5, 7).requires_grad_()
    Bands((5, 7)).dct(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # lengths are kept


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_sum_and_spread_are_adjoint(spatial):
    bands = Bands(spatial)
    x, y = draw(2, bands.index.numel()), draw(2, bands.count)
    torch.testing.assert_close((bands.sum(x) * y).sum(), (x * bands.spread(y)).sum())


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_every_coefficient_is_in_exactly_one_band(spatial):
    bands = Bands(spatial)
    count = bands.index.numel()
    members = torch.cat(bands.members)
    assert torch.equal(members.sort().values, torch.arange(count))
    assert bands.index.shape == spatial
    assert [len(m) for m in bands.members] == bands.sizes.tolist()
    assert int(bands.sizes.sum()) == count
    assert int(bands.sizes.min()) >= 1
    torch.testing.assert_close(bands.sum(torch.ones(count)), bands.sizes.float())
    torch.testing.assert_close(bands.spread(torch.arange(bands.count)), bands.index.flatten())


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_band_zero_is_the_mean_alone(spatial):
    bands = Bands(spatial)
    assert bands.members[0].tolist() == [0]
    x = draw(*spatial)
    only_mean = torch.where(bands.index == 0, bands.dct(x), 0)
    torch.testing.assert_close(bands.idct(only_mean), x.mean().expand(spatial))


@pytest.mark.parametrize("spatial", GRIDS, ids=str)
def test_bands_rise_along_every_axis(spatial):
    index = Bands(spatial).index
    for axis in range(index.dim()):
        assert (index.diff(dim=axis) >= 0).all()


def test_axes_of_one_pixel_change_nothing():
    assert torch.equal(Bands((1, 9)).index.flatten(), Bands((9,)).index)
    assert torch.equal(Bands((9, 1, 4)).index.squeeze(), Bands((9, 4)).index)


def test_bands_are_round_in_cycles_per_pixel():
    """On a grid twice as wide as high, the k-th row has the frequency of the 2k-th column."""
    index = Bands((8, 16)).index
    assert torch.equal(index[:, 0], index[0, ::2])


def test_bands_of_a_square_grid_are_symmetric():
    index = Bands((12, 12)).index
    assert torch.equal(index, index.T)


def test_default_edges_are_finest_at_low_frequencies():
    assert default_edges(45.0) == [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0]


def test_edges_may_be_chosen():
    bands = Bands((6,), edges=[0.5, 3])
    assert bands.index.tolist() == [0, 1, 1, 2, 2, 2]
    assert Bands((6,), edges=[]).index.tolist() == [0] * 6
    assert Bands((6,), edges=[0.5, 0.6, 0.7, 100]).index.tolist() == [0, 1, 1, 1, 1, 1]  # no empty bands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), "at least one spatial axis"),
        (((4, 0),), "at least one pixel"),
        (((4,), [2, 1]), "must rise"),
        (((4,), [1, 1]), "must rise"),
    ],
)
def test_nonsense_is_refused_with_a_reason(arguments, message):
    with pytest.raises(TrueupError, match=message):
        Bands(*arguments)


def test_the_error_of_a_variance_from_few_folds_is_that_of_gaussian_data():
    """Three say nothing of how they scatter; 400 repetitions do, to 4%."""
    bands, rows = Bands((6, 6)), torch.full((3,), 20.0, dtype=torch.float64)
    z = torch.randn(400, 3, 20, 1, 36, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = [band_variance(bands, one.sum(1), bands.sum(one.square()).sum(1), rows) for one in z]
    variance, error = (torch.stack(parts)[:, 0] for parts in zip(*made, strict=True))  # (400, bands)
    assert torch.allclose(error.mean(0), variance.std(0), rtol=0.2)
