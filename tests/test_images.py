"""Images reach the network as the numbers they hold, in a fixed order, or not at all."""

from __future__ import annotations

import io
import itertools
import random
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trueup.denoiser import Denoiser
from trueup.errors import Argument, DataError
from trueup.estimate import measure
from trueup.images import Images, Samples, open_images, sources
from trueup.process import ContinuousVP

# Lossless ways to write an RGB image of few colours; JPEG is not one and is tested on its own.
LOSSLESS = {
    "a.png": {},
    "b.bmp": {},
    "c.webp": {"lossless": True},
    "d.gif": {},
    "e.ppm": {},
    "f.tiff": {},
}


PIXELS = (0.0, 255.0)  # a model range that leaves 8-bit values as they are


def pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Random 8-bit pixels (H, W, C), in steps of 51 so that even a palette holds them all."""
    levels = np.random.default_rng(seed).integers(0, 6, (height, width, channels))
    return (51 * levels).astype(np.uint8)


def picture(height: int = 6, width: int = 5, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(height, width, seed=seed))


def planes(image: Image.Image) -> torch.Tensor:
    """What a (3, H, W) model without a range of its own must be given for this image."""
    return torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0).float()


def read(source, shape=(3, 6, 5), model_range=PIXELS, size=4, skip=(), limit=None, **images) -> torch.Tensor:
    """Every sample, stacked; 8-bit values stay 0..255 unless the model has a range."""
    data = Samples(Images(source, **images), shape, model_range)
    return torch.cat([batch.x0 for batch in data.batches(size, skip=skip, limit=limit)])


def indices(data: Samples, size: int = 4, **how) -> list[int]:
    """Which samples are used, in their order."""
    return [int(i) for batch in data.batches(size, **how) for i in batch.index]


def digests(source, shape=(3, 6, 5), model_range=PIXELS, **images) -> list[int]:
    data = Samples(Images(source, **images), shape, model_range)
    return [int(d) for batch in data.batches(8) for d in batch.digests]


def labels_of(source, shape=(3, 6, 5)) -> list[int]:
    batches = Samples(source, shape, PIXELS).batches(2)
    return torch.cat([batch.y for batch in batches]).tolist()


class Rows(Dataset):
    """A map-style dataset over a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    """An iterable dataset that also knows its length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


SOURCES = {
    "indexed": Rows,
    "stream": Stream,
    "generator": iter,
    "loader": lambda rows: DataLoader(Rows(rows), batch_size=4),
}


# Folders


def test_folder_reads_every_lossless_format_exactly(tmp_path):
    for seed, (name, options) in enumerate(LOSSLESS.items()):
        picture(seed=seed).save(tmp_path / name, **options)
    expected = torch.stack([planes(picture(seed=seed)) for seed in range(len(LOSSLESS))])
    assert torch.equal(read(tmp_path), expected)
    assert torch.equal(read(str(tmp_path)), expected)


def test_folder_reads_jpeg(tmp_path):
    Image.new("RGB", (5, 6), (200, 100, 50)).save(tmp_path / "a.jpg", quality=95)
    expected = torch.tensor([200.0, 100.0, 50.0]).reshape(3, 1, 1).expand(3, 6, 5)
    # One flat colour loses only the rounding to YCbCr, quantized in steps of two at this quality.
    assert (read(tmp_path)[0] - expected).abs().max() <= 3


def test_folder_is_read_recursively_in_the_order_of_its_names(tmp_path):
    names = ["b.png", "a/z.bmp", "a/b/c.png", "a.PNG", "10.png", "9.png"]
    expected = ["10.png", "9.png", "a/b/c.png", "a/z.bmp", "a.PNG", "b.png"]
    for trial, order in enumerate((names, names[::-1])):
        folder = tmp_path / str(trial)
        for name in order:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(seed=names.index(name)).save(path)
        wanted = torch.stack([planes(picture(seed=names.index(name))) for name in expected])
        assert torch.equal(read(folder), wanted)
        assert len(Samples(folder, (3, 6, 5), PIXELS)) == len(names)


def test_files_that_are_no_pictures_are_ignored(tmp_path):
    (tmp_path / ".cache").mkdir()
    for name in ("notes.txt", "labels.csv", "paper.pdf", "features.h5", "clip.mpg", "no_suffix"):
        (tmp_path / name).write_bytes(b"not an image")
    for name in ("._a.png", ".thumbnail.jpg", ".cache/a.png"):
        (tmp_path / name).write_bytes(b"what an operating system leaves behind")
    (tmp_path / "folder.png").mkdir()
    picture().save(tmp_path / "a.png")
    assert torch.equal(read(tmp_path), planes(picture())[None])


def test_hidden_parent_of_the_folder_does_not_hide_its_images(tmp_path):
    folder = tmp_path / ".hidden" / "images"
    folder.mkdir(parents=True)
    picture().save(folder / "a.png")
    assert len(read(folder)) == 1


def test_paths_that_hold_no_images_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no image"):
        Samples(tmp_path, (3, 6, 5), PIXELS)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="holds no image"):
        Samples(tmp_path, (3, 6, 5), PIXELS)
    with pytest.raises(DataError, match=r"nowhere is not there: pass a folder"):
        Samples(tmp_path / "nowhere", (3, 6, 5), PIXELS)
    with pytest.raises(DataError, match=r"nowhere\.npy is not there: pass a folder"):
        Samples(tmp_path / "nowhere.npy", (3, 6, 5), PIXELS)
    with pytest.raises(DataError, match=r"notes\.txt is not a folder, \.npy, \.npz or \.tar"):
        Samples(tmp_path / "notes.txt", (3, 6, 5), PIXELS)


@pytest.mark.parametrize("name", [*LOSSLESS, "g.jpg"])
def test_truncated_image_is_named(tmp_path, name):
    picture(seed=1).save(tmp_path / "0.png")
    buffer = io.BytesIO()
    picture(40, 40).save(buffer, Image.registered_extensions()[tmp_path.joinpath(name).suffix])
    (tmp_path / name).write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read as an image"):
        read(tmp_path, resize="exact")


def test_corrupt_and_empty_images_are_named(tmp_path):
    for content in (b"", b"\x89PNG\r\n\x1a\n", b"hello" * 100):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.png cannot be read as an image"):
            read(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's remarks on damaged TIFF tags
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF", *["AVIF"] * features.check("avif")]
)
def test_damaged_images_are_read_or_named_and_nothing_else(tmp_path, kind):
    buffer = io.BytesIO()
    picture(16, 16).save(buffer, kind)
    rng = random.Random(0)
    path = tmp_path / f"damaged.{kind.lower()}"
    said = []
    for _ in range(60):
        content = bytearray(buffer.getvalue())
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(min(len(content), 200))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            read([path], (3, 16, 16), resize="exact")
        except DataError as error:
            said.append(str(error))
    assert said
    assert all(path.name in message for message in said)


def test_image_that_a_dataset_opened_and_nobody_decoded_is_named_when_damaged(tmp_path):
    buffer = io.BytesIO()
    picture(40, 40).save(buffer, "PNG")
    path = tmp_path / "lazy.png"
    path.write_bytes(buffer.getvalue()[:-200])
    with Image.open(path) as image, pytest.raises(DataError, match=r"lazy\.png cannot be read"):
        read([image], (3, 40, 40))


# Modes


def test_grayscale_becomes_three_equal_channels():
    gray = Image.fromarray(pixels(6, 5)[..., 0])
    expected = torch.from_numpy(np.array(gray)).float().expand(3, 6, 5)
    assert torch.equal(read([gray])[0], expected)
    assert torch.equal(read([gray], (1, 6, 5))[0], expected[:1])


def test_bilevel_becomes_black_and_white():
    bilevel = Image.fromarray(pixels(6, 5)[..., 0]).convert("1")
    values = read([bilevel], (1, 6, 5), (-1.0, 1.0))
    assert set(values.unique().tolist()) == {-1.0, 1.0}


def test_palette_is_looked_up():
    palette = picture().convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    assert palette.mode == "P"
    assert torch.equal(read([palette])[0], planes(palette))


def test_four_channels_keep_alpha():
    rgba = Image.fromarray(pixels(6, 5, 4))
    assert torch.equal(read([rgba], (4, 6, 5))[0], torch.from_numpy(np.array(rgba)).movedim(-1, 0).float())
    opaque = read([picture()], (4, 6, 5))[0]
    assert torch.equal(opaque[:3], planes(picture()))
    assert (opaque[3] == 255).all()


def test_transparency_is_never_dropped():
    rgba = Image.fromarray(pixels(6, 5, 4))
    for image, channels in ((rgba, 3), (rgba.convert("LA"), 3), (rgba.convert("LA"), 1)):
        with pytest.raises(DataError, match="has transparency"):
            read([image], (channels, 6, 5))


def test_transparent_palette_is_refused_only_where_a_pixel_is_transparent():
    palette = Image.fromarray((np.arange(30) % 4).reshape(6, 5).astype(np.uint8)).convert("P")
    palette.putpalette(list(range(30, 60)))
    palette.info["transparency"] = 9  # no pixel has it
    assert torch.equal(read([palette])[0], planes(palette))
    palette.info["transparency"] = 2
    with pytest.raises(DataError, match=r"has transparency \(P\)"):
        read([palette])


def test_colour_is_not_turned_gray():
    with pytest.raises(DataError, match="colour image"):
        read([picture()], (1, 6, 5))


def test_images_for_models_without_a_colour_space_are_refused():
    with pytest.raises(DataError, match="the model takes 5 channels: pass arrays"):
        read([picture()], (5, 6, 5))


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_images_of_more_than_8_bits_are_refused(mode):
    with pytest.raises(DataError, match="8 bits"):
        read([Image.new(mode, (5, 6))], (1, 6, 5))


def test_16_bit_png_is_refused(tmp_path):
    Image.fromarray(np.arange(30, dtype=np.uint16).reshape(6, 5) * 1000).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png is a I;16 image; convert it to 8 bits"):
        read(tmp_path, (1, 6, 5))


def test_image_as_high_as_it_has_channels_is_not_transposed():
    image = picture(3, 3)
    assert torch.equal(read([image], (3, 3, 3))[0], planes(image))
    line = Image.fromarray(pixels(1, 7)[..., 0])
    assert torch.equal(read([line], (1, 1, 7))[0, 0], torch.from_numpy(np.array(line)).float())


# Arrays


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["ndarray", "tensor"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_arrays_of_both_layouts_give_the_same_samples(convert, dtype):
    nchw = np.stack([pixels(6, 5, seed=i) for i in range(7)]).transpose(0, 3, 1, 2).astype(dtype)
    expected = torch.from_numpy(nchw.astype(np.float32)) / 127.5 - 1
    for array in (nchw, np.ascontiguousarray(nchw.transpose(0, 2, 3, 1))):
        x0 = read(convert(array), model_range=(-1.0, 1.0), data_range=(0, 255))
        assert x0.dtype == torch.float32
        assert torch.allclose(x0, expected, rtol=0, atol=2e-7)  # two roundings of values up to 1


def test_channels_last_is_recognised_when_the_height_equals_the_channels():
    image = pixels(3, 8)
    assert torch.equal(read(image[None], (3, 3, 8))[0], torch.from_numpy(image).movedim(-1, 0).float())


def test_memory_layout_does_not_matter():
    array = np.stack([pixels(6, 5, seed=i) for i in range(4)]).astype(np.float32)
    expected = read(array)
    assert torch.equal(read(array.astype(">f4")), expected)
    assert torch.equal(read(array[:, ::-1, ::-1].copy()[:, ::-1, ::-1]), expected)
    assert torch.equal(read(np.asfortranarray(array)), expected)
    assert torch.equal(read(torch.from_numpy(array).requires_grad_()), expected)
    assert not read(torch.from_numpy(array).requires_grad_()).requires_grad


def test_samples_do_not_share_memory_with_the_source():
    array = np.zeros((2, 3, 6, 5), dtype=np.float32)
    batch = next(Samples(array, (3, 6, 5), PIXELS).batches(2))
    array += 1
    assert not batch.x0.any()


def test_one_channel_axis_may_be_left_out():
    array = np.stack([pixels(6, 5, 1, seed=i)[..., 0] for i in range(3)])
    assert torch.equal(read(array, (1, 6, 5)), torch.from_numpy(array)[:, None].float())


def test_other_ranks_of_data_pass():
    for shape in ((2, 9), (2, 3, 4, 5)):
        x0 = torch.randn(4, *shape)
        assert torch.equal(read(x0, shape, model_range=None), x0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4, 6, 5), np.uint8), "the model takes 3 channels"),
        (np.zeros((2, 6, 5), np.uint8), r"shape \(6, 5\), the model takes \(3, 6, 5\)"),
        (np.zeros((3, 2, 3, 6, 5), np.uint8), r"the model takes \(3, 6, 5\)"),
        (np.zeros(()), r"\(samples, \*shape\), got \(\)"),
        (np.zeros(7), r"\(samples, \*shape\), got \(7,\)"),
        (torch.zeros(()), r"\(samples, \*shape\), got \(\)"),
        (np.zeros((2, 3, 6, 5), np.int64), "int64 values; expected 8-bit or floating point"),
        (np.zeros((2, 3, 6, 5), np.uint16), "uint16 values; expected 8-bit or floating point"),
        (np.zeros((2, 3, 6, 5), bool), "bool values; expected 8-bit or floating point"),
        (np.full((2, 3, 6, 5), "a"), "expected an image, an array or a tensor"),
        (np.full((2, 3, 6, 5), None), "expected an image, an array or a tensor"),
    ],
)
def test_arrays_that_are_no_images_are_refused(array, message):
    with pytest.raises(DataError, match=message):
        read(array, model_range=(-1.0, 1.0))


# Array files


def test_npy_is_memory_mapped(tmp_path):
    path = tmp_path / "images.npy"
    np.save(path, np.zeros((2000, 3, 64, 64), np.uint8))  # 24 MB
    tracemalloc.start()
    data = Samples(path, (3, 64, 64), PIXELS)
    first = next(data.batches(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) == 2000
    assert not first.x0.any()
    assert peak < 1e6  # numpy reports what it allocates; a whole read would be 24 MB
    array = np.load(path, mmap_mode="r+")
    array[1999] = 7
    array.flush()
    # What was written to the file after it was opened is what is read.
    assert (data.at(1999).x0 == 7).all()


def test_npz_brings_its_labels(tmp_path):
    array = np.stack([pixels(6, 5, seed=i) for i in range(5)])
    for image, label in itertools.product(("image", "images", "x"), ("label", "labels", "y")):
        np.savez(tmp_path / "a.npz", **{image: array, label: np.arange(5) * 3, "other": np.zeros(2)})
        assert torch.equal(read(tmp_path / "a.npz"), torch.from_numpy(array).permute(0, 3, 1, 2).float())
        assert labels_of(tmp_path / "a.npz") == [0, 3, 6, 9, 12]


def test_npz_without_names_or_labels(tmp_path):
    array = np.stack([pixels(6, 5, seed=i) for i in range(5)])
    np.savez_compressed(tmp_path / "a.npz", array)
    batch = next(Samples(tmp_path / "a.npz", (3, 6, 5), PIXELS).batches(5))
    assert batch.y is None
    assert batch.x0.shape == (5, 3, 6, 5)


def test_npz_that_does_not_fit_together_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, picture=pixels(6, 5))
    with pytest.raises(DataError, match=r"arrays \['picture'\]; expected one named image"):
        Samples(path, (3, 6, 5), PIXELS)
    for labels in (np.arange(2), np.array(3)):
        np.savez(path, image=np.zeros((3, 3, 6, 5), np.uint8), label=labels)
        with pytest.raises(DataError, match="labels of shape"):
            Samples(path, (3, 6, 5), PIXELS)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_damaged_array_files_are_named(tmp_path, suffix):
    path = tmp_path / f"bad{suffix}"
    array = np.zeros((9, 3, 6, 5), np.uint8)
    if suffix == ".npy":
        np.save(path, array)
    else:
        np.savez_compressed(path, image=array)
    good = path.read_bytes()
    swapped = io.BytesIO()
    if suffix == ".npy":
        np.savez(swapped, image=array)
    else:
        np.save(swapped, array)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    cuts = [good[:length] for length in range(0, len(good), 7)]
    for content in (*cuts, b"hello", swapped.getvalue(), pickled.getvalue()):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"bad\{suffix}"):
            read(path)


def test_damaged_bytes_in_npz_are_noticed(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, image=np.random.default_rng(0).integers(0, 255, (9, 3, 6, 5), dtype=np.uint8))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.npz cannot be read"):
        read(path)


# Ranges


def test_8_bits_fill_the_range_of_the_model():
    array = np.array([0, 51, 255], np.uint8).reshape(1, 1, 1, 3)
    assert read(array, (1, 1, 3), (-1.0, 1.0)).flatten().tolist() == [-1.0, pytest.approx(-0.6), 1.0]
    assert read(array, (1, 1, 3), (0.0, 1.0)).flatten().tolist() == [0.0, pytest.approx(0.2), 1.0]
    # 8-bit images are 0..255 whatever is said about floats.
    same = read(array, (1, 1, 3), (-1.0, 1.0), data_range=(0, 1))
    assert torch.equal(same, read(array, (1, 1, 3), (-1.0, 1.0)))


def test_floats_already_in_the_range_of_the_model_are_not_touched():
    x0 = torch.rand(5, 3, 6, 5) * 2 - 1
    assert torch.equal(read(x0, model_range=(-1.0, 1.0)), x0)
    assert torch.equal(read(x0, model_range=(-1.0, 1.0), data_range=(-1, 1)), x0)
    assert torch.equal(read(x0.abs(), model_range=(0.0, 1.0)), x0.abs())


def test_floats_that_may_be_0_to_1_are_refused_with_instructions():
    ambiguous = torch.rand(5, 3, 6, 5)
    with pytest.raises(DataError) as caught:
        read(ambiguous, model_range=(-1.0, 1.0))
    message = str(caught.value)
    assert "sample 0 of the array" in message
    assert "data_range=(0, 1)" in message
    assert "data_range=(-1.0, 1.0)" in message
    # Following either instruction works.
    scaled = read(ambiguous, model_range=(-1.0, 1.0), data_range=(0, 1))
    assert torch.allclose(scaled, ambiguous * 2 - 1, rtol=0, atol=2e-7)  # one rounding of values up to 1
    assert torch.equal(read(ambiguous, model_range=(-1.0, 1.0), data_range=(-1, 1)), ambiguous)


def test_bright_image_is_not_ambiguous_after_one_that_uses_the_whole_range():
    x0 = torch.rand(3, 3, 6, 5)
    x0[0] = 1 - 2 * x0[0]
    x0[0, 0, 0, 0] = -1
    assert torch.equal(read(x0, model_range=(-1.0, 1.0)), x0)
    x0[0].clamp_(min=-0.1)  # as resampling does to images in [0, 1]: proves nothing
    with pytest.raises(DataError, match="sample 1 of the array"):
        read(x0, model_range=(-1.0, 1.0))


def test_floats_outside_the_range_are_refused():
    for x0, said in ((torch.rand(1, 3, 6, 5) * 255, None), (torch.rand(1, 3, 6, 5) * 1.5, (0, 1))):
        x0[0, 0, 0, :2] = torch.tensor([0.0, 1.5])
        with pytest.raises(DataError, match=r"spans 0\.\..*: say what range it is in with data_range"):
            read(x0, model_range=(-1.0, 1.0), data_range=said)
    with pytest.raises(DataError, match=r"outside -1\.\.1"):
        read(torch.full((1, 3, 6, 5), -1.01), model_range=(-1.0, 1.0))


@pytest.mark.parametrize("data_range", [(1, 0), (1, 1), (0, float("nan")), (0, float("inf")), (0,), 1])
def test_ranges_that_make_no_sense_are_refused(data_range):
    with pytest.raises(DataError, match=r"data_range is \(low, high\) with low < high"):
        Images([], data_range=data_range)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("model_range", [None, (-1.0, 1.0)])
def test_values_that_are_not_finite_are_refused(value, model_range):
    x0 = torch.full((3, 3, 6, 5), -0.5)
    x0[2, 1, 4, 3] = value
    with pytest.raises(DataError, match="sample 2 of the array"):
        read(x0, model_range=model_range)


def test_latents_are_not_rescaled():
    latents = torch.randn(5, 4, 6, 5) * 10
    assert torch.equal(read(latents, (4, 6, 5), model_range=None), latents)


# Datasets and streams


def test_map_style_dataset():
    rows = [(picture(seed=i), 10 * i) for i in range(5)]
    expected = torch.stack([planes(image) for image, _ in rows])
    assert torch.equal(read(Rows(rows)), expected)
    assert labels_of(Rows(rows)) == [0, 10, 20, 30, 40]
    assert torch.equal(read(Rows([image for image, _ in rows])), expected)
    assert torch.equal(read(Rows([{"img": image, "y": y} for image, y in rows])), expected)
    assert labels_of(Rows([{"img": image, "y": y} for image, y in rows])) == [0, 10, 20, 30, 40]


def test_list_of_paths(tmp_path):
    picture().save(tmp_path / "a.png")
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        assert torch.equal(read([path])[0], planes(picture()))


def test_data_loader_gives_the_samples_of_its_dataset():
    x0 = torch.from_numpy(np.stack([pixels(6, 5, seed=i) for i in range(10)])).permute(0, 3, 1, 2)
    dataset = TensorDataset(x0, torch.arange(10) * 2)
    loader = DataLoader(dataset, batch_size=4)
    batches = list(Samples(loader, (3, 6, 5), PIXELS).batches(3))
    assert [batch.index.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert torch.equal(torch.cat([batch.x0 for batch in batches]), x0.float())
    assert labels_of(loader) == list(range(0, 20, 2))
    assert torch.equal(read(DataLoader(TensorDataset(x0), batch_size=4)), x0.float())
    assert torch.equal(read(DataLoader(x0, batch_size=4)), x0.float())


def test_length_is_the_number_of_samples_or_unknown():
    assert len(Samples(torch.zeros(9, 3, 6, 5), (3, 6, 5), PIXELS)) == 9
    loader = DataLoader(torch.zeros(9, 3, 6, 5), batch_size=4)  # len(loader) is 3, of batches
    for stream in (loader, Stream([1, 2]), (i for i in range(2))):
        with pytest.raises(TypeError, match="is a stream"):
            len(Samples(stream, (3, 6, 5), PIXELS))


def test_iterable_dataset_may_know_its_length():
    rows = [picture(seed=i) for i in range(3)]
    assert torch.equal(read(Stream(rows)), torch.stack([planes(image) for image in rows]))


def test_batches_of_numpy_arrays_are_unpacked():
    x0 = np.stack([pixels(6, 5, seed=i) for i in range(6)])
    stream = Stream([(x0[:4], np.arange(4)), (x0[4:], np.arange(4, 6))])
    assert torch.equal(read(stream), read(x0))
    assert labels_of(stream) == [0, 1, 2, 3, 4, 5]


def test_batch_whose_labels_do_not_match_is_refused():
    with pytest.raises(DataError, match="4 images, 3 labels"):
        read(Stream([(torch.zeros(4, 3, 6, 5), torch.arange(3))]))


def test_labels_that_are_no_numbers_are_left_out():
    for label in ("cat", {"boxes": []}, None):
        batch = next(Samples([(picture(), label)] * 3, (3, 6, 5), PIXELS).batches(3))
        assert batch.y is None
        assert len(batch.x0) == 3


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (
            [torch.zeros(2 + k, 8) for k in range(3)],
            "Tensor",
        ),  # embeddings of words, of which there are 2 to 4
        ([{"low": torch.zeros(3, 2, 2)}] * 3, "dict"),
        ([(torch.zeros(3, 2, 2), 1)] * 3, "tuple"),
    ],
)
def test_labels_that_make_no_tensor_are_there_and_not_what_a_network_takes(labels, kind):
    samples = Samples(Images([picture()] * 3, labels=labels), (3, 6, 5), PIXELS, conditional=True)
    with pytest.raises(DataError, match=rf"the labels of .* \({kind}\) do not fit into one tensor"):
        next(samples.batches(3))


def test_stream_is_consumed_lazily():
    pulled = []

    def images():
        for i in itertools.count():
            pulled.append(i)
            yield picture(seed=i)

    batches = Samples(images(), (3, 6, 5), PIXELS).batches(4, limit=10)
    assert pulled == []
    next(batches)
    assert pulled == [0, 1, 2, 3]
    assert [len(batch.index) for batch in batches] == [4, 2]
    assert pulled == list(range(10))


def test_indexed_dataset_is_read_lazily():
    asked = []

    class Counting(Rows):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    read(Counting([picture()] * 100), skip=range(90), limit=3)
    assert asked[-3:] == [90, 91, 92]
    assert max(asked) == 92


def test_generator_is_read_on_from_where_it_was_left():
    x0 = torch.arange(30.0).reshape(30, 1, 1, 1).expand(30, 3, 6, 5)
    for generator in ((row for row in x0), (x0[i : i + 4] for i in range(0, 30, 4))):
        data = Samples(Images(generator, offset=100), (3, 6, 5), PIXELS)
        first = list(data.batches(4, limit=10))
        rest = list(data.batches(8, skip=range(100, 110)))
        for batches, wanted in ((first, range(10)), (rest, range(10, 30))):
            assert torch.cat([batch.index for batch in batches]).tolist() == [100 + i for i in wanted]
            assert torch.equal(torch.cat([batch.x0 for batch in batches]), x0[wanted.start : wanted.stop])


def test_generator_is_not_read_twice():
    data = Samples((picture(seed=i) for i in range(5)), (3, 6, 5), PIXELS)
    assert sum(len(batch.index) for batch in data.batches(2)) == 5
    for skip in ((), {0, 1, 2, 3}):
        with pytest.raises(DataError, match="generator can be read only once, and 5 samples of it are gone"):
            next(data.batches(2, skip=skip))


def test_stream_begins_anew_and_is_checked_against_what_was_skipped():
    rows = [picture(seed=i) for i in range(6)]
    done = dict(enumerate(digests(rows)[:4]))
    assert indices(Samples(Stream(rows), (3, 6, 5), PIXELS), skip=done) == [4, 5]
    assert indices(Samples(iter(rows), (3, 6, 5), PIXELS), skip=done) == [4, 5]  # resumed by another process
    with pytest.raises(DataError, match="sample 0 of Stream is not what it was before"):
        indices(Samples(Stream(rows[::-1]), (3, 6, 5), PIXELS), skip=done)


@pytest.mark.parametrize("kind", SOURCES)
def test_more_images_for_the_mean_are_others_than_those_that_were_measured(kind):
    denoiser = Denoiser(lambda x_t, t: x_t * t[:, None, None, None], ContinuousVP(), "noise", (1, 2, 2))
    x0 = list(torch.linspace(-1, 1, 80).reshape(20, 1, 2, 2))
    data = Images(SOURCES[kind](x0), count=6, data_range=(-1, 1))
    moments = measure(denoiser, data, mean_images=8, levels=[0.5], trust=True, progress=False)
    assert moments.images == 6
    assert moments.data_images == 14
    assert len({*moments.indices.tolist()}) == 14


def test_rows_that_hold_no_image_are_refused():
    with pytest.raises(DataError, match=r"rows have \['caption', 'id'\]; expected a column named 'image'"):
        read([{"id": 1, "caption": "a cat"}])
    for item in ((picture(), 1, 2), object(), {"image": {"bytes": b"", "path": None}}):
        with pytest.raises(DataError, match=r"sample 0 of list is a .*expected an image"):
            read([item])
    for source in (5, None, object()):
        with pytest.raises(DataError, match="cannot read images from"):
            Samples(source, (3, 6, 5), PIXELS)


def test_hugging_face_dataset():
    import datasets

    images = [picture(seed=i) for i in range(5)]
    expected = torch.stack([planes(image) for image in images])
    dataset = datasets.Dataset.from_dict(
        {"image": images, "label": [4, 3, 2, 1, 0], "caption": list("abcde")},
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(num_classes=5),
                "caption": datasets.Value("string"),
            }
        ),
    )
    for source in (dataset, dataset.with_format("torch"), dataset.to_iterable_dataset()):
        assert torch.equal(read(source), expected)
        assert labels_of(source) == [4, 3, 2, 1, 0]
    assert len(Samples(dataset, (3, 6, 5), PIXELS)) == 5
    renamed = dataset.rename_columns({"image": "photo"})
    assert torch.equal(read(renamed), expected)  # known by its type
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(DataError, match=r"pass one split of the dataset, for instance dataset\['train'\]"):
        Samples(splits, (3, 6, 5), PIXELS)


# Resizing, cropping, flipping


@pytest.mark.parametrize("size", [(30, 40), (40, 30), (17, 16), (5, 9), (16, 16), (8, 64)])
@pytest.mark.parametrize("target", [(16, 16), (8, 12)])
def test_resize_is_pillows(size, target):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    (height, width), shape = target, (3, *target)
    exact = image.resize((width, height), Image.Resampling.BICUBIC)
    for source in ([image], np.array(image)[None]):
        assert torch.equal(read(source, shape, resize="exact")[0], planes(exact))
    factor = max(height / size[0], width / size[1])
    covering = image.resize((round(size[1] * factor), round(size[0] * factor)), Image.Resampling.BICUBIC)
    left, top = (covering.width - width) // 2, (covering.height - height) // 2
    cropped = covering.crop((left, top, left + width, top + height))
    assert torch.equal(read([image], shape, resize="shorter", crop="center")[0], planes(cropped))


def test_shorter_side_alone_is_enough_when_the_aspect_is_right():
    image = picture(12, 10)
    expected = planes(image.resize((5, 6), Image.Resampling.BICUBIC))
    assert torch.equal(read([image], resize="shorter")[0], expected)
    with pytest.raises(DataError, match="is 6x10 when resized, the model takes 6x5: pass crop='center' too"):
        read([picture(6, 10)], resize="shorter")


def test_crop_takes_the_middle_and_changes_no_pixel():
    image = picture(10, 11)
    assert torch.equal(read([image], crop="center")[0], planes(image)[:, 2:8, 3:8])
    with pytest.raises(
        DataError, match="is 4x11 when cropped, the model takes 6x5: pass resize='shorter' too"
    ):
        read([picture(4, 11)], crop="center")


def test_images_of_the_right_size_are_not_resampled():
    for resize, crop in itertools.product((None, "shorter", "exact"), (None, "center")):
        assert torch.equal(read([picture()], resize=resize, crop=crop)[0], planes(picture()))


def test_nothing_is_resized_unasked():
    with pytest.raises(DataError, match="is 10x11, the model takes 6x5: pass resize='shorter'"):
        read([picture(10, 11)])
    with pytest.raises(DataError, match="resize it before handing it over"):
        read(torch.zeros(1, 3, 12, 10), resize="exact")


def test_unknown_options_are_refused():
    with pytest.raises(DataError, match="resize is None, 'shorter' or 'exact', not 'longer'"):
        Images([], resize="longer")
    with pytest.raises(DataError, match="crop is None or 'center', not 'random'"):
        Images([], crop="random")
    for size in (0, -1):
        with pytest.raises(DataError, match="at least one sample"):
            next(Samples(torch.zeros(2, 3, 6, 5), (3, 6, 5), PIXELS).batches(size))


def test_flip_mirrors_about_half_of_the_samples_whoever_reads_them():
    x0 = torch.tensor([1.0, 2.0]).expand(4000, 1, 1, 2)
    flipped = read(x0, (1, 1, 2), size=64, flip=True)
    mirrored = (flipped == x0.flip(-1)).all(-1).flatten()
    assert torch.equal(mirrored, ~(flipped == x0).all(-1).flatten())
    assert abs(int(mirrored.sum()) - 2000) < 5 * 1000**0.5  # five standard deviations of fair coins
    part = read(x0, (1, 1, 2), size=7, skip=range(100), limit=200, flip=True)
    assert torch.equal(part, flipped[100:300])
    assert torch.equal(read(iter(x0), (1, 1, 2), limit=300, flip=True), flipped[:300])
    # An image is mirrored by its global index: shards see what the whole sees.
    assert torch.equal(read(x0[100:], (1, 1, 2), size=7, offset=100, flip=True), flipped[100:])


def test_flip_is_left_to_right():
    mirrored = read([picture()] * 8, flip=True)
    upright = planes(picture())
    assert all(torch.equal(x, upright) or torch.equal(x, upright.flip(-1)) for x in mirrored)


# Batches and fingerprints


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 12),
    size=st.integers(1, 5),
    skip=st.sets(st.integers(0, 14)),
    limit=st.none() | st.integers(0, 16),
    offset=st.sampled_from([0, 7]),
    kind=st.sampled_from([*SOURCES]),
)
def test_batches_are_what_is_left(count, size, skip, limit, offset, kind):
    x0 = torch.arange(float(count)).reshape(count, 1, 1).expand(count, 1, 3)
    rows = [(x, 100 + i) for i, x in enumerate(x0)]
    data = Samples(Images(SOURCES[kind](rows), offset=offset), (1, 3), None)
    batches = list(data.batches(size, skip={offset + i for i in skip}, limit=limit))
    wanted = [i for i in range(count) if i not in skip][:limit]
    assert [index - offset for batch in batches for index in batch.index.tolist()] == wanted
    assert [y for batch in batches for y in batch.y.tolist()] == [100 + i for i in wanted]
    assert all(torch.equal(batch.x0, x0[batch.index - offset]) for batch in batches)
    assert all(len(batch.index) == size for batch in batches[:-1])
    assert all(0 < len(batch.index) <= size for batch in batches[-1:])


def test_parts_of_a_batch():
    batch = next(
        Samples(Images(torch.rand(5, 1, 4, 4), labels=range(5), groups=range(5)), (1, 4, 4), None).batches(5)
    )
    part = batch.rows(slice(1, 3))
    assert len(part) == 2
    for name in ("index", "x0", "y", "digests", "group"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[1:3])
    assert torch.equal(batch.to(torch.device("cpu")).x0, batch.x0)


# Which images


def numbered(count: int) -> torch.Tensor:
    """Samples (1, 2, 2) that all differ, sorted by brightness, as a folder may be."""
    return (torch.arange(float(count)) / count).reshape(count, 1, 1, 1).expand(count, 1, 2, 2)


def used(count, seed=0, total=400, **how) -> list[int]:
    return indices(Samples(Images(numbered(total), count=count, seed=seed), (1, 2, 2), None), **how)


def test_count_takes_a_random_subset_not_the_first():
    """The first 40 of a sorted folder were the 40 darkest: the calibration did harm."""
    picked = used(40)
    assert len(set(picked)) == 40
    mean = sum(picked) / 40
    # 40 of 400 without replacement: the mean is 199.5 with a standard error of 115.5 sqrt(0.9 / 40).
    assert abs(mean - 199.5) < 5 * 115.5 * (0.9 / 40) ** 0.5
    assert min(picked) < 100
    assert max(picked) >= 300


def test_the_same_seed_takes_the_same_images_and_another_seed_others():
    assert used(np.int64(40)) == used(40)
    assert used(40) == used(40) == used(40, size=7)
    assert used(40) != used(40, seed=1)
    assert len({*used(40)} & {*used(40, seed=1)}) < 20  # 4 are expected


def test_more_images_are_the_same_and_more():
    for fewer, more in ((1, 2), (40, 41), (100, 400), (400, 1000)):
        assert used(more)[: len(used(fewer))] == used(fewer)
    assert sorted(used(1000)) == list(range(400))


def test_what_was_done_counts():
    all_of_them = used(40)
    assert used(40, skip=set(all_of_them[:30])) == all_of_them[30:]
    assert used(40, skip=set(all_of_them)) == []
    assert used(40, limit=5) == all_of_them[:5]


def test_without_a_count_everything_is_read_in_order():
    assert used(None) == list(range(400))


def test_count_of_a_stream_is_the_first():
    for kind in ("stream", "generator", "loader"):
        data = Samples(Images(SOURCES[kind](list(numbered(20))), count=6), (1, 2, 2), None)
        assert data.expected() == 6
        assert indices(data) == list(range(6))


def test_how_many_samples_there_will_be():
    data = Samples(Images(numbered(20), count=30), (1, 2, 2), None)
    assert (data.expected(), data.expected(7), len(data)) == (20, 7, 20)
    assert Samples(iter(numbered(20)), (1, 2, 2), None).expected() is None


def test_a_bad_image_is_replaced_by_the_next_of_the_subset():
    x0 = numbered(400).clone()
    bad = used(40)[3]
    x0[bad] = float("nan")
    data = Samples(Images(x0, count=40, skip_bad=True), (1, 2, 2), None)
    assert indices(data) == [i for i in used(41) if i != bad]
    assert data.skipped == [f"sample {bad} of the array holds values that are not finite"]
    with pytest.raises(DataError, match=f"sample {bad} of the array"):
        indices(Samples(Images(x0, count=40), (1, 2, 2), None))


@pytest.mark.parametrize("count", [0, -1, 2.5, "5"])
def test_counts_that_make_no_sense_are_refused(count):
    with pytest.raises(DataError, match="count is a whole number of at least 1"):
        Images([], count=count)
    with pytest.raises(DataError, match="offset is a whole number of at least 0"):
        Images([], offset=-1 if count == 0 else count)


def test_one_sample_is_found_by_its_global_index():
    rows = [picture(seed=i) for i in range(5)]
    data = Samples(
        Images(rows, offset=1000, labels=[9, 8, 7, 6, 5], groups="abcab", count=3), (3, 6, 5), PIXELS
    )
    for batch in data.batches(1):
        again = data.at(int(batch.index))
        for name in ("index", "x0", "y", "digests", "group"):
            assert torch.equal(getattr(again, name), getattr(batch, name))
    assert data.at(1002).y.tolist() == [7]


# The same image twice


def repeated(times: int = 3, count: int = 20):
    return [picture(seed=i % count) for i in range(times * count)]


@pytest.mark.parametrize("kind", SOURCES)
def test_an_image_that_was_read_before_counts_once(kind):
    """The same 20 images six times looked like 120 held-out ones: a claimed gain was a harm."""
    source = repeated() if kind != "loader" else [np.array(image) for image in repeated()]
    data = Samples(SOURCES[kind](source), (3, 6, 5), PIXELS)
    assert indices(data, unique=True) == list(range(20))
    assert data.duplicates == 40
    if kind != "generator":
        assert len(indices(Samples(SOURCES[kind](source), (3, 6, 5), PIXELS))) == 60


def test_images_that_were_used_elsewhere_can_be_left_out():
    rows = repeated(2)
    known = digests(rows)[:5]
    data = Samples(rows, (3, 6, 5), PIXELS)
    assert indices(data, without=known, unique=True) == list(range(5, 20))
    assert data.duplicates == 15  # those left out on purpose are not among them
    assert indices(Samples(rows, (3, 6, 5), PIXELS), without=known) == [*range(5, 20), *range(25, 40)]


def test_a_count_is_filled_with_images_that_differ():
    data = Samples(Images(repeated(), count=15), (3, 6, 5), PIXELS)
    picked = indices(data, unique=True)
    assert len({i % 20 for i in picked}) == len(picked) == 15


def test_digest_changes_with_any_pixel():
    array = np.stack([pixels(6, 5, seed=i) for i in range(1)])
    seen = {*digests(array)}
    for position in np.ndindex(array.shape):
        changed = array.copy()
        changed[position] ^= 1
        seen |= {*digests(changed)}
    assert len(seen) == array.size + 1
    assert all(-(2**63) <= d < 2**63 for d in seen)


def test_digest_is_of_the_image_not_of_how_it_is_stored_or_used(tmp_path):
    array = pixels(6, 5)
    Image.fromarray(array).save(tmp_path / "a.png")
    Image.fromarray(array).save(tmp_path / "b.bmp")
    first = digests([picture()])[0]
    assert digests(tmp_path) == [first, first]
    for other in (
        array[None],
        array.transpose(2, 0, 1)[None],
        torch.from_numpy(array)[None],
        array[None, :, ::-1][:, :, ::-1],
    ):
        assert digests(other) == [first]
    assert digests([picture()] * 8, flip=True) == [first] * 8  # a mirrored image is the same image
    assert digests([picture()], model_range=(-1.0, 1.0)) == [first]
    big = pixels(12, 10)
    assert digests([Image.fromarray(big)], resize="exact") == digests([Image.fromarray(big)], crop="center")


def test_every_kind_of_number_has_a_digest():
    x0 = torch.rand(3, 1, 4, 4) * 2 - 1
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert len({*digests(x0.to(dtype), (1, 4, 4), (-1.0, 1.0))}) == 3


# Groups and labels


def test_images_of_a_group_have_the_same_key():
    x0 = numbered(6)
    by_list = next(Samples(Images(x0, groups=list("aabbca")), (1, 2, 2), None).batches(6)).group
    by_function = next(Samples(Images(x0, groups=lambda i: "aabbca"[i]), (1, 2, 2), None).batches(6)).group
    assert torch.equal(by_list, by_function)
    assert by_list.dtype == torch.int64
    for i, j in itertools.combinations(range(6), 2):
        assert bool(by_list[i] == by_list[j]) == ("aabbca"[i] == "aabbca"[j])


def test_keys_of_a_group_may_be_numbers_of_any_library():
    x0 = numbered(3)
    expected = next(Samples(Images(x0, groups=[5, 5, 6]), (1, 2, 2), None).batches(3)).group
    for keys in (np.array([5, 5, 6]), torch.tensor([5, 5, 6])):
        assert torch.equal(next(Samples(Images(x0, groups=keys), (1, 2, 2), None).batches(3)).group, expected)


def test_a_stream_has_groups_by_its_index():
    data = Samples(Images(Stream(list(numbered(6))), groups=lambda i: i // 2), (1, 2, 2), None)
    first, second, third = next(data.batches(6)).group.reshape(3, 2).unbind()
    assert first[0] == first[1] != second[0] == second[1] != third[0] == third[1]


@pytest.mark.parametrize("name", ["labels", "groups"])
def test_labels_and_groups_are_one_per_image(name):
    with pytest.raises(DataError, match=f"the array holds 6 images, and there are 5 {name}"):
        Samples(Images(numbered(6), **{name: range(5)}), (1, 2, 2), None)
    stream = Samples(Images(Stream(list(numbered(6))), **{name: range(5)}), (1, 2, 2), None)
    with pytest.raises(DataError, match=f"sample 5 of Stream has no {name[:-1]}"):
        list(stream.batches(6))


def test_labels_may_be_given_beside_the_images():
    data = Samples(Images(numbered(6), labels=[5, 4, 3, 2, 1, 0], count=4), (1, 2, 2), None)
    for batch in data.batches(2):
        assert torch.equal(batch.y, 5 - batch.index)


# Latents


class Halves:
    """An autoencoder whose latents are the means of 2x2 squares, twice as large."""

    def __init__(self, shape=(3, 4, 4)):
        self.shape = shape

    def picture_shape(self, latent):
        return self.shape

    def encode(self, pictures):
        return 2 * torch.nn.functional.avg_pool2d(pictures, pictures.shape[-1] // 2)


def latent_model(autoencoder, data_range=None) -> Denoiser:
    return Denoiser(
        lambda x_t, t: x_t, ContinuousVP(), "noise", (3, 2, 2), data_range=data_range, autoencoder=autoencoder
    )


def test_pictures_are_encoded_where_a_model_takes_latents():
    array = np.stack([pixels(4, 4, seed=i) for i in range(5)])
    expected = Halves().encode(torch.from_numpy(array).permute(0, 3, 1, 2) / 127.5 - 1)
    model = latent_model(Halves())
    for source in (array, [Image.fromarray(a) for a in array]):
        data = open_images(source, model)
        x0 = torch.cat([batch.x0 for batch in data.batches(2)])
        torch.testing.assert_close(x0, expected, rtol=0, atol=1e-6)  # float32 rounding of values up to 2
        torch.testing.assert_close(data.at(3).x0, expected[3:4], rtol=0, atol=1e-6)
    latents = torch.randn(5, 3, 2, 2)
    mixed = [latents[0], array[1], latents[2]]
    x0 = torch.cat([batch.x0 for batch in open_images(mixed, model).batches(3)])
    torch.testing.assert_close(x0, torch.stack([latents[0], expected[1], latents[2]]), rtol=0, atol=1e-6)


def test_pictures_as_large_as_their_latents_are_encoded_too():
    array = np.stack([pixels(2, 2, seed=i) for i in range(2)])

    class Doubles(Halves):
        def encode(self, pictures):
            return 2 * pictures

    x0 = next(open_images(array, latent_model(Doubles((3, 2, 2)))).batches(2)).x0
    torch.testing.assert_close(x0, 2 * (torch.from_numpy(array).permute(0, 3, 1, 2) / 127.5 - 1))


def test_pictures_to_encode_are_resized_to_what_the_autoencoder_takes():
    x0 = next(open_images(Images([picture(8, 8)], resize="exact"), latent_model(Halves())).batches(1)).x0
    assert x0.shape == (1, 3, 2, 2)


def test_photographs_for_a_latent_model_are_made_to_fit_unasked():
    """By their shorter side, and cropped; other models take what has their size, unless asked."""
    model = latent_model(Halves())
    pictures = [picture(8, 8), picture(12, 8), picture(9, 30), picture(3, 3), picture(4, 4)]
    asked = open_images(Images(pictures, resize="shorter", crop="center"), model)
    unasked = open_images(pictures, model)
    assert torch.equal(next(unasked.batches(5)).x0, next(asked.batches(5)).x0)
    assert torch.equal(next(open_images(np.stack([pixels(8, 6)]), model).batches(1)).x0[0], read_half(8, 6))
    # Whoever asks for something else gets that.
    with pytest.raises(DataError, match="is 6x4 when resized, the model takes 4x4: pass crop='center' too"):
        list(open_images(Images([picture(12, 8)], resize="shorter"), model).batches(1))
    with pytest.raises(DataError, match="resize it before handing it over"):
        next(open_images(torch.randn(2, 3, 8, 8), model).batches(2))  # latents are not pictures
    with pytest.raises(DataError, match="is 8x8, the model takes 4x4: pass resize='shorter'"):
        read([picture(8, 8)], (3, 4, 4))


def read_half(height, width):
    model = latent_model(Halves())
    images = Images([Image.fromarray(pixels(height, width))], resize="shorter", crop="center")
    return next(open_images(images, model).batches(1)).x0[0]


def test_whether_pictures_will_be_made_to_fit_is_known_before(tmp_path):
    model = latent_model(Halves())
    picture(4, 4).save(tmp_path / "a.png")
    assert open_images(tmp_path, model).other_size() is None
    picture(6, 5).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no picture")
    assert open_images(tmp_path, model).other_size() == (4, 4)
    assert open_images(np.zeros((2, 8, 8, 3), np.uint8), model).other_size() == (4, 4)
    assert open_images(np.zeros((2, 4, 4, 3), np.uint8), model).other_size() is None
    assert open_images(torch.zeros(2, 3, 2, 2), model).other_size() is None  # latents
    assert Samples(tmp_path, (3, 8, 8), (-1.0, 1.0)).other_size() is None


def test_an_autoencoder_that_does_not_fit_the_model_is_named():
    class Wrong(Halves):
        def encode(self, pictures):
            return pictures

    with pytest.raises(DataError, match=r"latents of shape \(3, 4, 4\), the model takes \(3, 2, 2\)"):
        next(open_images([picture(4, 4)], latent_model(Wrong())).batches(1))


def test_pictures_are_not_taken_for_latents():
    with pytest.raises(
        DataError, match="8-bit picture, and the model takes latents: encode it with the model's"
    ):
        read([picture()], model_range=None)
    latents = torch.randn(2, 3, 6, 5) * 7
    assert torch.equal(read(latents, model_range=None), latents)


# Files nobody should trust


def npz(path, members: dict[str, bytes], compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def header(shape, dtype="|u1", version=(1, 0)) -> bytes:
    buffer = io.BytesIO()
    values = {"descr": dtype, "fortran_order": False, "shape": shape}
    writer = (
        np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0
    )
    writer(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("shape", [(6_000_000, 3, 33, 33), (10**30, 3, 6, 5), (2**31, 2**31, 2**31)], ids=str)
@pytest.mark.parametrize("name", ["image.npy", "label.npy"])
def test_a_header_that_claims_what_is_not_there_is_not_believed(tmp_path, monkeypatch, version, shape, name):
    """19.6 GB were asked for."""
    members = {"image.npy": header((0, 3, 6, 5)), name: header(shape, version=version) + bytes(100)}
    path = npz(tmp_path / "a.npz", members)
    monkeypatch.setattr(np, "load", None)  # nobody gets as far as reading it
    with pytest.raises(DataError, match=rf"a\.npz: {name} claims [\d,]+ bytes that are not in the file"):
        Samples(path, (3, 6, 5), PIXELS)


def test_an_archive_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    content = header((10_000, 3, 6, 5)) + bytes(10_000 * 90)
    path = npz(tmp_path / "bomb.npz", {"image.npy": content}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    assert len(Samples(path, (3, 6, 5), PIXELS)) == 10_000
    monkeypatch.setattr(sources, "_memory", lambda: 500_000.0)
    with pytest.raises(DataError, match=r"bomb\.npz does not fit into memory: save its images as a \.npy"):
        Samples(path, (3, 6, 5), PIXELS)


def test_memory_that_runs_out_is_said_in_one_line(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", image=np.zeros((2, 3, 6, 5), np.uint8))

    def load(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(DataError, match="does not fit into memory"):
        Samples(tmp_path / "a.npz", (3, 6, 5), PIXELS)


def test_an_npy_that_claims_gigabytes_is_refused(tmp_path):
    (tmp_path / "a.npy").write_bytes(header((6_000_000, 3, 33, 33)) + bytes(1000))
    with pytest.raises(DataError, match=r"a\.npy cannot be read"):
        Samples(tmp_path / "a.npy", (3, 33, 33), PIXELS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16,
        b"\x93NUMPY\x01\x00\x10\x00" + b"'" * 16,
        b"\x93NUMPY\x01\x00\x06\x00{'a'\n(",
        b"\x93NUMPY\x09\x00" + bytes(50),
        b"\x93NUMPY\x03\x00\x04\x00\x00\x00\xff\xff\xff\xff",
        header((-5, 3, 6, 5)) + bytes(100),
        header((1, 3, 6, 5), "|O") + bytes(100),
    ],
    ids=lambda content: repr(content[:16]),
)
def test_a_damaged_member_is_said_in_one_line(tmp_path, content):
    npz(tmp_path / "a.npz", {"image.npy": content})
    (tmp_path / "a.npy").write_bytes(content)
    for name in ("a.npz", "a.npy"):
        with pytest.raises(DataError, match=rf"{name}") as caught:
            read(tmp_path / name)
        assert str(caught.value).isprintable()


def test_an_encrypted_archive_is_said_in_one_line(tmp_path):
    path = npz(tmp_path / "a.npz", {"image.npy": header((1, 3, 6, 5)) + bytes(90)})
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the bits that say so, in the member's header and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz cannot be read: .*encrypted"):
        Samples(path, (3, 6, 5), PIXELS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_picture_is_read_upright(tmp_path, orientation):
    """Its EXIF orientation was ignored without a word."""
    shown = Image.fromarray(np.kron(pixels(6, 5)[..., :1].repeat(3, 2), np.ones((8, 8, 1), np.uint8)))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = shown.transpose(undo[orientation]) if orientation > 1 else shown
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.jpg", quality=100, subsampling=0, exif=exif)
    stored.save(tmp_path / "b.png", exif=exif)
    with Image.open(tmp_path / "b.png") as opened:
        for source in (tmp_path, [tmp_path / "a.jpg", opened]):
            jpeg, png = read(source, (3, 48, 40))
            assert torch.equal(png, planes(shown))
            assert (jpeg - planes(shown)).abs().max() <= 3  # rounding to YCbCr


def test_names_do_nothing_to_a_terminal_but_appear(tmp_path):
    name = "\x1b[2J\nverdict: all fine\r.png"
    for folder in (tmp_path / "a", tmp_path / "\x1b[31mred\n"):
        folder.mkdir()
        (folder / name).write_bytes(b"not an image")
        with pytest.raises(DataError, match=r"\\x1b\[2J\\nverdict") as caught:
            read(folder)
        assert str(caught.value).isprintable()
        picture(9, 9).save(folder / name)
        data = Samples(Images(folder, skip_bad=True), (3, 6, 5), PIXELS)
        assert list(data.batches(1)) == []
        assert data.name.isprintable()
        assert data.skipped[0].isprintable()
    for source in (tmp_path / "\x1b[1m", tmp_path / "\x1b.npy"):
        with pytest.raises(DataError, match=r"\\x1b.*is not there") as caught:
            Samples(source, (3, 6, 5), PIXELS)
        assert str(caught.value).isprintable()


def test_names_with_braces_are_only_names(tmp_path):
    for name in ("{}.png", "{0!r:>99}.png", "{resize}.png"):
        picture(6, 10).save(tmp_path / name)
    for images in ({}, {"resize": "shorter"}):
        with pytest.raises(DataError, match=r"\{.*\}\.png is 6x10") as caught:
            read(tmp_path, **images)
        assert caught.value.phrased(Argument.option).endswith(("--resize exact", "--crop center too"))
