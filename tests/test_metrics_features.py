"""Extractors, their weights, and the reference file: what is read, and what is refused."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trueup.errors import Argument, ArtifactError, DataError, MismatchError, TrueupError
from trueup.files import load_tensors, save_tensors
from trueup.metrics import FeatureBatch, Features, ModuleFeatures, Pixels, Reference, load_features
from trueup.metrics.efficientnet import EfficientNet
from trueup.metrics.inception import Inception, InceptionNetwork
from trueup.metrics.weights import find_or_download, load_weights

RECORDED = json.loads((Path(__file__).parent / "data" / "inception.json").read_text())


def pictures(n=4, channels=3, height=40, width=36):
    numbers = torch.arange(n * channels * height * width)
    return (numbers * 7919 % 256).to(torch.uint8).reshape(n, channels, height, width)


# Inception


def inception_weights():
    """Every weight from one seeded stream in the order of names; activations neither vanish nor grow."""
    generator = torch.Generator().manual_seed(2015)
    tensors = {}
    for name, like in sorted(InceptionNetwork().state_dict().items()):
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.zeros_like(like)
            continue
        values = torch.randn(like.shape, generator=generator)
        if like.dim() > 1:
            values *= (2 / like[0].numel()) ** 0.5
        elif name.endswith(("running_var", "bn.weight")):
            values = 1 + 0.2 * torch.tanh(values)
        else:
            values *= 0.1
        tensors[name] = values
    return tensors


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "weights.safetensors"
    save_file(inception_weights(), path)
    return load_features("inception", weights=path)


def test_inception_gives_what_pytorch_fid_gives(inception):
    """Recorded from pytorch-fid 0.3.0 on torchvision 0.29.2; ours were equal to it in every bit."""
    batch = inception(pictures(2))
    for name, columns in RECORDED["columns"].items():
        found, expected = getattr(batch, name)[:, columns], torch.tensor(RECORDED[name])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # other kernels, other rounding
    assert [rows.shape[1] for rows in batch[:3]] == [2048, 2023, 1008]


def test_inception_has_the_published_size():
    network = InceptionNetwork()
    assert len(network.state_dict()) == 566  # as in the published file
    assert sum(p.numel() for p in network.parameters()) == 23_850_960


def test_inception_repeats_a_grey_channel(inception):
    grey = pictures(1, channels=1)
    assert torch.equal(inception(grey).pooled, inception(grey.repeat(1, 3, 1, 1)).pooled)


def test_inception_says_which_weights_it_has(inception, tmp_path):
    assert isinstance(inception, Features)
    assert len(inception.weights) == 64
    with pytest.raises(DataError, match="uint8"):
        inception(torch.zeros(1, 3, 8, 8))
    with pytest.raises(DataError, match="1 or 3 channels"):
        inception(torch.zeros(1, 4, 8, 8, dtype=torch.uint8))
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(TrueupError, match="not those of FID's"):
        Inception(tmp_path / "other.safetensors")


def test_another_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(TrueupError, match="expected 6726825d") as caught:
        Inception(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:8] in str(caught.value)
    with pytest.raises(TrueupError, match="cannot read"):
        Inception(tmp_path / "nowhere.pth")


# EfficientNet


def test_efficientnet_is_the_packages_network():
    features = load_features("efficientnet")
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    batch = features(images)
    with torch.inference_mode():
        torch.testing.assert_close(batch.logits, features.network((images.float() - 127) / 128))
    assert [rows.shape[1] for rows in batch[:3]] == [1280, 1960, 1000]
    assert features.weights.startswith("57934424")
    assert batch.spatial.std(0).mean() > 0


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(TrueupError, match=r"pip install 'trueup\[features\]'"):
        EfficientNet()


# Your own


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.float().mean((2, 3)) * self.scale)


def as_function(x):
    return FeatureBatch(x.float().mean((2, 3)), None, x.float().flatten(1))


def test_modules_and_functions_are_features():
    images = pictures()
    mine = ModuleFeatures(Mean(), "mean", preprocess=lambda x: x.float() / 255)
    torch.testing.assert_close(mine(images).pooled, images.float().mean((2, 3)) * 2 / 255)
    assert not mine(images).pooled.requires_grad
    assert mine.dimensions == 3
    assert mine.weights != ModuleFeatures(nn.Linear(2, 2), "linear").weights
    assert ModuleFeatures(as_function, "function")(images).logits.shape == (4, 3 * 40 * 36)
    with pytest.raises(DataError, match=r"must return \(B, d\)"):
        ModuleFeatures(lambda x: x.float(), "maps")(images)


def test_features_are_found_by_name():
    assert load_features("pixels")(torch.rand(2, 4, 3, 3)).pooled.shape == (2, 36)
    for attribute in ("Mean", "as_function"):
        found = load_features(f"test_metrics_features:{attribute}")
        assert found(pictures()).pooled.shape == (4, 3)
        assert found.name.endswith(attribute)
    assert load_features("trueup.metrics:Pixels").name == "pixels"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vgg", "inception, efficientnet, pixels"),
        ("no_such_module:thing", "cannot import"),
        ("trueup.metrics:thing", "cannot import"),
        ("trueup.metrics:MEASURES", "cannot be called"),
        ("trueup.metrics:ModuleFeatures", "without arguments"),
    ],
)
def test_unknown_features_are_refused_in_one_line(spec, message):
    with pytest.raises(TrueupError, match=message) as caught:
        load_features(spec)
    assert "\n" not in str(caught.value)


def test_weights_are_for_inception_only():
    with pytest.raises(TrueupError, match="inception only"):
        load_features("pixels", weights="x.pth")


# Downloads


def test_a_download_is_kept_once_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "net.pth"
    torch.save({"a": torch.arange(3)}, source)
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    path = find_or_download(source.as_uri(), sha256)
    assert path == tmp_path / "cache" / "net.pth"
    source.unlink()
    tensors, found = load_weights(find_or_download(source.as_uri(), sha256), sha256)
    assert found == sha256
    assert tensors["a"].tolist() == [0, 1, 2]


def test_a_download_of_another_file_is_thrown_away(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "net.pth"
    source.write_bytes(b"something else")
    with pytest.raises(TrueupError, match="gave another file"):
        find_or_download(source.as_uri(), "0" * 64)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_network_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path))
    with pytest.raises(TrueupError, match="say with weights") as caught:
        find_or_download("http://127.0.0.1:9/net.pth", "0" * 64)
    assert "--weights" in caught.value.phrased(Argument.option)
    assert str(tmp_path / "net.pth") in str(caught.value)
    assert "\n" not in str(caught.value)


# Files of torch.save


def load_known(path):
    """A file whose checksum is the one expected."""
    return load_weights(path, hashlib.sha256(path.read_bytes()).hexdigest())[0]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_known_file_of_weights_is_read(tmp_path, zipped):
    path = tmp_path / "net.pth"
    expected = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).state_dict()
    torch.save(expected, path, _use_new_zipfile_serialization=zipped)
    found = load_known(path)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_program_is_not_run_even_in_a_known_file(tmp_path, zipped):
    path, trace = tmp_path / "net.pth", tmp_path / "trace"
    torch.save({"a": torch.zeros(2), "b": Evil(trace)}, path, _use_new_zipfile_serialization=zipped)
    assert b"mkdir" in path.read_bytes()
    with pytest.raises(TrueupError, match="cannot be read as weights") as caught:
        load_known(path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize("content", [{"a": 3}, [torch.zeros(2)], {"a": {"b": torch.zeros(2)}}])
def test_anything_but_a_dict_of_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "net.pth")
    with pytest.raises(TrueupError, match="other than a dict of tensors"):
        load_known(tmp_path / "net.pth")


@pytest.mark.parametrize("name", ["net.pth", "net.safetensors"])
def test_what_is_no_file_of_weights_is_refused_in_one_line(tmp_path, name):
    for content in (b"", b"hello", b"PK" + bytes(100)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrueupError, match="cannot be read as weights") as caught:
            load_known(tmp_path / name)
        assert "\n" not in str(caught.value)


# The reference


def build(spatial=True):
    features = ModuleFeatures(
        lambda x: FeatureBatch(x.float().mean((2, 3)), x.float()[:, 0, 0, :4] if spatial else None), "mine"
    )
    return features, Reference.build(features, pictures(30).split(8), fingerprint="abc", limit=20)


@pytest.mark.parametrize("spatial", [True, False])
def test_a_reference_comes_back_as_it_was(tmp_path, spatial):
    features, made = build(spatial)
    made.save(tmp_path / "a.safetensors")
    found = Reference.load(tmp_path / "a.safetensors")
    assert (found.count, found.fingerprint, found.features) == (30, "abc", "mine")
    assert (found.spatial is not None) == spatial
    assert torch.equal(found.rows, made.rows)
    assert found.rows.shape == (20, 3)
    assert torch.equal(found.colours, made.colours)
    torch.testing.assert_close(found.pooled.covariance, made.pooled.covariance, rtol=1e-14, atol=0)
    assert torch.equal(found.pooled.mean, made.pooled.mean)
    found.check(features)


def test_a_reference_refuses_other_features():
    _, made = build()
    with pytest.raises(MismatchError, match=r"made with mine .* not with pixels"):
        made.check(Pixels())


def test_a_reference_needs_images():
    with pytest.raises(DataError, match="two images"):
        Reference.build(Pixels(), [pictures(1)])


def test_a_damaged_reference_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.safetensors"
    build()[1].save(path)
    content = path.read_bytes()
    damaged = [content[:cut] for cut in (0, 7, 100, len(content) // 2, len(content) - 1)]
    for place in range(8, len(content), len(content) // 50):
        damaged.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(ArtifactError) as caught:
            Reference.load(path)
        assert "\n" not in str(caught.value)


def test_what_is_no_reference_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, "a calibration", {}, {"t": torch.zeros(1)})
    with pytest.raises(ArtifactError, match="holds a calibration, not a reference"):
        Reference.load(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        Reference.load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="cannot write"):
        build()[1].save(tmp_path / "nowhere" / "a.safetensors")


def with_covariance(change):
    def edit(meta, tensors):
        tensors["pooled.covariance"] = change(tensors["pooled.covariance"].clone())

    return edit


EDITS = {
    "count": lambda meta, tensors: meta.update(count=-3),
    "count is": lambda meta, tensors: meta.update(count=10**12 * 2),
    "features": lambda meta, tensors: meta.update(features=["a", "b"]),
    "weights": lambda meta, tensors: meta.update(weights=7),
    "rows": lambda meta, tensors: tensors.update(rows=tensors["rows"] * 1e30),
    "rows of": lambda meta, tensors: tensors.update(rows=tensors["rows"].repeat(9, 1)),
    "colours": lambda meta, tensors: tensors.update(colours=tensors["colours"][:5]),
    "pooled.mean": lambda meta, tensors: tensors["pooled.mean"].fill_(torch.nan),
    "spatial.covariance": lambda meta, tensors: tensors["spatial.covariance"].neg_(),
    "pooled.covariance": with_covariance(lambda c: c + 10 * c.max() * torch.ones_like(c).triu(1)),
    "covariance of nothing": with_covariance(lambda c: c + 10 * c.max() * (1 - torch.eye(len(c)).double())),
    "'more'": lambda meta, tensors: tensors.update(more=torch.zeros(3)),
}


@pytest.mark.parametrize("words", EDITS)
def test_numbers_of_a_reference_have_a_range_whatever_its_checksum_says(tmp_path, words):
    path = tmp_path / "a.safetensors"
    build()[1].save(path)
    meta, tensors = load_tensors(path, "a reference")
    EDITS[words](meta, tensors)
    save_tensors(path, "a reference", meta, tensors)
    with pytest.raises(ArtifactError) as caught:
        Reference.load(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_importing_the_metrics_imports_no_optional_package():
    code = (
        "import sys, trueup.metrics; "
        "print([m for m in ('diffusers', 'torchmetrics', 'efficientnet_lite_pytorch') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
