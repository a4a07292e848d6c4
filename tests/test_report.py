"""The chart and the JSON say what the calibration says."""

import json
import math

import pytest
import torch

import trueup
from trueup.estimate import fit, measure
from trueup.report import as_json, as_text, chart


@pytest.fixture(scope="module")
def cal():
    """A network whose output is too large at low noise only."""

    def network(x_t, t):
        return torch.where(t.reshape(-1, 1, 1, 1) < 0.5, 3.0, 0.0) * x_t

    denoiser = trueup.Denoiser(network, trueup.process.ContinuousVP(), "noise", (1, 4, 4), data_range=None)
    return trueup.calibrate(denoiser, torch.randn(64, 1, 4, 4), levels=[0.1, 0.3, 0.6, 0.9], trust=True)


def columns(text):
    """How many rows of the chart are filled, per level."""
    lines = [line.split("|", 1)[1] for line in text.splitlines() if "|" in line]
    width = max(map(len, lines)) // 2
    return [sum(line[2 * k : 2 * k + 1].strip() != "" for line in lines) for k in range(width)]


def test_the_chart_is_as_high_as_the_share_of_loss_removed(cal):
    shares = (cal.evidence.gain.value / cal.evidence.loss.value).tolist()
    heights = columns(chart(cal, plain=True))
    assert len(heights) == 4
    assert max(heights) == 5
    for share, height in zip(shares, heights, strict=True):
        assert abs(height - 5 * max(0, share) / max(shares)) <= 1
    assert f"{100 * max(shares):.0f}%" in chart(cal)
    assert chart(cal).splitlines()[-1].split() == ["t=0.1", "t=0.9"]


def test_plain_is_ascii(cal):
    assert as_text(cal, plain=True).isascii()
    assert "█" in as_text(cal)
    assert cal.verdict() in as_text(cal)


def test_nothing_to_show(mixture):
    exact = mixture.denoiser(trueup.process.ContinuousVP())
    empty = trueup.calibrate(exact, mixture.sample(40), levels=[0.3, 0.6])
    assert empty.empty
    assert "no noise level" in chart(empty)


def test_json_has_no_number_that_is_none(cal):
    text = json.dumps(as_json(cal), allow_nan=False)  # NaN would raise
    said = json.loads(text)
    bits = said["bound_gain"]["bits_per_dim"]
    assert bits["low"] < bits["value"] < bits["high"]
    assert bits["value"] == pytest.approx(said["bound_gain"]["nats"]["value"] / (16 * math.log(2)))
    one = fit(measure(mixture_of_one(), torch.randn(1, 1, 4, 4), levels=[0.5]))
    assert as_json(one)["bound_gain"]["nats"]["value"] is None


def mixture_of_one():
    return trueup.Denoiser(
        lambda x_t, t: 0.5 * x_t, trueup.process.ContinuousVP(), "noise", (1, 4, 4), data_range=None
    )
