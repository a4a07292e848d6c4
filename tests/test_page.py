"""The report: in order, complete, honest about what is missing, and harmless whatever a file says."""

import base64
import hashlib
import io
import json
import math
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup.bands import Bands
from trueup.calibration import Calibration
from trueup.calibration.drawn import small
from trueup.cli import main
from trueup.errors import ArtifactError, DataError, MismatchError
from trueup.page import page, render, write
from trueup.page.levels import frequencies, kept_map
from trueup.page.origin import commands
from trueup.page.pictures import around_zero, standing_out, tiles
from trueup.statistics import Number

from calibrations import emptied, make
from forged import resign
from pages import HOSTILE, Plain, checkup, comparison, likelihood, number, samplers, whole
from tiny import tiny_unet

PARTS = ("verdict", "samples", "diagnosis", "quality", "curves", "levels-of", "bands", "measures", "origin")


class Seen(HTMLParser):
    """The elements of a page with the names of their attributes, its text, and ends that had no beginning."""

    VOID = ("img", "input", "link", "meta")

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def said(text):
    """What a reader sees."""
    body = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S)
    return " ".join(" ".join(Seen(body).text).split())


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


@pytest.fixture
def files(tmp_path):
    """A calibration's file and everything measured with it."""
    cal = whole()
    cal.save(tmp_path / "a.trueup.safetensors")
    paths = []
    for make_one in (checkup, comparison, samplers, likelihood):
        paths.append(tmp_path / f"{make_one.__name__}.json")
        paths[-1].write_text(json.dumps(make_one(cal)))
    return tmp_path / "a.trueup.safetensors", paths


def test_sections_stand_in_order(files):
    text = render(files[0], measured=files[1])
    places = [text.index(f'id="{name}"') for name in PARTS]
    assert places == sorted(places)
    first = re.search(r"<h1>(.*?)</h1>", text)[1]
    cal = trueup.load(files[0])
    assert first == "Miscalibrated: correcting it brings samples closer to the data."
    assert cal.verdict().partition(": correcting")[2].replace(" -> ", " → ") in said(text)
    words = said(text)
    for part in (
        "Brightness or colour drifts",
        "UniPC",
        "Fréchet distance",
        "diffusion",
        "a note on what was compared",
        cal.identity,
    ):
        assert part in words
    assert "Not measured" not in words
    assert "trueup samplers" not in words
    assert "trueup calibrate MODEL --data IMAGES --images 40 --nfe 8" in words


def test_numbers_are_embedded_as_json(files):
    found = data_of(render(files[0], measured=files[1]))
    cal = trueup.load(files[0])
    assert found["calibration"]["verdict"] == cal.verdict()
    assert len(found["calibration"]["levels"]) == len(cal.t)
    assert found["measured"]["comparisons"][0]["rows"][0]["changes"]["frechet"]["after"]["value"] == 4.0
    assert found["measured"]["samplers"][0]["rows"][0]["error"] == {"value": 0.4, "low": None, "high": None}
    assert "per_image" not in json.dumps(found)


def test_nothing_is_loaded_and_only_its_own_script_may_run(files):
    text = render(files[0], measured=files[1])
    seen = Seen(text)
    policy = next(
        a["content"] for t, a in seen.attributes if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for kind, name in (("style", "style-src"), ("script", "script-src")):
        inline = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in inline]
        assert rules[name] == f"'sha256-{hashes[0]}'"
        assert len(inline) == 1
    for tag, attributes in seen.attributes:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "srcset", "action")
        ]
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:"), tag
    assert "http://" not in text
    assert "https://" not in text


def test_every_picture_and_chart_says_what_it_is(files):
    seen = Seen(render(files[0], measured=files[1]))
    assert all("alt" in a for t, a in seen.attributes if t == "img")
    assert all(a.get("aria-label") and a.get("role") == "img" for t, a in seen.attributes if t == "svg")
    grids = [a for _, a in seen.attributes if a.get("class") == "grid" and "role" in a]
    assert len(grids) == 3
    assert all("16 samples" in grid["aria-label"] for grid in grids)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_change_nothing_but_text(text):
    """The same elements with the same attributes as in a page of plain names, and nothing unseen."""

    def page_with(word):
        cal = whole(model=word)
        cal.provenance |= {"name": word, "transform": {word: word}, "told": word, "generated": None}
        cal.solvers[0].provenance["base"] = word
        compared = comparison(cal, features={"name": word}, notes=[word])
        compared["rows"][0]["solver"] = compared["rows"][1]["uncalibrated"] = word
        compared["rows"][0]["changes"][word] = compared["rows"][0]["changes"]["frechet"]
        listed = samplers(cal)
        listed["samplers"][0] |= {"sampler": word, "grid": word}
        likely = likelihood(cal, description=word, of=word, notes=[word])
        likely["terms"][word] = likely["terms"]["diffusion"]
        ill = {"kind": word, "sentence": word, "advice": word}
        found = checkup(cal, findings=[ill], notes=[word], would_have_been_seen={word: 0.1})
        well = checkup(cal, findings=[], healthy=True, would_have_been_seen={word: 0.1})
        return render(cal, measured=map(Plain, (compared, listed, likely, found, well)))

    plain, hostile = page_with("plain"), page_with(text)
    assert Seen(hostile).elements == Seen(plain).elements
    assert all(c.isprintable() or c == "\n" for c in hostile)
    hostile.encode()  # no half of a pair is left
    assert data_of(hostile)["calibration"]["model"] == text
    assert hostile.count("<script") == plain.count("<script") == 2


def test_a_signed_file_with_a_hostile_name_is_a_page_that_shows_it(files):
    def change(meta, tensors):
        meta["provenance"]["model"] = HOSTILE[0]

    text = render(resign(files[0], change))
    assert HOSTILE[0] not in text
    assert HOSTILE[0] in said(text)


@pytest.mark.parametrize("text", ["bundled:raw; touch pwned", "$(touch pwned)", "a b", "-x", "`touch pwned`"])
def test_no_file_writes_the_commands_that_people_copy(tmp_path, text):
    cal = make(solvers=True)
    plain = [shlex.split(line) for line in commands(cal)]
    cal.provenance |= {"name": text, "model": text, "chosen": text}
    assert [shlex.split(line) for line in commands(cal)] == plain
    assert not re.search(r"trueup \w+ [^<]*touch", render(cal))
    for change in ({"seed": text}, {"seed": True}, {"seed": -5}, {"generated": {"nfe": text}}):
        with pytest.raises(ArtifactError, match=r"seed|nfe"):
            replace(cal, provenance=cal.provenance | change).save(tmp_path / "a.trueup.safetensors")
    for found in (text, [1], True, -1):
        solvers = tuple(replace(s, provenance={**s.provenance, "trajectories": found}) for s in cal.solvers)
        with pytest.raises(ArtifactError, match="trajectories"):
            replace(cal, solvers=solvers).save(tmp_path / "a.trueup.safetensors")


def test_each_solver_that_was_measured_at_several_numbers_has_a_chart_of_its_own():
    cal = whole()
    found = comparison(cal)
    found["rows"] += [{**row, "solver": "ddim"} for row in found["rows"][:2]]
    text = render(cal, measured=[Plain(found)])
    for solver in ("dpm-solver-3", "ddim"):
        assert text.count(f"Fréchet distance against evaluations of {solver}, before and after</title>") == 1
        assert f"{solver}: Fréchet distance (pixels)" in said(text)
    assert "evaluations of fitted" not in text  # measured at one: a table says it


def test_the_bundled_model_and_its_images_are_named_in_commands():
    cal = whole()
    cal.provenance["name"] = "bundled:raw"
    assert "trueup calibrate bundled:raw --data bundled:images --images" in said(render(cal))


def test_what_is_missing_is_said_with_the_command_that_makes_it():
    cal = make((1, 6, 8))
    words = said(render(cal))
    for command in (
        "trueup check MODEL",
        "trueup samplers MODEL",
        "trueup evaluate MODEL",
        "trueup likelihood MODEL",
        "trueup report",
    ):
        assert command in words
    assert "This file holds no samples" in words
    assert "trueup calibrate MODEL --data IMAGES" in words
    assert "does not hold the expected prediction" in words
    assert words.count("How to add it") == 4
    assert "--with check.json samplers.json evaluate.json likelihood.json -o report.html --force" in words


def test_a_page_that_has_everything_asks_for_nothing(files):
    text = render(files[0], measured=files[1])
    assert 'id="more"' not in text
    assert "How to add it" not in text
    again = render(files[0], measured=[*files[1], *files[1]])  # named twice, shown once
    assert again == text


def test_a_verdict_that_is_not_about_samples_stays_the_headline():
    cal = whole()
    cal.provenance.pop("samples", None)
    text = render(cal)
    first = re.search(r"<h1>(.*?)</h1>", text)[1]
    assert cal.verdict()[1:].startswith(first[1:])
    assert "<code>trueup evaluate</code>" in text
    assert "`" not in said(text)


def test_sizes_are_shown_with_both_ends_of_their_intervals(files):
    cal = trueup.load(files[0])
    ends = (torch.full_like(cal.t, v) for v in (1.34, 0.8, -0.2, 4.51))
    cal.evidence = replace(cal.evidence, eta2=Number(*ends))
    assert said(render(cal)).count("1.34 (0 to 4.5)") == 2 * len(cal.t)  # at each level, and in the table


def test_what_differs_is_seen_in_what_is_compared(files):
    """Between images a likelihood varies more than calibrating changes it."""
    cal = trueup.load(files[0])
    terms = {
        "before": number(4.1928, 2.0),
        "after": number(4.1705, 2.0),
        "difference": number(-0.0223, 0.001),
    }
    words = said(render(cal, measured=[Plain(likelihood(cal, total=terms))]))
    assert "4.1928 ± " in words
    assert "4.1705 ± " in words


def test_few_numbers_are_a_table_and_many_a_chart(files):
    cal = trueup.load(files[0])
    found = samplers(cal)
    one = {**found, "samplers": [row for row in found["samplers"] if row["nfe"] == 5]}
    assert "against evaluations, samplers of" in render(cal, measured=[Plain(found)])
    assert "against evaluations, samplers of" not in render(cal, measured=[Plain(one)])


def test_nothing_to_correct_is_said_plainly():
    words = said(render(emptied(make((1, 6, 8)))))
    assert "Calibrated within noise: nothing to do." in words
    assert "samples with this file are those without it" in words


def test_solvers_alone_make_a_page():
    network = tiny_unet()
    denoiser = trueup.Denoiser(network, trueup.process.DiscreteVP.linear(), "noise", (1, 8, 8))
    words = said(render(Calibration.without_data(denoiser)))
    assert "Nothing was measured" in words
    assert "trueup calibrate MODEL -o" in words


@pytest.mark.parametrize("shape", [(3, 8, 8), (4, 8, 8), (16, 4, 4), (2, 12), (3, 4, 6, 6)])
def test_other_shapes_make_a_page(shape):
    text = render(whole(shape))
    assert Seen(text).elements
    assert ("no pictures" in said(text)) == (len(shape) != 3)


def test_many_levels_stay_a_small_page():
    cal = whole(levels=300)
    text = render(cal)
    assert text.count('class="level"') == 50
    assert len(data_of(text)["calibration"]["levels"]) == 300
    assert len(text) < 1_500_000


def test_a_name_on_the_hub_is_the_model_of_the_commands():
    cal = whole()
    cal.provenance["base_model"] = "me/mine"
    assert "trueup calibrate me/mine --data IMAGES" in said(render(cal))


def test_the_model_goes_by_the_name_people_know():
    """Its directory's, or its class; on the Hub, that. A bare name is no argument of a command."""
    cal = whole(model="UNet2DModel")
    assert "<title>trueup: UNet2DModel</title>" in render(cal)
    cal.provenance["name"] = "my-model"
    text = render(cal)
    assert "<title>trueup: my-model</title>" in text
    assert "UNet2DModel" in said(text)
    assert "trueup calibrate MODEL --data" in said(text)
    cal.provenance["base_model"] = "me/mine"
    assert "<title>trueup: me/mine</title>" in render(cal)


@pytest.mark.parametrize("name", ["/home/me/my-model", "C:\\models\\mine", "..", 3])
def test_a_path_is_no_name(tmp_path, name):
    make((1, 6, 8)).save(tmp_path / "a.trueup.safetensors")

    def change(meta, tensors):
        meta["provenance"]["name"] = name

    with pytest.raises(ArtifactError, match="the name of the model's directory makes no sense"):
        trueup.load(resign(tmp_path / "a.trueup.safetensors", change))


def test_a_healthy_network_is_called_so_with_what_would_have_been_seen():
    cal = whole()
    words = said(render(cal, measured=[Plain(checkup(cal, findings=[], healthy=True))]))
    assert (
        "Healthy Nothing above noise in 100 images. Would have been seen: drift of 0.1% of the loss." in words
    )
    words = said(render(cal, measured=[Plain(checkup(cal, findings=[], would_have_been_seen={}))]))
    assert "Not known 100 images in too few groups, or most of them in one, to say that it" in words
    few = checkup(cal, findings=[], would_have_been_seen={}, images=12)
    words = said(render(cal, measured=[Plain(few)]))
    assert "Not known Not enough images (12) to say that it is healthy: use 20 or more." in words
    assert "Healthy" not in words


def test_what_check_found_is_on_the_page_of_its_network_and_of_no_other(model, images, tmp_path, monkeypatch):
    """From the commands themselves; and in Python from what the doctor returns."""
    monkeypatch.chdir(tmp_path)
    common = ["--data", str(images), "--no-samples", "--quiet"]
    main(["check", str(model), *common, "-o", "check.json"])  # says that such a network was never trained
    assert main(["calibrate", str(model), *common, "--trust", "-o", "a.trueup.safetensors"]) == 0
    cal = trueup.load("a.trueup.safetensors")
    assert cal.provenance["name"] == model.name
    assert main(["report", "a.trueup.safetensors", "--with", "check.json", "-o", "r.html"]) == 0
    found = json.loads((tmp_path / "check.json").read_text())["diagnosis"]
    words = said((tmp_path / "r.html").read_text())
    assert found["findings"]
    assert all(one["sentence"][1:] in words and one["advice"][1:] in words for one in found["findings"])
    assert str(tmp_path) not in (tmp_path / "r.html").read_text()
    assert str(model.parent) not in (tmp_path / "r.html").read_text()
    again = trueup.doctor.check(str(model), trueup.Images(images, count=20), progress=False)
    assert again.findings[0].sentence[1:] in said(render(cal, measured=[again]))
    with pytest.raises(MismatchError, match="another network"):
        render(whole(), measured=[again])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "is something else: expected what trueup check, samplers, evaluate or likelihood"),
        ('{"rows": 1}', "is something else"),
        ("[" * 100_000, "is no JSON"),
        ('{"samplers": [], "trajectories": 1, "calibrated": true}', "another network"),
    ],
)
def test_other_files_are_refused_in_a_line(files, tmp_path, capsys, content, reason):
    path = tmp_path / "x.json"
    path.write_text(content)
    assert main(["report", str(files[0]), "--with", str(path), "-o", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("kind", [comparison, samplers, likelihood])
def test_measurements_of_others_are_refused(kind):
    cal, other = whole(), whole(seed=1)
    other.provenance["weights"] = {"float32": "cd" * 16}
    with pytest.raises(MismatchError, match="another network"):
        render(cal, measured=[Plain(kind(other))])
    other.provenance["weights"] = cal.provenance["weights"]
    with pytest.raises(MismatchError, match="another calibration"):
        render(cal, measured=[Plain(kind(other))])
    with pytest.raises(DataError, match="a dict is no measurement"):
        render(cal, measured=[kind(cal)])


def test_a_diagnosis_is_of_a_network_whatever_calibration_it_has():
    cal, other = whole(), whole(seed=1)
    assert cal.identity != other.identity
    assert "Brightness or colour drifts" in said(render(cal, measured=[Plain(checkup(other))]))
    other.provenance["weights"] = {"float32": "cd" * 16}
    with pytest.raises(MismatchError, match="another network"):
        render(cal, measured=[Plain(checkup(other))])


@pytest.mark.parametrize("kind", [comparison, samplers, likelihood, checkup])
def test_changed_measurements_are_refused_or_shown(kind):
    """Whatever stands where a number, a name or a list belongs."""
    cal = whole()
    strange = (None, True, -1, 1e400, "x", "nan", [], {}, [[]], {"value": "1"}, [{}], 10**400)

    def places(value):
        keys = (
            list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        )
        for key in keys:
            yield value, key
            yield from places(value[key])

    shown = 0
    for k in range(len(list(places(kind(cal))))):
        for other in strange:
            values = json.loads(json.dumps(kind(cal)))
            container, key = list(places(values))[k]
            container[key] = other
            refused = ""
            try:
                found = page.Measured.of([Plain(values)], cal)
            except (DataError, MismatchError) as error:
                refused = str(error)
            assert refused.isprintable()
            assert len(refused) < 300
            if refused:
                continue
            shown += 1
            json.dumps(found.as_json(), allow_nan=False)
    assert shown > 10


def test_the_command_writes_the_page(files, tmp_path, capsys):
    out = tmp_path / "report.html"
    arguments = ["report", str(files[0]), "--with", *map(str, files[1]), "-o", str(out)]
    assert main(arguments) == 0
    assert out.read_text() == render(files[0], measured=files[1])
    assert f"wrote {out}" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "pass --force" in capsys.readouterr().err
    assert main([*arguments, "--force", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["report", str(files[0]), "--with", "no.json", "-o", str(tmp_path / "b.html")]) == 2
    assert "no.json does not exist" in capsys.readouterr().err
    (tmp_path / "bad").write_bytes(b"no calibration")
    assert main(["report", str(tmp_path / "bad"), "-o", str(tmp_path / "b.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_from_before_make_a_page(files):
    """Without the list, as files were before there was one."""

    def change(meta, tensors):
        del meta["drawn"]
        for name in [n for n in tensors if n.startswith(("drawn.", "expected"))]:
            del tensors[name]

    old = resign(files[0], change)
    assert trueup.load(old).drawn == ()
    assert "This file holds no samples" in said(render(old))


def test_samples_and_maps_are_kept(files):
    cal, kept = whole(), trueup.load(files[0])
    for one, other in zip(cal.drawn, kept.drawn, strict=True):
        assert (one.gains, one.fitted, one.nfe, one.samples, one.seed) == (
            other.gains,
            other.fitted,
            other.nfe,
            other.samples,
            other.seed,
        )
        assert torch.equal(one.pictures, other.pictures)
        assert torch.equal(one.variance.float(), other.variance.float())
    largest = cal.evidence.expected.abs().amax((1, 2, 3), keepdim=True)
    # Half a step of a byte a value.
    assert ((cal.evidence.expected - kept.evidence.expected).abs() <= largest / 254 * 1.001).all()
    assert kept.identity == cal.identity
    assert replace(cal, drawn=()).identity == cal.identity


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, t: m.update(drawn=[{}]), "how its samples 0 were drawn"),
        (lambda m, t: m.update(drawn={}), "list of drawn samples"),
        (lambda m, t: m["drawn"].extend([m["drawn"][0]] * 20), "list of drawn samples"),
        (lambda m, t: m["drawn"].pop(), "no tensor of such a file"),
        (lambda m, t: m["drawn"][0].update(gains="<b>"), "how its samples 0 were drawn"),
        (lambda m, t: m["drawn"][0].update(nfe=0), "nfe is 0"),
        (lambda m, t: t.update({"drawn.0.pictures": torch.zeros(17, 1, 4, 4, dtype=torch.uint8)}), "(17, 1"),
        (lambda m, t: t.update({"drawn.0.pictures": torch.zeros(1, 2, 4, 4, dtype=torch.uint8)}), "(1, 2"),
        (lambda m, t: t.update({"drawn.0.pictures": torch.zeros(1, 1, 99, 4, dtype=torch.uint8)}), "99"),
        (lambda m, t: t.update({"drawn.0.pictures": torch.zeros(1, 1, 4, 4)}), "torch.uint8"),
        (lambda m, t: t.pop("drawn.0.off"), "lacks drawn.0.off"),
        (lambda m, t: t.pop("expected_largest"), "lacks expected_largest"),
        (lambda m, t: t.update(expected=torch.zeros(5, 1, 65, 8, dtype=torch.int8)), "no maps"),
        (lambda m, t: t.update(expected=torch.zeros(5, 2, 6, 8, dtype=torch.int8)), "expected"),
    ],
)
def test_tampered_samples_are_refused(files, change, reason):
    with pytest.raises(ArtifactError, match=re.escape(reason)) as caught:
        trueup.load(resign(files[0], change))
    assert str(caught.value).isprintable()


def test_the_largest_tenth_of_pixels_stands_out():
    values = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0))
    shown = standing_out(values)[3] > 0
    assert int(shown.sum()) == 10
    size = values.abs().amax(0)
    assert size[shown].min() > size[~shown].max()
    assert not standing_out(torch.zeros(1, 4, 4)).any()


def test_maps_are_grey_at_zero_and_channels_stand_beside_each_other():
    made = around_zero(torch.tensor([[[-2.0, 0.0, 2.0]]]), 2.0, colour=False)
    assert made.flatten().tolist() == [0, 128, 255]
    sheet = tiles(torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1).expand(3, 2, 2))
    assert sheet.shape == (1, 4, 4)
    assert sheet[0, ::2, ::2].tolist() == [[0, 1], [2, 127]]


def test_a_picture_in_the_page_is_the_sample(files):
    kept = trueup.load(files[0])
    text = render(kept)
    grid = re.search(
        r'<div class="grid" role="img" aria-label="16 samples. Before.*?src="data:image/png;base64,(.*?)"',
        text,
    )
    image = Image.open(io.BytesIO(base64.b64decode(grid[1])))
    assert np.array_equal(np.asarray(image), kept.drawn[0].pictures[0, 0].numpy())


def test_the_correction_shown_is_what_attaching_takes_off_in_the_mean():
    """b + a E[eps_hat] + d E[u] of a Gaussian whose output is off by a gain and a map, in closed form."""
    one = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(1, 1, 4, 4)
    exact = trueup.analytic.GaussianMixture(one, std=0.5)
    denoiser = exact.denoiser(trueup.process.ContinuousVP(), distortion=lambda eps, u, lam: 0.2 * eps + 0.3)
    cal = trueup.calibrate(denoiser, exact.sample(400).float(), levels=[0.3, 0.5, 0.7], trust=True)
    bands = cal.correction.bands
    off = bands.idct(kept_map(cal).reshape(3, 1, 4, 4))
    # E[eps | x_t] has mean 0, so what is off in the mean is the map alone.
    assert torch.allclose(off, torch.full_like(off, 0.3), atol=0.1)
    assert torch.allclose(cal.evidence.expected.double(), torch.full_like(off, 0.3), atol=0.1)


def test_frequencies_are_in_cycles_a_pixel():
    found = frequencies(Bands((16, 16)))
    assert found[0] == 0
    assert found == sorted(found)
    assert found[-1] <= math.sqrt(0.5)
    # The highest frequency of an axis is half a cycle a pixel.
    assert frequencies(Bands((2,)))[-1] == 0.25


def colours(scheme):
    style = (page._HERE / "page.css").read_text()
    first, dark = re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", first))
    return found | (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", dark)) if scheme == "dark" else {})


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    found = colours(scheme)
    for ground in ("paper", "wash"):
        for text in ("ink", "quiet", "accent", "line"):
            light, dark = sorted((luminance(found[ground]), luminance(found[text])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ground, text)


def test_write_replaces_the_file_whole(tmp_path):
    write(whole(), tmp_path / "a.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html"]
    assert (tmp_path / "a.html").read_text().endswith("</html>\n")


def test_pictures_of_large_samples_are_small():
    x = torch.arange(256.0).reshape(1, 1, 1, 256).expand(1, 1, 128, 256)
    assert small(x).shape == (1, 1, 32, 64)
    assert torch.allclose(small(x)[0, 0, 0, :2], torch.tensor([1.5, 5.5]))  # means of four
    assert small(x[..., :64, :64]).shape == (1, 1, 64, 64)
