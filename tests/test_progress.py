"""Progress: a bar in a terminal, a line every half minute in a log, silence where it was asked for."""

import io
import sys

import pytest

from trueup import progress
from trueup.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_half_minute(clock, capsys):
    with Progress(600, "measuring") as bar:
        for _ in range(60):  # one evaluation a second
            clock[0] += 1
            bar.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 30 of 600 evals (5%), 1 eval/s, 9:30 left",
        "measuring: 60 of 600 evals (10%), 1 eval/s, 9:00 left",
    ]


def test_slow_work_says_each_step_and_quick_work_nothing(clock, capsys):
    with Progress(3, "sampling", unit="image") as bar:
        for _ in range(3):
            clock[0] += 3000
            bar.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "sampling: 1 of 3 images (33%), 0.000333 image/s, 1:40:00 left",
        "sampling: 2 of 3 images (67%), 0.000333 image/s, 50:00 left",
        "sampling: 3 of 3 images (100%), 0.000333 image/s, 0:00 left",
    ]
    with Progress(3, "sampling") as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_what_was_done_before_counts_but_not_as_speed(clock, capsys):
    with Progress(100, "measuring", done=50) as bar:
        clock[0] += 40
        bar.update(10)
    assert capsys.readouterr().err == "measuring: 60 of 100 evals (60%), 0.25 eval/s, 2:40 left\n"


@pytest.mark.parametrize("total", [None, 0])
def test_work_of_unknown_size_has_no_end_in_sight(clock, capsys, total):
    with Progress(total, "reading", unit="image") as bar:
        clock[0] += 40
        bar.update(20)
    assert capsys.readouterr().err == "reading: 20 images, 0.5 image/s\n"


def test_nothing_done_in_a_long_time_is_no_error(clock, capsys):
    with Progress(10, "measuring") as bar:
        clock[0] += 40
        bar.update(0)
    assert capsys.readouterr().err == "measuring: 0 of 10 evals (0%), 0 eval/s\n"


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(10, "measuring", unit="eval", done=2) as bar:
        bar.update(3.04)
        assert bar.bar.n == pytest.approx(5)
        bar.update(5)
        assert bar.bar.n == pytest.approx(10)  # a tenth is as fine as it shows
    assert "measuring: " in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_a_bar_can_be_had_without_a_terminal_and_silence_with_one(clock, capsys, monkeypatch):
    with Progress(10, "measuring", show=True) as bar:
        bar.update(10)
    assert "10/10" in capsys.readouterr().err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(10, "measuring", show=False) as bar:
        clock[0] += 100
        bar.update(10)
    assert terminal.getvalue() == ""


def test_a_bar_is_closed_when_the_work_fails(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = Progress(10, "measuring")
    with pytest.raises(KeyError), shown:
        raise KeyError
    assert shown.bar.disable  # as tqdm marks a closed one
