"""Progress of long work: a bar in a terminal, a line every half minute in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS = 30.0  # between two lines of a log
speaks = True  # whether this process, of those that share its work, shows anything (`trueup.distributed`)


class Progress:
    """`with Progress(total, "measuring") as bar: bar.update(8)`; total None: not known.

    show: False is silent; None shows a bar where standard error is a terminal (or a notebook), else lines.
    """

    def __init__(
        self,
        total: float | None,
        description: str,
        *,
        unit: str = "eval",
        done: float = 0,
        show: bool | None = None,
    ):
        self.total, self.description, self.unit = total, description, unit
        self.show = show if speaks else False
        self.first = self.done = done
        self.bar: Any = None

    def __enter__(self) -> Progress:
        notebook = "ipykernel" in sys.modules
        if self.show or (self.show is None and (sys.stderr.isatty() or notebook)):
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.total, initial=self.first, desc=self.description, unit=self.unit)
        self.started = self.said = time.monotonic()
        return self

    def update(self, more: float) -> None:
        """So much more is done."""
        self.done += more
        if self.bar is not None:
            self.bar.update(round(self.done, 1) - self.bar.n)
        elif self.show is None and time.monotonic() - self.said >= SECONDS:
            self.said = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def left(self, more: float) -> None:
        """So much is left, whatever was expected."""
        self.total = self.done + more
        if self.bar is not None:
            self.bar.total = round(self.total, 1)
            self.bar.refresh()

    def _line(self) -> str:
        elapsed = time.monotonic() - self.started
        rate = (self.done - self.first) / elapsed if elapsed > 0 else 0.0
        text, speed = f"{self.description}: {self.done:.0f}", f"{rate:.3g} {self.unit}/s"
        if not self.total:
            return f"{text} {self.unit}s, {speed}"
        left = f", {_clock((self.total - self.done) / rate)} left" if rate > 0 else ""
        return f"{text} of {self.total:.0f} {self.unit}s ({self.done / self.total:.0%}), {speed}{left}"

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _clock(seconds: float) -> str:
    """
    >>> _clock(3725)
    '1:02:05'
    """
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
