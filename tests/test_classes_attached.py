"""Class corrections on a network and in a file: every row that of its label, or one clear line."""

import json
import math

import pytest
import torch
from torch import nn

import trueup
from trueup.calibration import Correction, Innovation, OfClass
from trueup.calibration.hook import CorrectOutput
from trueup.denoiser import Binding
from trueup.denoiser.binding import Place
from trueup.errors import ArtifactError, AttachError, MismatchError
from trueup.process import DiscreteVP
from trueup.sampling.network import Network
from trueup.statistics import Number

from calibrations import by_definition, emptied, make
from forged import refused, resign

SHAPE = (2, 6, 8)
LEVELS = [20, 300, 700, 980]
LINEAR = DiscreteVP.linear()
LABELLED = Binding(Place(0, "x"), Place(1, "t"), Place(2, "y"))
NULL = 10
OWN = (3, 7, NULL)  # labels with a correction of their own


class Labelled(nn.Module):
    """Depends on every pixel, the time and the label; may learn a variance."""

    def __init__(self, channels=2):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.embed = nn.Conv2d(2, channels, 3, padding=1), nn.Embedding(11, channels)

    def forward(self, x, t, y=None):
        t = torch.as_tensor(t, dtype=x.dtype).reshape(-1, 1, 1, 1)
        y = torch.tensor(NULL) if y is None else y
        y = y @ torch.ones(y.shape[1], 2) if y.is_floating_point() else self.embed(y.reshape(-1).long())
        return self.conv(x) * (1 + t / 1000) + y[..., None, None]


def by_class(network=None, family="spectral", binding=LABELLED, labels=OWN, **settings):
    """A calibration with corrections of its own for OWN, none for label 5, all of random numbers."""
    how = {"keep": (0, 1, 2), "gain": 0.1, "family": family, "binding": binding, "network": network}
    cal = make(SHAPE, LINEAR, LEVELS, **{**how, **settings})
    own = [make(SHAPE, LINEAR, LEVELS, seed=label + 1, **how).correction for label in labels]
    gain = Number(0.5, 0.1, 0.3, 0.7)
    cal.classes = (
        *(OfClass(label, 40, gain, made) for label, made in zip(labels, own, strict=True)),
        OfClass(5, 2, Number(math.nan)),
    )
    cal.provenance["null_label"] = NULL
    return cal


def as_defined(cal, output, x_t, t, y):
    """Row by row, each with the correction of its label."""
    t, rows = torch.as_tensor(t).reshape(-1).expand(len(x_t)), []
    for i, label in enumerate(y.reshape(-1).tolist()):
        alone = make(SHAPE, LINEAR, LEVELS)
        alone.correction, alone.gains = cal.for_class(label), cal.gains
        rows.append(by_definition(alone, output[i : i + 1], x_t[i : i + 1], t[i : i + 1]))
    return torch.cat(rows)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got, expected, relative=1e-5):
    got, expected = got.detach().double(), expected.detach().double()
    return torch.allclose(got, expected, rtol=0, atol=relative * float(expected.abs().max()))


MIXED = torch.tensor([3, 0, 7, NULL, 5, 3, 9])  # with and without a correction of their own, and unheard of
TIMES = torch.tensor([300, 20, 980, 700, 300, 980, 20])


# Attached


@torch.inference_mode()
@pytest.mark.parametrize("family", ["shift", "spectral"])
@pytest.mark.parametrize("t", [300, torch.tensor(300), torch.tensor([300]), TIMES], ids=str)
def test_every_row_gets_the_correction_of_its_label(family, t):
    net = Labelled()
    cal, x_t = by_class(net, family), randn(7, *SHAPE)
    before = net(x_t, t, MIXED)
    with trueup.attach(net, cal):
        after = net(x_t, t, MIXED)
        named = net(x=x_t, t=t, y=MIXED)
    expected = as_defined(cal, before, x_t, t, MIXED)
    assert close(after, expected)
    assert torch.equal(after, named)
    assert torch.equal(net(x_t, t, MIXED), before)
    assert not close(as_defined(cal, before, x_t, t, MIXED.flip(0)), expected, 0.1)  # labels are told apart


@torch.inference_mode()
@pytest.mark.parametrize("form", ["least-squares", "sqrt", "response"])
def test_a_label_is_corrected_in_the_form_that_is_asked_for(form):
    net = Labelled()
    cal, x_t = by_class(net), randn(7, *SHAPE)
    before = net(x_t, TIMES, MIXED)
    with trueup.attach(net, cal, gains=form):
        after = net(x_t, TIMES, MIXED)
    cal.gains = form
    assert close(after, as_defined(cal, before, x_t, TIMES, MIXED))
    with trueup.attach(net, cal, gains="none"):
        assert torch.equal(net(x_t, TIMES, MIXED), before)


@torch.inference_mode()
@pytest.mark.parametrize(
    "y", [MIXED.int(), MIXED[:, None], MIXED.to(torch.uint8), torch.tensor([7]), torch.tensor(7)], ids=str
)
def test_labels_come_in_any_whole_form(y):
    net = Labelled()
    cal, x_t = by_class(net), randn(7, *SHAPE)
    before = net(x_t, TIMES, y)
    with trueup.attach(net, cal):
        after = net(x_t, TIMES, y)
    assert close(after, as_defined(cal, before, x_t, TIMES, y.reshape(-1).expand(7)))


@torch.inference_mode()
def test_labels_far_apart_and_negative_are_found():
    cal = by_class(labels=(-5, 2**40, 3))
    y, x_t = torch.tensor([2**40, -5, -4, 3, 2**61, -(2**61), 0]), randn(7, *SHAPE)
    output = randn(7, *SHAPE, seed=1)
    assert close(CorrectOutput(cal).correct(output, x_t, TIMES, y), as_defined(cal, output, x_t, TIMES, y))


@torch.inference_mode()
@pytest.mark.parametrize("through", ["module", "Denoiser"])
def test_guidance_guides_corrected_halves(through):
    net = Labelled()
    # The Denoiser corrects where the network's own call does not show the labels.
    hidden = through == "Denoiser"
    call = (lambda x, t, y: 2 * net(x, t, y) - x) if hidden else None
    denoiser = trueup.Denoiser(net, LINEAR, "noise", SHAPE, call=call, conditional=True, null_label=NULL)
    assert (denoiser.binding(MIXED) is None) == hidden
    cal = by_class(net, binding=None if hidden else LABELLED)
    x_t, none = randn(7, *SHAPE), torch.full_like(MIXED, NULL)
    before = {label: denoiser.predict(x_t, TIMES, y) for label, y in (("y", MIXED), ("none", none))}
    guided = Network(denoiser, guidance=3.0, y=MIXED)
    with trueup.attach(denoiser, cal):
        after = guided(x_t, TIMES)
    conditional = as_defined(cal, before["y"], x_t, TIMES, MIXED)
    unconditional = as_defined(cal, before["none"], x_t, TIMES, none)
    assert close(after, unconditional + 3.0 * (conditional - unconditional))


@torch.inference_mode()
def test_a_batch_that_a_pipeline_doubles_is_corrected_row_by_row():
    net = Labelled()
    cal, x_t = by_class(net), randn(3, *SHAPE)
    y = torch.tensor([3, 5, 7, NULL, NULL, NULL])
    with trueup.attach(net, cal):
        both = net(torch.cat([x_t, x_t]), 300, y)
        halves = [net(x_t, 300, part) for part in y.chunk(2)]
        assert close(net(x_t, 300), halves[1])  # without labels it is the null label's
    assert close(both, torch.cat(halves), 1e-6)


@torch.inference_mode()
def test_a_call_that_hides_labels_is_corrected_around_it():
    net = Labelled()
    cal = by_class(net, binding=Binding(Place(0, "x"), Place(1, "t")))
    with pytest.raises(MismatchError, match="attach to that Denoiser"):
        trueup.attach(net, cal)
    denoiser = trueup.Denoiser(
        net, LINEAR, "noise", SHAPE, call=lambda x, t, y: net(x, t, y), conditional=True
    )
    x_t = randn(7, *SHAPE)
    before = denoiser.predict(x_t, TIMES, MIXED)
    with trueup.attach(denoiser, cal):
        assert close(denoiser.predict(x_t, TIMES, MIXED), as_defined(cal, before, x_t, TIMES, MIXED))


@torch.inference_mode()
def test_a_learned_variance_is_left_alone():
    net = Labelled(channels=4)
    cal, x_t = by_class(net), randn(7, *SHAPE)
    before = net(x_t, TIMES, MIXED)
    with trueup.attach(net, cal):
        after = net(x_t, TIMES, MIXED)
    assert torch.equal(after[:, 2:], before[:, 2:])
    assert close(after[:, :2], as_defined(cal, before[:, :2], x_t, TIMES, MIXED))


@torch.inference_mode()
@pytest.mark.parametrize("t", [torch.tensor(300), TIMES], ids=["one time", "a time a row"])
def test_compiled_networks_pick_by_label(t):
    torch.compiler.reset()
    net = Labelled()
    cal, x_t = by_class(net), randn(7, *SHAPE)
    with trueup.attach(net, cal):
        after = net(x_t, t, MIXED)
        fast = torch.compile(net, backend="eager", fullgraph=True)
        assert close(fast(x_t, t, MIXED), after, 1e-6)
        assert close(fast(x_t, t, MIXED.flip(0)), net(x_t, t, MIXED.flip(0)), 1e-6)
    torch.compiler.reset()


def test_labels_that_are_missing_or_none_are_named():
    net = Labelled()
    cal, x_t = by_class(net), randn(7, *SHAPE)
    said = r"by class, and the network got \(7, 3\) for its labels"
    with trueup.attach(net, cal), pytest.raises(AttachError, match=said):
        net(x_t, TIMES, torch.rand(7, 3))
    output = randn(7, *SHAPE, seed=1)
    hook = CorrectOutput(cal)
    with pytest.raises(AttachError, match=r"got \(3,\) for its labels"):
        hook.correct(output, x_t, TIMES, MIXED[:3])
    del cal.provenance["null_label"]
    with pytest.raises(AttachError, match="the network was called without labels"):
        CorrectOutput(cal).correct(output, x_t, TIMES)


def test_classes_that_correct_nothing_leave_everything():
    cal = by_class()
    emptied(cal)
    for of in cal.classes[:-1]:
        for part in (of.correction.b, of.correction.a, of.correction.d):
            part.zero_()
    output = randn(7, *SHAPE)
    assert CorrectOutput(cal).empty
    assert CorrectOutput(cal).correct(output, output, TIMES, MIXED) is output


def test_a_class_without_a_correction_may_be_one_that_needs_none():
    """Its own correction may be nothing, where that of all classes is something: that is what it gets."""
    cal = by_class()
    for part in (cal.classes[0].correction.b, cal.classes[0].correction.a, cal.classes[0].correction.d):
        part.zero_()
    output, x_t = randn(7, *SHAPE, seed=1), randn(7, *SHAPE)
    after = CorrectOutput(cal).correct(output, x_t, TIMES, MIXED)
    assert torch.allclose(after[[0, 5]], output[[0, 5]], atol=1e-6)
    assert not torch.allclose(after[1], output[1], atol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("t", [torch.tensor(300), TIMES], ids=["one time", "a time a row"])
def test_the_kernel_picks_by_label(fused, monkeypatch, t):
    """The hook hands the kernel the rows of each label's tables."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cal = by_class()
    x_t, output = randn(2, 7, *SHAPE).to(device)
    hook = CorrectOutput(cal)
    tables, used = hook._tables(device, torch.float32, SHAPE[1:])._replace(fused=fused), []
    correct = fused.correct
    monkeypatch.setattr(fused, "correct", lambda *args: used.append(1) or correct(*args))
    hook._ready[device, torch.float32, SHAPE[1:]] = tables
    got = hook.correct(output, x_t, t, MIXED.to(device)).cpu()
    assert used
    assert close(got, as_defined(cal, output.cpu(), x_t.cpu(), t, MIXED), 2e-5)


# In a file


@pytest.fixture
def path(tmp_path):
    by_class().save(tmp_path / "good.trueup.safetensors")
    return tmp_path / "good.trueup.safetensors"


def test_round_trip(path):
    saved, loaded = by_class(), trueup.load(path)
    assert [(of.label, of.images) for of in loaded.classes] == [(3, 40), (7, 40), (NULL, 40), (5, 2)]
    assert loaded.classes[-1].correction is None
    assert math.isnan(loaded.classes[-1].gain.value)
    for mine, theirs in zip(saved.classes[:-1], loaded.classes[:-1], strict=True):
        assert str(mine.gain) == str(theirs.gain)
        one, two = mine.correction, theirs.correction
        pairs = [(getattr(one, n), getattr(two, n)) for n in ("b", "a", "d", "support")]
        pairs += [
            (getattr(one.innovation, n), getattr(two.innovation, n)) for n in ("rho", "mean", "support")
        ]
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs)  # kept in single precision
        assert torch.equal(one.lam, two.lam)
    assert loaded.identity == saved.identity
    again = path.with_name("again")
    loaded.save(again)
    assert trueup.load(again).identity == saved.identity
    assert again.read_bytes() == path.read_bytes()


def test_the_identity_knows_what_a_class_does_and_not_what_was_said_of_it():
    cal, same = by_class(), by_class()
    assert cal.identity == same.identity
    same.classes[-1].__dict__["images"] = 3
    assert cal.identity == same.identity
    for change in (
        lambda made: made.classes[1].correction.b.mul_(1.001),
        lambda made: made.classes[1].correction.innovation.rho.add_(0.1),
        lambda made: made.classes[0].__dict__.update(label=4),
        lambda made: made.provenance.update(null_label=4),
        lambda made: setattr(made, "classes", made.classes[1:]),
    ):
        other = by_class()
        change(other)
        assert other.identity != cal.identity


def without(name):
    return lambda meta, tensors: tensors.pop(name)


def entry(**values):
    return lambda meta, tensors: meta["classes"][1].update(values)


TAMPERED = {
    "a class twice": (entry(label=3), "lists a class twice"),
    "a label in words": (entry(label="cat"), "label is cat"),
    "half a label": (entry(label=2.5), "label is 2.5"),
    "true": (entry(label=True), "label is True"),
    "a huge label": (entry(label=10**30), "label is 1000000"),
    "negative images": (entry(images=-1), "images is -1"),
    "a gain of nothing": (entry(gain=[]), "gain is no list of 4"),
    "an error below 0": (entry(gain=[1, -1, 0, 1]), "gain has an impossible error"),
    "bands unheard of": (entry(kept_bands=[99]), "bands"),
    "a null label in words": (
        lambda meta, tensors: meta["provenance"].update(null_label="none"),
        "null_label is none",
    ),
    "classes that are no list": (lambda meta, tensors: meta.update(classes={}), "classes is '{}'"),
    "a class that is none": (
        lambda meta, tensors: meta["classes"].append(7),
        "list of classes makes no sense",
    ),
    "no list": (lambda meta, tensors: meta.pop("classes"), "it lacks classes"),
    "an unlisted class": (
        lambda meta, tensors: tensors.update({"class.9.b": torch.zeros(1)}),
        "its classes are not those it lists",
    ),
    "tensors of no class": (
        lambda meta, tensors: tensors.update({"class.b": torch.zeros(1)}),
        "its classes are not those it lists",
    ),
    "a tensor unheard of": (
        lambda meta, tensors: tensors.update({"class.0.c": torch.zeros(1)}),
        "'c' is no tensor of such a file",
    ),
    "half a class": (without("class.0.a"), "it lacks a"),
    "no innovation": (without("class.0.rho"), "it lacks rho"),
    "another shape": (
        lambda meta, tensors: tensors.update({"class.1.d": tensors["class.1.d"][:-1]}),
        "d is torch.float32",
    ),
    "another size": (lambda meta, tensors: tensors["class.1.a"].mul_(1e6), "a holds values out of range"),
    "another correction": (
        lambda meta, tensors: tensors["class.1.a"].mul_(0.5),
        "not the one that was saved",
    ),
    "labels exchanged": (
        lambda meta, tensors: [meta["classes"][i].update(label=label) for i, label in enumerate((7, 3))],
        "not the one that was saved",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_file_that_was_tampered_with_is_refused_in_a_line(path, name):
    change, reason = TAMPERED[name]
    refused(resign(path, change), reason)


def test_what_could_not_be_read_is_not_written(tmp_path):
    cal = by_class(labels=(3, 2**63))
    with pytest.raises(ArtifactError, match="cannot save this calibration"):
        cal.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_files_stay_json(path):
    """Labels of numpy or torch would not be."""
    assert json.dumps([of.label for of in trueup.load(path).classes]) == "[3, 7, 10, 5]"


def test_composed_corrections_are_kept_whole(tmp_path):
    """b, a and d of a class are of the bare network: nothing of all classes' is added to them again."""
    cal = by_class()
    own = cal.classes[0].correction
    lam, bands = own.lam, own.bands
    whole = cal.correction.then(own)
    assert isinstance(whole, Correction)
    whole.innovation = Innovation(own.innovation.rho, own.innovation.mean)
    cal.classes = (OfClass(3, 40, Number(1.0), whole),)
    cal.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a").for_class(3)
    eps_hat, u = randn(2, len(lam), *SHAPE).double()
    assert close(
        loaded.apply(eps_hat, u, lam), own.apply(cal.correction.apply(eps_hat, u, lam), u, lam), 1e-5
    )
    assert loaded.bands.edges == bands.edges
