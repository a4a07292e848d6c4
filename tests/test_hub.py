"""Models by their names on the Hub: what is fetched, from where, and what is said where that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from huggingface_hub import constants

import trueup
from trueup.cli import main
from trueup.errors import ModelError
from trueup.files import is_hub_name
from trueup.hf import as_denoiser
from trueup.hf.hub import fetched, names_of

from commandline import refused, trueup_command
from hub import Hub, cached
from tiny import tiny_unet

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
HALF = "unet/diffusion_pytorch_model.fp16.safetensors"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    diffusers.DDPMPipeline(tiny_unet(), diffusers.DDPMScheduler()).save_pretrained(folder)
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path, monkeypatch, pipeline):
    with Hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        hub.add("google/ddpm", pipeline)
        yield hub


def answer(denoiser):
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return denoiser.eps(x, 500)


def test_what_looks_like_a_name():
    for name in ("google/ddpm-cifar10-32", "a/b", "stabilityai/sd-2.1_base", "1x/v0.1"):
        assert is_hub_name(name)
    files = ("out/x.safetensors", "out/config.json", "a/b.git")
    for name in (
        "ddpm",
        "./a/b",
        "../a",
        "/a/b",
        "a/b/c",
        "a/",
        "~/b",
        "a\\b",
        "a/b\n",
        "a/ b",
        "a--b/c",
        "ä/b",
    ):
        assert not is_hub_name(name)
    assert not any(map(is_hub_name, (*files, "bundled:raw", "a/..", "a/b.", None, 3)))


def test_paths_of_other_machines_are_no_names(monkeypatch):
    elsewhere = tiny_unet()
    for path in ("a" * 300, "/" + "b" * 300, "nul\0"):
        elsewhere.register_to_config(_name_or_path=path)
        assert names_of(elsewhere) == {}

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    elsewhere.register_to_config(_name_or_path="/somewhere/private")
    monkeypatch.setattr(Path, "is_dir", forbidden)
    assert names_of(elsewhere) == {}


def test_a_name_is_the_directory_it_stands_for(hub, pipeline):
    made = as_denoiser("google/ddpm")
    assert torch.equal(answer(made), answer(as_denoiser(pipeline)))
    assert names_of(made.network) == {"base_model": "google/ddpm"}
    assert names_of(as_denoiser(pipeline).network) == {"name": pipeline.name}  # not its part, "unet"
    assert names_of(as_denoiser("bundled:raw").network) == {"name": "bundled:raw"}
    assert names_of(tiny_unet()) == names_of(torch.nn.Identity()) == {}


def test_files_that_could_run_are_not_fetched(hub):
    more = ("unet/diffusion_pytorch_model.bin", "pipeline.py", "unet/model.pkl", "weights.ckpt", "model.pt")
    unused = ("v1-pruned.safetensors", HALF, "unet/diffusion_pytorch_model.non_ema.safetensors")
    hub.repos["google/ddpm"] |= dict.fromkeys((*more, *unused), b"cos\nsystem\n(S'true'\ntR.")
    texts = ("tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer_2/spiece.model")
    hub.repos["google/ddpm"] |= {name: name.encode() for name in texts}
    hub.repos["google/ddpm"]["text_encoder/model.safetensors"] = b"text"
    folder = fetched("google/ddpm")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    own = {"model_index.json", "unet/config.json", WEIGHTS, "scheduler/scheduler_config.json"}
    assert found == {*own, *texts, "text_encoder/model.safetensors"}
    assert set(hub.asked) == found


def test_half_precision_is_taken_where_there_is_no_other(hub):
    files = hub.repos["google/ddpm"]
    files[HALF] = files.pop(WEIGHTS)
    assert (fetched("google/ddpm") / HALF).exists()
    assert as_denoiser("google/ddpm").shape == (1, 8, 8)


def test_a_directory_of_that_name_comes_first(hub, pipeline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pipeline, tmp_path / "google" / "ddpm")
    assert as_denoiser("google/ddpm").shape == (1, 8, 8)
    assert hub.asked == []
    assert names_of(diffusers.UNet2DModel.from_pretrained("google/ddpm", subfolder="unet")) == {
        "name": "ddpm"
    }


def test_a_revision(hub):
    assert fetched("google/ddpm", hub.sha("google/ddpm")).name == hub.sha("google/ddpm")
    with pytest.raises(ModelError, match="google/ddpm on the Hub has no revision v7"):
        fetched("google/ddpm", "v7")


def test_what_is_said_of_models_that_cannot_be_had(hub, monkeypatch):
    def says(name, message):
        with pytest.raises(ModelError, match=message) as caught:
            as_denoiser(name)
        assert "\n" not in str(caught.value)

    says("no/such", "no/such is neither here nor on the Hub, as far as you may see.*hf auth login")
    hub.gated.add("meta/gated")
    says("meta/gated", "meta/gated is gated: ask for access on its page")
    hub.repos["old/pickled"] = {"config.json": b"{}", "diffusion_pytorch_model.bin": b"x"}
    says("old/pickled", r"old/pickled on the Hub holds no .safetensors weights \(pickled ones")
    says("nowhere", r"nowhere is not a directory: .*, or a name on the Hub \(owner/name\)")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    says(
        "no/such", r"no/such is neither here nor in the cache of the Hub, which is switched off \(HF_HUB_OFF"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    says("no/such", r"takes huggingface_hub: pip install 'trueup\[diffusers\]'")


def test_a_cache_serves_without_a_network(offline, pipeline):
    cached(offline, "google/ddpm", pipeline)
    assert torch.equal(answer(as_denoiser("google/ddpm")), answer(as_denoiser(pipeline)))
    pipe = diffusers.DDPMPipeline.from_pretrained("google/ddpm")
    assert names_of(pipe.unet) == {"base_model": "google/ddpm"}


def test_what_another_program_left_in_the_cache_is_enough(hub, monkeypatch):
    """A listing is cached, and some file that would match was never fetched."""
    hub.repos["google/ddpm"]["notes.txt"] = b"of no use"
    folder = fetched("google/ddpm")
    (folder / "notes.txt").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert as_denoiser("google/ddpm").shape == (1, 8, 8)
    shutil.rmtree(folder / "unet")
    with pytest.raises(ModelError, match=r"holds no .safetensors|does not exist"):
        as_denoiser("google/ddpm")


def test_calibrated_by_name(offline, pipeline, tmp_path):
    cached(offline, "google/ddpm", pipeline)
    pictures = torch.randint(256, (24, 1, 8, 8), dtype=torch.uint8)
    how = {"levels": [0, 500], "trust": True, "run": tmp_path / "run"}
    cal = trueup.calibrate("google/ddpm", pictures, **how)
    assert cal.provenance["base_model"] == "google/ddpm"
    cal.save(tmp_path / "x.trueup.safetensors")
    assert trueup.load(tmp_path / "x.trueup.safetensors").provenance["base_model"] == "google/ddpm"
    again = trueup.estimate.measure(str(pipeline), pictures, **how)  # the same run: a name is no setting
    assert again.images == 24
    alone = trueup.calibration.Calibration.without_data(as_denoiser("google/ddpm"))
    assert alone.provenance["base_model"] == "google/ddpm"


def test_the_command_line_takes_names(images, tmp_path, pipeline, offline):
    out = tmp_path / "x.trueup.safetensors"
    cached(offline, "google/ddpm", pipeline)
    measure = ("--data", images, "--images", "20", "--trust", "--no-samples")
    done = trueup_command("calibrate", "google/ddpm", *measure, "-o", out)
    assert done.returncode == 0, done.stderr
    trueup.load(out).save_pretrained(tmp_path / "shared")
    cached(offline, "me/mine", tmp_path / "shared")
    drawn = ("-n", "1", "--nfe", "3", "--force", "-o", tmp_path / "drawn.npz")
    for where in ("me/mine", tmp_path / "shared"):
        done = trueup_command("sample", "google/ddpm", "--calibration", where, *drawn)
        assert done.returncode == 0, done.stderr
    done = trueup_command("inspect", "me/mine")
    assert done.stdout.startswith(trueup.load(out).summary().split("\n")[0])
    refused(
        trueup_command("sample", "google/other", "--calibration", "me/mine", *drawn),
        "google/other is neither here nor in the cache of the Hub",
    )


def test_a_process_of_its_own_takes_names(tmp_path, pipeline):
    """With the cache where the environment says, and nothing imported before."""
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    cached(tmp_path / "hub", "google/ddpm", pipeline)
    line = [sys.executable, "-m", "trueup.cli", "sample", "google/ddpm", "-n", "1", "--nfe", "3"]
    line += ["-o", str(tmp_path / "drawn.npz")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drawn.npz").exists()


def test_names_are_let_through_before_torch_is_loaded():
    """And what is no name is refused then."""
    code = (
        "import sys\nfrom trueup.checks import check\nfrom trueup.options import parser\n"
        "words = ['sample', 'google/ddpm', '--calibration', 'me/mine', '-o', 'x.png']\n"
        "check(parser().parse(words))\nprint({'torch', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("google/ddpm", "--calibration", "nowhere"), "nowhere does not exist"),
        (("google/ddpm", "--calibration", "out/x.trueup.safetensors"), "x.trueup.safetensors does not exist"),
        (("google/ddpm", "--scheduler", "me/mine"), "me/mine does not exist"),
        (("nowhere",), "nor a name on the Hub (owner/name)"),
    ],
)
def test_what_is_no_name(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", *words, "-o", "x.png"]) == 2
    assert message in capsys.readouterr().err
