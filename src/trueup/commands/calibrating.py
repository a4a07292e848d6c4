"""`trueup calibrate`, `merge`, `check`, `samplers`, `inspect`, `report` and `demo`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from trueup import distributed
from trueup.calibration import Calibration, load
from trueup.commands import shared
from trueup.commands.shared import given, say, show, warn
from trueup.demo import run as run_demo
from trueup.denoiser import Denoiser
from trueup.doctor import Checkup
from trueup.doctor import check as diagnose
from trueup.errors import Argument, TrueupError
from trueup.estimate import Moments, classes_of, fit, measure
from trueup.estimate import merge as merge_moments
from trueup.estimate.diagnose import Diagnosis, look, unless_trusted
from trueup.figure import check_figure, draw, draw_samplers
from trueup.fitting import fit_solver, judge, labels_of
from trueup.fitting import samplers as compare_samplers
from trueup.fitting.kept import clear
from trueup.images import open_images
from trueup.page import write as write_page
from trueup.report import as_json, as_text, plain_output
from trueup.sampling import generate
from trueup.sampling.draw import network_for


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    measured = options.data is not None or options.generated is not None
    if options.shard is None:
        _say_what_is_lost(options)
    denoiser = shared.open_model(options)
    options.run = run
    calibration, labels, kept = shared.open_calibration(options, denoiser), options.labels, ""
    if options.nfe is not None:  # or say now what is wrong; labels may be those of the data, not yet read
        network_for(denoiser, 0 if measured and denoiser.conditional else labels, options.guidance)
    moments, data = _measure(denoiser, options, run) if measured else (None, None)
    if options.shard is not None and moments is not None:
        return _write_share(moments, options)
    more: dict[str, Any] = {"output": str(output), "run": str(run)}
    if moments is not None:
        calibration = _fit(moments, options)
        of_data = labels_of(data, denoiser)
        if options.judged:
            calibration = judge(denoiser, calibration, labels=of_data, **given(options, "seed", "progress"))
        labels = of_data if labels is None else labels
        more["skipped"] = moments.skipped
        what = "images with a larger " + ("--images" if options.generated is None else "--generated")
        kept = f"; {run} keeps the measurements (delete it, or add {what})"
    if options.nfe is not None:
        how = given(options, "nfe", "trajectories", "guidance", "seed", "progress")
        how |= {"run": run / "solvers", "keep": True}
        calibration = fit_solver(denoiser, calibration, labels=labels, **how)
    assert calibration is not None
    if shared.first():
        calibration.save(output)
        if options.nfe is not None:
            clear(run / "solvers")
        if run.is_dir() and not any(run.iterdir()):
            run.rmdir()
    _report(calibration, options, more)
    say(options, f"wrote {output}{kept}")
    return 0


def _fit(moments: Moments, options: argparse.Namespace) -> Calibration:
    """The same on every rank."""
    return distributed.by_first(lambda: fit(moments, family=options.family, estimator=options.estimator))


def _write_share(moments: Moments, options: argparse.Namespace) -> int:
    """The moments of one share, for `trueup merge`."""
    moments.save(options.output)
    share, of = options.shard
    values: dict[str, Any] = {"output": str(options.output), "run": str(options.run), "shard": [share, of]}
    values |= {"images": moments.images, "skipped": moments.skipped}
    show(options, values, f"measured {moments.images:,} images, share {share} of {of}")
    kept = f"{options.run} keeps the measurements"
    say(options, f"wrote {options.output}, for trueup merge; {kept} (delete it when you are done)")
    return 0


def merge(options: argparse.Namespace) -> int:
    """`trueup merge`."""
    moments = merge_moments([Moments.load(path) for path in options.files], partial=options.partial)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    calibration.save(options.output)
    more = {"output": str(options.output), "files": [str(path) for path in options.files]}
    _report(calibration, options, {**more, "skipped": moments.skipped})
    say(options, "no samples were drawn to judge the correction: that takes the network")
    say(options, f"wrote {options.output}")
    return 0


def _say_what_is_lost(options: argparse.Namespace) -> None:
    """What a file that is to be replaced has, and the new one will not; and how to keep it."""
    try:
        old = load(options.output) if options.output.exists() else None
        kept = None if options.calibration is None else load(options.calibration)
    except TrueupError:
        return  # there is nothing in it to lose, or what is wrong is said elsewhere
    if old is None:
        return
    measured = options.data is not None or options.generated is not None
    keep, lost = f"--calibration {options.output} keeps", []
    if old.measured and not measured and not (kept is not None and kept.measured):
        lost.append(f"its correction ({keep} it)")
    elif old.classes and kept is None and not options.per_class:
        lost.append("its corrections by class (--per-class)")
    made = [(number, options.guidance) for number in options.nfe or ()]
    made += [(solver.nfe, solver.guidance) for solver in (() if kept is None else kept.solvers)]
    gone = [solver for solver in old.solvers if not any(solver.is_for(*of) for of in made)]
    if gone:
        again = (
            f"--nfe {','.join(str(solver.nfe) for solver in gone)} fits them again"
            if measured
            else f"{keep} them"
        )
        lost.append(f"its solvers for {', '.join(solver.purpose for solver in gone)} ({again})")
    if lost:
        say(options, f"{options.output} is replaced: the new one will not have {' and '.join(lost)}")


def samplers(options: argparse.Namespace) -> int:
    """`trueup samplers`."""
    if options.figure is not None:
        check_figure(options.figure)
    denoiser = shared.open_model(options)
    calibration = shared.open_calibration(options, denoiser)
    how = given(options, "nfe", "trajectories", "labels", "guidance", "seed", "progress")
    found = compare_samplers(denoiser, calibration, **how)
    if options.figure is not None:
        if shared.first():
            draw_samplers(found, options.figure)
        say(options, f"wrote {options.figure}")
    if shared.write_json(options, found.as_json()):
        say(options, f"wrote {options.output}")
    show(options, found.as_json(), f"verdict: {found.verdict()}" if options.quiet else found.table())
    return 0


def _measure(denoiser: Denoiser, options: argparse.Namespace, run: Path | None) -> tuple[Moments, Any]:
    """The network measured on data, or on its own samples; and those."""
    data: Any
    common = given(options, "seed", "progress")
    if run is not None and options.generated is not None:
        how = {"nfe": options.generate_nfe, "labels": options.labels, "folder": run / "generated"}
        data = generate(denoiser, options.generated, **how, **common)
        trust = True  # its own samples are what it was trained on, as far as it knows
    else:
        data = shared.images_of(options, denoiser)
        trust = run is None or options.trust  # `check` looks for itself
    classes = classes_of(data, denoiser) if options.per_class else ()
    if denoiser.vocabulary is not None and not open_images(data, denoiser).labelled:
        say(options, "these images have no captions: the network is told the empty prompt (--captions)")
    common |= {"trust": trust, "classes": classes, "per_embedding": options.per_embedding}
    moments = measure(denoiser, data, run=run, share=getattr(options, "shard", None), **common)
    for reason in moments.skipped[:5]:
        say(options, f"skipped: {reason}")
    if moments.skipped:
        say(options, f"{len(moments.skipped)} image{'s' * (len(moments.skipped) > 1)} skipped")
    if moments.duplicates:
        say(options, f"images that occurred before and count once: {moments.duplicates}")
    return moments, data


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    if options.figure is not None:
        check_figure(options.figure)
    denoiser = shared.open_model(options)
    use = Diagnosis(math.nan) if options.trust else _look_for_mistakes(denoiser, options)
    if use.problem is not None:
        return _say_misuse(denoiser, options, use, unless_trusted(use.problem).phrased(Argument.option))
    moments, data = _measure(denoiser, options, None)
    calibration = _fit(moments, options)
    if options.judged:
        labels = labels_of(data, denoiser)
        calibration = judge(denoiser, calibration, labels=labels, **given(options, "seed", "progress"))
    if options.figure is not None and shared.first():
        draw(calibration, options.figure)
    found = diagnose(denoiser, data, moments=moments, use=use, phrase=Argument.option)
    if found.findings and calibration.gains == "none" and not calibration.correction.empty:
        found.notes.append(
            "(samples are as close to the data without a correction: this helps likelihoods alone)"
        )
    low = calibration.uncalibration.low
    unknown = options.fail_above is not None and math.isnan(low)
    failed = options.fail_above is not None and low > options.fail_above
    more = {"problem": None, "failed": failed, "skipped": moments.skipped, "diagnosis": found.as_json()}
    written = shared.write_json(options, {**as_json(calibration), **more})
    _report(calibration, options, more, found)
    if written:
        say(options, f"wrote {options.output}")
    if unknown:
        warn("too few images to say whether it is miscalibrated: use more --images")
    elif failed:
        warn(f"miscalibrated by at least {low:.2g} bits/dim, above {options.fail_above:g}")
    return 2 if unknown else int(failed)


def _say_misuse(denoiser: Denoiser, options: argparse.Namespace, use: Diagnosis, problem: str) -> int:
    """Of a model that is not used as it was trained: whatever else could be measured would say nothing."""
    found = diagnose(
        denoiser, shared.images_of(options, denoiser), use=use, phrase=Argument.option, progress=False
    )
    values = {"problem": problem, "failed": False, "diagnosis": found.as_json()}
    verdict = "the model seems not to be used as it was trained: nothing was measured."
    if shared.write_json(options, {"verdict": verdict, **values}):
        say(options, f"wrote {options.output}")
    show(options, {"verdict": verdict, **values}, f"verdict: {verdict}{_diagnosed(found, options)}")
    warn(problem)
    return 2


def _diagnosed(found: Checkup, options: argparse.Namespace) -> str:
    """What the doctor found, below the verdict."""
    if options.quiet:
        return f"\ndiagnosis: {found.lines()[0]}"
    lines = "\n".join(f"  {line}" for line in found.lines())
    return f"\n\ndiagnosis (shares of the loss are averages over noise levels):\n{lines}"


def _look_for_mistakes(denoiser: Denoiser, options: argparse.Namespace) -> Diagnosis:
    """Whether the model is used wrongly."""
    say(options, "looking for the usual mistakes")
    found = look(denoiser, open_images(shared.images_of(options, denoiser), denoiser))
    for hint in found.hints:
        say(options, f"note: {hint}")
    return found


def inspect(options: argparse.Namespace) -> int:
    """`trueup inspect`."""
    calibration = load(options.file)
    if options.figure is not None:
        draw(calibration, options.figure)
        say(options, f"wrote {options.figure}")
    _report(calibration, options, {"file": str(options.file)})
    return 0


def report(options: argparse.Namespace) -> int:
    """`trueup report`."""
    write_page(options.file, options.output, measured=options.measured)
    say(options, f"wrote {options.output}: open it in a browser")
    return 0


def demo(options: argparse.Namespace) -> int:
    """`trueup demo`."""
    options.run = options.out / f"seed-{options.seed}.run"
    device = shared.find_device(options.device)
    run_demo(options.out, options.run, device=device, **given(options, "seed", "progress"))
    return 0


def _report(
    calibration: Calibration, options: argparse.Namespace, more: dict[str, Any], found: Checkup | None = None
) -> None:
    """The table, the chart, the verdict and the diagnosis there may be; or JSON."""
    if options.quiet:
        text = f"verdict: {calibration.verdict()}"
    else:
        text = as_text(calibration, plain=plain_output())
    if found is not None:
        text += _diagnosed(found, options)
    if options.command == "inspect":
        origin = calibration.provenance
        weights = next(iter((origin.get("weights") or {}).values()), "none")
        predicts, noise = calibration.parametrization.name, calibration.process.kind
        named = f"{name}, " if (name := origin.get("base_model") or origin.get("name")) else ""
        text += (
            f"\nmade for: {named}samples of shape {calibration.shape}, {predicts} prediction, {noise} noise, "
        )
        seed, images = origin.get("seed"), calibration.data_images
        text += f"weights {weights[:8]}" + (f"; seed {seed}, {images:,} images" if images else "")
    show(options, {**as_json(calibration), **more}, text)
