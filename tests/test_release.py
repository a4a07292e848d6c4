"""What would be released: wheel and sdist, built, checked, and installed where the source is not."""

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

import trueup

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
WORKFLOWS = ROOT / ".github" / "workflows"


def run(*command, **kwargs):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder, root):
    """Names of the files under a folder, but for what Python keeps beside them."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix() for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel made of that sdist, by the backend that is installed."""
    where = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", where, ROOT)
    (wheel,), (sdist,) = where.glob("*.whl"), where.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(wheel.read(name).decode())


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A new environment with the wheel alone; what it needs is borrowed from this one, without its trueup."""
    where = tmp_path_factory.mktemp("venv")
    venv.create(where)
    scripts = where / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / Path(sys.executable).name
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", built[0])
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(site) / "borrowed.pth").write_text("\n".join(ours) + "\n")  # their own .pth files are not followed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(command, *arguments):
        return run(scripts / command, *arguments, cwd=tmp_path_factory.mktemp("cwd"), env=environment)

    return call, Path(site)


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files(SRC / "trueup", SRC)
    assert {"trueup/py.typed", "trueup/bundled/images.npy", "trueup/bundled/LICENSE"} <= names
    assert built[0].stat().st_size < 10e6


def test_the_sdist_has_what_its_tests_need(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in ("tests", "docs", "benchmarks", "examples", "integrations", "recipes", ".github"):
        assert files(ROOT / folder, ROOT) <= names
    beside = "CHANGELOG.md CITATION.cff LICENSE Makefile README.md constraints.txt mkdocs.yml"
    assert set(beside.split()) <= names
    assert not [name for name in names if re.search(r"\.pyc$|/\.git/|^out/|^site/|\.venv", name)]


def test_pypi_would_take_them(built):
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built).count("PASSED") == 2


def test_what_pypi_shows_is_complete(metadata):
    assert metadata["Version"] == trueup.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier")
    assert len(metadata.get_all("License-File")) == 2
    addresses = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog", "Issues"} == set(addresses)
    page = metadata.get_payload()
    tokens = [child for token in MarkdownIt().enable("table").parse(page) for child in token.children or ()]
    links = [token.attrs.get("href") or token.attrs.get("src") for token in tokens if token.attrs]
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    assert f"]({addresses['Source']}/blob/main/docs/guide.md)" in page
    assert "pip install 'trueup[diffusers,features]'" in page


def test_the_installed_package_calibrates(installed):
    call, site = installed
    assert call("trueup", "--version") == f"trueup {trueup.__version__}\n"
    assert "trueup calibrate bundled:raw" in call("trueup", "--help")
    code = """
import trueup
some = trueup.Images("bundled:images", count=20)
moments = trueup.estimate.measure("bundled:raw", some, levels=[850, 900, 950, 999], trust=True)
trueup.estimate.fit(moments).save("raw.trueup.safetensors")
print(trueup.__file__, trueup.load("raw.trueup.safetensors").verdict(), sep="\\n")"""
    where, verdict = call("python", "-c", code).splitlines()
    assert Path(where) == site / "trueup" / "__init__.py"
    assert verdict.startswith("miscalibrated")  # as the bundled raw weights are, at high noise


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == trueup.__version__
    assert citation["references"][0]["title"] == "On Calibrating Diffusion Probabilistic Models"


def test_every_promised_version_is_tested(metadata):
    jobs = yaml.safe_load((WORKFLOWS / "test.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    promised = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") if ":: 3." in line]
    assert matrix["python"] == promised
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    assert any("make test" in step.get("run", "") for step in jobs["test"]["steps"])


@pytest.mark.parametrize("name", ["test.yml", "docs.yml", "release.yml"])
def test_workflows_may_write_only_what_they_publish(name):
    flow = yaml.safe_load((WORKFLOWS / name).read_text())
    assert flow["permissions"] == {"contents": "read"}
    writing = {
        job for job, what in flow["jobs"].items() if "write" in (what.get("permissions") or {}).values()
    }
    assert writing <= {"publish"}
