"""Run directories, out-of-memory halving, skipped images and images that occur twice, from Python."""

import pytest
import torch

import trueup
from trueup.errors import DataError, TrueupError
from trueup.estimate import Moments, fit, merge
from trueup.estimate import measure as measure_images
from trueup.estimate import measuring as room
from trueup.estimate.diagnose import diagnose
from trueup.estimate.run import Run
from trueup.estimate.stored import SUMS
from trueup.files import load_tensors, save_tensors
from trueup.images import Images, Samples

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


def measure(denoiser, data, *, batch_size=None, count=None, skip_bad=False, **settings):
    images = Images(data, count=count, skip_bad=skip_bad)
    settings = {"levels": LEVELS, "trust": True, "progress": False, **settings}
    return measure_images(denoiser.with_batch_size(batch_size), images, **settings)


def equal(one, other):
    names = ("rows", "first", "second", "data_rows", "data_first", "data_second", "indices")
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


def test_stopping_after_any_batch_changes_not_one_bit(mixture, tmp_path, monkeypatch):
    x0 = mixture.sample(30).float()
    whole = measure(off(mixture), x0, batch_size=4)
    monkeypatch.setattr(room, "_CHEAP", 1e9)  # however busy the disk is
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
            measure(off(mixture), x0, batch_size=4, run=folder)
        monkeypatch.setattr(Run, "save", save)
        evaluations = []
        denoiser = off(mixture)
        inner = denoiser._call
        denoiser._call = lambda x_t, t, inner=inner, seen=evaluations: (seen.append(len(x_t)), inner(x_t, t))[
            1
        ]
        resumed = measure(denoiser, x0, batch_size=4, run=folder)
        assert equal(resumed, whole)
        assert resumed.images == 30
        assert sum(evaluations) == 2 * (30 - 4 * stop)  # nothing twice


def test_two_processes_do_not_share_a_run(mixture, tmp_path):
    with Run(tmp_path / "run"), pytest.raises(TrueupError, match="another process is working"):
        measure(off(mixture), mixture.sample(4), run=tmp_path / "run")
    measure(off(mixture), mixture.sample(4), run=tmp_path / "run")


def test_leftovers_of_a_killed_process_are_removed(mixture, tmp_path):
    leftover = tmp_path / ".checkpoint.safetensors.tmp-0123abcd"
    leftover.write_bytes(b"half")
    measure(off(mixture), mixture.sample(4), run=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.safetensors"]


def test_other_settings_are_named(mixture, tmp_path):
    x0 = mixture.sample(8).float()
    measure(off(mixture), x0, run=tmp_path)
    with pytest.raises(TrueupError, match="another seed and another set of levels"):
        measure(off(mixture), x0, levels=[0.5], seed=4, run=tmp_path)
    with pytest.raises(DataError, match="sample 0 of the array is not what it was"):
        measure(off(mixture), x0.flip(0), run=tmp_path)
    with pytest.raises(DataError, match=r"sample 4 of .* is not in the array: put the images back"):
        measure(off(mixture), x0[:4], run=tmp_path)


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
def test_running_out_of_memory_halves_the_batch_and_changes_nothing(mixture, holds, every, monkeypatch):
    x0 = mixture.sample(48).float()
    monkeypatch.setattr(room, "_AT_ONCE", 200)  # a level or two at a time
    results = []
    for network in (Small(64), Small(holds, every)):
        denoiser = trueup.Denoiser(
            network, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None
        )
        results.append(measure(denoiser, x0, levels=[0.2, 0.4, 0.6, 0.8], batch_size=16))
    whole, halved = results
    assert torch.equal(whole.rows, halved.rows)
    size = whole.second.abs().max()
    assert torch.allclose(whole.first, halved.first, rtol=0, atol=1e-6 * float(whole.first.abs().max()))
    assert torch.allclose(whole.second, halved.second, rtol=0, atol=1e-6 * float(size))
    if every == 1:
        assert max(network.sizes) <= holds
        assert network.sizes.count(holds) > len(network.sizes) / 2  # and it was not halved further


def test_not_even_one_sample_fits(mixture):
    denoiser = trueup.Denoiser(
        Small(0), trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None
    )
    with pytest.raises(TrueupError, match="not enough memory"):
        measure(denoiser, mixture.sample(4))


def test_skipped_images_leave_the_rest_as_they_are(mixture, tmp_path):
    good = [x.float() for x in mixture.sample(12)]
    spoiled = [torch.full_like(good[0], torch.nan) if i in (3, 7) else x for i, x in enumerate(good)]
    settings = {"skip_bad": True, "run": tmp_path}
    moments = measure(off(mixture), spoiled, count=9, **settings)
    assert moments.images == 9
    more = measure(off(mixture), spoiled, **settings)
    assert more.images == 10
    assert sorted(reason.split()[1] for reason in more.skipped) == ["3", "7"]
    with pytest.raises(DataError, match="sample 3"):
        measure(off(mixture), spoiled)


def test_a_run_in_which_every_image_was_bad_can_be_begun_again(mixture, tmp_path):
    good = mixture.sample(3).float()
    settings = {"skip_bad": True, "run": tmp_path}
    for _ in range(2):
        with pytest.raises(DataError, match="holds no samples that can be used: sample 0"):
            measure(off(mixture), torch.full_like(good, torch.nan), **settings)
    assert measure(off(mixture), good, **settings).images == 3


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
    if kind is list:  # of which some are read in an order that is drawn
        x0[:, :, 0, 0] = -0.9
    whole = measure(denoiser, kind(x0), batch_size=2, count=6)
    measure(denoiser, kind(x0), batch_size=2, count=4, run=tmp_path)
    assert equal(measure(denoiser, kind(x0), count=6, run=tmp_path), whole)
    changed = x0.clone()
    changed[0] += 0.01  # the first is looked at again whatever the kind
    with pytest.raises(DataError, match=r"sample 0 of .* is not what it was"):
        measure(denoiser, kind(changed.clamp(-1, 1)), run=tmp_path)


def test_a_bad_image_at_the_end_is_counted_once(mixture, tmp_path):
    good = [x.float() for x in mixture.sample(7)]
    spoiled = [*good[:5], torch.full_like(good[0], torch.nan)]
    settings = {"skip_bad": True, "run": tmp_path, "batch_size": 2}
    for _ in range(2):
        assert len(measure(off(mixture), spoiled, **settings).skipped) == 1
    more = measure(off(mixture), [*spoiled, *good[5:]], **settings)
    assert more.images == 7
    assert len(more.skipped) == 1


def test_labels_are_asked_for_before_anything_is_evaluated(mixture):
    def network(x_t, t, y):
        raise AssertionError("was evaluated")

    denoiser = trueup.Denoiser(
        network, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None, conditional=True
    )
    with pytest.raises(DataError, match="must come with labels"):
        measure(denoiser, mixture.sample(4))
    with pytest.raises(DataError, match="must come with labels"):
        diagnose(denoiser, next(Samples(mixture.sample(8), mixture.shape, None).batches(8)))


def test_costly_checkpoints_are_written_less_often(mixture, tmp_path, monkeypatch):
    saves = []
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda self, *args: (saves.append(1), save(self, *args)))
    monkeypatch.setattr(room, "_CHEAP", 0.0)
    monkeypatch.setattr(room, "_SAVING", 1e9)
    x0 = mixture.sample(20)
    moments = measure(off(mixture), x0, batch_size=2, run=tmp_path)
    assert len(saves) == 2  # the first, to know what it costs, and the last
    monkeypatch.undo()
    assert equal(measure(off(mixture), x0, run=tmp_path), moments)


def test_what_belongs_to_an_image_that_occurs_twice_counts_once(mixture):
    x0 = mixture.sample(20).float()
    once = measure(off(mixture), x0)
    six_times = measure(off(mixture), x0.repeat(6, 1, 1, 1))
    assert six_times.images == 20
    assert equal(six_times, once)


def test_images_of_a_group_share_a_fold(mixture):
    """Copies that differ by a hair would vouch for each other, and their interval would be too short."""
    x0 = mixture.sample(16).float()
    copies = torch.cat([x0 + 1e-4 * i for i in range(8)])
    groups = [i % 16 for i in range(len(copies))]

    def error(groups):
        images = Images(copies, groups=groups)
        moments = measure_images(off(mixture), images, levels=LEVELS, trust=True, progress=False)
        return fit(moments, family="shift").evidence.loss.error

    # 8 copies of an image are nearly one observation (not quite: each has its own noise).
    assert error(groups)[0] > 1.5 * error(None)[0]
    moments = measure_images(off(mixture), Images(copies, groups=groups), levels=LEVELS, trust=True)
    assert set(moments.rows[0, :, 0].tolist()) <= {8.0 * k for k in range(17)}


def test_labels_that_go_round_do_not_become_folds(mixture):
    """Data whose kind cycles with a period that divides the folds' number has folds of mixed kinds."""
    bright = torch.arange(320) % 16 < 8
    x0 = mixture.sample(320).float() + bright.float().reshape(-1, 1, 1, 1)
    moments = measure(off(mixture), x0)
    share = (moments.data_first[0, :, 0, 0] / moments.data_rows[0]).std()
    scattered = x0[torch.randperm(320, generator=torch.Generator().manual_seed(0))]
    other = measure(off(mixture), scattered)
    expected = (other.data_first[0, :, 0, 0] / other.data_rows[0]).std()
    assert share < 2 * expected  # with index % 16 each fold is all bright or all dark: 4.5 times


def test_shards_need_noise_of_their_own(mixture, tmp_path):
    x0 = mixture.sample(24).float()
    settings = {"levels": LEVELS, "trust": True, "progress": False}
    first = measure_images(off(mixture), Images(x0[:10]), **settings)
    same = measure_images(off(mixture), Images(x0[10:]), **settings)
    with pytest.raises(TrueupError, match="both hold sample 0"):
        first + same
    rest = measure_images(off(mixture), Images(x0[10:], offset=10), **settings)
    first.save(tmp_path / "first")
    together = Moments.load(tmp_path / "first") + rest
    whole = measure(off(mixture), x0)
    assert together.images == 24
    size = float(whole.second.abs().max())
    assert torch.allclose(together.second, whole.second, rtol=0, atol=1e-12 * size)
    with pytest.raises(TrueupError, match="the same image is in both"):
        together + measure_images(off(mixture), Images(x0[:4], offset=100), **settings)


def test_a_run_knows_its_labels(mixture, tmp_path):
    def network(x_t, t, y):
        return 0.9 * x_t + 0.01 * y.reshape(-1, 1, 1, 1)

    denoiser = trueup.Denoiser(
        network, trueup.process.ContinuousVP(), "noise", mixture.shape, data_range=None, conditional=True
    )
    x0 = mixture.sample(1200).float()
    labels = [i % 10 for i in range(1200)]
    settings = {"levels": LEVELS, "trust": True, "progress": False, "run": tmp_path}
    measure_images(denoiser.with_batch_size(400), Images(x0, labels=labels), **settings)
    labels[777] = 3
    with pytest.raises(DataError, match="labels are not what they were"):
        measure_images(denoiser, Images(x0, labels=labels), **settings)


def test_a_random_subset_is_used_and_grows_with_the_count(mixture, tmp_path):
    x0 = mixture.sample(100).float()
    few = measure(off(mixture), x0, count=10, run=tmp_path)
    assert sorted(few.indices.tolist()) != list(range(10))  # not the first of a folder that may be sorted
    more = measure(off(mixture), x0, count=30, run=tmp_path)
    assert set(few.indices.tolist()) <= set(more.indices.tolist())
    assert more.images == 30
    with pytest.raises(DataError, match="more than the 5 asked for"):
        measure(off(mixture), x0, count=5, run=tmp_path)


def test_shares_that_were_dealt_otherwise_are_not_merged(mixture):
    """Each would be the k-th of n, and images would be in none of them."""
    x0 = mixture.sample(64).float()

    def share(k, count=32, batch_size=4, x0=x0):
        how = {"levels": LEVELS, "trust": True, "progress": False, "share": (k, 2)}
        return measure_images(off(mixture).with_batch_size(batch_size), Images(x0, count=count), **how)

    assert merge([share(1), share(2)]).images == 32
    for other in (share(2, count=8), share(2, x0=-x0)):
        with pytest.raises(TrueupError, match="are not of the same images"):
            merge([share(1), other])
    with pytest.raises(TrueupError, match="share 1 of 2 was dealt in batches of 4, share 2 of 2 of 6"):
        merge([share(1), share(2, batch_size=6)])


def emptied(tensors):
    """What moments of no samples would look like."""
    for name in ("indices", "digests", "labels", "groups"):
        tensors[name] = tensors[name][:0]
    for name in SUMS:
        tensors[name].zero_()


def tampered(file, change):
    meta, tensors = load_tensors(file, "a run")
    change(meta, tensors)
    for name in ("kind", "format"):
        meta.pop(name, None)
    save_tensors(file, "a run", meta, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, tensors: tensors["second"].mul_(3),
        lambda meta, tensors: tensors["rows"].mul_(-1),
        lambda meta, tensors: tensors["first"].mul_(1e9),
        lambda meta, tensors: tensors.pop("labels"),
        lambda meta, tensors: tensors.__setitem__("labels", tensors["labels"][:1]),
        lambda meta, tensors: meta.pop("settings"),
        lambda meta, tensors: meta["moments"].__setitem__("mean_only", -3),
        lambda meta, tensors: meta["moments"].__setitem__("shape", "nonsense"),
        lambda meta, tensors: meta.__setitem__("signed", 7),
        lambda meta, tensors: meta["moments"].__setitem__("mean_only", 1),
        lambda meta, tensors: meta["moments"].__setitem__("skipped", "none"),
        lambda meta, tensors: tensors["rows"].mul_(1.001),
        lambda meta, tensors: tensors["squares"].mul_(0.999),
        lambda meta, tensors: tensors.__setitem__("indices", tensors["indices"][None]),
        lambda meta, tensors: emptied(tensors),
    ],
)
def test_a_checkpoint_that_was_changed_is_not_gone_on_from(mixture, tmp_path, change):
    """Its checksum is right again, but its sums, counts or labels cannot be those of a run."""
    x0 = mixture.sample(8).float()
    measure(off(mixture), x0, count=6, run=tmp_path)
    try:
        tampered(tmp_path / "checkpoint.safetensors", change)
    except TrueupError:
        return  # could not even be written
    with pytest.raises(TrueupError, match=r"delete it, and what it holds is measured again"):
        measure(off(mixture), x0, run=tmp_path)


def test_a_sample_that_the_data_does_not_have_is_named(mixture, tmp_path):
    """Of many only some are looked at again; that none is beyond the data costs nothing to see."""
    x0 = mixture.sample(60).float()
    images = Images(x0, labels=[0] * 60)
    settings = {"levels": LEVELS, "trust": True, "progress": False, "run": tmp_path}
    measure_images(off(mixture), images, **settings)

    def far(meta, tensors):
        tensors["indices"][1] = 2**62

    tampered(tmp_path / "checkpoint.safetensors", far)
    with pytest.raises(DataError, match=r"is not in the array: put the images back"):
        measure_images(off(mixture), images, **settings)


def test_a_file_is_not_deleted_before_what_replaces_it_was_read(mixture, tmp_path):
    x0 = mixture.sample(8).float()
    measure(off(mixture), x0, count=4, run=tmp_path)
    file, other = (tmp_path / f"checkpoint{n}.safetensors" for n in ("", "-1"))
    other.write_bytes(file.read_bytes())
    measure(off(mixture), x0, count=6, run=tmp_path)
    other.write_bytes(file.read_bytes())
    file.unlink()
    measure(off(mixture), x0, count=4, run=tmp_path / "few")
    (tmp_path / "few" / "checkpoint.safetensors").rename(file)
    tampered(other, lambda meta, tensors: tensors["rows"].mul_(1.001))
    with pytest.raises(TrueupError, match=r"checkpoint-1.safetensors cannot be trusted"):
        measure(off(mixture), x0, run=tmp_path)
    assert file.exists()
    other.unlink()
    assert measure(off(mixture), x0, run=tmp_path).images == 8


def test_a_damaged_checkpoint_is_named(mixture, tmp_path):
    x0 = mixture.sample(8).float()
    measure(off(mixture), x0, run=tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(
        TrueupError, match=r"checkpoint.safetensors cannot be trusted .*checksum.*: delete it"
    ):
        measure(off(mixture), x0, run=tmp_path)
