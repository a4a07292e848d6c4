"""Networks that span processes or devices: only ever called, measured as if whole, and corrected."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import trueup
from trueup.denoiser import fingerprint
from trueup.estimate import fit

from split_library import KINDS, Network, images, measured
from test_ranks import torchrun

# The same products in another order: tensor parallel adds up two halves.
EXACT = {"tensor parallel": 1e-6}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    out = tmp_path_factory.mktemp("split")
    done = torchrun(2, Path(__file__).parent / "split_library.py", out)
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"said.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_a_network_that_two_ranks_hold_is_measured_and_corrected_as_if_whole(said, name):
    for of_rank in said:
        found = of_rank[name]
        assert found["fingerprint"]
        assert found["weights"]
        assert found["moments"] <= EXACT.get(name, 0)
        assert found["attached"] <= EXACT.get(name, 0)


@pytest.mark.parametrize("name", KINDS)
def test_other_weights_that_two_ranks_hold_are_refused(said, name):
    assert all("made for other weights" in of_rank[name]["others"] for of_rank in said)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_that_hold_a_network_together_cannot_share_images(said, name):
    assert all("hold this network together" in of_rank[name]["ranks"] for of_rank in said)


@pytest.fixture(scope="module")
def whole():
    moments = measured(Network())
    return moments, fit(moments)


SPLIT = {
    "device_map": lambda folder: dispatch_model(
        Network(), {"first": "cpu", "blocks": "disk", "last": "cpu", "table": "cpu"}, offload_dir=folder
    ),
    "cpu_offload": lambda folder: cpu_offload(Network(), execution_device=torch.device("cpu")),
    "disk_offload": lambda folder: disk_offload(Network(), folder, execution_device=torch.device("cpu")),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_network_whose_weights_are_kept_elsewhere_is_measured_and_corrected(whole, name, tmp_path):
    expected, cal = whole
    network = SPLIT[name](str(tmp_path))
    assert any(p.device.type == "meta" for p in network.parameters())
    assert fingerprint(network) == expected.provenance["weights"]
    moments = measured(network)
    assert torch.equal(moments.first, expected.first)
    alone, x_t, t = Network(), images()[:2], torch.tensor([500, 500])
    with torch.no_grad(), trueup.attach(alone, cal), trueup.attach(network, cal):
        assert torch.equal(network(x_t, t), alone(x_t, t))


def test_weights_that_are_nowhere_have_no_fingerprint():
    with torch.device("meta"):
        network = Network()
    assert fingerprint(network) == {}
