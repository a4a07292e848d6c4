import importlib
import shutil
import sys

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


@pytest.fixture(scope="module")
def fused():
    """The module of the GPU kernel; without a GPU in Triton's interpreter, whoever imported it before."""
    pytest.importorskip("triton", reason="Triton comes with PyTorch on machines with a GPU")
    name, gpu = "trueup.calibration.fused", torch.cuda.is_available()
    with pytest.MonkeyPatch.context() as patch:
        if not gpu:
            patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is declared
            sys.modules.pop(name, None)
        yield importlib.import_module(name)
        if not gpu:
            sys.modules.pop(name, None)
