"""Few steps: the solver fitted to a calibrated network beside the usual samplers on their usual grids.

    python benchmarks/few_steps.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy
    python benchmarks/few_steps.py ... --part counts      # how many trajectories
    python benchmarks/few_steps.py ... --part gains       # the limit with each form of the gains
    python benchmarks/few_steps.py ... --part variants    # fitted to the limit, or brought to the data
    python benchmarks/few_steps.py ... --part ends        # limits that end at more noise than the least
    python benchmarks/few_steps.py ... --part fourfold    # beside four times the evaluations, uncalibrated
    python benchmarks/few_steps.py ... --part harm --nfe 3 4 5 7 10 14 20 30 50 70 100   # on other noise
    python benchmarks/few_steps.py ... --part cost        # of a fit, and of a fitted step

Fréchet distances (EfficientNet-lite0 features, not Inception's) to the test images; every cell starts from
the same noise. "uncalibrated" and "calibrated" are the best of all samplers and grids in SAMPLERS, chosen for
each cell by the distance itself, which nobody could do in use; the fitted solver is chosen without it. Models
are directories, of diffusers or of benchmarks/networks.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trueup
from trueup.calibration import Attachment
from trueup.estimate import fit, measure
from trueup.fitting import fit_solver, judge
from trueup.fitting.calibrating import labels_of
from trueup.fitting.kept import Kept
from trueup.fitting.moments import Moments, seen
from trueup.fitting.solve import Fitter, fit_cost
from trueup.fitting.teacher import Teacher
from trueup.sampling.draw import as_solver, network_for
from trueup.sampling.fitted import Fitted, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid
from trueup.sampling.solver import solvers_for

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table

ENDS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)  # noise at the last evaluation, over the least
TIME, LOG, KARRAS = Grid("time"), Grid(), Grid(7.0)
SAMPLERS: list[tuple[str, Any]] = [
    ("ddim", TIME), ("dpm++-2", LOG), ("dpm++-2", KARRAS), ("dpm++-3", TIME), ("dpm++-3", LOG),
    ("dpm++-3", KARRAS), ("ipndm-3", TIME), ("ipndm-3", LOG), ("unipc-2", LOG), ("dpm-solver-3", None),
    ("unipc", None), ("unipc", "karras"), ("deis", None), ("deis", "karras"),
]  # fmt: skip
NAMES = {"ddim": "DDIM", "dpm++-2": "DPM-Solver++ 2M", "dpm++-3": "DPM-Solver++ 3M", "ipndm-3": "iPNDM"}
NAMES |= {"unipc-2": "UniPC", "unipc": "UniPC", "deis": "DEIS", "dpm-solver-3": "DPM-Solver-3"}


class Setting:
    """A network, its calibration judged by samples, and the distance samples are measured by."""

    def __init__(self, path: str, options):
        self.options = options
        if (Path(path) / "kind.json").exists():
            from networks import load

            self.denoiser = load(Path(path), options.device, options.batch_size)
        else:
            self.denoiser = load_model(path, options)
        network = self.denoiser.network
        if options.half:
            network.half().to(memory_format=torch.channels_last)
        images = np.load(options.data)[: options.images]
        labels = None if options.labels is None else np.load(options.labels)[: options.images]
        data = trueup.Images(images, labels=None if labels is None else torch.from_numpy(labels))
        moments = measure(self.denoiser, data, trust=True, progress=False)
        self.labels = labels_of(data, self.denoiser)
        self.calibration = judge(self.denoiser, fit(moments), labels=self.labels, progress=False)
        self.quality = None if options.part == ["cost"] else Quality(self.denoiser, np.load(options.test))

    def distance(self, calibration, solver, nfe: int) -> float:
        """The Fréchet distance of samples."""
        options = self.options
        how = {"labels": self.labels} if self.denoiser.conditional else {}
        found = self.quality(
            self.denoiser, calibration, solver, nfe, options.samples, options.batch_size, **how
        )
        return found[0].value

    def trajectories(self, gains: str, keep: bool = False) -> Iterator[tuple[Network, Teacher]]:
        """The many-step limit, from the same noise, batch by batch; keep: with the states on the way."""
        network = network_for(self.denoiser, self.labels)
        every, size = network.y, self.options.batch_size
        for first in range(0, self.options.samples, size):
            index = torch.arange(first, min(first + size, self.options.samples))
            network.index, network.y = index, None if every is None else every[index % len(every)]
            with Attachment(self.denoiser, self.calibration, gains=gains):
                yield network, Teacher.of(network, 0, intervals=64, keep=keep)

    def limit(self, gains: str) -> float:
        """Of the many-step limit."""
        x = torch.cat([made.samples for _, made in self.trajectories(gains)])
        return self.quality.of(x, self.denoiser).value

    def usual(self, name: str, grid, nfe: int):
        """A usual sampler on a usual grid; None where it is not offered."""
        rules = {rule.name: rule for rule in RULES}
        if name in rules:
            made = plan(self.denoiser, rules[name], grid, nfe, self.labels)
            return None if made is None else Fitted(made)
        if name not in solvers_for(self.denoiser):
            return None
        solver = as_solver(name, self.denoiser)
        if grid is None:
            return solver
        scheduler = solver.scheduler
        return as_solver(
            type(scheduler).from_config(scheduler.config, **{f"use_{grid}_sigmas": True}), self.denoiser
        )

    def best_usual(self, calibration, nfe: int) -> list[list]:
        """[distance, sampler, grid] of the usual samplers, best first."""
        found = []
        for name, grid in SAMPLERS:
            if name not in (self.options.samplers or [name]):
                continue
            try:
                solver = self.usual(name, grid, nfe)
                if solver is not None:
                    where = grid.name if isinstance(grid, Grid) else grid or "its own"
                    distance = self.distance(calibration, solver, nfe)
                    found.append([distance, NAMES.get(name, name), where])
            except (trueup.TrueupError, ValueError, AssertionError) as error:
                print(f"{name} {grid} at {nfe}: {error}")
        return sorted(found)


def full_table(setting: Setting, entry: dict, options) -> list[list[str]]:
    head = ["evaluations", "uncalibrated", "calibrated", "fitted, uncalibrated", "**calibrated, fitted**"]
    rows = [[*head, "how", "limit"]]
    entry["limit"] = {form: setting.limit(form) for form in ("none", setting.calibration.gains)}
    limit = entry["limit"][setting.calibration.gains]
    started = time.monotonic()
    how = {"labels": setting.labels, "trajectories": options.trajectories, "progress": False}
    fitted = fit_solver(setting.denoiser, setting.calibration, nfe=options.nfe, **how)
    entry["seconds to fit"] = time.monotonic() - started
    alone = fit_solver(setting.denoiser, None, nfe=options.nfe, **how)
    entry["gains"], entry["rows"] = setting.calibration.gains, []
    for nfe in options.nfe:
        usual = {
            "uncalibrated": setting.best_usual(None, nfe),
            "calibrated": setting.best_usual(setting.calibration, nfe),
        }
        solver = fitted.solver(nfe)
        row = {
            "nfe": nfe,
            "usual": usual,
            "fitted alone": setting.distance(alone, "fitted", nfe),
            "fitted": setting.distance(fitted, "fitted", nfe),
            "evidence": solver.evidence,
            "provenance": solver.provenance,
        }
        entry["rows"].append(row)
        cells = [f"{b[0]:.1f} ({b[1]}, {b[2]})" for b in (usual[kind][0] for kind in usual)]
        origin = solver.provenance
        words = f"{origin['base']}; {origin['fitted']}"
        rows.append(
            [
                str(nfe),
                *cells,
                f"{row['fitted alone']:.1f}",
                f"**{row['fitted']:.1f}**",
                words,
                f"{limit:.1f}",
            ]
        )
        print(rows[-1], flush=True)
    return rows


def counts(setting: Setting, entry: dict, options) -> list[list[str]]:
    rows = [["evaluations", *(f"{n} trajectories" for n in (64, 128, 256, 512))]]
    for nfe in options.nfe:
        cells = []
        for n in (64, 128, 256, 512):
            cal = fit_solver(
                setting.denoiser,
                setting.calibration,
                nfe=nfe,
                trajectories=n,
                labels=setting.labels,
                progress=False,
            )
            entry[f"{nfe}, {n}"] = setting.distance(cal, "fitted", nfe)
            cells.append(f"{entry[f'{nfe}, {n}']:.1f}")
        rows.append([str(nfe), *cells])
    return rows


def fourfold(setting: Setting, entry: dict, options) -> list[list[str]]:
    """The best usual sampler of the uncalibrated network with four times the evaluations."""
    rows = [["evaluations", "four times as many, uncalibrated", "**calibrated, fitted**"]]
    how = {"labels": setting.labels, "trajectories": options.trajectories, "progress": False}
    fitted = fit_solver(setting.denoiser, setting.calibration, nfe=options.nfe, **how)
    for nfe in options.nfe:
        many = setting.best_usual(None, 4 * nfe)
        entry[str(nfe)] = {"many": many, "fitted": setting.distance(fitted, "fitted", nfe)}
        best = f"{many[0][0]:.1f} ({many[0][1]}, {many[0][2]})"
        rows.append([str(nfe), best, f"{entry[str(nfe)]['fitted']:.1f}"])
        print(rows[-1], flush=True)
    return rows


def harm(setting: Setting, entry: dict, options) -> list[list[str]]:
    """Every fitted solver beside its own rule and steps, by the judge, on noise it was not fitted to."""
    rows = [["evaluations", "base", "decided by", "as it is", "fitted", "difference"]]
    for nfe in options.nfe:
        how = {"labels": setting.labels, "trajectories": options.trajectories, "progress": False}
        chosen = fit_solver(setting.denoiser, setting.calibration, nfe=nfe, **how).solver(nfe)
        bare = replace(chosen, tables=0 * chosen.tables, offset=0 * chosen.offset)
        calibration, many = setting.calibration, 4 * options.trajectories
        other = Fitter(setting.denoiser, calibration, many, setting.labels, 1.0, 1, False, [nfe])
        with Attachment(setting.denoiser, calibration), other:
            other.start(Kept(None, {}))
            before, after = other.judged(bare), other.judged(chosen)
        change = after.less(before)
        by = "the data's moments" if other.far_from_data else "the limit"
        entry[str(nfe)] = [before.score, after.score, change.value, change.low, change.high]
        figures = [f"{before.score:.4f}", f"{after.score:.4f}", f"{change.value:+.4f} ± {change.reach:.4f}"]
        rows.append([str(nfe), chosen.provenance["base"], by, *figures])
        print(rows[-1], flush=True)
    return rows


def cost(setting: Setting, entry: dict, options) -> list[list[str]]:
    """Seconds of a fit, its evaluations, and a fitted step over an evaluation of the network, in one run."""
    denoiser, rows = setting.denoiser, [["evaluations", "seconds", "evaluations of a fit", "a step, of one"]]
    x = torch.randn(options.batch_size, *denoiser.shape, device=denoiser.device)
    for nfe in options.nfe:
        started = time.monotonic()
        how = {"labels": setting.labels, "trajectories": options.trajectories, "progress": False}
        solver = fit_solver(denoiser, setting.calibration, nfe=nfe, **how).solver(nfe)
        seconds = time.monotonic() - started
        spent = fit_cost(options.trajectories, nfe)
        tables = solver.tables + (1e-3 if solver.empty else 0.0)  # as if fitted, or there is nothing to time
        solver = replace(solver, tables=tables)
        y = None if setting.labels is None else setting.labels[torch.arange(len(x)) % len(setting.labels)]
        step = _seconds(lambda s=solver: s.step(3, x, [x, x, x]))
        network = _seconds(lambda t=float(solver.t[3]), y=y: denoiser.predict(x, t, y))
        entry[str(nfe)] = {"seconds": seconds, "evaluations": spent, "step": step / network}
        rows.append([str(nfe), f"{seconds:.0f}", f"{spent:,}", f"{100 * step / network:.2f}%"])
    return rows


@torch.inference_mode()
def _seconds(work, repeats: int = 20) -> float:
    """The median of several runs."""
    times = []
    for i in range(repeats + 3):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times += [time.perf_counter() - started] if i >= 3 else []
    return sorted(times)[len(times) // 2]


def variants(setting: Setting, entry: dict, options) -> list[list[str]]:
    """The three candidates that a fit tries: as they are, fitted to the limit, brought to the data."""
    rows = [["evaluations", "candidate", "as it is", "fitted", "restored"]]
    with Attachment(setting.denoiser, setting.calibration):
        for nfe in options.nfe:
            fitter = Fitter(
                setting.denoiser,
                setting.calibration,
                options.trajectories,
                setting.labels,
                1.0,
                0,
                False,
                [nfe],
            )
            with fitter:
                fitter.start(Kept(None, {}))
                for base in fitter.bases(nfe):
                    made = (base, *(fitter.better(base, by_data) for by_data in (False, True)))
                    found = [setting.distance(None, Fitted(one), nfe) for one in made]
                    entry[f"{nfe}, {base.provenance['base']}"] = found
                    cells = [f"{value:.1f}" for value in found]
                    rows.append([str(nfe), base.provenance["base"], *cells])
    return rows


def gains(setting: Setting, entry: dict, options) -> list[list[str]]:
    forms = ("none", "least-squares", "sqrt", "response")
    entry |= {form: setting.limit(form) for form in forms}
    entry |= {"chosen": setting.calibration.gains, **setting.calibration.provenance.get("samples", {})}
    return [[*forms, "chosen"], [*(f"{entry[form]:.2f}" for form in forms), setting.calibration.gains]]


def ends(setting: Setting, entry: dict, options) -> list[list[str]]:
    """The limit, had it ended at more noise than the least that the network knows."""
    rows = [["noise at the end, over the least", "FD", "less that of the limit", "miss of the data's bands"]]
    denoiser, calibration = setting.denoiser, setting.calibration
    data, first = Moments.of(calibration, setting.labels), None
    made: dict[float, list[Tensor]] = {times: [] for times in ENDS}
    for network, fine in setting.trajectories(calibration.gains, keep=True):
        for times, parts in made.items():
            lam = fine.lam[-1] - math.log(times)
            t = network.process.t_of_lam(lam)
            alpha, sigma = network.process.alpha(t), network.process.sigma(t)
            x_t = fine.at(float(lam))
            with torch.inference_mode():
                parts.append((x_t - sigma * denoiser.eps(x_t, t, network.y)) / alpha)
    for times, parts in made.items():
        x = torch.cat(parts)
        distance = setting.quality.of(x, denoiser)
        first = first or distance
        miss = None if data is None else data.miss(seen(x, denoiser)).number
        entry[str(times)] = [numbers(number) for number in (distance, distance.difference(first))]
        entry[str(times)] += [] if miss is None else [numbers(miss)]
        cells = [f"{times:g}", f"{distance.value:.2f}", change(first, distance)]
        rows.append([*cells, "" if miss is None else plus_minus(miss)])
        print(rows[-1], flush=True)
    return rows


PARTS = {
    "table": full_table,
    "counts": counts,
    "gains": gains,
    "variants": variants,
    "ends": ends,
    "fourfold": fourfold,
    "harm": harm,
    "cost": cost,
}


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--part", choices=list(PARTS), nargs="+", default=["table"])
    p.add_argument("--labels", metavar="FILE", help=".npy of labels, for conditional networks")
    p.add_argument("--images", type=int, default=500, help="behind the calibrations")
    p.add_argument(
        "--samplers", nargs="+", help="only these of the usual ones, by their first word in SAMPLERS"
    )
    p.add_argument("--trajectories", type=int, default=128)
    p.add_argument("--nfe", type=int, nargs="+", default=[4, 5, 6, 8, 10, 15, 20])
    options = p.parse_args()
    results: dict = {}
    for path in options.model:
        setting = Setting(path, options)
        for part in options.part:
            entry: dict = {}
            results[f"{path} {part}"] = entry
            rows = PARTS[part](setting, entry, options)
            print(
                f"\n{path}: {options.samples} samples, {options.images} images\n\n{table(rows)}", flush=True
            )
            finish(options, results)


if __name__ == "__main__":
    main()
