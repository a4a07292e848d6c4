"""What must hold of the package as a whole."""

import json
import subprocess
import sys

import pytest
import torch

import trueup
from trueup.cli import main


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_trueup_loads_nothing_heavy():
    loaded = json.loads(run("import sys, trueup, json; print(json.dumps(sorted(sys.modules)))"))
    for heavy in ("torch", "diffusers", "numpy", "PIL", "datasets", "transformers", "safetensors", "tqdm"):
        assert heavy not in loaded


def test_using_every_name_does_not_load_diffusers():
    names = ", ".join(f"trueup.{name}" for name in trueup.__all__)
    loaded = json.loads(run(f"import sys, trueup, json; {names}; print(json.dumps(sorted(sys.modules)))"))
    assert "diffusers" not in loaded
    assert "torch" in loaded


def test_the_name_that_is_of_diffusers_says_what_it_needs():
    code = "import sys\nsys.modules['diffusers'] = None\nimport trueup\nfrom trueup import *\ntry:\n"
    code += "    trueup.Scheduler\nexcept trueup.TrueupError as error:\n    print(error)"
    assert run(code).strip() == "trueup.Scheduler needs diffusers: pip install 'trueup[diffusers]'"


def test_help_does_not_load_torch():
    code = (
        "import sys\nfrom trueup.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    )
    assert run(code + "print('torch' in sys.modules)").strip().endswith("False")


def test_the_front_door_has_a_dozen_names():
    assert len(dir(trueup)) <= 15  # and the version
    assert trueup.Scheduler is trueup.hf.fitted.FittedScheduler
    assert trueup.sampling.sample is trueup.sample  # the rest is one step down


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'calibrated'"):
        _ = trueup.calibrated


def test_inspect_prints_the_summary(tmp_path, capsys, mixture):
    cal = trueup.calibrate(
        mixture.denoiser(trueup.process.ContinuousVP()), mixture.sample(20), levels=[0.2, 0.8]
    )
    cal.save(tmp_path / "x.trueup.safetensors")
    assert main(["inspect", str(tmp_path / "x.trueup.safetensors")]) == 0
    said = capsys.readouterr().out
    table, verdict = cal.summary().rsplit("\nverdict:", 1)
    assert said.startswith(table)
    assert f"verdict:{verdict}" in said
    assert "noise prediction, continuous_vp noise, weights none" in said


@pytest.mark.parametrize("content", [None, b"", b"not a calibration"])
def test_inspect_answers_a_bad_file_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "bad.trueup.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("trueup: ")
    assert said.err.count("\n") == 1


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert version("trueup") == trueup.__version__
    assert torch.__version__.startswith("2.")
