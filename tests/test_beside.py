"""Captions and labels that lie beside pictures: tables, text files, and folders named after classes."""

import csv
import json
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup import Denoiser, Images
from trueup.errors import DataError
from trueup.images import Samples, open_images
from trueup.images.beside import labels_beside
from trueup.process import DiscreteVP

from commandline import refused, trueup_command
from tiny import save, tiny_unet

SHAPE = (1, 4, 4)


class Vocabulary:
    """Texts by number, which is a hash."""

    def settings(self):
        return {"told": "the same"}

    def __init__(self):
        self.known = {}

    def numbers(self, texts):
        found = [zlib.crc32((text or "").encode()) for text in texts]
        self.known.update(zip(found, (text or "" for text in texts), strict=True))
        return torch.tensor(found)

    def said(self, y):
        return [self.known[k] for k in y.tolist()]


def fill(folder, *names):
    """Pictures that all differ."""
    for k, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 3 * k, dtype=np.uint8)).save(path)
    return folder


def told(folder, text=True, **how):
    """What each picture of a folder, in the order of its names, is said to be."""
    vocabulary = Vocabulary() if text else None
    images = Images(folder, **how)
    samples = Samples(images, SHAPE, (-1.0, 1.0), conditional=True, vocabulary=vocabulary)
    y = [batch.y for batch in samples.batches(3)]
    if any(part is None for part in y):
        return None
    return vocabulary.said(torch.cat(y)) if text else torch.cat(y).tolist()


def table(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(rows[0]), *(row.values() for row in rows)])
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Tables


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("file", ["file_name", "file", "image", "path"])
@pytest.mark.parametrize("text", ["text", "caption", "prompt"])
def test_a_table_says_what_pictures_show(tmp_path, suffix, file, text):
    folder = fill(tmp_path / "photos", "a.png", "b.png", "sub/c.png", "d.png")
    rows = [("sub/c.png", 'a "cat",\nsaid he'), ("./a.png", "ein Hündchen"), ("b.png", ""), ("z.png", "gone")]
    rows.append((str(folder / "d.png"), "by its whole name"))
    path = table(tmp_path / f"captions{suffix}", [{"id": "7", file: f, text: t} for f, t in rows])
    expected = ["ein Hündchen", "", "by its whole name", 'a "cat",\nsaid he']
    assert told(folder, captions=path) == expected
    assert told(folder, captions=str(path)) == expected


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("column", ["label", "class"])
def test_a_table_says_classes(tmp_path, suffix, column):
    folder = fill(tmp_path / "photos", "a.png", "b.png", "c.png")
    rows = [{"file": name, column: k} for name, k in (("c.png", 4), ("a.png", 1000), ("b.png", 0))]
    path = table(tmp_path / f"classes{suffix}", rows)
    assert told(folder, text=False, captions=path) == [1000, 0, 4]


def test_pictures_without_a_caption_have_an_empty_one(tmp_path):
    folder = fill(tmp_path / "photos", "a.png", "b.png", "c.png")
    rows = [{"file": "b.png", "text": "b"}, {"file": "c.png", "text": None}, {"file": "a.png", "text": ""}]
    path = table(tmp_path / "some.jsonl", rows)
    assert told(folder, captions=path) == ["", "b", ""]
    with pytest.raises(DataError, match=r"no caption for 2 of 3 images, b.png for one: add what is missing"):
        told(folder, captions=table(tmp_path / "few.jsonl", rows[2:]))
    assert told(fill(tmp_path / "none", "a.png", "b.png")) == ["", ""]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_metadata_in_the_folder_is_found(tmp_path, suffix):
    """As Hugging Face's imagefolder has it; where it has both, each network gets what it takes."""
    folder = fill(tmp_path, "a.png", "sub/b.png")
    rows = [
        {"file_name": "sub/b.png", "text": "b", "label": 3},
        {"file_name": "a.png", "text": "a", "label": 2},
    ]
    table(folder / f"metadata{suffix}", rows)
    assert told(folder) == ["a", "b"]
    assert told(folder, text=False) == [2, 3]
    named = [{"file": "a.png", "text": "named"}, {"file": "sub/b.png", "text": ""}]
    assert told(folder, captions=table(tmp_path / "other.csv", named)) == ["named", ""]


def test_metadata_that_says_nothing_of_it_is_passed_over(tmp_path):
    folder = fill(tmp_path, "x/a.png", "y/b.png")
    rows = [{"file_name": "x/a.png", "text": "a"}, {"file_name": "y/b.png", "text": ""}]
    table(folder / "metadata.csv", rows)
    assert told(folder, text=False) == [0, 1]  # by their folders
    assert told(folder) == ["a", ""]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "file,text\nz.png,z\n", "names no image of .*photos: it names z.png, there is a.png"),
        (
            "t.csv",
            "name,text\na.png,z\n",
            "no column for files: expected one named file_name, file, image, path",
        ),
        (
            "t.csv",
            "file,words\na.png,z\n",
            "this network takes texts: expected one named text, .* has file, words",
        ),
        ("t.csv", "", "no column for files: .* it has none"),
        (
            "t.csv",
            "file,text\na.png,1\nb.png,2\n./a.png,3\n",
            r"has two rows for ./a.png \(2 and 4\): keep one",
        ),
        ("t.csv", "file,text\na.png,one, two\n", r"row 2, has 3 values for 2 columns \(quote texts"),
        ("t.csv", 'file,text\na.png,"never closed\n', "cannot be read"),
        ("t.csv", "file,text\n,one\n", "row 2, names no file"),
        ("t.jsonl", '{"file": "a.png", "text": "a"}\n{"file": \n', "row 2, is not JSON"),
        ("t.jsonl", '["a.png", "a"]\n', "row 1, is not a JSON object"),
        ("t.jsonl", '{"file": "a.png", "text": 3}\n', "row 1: a caption is a text, not 3"),
        ("t.jsonl", '{"file": 3, "text": "a"}\n', "row 1, names no file"),
        ("t.txt", "a.png a\n", "is neither .csv nor .jsonl"),
    ],
)
def test_tables_that_are_wrong_are_refused_in_a_line(tmp_path, name, content, words):
    folder = fill(tmp_path / "photos", "a.png", "b.png")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        told(folder, captions=tmp_path / name)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=words):  # it is not a picture that is bad, and could be left out
        told(folder, captions=tmp_path / name, skip_bad=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [("a.png", "cat")],
            "row 2: the label 'cat' is no whole number, and this network takes class numbers",
        ),
        ([("a.png", "1.5")], "row 2: the label '1.5' is no whole number"),
        ([("a.png", "1" * 30)], "is no whole number"),
        ([("a.png", 1)], "has no label for 1 of 2 images, b.png for one"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path, rows, words):
    folder = fill(tmp_path / "photos", "a.png", "b.png")
    path = table(tmp_path / "t.csv", [{"file": f, "label": y} for f, y in rows])
    with pytest.raises(DataError, match=words):
        told(folder, text=False, captions=path)


def test_other_misuse_is_refused(tmp_path):
    folder = fill(tmp_path / "photos", "a.png", "b.png")
    path = table(tmp_path / "t.csv", [{"file": "a.png", "text": "a"}])
    with pytest.raises(
        DataError, match="has no column for what is told, and this network takes class numbers"
    ):
        told(folder, text=False, captions=path)
    with pytest.raises(DataError, match="does not exist"):
        told(folder, captions=tmp_path / "missing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"file,text\na.png,\xff\xfe\n")
    with pytest.raises(DataError, match=r"bytes.csv cannot be read: .*utf-8"):
        told(folder, captions=tmp_path / "bytes.csv")
    with pytest.raises(DataError, match="labels and captions are two sources"):
        Images(folder, labels=[0, 1], captions=path)
    with pytest.raises(DataError, match="the array is no folder of images, and captions are those of files"):
        told(np.zeros((2, 4, 4), np.uint8), captions=path)
    for name in ("metadata.csv", "metadata.jsonl"):
        table(folder / name, [{"file_name": "a.png", "text": "a"}])
    with pytest.raises(DataError, match=r"has both metadata.csv and metadata.jsonl: say which with captions"):
        told(folder)
    unconditional = Denoiser(lambda x, t: x, DiscreteVP.linear(), "noise", SHAPE)
    with pytest.raises(DataError, match="the network takes no condition: leave out captions"):
        open_images(Images(folder, captions=path), unconditional)
    open_images(folder, unconditional)  # nobody looks at metadata that nobody needs


# Text files and folders


def test_texts_beside_pictures_are_found_and_read_when_needed(tmp_path):
    folder = fill(tmp_path, "a.png", "b.v2.jpg", "sub/c.png")
    for name, text in (
        ("a.txt", "an a\n"),
        ("b.v2.txt", ""),
        ("sub/c.txt", "  ein ç "),
        ("readme.txt", "hello"),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    assert told(folder) == ["an a", "", "ein ç"]
    labels = labels_beside(folder, [str(folder / "a.png"), str(folder / "b.v2.jpg")], None, text=True)
    (folder / "a.txt").write_text("later")
    assert labels[0] == "later"
    (folder / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a.txt cannot be read"):
        told(folder)
    assert len(told(folder, skip_bad=True)) == 2
    (folder / "a.txt").unlink()
    with pytest.raises(
        DataError, match=r"2 of 3 images have a text beside them, and .*a.png has none: write"
    ):
        told(folder)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path):
    """As torchvision's ImageFolder numbers them."""
    folder = fill(tmp_path, "cat/1.png", "cat/deep/2.png", "Zebra/3.png", "n01440764/4.png")
    assert told(folder, text=False) == [0, 1, 1, 2]  # Zebra, cat, cat, n01440764
    assert told(folder) == [""] * 4  # a text network is told no numbers
    (folder / ".thumbnails").mkdir()
    assert told(folder, text=False) == [0, 1, 1, 2]
    (folder / "dog").mkdir()
    with pytest.raises(DataError, match="dog holds no image, and classes are numbered by their folders"):
        told(folder, text=False)


def test_folders_named_by_numbers_are_those_classes(tmp_path):
    folder = fill(tmp_path, "10/a.png", "2/b.png", "007/c.png")
    assert told(folder, text=False) == [7, 10, 2]  # in the order of paths
    fill(tmp_path, "02/d.png")
    with pytest.raises(DataError, match=r"two folders in .* name the same class"):
        told(folder, text=False)


@pytest.mark.parametrize("names", [("a.png", "b.png"), ("x/a.png", "b.png"), ("only/a.png", "only/b.png")])
def test_folders_that_are_no_classes_are_not_taken_for_some(tmp_path, names):
    assert told(fill(tmp_path, *names), text=False) is None


def test_the_working_directory_can_be_the_folder(tmp_path, monkeypatch):
    fill(tmp_path, "x/a.png", "y/b.png")
    monkeypatch.chdir(tmp_path)
    assert told(".", text=False) == [0, 1]
    for name in ("x/a.txt", "y/b.txt"):
        (tmp_path / name).write_text(name)
    assert told(".") == ["x/a.txt", "y/b.txt"]
    rows = [{"file_name": "y/b.png", "text": "b"}, {"file_name": "x/a.png", "text": ""}]
    table(tmp_path / "metadata.csv", rows)
    assert told(".") == ["", "b"]


# Texts that come with data sets


def test_texts_of_data_sets_reach_the_vocabulary():
    pictures = [Image.fromarray(np.full((4, 4), k, np.uint8)) for k in range(3)]
    rows = [{"image": p, "label": 1, "text": t} for p, t in zip(pictures, ["a", "b", None], strict=True)]
    assert told(rows) == ["a", "b", ""]
    assert told(rows, text=False) == [1, 1, 1]
    assert told(list(zip(pictures, "abc", strict=True))) == ["a", "b", "c"]
    assert told(pictures, labels=["x", "y", "z"]) == ["x", "y", "z"]
    with pytest.raises(DataError, match="is the text 'x', and this network takes class numbers"):
        told(pictures, text=False, labels=["x", "y", "z"])


def test_open_images_knows_what_the_network_takes(tmp_path):
    folder = fill(tmp_path, "0/a.png", "1/b.png")
    net = Denoiser(lambda x, t, y: x, DiscreteVP.linear(), "noise", SHAPE, conditional=True)
    assert next(open_images(folder, net).batches(2)).y.tolist() == [0, 1]
    net.vocabulary = Vocabulary()
    batch = next(open_images(Images(folder, labels=["u", "v"]), net).batches(2))
    assert net.vocabulary.said(batch.y) == ["u", "v"]


def test_a_run_knows_texts_by_what_they_say(tmp_path):
    folder = fill(tmp_path / "photos", *(f"{k}.png" for k in range(24)))
    rows = [{"file_name": f"{k}.png", "text": f"number {k}"} for k in range(24)]
    table(folder / "metadata.csv", rows)
    net = Denoiser(lambda x, t, y: 0.5 * x, DiscreteVP.linear(), "noise", SHAPE, conditional=True)
    how = {"levels": [500], "trust": True, "run": tmp_path / "run", "progress": False}
    net.vocabulary = Vocabulary()
    trueup.estimate.measure(net, Images(folder, count=12), **how)
    net.vocabulary = Vocabulary()
    assert trueup.estimate.measure(net, Images(folder, count=24), **how).images == 24
    table(folder / "metadata.csv", [{**row, "text": "another"} for row in rows])
    with pytest.raises(DataError, match="is not what it was when"):
        trueup.estimate.measure(net, Images(folder, count=24), **how)


# From the command line


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    return save(tiny_unet(num_class_embeds=3), tmp_path_factory.mktemp("by-class"))


def test_classes_come_from_folders_or_a_table(by_class, tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for k in range(24):
        path = tmp_path / "photos" / "abc"[k % 3] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
        rows.append({"file": f"{path.parent.name}/{path.name}", "label": k % 3})
    captions = table(tmp_path / "labels.jsonl", rows)
    common = ("--data", tmp_path / "photos", "--trust", "--no-samples", "--quiet", "--per-class")
    made = []
    for k, more in enumerate([(), ("--captions", captions)]):
        out = tmp_path / f"{k}.trueup.safetensors"
        done = trueup_command("calibrate", by_class, *common, *more, "-o", out)
        assert done.returncode == 0, done.stderr
        made.append(trueup.load(out))
    assert [of.label for of in made[0].classes] == [0, 1, 2]
    assert torch.equal(made[0].correction.b, made[1].correction.b)
    words = ("is no whole number", "class numbers")
    table(captions, [{**row, "label": "cat"} for row in rows])
    refused(
        trueup_command("calibrate", by_class, *common, "--captions", captions, "-o", tmp_path / "x"), *words
    )
    missing = tmp_path / "no.csv"
    refused(
        trueup_command("calibrate", by_class, *common, "--captions", missing, "-o", tmp_path / "x"),
        "not exist",
    )
