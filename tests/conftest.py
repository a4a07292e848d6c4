import pytest
import torch

from trueup.analytic import GaussianMixture


@pytest.fixture(scope="session")
def mixture() -> GaussianMixture:
    """Three blurry shapes in two channels on a non-square grid."""
    generator = torch.Generator().manual_seed(7)
    means = torch.randn(3, 2, 6, 8, generator=generator, dtype=torch.float64)
    means[:, :, 3:, 4:] = 0
    return GaussianMixture(means, std=0.5)
