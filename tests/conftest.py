import shutil

import pytest
import torch

from trueup.analytic import GaussianMixture


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model of 8x8 pictures."""
    from tiny import save, tiny_unet

    return save(tiny_unet(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """40 pictures in a folder."""
    from tiny import blobs

    return blobs(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def mixture() -> GaussianMixture:
    """Three blurry shapes in two channels on a non-square grid."""
    generator = torch.Generator().manual_seed(7)
    means = torch.randn(3, 2, 6, 8, generator=generator, dtype=torch.float64)
    means[:, :, 3:, 4:] = 0
    return GaussianMixture(means, std=0.5)


@pytest.fixture
def some(images, tmp_path):
    """A copy of a few pictures, to spoil."""
    folder = tmp_path / "some"
    folder.mkdir()
    for path in sorted(images.iterdir())[:12]:
        shutil.copy(path, folder)
    return folder
