"""What the commands of the command line do: call the library, print what it says."""

from trueup.commands.calibrating import calibrate, check, demo, inspect, merge, report, samplers
from trueup.commands.measuring import likelihood
from trueup.commands.sampling import evaluate, sample

__all__ = ["calibrate", "check", "demo", "evaluate", "inspect", "likelihood", "merge"]
__all__ += ["report", "sample", "samplers"]
