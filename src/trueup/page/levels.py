"""The paper's figures for one network: its curves, and a noise level to walk along."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Calibration
from trueup.calibration.drawn import small_maps
from trueup.figure import curves
from trueup.page.chart import Axis, Line, chart
from trueup.page.markup import Html, interval, joined, plus_minus, ranged, tag
from trueup.page.pictures import around_zero, picture, standing_out
from trueup.statistics import Number

MOST = 50  # noise levels on a page


def frequencies(bands: Bands) -> list[float]:
    """The middle of each band, in cycles a pixel; the mean alone is 0."""
    squared = torch.zeros(bands.spatial, dtype=torch.float64)
    for axis, size in enumerate(bands.spatial):
        k = torch.arange(size, dtype=torch.float64) / (2 * size)
        squared += (k**2).reshape([-1 if i == axis else 1 for i in range(len(bands.spatial))])
    radius = squared.sqrt().flatten()
    return (bands.sum_all(radius) / bands.sizes).tolist()


def level_rows(calibration: Calibration) -> list[int]:
    """Which noise levels a page has room for: all, or as many as that from all over."""
    count = len(calibration.t)
    return (
        sorted({round(i * (count - 1) / max(MOST - 1, 1)) for i in range(MOST)})
        if count > MOST
        else [*range(count)]
    )


def time_axis(calibration: Calibration) -> Axis:
    """Along t; where t is a sigma of many decades, in powers of ten."""
    process = calibration.process
    return Axis("t, more noise to the right", log=process.t_min > 0 and process.prior_std > 2)


def figure_one(calibration: Calibration) -> Html:
    """Size of the mean residual over time, and what it costs the bound; both with 95% bands."""
    found = curves(calibration)

    def line(values: Tensor, x: Tensor) -> list[Line]:
        value, low, high = values.clamp_min(0.0).tolist()
        return [Line("", x.tolist(), value, "accent", low, high)]

    lam = calibration.correction.lam
    bits = found.area.scaled(calibration.evidence.bits_per_dim(1.0))
    floor = {"least": 0.0}
    charts = [
        chart(
            "Half the squared size of the expected prediction over time, with a 95% band",
            line(found.size, found.t),
            time_axis(calibration),
            Axis("½ ‖E[ε̂]‖²", **floor),  # type: ignore[arg-type]
        ),
        chart(
            "What the expected prediction costs the likelihood bound over time, with a 95% band",
            line(found.rate, found.t),
            time_axis(calibration),
            Axis("g²/(2σ²) ‖E[ε̂]‖², nats per unit of t", **floor),  # type: ignore[arg-type]
        ),
        chart(
            "The same cost over half the log of the signal-to-noise ratio, with a 95% band",
            line(2 * found.size, lam),
            Axis("λ = ½ log SNR, more noise to the left"),
            Axis("‖E[ε̂]‖², nats per unit of λ", **floor),  # type: ignore[arg-type]
        ),
    ]
    area = (
        f"The area under the second and third is what an ideal shift gains: {plus_minus(found.area)} nats, "
    )
    return joined(tag("div", charts, class_="charts"), tag("p", f"{area}{plus_minus(bits)} bits/dim."))


def kept_map(calibration: Calibration) -> Tensor:
    """What the correction takes off in the mean, (L, C, K): b + a E[eps_hat] + d E[u], in the DCT."""
    made, bands = calibration.correction, calibration.correction.bands
    u = made.lam.exp()[:, None, None] * calibration.data_mean
    off = made.b + bands.spread(made.d) * u
    if made.innovation is not None:
        off = off + bands.spread(made.a) * (made.innovation.mean + bands.spread(made.innovation.rho) * u)
    return off


def figure_two(calibration: Calibration) -> Html:
    """A noise level at a time: expected prediction, its largest pixels, the correction, spectrum, gains."""
    made, bands, e = calibration.correction, calibration.correction.bands, calibration.evidence
    off = kept_map(calibration)
    flat = len(calibration.shape) == 3
    maps = small_maps(off, bands) if flat else None
    power = (bands.sum(off.square()) / bands.sizes).mean(1).sqrt()  # (L, bands)
    used, at = calibration.for_samples, frequencies(bands)
    gains = ((1 - used.a).mean(1), -used.d.mean(1))  # (L, bands) each
    top, ends = float(power.max()), (float(torch.stack(gains).min()), float(torch.stack(gains).max()))
    first = int((e.gain.value / e.loss.value).nan_to_num(0.0).argmax())  # where most of the loss is removed
    rows, levels = level_rows(calibration), []
    first = min(range(len(rows)), key=lambda i: abs(rows[i] - first))
    for i, row in enumerate(rows):
        name = f"t = {float(calibration.t[row]):.4g}, λ = {float(made.lam[row]):+.2f}"
        levels.append(
            tag(
                "article",
                tag("h3", name),
                _pictures(calibration, maps, row, name),
                tag(
                    "div",
                    chart(
                        f"Spectrum of the correction at {name}",
                        [Line("correction", at, power[row].tolist(), "accent")],
                        Axis("frequency, cycles a pixel"),
                        Axis("the correction's mean, of a DCT coefficient", least=0.0, most=top),
                    ),
                    chart(
                        f"Gains by frequency at {name}",
                        [
                            Line("output ε̂", at, gains[0][row].tolist(), "accent"),
                            Line("input x/σ", at, gains[1][row].tolist(), "plain"),
                        ],
                        Axis("frequency, cycles a pixel"),
                        Axis(
                            "what each is multiplied by",
                            least=min(0.0, ends[0]),
                            most=max(1.0, ends[1]),
                        ),
                        level=1.0,
                    ),
                    class_="charts two",
                ),
                _numbers(calibration, row),
                class_="level",
                data_name=name,
                aria_label=f"noise level {i + 1} of {len(rows)}: {name}",
            )
        )
    slider = tag("input", type="range", id="level", min=0, max=len(rows) - 1, step=1, value=first)
    label = tag("label", "Noise level", for_="level")
    control = tag("div", label, tag("output", for_="level"), slider, class_="slider only-live")
    return joined(control, tag("div", levels, class_="levels", id="levels"))


def _pictures(calibration: Calibration, maps: Tensor | None, row: int, name: str) -> Html:
    """Three maps in the same units of grey."""
    if maps is None:
        said = "Samples of this model are no pictures: the spectrum says what there is to see."
        return tag("p", said, class_="missing")
    colour = calibration.shape[0] == 3 and calibration.provenance.get("data_range") is not None
    expected = calibration.evidence.expected
    found, kept = (None if expected is None else expected[row].double()), maps[row]
    largest = float(max(kept.abs().max(), kept.new_tensor(0.0) if found is None else found.abs().max()))
    shown = []
    if found is not None:
        alt = f"Expected prediction at {name}: grey is 0, white {largest:.3g}, black {-largest:.3g}"
        words = joined("Expected prediction E[ε̂]; white and black are ", f"±{largest:.3g}")
        shown.append(_figure(picture(around_zero(found, largest, colour), alt), words))
        alt = f"The tenth of the pixels where the expected prediction is largest, at {name}"
        words = joined("Its largest tenth of pixels")
        shown.append(_figure(picture(standing_out(found), alt), words, "see-through"))
    alt = f"Mean of what the correction takes off at {name}, in the same units"
    shown.append(_figure(picture(around_zero(kept, largest, colour), alt), joined("The correction kept")))
    if found is None:
        shown.append(
            tag("p", "This file does not hold the expected prediction: calibrate again.", class_="missing")
        )
    return tag("div", shown, class_="maps")


def _figure(image: Html, words: Html, kind: str | None = None) -> Html:
    return tag("figure", image, tag("figcaption", words), class_=kind)


def _numbers(calibration: Calibration, row: int) -> Html:
    e = calibration.evidence
    size, gain, loss = e.eta2[row], e.gain[row], float(e.loss.value[row])
    sure = "" if size.sign > 0 else ", within noise"
    share = Number(gain.value, gain.error, gain.low, gain.high).scaled(100 / loss) if loss > 0 else gain
    parts = [
        ("‖E[ε̂]‖²", f"{ranged(size)}{sure}"),
        ("loss", f"{loss:.4g}"),
        ("of it removed", _removed(share) if loss > 0 else "unknown"),
    ]
    return tag("dl", [tag("div", tag("dt", name), tag("dd", said)) for name, said in parts], class_="numbers")


def _removed(share: Number) -> str:
    """A share of the loss in percent; one that is not surely above 0 with its sign."""
    return ranged(share, "%", most=100.0) if share.sign > 0 else f"{interval(share)}%"


def band_moments(calibration: Calibration) -> Html:
    """Spread and mean of the samples' bands beside the data's."""
    at = frequencies(calibration.correction.bands)
    variance, error = calibration.data_variance.clamp_min(1e-12), calibration.data_variance_se
    spreads, means = [], []
    fewest = min((one.nfe for one in calibration.drawn if one.fitted), default=0)
    for drawn in calibration.drawn:
        if drawn.fitted and drawn.nfe > fewest:
            continue
        name, kind, dashed = drawn_name(drawn.before, drawn.fitted, drawn.nfe)
        own = drawn.variance.clamp_min(1e-12)
        ratio = own / variance  # (C, bands)
        relative = ((drawn.variance_se / own).square() + (error / variance).square()).sqrt()
        # Of standard deviations, whose logarithm has half the error; channels together.
        centre = 0.5 * ratio.log().mean(0)
        reach = 1.96 * 0.5 * relative.square().mean(0).sqrt() / len(ratio) ** 0.5
        low, high = ((centre + sign * reach).exp().tolist() for sign in (-1, 1))
        if drawn.fitted:  # its band would hide the others
            low, high = [], []
        spreads.append(Line(name, at, centre.exp().tolist(), kind, low, high, dashed))
        off = (drawn.off.clamp_min(0.0) / variance).mean(0).sqrt()
        means.append(Line(name, at, off.tolist(), kind, dashed=dashed))
    across = Axis("frequency, cycles a pixel")
    return tag(
        "div",
        chart(
            "Spread of the samples' bands over the data's, by frequency, with 95% bands",
            spreads,
            across,
            Axis("spread of samples / of data", log=_wide(spreads)),
            level=1.0,
        ),
        chart(
            "How far the samples' mean is off the data's, by frequency",
            means,
            across,
            Axis("mean off by, in standard deviations", least=0.0),
        ),
        class_="charts two",
    )


def _wide(lines: list[Line]) -> bool:
    """Whether ratios reach so far that a scale of equal steps would hide those near 1."""
    values = [1.0, *(v for line in lines for v in line.y)]
    return max(values) > 8 * min(values)


def drawn_name(before: bool, fitted: bool, nfe: int) -> tuple[str, str, bool]:
    """What a set of samples is called, how its lines are drawn, and whether they are dashed."""
    if fitted:
        return f"fitted, {nfe} evaluations", "accent", True
    return ("before", "plain", False) if before else ("after", "accent", False)
