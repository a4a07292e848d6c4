"""Run directories, out-of-memory halving and skipped images, from Python."""

import pytest
import torch

import trueup
import trueup.diagnose
from trueup.errors import DataError, TrueupError
from trueup.estimate.run import Run

LEVELS = [0.2, 0.6]


def off(mixture):
    exact = mixture.denoiser(trueup.process.ContinuousVP())
    return trueup.Denoiser(
        lambda x_t, t: 1.1 * exact(x_t, t) + 0.05,
        trueup.process.ContinuousVP(),
        "noise",
        mixture.shape,
        data_range=None,
    )


def equal(one, other):
    names = ("rows", "first", "second", "data_first", "data_second")
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


def test_stopping_after_any_batch_changes_not_one_bit(mixture, tmp_path, monkeypatch):
    x0 = mixture.sample(30).float()
    whole = trueup.measure(off(mixture), x0, levels=LEVELS, batch_size=4)
    save = Run.save
    for stop in range(1, 8):
        saves = []

        def interrupted(self, *args, saves=saves, stop=stop):
            save(self, *args)
            saves.append(1)
            if len(saves) == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(Run, "save", interrupted)
        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            trueup.measure(off(mixture), x0, levels=LEVELS, batch_size=4, run=folder)
        monkeypatch.setattr(Run, "save", save)
        evaluations = []
        denoiser = off(mixture)
        inner = denoiser._call
        denoiser._call = lambda x_t, t, inner=inner, seen=evaluations: (seen.append(len(x_t)), inner(x_t, t))[
            1
        ]
        resumed = trueup.measure(denoiser, x0, levels=LEVELS, run=folder)
        assert equal(resumed, whole)
        assert resumed.images == 30
        assert sum(evaluations) == 2 * (30 - 4 * stop)  # nothing twice


def test_the_batch_size_of_a_run_is_kept(mixture, tmp_path):
    x0 = mixture.sample(20).float()
    trueup.measure(off(mixture), x0, levels=LEVELS, batch_size=3, images=6, run=tmp_path / "run")
    with Run(tmp_path / "run") as run:
        fresh = trueup.measure(off(mixture), x0, levels=LEVELS, images=1)
        run.resume(fresh, trueup.data.Samples(x0, mixture.shape, None))
        assert run.batch_size == 3
        assert run.position == 6


def test_two_processes_do_not_share_a_run(mixture, tmp_path):
    with Run(tmp_path / "run"), pytest.raises(TrueupError, match="another process is working"):
        trueup.measure(off(mixture), mixture.sample(4), levels=LEVELS, run=tmp_path / "run")
    trueup.measure(off(mixture), mixture.sample(4), levels=LEVELS, run=tmp_path / "run")


def test_leftovers_of_a_killed_process_are_removed(mixture, tmp_path):
    leftover = tmp_path / ".checkpoint.safetensors.tmp-abc"
    leftover.write_bytes(b"half")
    trueup.measure(off(mixture), mixture.sample(4), levels=LEVELS, run=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.safetensors", "lock"]


def test_other_settings_are_named(mixture, tmp_path):
    x0 = mixture.sample(8).float()
    trueup.measure(off(mixture), x0, levels=LEVELS, run=tmp_path)
    with pytest.raises(TrueupError, match="another seed and another set of levels"):
        trueup.measure(off(mixture), x0, levels=[0.5], seed=4, run=tmp_path)
    with pytest.raises(DataError, match="sample 0 of the array is not what it was"):
        trueup.measure(off(mixture), x0.flip(0), levels=LEVELS, run=tmp_path)
    with pytest.raises(DataError, match="is not what it was"):
        trueup.measure(off(mixture), x0[:4], levels=LEVELS, run=tmp_path)


class Small(torch.nn.Module):
    """A network on a device that holds so many samples at a time."""

    def __init__(self, holds, every=1):
        super().__init__()
        self.holds, self.every, self.calls, self.sizes = holds, every, 0, []

    def forward(self, x_t, t):
        self.calls += 1
        if len(x_t) > self.holds and self.calls % self.every == 0:
            raise torch.OutOfMemoryError("out of memory")
        self.sizes.append(len(x_t))
        return 0.9 * x_t + 0.1


@pytest.mark.parametrize(("holds", "every"), [(4, 1), (1, 1), (5, 3), (4, 7)])
@pytest.mark.parametrize("antithetic", [False, True])
def test_running_out_of_memory_halves_the_batch_and_changes_nothing(
    mixture, holds, every, antithetic, monkeypatch
):
    x0 = mixture.sample(48).float()
    monkeypatch.setattr(trueup.estimate.evaluate, "_AT_ONCE", 200)  # a level or two at a time
    results = []
    for network in (Small(64), Small(holds, every)):
        denoiser = trueup.Denoiser(
            network, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None
        )
        results.append(
            trueup.measure(denoiser, x0, levels=[0.2, 0.4, 0.6, 0.8], batch_size=16, antithetic=antithetic)
        )
    whole, halved = results
    assert torch.equal(whole.rows, halved.rows)
    assert torch.allclose(whole.first, halved.first, rtol=1e-9, atol=1e-6)
    assert torch.allclose(whole.second, halved.second, rtol=1e-6, atol=1e-6)
    if every == 1:
        assert max(network.sizes) <= holds
        assert network.sizes.count(holds) > len(network.sizes) / 2  # and it was not halved further


def test_not_even_one_sample_fits(mixture):
    denoiser = trueup.Denoiser(
        Small(0), trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None
    )
    with pytest.raises(TrueupError, match="not enough memory"):
        trueup.estimate.evaluate.add_batch(
            trueup.measure(off(mixture), mixture.sample(2), levels=LEVELS),
            denoiser,
            next(trueup.data.Samples(mixture.sample(4), mixture.shape, None).batches(4)),
            seed=0,
        )


def test_skipped_images_leave_the_rest_as_they_are(mixture, tmp_path):
    good = [x.float() for x in mixture.sample(12)]
    spoiled = [torch.full_like(good[0], torch.nan) if i in (3, 7) else x for i, x in enumerate(good)]
    settings = {"levels": LEVELS, "skip_bad": True, "run": tmp_path}
    moments = trueup.measure(off(mixture), spoiled, images=9, **settings)
    assert moments.images == 9  # 0..10 without 3 and 7
    assert len(moments.skipped) == 2
    assert "sample 3" in moments.skipped[0]
    more = trueup.measure(off(mixture), spoiled, **settings)
    assert more.images == 10
    assert len(more.skipped) == 2
    with pytest.raises(DataError, match="sample 3"):
        trueup.measure(off(mixture), spoiled, levels=LEVELS)


def test_a_run_in_which_every_image_was_bad_can_be_begun_again(mixture, tmp_path):
    good = mixture.sample(3).float()
    settings = {"levels": LEVELS, "skip_bad": True, "run": tmp_path}
    for _ in range(2):
        with pytest.raises(DataError, match="holds no samples that can be used: sample 0"):
            trueup.measure(off(mixture), torch.full_like(good, torch.nan), **settings)
    assert trueup.measure(off(mixture), good, **settings).images == 3


def float_images(mixture):
    """Six in -1..1, of which only the first two show that they use the values below zero."""
    x0 = mixture.sample(6).float().clamp(-1, 1)
    x0[2:] = x0[2:].abs()
    x0[:2, :, 0, 0] = -0.9
    return x0


class Stream:
    """Samples that can only be read in order, again and again."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.parametrize("kind", [Stream, list, lambda x: (row for row in x)])
def test_streams_and_lists_go_on_where_they_were(mixture, tmp_path, kind):
    denoiser = trueup.Denoiser(
        lambda x_t, t: 0.9 * x_t, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=(-1, 1)
    )
    x0 = float_images(mixture)
    whole = trueup.measure(denoiser, kind(x0), levels=LEVELS, batch_size=2)
    trueup.measure(denoiser, kind(x0), levels=LEVELS, batch_size=2, images=4, run=tmp_path)
    assert equal(trueup.measure(denoiser, kind(x0), levels=LEVELS, run=tmp_path), whole)
    changed = x0.clone()
    changed[0] += 0.01  # the first is looked at again whatever the kind
    with pytest.raises(DataError, match=r"sample 0 of .* is not what it was"):
        trueup.measure(denoiser, kind(changed.clamp(-1, 1)), levels=LEVELS, run=tmp_path)


def test_a_bad_image_at_the_end_is_counted_once(mixture, tmp_path):
    good = [x.float() for x in mixture.sample(7)]
    spoiled = [*good[:5], torch.full_like(good[0], torch.nan)]
    settings = {"levels": LEVELS, "skip_bad": True, "run": tmp_path, "batch_size": 2}
    for _ in range(2):
        assert len(trueup.measure(off(mixture), spoiled, **settings).skipped) == 1
    more = trueup.measure(off(mixture), [*spoiled, *good[5:]], **settings)
    assert more.images == 7
    assert len(more.skipped) == 1


def test_labels_are_asked_for_before_anything_is_evaluated(mixture):
    def network(x_t, t, y):
        raise AssertionError("was evaluated")

    denoiser = trueup.Denoiser(
        network, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None, conditional=True
    )
    with pytest.raises(DataError, match="must come with labels"):
        trueup.measure(denoiser, mixture.sample(4), levels=LEVELS)
    with pytest.raises(DataError, match="must come with labels"):
        trueup.diagnose.diagnose(
            denoiser, next(trueup.data.Samples(mixture.sample(8), mixture.shape, None).batches(8))
        )


def test_costly_checkpoints_are_written_less_often(mixture, tmp_path, monkeypatch):
    saves = []
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda self, *args: (saves.append(1), save(self, *args)))
    monkeypatch.setattr(trueup.estimate.collect, "_CHEAP", 0.0)
    monkeypatch.setattr(trueup.estimate.collect, "_SAVING", 1e9)
    x0 = mixture.sample(20)
    moments = trueup.measure(off(mixture), x0, levels=LEVELS, batch_size=2, run=tmp_path)
    assert len(saves) == 2  # the first, to know what it costs, and the last
    monkeypatch.undo()
    assert equal(trueup.measure(off(mixture), x0, levels=LEVELS, run=tmp_path), moments)
