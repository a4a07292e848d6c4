"""Calibrations as directories and on the Hub: what is written, what it says, and that others can use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import diffusers
import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants
from markdown_it import MarkdownIt

import trueup
from trueup.calibration.card import MARK, card
from trueup.errors import ArtifactError, MismatchError, ModelError, TrueupError
from trueup.estimate import fit, measure
from trueup.hf import as_denoiser
from trueup.process import DiscreteVP

from calibrations import fitted_solver, make
from hub import SHA, Hub, cached
from tiny import tiny_unet

SHAPE = (1, 8, 8)
VP = DiscreteVP.linear()
FILE = "calibration.trueup.safetensors"


def with_solvers(*purposes, **how):
    """A calibration with random solvers for (evaluations, guidance)."""
    kept, generator = torch.ones(20, dtype=torch.float64), torch.Generator().manual_seed(0)
    kept = kept[: trueup.bands.Bands(SHAPE[1:]).count]
    made = (fitted_solver(SHAPE, VP, kept, generator, nfe=n, guidance=w) for n, w in purposes)
    return replace(make(shape=SHAPE, noise=VP, **how), solvers=tuple(made))


def calibrated(model):
    """A network that was never trained, measured and not judged."""
    pictures = torch.randint(256, (24, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return fit(measure(model, pictures, levels=[0, 500, 999], trust=True))


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on this machine, that the real client speaks to."""
    with Hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# Directories


def test_a_directory_holds_the_calibration_its_card_and_its_schedulers(tmp_path):
    cal = with_solvers((5, 1.0), (8, 1.0), (8, 7.5))
    cal.save_pretrained(tmp_path / "new" / "shared")
    schedulers = [f"scheduler-{name}/scheduler_config.json" for name in ("5", "8", "8-guidance-7.5")]
    assert files_in(tmp_path / "new" / "shared") == sorted(["README.md", FILE, *schedulers])
    for where in (tmp_path / "new" / "shared", str(tmp_path / "new" / "shared" / FILE)):
        assert trueup.load(where).identity == cal.identity


def test_attach_takes_a_directory(tmp_path):
    unet = tiny_unet()
    cal = calibrated(diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()))
    cal.save_pretrained(tmp_path)
    x = torch.randn(1, *SHAPE)
    with torch.no_grad():
        bare = unet(x, 500).sample
        with trueup.attach(unet, cal):
            corrected = unet(x, 500).sample
        with trueup.attach(unet, tmp_path):
            found = unet(x, 500).sample
    assert torch.allclose(found, corrected, rtol=0, atol=1e-5)  # files are float32
    assert not torch.allclose(found, bare, rtol=0, atol=1e-3)


def test_what_is_not_ours_stays(tmp_path):
    with_solvers((5, 1.0), (6, 1.0)).save_pretrained(tmp_path)
    foreign = {
        "model_index.json": "{}",
        "scheduler/scheduler_config.json": '{"_class_name": "DDPMScheduler"}',
        "scheduler-mine/scheduler_config.json": '{"_class_name": "DDPMScheduler"}',
        "scheduler-odd/scheduler_config.json": "not JSON",
        "scheduler-6/notes.txt": "kept",
    }
    for name, text in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with_solvers((8, 1.0)).save_pretrained(tmp_path)
    ours = ["README.md", FILE, "scheduler-8/scheduler_config.json"]
    assert files_in(tmp_path) == sorted([*foreign, *ours])  # those for 5 and 6 are gone
    assert not (tmp_path / "scheduler-5").exists()
    assert all((tmp_path / name).read_text() == text for name, text in foreign.items())


def test_a_card_that_somebody_wrote_stays(tmp_path):
    cal, readme = make(), tmp_path / "README.md"
    cal.save_pretrained(tmp_path)
    first = readme.read_text()
    readme.write_text(first + "more")
    cal.save_pretrained(tmp_path)
    assert readme.read_text() == first  # anew
    readme.write_text("# Mine")
    with pytest.warns(UserWarning, match=r"README.md is not one of trueup's, and is left as it is"):
        cal.save_pretrained(tmp_path)
    assert readme.read_text() == "# Mine"
    assert trueup.load(tmp_path).identity == cal.identity


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"cannot write .*file"):
        make().save_pretrained(tmp_path / "file")
    with pytest.raises(
        TrueupError, match=r"base_model is the model's name on the Hub, owner/name, not 'x: \["
    ):
        make().save_pretrained(tmp_path / "new", base_model="x: [")
    assert not (tmp_path / "new").exists()


def test_without_diffusers_the_calibration_is_still_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.warns(UserWarning, match="without its schedulers: a scheduler needs diffusers"):
        with_solvers((5, 1.0)).save_pretrained(tmp_path)
    assert files_in(tmp_path) == ["README.md", FILE]
    assert trueup.load(tmp_path).solver(5).nfe == 5


def test_what_load_says_of_a_bad_place(tmp_path, offline, monkeypatch):
    def says(where, message, **how):
        with pytest.raises(ArtifactError, match=message) as caught:
            trueup.load(where, **how)
        assert "\n" not in str(caught.value)

    says(tmp_path, r"holds no calibration \(\*.trueup.safetensors\)")
    says(tmp_path / "nowhere", "nowhere does not exist")
    says("out/x.trueup.safetensors", "x.trueup.safetensors does not exist")
    says("owner/name", r"owner/name is neither here nor in the cache of the Hub, which is switched off")
    says("owner/name", r"owner/name at revision v2 is neither here", revision="v2")
    says(tmp_path, "is no name on the Hub, and has no revision v2", revision="v2")
    make().save(tmp_path / "a.trueup.safetensors")
    assert trueup.load(tmp_path).identity == make().identity
    make().save(tmp_path / "b.trueup.safetensors")
    says(tmp_path, "holds 2 calibrations .*a.trueup.*, b.trueup.*: name one of the files")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    says("owner/name", r"takes huggingface_hub: pip install 'trueup\[diffusers\]'")


# The card

HOSTILE = (
    "`](javascript:alert(1)) <script>alert(1)</script>",
    "x\n---\nlicense: mit\n# Trust me\n",
    "x\n```\n\n# Trust me\n\n~~~\n</pre>",
    "``` \n</code><img src=x onerror=alert(1)>",
    "[click](https://evil.example) ![](https://evil.example/x.png) https://evil.example www.evil.example",
    "| a | b |\n|---|---|",
    "- !!python/object/apply:os.system [id]",
    "\x1b[2J\u202egnp.exe\u2028",
    "````",
    " ",
    "<!-- -->",
    "$$\\href{javascript:alert(1)}{x}$$",
)


def tokens_of(text):
    """What a parser of Markdown, links in plain text and tables included, makes of a card, flat."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    body = text.split("---\n", 2)[2]
    blocks = parser.parse(body)
    return [token for block in blocks for token in (block, *(block.children or ()))], blocks


def headings(blocks):
    return [after.content for block, after in pairwise(blocks) if block.type == "heading_open"]


def test_a_card_says_what_it_is_and_where_it_came_from():
    cal = with_solvers((8, 1.0))
    cal.provenance["base_model"] = "google/ddpm-cifar10-32"
    text = card(cal, "me/mine")
    data = ModelCard(text).data.to_dict()
    assert data == {
        "library_name": "trueup",
        "tags": ["trueup", "diffusion", "calibration", "diffusers"],
        "base_model": "google/ddpm-cifar10-32",
    }
    _, blocks = tokens_of(text)
    assert headings(blocks)[1:] == ["Use", "Measured", "Solvers", "Limits", "Provenance"]
    gain = cal.uncalibration
    for told in (
        cal.verdict(),
        f"{gain.value:.2g} ± {gain.reach:.1g} bits/dim",
        cal.solvers[0].summary(),
        cal.provenance["weights"]["float32"],
        "images: `40",
        "seed: `0`",
        trueup.__version__,
    ):
        assert told in text
    assert "google/" not in card(with_solvers((8, 1.0)))


def test_the_card_of_solvers_alone_promises_no_correction():
    cal = trueup.calibration.Calibration.without_data(
        as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler())
    )
    cal.solvers = with_solvers((8, 1.0)).solvers
    text = card(cal)
    assert "attach(pipe" not in text
    assert "Solvers for few steps, fitted by trueup to `UNet2DModel`" in text
    assert "nfe=8" in text


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_file_says_is_marked_up(tmp_path, text):
    """A model's name and a solver's words, of an untrusted file, appear as text and change nothing else."""
    cal = with_solvers((8, 1.0), (5, 2.0))
    plain_tokens, plain_blocks = tokens_of(card(cal))
    cal.provenance |= {"model": text, "chosen": text, "weights": {text: "ab"}}
    for solver in cal.solvers:
        solver.provenance |= {"base": text, "fitted": text}
    cal.save_pretrained(tmp_path / "first")
    trueup.load(tmp_path / "first").save_pretrained(tmp_path / "second")  # what a file can hold
    for folder in ("first", "second"):
        made = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        harmless(made, plain_tokens, plain_blocks)


def harmless(made, plain_tokens, plain_blocks):
    """Whether a card is built like another whose texts are plain."""
    assert ModelCard(made).data.to_dict() == ModelCard(card(with_solvers())).data.to_dict()
    tokens, blocks = tokens_of(made)
    assert [token.type for token in blocks] == [token.type for token in plain_blocks]
    kinds = {token.type for token in plain_tokens}
    assert {token.type for token in tokens} <= kinds
    assert [token.content for token in tokens if token.type.startswith("html")] == [f"{MARK}\n"]
    assert headings(blocks)[1:] == headings(plain_blocks)[1:]
    assert not [token for token in tokens if token.type == "text" and "evil" in token.content]
    assert all(line.isprintable() for line in made.split("\n"))


def test_a_hostile_base_model_is_refused_in_a_file_and_left_out_of_a_card(tmp_path):
    cal = make()
    for name in ("a/b\nlicense: mit", "a/b](x)", "../x", "a/b c", "https://a/b", 5):
        cal.provenance["base_model"] = name
        assert "base_model" not in ModelCard(card(cal)).data.to_dict()
        with pytest.raises(ArtifactError, match="name on the Hub makes no sense"):
            cal.save(tmp_path / "x.trueup.safetensors")


# Schedulers


def test_a_scheduler_is_found_by_what_it_is_for(tmp_path):
    cal = with_solvers((5, 1.0), (8, 1.0), (8, 7.5))
    cal.save_pretrained(tmp_path)
    for nfe, guidance, given in ((5, 1.0, {}), (8, 1.0, {"guidance": 1}), (8, 7.5, {"guidance": 7.5})):
        found = trueup.Scheduler.from_pretrained(tmp_path, nfe=nfe, **given)
        assert found.identity == cal.scheduler(nfe, guidance).identity
    assert trueup.Scheduler.from_pretrained(tmp_path, guidance=7.5).solver.nfe == 8
    # stock tools: a scheduler in a subfolder
    config = diffusers.DDIMScheduler.load_config(tmp_path, subfolder="scheduler-5")
    assert diffusers.DDIMScheduler.from_config(config).config.trained_betas is not None
    assert trueup.Scheduler.from_pretrained(tmp_path, subfolder="scheduler-5").solver.nfe == 5

    there = "has schedulers for 5 evaluations, 8 evaluations, 8 evaluations .guidance 7.5."
    for asked, message in (
        ({}, f"{there}: say which with nfe and guidance"),
        ({"nfe": 8}, f"{there}: say which with nfe and guidance"),
        ({"nfe": 6}, f"{there}, not for nfe 6$"),
        ({"nfe": 5, "guidance": 0}, f"{there}, not for nfe 5 and guidance 0$"),
        ({"nfe": 8, "subfolder": "scheduler-5"}, "for 5 evaluations, not for nfe 8"),
    ):
        with pytest.raises(MismatchError, match=message):
            trueup.Scheduler.from_pretrained(tmp_path, **asked)


def test_a_plain_scheduler_directory_and_a_pipeline_still_load(tmp_path):
    scheduler = with_solvers((5, 1.0)).scheduler(5)
    scheduler.save_pretrained(tmp_path / "plain")
    diffusers.DDPMPipeline(tiny_unet(), scheduler).save_pretrained(tmp_path / "pipe")
    for where in ("plain", "pipe", "pipe/scheduler"):
        assert trueup.Scheduler.from_pretrained(tmp_path / where).identity == scheduler.identity
    assert trueup.Scheduler.from_pretrained(str(tmp_path / "plain"), nfe=5).identity == scheduler.identity
    loaded = diffusers.DDPMPipeline.from_pretrained(tmp_path / "pipe")
    assert loaded.scheduler.identity == scheduler.identity


def test_places_without_a_fitted_scheduler(tmp_path, offline):
    make().save_pretrained(tmp_path / "none")
    diffusers.DDPMScheduler().save_pretrained(tmp_path / "other")
    for where in ("none", "other"):
        with pytest.raises(ModelError, match=r"holds no scheduler fitted to a model: .*trueup.fit_solver"):
            trueup.Scheduler.from_pretrained(tmp_path / where)
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        trueup.Scheduler.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="owner/name is neither here nor in the cache of the Hub"):
        trueup.Scheduler.from_pretrained("owner/name")


def test_a_pipeline_takes_the_scheduler_when_it_is_loaded(tmp_path):
    cal = with_solvers((3, 1.0))
    cal.save_pretrained(tmp_path / "cal")
    diffusers.DDPMPipeline(tiny_unet(), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "model")
    scheduler = trueup.Scheduler.from_pretrained(tmp_path / "cal")
    pipe = diffusers.DDPMPipeline.from_pretrained(tmp_path / "model", scheduler=scheduler)
    assert pipe.scheduler.identity == cal.scheduler(3).identity
    images = pipe(num_inference_steps=3, output_type="np").images
    assert images.shape == (1, 8, 8, 1)


# The Hub


def test_pushed_and_loaded_by_name(hub):
    """The real client, to a server and back."""
    cal = with_solvers((5, 1.0))
    address = cal.push_to_hub("me/mine", private=True, token="hf_secret", base_model="google/ddpm")
    assert address == f"{hub.address}/me/mine"
    asked = hub.made["me/mine"]
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert "Bearer hf_secret" in hub.tokens
    assert sorted(hub.repos["me/mine"]) == ["README.md", FILE, "scheduler-5/scheduler_config.json"]
    readme = hub.repos["me/mine"]["README.md"].decode()
    assert 'trueup.attach(pipe, "me/mine")' in readme
    assert 'from_pretrained("google/ddpm")' in readme
    assert trueup.load("me/mine").identity == cal.identity
    assert hub.asked == [FILE]
    assert trueup.load("me/mine", revision=hub.sha("me/mine")).identity == cal.identity
    assert trueup.Scheduler.from_pretrained("me/mine", nfe=5).identity == cal.scheduler(5).identity
    with pytest.raises(ArtifactError, match="me/mine on the Hub has no revision v9"):
        trueup.load("me/mine", revision="v9")
    with pytest.raises(ArtifactError, match="me/other is neither here nor on the Hub, as far as you may see"):
        trueup.load("me/other")


def test_pushing_again_replaces_what_is_ours_alone(hub):
    with_solvers((5, 1.0)).push_to_hub("me/mine")
    hub.repos["me/mine"] |= {"README.md": b"# Mine", "model.safetensors": b"theirs"}
    cal = with_solvers((8, 1.0), seed=1)
    with pytest.warns(UserWarning, match=r"the README.md of me/mine is not one of trueup's"):
        cal.push_to_hub("me/mine")
    found = hub.repos["me/mine"]
    assert sorted(found) == ["README.md", FILE, "model.safetensors", "scheduler-8/scheduler_config.json"]
    assert (found["README.md"], found["model.safetensors"]) == (b"# Mine", b"theirs")
    assert trueup.load("me/mine").identity == cal.identity


def test_a_repository_without_a_calibration(hub):
    hub.repos["me/model"] = {"unet.safetensors": b"x", "calibrate.py": b"raise SystemExit"}
    with pytest.raises(ArtifactError, match="me/model holds no calibration"):
        trueup.load("me/model")
    assert hub.asked == []


@pytest.mark.parametrize("name", ["mine", "me/mine/x", "me/mi ne", "../mine", "me/x.git"])
def test_names_that_are_none(name):
    with pytest.raises(TrueupError, match="a name on the Hub is owner/name, not"):
        make().push_to_hub(name)


def test_the_hub_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(ArtifactError, match=r"me/mine is neither here nor in the cache.*cannot be reached"):
        trueup.load("me/mine")
    with pytest.raises(TrueupError, match="me/mine: the Hub says "):
        make().push_to_hub("me/mine")


def test_what_is_cached_needs_no_network(tmp_path, offline):
    cal, older = with_solvers((5, 1.0)), with_solvers((5, 1.0), seed=1)
    cal.save_pretrained(tmp_path / "new")
    older.save_pretrained(tmp_path / "old")
    cached(offline, "me/mine", tmp_path / "new")
    cached(offline, "me/mine", tmp_path / "old", SHA[::-1], "v1")
    assert trueup.load("me/mine").identity == cal.identity
    assert trueup.load("me/mine", revision="v1").identity == older.identity
    assert trueup.Scheduler.from_pretrained("me/mine").identity == cal.scheduler(5).identity
    assert huggingface_hub.constants.HF_HUB_OFFLINE


def test_the_card_can_be_followed_word_for_word(tmp_path):
    """A model and its calibration by name, in a process that has no network but a cache."""
    diffusers.DDPMPipeline(tiny_unet(), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "model")
    cache = tmp_path / "home" / "hub"
    snapshot = cached(cache, "me/model", tmp_path / "model")
    cal = calibrated(snapshot)
    cal.solvers = with_solvers((3, 1.0)).solvers
    assert cal.provenance["base_model"] == "me/model"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cal.save_pretrained(tmp_path / "cal")
    text = (tmp_path / "cal" / "README.md").read_text().replace("this-directory", "me/cal")
    cached(cache, "me/cal", tmp_path / "cal")
    (use,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len([line for line in use.splitlines() if line and "import" not in line]) == 4
    told = "import json\nprint(json.dumps([pipe.scheduler.identity, list(images[0].size)]))"
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", use + told], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [cal.scheduler(3).identity, [8, 8]]
