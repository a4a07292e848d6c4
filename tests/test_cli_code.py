"""Research code from the command line: MODEL is a file and a name in it, and the file is run."""

import sys
import textwrap

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

import trueup
from trueup import typed

from commandline import refused, trueup_command
from tiny import save, tiny_unet

CODE = """
import json

import torch
import trueup
from {beside} import SHAPE

print("loading weights")


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.layer(x)


def make_denoiser(steps=1000):
    return trueup.Denoiser(Network(), trueup.process.DiscreteVP.linear(steps=steps), "noise", SHAPE)


def takes(path, more=1):
    return None


def broken():
    return 1 / 0


def ends():
    raise SystemExit("no weights\\nhere")


def passed_on():
    return json.loads("{{")


def wrong():
    return {{"a": 1}}


def misused():
    return trueup.Denoiser(Network(), None, "noise", SHAPE)


def flow():
    return trueup.Denoiser(Network(), trueup.process.Flow(reversed=True), "flow", SHAPE)


def spectra():
    return trueup.Denoiser(Network(), trueup.process.DiscreteVP.linear(), "noise", SHAPE, data_range=None)


ready = make_denoiser()
nothing = None
"""


@pytest.fixture
def code(tmp_path):
    """A file of research code that imports one that lies beside it."""
    beside = f"beside_{tmp_path.name}"
    (tmp_path / f"{beside}.py").write_text("SHAPE = (1, 8, 8)\n")
    (tmp_path / "my_code.py").write_text(CODE.format(beside=beside))
    before = list(sys.path)
    yield tmp_path / "my_code.py"
    sys.path[:] = before
    for name in ("my_code", beside):
        sys.modules.pop(name, None)


def calibrate(model, images, out, *more):
    common = ("--images", 24, "--trust", "--no-samples")
    return trueup_command("calibrate", model, "--data", images, *common, *more, "-o", out)


@pytest.mark.parametrize("name", ["make_denoiser", "ready"])
def test_a_function_or_an_object_of_a_file_is_a_model(code, images, tmp_path, name):
    out = tmp_path / "x.trueup.safetensors"
    done = calibrate(f"{code}:{name}", images, out, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"running {code}\nloading weights\n")  # and not on standard output
    assert done.stdout.startswith("{")
    cal = trueup.load(out)
    assert cal.shape == (1, 8, 8)
    drawn = trueup_command(
        "sample",
        f"{code}:{name}",
        "--calibration",
        out,
        "-n",
        2,
        "--nfe",
        5,
        "-o",
        tmp_path / "s.npz",
        "--quiet",
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "running" not in drawn.stderr  # --quiet


@pytest.mark.parametrize("solver", ["unipc", "flow-euler"])
def test_solvers_of_diffusers_take_networks_of_any_noise(code, tmp_path, solver):
    how = ("-n", 2, "--nfe", 4, "--solver", solver, "--quiet", "-o", tmp_path / "s.npz")
    drawn = trueup_command("sample", f"{code}:flow", *how)
    assert drawn.returncode == 0, drawn.stderr


@pytest.mark.parametrize("out", ["grid.png", "folder"])
def test_what_is_no_picture_is_said_before_anything_is_drawn(code, tmp_path, out):
    drawn = trueup_command("sample", f"{code}:spectra", "-n", 2, "--nfe", 4, "-o", tmp_path / out, "--quiet")
    assert drawn.returncode == 2
    assert drawn.stderr.endswith("samples of shape (1, 8, 8) are not pictures: write them to a .npz file\n")
    assert not list(tmp_path.glob(f"{out}*"))


def test_in_a_process_of_its_own_and_from_beside_the_file(code, images, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    common = ("--images", 24, "--trust", "--no-samples", "-o", out)
    done = trueup_command(
        "calibrate", f"{code.name}:make_denoiser", "--data", images, *common, cwd=code.parent, real=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"running {code.name}\n")


def test_networks_and_pipelines_of_a_file_are_models(images, tmp_path):
    lines = """
        from diffusers import DDPMPipeline, DDPMScheduler
        from tiny import tiny_unet

        network = tiny_unet()
        pipeline = DDPMPipeline(network, DDPMScheduler())
    """
    file = tmp_path / "of_diffusers.py"
    file.write_text(textwrap.dedent(lines))
    made = calibrate(f"{file}:pipeline", images, tmp_path / "x.safetensors")
    assert made.returncode == 0, made.stderr
    refused(
        calibrate(f"{file}:network", images, tmp_path / "y", "--quiet"), "has no scheduler", "--scheduler"
    )
    save(tiny_unet(), tmp_path / "model")
    how = ("--scheduler", tmp_path / "model" / "scheduler_config.json")
    made = calibrate(f"{file}:network", images, tmp_path / "y", *how)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_denoisr", ["has nothing called make_denoisr", "make_denoiser"]),
        ("", ["names nothing in that file", "make_denoiser"]),
        ("a b", ["names nothing in that file"]),
        ("takes", ["is called without arguments, and takes path"]),
        ("broken", ["my_code.py, line 30: ZeroDivisionError: division by zero"]),
        ("ends", ["my_code.py, line 34: SystemExit: no weights here"]),
        ("passed_on", ["my_code.py, line 38: JSONDecodeError"]),
        ("wrong", ["gave a dict: expected a trueup.Denoiser, a pipeline or a network"]),
        ("nothing", ["gave None: expected"]),
        ("json", ["gave a module: expected"]),
        ("misused", ["my_code.py, line 46: ModelError: process must be a NoiseProcess"]),
        ("Network", ["cannot read Network as a diffusion model"]),
    ],
)
def test_what_goes_wrong_is_one_line(code, images, tmp_path, name, words):
    code.write_text(code.read_text().replace('print("loading weights")', ""))
    refused(calibrate(f"{code}:{name}", images, tmp_path / "x", "--quiet"), *words)


def test_files_that_cannot_be_run_are_one_line(images, tmp_path):
    refused(calibrate(f"{tmp_path}/none.py:make", images, tmp_path / "x"), "none.py is not there")
    for name, content, words in (
        ("grammar.py", "a = 1\ndef broken(:\n", "grammar.py, line 2: SyntaxError"),
        ("absent.py", "\n\nimport no_such_library\n", "absent.py, line 3: ModuleNotFoundError"),
        ("null.py", "a\0b", "null.py"),
    ):
        (tmp_path / name).write_text(content)
        refused(calibrate(tmp_path / f"{name}:make", images, tmp_path / "x", "--quiet"), words)
    (tmp_path / "json.py").write_text("import json\nmade = json.dumps({})\n")  # a name that is taken
    refused(calibrate(tmp_path / "json.py:made", images, tmp_path / "x", "--quiet"), "gave a str")


def test_what_is_not_code_is_not_run(model, images, tmp_path):
    assert typed.code("bundled:raw") is None
    assert typed.code("C:\\models\\ddpm") is None
    assert typed.code("C:\\models\\my_code.py") is None
    assert [str(part) for part in typed.code("C:\\x\\my_code.py:make")] == ["C:\\x\\my_code.py", "make"]
    assert typed.code("runs/2024:12:03") is None
    assert typed.code("my_code.py:runs/x") is None
    folder = tmp_path / "odd.py:make"
    folder.symlink_to(model)
    assert typed.code(str(folder)) is None
    done = calibrate(folder, images, tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert "running" not in done.stderr


def test_help_says_that_it_runs_the_file():
    said = " ".join(trueup_command("calibrate", "--help").stdout.split())
    assert "my_code.py:make_denoiser: runs that file" in said


# Photographs for a latent model, whose autoencoder lies beside it


def test_photographs_of_any_size_are_taken_by_a_latent_model(tmp_path):
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(3, 3, block_out_channels=(4, 8), norm_num_groups=4, latent_channels=4, **blocks)
    vae.save_pretrained(tmp_path / "model" / "vae")
    save(tiny_unet(in_channels=4, out_channels=4), tmp_path / "model" / "unet")
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for k in range(20):
        size = (20 + k, 31) if k % 2 else (40, 16 + k)
        values = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(values.numpy()).save(folder / f"{k}.png")
    out = [tmp_path / f"{k}.trueup.safetensors" for k in range(2)]
    done = calibrate(tmp_path / "model" / "unet", folder, out[0])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("resized by their shorter side and cropped to 16x16") == 1
    asked = calibrate(tmp_path / "model" / "unet", folder, out[1], "--resize", "shorter", "--crop", "center")
    assert "resized by" not in asked.stderr
    one, other = map(trueup.load, out)
    assert torch.equal(one.correction.b, other.correction.b)
    assert one.evidence.images == 20
    checked = trueup_command(
        "check", tmp_path / "model" / "unet", "--data", folder, "--images", 20, "--no-samples"
    )
    assert checked.stderr.count("resized by their shorter side") == 1
