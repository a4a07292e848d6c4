"""What samples say of a calibration: the judge, and the words, numbers and file they end up in."""

import math
from dataclasses import replace

import pytest
import torch

import trueup
from trueup.analytic import GaussianMixture
from trueup.bands import Bands, band_variance
from trueup.calibration.evidence import SampleEvidence
from trueup.errors import DataError, TrueupError
from trueup.fitting import gains, judge
from trueup.fitting.calibrating import labels_of
from trueup.fitting.gains import MATERIAL, choose
from trueup.fitting.moments import FOLDS, Miss, Moments
from trueup.images import Images
from trueup.process import ContinuousVP, DiscreteVP
from trueup.report import as_json, as_text
from trueup.statistics import Number

from calibrations import fitted_solver, make
from measuring import calibrate

SHAPE = (1, 4, 4)
VP = ContinuousVP()


def told(before=0.2, after=0.05, reach=0.02, form="sqrt", **more):
    """What `judge` writes: a miss of every form with its interval, and the change."""
    miss = {"none": [before, before - 0.01, before + 0.01], form: [after, after - 0.01, after + 0.01]}
    change = after - before
    return {
        "miss": {**miss, "change": [change, change - reach, change + reach]},
        "trajectories": 64,
        "evaluations": 25,
        **more,
    }


def judged(samples, bound=0.5, **changes):
    """A calibration whose likelihood gain is sure, with what samples said."""
    cal = make(SHAPE, VP, **changes)
    loss = torch.full_like(cal.t, 10.0)
    cal.evidence.loss = Number.of(loss, 0.1 * loss, 16)
    cal.evidence.gain = Number.of(0.3 * loss, 0.01 * loss, 16)
    cal.evidence.bound_gain = Number.of(bound, 0.1, 16)
    cal.provenance["samples"] = samples
    return cal


@pytest.mark.parametrize("size", [1e-3, 2e-3])
def test_grain_that_nobody_sees_in_what_never_changes_is_no_miss(size):
    """A channel that is the same in all images, and a quarter of a grey level of noise or less on it."""
    bands, generator = Bands((8, 8)), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 400, 2, 8, 8, generator=generator, dtype=torch.float64) * 0.5
    x[:, 1], y[:, 1] = 0.3, 0.3 + size * y[:, 1] / 0.5
    z = bands.dct(x).flatten(2)
    variance = band_variance(bands, z, bands.sum(z.square()), torch.ones(400).double())[0].clamp_min(1e-8)
    miss = Moments(bands, z.mean(0), variance, 400).miss(y).number
    assert miss.high < 0.05  # what is material; 23 and 96 nats before
    y[:, 1] += 0.1  # and what anybody sees is
    assert Moments(bands, z.mean(0), variance, 400).miss(y).number.low > 0.05


def test_levels_that_surely_miss_and_are_left_alone_are_said_to_be():
    cal = judged(told())
    sure, none = Number.of(0.16 + 0 * cal.t, 0.01 + 0 * cal.t, 16), Number.of(0 * cal.t, 0 * cal.t, 16)
    said = "miss something for sure, of which held-out images confirm no correction: more images may"
    cal.evidence.eta2 = sure
    assert said not in cal.summary()
    cal.evidence.gain = none
    assert f"{len(cal.t)} levels {said}" in cal.summary()
    assert said not in replace(cal, family="none").summary()  # nothing was asked for
    cal.evidence.eta2 = none
    assert said not in cal.summary()


def test_samples_that_surely_get_closer():
    cal = judged(told())
    assert cal.verdict().startswith("miscalibrated: correcting it lowers the denoising loss")
    said = "Samples get closer to the data: they miss its bands by 0.2 -> 0.05 nats a coefficient"
    assert cal.verdict().endswith(f"{said} (a change of -0.17 to -0.13).")
    assert "trueup evaluate" not in cal.verdict()
    lines = cal.summary().splitlines()
    first = "samples near the limit (64 samples, 25 evaluations each) miss the data's bands by, in nats a"
    row = next(i for i, line in enumerate(lines) if line.startswith(first))
    assert lines[row + 1] == (
        "  none 0.2 ± 0.01, sqrt 0.05 ± 0.01; drawn with: sqrt, a change of -0.15 (-0.17 to -0.13)"
    )
    assert lines[-1].startswith("verdict: ")
    assert lines[row + 1].replace("±", "+-") in as_text(cal, plain=True)


def test_a_miss_below_zero_is_none():
    assert "they miss its bands by 0.2 -> 0 nats" in judged(told(after=-0.001)).verdict()


def test_samples_that_may_have_been_lucky_come_with_advice():
    cal = judged(told(after=0.19))
    said = (
        "Samples do not surely get closer to the data: they miss its bands by 0.2 -> 0.19 nats a coefficient"
    )
    assert f"{said} (a change of -0.03 to +0.01). " in cal.verdict()
    assert cal.verdict().endswith("More images or more steps may help.")
    assert "--nfe" not in cal.verdict()  # it may have been given


def test_a_network_that_is_left_as_it_is_for_sampling_keeps_its_likelihood():
    samples = told(before=0.031, after=0.04)
    del samples["miss"]["change"]
    cal = judged(samples, gains="none")
    assert "raises the likelihood bound" in cal.verdict()
    assert "as close to the data (0.031 ± 0.01 nats a coefficient)" in cal.verdict()
    assert "nothing is attached for sampling, likelihoods keep the gain." in cal.verdict()
    assert "drawn with: none" in cal.summary()
    assert as_json(cal)["samples"]["change"] is None
    assert "although samples would be closer" in judged(told(), gains="none").verdict()  # somebody's choice


def test_the_judge_does_not_regret_its_own_choice():
    """sqrt stands, since response is closer by too little; and is no closer than nothing is."""
    found = {"none": miss(0.012), "sqrt": miss(0.013, 1), "response": miss(0.010, 2)}
    assert choose(found) == "none"
    samples = told(before=0.012, after=0.013)
    samples["miss"]["response"] = [0.010, 0.009, 0.011]
    del samples["miss"]["change"]
    said = judged(samples, gains="none").verdict()
    assert "as close to the data (0.012 ± 0.01 nats a coefficient)" in said
    assert "although" not in said


def test_without_samples_evaluate_says():
    cal = judged(None)
    assert cal.samples is None
    assert cal.verdict().endswith("Whether samples get better is for `trueup evaluate` to say.")
    assert "samples near the limit" not in cal.summary()
    assert as_json(cal)["samples"] is None
    least = judged(told(), gains="least-squares")  # a form that no samples were drawn with
    assert least.verdict().endswith("is for `trueup evaluate` to say.")


def test_another_form_than_the_one_chosen_has_no_interval():
    samples = told()
    samples["miss"]["response"] = [0.04, 0.03, 0.05]
    cal = judged(samples, gains="response")
    assert "0.2 -> 0.04 nats a coefficient." in cal.verdict()
    assert "do not surely" in cal.verdict()
    assert math.isnan(cal.samples.changed_by("response").low)
    assert cal.samples.changed_by("sqrt").low == pytest.approx(-0.17)
    assert cal.samples.changed_by("none") is None


@pytest.mark.parametrize(
    ("bound", "words"), [(0.01, "no sure gain"), (-1.0, "WORSE"), (0.5, "miscalibrated")]
)
def test_samples_are_part_of_every_verdict_that_does_not_warn(bound, words):
    verdict = judged(told(), bound).verdict()
    assert verdict.startswith(words)
    assert ("Samples get closer" in verdict) == (words != "WORSE")


def test_json_has_samples_and_solvers():
    cal = judged(told(), solvers=True)
    said = as_json(cal)
    assert said["samples"]["miss"]["sqrt"] == {"value": 0.05, "low": 0.05 - 0.01, "high": 0.05 + 0.01}
    assert said["samples"]["change"]["low"] == pytest.approx(-0.17)
    assert (said["samples"]["trajectories"], said["samples"]["evaluations"]) == (64, 25)
    (solver,) = said["solvers"]
    assert (solver["nfe"], solver["guidance"], solver["base"]) == (2, 1.5, "x0-3, even in log-SNR")
    assert solver["evidence"]["error"] == 0.08


def test_a_solver_s_line_has_its_miss_of_the_data():
    generator = torch.Generator().manual_seed(0)
    solver = fitted_solver(SHAPE, VP, torch.ones(make(SHAPE).correction.bands.count), generator, guidance=1.0)
    seen = {**solver.evidence, "miss_base": 0.3, "miss": 0.04, "limit_miss": 0.02}
    cal = judged(told(), solvers=True)
    cal.solvers = (replace(solver, evidence=seen),)
    line = next(line for line in cal.summary().splitlines() if line.startswith("solver for 2 evaluations: "))
    assert line.endswith(
        "; whitened error to the limit 0.21 -> 0.08; miss of the data's bands 0.3 -> 0.04 nats a coefficient "
        "(of the limit 0.02)"
    )
    assert "miss" not in solver.summary()
    how = {**solver.provenance, "fitted": "states brought to the data's moments"}
    restored = replace(solver, evidence={**seen, "miss": -0.001}, provenance=how).summary()
    assert ", even in log-SNR, states brought to the data's moments; " in restored
    assert "0.3 -> 0 nats" in restored


def test_what_samples_said_is_kept(tmp_path):
    cal = judged(told())
    cal.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert loaded.verdict() == cal.verdict()
    assert as_json(loaded)["samples"] == as_json(cal)["samples"]


def without(name):
    samples = told()
    del samples[name]
    return samples


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ("good", "samples is 'good', expected a dict"),
        (without("miss"), "it lacks miss"),
        (without("trajectories"), "trajectories is None"),
        (told(evaluations=2.5), "evaluations is 2.5"),
        (told(evaluations=0), "evaluations is 0"),
        (told(trajectories=True), "trajectories is True"),
        (told(miss={"sqrt": [0.1, 0.0, 0.2]}), "no form of a correction"),
        (told(miss={"none": [0.1, 0.0, 0.2], "mine": [0.1, 0.0, 0.2]}), "no form of a correction"),
        (told(miss={"none": [0.1, 0.0]}), "no list of 3 to 3 numbers"),
        (told(miss={"none": [0.1, 0.0, "much"]}), "miss of none holds much"),
        (told(miss={"none": [0.1, 0.0, 1e300]}), "miss of none holds 1e"),
        (told(miss={"none": [0.1, 0.2, 0.3]}), "interval that it is not in"),
        (told(miss={"none": [0.1, 0.0, 0.2], "change": None}), "miss of change is no list"),
    ],
)
def test_nonsense_about_samples_is_refused(tmp_path, samples, words):
    cal = make(SHAPE, VP)
    cal.provenance["samples"] = samples
    with pytest.raises(TrueupError, match=words) as caught:
        cal.save(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


# --- the judge


def miss(value, seed=0, spread=1e-4):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(FOLDS, generator=generator, dtype=torch.float64)
    return Miss(value + spread * (noise - noise.mean()))


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ({"none": 0.2, "sqrt": 0.1}, "sqrt"),
        ({"none": 0.2, "sqrt": 0.1, "response": 0.1 - 2 * MATERIAL}, "response"),
        ({"none": 0.2, "sqrt": 0.1, "response": 0.1 - 0.5 * MATERIAL}, "sqrt"),  # sure, and no matter
        ({"none": 0.05, "sqrt": 0.1, "response": 0.06}, "none"),
        ({"none": 0.2, "response": 0.1}, "response"),  # the other one diverged
        ({"none": 0.2}, "none"),
    ],
)
def test_the_closest_form_is_chosen_and_ties_go_to_what_is_derived(values, chosen):
    assert choose({form: miss(value, seed) for seed, (form, value) in enumerate(values.items())}) == chosen


def test_a_closer_form_must_be_so_surely():
    values = {"none": miss(0.5), "sqrt": miss(0.1, 1, spread=0.1), "response": miss(0.08, 2, spread=0.1)}
    assert choose(values) == "sqrt"


def test_samples_of_the_data_miss_nothing_and_others_what_the_equation_says():
    data = GaussianMixture(torch.zeros(1, 1, 4, 4, dtype=torch.float64), std=0.5)
    cal = make(SHAPE, VP, data_images=10_000)
    cal.data_mean, cal.data_variance = (0 * v for v in (cal.data_mean, cal.data_variance))
    cal.data_variance += 0.25
    moments = Moments.of(cal)
    right = moments.miss(data.sample(2000, 1)).number
    assert right.low < 0 < right.high
    assert right.high < 0.01
    wide = moments.miss(1.2 * data.sample(2000, 1)).number
    assert wide.value == pytest.approx(0.5 * (1.44 - 1 - math.log(1.44)), abs=0.005)  # 20,000 in a band
    shifted = moments.miss(data.sample(2000, 1) + 0.1).number  # a shift is the mean's coefficient alone
    bands = cal.correction.bands.count
    assert shifted.value == pytest.approx(0.5 * 0.1**2 * 16 / 0.25 / bands, rel=0.15, abs=0.005)
    few = torch.stack([moments.miss(data.sample(32, seed)).values.mean() for seed in range(40)])
    assert abs(float(few.mean())) < 3 * float(few.std()) / 40**0.5 + 2e-3  # the bias is taken out


@pytest.fixture(scope="module")
def broken():
    """A network whose answers are too large and off, and what it was measured on."""
    mixture = GaussianMixture(
        torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(3)).double(), 0.4
    )
    net = mixture.denoiser(VP, distortion=lambda eps, u, lam: 0.1 + 0.1 * u)
    return net, calibrate(net, mixture.sample(400, 1)), mixture


def test_samples_judge_a_correction_that_is_right(broken):
    net, cal, _ = broken
    found = judge(net, cal, trajectories=64, progress=False)
    assert found.gains in ("sqrt", "response")
    assert found.samples.change.high < 0
    assert found.samples.misses[found.gains].value < 0.2 * found.samples.misses["none"].value
    assert "Samples get closer to the data" in found.verdict()
    assert cal.samples is None  # the one given is as it was
    again = judge(net, cal, trajectories=64, progress=False)
    assert again.provenance == found.provenance


def test_samples_reject_a_correction_that_is_wrong(broken):
    net, cal, _ = broken
    wrong = replace(cal.correction, b=-3 * cal.correction.b, d=-3 * cal.correction.d)
    found = judge(net, replace(cal, correction=wrong), trajectories=32, progress=False)
    assert found.gains == "none"
    assert found.samples.change is None
    assert found.identity != replace(cal, correction=wrong).identity


def test_more_are_drawn_while_it_is_open_whether_samples_get_closer(broken):
    """Errors that turn forty times in a unit of u: a fit finds something, of which samples get no closer."""
    white = torch.fft.rfft2(torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    rows, columns = torch.fft.fftfreq(8)[:, None] * 8, torch.fft.rfftfreq(8) * 8
    means = torch.fft.irfft2(white / (1 + rows.square() + columns.square()), s=(8, 8))
    data = GaussianMixture((0.5 * means / means.std()).double(), 0.15)
    net = data.denoiser(VP, distortion=lambda eps, u, lam: 0.25 * torch.sin(40 * u + 3))
    cal = calibrate(net, data.sample(150, 5))
    assert not cal.empty
    found = [judge(net, cal, trajectories=64, seed=seed, progress=False) for seed in range(4)]
    many = judge(net, cal, trajectories=1000, seed=9, progress=False)
    assert {one.gains for one in found} == {many.gains}
    assert max(one.samples.trajectories for one in found) == 64 * gains.MOST
    # What is clear from the first is not asked again.
    net, cal, _ = broken
    assert judge(net, cal, trajectories=16, progress=False).samples.trajectories == 16


def test_nothing_is_judged_where_samples_have_nothing_to_say(broken, monkeypatch):
    net, cal, _ = broken
    empty = replace(cal, correction=cal.correction.with_gains("none"))
    generated = replace(cal, provenance={**cal.provenance, "generated": {"nfe": 3}})
    for one in (empty, generated):
        assert judge(net, one, progress=False) is one
    monkeypatch.setattr(gains, "INTERVALS", 2)  # as where a network knows few timesteps
    assert judge(net, cal, progress=False) is cal


def test_a_form_that_diverges_is_not_chosen(broken):
    net, cal, _ = broken
    wild = replace(cal.correction, d=torch.full_like(cal.correction.d, 90.0))
    found = judge(net, replace(cal, correction=wild), trajectories=16, progress=False)
    assert found.gains == "none"


class Stream(torch.utils.data.IterableDataset):
    """Pairs that come in one order alone."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)


def test_calibrate_judges_and_labels_are_the_data_s():
    net = trueup.Denoiser(Labelled(), DiscreteVP.linear(), "noise", SHAPE, conditional=True)
    x0, labels = torch.rand(60, *SHAPE) * 2 - 1, torch.arange(60) // 20  # sorted by class, as folders are
    found = labels_of(x0_pairs := Images(x0, labels=labels), net)
    assert sorted(found.tolist()) == labels.tolist()
    many = Images(
        x0.repeat(20, 1, 1, 1) + 1e-4 * torch.randn(1200, *SHAPE), labels=labels.repeat(20).sort()[0]
    )
    assert len(set(labels_of(replace(many, count=500), net).tolist())) == 3
    # And of all there are, or of a stream, however many: each class as often as it is in the data.
    stream = [(x, int(y)) for x, y in zip(many.source, many.labels, strict=True)]
    for data, most in ((many, 4 * gains.TRAJECTORIES), (Stream(stream), len(stream))):
        seen = labels_of(Images(data) if isinstance(data, Stream) else data, net)
        counts = torch.bincount(seen.as_subclass(torch.Tensor))
        assert len(seen) == most
        assert (counts - most / 3).abs().max() < 4 * (most * 2 / 9) ** 0.5  # of a binomial
    how = {"levels": [100, 500, 900], "trust": True, "progress": False}
    assert trueup.calibrate(net, x0_pairs, **how).evidence.images == 60
    stream = iter(list(zip(x0, labels.tolist(), strict=True)))
    with pytest.raises(DataError, match="read only once: pass a list or a dataset, or fit it afterwards"):
        trueup.calibrate(net, stream, nfe=4, **how)
    once = trueup.calibrate(net, stream, **how)  # nothing of it was read
    assert once.evidence.images == 60
    assert once.samples is None


class Labelled(torch.nn.Module):
    """A network that shifts by its label."""

    def __init__(self):
        super().__init__()
        self.size = torch.nn.Parameter(torch.tensor(0.9))

    def forward(self, x, t, y):
        return self.size * x + 0.1 * y.reshape(-1, 1, 1, 1)


def test_evidence_reads_what_the_judge_writes():
    seen = SampleEvidence.of({"samples": told()})
    assert seen.as_json()["miss"]["none"]["value"] == 0.2
    assert SampleEvidence.of({}) is None
