"""The code in README and on the pages runs as it stands."""

import re
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from trueup.estimate.diagnose import Diagnosis

from tiny import tiny_unet

ROOT = Path(__file__).parent.parent
BLOCKS = {
    f"{name} {k}": code
    for name in ("README.md", "docs/guide.md", "docs/theory.md", "docs/recording.md", "docs/doctor.md")
    for k, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S))
    if "my_module" not in code  # a fragment: it shows where things go
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the documents call my-model and my-images."""
    unet = tiny_unet(in_channels=3, out_channels=3)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "my-model")
    (tmp_path / "my-images").mkdir()
    for k, picture in enumerate(np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(picture).save(tmp_path / "my-images" / f"{k}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    # The networks on these pages were never trained, and would be refused for it.
    for place in ("estimate.measuring", "density.opening"):
        monkeypatch.setattr(f"trueup.{place}.check_use", lambda *_: Diagnosis(1.0))
    return tmp_path


def training():
    """What the page on recording takes from the reader's script."""
    import trueup

    unet = tiny_unet(in_channels=3, out_channels=3)
    x_t, target = torch.randn(2, 40, 16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    t = torch.randint(1000, (40, 16), generator=torch.Generator().manual_seed(1))
    return {
        "torch": torch,
        "trueup": trueup,
        "unet": unet,
        "scheduler": diffusers.DDPMScheduler(),
        "optimizer": torch.optim.AdamW(unet.parameters()),
        "loader": torch.utils.data.DataLoader(0.5 * x_t[:20, 0], batch_size=10),
        "steps": zip(x_t, t, target + 0.1, target, strict=True),
        "writer": Writer(),
    }


class Writer:
    """A logger that insists on plain floats."""

    def log(self, values, step):
        assert all(type(value) is float for value in values.values())
        assert step < 39 or values


@pytest.mark.parametrize("name", BLOCKS)
def test_code_runs(name, here):
    import trueup

    code = BLOCKS[name]
    if "trueup.calibrate(" not in code:
        trueup.calibrate("my-model", "my-images", levels=[0, 500, 999]).save("my-model.trueup.safetensors")
    around = training() if "recording" in name else {}
    exec(compile(code, name, "exec"), {"__name__": "__main__", **around})
    assert list(here.glob("*.trueup.safetensors"))
