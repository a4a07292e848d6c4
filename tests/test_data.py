"""Images reach the network as the numbers they hold, in a fixed order, or not at all."""

from __future__ import annotations

import io
import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trueup
from trueup import process
from trueup.data import Samples, Transform, digests
from trueup.errors import DataError

# Lossless ways to write an RGB image of few colours; JPEG is not one and is tested on its own.
LOSSLESS = {
    "a.png": {},
    "b.bmp": {},
    "c.webp": {"lossless": True},
    "d.gif": {},
    "e.ppm": {},
    "f.tiff": {},
}


def digest(x0):
    """Of a batch, as moments add it up over batches."""
    return sum(digests(x0)) % 2**64


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


def read(
    source, shape=(3, 6, 5), model_range=PIXELS, size=4, start=0, stop=None, **transform
) -> torch.Tensor:
    """Every sample, stacked; 8-bit values stay 0..255 unless the model has a range."""
    data = Samples(source, shape, model_range, Transform(**transform))
    return torch.cat([batch.x0 for batch in data.batches(size, start, stop)])


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
    with pytest.raises(DataError, match=r"notes\.txt is not a folder, \.npy or \.npz"):
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
    assert (next(data.batches(4, 1999)).x0 == 7).all()


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
    assert "data_range=(-1, 1)" in message
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


@pytest.mark.parametrize("data_range", [(1, 0), (1, 1), (0, float("nan")), (0, float("inf")), (0,)])
def test_ranges_that_make_no_sense_are_refused(data_range):
    with pytest.raises(DataError, match=r"data_range is \(low, high\) with low < high"):
        Transform(data_range=data_range)


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


def test_stream_is_consumed_lazily():
    pulled = []

    def images():
        for i in itertools.count():
            pulled.append(i)
            yield picture(seed=i)

    batches = Samples(images(), (3, 6, 5), PIXELS).batches(4, 0, 10)
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

    read(Counting([picture()] * 100), start=90, stop=93)
    assert asked == [90, 91, 92]


def test_generator_is_read_on_from_where_it_was_left():
    x0 = torch.arange(30.0).reshape(30, 1, 1, 1).expand(30, 3, 6, 5)
    for generator in ((row for row in x0), (x0[i : i + 4] for i in range(0, 30, 4))):
        data = Samples(generator, (3, 6, 5), PIXELS)
        first = list(data.batches(4, 0, 10))
        second = list(data.batches(4, 10, 15))
        rest = list(data.batches(8, 20))
        for batches, wanted in ((first, range(10)), (second, range(10, 15)), (rest, range(20, 30))):
            assert torch.cat([batch.index for batch in batches]).tolist() == list(wanted)
            assert torch.equal(torch.cat([batch.x0 for batch in batches]), x0[wanted.start : wanted.stop])


def test_generator_is_not_read_twice():
    data = Samples((picture(seed=i) for i in range(5)), (3, 6, 5), PIXELS)
    assert sum(len(batch.index) for batch in data.batches(2)) == 5
    with pytest.raises(DataError, match="generator can be read only once, and 5 samples of it are gone"):
        next(data.batches(2))


def test_more_images_for_the_mean_come_after_those_that_were_measured():
    denoiser = trueup.Denoiser(lambda x_t, t: x_t, process.ContinuousVP(), "noise", shape=(1, 2, 2))
    x0 = torch.linspace(-1, 1, 80).reshape(20, 1, 2, 2)
    common = {"images": 6, "mean_images": 8, "levels": [0.5], "data_range": (-1, 1), "progress": False}
    from_list = trueup.measure(denoiser, list(x0), **common)
    from_generator = trueup.measure(denoiser, (x for x in x0), **common)
    assert from_generator.data_rows == from_list.data_rows == 14
    assert from_generator.data_digest == from_list.data_digest == digest(x0[:14])


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
    with pytest.raises(DataError, match=r"rows have \['caption', 'label', 'photo'\]"):
        read(renamed)
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
    with pytest.raises(DataError, match="is 6x10 after resize='shorter' and crop=None; the model takes 6x5"):
        read([picture(6, 10)], resize="shorter")


def test_crop_takes_the_middle_and_changes_no_pixel():
    image = picture(10, 11)
    assert torch.equal(read([image], crop="center")[0], planes(image)[:, 2:8, 3:8])
    with pytest.raises(DataError, match="after resize=None and crop='center'"):
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
        Transform(resize="longer")
    with pytest.raises(DataError, match="crop is None or 'center', not 'random'"):
        Transform(crop="random")
    for size in (0, -1):
        with pytest.raises(DataError, match="at least one sample"):
            next(Samples(torch.zeros(2, 3, 6, 5), (3, 6, 5), PIXELS).batches(size))


def test_flip_mirrors_about_half_of_the_samples_whoever_reads_them():
    x0 = torch.tensor([1.0, 2.0]).expand(4000, 1, 1, 2)
    flipped = read(x0, (1, 1, 2), size=64, flip=True)
    mirrored = (flipped == x0.flip(-1)).all(-1).flatten()
    assert torch.equal(mirrored, ~(flipped == x0).all(-1).flatten())
    assert abs(int(mirrored.sum()) - 2000) < 5 * 1000**0.5  # five standard deviations of fair coins
    assert torch.equal(read(x0, (1, 1, 2), size=7, start=100, stop=300, flip=True), flipped[100:300])
    assert torch.equal(read(iter(x0), (1, 1, 2), stop=300, flip=True), flipped[:300])


def test_flip_is_left_to_right():
    mirrored = read([picture()] * 8, flip=True)
    upright = planes(picture())
    assert all(torch.equal(x, upright) or torch.equal(x, upright.flip(-1)) for x in mirrored)


# Batches and fingerprints


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 12),
    size=st.integers(1, 5),
    start=st.integers(0, 14),
    stop=st.none() | st.integers(0, 16),
    kind=st.sampled_from(["indexed", "stream", "generator", "loader"]),
)
def test_batches_are_slices(count, size, start, stop, kind):
    x0 = torch.arange(float(count)).reshape(count, 1, 1).expand(count, 1, 3)
    rows = [(x, 100 + i) for i, x in enumerate(x0)]
    sources = {
        "indexed": lambda: Rows(rows),
        "stream": lambda: Stream(rows),
        "generator": lambda: iter(rows),
        "loader": lambda: DataLoader(Rows(rows), batch_size=4),
    }
    batches = list(Samples(sources[kind](), (1, 3), None).batches(size, start, stop))
    wanted = list(range(count))[start:stop]
    assert [index for batch in batches for index in batch.index.tolist()] == wanted
    assert [y for batch in batches for y in batch.y.tolist()] == [100 + i for i in wanted]
    assert all(torch.equal(batch.x0, x0[batch.index]) for batch in batches)
    assert all(len(batch.index) == size for batch in batches[:-1])
    assert all(0 < len(batch.index) <= size for batch in batches[-1:])


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(8)), cut=st.integers(0, 8))
def test_digest_depends_on_neither_order_nor_batches(order, cut):
    x0 = torch.randn(8, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    shuffled = x0[list(order)]
    assert (digest(shuffled[:cut]) + digest(shuffled[cut:])) % 2**64 == digest(x0)
    assert 0 <= digest(x0) < 2**64


def test_digest_changes_with_any_pixel():
    array = np.stack([pixels(6, 5, seed=i) for i in range(2)])
    seen = {digest(read(array, model_range=(-1.0, 1.0)))}
    for position in np.ndindex(array.shape):
        changed = array.copy()
        changed[position] ^= 1
        seen.add(digest(read(changed, model_range=(-1.0, 1.0))))
    assert len(seen) == array.size + 1


def test_digest_counts_repeated_samples_and_moved_pixels():
    x0 = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert digest(torch.cat([x0, x0[:1]])) != digest(x0)
    assert digest(torch.cat([x0, x0])) != 0
    assert digest(x0.flip(-1)) != digest(x0)
    assert digest(x0.flip(0)) == digest(x0)
    assert digest(x0[:0]) == 0


def test_digest_reads_values_not_memory_layout():
    x0 = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    strided = x0.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert digest(strided) == digest(x0)


def test_pictures_are_not_taken_for_latents():
    with pytest.raises(DataError, match="8-bit picture, and the model takes latents: encode it first"):
        read([picture()], model_range=None)
    latents = torch.randn(2, 3, 6, 5) * 7
    assert torch.equal(read(latents, model_range=None), latents)
