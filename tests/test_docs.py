"""What README and the pages show: code runs, commands can be typed, links lead somewhere."""

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import diffusers
import numpy as np
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from PIL import Image

import trueup
from trueup.cli import _joined, main
from trueup.estimate.diagnose import Diagnosis
from trueup.options import parser

import pipelines
from tiny import tiny_unet

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "integrations/comfyui/README.md")
PAGES += tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))


@functools.cache
def parsed(page):
    """The tokens of a page, those inside of paragraphs and cells among them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    tokens = MarkdownIt().enable("table").parse(text)
    return [inner for token in tokens for inner in (token, *(token.children or ()))]


def blocks(page, *infos):
    """Blocks of code by what their fence says they are; "" has no fence."""
    kinds = ("fence", "code_block")
    return [token.content for token in parsed(page) if token.type in kinds and token.info in infos]


def spans(page):
    return [token.content for token in parsed(page) if token.type == "code_inline"]


# A `python` block is run; a `py` block is a fragment, which shows where things go.
BLOCKS = {f"{page} {k}": code for page in PAGES for k, code in enumerate(blocks(page, "python"))}


def commands(page, name):
    """Lines of blocks that run `name`, as lists of words, whatever launches it."""
    for block in blocks(page, "", "sh"):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            typed = re.match(rf"(?:.* -m )?{name} (.*)", line)
            if typed:
                yield shlex.split(typed[1], comments=True)


COMMANDS = [(page, words) for page in PAGES for words in commands(page, "trueup")]


@pytest.fixture
def untrained(monkeypatch):
    """The networks on these pages were never trained, and would be refused for it."""
    for name in ("estimate.measuring.check_use", "density.opening.check_use", "commands.calibrating.look"):
        monkeypatch.setattr(f"trueup.{name}", lambda *_: Diagnosis(1.0))


@pytest.fixture
def here(tmp_path, untrained, monkeypatch):
    """A folder with what the documents call my-model and my-images."""
    unet = tiny_unet(in_channels=3, out_channels=3)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "my-model")
    (tmp_path / "my-images").mkdir()
    for k, picture in enumerate(np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(picture).save(tmp_path / "my-images" / f"{k}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for function in (trueup.calibrate, trueup.fit_solver):  # counts that take less time, as for commands
        monkeypatch.setitem(function.__kwdefaults__, "trajectories", 32)
    monkeypatch.setitem(trueup.fitting.judge.__kwdefaults__, "trajectories", 16)
    return tmp_path


def training():
    """What the page on recording takes from the reader's script."""
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
    code = BLOCKS[name]
    if "trueup.calibrate(" not in code:
        trueup.calibrate("my-model", "my-images", levels=[0, 500, 999]).save("my-model.trueup.safetensors")
    around = training() if "recording" in name else {}
    exec(compile(code, name, "exec"), {"__name__": "__main__", **around})
    assert list(here.glob("*.trueup.safetensors"))


def named(page):
    """Calls and names of trueup in a page's code: (words, keywords of the call)."""
    for code in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(code)):
            keywords = [each.arg for each in node.keywords if each.arg] if isinstance(node, ast.Call) else []
            name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            if re.fullmatch(r"trueup(\.\w+)+", name):
                yield name, keywords
    for span in spans(page):
        if found := re.match(r"trueup(\.[A-Za-z_]\w*)+", span):
            yield found[0], []


@pytest.mark.parametrize("page", PAGES)
def test_names_exist_and_take_what_they_are_given(page):
    for name, keywords in named(page):
        found = trueup
        for part in name.split(".")[1:]:
            if isinstance(found, ModuleType) and not hasattr(found, part):  # a module nobody imported yet
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(f"{found.__name__}.{part}")
            assert hasattr(found, part), f"{page}: there is no {name}"
            found = getattr(found, part)
        unknown = set(keywords) - set(inspect.signature(found).parameters) if keywords else ()
        assert not unknown, f"{page}: {name} takes no {unknown}"


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced(page):
    for block in blocks(page, ""):
        assert not re.search(r"^(import|from) |\btrueup\.\w+\(", block, re.M), f"python, or py: {block}"


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: str(value)[:60])
def test_commands_can_be_typed(page, words, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a cat\n")  # the one file that is read while options are
    monkeypatch.chdir(tmp_path)
    parser().parse(_joined(words))  # exits with 2 otherwise


@pytest.mark.parametrize("page", PAGES)
def test_options_in_sentences_exist(page):
    known = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    for span in spans(page):
        if found := re.match(r"(?:.* -m )?trueup ([a-z]+)\b(.*)", span):
            assert found[1] in known, f"{page}: {span}"
            options = known[found[1]]._option_string_actions
            assert all(option in options for option in re.findall(r"--[a-z-]+", found[2])), f"{page}: {span}"


@pytest.mark.parametrize("page", PAGES)
def test_scripts_targets_and_extras_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    extras = metadata("trueup").get_all("Provides-Extra")
    shared = (ROOT / "benchmarks" / "common.py").read_text()
    for block in (*blocks(page, "", "sh"), *spans(page)):
        assert set(re.findall(r"^make (\w+)", block, re.M)) <= set(targets), block
        for listed in re.findall(r"pip install '[^'\[]*\[([^\]]+)\]", block):
            assert set(listed.split(",")) <= set(extras), block
        for script, given in re.findall(
            r"\b((?:benchmarks|examples)/\w+\.py)\b(.*)", block.replace("\\\n", " ")
        ):
            source = (ROOT / script).read_text() + shared
            for option in re.findall(r"--[a-z][a-z0-9-]*", given):
                assert f'"{option}"' in source, f"{page}: {script} has no {option}"


# Every command of the pages is run, in order, on tiny models and pictures by the names that the pages use.
# Counts are made smaller by what is appended, since the last of an option counts, and of several numbers of
# evaluations the first is taken. A launcher (torchrun) is left out: what it starts is run as one process.
SMALLER = {
    "calibrate": "--images 24 --trajectories 32 --no-samples --force",
    "check": "--images 20 --no-samples --force",
    "evaluate": "--samples 8 --features pixels --no-loss --force",
    "likelihood": "--images 2 --force",
    "merge": "--force",
    "report": "--force",
    "sample": "-n 2 --force",
    "samplers": "--trajectories 8 --force",
}
SMALLER_STILL = {"--generated": "--generated 24 --generate-nfe 5", "--shard": "--batch-size 3"}
NOT_RUN = {"demo": "calibrates and draws the bundled model, which takes minutes: `make demo`"}


def smaller(words):
    """A command with counts that take no time, and files that the shell would have found."""
    made = []
    for word in words:
        if made[-1:] == ["--nfe"]:
            word = word.split(",")[0]
        made += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    if words[0] == "merge" and "*" in " ".join(words):  # the page measures one share of all
        made.append("--partial")
    more = [SMALLER.get(words[0], ""), *(text for option, text in SMALLER_STILL.items() if option in words)]
    return [*made, *" ".join(more).split()]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Folders with all that the pages name: in `classes`, my-model is one that takes labels."""
    base = tmp_path_factory.mktemp("documented")
    for name, settings in (("plain", {}), ("classes", {"num_class_embeds": 11})):
        unet = tiny_unet(in_channels=3, out_channels=3, **settings)
        diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(base / name / "my-model")
    pictures = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    np.savez(base / "classes" / "my-images.npz", image=pictures, label=np.arange(24) % 2)
    plain = base / "plain"
    shutil.copytree(plain / "my-model", plain / "MODEL")
    pipelines.sd().save_pretrained(plain / "my-sd")
    for name, size in (("my-images", 8), ("my-test-images", 8), ("images", 8), ("photos", 32)):
        (plain / name).mkdir()
        for k, picture in enumerate(pictures):
            Image.fromarray(picture).resize((size, size)).save(plain / name / f"{k}.png")
    (plain / "captions.csv").write_text("file,text\n" + "".join(f"{k}.png,a cat\n" for k in range(24)))
    (plain / "prompts.txt").write_text("a cat\na red house\n")
    code = "from diffusers import DDPMPipeline\n\nmake_denoiser = DDPMPipeline.from_pretrained('my-model')\n"
    (plain / "my_code.py").write_text(code)
    return base


@pytest.mark.parametrize("page", sorted({page for page, words in COMMANDS if words[0] not in NOT_RUN}))
def test_commands_run_one_after_another(page, everything, untrained, tmp_path, monkeypatch, capsys):
    shutil.copytree(everything, tmp_path, dirs_exist_ok=True)
    ran = []
    for words in commands(page, "trueup"):
        monkeypatch.chdir(tmp_path / ("classes" if "--null-label" in words else "plain"))
        if words[0] not in NOT_RUN and words not in ran:
            assert main(smaller(words)) == 0, f"{page}: {shlex.join(words)}: {capsys.readouterr().err}"
            ran.append(words)


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page):
    tokens = parsed(page)
    headings = (text for token, text in pairwise(tokens) if token.type == "heading_open")
    return {slug(text.content.replace("`", "")) for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for token in parsed(page):
        link = token.attrs.get("href") or token.attrs.get("src") or "https://"
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT.resolve()))), f"{page}: {link}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built where nothing else is; strict: a link or an anchor that leads nowhere is an error."""
    where = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", where)
    shutil.copytree(ROOT / "docs", where / "docs")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return where / "site"


def test_every_page_is_on_the_site(site):
    listed = [
        path for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for path in entry.values()
    ]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    for path in listed:
        assert (site / path).with_suffix(".html").is_file()


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link[^>]* href=[\"']?([^\"' >]+)", text)
        assert loaded
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text(encoding="utf-8"))
