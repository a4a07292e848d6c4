"""The noise is standard normal, independent where it should be, and fixed by (seed, sample, level) alone."""

import itertools
import math

import pytest
import torch
from scipy import stats

from trueup.noise import level_key, mix, normal

CPU = torch.device("cpu")
SHAPE = (3, 8, 8)
LEVEL = level_key(500.0)

# The seeds are fixed, so these tests cannot flicker; the bounds say how unlucky a good generator may look.
# Five standard errors are exceeded with probability 6e-7 per comparison.
UNLUCKY = 5.0


def noise(seed=0, samples=range(1000), t=500.0, shape=SHAPE) -> torch.Tensor:
    """(samples, entries) in float64."""
    index = torch.tensor(list(samples))
    return normal(seed, index, level_key(t), shape, CPU).flatten(1).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_moments_are_those_of_a_standard_normal(seed):
    x = noise(seed).flatten()
    n = x.numel()  # 192,000
    # Each standard error is sqrt(variance/n); x, x^2, x^3 and x^4 of a normal have variances 1, 2, 15 and 96.
    assert abs(x.mean()) < UNLUCKY * math.sqrt(1 / n)
    assert abs((x**2).mean() - 1) < UNLUCKY * math.sqrt(2 / n)
    assert abs((x**3).mean()) < UNLUCKY * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < UNLUCKY * math.sqrt(96 / n)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("one image", lambda: noise(samples=[7], shape=(3, 64, 64))),
        ("one position over images", lambda: noise(samples=range(4000), shape=(1, 1, 2))[:, 0]),
        ("its partner", lambda: noise(samples=range(4000), shape=(1, 1, 2))[:, 1]),
        ("one entry over levels", lambda: torch.cat([noise(t=t, samples=[3])[0, :1] for t in range(1000)])),
        (
            "one entry over seeds",
            lambda: torch.cat([noise(seed, samples=[3])[0, :1] for seed in range(1000)]),
        ),
    ],
)
def test_distribution_is_normal_along_every_axis(name, values):
    # Five fixed draws: a p-value below 1e-3 in one of them would be a surprise of one in two hundred.
    assert stats.kstest(values().flatten().numpy(), "norm").pvalue > 1e-3, name


def test_tails_are_neither_cut_nor_fat():
    x = noise(samples=range(4000)).flatten()
    for bound in (3.0, 4.0):
        expected = len(x) * math.erfc(bound / math.sqrt(2))
        seen = int((x.abs() > bound).sum())
        assert abs(seen - expected) < UNLUCKY * math.sqrt(expected)  # Poisson
    assert torch.isfinite(x).all()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("next sample", lambda: noise(samples=range(1, 1001))),
        ("distant sample", lambda: noise(samples=range(10**12, 10**12 + 1000))),
        ("next timestep", lambda: noise(t=501.0)),
        ("nearest time in float64", lambda: noise(t=math.nextafter(500.0, 501.0))),
        ("opposite time", lambda: noise(t=-500.0)),
        ("next seed", lambda: noise(seed=1)),
        ("negative seed", lambda: noise(seed=-1)),
        ("next entry", lambda: noise().roll(1, 1)),
        ("partner entry", lambda: noise().roll(96, 1)),
    ],
)
def test_noise_is_independent_across(name, other):
    a, b = noise(), other()
    bound = UNLUCKY / math.sqrt(a.numel())  # the standard error of a correlation of independent values
    assert abs(correlation(a, b)) < bound, name
    assert abs(correlation(a**2, b**2)) < bound, name  # shared scales would show here


def test_no_two_positions_carry_the_same_noise():
    x = noise(samples=range(4000), shape=(1, 8, 8))  # (4000, 64)
    for values in (x, x**2):
        between = torch.corrcoef(values.T) - torch.eye(64)
        # 2016 pairs: five standard errors leave a chance of about 1e-3 that any exceeds them.
        assert between.abs().max() < UNLUCKY / math.sqrt(4000)
    for i, j in itertools.combinations(range(64), 2):
        equal = (x[:, i].abs() == x[:, j].abs()).sum()
        assert equal <= 3  # float32 has about 2^24 values here: 4000 draws meet by chance hardly ever


def test_no_two_samples_levels_or_seeds_carry_the_same_noise():
    everything = torch.stack(
        [noise(seed, range(20), t).flatten(1) for seed in range(-3, 4) for t in (0.0, 0.5, 1.0, 999.0)]
    ).flatten(0, 1)  # (560, 192)
    between = torch.corrcoef(everything) - torch.eye(len(everything))
    # 156,520 pairs of 192 values: six standard errors leave a chance of about 3e-4.
    assert between.abs().max() < 6 / math.sqrt(192)


def test_batch_composition_does_not_matter():
    index = torch.arange(40)
    whole = normal(3, index, LEVEL, SHAPE, CPU)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(3, order, LEVEL, SHAPE, CPU), whole[order])
    assert torch.equal(torch.cat([normal(3, part, LEVEL, SHAPE, CPU) for part in index.split(7)]), whole)
    assert torch.equal(normal(3, torch.tensor([5, 5, 17]), LEVEL, SHAPE, CPU), whole[[5, 5, 17]])
    assert torch.equal(normal(3, index.int(), LEVEL, SHAPE, CPU), whole)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    a = noise()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(noise(), a)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 5), (1, 7, 1), (3, 3, 3), (2, 3, 4, 5), (1, 31, 17)])
def test_odd_shapes_are_filled(shape):
    x = normal(0, torch.arange(500), LEVEL, shape, CPU)
    assert x.shape == (500, *shape)
    assert x.dtype == torch.float32
    # Every position over 500 samples; five standard errors of a mean and of a variance.
    assert x.mean(0).abs().max() < UNLUCKY / math.sqrt(500)
    assert (x.var(0) - 1).abs().max() < UNLUCKY * math.sqrt(2 / 500)


def test_no_samples_give_no_noise():
    assert normal(0, torch.tensor([], dtype=torch.int64), LEVEL, SHAPE, CPU).shape == (0, *SHAPE)


def test_stored_values_do_not_change():
    """Resuming a measurement made by an earlier version must meet the noise it was made with."""
    x = normal(7, torch.tensor([0, 123]), level_key(250.0), (3,), CPU)
    stored = torch.tensor([[-1.1158630, -1.0014089, -1.5390838], [-1.2598654, -1.1067690, 0.9059120]])
    torch.testing.assert_close(
        x, stored, rtol=0, atol=1e-5
    )  # log and cos differ in the last bits by platform


def test_a_level_is_its_time():
    assert level_key(500) == level_key(500.0) == level_key(torch.tensor(500.0))
    assert level_key(0.25) != level_key(0.5)
    assert level_key(-0.0) == level_key(0.0)  # EDM's time for lam = 0 is -0.0


def test_the_hash_is_splitmix64():
    """The published first outputs of splitmix64 seeded with 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix(1234567 + golden * (k + 1)) for k in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
