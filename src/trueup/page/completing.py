"""What could still be measured, in one place: commands, and the page with all of it."""

from __future__ import annotations

from trueup.calibration import Calibration
from trueup.page.markup import Html, command, section
from trueup.page.measured import Measured
from trueup.page.origin import FILE, in_commands


def completing(calibration: Calibration, measured: Measured) -> Html | None:
    """The commands that make what this page lacks, and the page again; nothing, if it has everything."""
    (model, images), corrected = in_commands(calibration), f"--calibration {FILE}"
    ways = [
        (measured.diagnoses, f"trueup check {model} --data {images} -o check.json"),
        (measured.samplers, f"trueup samplers {model} {corrected} -o samplers.json"),
        (measured.comparisons, f"trueup evaluate {model} {corrected} --data {images} -o evaluate.json"),
        (measured.likelihoods, f"trueup likelihood {model} {corrected} --data {images} -o likelihood.json"),
    ]
    lacking = [how for found, how in ways if not found]
    if not lacking:
        return None
    files = " ".join(how.split()[-1] for _, how in ways)
    again = f"trueup report {FILE} --with {files} -o report.html --force"
    lead = "With the names of your model, images and files in their places; leave out what you do not want."
    return section("more", "To complete this page", lead, command(*lacking, again))
