"""What is wrong with a network, in words: the kind of its miss, the likely cause, and what to do."""

from trueup.doctor.checkup import check
from trueup.doctor.finding import KINDS, Checkup, Finding

__all__ = ["KINDS", "Checkup", "Finding", "check"]
