"""Ten thousand damaged calibration files: always a clear error, never a crash or a wrong correction."""

import json
import random
import struct

import pytest
import torch

import trueup
from trueup.errors import ArtifactError

FILES = 10_000


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small but complete file."""
    denoiser = trueup.Denoiser(
        lambda x_t, t: 0.9 * x_t + 0.1, trueup.process.ContinuousVP(), "noise", (1, 3, 4), data_range=None
    )
    cal = trueup.calibrate(denoiser, torch.randn(24, 1, 3, 4), estimator="paired", levels=[0.2, 0.5, 0.8])
    path = tmp_path_factory.mktemp("fuzz") / "good.trueup.safetensors"
    cal.save(path)
    return path.read_bytes()


def damage(good: bytes, dice: random.Random) -> bytes:
    """One of the ways in which files go wrong, or are made to."""
    data = bytearray(good)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    way = dice.randrange(9)
    if way == 0:  # bits flip
        for _ in range(dice.choice((1, 1, 2, 8, 64))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif way == 1:  # cut short
        del data[dice.randrange(len(data)) :]
    elif way == 2:  # a stretch is lost
        start = dice.randrange(len(data))
        del data[start : start + dice.randrange(1, 200)]
    elif way == 3:  # a stretch is overwritten
        start, length = dice.randrange(len(data)), dice.randrange(1, 200)
        data[start : start + length] = dice.choice((bytes(length), b"\xff" * length, dice.randbytes(length)))
    elif way == 4:  # something is put in
        start = dice.randrange(len(data))
        data[start:start] = dice.randbytes(dice.randrange(1, 100))
    elif way == 5:  # the header's length is wrong
        data[:8] = struct.pack(
            "<Q", dice.choice((0, 1, header, len(data), 2**32, 2**63, dice.getrandbits(64)))
        )
    elif way == 6:  # digits in the header change: shapes, offsets, counts
        for _ in range(dice.randrange(1, 4)):
            places = [i for i in range(8, header) if 48 <= data[i] <= 57]
            data[dice.choice(places)] = 48 + dice.randrange(10)
    elif way == 7:  # two stretches change places
        a, b = sorted(dice.randrange(len(data)) for _ in range(2))
        length = min(dice.randrange(1, 100), b - a, len(data) - b)
        data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    else:  # the JSON is replaced by other JSON
        text = json.loads(good[8:header])
        name = dice.choice(list(text))
        text[name] = dice.choice(
            (None, [], {}, 0, -1, "x", 1e308, {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]})
        )
        new = json.dumps(text).encode()
        data = bytearray(struct.pack("<Q", len(new)) + new + good[header:])
    return bytes(data)


def same(one, other) -> bool:
    parts = ("lam", "b", "a", "d")
    equal = [torch.equal(getattr(one.correction, n), getattr(other.correction, n)) for n in parts]
    return all(equal) and torch.equal(one.t, other.t) and one.shape == other.shape


def test_damaged_files(good, tmp_path):
    dice = random.Random(0)
    path = tmp_path / "damaged.trueup.safetensors"
    path.write_bytes(good)
    whole = trueup.load(path)
    reasons = []
    for _ in range(FILES):
        damaged = damage(good, dice)
        path.write_bytes(damaged)
        try:
            loaded = trueup.load(path)
        except ArtifactError as error:
            reasons.append(str(error))
        else:
            assert same(loaded, whole)  # what was damaged did not matter: spaces, say
    assert len(reasons) > 0.95 * FILES
    assert all(str(path) in reason and "\n" not in reason for reason in reasons)
