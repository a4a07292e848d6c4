"""Data too big to list: tar shards, streams, samples of them; each image is read once, by who uses it."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

import trueup
from trueup.denoiser import Denoiser
from trueup.errors import DataError
from trueup.estimate import measure
from trueup.images import Images, Ranks, Samples, loading, shards
from trueup.images.tars import members
from trueup.process import ContinuousVP

from commandline import refused, trueup_command

SHAPE, PIXELS = (3, 6, 5), (0.0, 255.0)


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def encoded(seed: int, kind: str = "png") -> bytes:
    file = io.BytesIO()
    if kind == "npy":
        np.save(file, pixels(seed))
    else:
        Image.fromarray(pixels(seed)).save(file, "PNG" if kind == "png" else kind)
    return file.getvalue()


def planes(seeds) -> torch.Tensor:
    """What a model must be given for these pictures."""
    return torch.stack([torch.from_numpy(pixels(seed)).movedim(-1, 0).float() for seed in seeds])


def write_tar(path, files, form=tarfile.USTAR_FORMAT):
    """A tar file as the standard library writes it."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shards(folder, shards=3, each=4, told=("cls", "txt")):
    """Pictures 0, 1, ... in shards, with a class and a caption each."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        files = {}
        for k in range(shard * each, (shard + 1) * each):
            files[f"{k:05d}.png"] = encoded(k)
            files |= {f"{k:05d}.cls": str(k % 7).encode()} if "cls" in told else {}
            files |= {f"{k:05d}.txt": f"picture {k}".encode()} if "txt" in told else {}
        write_tar(folder / f"{shard:03d}.tar", files)
    return folder


def samples_of(source, vocabulary=None, conditional=None, **images) -> Samples:
    how = {"conditional": conditional if vocabulary is None else True, "vocabulary": vocabulary}
    return Samples(Images(source, **images), SHAPE, PIXELS, **how)


def everything(data: Samples, **how):
    batches = list(data.batches(4, **how))
    return torch.cat([b.x0 for b in batches]), torch.cat([b.index for b in batches]).tolist(), batches


class Texts:
    """A vocabulary that keeps what it is told."""

    def numbers(self, labels):
        self.said = [*getattr(self, "said", []), *labels]
        return torch.arange(len(labels))


class Stream(IterableDataset):
    """Rows, in order, again and again; counts what it gave."""

    def __init__(self, rows):
        self.rows, self.given = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.given += 1
            yield row


# Shards


@pytest.mark.parametrize("name", ["{000..002}.tar", "*.tar", "", "{000,001,002}.tar", "00{0..2}.tar"])
def test_shards_hold_the_pictures_that_were_put_there(tmp_path, name):
    data = samples_of(str(write_shards(tmp_path / "s") / name))
    x0, index, batches = everything(data)
    assert torch.equal(x0, planes(range(12)))
    assert index == list(range(12))
    assert torch.cat([b.y for b in batches]).tolist() == [k % 7 for k in range(12)]
    texts = Texts()
    everything(samples_of(str(tmp_path / "s" / name), texts))
    assert texts.said == [f"picture {k}" for k in range(12)]


def test_one_tar_is_a_shard(tmp_path):
    write_shards(tmp_path / "s")
    x0, _, _ = everything(samples_of(tmp_path / "s" / "001.tar"))
    assert torch.equal(x0, planes(range(4, 8)))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path, form):
    long = "b" * 90 + "/" + "a" * 90  # does not fit into a header
    names = ["a.png", "d/e/f.png", "ünicode.png", "._a.png", f"{long}.png", "z.bin"]
    contents = {name: random.Random(name).randbytes(37 * k) for k, name in enumerate(names)}
    path = write_tar(tmp_path / "a.tar", contents, form)
    with tarfile.open(path, "a", format=form) as tar:
        tar.addfile(tarfile.TarInfo("dir/"))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isfile()]
    assert [tuple(member) for member in members(path)] == expected


def test_files_that_webdataset_writes(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    pattern = str(tmp_path / "out-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=5, verbose=0) as sink:
        for k in range(12):
            row = {"__key__": f"a/{k:06d}", "png": pixels(k), "cls": k, "json": {"caption": f"no {k}"}}
            sink.write(row | {"features.npy": np.zeros(3)})
    with pytest.raises(DataError, match=r"out-0000.tar and 2 more hold no member that ends in .jpg"):
        samples_of(f"{tmp_path}/out-{{0000..0002}}.tar", image_column="jpg")
    texts = Texts()
    x0, _, _ = everything(samples_of(f"{tmp_path}/out-{{0000..0002}}.tar", texts))
    assert torch.equal(x0, planes(range(12)))
    assert texts.said == [f"no {k}" for k in range(12)]
    read = webdataset.WebDataset(f"{tmp_path}/out-{{0000..0002}}.tar", shardshuffle=False).decode("rgb8")
    for k, row in enumerate(read):
        assert np.array_equal(row["png"], pixels(k))  # it reads them as we do


@pytest.mark.parametrize("kind", ["png", "webp", "npy"])
def test_members_of_any_kind(tmp_path, kind):
    how = {"lossless": True} if kind == "webp" else {}
    file = io.BytesIO()
    Image.fromarray(pixels(3)).save(file, kind, **how) if kind != "npy" else np.save(file, pixels(3))
    write_tar(tmp_path / "a.tar", {f"x.{kind}": file.getvalue()})
    assert torch.equal(everything(samples_of(tmp_path / "a.tar"))[0], planes([3]))


def test_what_a_json_says(tmp_path):
    said = [{"caption": "a", "label": 4}, {"text": "b", "class": 5}, {"en": "c", "label": 6}]
    files = {}
    for k, row in enumerate(said):
        files |= {f"{k}.png": encoded(k), f"{k}.json": json.dumps(row).encode()}
    write_tar(tmp_path / "a.tar", files)
    batches = everything(samples_of(tmp_path / "a.tar"))[2]
    assert torch.cat([b.y for b in batches]).tolist() == [4, 5, 6]
    texts = Texts()
    everything(samples_of(tmp_path / "a.tar", texts, label_column="en"))
    assert texts.said == [None, None, "c"]


def test_one_of_several_images_is_named(tmp_path):
    files = {"a.left.png": encoded(1), "a.right.png": encoded(2), "a.cls": b"3", "a.other.cls": b"4"}
    path = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(
        DataError, match=r"a has several images \(left.png, right.png\): say which with image_c"
    ):
        samples_of(path)
    x0, _, (batch,) = everything(samples_of(path, image_column="right.png", label_column="other.cls"))
    assert torch.equal(x0, planes([2]))
    assert batch.y.tolist() == [4]


def test_a_sample_of_shards_is_that_of_a_folder_and_reads_nothing_else(tmp_path, monkeypatch):
    write_shards(tmp_path / "s", shards=5, each=20)
    (tmp_path / "f").mkdir()
    for k in range(100):
        (tmp_path / "f" / f"{k:05d}.png").write_bytes(encoded(k))
    opened = []
    read = shards.Stored.read
    monkeypatch.setattr(shards.Stored, "read", lambda self: opened.append(self.name) or read(self))
    for seed in (0, 1):
        opened.clear()
        data = samples_of(tmp_path / "s", count=7, seed=seed)
        x0, index, _ = everything(data)
        expected, same, _ = everything(samples_of(tmp_path / "f", count=7, seed=seed))
        assert torch.equal(x0, expected)
        assert index == same
        assert len([name for name in opened if name.endswith(".png")]) == 7
        assert data.chosen() == f"drawn with seed {seed} from 100 images in 5 shards"


def test_of_very_many_shards_some_are_listed(tmp_path, monkeypatch):
    write_shards(tmp_path / "s", shards=9, each=3)
    monkeypatch.setattr(shards, "LISTED", 4)
    monkeypatch.setattr("trueup.images.sources.LISTED", 4)
    data = samples_of(tmp_path / "s", count=12)
    assert data.chosen() == "drawn with seed 0 from 12 images in 4 of 9 shards"
    assert {tuple(samples_of(tmp_path / "s", count=5, seed=k).source.paths) for k in range(3)} != {
        tuple(data.source.paths)
    }
    with pytest.raises(DataError, match="4 of 9 shards, as many as are listed, hold 12 images, and 13 were"):
        samples_of(tmp_path / "s", count=13)
    assert len(samples_of(tmp_path / "s")) == 27  # all, since nothing was said of some


def test_the_list_is_kept_and_made_again_when_a_shard_changes(tmp_path, monkeypatch):
    folder, index = write_shards(tmp_path / "s"), tmp_path / "run" / "shards.safetensors"
    listed = []
    whole = shards._list_shard
    monkeypatch.setattr(shards, "_list_shard", lambda path, *a: listed.append(path.name) or whole(path, *a))
    for _ in range(2):
        x0, _, _ = everything(samples_of(folder, index=index))
        shards._known.clear()  # as in another process
        assert torch.equal(x0, planes(range(12)))
        assert sorted(listed) == ["000.tar", "001.tar", "002.tar"]
    time.sleep(0.01)
    write_tar(folder / "001.tar", {"x.png": encoded(50)})
    assert len(samples_of(folder, index=index)) == 9
    index.write_bytes(b"not ours")
    shards._known.clear()
    assert len(samples_of(folder, index=index)) == 9


def damaged(tmp_path, how):
    path = write_shards(tmp_path / "s", shards=1) / "000.tar"
    content = path.read_bytes()
    changed = {
        "cut": content[:1500],
        "header": content[: 1024 + 300],
        "overwritten": content[:1024] + b"x" * 512 + content[1536:],
        "gzip": b"\x1f\x8b" + content[2:],
        "other": b"nothing of the kind" * 100,
        "empty": b"",
    }[how]
    path.write_bytes(changed)
    return path


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "is truncated"),
        ("header", "is truncated"),
        ("overwritten", "is damaged: no header at byte 1,024"),
        ("gzip", r"is compressed \(gzip\): store it as a plain .tar"),
        ("other", "is no tar file"),
        ("empty", "holds no images"),
    ],
)
def test_damaged_shards_are_named(tmp_path, how, words):
    with pytest.raises(DataError, match=f"000.tar {words}"):
        samples_of(damaged(tmp_path, how))


def test_shards_that_cannot_be_used(tmp_path):
    write_tar(tmp_path / "a.tar", {"x.pth": b"1", "x.json": b"{}", "README": b"hello"})
    for source, words in (
        ("a.tar", r"holds no images: members end in .json, .pth"),
        ("{0..3}.tar", r"0.tar is not there, nor are 3 more of 4 shards"),
        ("b*.tar", "matches no file"),
        ("{x}.tar", r"\{x\} is neither a range"),
        ("{0..99999999}.tar", "names more than 1,000,000 shards"),
    ):
        with pytest.raises(DataError, match=words):
            samples_of(str(tmp_path / source))
    with pytest.raises(DataError, match=r"http://a/b.tar is no file: fetch"):
        samples_of("http://a/b.tar")
    write_tar(tmp_path / "a.tar", {"x.png": encoded(0)})
    (tmp_path / "y.png").write_bytes(encoded(1))
    with pytest.raises(DataError, match="holds both images and tar shards"):
        samples_of(tmp_path)
    done = trueup_command("check", "bundled:raw", "--data", tmp_path / "{0..3}.tar")
    refused(done, "0.tar is not there")


def test_members_that_cannot_be_used_are_named_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    bomb = io.BytesIO()
    Image.new("RGB", (100, 100)).save(bomb, "PNG")
    claims = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        claims, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 6, 5)}
    )
    objects = io.BytesIO()
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    bad = {
        "a.png": bomb.getvalue(),
        "b.npy": claims.getvalue(),
        "c.npy": objects.getvalue(),
        "d.jpg": b"none",
        "f.cls": b"1",
    }
    path = write_tar(tmp_path / "a.tar", {**bad, "e.png": encoded(5)})
    data = samples_of(path, skip_bad=True)
    assert torch.equal(everything(data)[0], planes([5]))
    assert [text.split("a.tar: ")[1][:5] for text in data.skipped] == ["a.png", "b.npy", "c.npy", "d.jpg"]
    assert "exceeds limit" in data.skipped[0]
    with pytest.raises(DataError, match=r"a.tar: a.png cannot be read as an image"):
        everything(samples_of(path))


@pytest.mark.parametrize(
    "note", [{"1.json": b"{broken"}, {"1.txt": b"\xff\xfe"}, {"1.txt": b"x" * (2**20 + 1)}]
)
def test_a_note_that_cannot_be_read_is_named_or_left_out_where_it_is_wanted(tmp_path, note):
    files = {f"{k}.png": encoded(k) for k in range(3)}
    path = write_tar(tmp_path / "a.tar", {**files, "0.txt": b"a", "2.txt": b"c", **note})
    data = samples_of(path, texts := Texts(), skip_bad=True)
    assert torch.equal(everything(data)[0], planes([0, 2]))
    assert texts.said == ["a", "c"]
    assert len(data.skipped) == 1
    assert "a.tar: 1.png, its" in data.skipped[0]
    with pytest.raises(DataError, match=r"a.tar: 1.png, its"):
        everything(samples_of(path, Texts()))
    assert torch.equal(everything(samples_of(path, conditional=False))[0], planes(range(3)))


def test_names_that_look_like_something_else(tmp_path):
    (tmp_path / "run{1}").mkdir()
    path = write_tar(tmp_path / "run{1}" / "x.tar", {"x.png": encoded(4)})
    assert torch.equal(everything(samples_of(path))[0], planes([4]))
    for drive in "cC":
        with pytest.raises(DataError, match=f"{drive}:/data/0.tar is not there"):
            samples_of(f"{drive}:/data/{{0..1}}.tar")


# Reading ahead


def test_samples_come_in_order_however_long_each_takes():
    waits = [random.Random(k).random() / 200 for k in range(40)]

    def make(k):
        time.sleep(waits[k])
        return k

    assert list(loading.ahead(iter(range(40)), make, wanted=lambda: 40, depth=8)) == list(range(40))


def test_reading_goes_on_while_the_network_works_but_not_too_far():
    stream = Stream([pixels(k) for k in range(100)])
    batches = Samples(Images(stream, count=60), SHAPE, PIXELS).batches(4)
    next(batches)
    deadline = time.monotonic() + 10
    while stream.given < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 8 <= stream.given < 60
    assert sum(len(batch) for batch in batches) == 56
    assert stream.given == 60  # and nothing that nobody uses


def test_an_error_while_reading_ahead_is_said_when_its_turn_comes():
    def rows():
        yield from (pixels(k) for k in range(6))
        raise OSError("gone")

    class Broken(Stream):
        def __iter__(self):
            return rows()

    batches = Samples(Broken([]), SHAPE, PIXELS).batches(2)
    assert [len(next(batches)) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_threads_end_with_what_they_read_for():
    before = set(threading.enumerate())
    data = Samples(Stream([pixels(k) for k in range(50)]), SHAPE, PIXELS)
    batches = data.batches(4)
    next(batches)
    batches.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert loading._leaving <= before


def test_an_interruption_does_not_wait_for_a_slow_stream():
    code = """if True:
        import os, signal, threading, time
        from trueup.images import loading

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

        def slow():
            yield 0
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            time.sleep(1000)

        try:
            print(list(loading.ahead(slow(), lambda item: item, wanted=lambda: 9, depth=4)))
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_dataset_is_asked_by_one_thread_at_a_time():
    asking, most = threading.Semaphore(1), []

    def slow():
        for k in range(4):
            most.append(asking.acquire(blocking=False))
            time.sleep(0.1)
            asking.release()
            yield k

    how = {"wanted": lambda: 4, "depth": 2}
    left = loading.ahead(slow(), lambda item: item, **how)
    next(left)
    left.close()
    assert list(loading.ahead(slow(), lambda item: item, **how)) == [0, 1, 2, 3]
    assert all(most)


# Streams


def huggingface(count=30, **more):
    datasets = pytest.importorskip("datasets")
    images = [Image.fromarray(pixels(k)) for k in range(count)]
    rows = {
        "photo": images,
        "kind": [k % 3 for k in range(count)],
        "words": [f"no {k}" for k in range(count)],
    }
    kinds = {"photo": datasets.Image(), "kind": datasets.ClassLabel(num_classes=3)}
    kinds |= {"words": datasets.Value("string")}
    for name in more:
        rows[name], kinds[name] = images, datasets.Image()
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def test_columns_are_known_by_their_types():
    dataset = huggingface()
    for source in (dataset, dataset.to_iterable_dataset()):
        x0, _, batches = everything(samples_of(source))
        assert torch.equal(x0, planes(range(30)))
        assert torch.cat([b.y for b in batches]).tolist() == [k % 3 for k in range(30)]
        texts = Texts()
        everything(samples_of(source, texts))
        assert texts.said == [f"no {k}" for k in range(30)]
    two = huggingface(other=True)
    with pytest.raises(DataError, match="several columns that could be meant: photo, other: say which"):
        samples_of(two)
    assert torch.equal(everything(samples_of(two, image_column="other"))[0], planes(range(30)))
    with pytest.raises(DataError, match="has no column 'x': it has photo, kind, words"):
        samples_of(dataset, label_column="x")


def test_some_of_a_stream_are_drawn_the_same_ones_for_the_same_seed():
    stream = huggingface().to_iterable_dataset(num_shards=5)
    seen = {}
    for seed in (0, 0, 1):
        x0, _, _ = everything(data := samples_of(stream, count=6, seed=seed))
        assert seed not in seen or torch.equal(seen[seed], x0)
        seen[seed] = x0
        more = everything(samples_of(stream, count=9, seed=seed))[0]
        assert torch.equal(more[:6], x0)  # with more of them, those are among them
        assert data.chosen() == f"the first of a stream, shuffled with seed {seed} (1,000 rows at a time)"
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], planes(range(6)))
    assert samples_of(Stream([]), count=3).chosen() == "the first of a stream, as it comes"


@pytest.mark.parametrize("kind", ["shards", "stream", "hugging face", "array"])
def test_what_is_done_is_not_read_again(tmp_path, kind, monkeypatch):
    source = {
        "shards": lambda: write_shards(tmp_path / "s"),
        "stream": lambda: Stream([pixels(k) for k in range(12)]),
        "hugging face": lambda: huggingface(12).to_iterable_dataset(num_shards=2),
        "array": lambda: np.stack([pixels(k) for k in range(12)]),
    }[kind]()
    count = None if kind == "hugging face" else 12
    data = samples_of(source, count=count)
    first = list(data.batches(4, limit=8))
    done = {int(i): int(d) for b in first for i, d in zip(b.index, b.digests, strict=True)}
    again = samples_of(source, count=count)
    read, reader = [], again._reader.read
    monkeypatch.setattr(again._reader, "read", lambda index, item: read.append(index) or reader(index, item))
    rest = list(again.batches(4, skip=done))
    whole = everything(samples_of(source, count=count))[0]
    assert torch.equal(torch.cat([b.x0 for b in (*first, *rest)]), whole)
    looked_at = {"stream": 8, "hugging face": 1}.get(kind, 0)  # some, to see that it is the same stream
    assert len(read) == 4 + looked_at


def test_a_stream_that_changed_is_noticed():
    dataset = huggingface(12)
    first = list(samples_of(dataset.to_iterable_dataset()).batches(4, limit=8))
    done = {int(i): int(d) for b in first for i, d in zip(b.index, b.digests, strict=True)}
    other = dataset.select(range(11, -1, -1)).to_iterable_dataset()
    with pytest.raises(DataError, match="sample 7 of IterableDataset is not what it was before"):
        list(samples_of(other).batches(4, skip=done))


# Ranks


class Meeting:
    """Threads that say something to each other at once."""

    def __init__(self, size):
        self.said, self.barrier = [None] * size, threading.Barrier(size, timeout=30)

    def gather(self, rank):
        def said(value):
            self.said[rank] = value
            self.barrier.wait()
            heard = list(self.said)
            self.barrier.wait()
            return heard

        return said


def by_ranks(make, size, batch=4, done=()):
    """What each of so many ranks uses, and what it read; done: what each had done before."""
    meeting, used, read = Meeting(size), [[] for _ in range(size)], [[] for _ in range(size)]

    def work(rank):
        data = make()
        reader = data._reader.read
        data._reader.read = lambda index, item: read[rank].append(index) or reader(index, item)
        ranks, skip = Ranks(rank, size, meeting.gather(rank)), dict(done[rank]) if done else {}
        for found in data.batches(
            batch, skip=skip, unique=True, mine=lambda block: block % size == rank, ranks=ranks
        ):
            used[rank].append(found)
        used[rank].append((data.duplicates, len(data.skipped), data.walked))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [u[:-1] for u in used], read, [u[-1] for u in used]


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [None, 30])
@pytest.mark.parametrize("changed", [False, True])
def test_ranks_use_the_batches_of_one_process_and_read_their_own(kind, size, count, changed):
    rows = [pixels(k) for k in range(64)]
    if changed:
        rows[5], rows[40], rows[17] = rows[2], rows[11], np.zeros((3, 3, 3), np.uint8)

    def make():
        return samples_of(rows if kind == "list" else Stream(rows), count=count, skip_bad=True)

    alone = make()
    expected = list(alone.batches(4, unique=True))
    used, read, said = by_ranks(make, size)
    assert {(alone.duplicates, len(alone.skipped), alone.walked)} == set(said)
    for block, batch in enumerate(expected):
        ours = used[block % size][block // size]
        assert torch.equal(ours.index, batch.index)
        assert torch.equal(ours.x0, batch.x0)
    assert sum(map(len, used)) == len(expected)
    if not changed:
        assert sorted(index for one in read for index in one) == sorted(
            int(i) for batch in expected for i in batch.index
        )  # each image once, by one of them


def test_ranks_go_on_where_they_were():
    rows = [pixels(k) for k in range(64)]
    rows[30] = rows[1]
    whole = list(samples_of(rows).batches(4, unique=True))
    marked = [{int(i): int(d) for i, d in zip(b.index, b.digests, strict=True)} for b in whole]
    done = [marked[0] | marked[3], marked[1], {}]
    used, read, _ = by_ranks(lambda: samples_of(rows), 3, done=done)
    ours = [tuple(batch.index.tolist()) for one in used for batch in one]
    assert sorted(ours) == sorted(tuple(b.index.tolist()) for k, b in enumerate(whole) if k not in (0, 1, 3))
    assert not {index for one in read for index in one} & {int(i) for k in (0, 1, 3) for i in whole[k].index}


# Through and through


def test_shards_are_measured_like_the_array_they_hold(tmp_path):
    net = Denoiser(
        lambda x, t: x * t[:, None, None, None], ContinuousVP(), "noise", SHAPE, data_range=(-1, 1)
    )
    how = {"levels": [0.2, 0.7], "trust": True, "progress": False}
    write_shards(tmp_path / "s", shards=3, each=10)
    array = np.stack([pixels(k) for k in range(30)])
    ours = measure(net, Images(tmp_path / "s", count=20), run=tmp_path / "run", **how)
    theirs = measure(net, Images(array, count=20), **how)
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.second, theirs.second)
    assert (tmp_path / "run" / "shards.safetensors").is_file()
    more = measure(net, Images(tmp_path / "s", count=30), run=tmp_path / "run", **how)
    assert more.images == 30
    cal = trueup.estimate.fit(ours)
    assert "images: 20, drawn with seed 0 from 30 images in 3 shards" in cal.summary()


def test_shards_are_listed_once_for_a_run(tmp_path, monkeypatch):
    net = Denoiser(
        lambda x, t, y: 0.9 * x, ContinuousVP(), "noise", SHAPE, data_range=(-1, 1), conditional=True
    )
    folder, listed, whole = write_shards(tmp_path / "s", each=8), [], shards._list_shard
    monkeypatch.setattr(shards, "_list_shard", lambda path, *a: listed.append(path.name) or whole(path, *a))
    for _ in range(2):
        shards._known.clear()  # as in another process
        how = {"levels": [0.2, 0.7], "run": tmp_path / "run", "trust": True, "progress": False}
        trueup.calibrate(net, Images(folder), per_class=True, **how)
        assert sorted(listed) == ["000.tar", "001.tar", "002.tar"]


def test_shards_from_the_command_line(tmp_path):
    images = np.load(trueup.files.bundled("bundled:images"))[:24]
    for shard in range(2):
        files = {}
        for k in range(12 * shard, 12 * shard + 12):
            file = io.BytesIO()
            np.save(file, images[k])
            files[f"{k}.npy"] = file.getvalue()
        write_tar(tmp_path / f"{shard}.tar", files)
    out = tmp_path / "a.trueup.safetensors"
    given = ("calibrate", "bundled:raw", "--data", f"{tmp_path}/{{0..1}}.tar", "--no-samples", "--images", 6)
    done = trueup_command(*given, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "images: 6, drawn with seed 0 from 24 images in 2 shards" in done.stdout
    assert trueup.load(out).evidence.images == 6
