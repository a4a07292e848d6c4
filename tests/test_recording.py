"""The recorder: moments of a training loop, against `measure`, closed forms and plain arithmetic."""

import contextlib
import copy
import io
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from torch import nn

import trueup
from trueup.analytic import GaussianMixture
from trueup.errors import ArtifactError, TrueupError
from trueup.estimate import default_levels, fit
from trueup.estimate.moments import SUMS, Moments
from trueup.noise import level_key, normal
from trueup.page.origin import commands, provenance
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow
from trueup.recording import ShallowNetwork
from trueup.recording import recorder as recording

from measuring import measure
from tiny import tiny_unet

PROCESS = DiscreteVP.linear()
SHAPE = (1, 4, 4)
DATA = GaussianMixture(torch.full((1, *SHAPE), 0.3), std=0.5)


def too_bright(by):
    """An ideal network, but for a constant."""
    return DATA.denoiser(PROCESS, distortion=lambda eps, u, lam: torch.full_like(eps, by))


def batches(steps, count=64, process=PROCESS, data=DATA, seed=0):
    """What a training loop draws: x_t, t and the noise."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x0 = data.sample(count, seed=1000 * seed + step)
        if process.integer_times:
            t = torch.randint(int(process.t_max) + 1, (count,), generator=generator)
        else:
            t = process.t_min + (process.t_max - process.t_min) * torch.rand(count, generator=generator)
        eps = torch.randn(x0.shape, generator=generator)
        yield process.noised(x0, eps, t), t, eps, x0


def recorded(network, steps=60, seed=0, **settings):
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, **{"half_life": None, **settings})
    for x_t, t, eps, _ in batches(steps, seed=seed):
        recorder.update(x_t, t, network.predict(x_t, t), eps)
    return recorder


def sums(recorder):
    return {name: getattr(recorder.moments(), name) for name in SUMS}


# What it is


def test_at_the_levels_and_without_decay_it_is_what_measure_measures():
    """Powers of two, so that float32 rounds alike on both ways."""
    process, levels = VE(0.25, 8.0), [0.25, 1.0, 4.0]
    denoiser = DATA.denoiser(process, distortion=lambda eps, u, lam: 0.1 * eps + 0.2)
    x0 = DATA.sample(48)
    expected = measure(denoiser, x0, levels=levels)
    recorder = trueup.Recorder(process, "noise", SHAPE, levels=levels, half_life=None)
    index = torch.arange(48)
    for t in levels:
        eps = normal(0, index, level_key(t), SHAPE, torch.device("cpu"))
        x_t = process.noised(x0, eps, t)
        output = denoiser.predict(x_t, t)
        for part in index.split(20):
            recorder.update(x_t[part], torch.full((len(part),), t), output[part], eps[part], index=part)
    found = recorder.moments()
    for name in ("rows", "squares", "first", "second"):  # float64 sums in another order
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9), name
    # Of the data both know the same, from weights of their own; x0 is read off float32 x_t.
    means = [m.data_first.sum((0, 1)) / m.data_rows.sum() for m in (found, expected)]
    assert torch.allclose(*means, rtol=1e-5, atol=1e-5)


PREDICTIONS = [
    (PROCESS, "epsilon"),
    (PROCESS, "sample"),
    (PROCESS, "v_prediction"),
    (ContinuousVP(), "score"),
    (Flow(time_scale=1000.0), "flow"),
    (VE(0.01, 50.0), "data"),
    (EDM(0.5), "edm"),
]


@pytest.mark.parametrize(("process", "prediction"), PREDICTIONS)
def test_an_ideal_network_is_calibrated_whatever_it_predicts_and_wherever_rows_lie(process, prediction):
    """Rows lie between levels; put to them without care, an ideal network would look wrong."""
    recorder = trueup.Recorder(process, prediction, SHAPE, half_life=None)
    parametrization = recorder._described.parametrization
    denoiser = DATA.denoiser(process, parametrization)
    for x_t, t, eps, x0 in batches(60, process=process):
        target = parametrization.target(x0, eps, *process.scales(t, eps))
        recorder.update(x_t, t, denoiser.predict(x_t, t), target)
    cal = recorder.calibration()
    assert cal.uncalibration.low <= 0
    assert cal.data_mean[0, 0] / 4 == pytest.approx(0.3, abs=0.02)  # the DCT of a constant
    # Of an ideal denoiser of N(0.3, 0.25): the loss is v e^2lam / (1 + v e^2lam) per pixel.
    snr = 0.25 * (2 * cal.correction.lam).exp()
    miss = cal.evidence.loss.value / 16 - snr / (1 + snr)
    assert (miss.abs() < 4 * cal.evidence.loss.error / 16 + 0.02).float().mean() > 0.9


def test_rows_between_levels_bias_nothing_that_is_ideal():
    """In exact arithmetic: what an ideal network of N(0, v) seems to gain, by where u is taken."""
    lam, v = PROCESS.lam(torch.arange(1000.0)), 0.25
    levels = PROCESS.lam(default_levels(PROCESS))
    nearest = (lam[:, None] - levels).abs().argmin(1)

    def gain(at):
        """Integrated over lam, in bits/dim, with u at `at`."""
        covariance = (1 + v * (lam + at).exp()) / (1 + v * (2 * lam).exp()) - 1  # of residual and u
        power = 1 + v * (2 * at).exp()
        rows = torch.nn.functional.one_hot(nearest).double()
        squared = (rows.T @ covariance).square() / (rows.T @ power) / rows.sum(0)
        return float(torch.trapezoid(squared, -levels)) / math.log(2)

    assert gain(levels[nearest]) > 3e-5  # moved to the level
    assert gain(lam) == 0  # where it was


def test_a_known_bias_is_found_within_its_interval():
    recorder = recorded(too_bright(0.2))
    cal = recorder.calibration(family="shift")
    eta2 = cal.evidence.eta2
    covered = (eta2.low <= 16 * 0.2**2) & (eta2.high >= 16 * 0.2**2)
    assert covered.double().mean() > 0.8  # of 95% intervals
    inner = cal.correction.shift_map()[3:-1]  # levels with more than a few rows
    assert inner.mean() == pytest.approx(0.2, abs=0.02)
    lam = cal.correction.lam
    expected = 0.04 * float(lam[0] - lam[-1]) / math.log(2)  # equation 26
    now = recorder.uncalibration()
    assert now.low < expected < now.high + 0.15 * expected  # shrunk: never more than was confirmed
    assert recorder.log() == {
        "uncalibration": now.value,
        "uncalibration/low": now.low,
        "uncalibration/high": now.high,
    }


def test_both_epsilon_and_a_scheduler_are_understood():
    one = trueup.Recorder(DDPMScheduler(prediction_type="v_prediction"), shape=SHAPE)
    assert one._described.parametrization.name == "velocity"
    assert one._described.process.agrees_with(PROCESS)
    assert trueup.Recorder(PROCESS, shape=SHAPE)._described.parametrization.name == "noise"


# Forgetting


def test_it_forgets_as_its_half_life_says():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, half_life=10)
    flawed, mended = too_bright(0.5), too_bright(0.0)
    for step, (x_t, t, eps, _) in enumerate(batches(60)):
        recorder.update(x_t, t, (flawed if step < 30 else mended).predict(x_t, t), eps)
    moments = recorder.moments()
    # Noise apart, the mean residual is 0.5 times the share of the old: sums of 2^(-steps/10).
    weights = 2 ** (-torch.arange(59.0, -1, -1) / 10)
    share = float(weights[:30].sum() / weights.sum())
    mean = float(moments.first[0, :, 5:20, 0, 0, 0].sum() / moments.rows[0, :, 5:20].sum()) / 4
    assert mean == pytest.approx(0.5 * share, abs=0.02)
    assert float(moments.rows.sum()) == pytest.approx(64 * float(weights.sum()), rel=1e-6)


def test_weights_that_grow_are_sums_that_decay():
    """Against Moments.decay after every step; half-lives so short that it is rescaled on the way."""
    recorder, plain = (trueup.Recorder(PROCESS, "noise", SHAPE, half_life=h) for h in (0.5, None))
    for x_t, t, eps, _ in batches(30, count=8):
        recorder.update(x_t, t, x_t, eps)
        plain._sums.decay(0.25)
        plain.update(x_t, t, x_t, eps)
    assert recorder._weight < 2.0**41  # it was rescaled
    for name, expected in sums(plain).items():
        assert torch.allclose(sums(recorder)[name], expected, rtol=1e-9, atol=1e-12), name


def test_effective_number_of_a_long_record():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, half_life=20, levels=[500])
    for _ in range(400):
        recorder.update(
            torch.zeros(2, *SHAPE), torch.tensor([500, 500]), torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE)
        )
    # 2 rows a step of weights q^k: 2 (1 + q)/(1 - q), about 2 * 2 * half_life / ln 2
    q = 2 ** (-1 / 20)
    assert float(recorder.moments().effective[0]) == pytest.approx(2 * (1 + q) / (1 - q), rel=1e-4)


# Keeping and adding


def test_two_ranks_are_one():
    network = too_bright(0.1)
    whole, *ranks = (trueup.Recorder(PROCESS, "noise", SHAPE, half_life=7, classes=(0, 1)) for _ in range(3))
    for step, (x_t, t, eps, _) in enumerate(batches(12)):
        output, index, y = network.predict(x_t, t), torch.arange(64) + 64 * step, torch.arange(64) % 2
        whole.update(x_t, t, output, eps, y, index)
        for rank, part in zip(ranks, (slice(0, 32), slice(32, 64)), strict=True):
            rank.update(x_t[part], t[part], output[part], eps[part], y[part], index[part])
    before = sums(ranks[0])
    together = ranks[0].merge(ranks[1])
    for name, expected in sums(whole).items():
        assert torch.allclose(sums(together)[name], expected, rtol=1e-9, atol=1e-12), name
        assert torch.equal(sums(ranks[0])[name], before[name])
    assert (together.rows, together.steps) == (whole.rows, whole.steps)


def test_ranks_reduce_to_the_same_sums(tmp_path):
    """Two processes over gloo, against merging what both recorded."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, trueup\n"
        "rank, folder = int(sys.argv[1]), sys.argv[2]\n"
        "dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2)\n"
        "generator = torch.Generator().manual_seed(rank)\n"
        "recorder = trueup.Recorder(trueup.process.DiscreteVP.linear(), 'noise', (1, 4, 4), half_life=5)\n"
        "for _ in range(6):\n"
        "    eps = torch.randn(8, 1, 4, 4, generator=generator)\n"
        "    recorder.update(eps, torch.randint(1000, (8,), generator=generator), 1.1 * eps, eps)\n"
        "torch.save([recorder.state_dict(), recorder.all_reduce().state_dict()], f'{folder}/{rank}.pt')\n"
        "dist.destroy_process_group()\n"
    )
    running = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)]) for rank in (0, 1)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    kept = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    recorders = [trueup.Recorder(PROCESS, "noise", SHAPE, half_life=5) for _ in range(4)]
    for recorder, state in zip(recorders, (kept[0][0], kept[1][0], kept[0][1], kept[1][1]), strict=True):
        recorder.load_state_dict(state)
    one, other, *reduced = recorders
    expected = sums(one.merge(other))
    for recorder in reduced:
        assert recorder.rows == 96
        assert all(torch.allclose(sums(recorder)[name], expected[name], rtol=1e-12) for name in SUMS)
    # Rows of the ranks have numbers of their own.
    assert not torch.equal(one._sums.rows, other._sums.rows)


def test_a_state_goes_on_to_the_bit():
    network, data = too_bright(0.1), list(batches(8))
    whole, half, resumed = (trueup.Recorder(PROCESS, "noise", SHAPE, half_life=3) for _ in range(3))
    for step, (x_t, t, eps, _) in enumerate(data):
        whole.update(x_t, t, network.predict(x_t, t), eps)
        if step < 4:
            half.update(x_t, t, network.predict(x_t, t), eps)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for x_t, t, eps, _ in data[4:]:
        resumed.update(x_t, t, network.predict(x_t, t), eps)
    assert all(torch.equal(getattr(whole._sums, n), getattr(resumed._sums, n)) for n in SUMS)
    assert (whole.steps, whole.rows, whole._weight) == (resumed.steps, resumed.rows, resumed._weight)


def test_an_image_stays_in_its_fold_over_epochs():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, half_life=None, levels=[10, 500])
    index = torch.tensor([3, 70, 71])
    for _ in range(5):
        eps = torch.randn(3, *SHAPE)
        recorder.update(eps, torch.tensor([500, 500, 500]), eps, eps, index=index)
    counts = recorder.moments().rows[0, :, 1]
    assert sorted(counts[counts > 0].tolist()) in ([5, 5, 5], [5, 10], [15])


def test_classes_are_kept_apart():
    flawed, ideal = too_bright(0.4), too_bright(0.0)
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, half_life=None, classes=(7, 2, -1))
    for x_t, t, eps, _ in batches(20):
        y = torch.tensor([7, -1]).repeat(32)
        outputs = [net.predict(x_t, t) for net in (flawed, ideal)]
        recorder.update(x_t, t, torch.where((y == 7).reshape(-1, 1, 1, 1), *outputs), eps, y)
    moments = recorder.moments()
    means = [
        float(one.first[0, :, 5:20, 0, 0, 0].sum() / one.rows[0, :, 5:20].sum()) / 4
        for one in (moments.of_class(7), moments.of_class(-1))
    ]
    assert means == pytest.approx([0.4, 0.0], abs=0.03)
    assert not moments.of_class(2).rows.any()


@pytest.mark.parametrize("count", [1, 2, 10, 50])
def test_a_few_rows_make_a_calibration_that_says_so(tmp_path, count):
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE)
    x_t, t, eps, _ = next(batches(1, count=count))
    recorder.update(x_t, t, 1.2 * eps, eps)
    cal = recorder.calibration()
    assert recorder.log() == {}
    assert "use 20 or more" in cal.verdict()
    cal.save(tmp_path / "cal.safetensors")
    assert trueup.load(tmp_path / "cal.safetensors").empty


def test_a_recorded_calibration_counts_rows_and_steps_not_images(tmp_path):
    cal = recorded(too_bright(0.1), steps=40).calibration()
    made = cal.provenance["recorded"]
    said = f"{made['rows']:,} rows of 40 training steps"
    assert said in cal.summary().splitlines()[0]
    assert ("images", said) in provenance(cal)
    assert commands(cal) == ['recorder.calibration(network).save("FILE.trueup.safetensors")']
    for name, value in (("rows", -1), ("steps", "<b>"), ("half_life", "long"), ("rows", None)):
        cal.provenance["recorded"] = {**made, name: value}
        with pytest.raises(ArtifactError, match=name):
            cal.save(tmp_path / "cal.safetensors")


def test_the_moments_are_a_file(tmp_path):
    moments = recorded(too_bright(0.1), steps=5).moments()
    moments.save(tmp_path / "moments.safetensors")
    again = Moments.load(tmp_path / "moments.safetensors")
    assert all(torch.equal(getattr(moments, name), getattr(again, name)) for name in SUMS)


# In a loop


class Small(nn.Module):
    """A network one can count the calls of; it looks at the time."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.calls = nn.Conv2d(2, 1, 3, padding=1), nn.Dropout(0.5), 0

    def forward(self, x_t, t):
        self.calls += 1
        time = (t.float() / 1000).reshape(-1, 1, 1, 1).expand_as(x_t)
        return self.drop(self.layer(torch.cat([x_t, time], 1)))


def test_training_is_not_touched():
    """The same weights after the same steps, to the bit, with and without; and no call of the network."""
    torch.manual_seed(0)
    first = Small()
    trained = []
    for record in (False, True):
        torch.manual_seed(1)
        network = copy.deepcopy(first)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        recorder = trueup.Recorder(PROCESS, "noise", SHAPE)
        for x_t, t, eps, _ in batches(5, count=8):
            output = network(x_t, t)
            loss = (output - eps).square().mean()
            if record:
                before = loss.grad_fn
                recorder.update(x_t, t, output, eps)
                assert loss.grad_fn is before
                assert all(p.grad is None for p in network.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert network.calls == 5
        assert not any(getattr(recorder._sums, name).requires_grad for name in SUMS)
        trained.append(network)
    assert all(torch.equal(a, b) for a, b in zip(*(n.parameters() for n in trained), strict=True))
    assert recorder.rows == 40


def test_observe_evaluates_every_kth_time_without_dropout_or_gradient():
    network = Small().train()
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, every=3, half_life=None)
    expected = trueup.Recorder(PROCESS, "noise", SHAPE, half_life=None)
    for step, (x_t, t, eps, _) in enumerate(batches(7, count=8)):
        assert recorder.due == (step % 3 == 0)
        recorder.observe(network, x_t, t, eps)
        if step % 3 == 0:
            with torch.no_grad():
                expected.update(x_t, t, copy.deepcopy(network).eval()(x_t, t), eps)
    assert (network.calls, recorder.steps, recorder.rows) == (3, 7, 24)
    assert network.training
    assert network.drop.training
    assert all(torch.equal(sums(recorder)[name], sums(expected)[name]) for name in SUMS)


@pytest.mark.parametrize(("process", "prediction"), PREDICTIONS)
def test_an_update_looks_at_no_value(process, prediction, monkeypatch):
    """So it never waits for a GPU: here on a device whose tensors have no values to look at."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # unknown there
    recorder = trueup.Recorder(process, prediction, SHAPE, classes=(0, 1))
    x_t, output, target = (torch.zeros(4, *SHAPE, device="meta") for _ in range(3))
    t, y = torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    for index in (None, torch.arange(4)):
        recorder.update(x_t, t, output, target, y, index)
    assert recorder._sums.first.device.type == "meta"
    assert recorder.rows == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_within_autocast(dtype):
    network, recorder = too_bright(0.2), trueup.Recorder(PROCESS, "noise", SHAPE, half_life=None)
    for x_t, t, eps, _ in batches(20):
        output = network.predict(x_t, t).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            recorder.update(x_t, t, output, eps)
    moments = recorder.moments()
    mean = moments.first[0, :, 5:20, 0, 0, 0].sum() / moments.rows[0, :, 5:20].sum()
    assert float(mean) / 4 == pytest.approx(0.2, abs=0.02)


def test_rows_that_are_not_finite_are_left_out():
    """An overflow in half precision, which a loss scaler skips, must not end the record."""
    clean, spoiled = (trueup.Recorder(PROCESS, "noise", SHAPE, half_life=None) for _ in range(2))
    for x_t, t, eps, _ in batches(3, count=8):
        index = torch.arange(8)
        output = 1.1 * eps
        clean.update(x_t[1:], t[1:], output[1:], eps[1:], index=index[1:])
        output[0, 0, 2, 2] = math.inf
        spoiled.update(x_t, t, output, eps, index=index)
    assert spoiled.skipped == 3
    assert all(torch.equal(sums(clean)[name], sums(spoiled)[name]) for name in SUMS)


def test_a_calibration_of_a_network_in_training_is_saved_attached_and_lowers_the_loss(tmp_path):
    unet = tiny_unet()
    with torch.no_grad():
        unet.conv_out.bias += 0.5
    scheduler, data = DDPMScheduler(), GaussianMixture(torch.zeros(1, 1, 8, 8), std=0.5)
    recorder = trueup.Recorder(scheduler, shape=(1, 8, 8), model="tiny")
    loop = list(batches(45, count=32, data=data))
    for x_t, t, eps, _ in loop[:40]:
        with torch.no_grad():
            recorder.update(x_t, t, unet(x_t, t).sample, eps)
    cal = recorder.calibration(unet)
    cal.save(tmp_path / "cal.safetensors")
    cal = trueup.load(tmp_path / "cal.safetensors")
    assert cal.provenance["recorded"] == {"steps": 40, "rows": 1280, "half_life": 1000}
    assert "tiny" in cal.summary()

    def loss():
        with torch.no_grad():
            return sum(float((unet(x_t, t).sample - eps).square().mean()) for x_t, t, eps, _ in loop[40:])

    before = loss()
    with trueup.attach(unet, cal, gains="least-squares"):
        assert loss() < 0.9 * before
    assert loss() == before
    other = copy.deepcopy(unet)
    with torch.no_grad():
        other.conv_out.bias += 1
    with pytest.raises(TrueupError, match="other weights"):
        trueup.attach(other, cal)
    with trueup.attach(unet, recorder.calibration(), force=True):
        pass


@pytest.mark.parametrize("accelerated", [True, False])
def test_the_example_trains_and_its_calibrations_go_on_its_pipelines(
    tmp_path, monkeypatch, capsys, accelerated
):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    import train_with_recorder

    if not accelerated:
        monkeypatch.setattr(train_with_recorder, "Accelerator", None)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    settings = ["--steps", "20", "--batch-size", "32", "--width", "8", "--log-every", "20", "--every", "2"]
    train_with_recorder.main([str(tmp_path / "images.npy"), str(tmp_path / "out"), *settings])
    assert "uncalibration in bits/dim: raw" in capsys.readouterr().out
    for name in ("raw", "ema"):
        pipe = DDPMPipeline.from_pretrained(tmp_path / "out" / name)
        cal = trueup.load(tmp_path / "out" / f"{name}.safetensors")
        assert cal.provenance["recorded"]["rows"] == 640 / (1 if name == "raw" else 2)
        with trueup.attach(pipe, cal):
            pipe(num_inference_steps=1, output_type="np")


# What it refuses


def bad(recorder, x_t, t, eps):
    three = torch.zeros(3, *SHAPE)
    yield "x_t is", lambda: recorder.update(torch.zeros(4, 2, 4, 4), t, eps, eps)
    yield "output is", lambda: recorder.update(x_t, t, three, eps)
    yield "target is", lambda: recorder.update(x_t, t, eps, three)
    yield "t is", lambda: recorder.update(x_t, t[:3], eps, eps)
    yield "0 to 999", lambda: recorder.update(x_t, t + 1000, eps, eps)
    yield "0 to 999", lambda: recorder.update(x_t, torch.tensor([0.0, 1.0, 2.0, math.nan]), eps, eps)
    yield "index is", lambda: recorder.update(x_t, t, eps, eps, index=torch.arange(3))
    yield "index is numbers, one for each row", lambda: recorder.update(x_t, t, eps, eps, index=["a"] * 4)
    yield "t is numbers, one for each row, not 'a'", lambda: recorder.update(x_t, "a", eps, eps)
    yield "t is not among 0 to 999", lambda: recorder.update(x_t, t + 0.5, eps, eps)
    yield "x_t is a tensor, not ndarray", lambda: recorder.update(x_t.numpy(), t, eps, eps)
    yield "target is a tensor, not NoneType", lambda: recorder.update(x_t, t, eps, None)
    yield "expected another Recorder, not int", lambda: recorder.merge(3)


def test_bad_input_is_named_and_nothing_is_added():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE)
    x_t, t, eps, _ = next(batches(1, count=4))
    for words, call in bad(recorder, x_t, t, eps):
        with pytest.raises(TrueupError, match=words):
            call()
    assert not recorder._sums.rows.any()
    assert recorder.rows == recorder.steps == 0
    with pytest.raises(TrueupError, match="nothing was recorded yet"):
        recorder.calibration()
    assert recorder.log() == {}


def test_labels_are_checked():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, classes=(0, 1))
    x_t, t, eps, _ = next(batches(1, count=4))
    with pytest.raises(TrueupError, match="every row needs its label"):
        recorder.update(x_t, t, eps, eps)
    with pytest.raises(TrueupError, match="not among the classes 0, 1"):
        recorder.update(x_t, t, eps, eps, torch.tensor([0, 1, 2, 0]))
    with pytest.raises(TrueupError, match="y is numbers, one for each row"):
        recorder.update(x_t, t, eps, eps, ["a", "b", "a", "b"])
    with pytest.raises(TrueupError, match="y is"):
        recorder.update(x_t, t, eps, eps, torch.tensor([0, 1]))


def test_what_could_not_be_looked_at_is_told_when_it_is_read():
    """As on a GPU, where values are not looked at."""
    recorder = recorded(too_bright(0.1), steps=3)
    recorder._strays += torch.tensor([1, 0, 0])
    for read in (recorder.calibration, recorder.log, recorder.moments):
        with pytest.raises(TrueupError, match="0 to 999"):
            read()


def test_times_just_beyond_a_continuous_process_are_left_out():
    process = ContinuousVP()
    recorder = trueup.Recorder(process, "noise", SHAPE, half_life=None)
    eps = torch.randn(4, *SHAPE)
    recorder.update(eps, torch.tensor([1e-5, 0.0, 0.5, 1.0]), eps, eps)
    assert int((recorder.moments().rows > 0).sum()) == 2
    with pytest.raises(TrueupError, match=r"0\.001 to 1"):
        recorder.update(eps, torch.tensor([1.0, 10.0, 500.0, 999.0]), eps, eps)


OTHERS = {
    "process": {"process": DiscreteVP.cosine()},
    "prediction": {"prediction": "velocity"},
    "shape": {"shape": (1, 4, 8)},
    "classes": {"classes": (0, 1)},
    "levels": {"levels": [0, 500]},
    "folds": {"folds": 8},
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_another_model_is_refused(what):
    settings = {"process": PROCESS, "prediction": "noise", "shape": SHAPE}
    one, other = trueup.Recorder(**settings), trueup.Recorder(**{**settings, **OTHERS[what]})
    for act in (lambda: one.load_state_dict(other.state_dict()), lambda: one.merge(other)):
        with pytest.raises(TrueupError, match=f"another model: its {what} differs") as error:
            act()
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(TrueupError, match="not the state of a recorder"):
        one.load_state_dict({"steps": 3})


@pytest.mark.parametrize(
    "settings",
    [
        *({"half_life": value} for value in (0, "a")),
        *({"folds": value} for value in (0, 3.5)),
        *({"classes": value} for value in (["a", "b"], [0.5, 1], [0], [0, 0])),
        *({"process": value} for value in (DDPMScheduler, DiscreteVP, None)),
        *({"every": 0}, {"shape": (3,)}, {"prediction": "image"}),
    ],
)
def test_settings_that_cannot_be(settings):
    with pytest.raises(TrueupError):
        trueup.Recorder(**{"process": PROCESS, "prediction": "noise", "shape": SHAPE, **settings})


# The paper's own


@pytest.mark.parametrize("paired", [False, True])
def test_the_shallow_network_learns_a_constant_mean(paired):
    """E[eps_hat] of a network that says 0.5 + eps is 0.5; Adam and noise leave it near."""
    shallow = ShallowNetwork(PROCESS, "noise", SHAPE, paired=paired, width=32, learning_rate=3e-3)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.zeros((), requires_grad=True)
    for _ in range(200):
        eps = torch.randn(64, *SHAPE, generator=generator)
        t = torch.randint(1000, (64,), generator=generator)
        shallow.update(eps, t, 0.5 + eps + leaf, eps)
    assert leaf.grad is None
    miss = (shallow.eta(torch.tensor([100.0, 500.0, 900.0])) - 0.5).abs().mean()
    assert miss < (0.03 if paired else 0.2)


def test_the_shallow_network_tells_classes_apart():
    shallow = ShallowNetwork(
        PROCESS, "noise", SHAPE, classes=(3, 8), paired=True, width=32, learning_rate=3e-3
    )
    y = torch.tensor([3, 8]).repeat(16)
    for x_t, t, eps, _ in batches(200, count=32):
        shallow.update(x_t, t, eps + y.reshape(-1, 1, 1, 1) / 10, eps, y)
    found = shallow.eta(torch.tensor([300.0, 300.0]), torch.tensor([8, 3])).mean((1, 2, 3))
    assert found.tolist() == pytest.approx([0.8, 0.3], abs=0.1)
    with pytest.raises(TrueupError, match="labels y"):
        shallow.eta(torch.tensor([300.0]))


def test_a_recorded_fit_is_that_of_its_moments():
    recorder = recorded(too_bright(0.2), steps=20)
    one, other = recorder.calibration(), fit(recorder.moments())
    assert torch.equal(one.correction.b, other.correction.b)


# What a review found


def by_class(indexed, steps=150, **settings):
    """An ideal network of two classes, one of them five images that come round again and again."""
    few = DATA.sample(5, seed=77)
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, classes=[0, 1], half_life=None, **settings)
    ideal, generator = DATA.denoiser(PROCESS), torch.Generator().manual_seed(0)
    for step, (_, t, eps, x0) in enumerate(batches(steps, 32)):
        pick = torch.randint(5, (16,), generator=generator)
        x0[:16] = few[pick]
        x_t = PROCESS.noised(x0, eps, t)
        index = torch.cat([pick, 5 + 16 * step + torch.arange(16)])
        y = torch.arange(32).lt(16).long()
        recorder.update(x_t, t, ideal.predict(x_t, t), eps, y, index=index if indexed else None)
    return recorder


def test_classes_need_to_know_their_images():
    with pytest.warns(UserWarning, match="without `index` nobody can tell how many images a class has"):
        cal = by_class(False).calibration()
    assert all(of.correction is None for of in cal.classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_class(True, 20).calibration()
        by_class(False, 20).uncalibration()  # has nothing to do with classes


def test_the_null_label_is_no_part_of_the_correction_of_all():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE, classes=[0, 1, 2], null_label=2, half_life=None)
    bright, dark = too_bright(0.2), too_bright(-0.2)
    for step, (x_t, t, eps, _) in enumerate(batches(120, 32)):
        y = torch.arange(32) % 4
        null = y >= 2
        output = torch.where(null[:, None, None, None], dark.predict(x_t, t), bright.predict(x_t, t))
        recorder.update(x_t, t, output, eps, torch.where(null, 2, y), index=32 * step + torch.arange(32))
    cal = recorder.calibration()
    assert cal.provenance["null_label"] == 2
    middle = len(cal.t) // 2
    assert float(cal.correction.shift_map()[middle].mean()) == pytest.approx(0.2, abs=0.03)
    assert float(cal.for_class(2).shift_map()[middle].mean()) == pytest.approx(-0.2, abs=0.03)
    other = trueup.Recorder(PROCESS, "noise", SHAPE, classes=[0, 1, 2])
    with pytest.raises(TrueupError):
        other.load_state_dict(recorder.state_dict())
    with pytest.raises(TrueupError, match="is not among the classes: add it"):
        trueup.Recorder(PROCESS, "noise", SHAPE, classes=[0, 1], null_label=2)
    with pytest.raises(TrueupError, match=r"classes are a list of labels, such as range\(10\), not 10"):
        trueup.Recorder(PROCESS, "noise", SHAPE, classes=10)


def test_times_between_whole_timesteps_are_refused():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE)
    x_t, t, eps, _ = next(batches(1, 8))
    with pytest.raises(TrueupError, match="whole timesteps of this process"):
        recorder.update(x_t, t / 1000, x_t, eps)


def test_what_models_of_diffusers_return_is_taken_as_it_is():
    net = tiny_unet(sample_size=8)
    recorder = trueup.Recorder(PROCESS, "noise", (1, 8, 8))
    x_t, t = torch.randn(4, 1, 8, 8), torch.tensor([1, 300, 600, 999])
    with torch.no_grad():
        recorder.update(x_t, t, net(x_t, t), x_t, index=[0, 1, 2, 3])
    assert recorder.rows == 4


def test_what_was_recorded_is_what_the_network_predicts():
    """One scheduler, two predictions: a correction of one, taken for the other, makes outputs worse."""
    unet, scheduler = tiny_unet(), DDPMScheduler()
    recorder = trueup.Recorder(scheduler, "v_prediction", (1, 8, 8))
    recorder.update(torch.randn(4, 1, 8, 8), torch.tensor([1, 300, 600, 999]), *torch.randn(2, 4, 1, 8, 8))
    words = "a velocity prediction was recorded, and this network makes a noise one: .*Recorder.*'noise'"
    with pytest.raises(TrueupError, match=words):
        recorder.calibration(DDPMPipeline(unet, scheduler))
    predicts = DDPMScheduler(prediction_type="v_prediction")
    assert recorder.calibration(DDPMPipeline(unet, predicts)).parametrization.name == "velocity"


def test_a_batch_of_no_rows_adds_nothing():
    """As a loop may be left with that records some of its rows: x_t[keep]."""
    one, other = (trueup.Recorder(PROCESS, "noise", SHAPE, classes=[0, 1], half_life=None) for _ in range(2))
    for x_t, t, eps, _ in batches(3, 8):
        none, y = torch.zeros(8, dtype=torch.bool), torch.arange(8) % 2
        one.update(x_t, t, eps, eps, y)
        other.update(x_t[none], t[none], eps[none], eps[none], y[none])
        other.update(x_t, t, eps, eps, y)
    assert one.rows == other.rows
    assert all(torch.equal(sums(one)[name], sums(other)[name]) for name in SUMS)


def test_rows_that_are_all_nonsense_are_nothing_to_log():
    recorder = trueup.Recorder(PROCESS, "noise", SHAPE)
    x_t, t, eps, _ = next(batches(1, 8))
    recorder.update(x_t, t, x_t * torch.nan, eps)
    assert recorder.log() == {}


@pytest.mark.parametrize("indexed", [True, False])
def test_batches_counted_together_are_those_counted_one_by_one(monkeypatch, indexed):
    """As on a GPU: copies of a few batches wait, each with its own weight, and whoever asks settles them."""
    how = {"shape": (2, 4, 4), "classes": [0, 1], "half_life": 3}
    alone, together = (trueup.Recorder(DiscreteVP.linear(), "noise", **how) for _ in range(2))
    generator, waited = torch.Generator().manual_seed(0), set()
    for step in range(40):
        rows = 5 + step % 2
        x_t, output, target = torch.randn(3, rows, 2, 4, 4, generator=generator)
        t, y = (torch.randint(n, (rows,), generator=generator) for n in (1000, 2))
        index = torch.arange(rows) + 10 * step if indexed or step == 4 else None
        monkeypatch.setattr(recording, "_gathers", lambda device: False)
        alone.update(x_t, t, output, target, y, index)
        monkeypatch.setattr(recording, "_gathers", lambda device: True)
        together.update(x_t, t, output, target, y, index)
        for used in (x_t, output, target, t, y):
            used.zero_()  # as a loop may that keeps its tensors
        assert together.rows == alone.rows
        waited.add(len(together._waiting))
    assert waited == set(range(recording._TOGETHER))
    assert together._waiting
    for name in ("rows", "first", "second", "data_first", "data_second"):
        one, other = (getattr(made.moments(), name) for made in (alone, together))
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12 * float(one.abs().max()))
        assert one.any()
    assert not together._waiting
    state = together.state_dict()
    assert all(torch.equal(together.state_dict()["sums"][k], v) for k, v in state["sums"].items())
