"""Files are written whole or not at all, and read only if nothing in them was changed."""

import errno
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import trueup
from trueup import files
from trueup.errors import Argument, ArtifactError, DataError, ImageError, TrueupError
from trueup.files import FORMAT, Folder, bundled, line, load_as, load_tensors, printable, save_tensors, write

META = {"name": "a", "numbers": [1, 2.5, None, True], "nested": {"a": {"b": [1]}}}
TENSORS = {
    "float": torch.randn(3, 4),
    "double": torch.randn(2, dtype=torch.float64),
    "half": torch.randn(2).half(),
    "bfloat": torch.randn(2).bfloat16(),
    "whole": torch.tensor([-(2**63), 2**63 - 1]),
    "truth": torch.tensor([True, False]),
    "none": torch.zeros(0, 3),
    "one": torch.tensor(3.0),
}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def path(tmp_path) -> Path:
    save_tensors(tmp_path / "a.safetensors", "thing", META, TENSORS)
    return tmp_path / "a.safetensors"


def forge(path: Path, raw: str | dict, tensors=None) -> None:
    """Write a file as someone would who knows how checksums are made."""
    tensors = tensors or {"a": torch.zeros(2)}
    if isinstance(raw, dict):
        meta = {"kind": "thing", "format": FORMAT, **raw}
        meta["checksum"] = files._checksum(tensors, meta)
        raw = json.dumps(meta)
    path.write_bytes(save(tensors, {"trueup": raw}))


def refused(path: Path, message: str, kind: str = "thing") -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        load_tensors(path, kind)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(path))


def test_what_was_saved_is_loaded(path):
    meta, tensors = load_tensors(path, "thing")
    assert meta == {**META, "kind": "thing", "format": FORMAT}
    assert same(tensors, TENSORS)


def test_loaded_tensors_do_not_depend_on_the_file(path):
    _, tensors = load_tensors(path, "thing")
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    assert same(tensors, TENSORS)


def test_numbers_of_other_libraries_are_plain_ones(tmp_path):
    meta = {"a": np.float64(0.5), "b": torch.tensor([1, 2]), "c": (1, 2), "d": np.int64(3)}
    shared = torch.arange(4.0)
    save_tensors(tmp_path / "a", "thing", meta, {"x": shared, "y": shared[:2], "z": shared.reshape(2, 2).T})
    read, tensors = load_tensors(tmp_path / "a", "thing")
    assert {n: read[n] for n in "abcd"} == {"a": 0.5, "b": [1, 2], "c": [1, 2], "d": 3}
    assert torch.equal(tensors["z"], shared.reshape(2, 2).T)


@pytest.mark.parametrize(
    "meta",
    [
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": 10**400},
        {"a": [2**60]},
        {"a": object()},
        {"a": {1, 2}},
        {"a": [[[[[[[[[[1]]]]]]]]]]},
    ],
    ids=["nan", "inf", "huge", "not JSON's", "object", "set", "deep"],
)
def test_what_would_not_be_read_is_not_written(tmp_path, meta):
    with pytest.raises(ArtifactError, match="cannot write"):
        save_tensors(tmp_path / "a", "thing", meta, {})
    assert list(tmp_path.iterdir()) == []


def test_texts_are_written_so_that_they_can_be_shown(tmp_path):
    save_tensors(tmp_path / "a", "thing", {"x\x1b": "a\x1b[2J\nb", "long": "é" * 5000}, {})
    meta, _ = load_tensors(tmp_path / "a", "thing")
    assert meta["x\\x1b"] == "a\\x1b[2J\\nb"
    assert meta["long"] == "é" * 1000


# Files nobody should trust


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"images": 10**400}, "images is 1000.*, out of range"),
        ({"images": 10**4000}, "images is 1000.*, out of range"),
        ({"images": -(10**20)}, "images is -1000.*, out of range"),
        ({"images": [1, [10**16]]}, "images is 1000.*, out of range"),
        ({"images": {"a": 1e17}}, "a is 1e\\+17, out of range"),
        ({"a": [[[[[[[[1]]]]]]]]}, "a is nested too deeply"),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}, "nested too deeply"),
        ({"a": "\x1b[2J"}, "a is a text that is too long or not printable"),
        ({"a": "fine\nverdict: all fine"}, "a is a text that is too long or not printable"),
        ({"a": ["x" * 1001]}, "a is a text that is too long"),
        ({"\x1b[31m": 1}, "a name in its metadata is a text"),
        ({"x" * 5000: 1}, "a name in its metadata is a text"),
        ({"x" * 900: 10**400}, "x{40} is 1000"),
        ({"a": "\u202egnp.exe"}, "not printable"),
        ({"kind": "other"}, "holds other, not thing"),
        ({"kind": "\x1b[2J"}, r"holds \\x1b\[2J, not thing"),
        ({"kind": "x" * 500}, "holds x{40}, not thing"),
        ({"kind": {"a": [1]}}, "holds .*, not thing"),
        ({"kind": None}, "holds None, not thing"),
        ({"format": 2}, "has format 2, this trueup reads 3: make it again"),
        ({"format": 4}, "has format 4, this trueup reads 3: upgrade trueup"),
        ({"format": 10**4000}, "unreadable metadata"),
        ({"format": -(10**4000)}, "unreadable metadata"),
        ({"format": True}, "unreadable metadata"),
        ({"format": 3.0}, "unreadable metadata"),
        ({"format": "3"}, "unreadable metadata"),
        ({"format": None}, "unreadable metadata"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_out_of_bounds_are_refused_by_name_even_with_a_good_checksum(tmp_path, values, message):
    forge(tmp_path / "a", values)
    refused(tmp_path / "a", message)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        '{"format": 3, "kind": "thing", "a": NaN}',
        '{"format": 3, "kind": "thing", "a": Infinity}',
        '{"format": 3, "kind": "thing", "a": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format": 3, "kind": "thing", "a": 1e999}',
        '{"format": 3, "kind": "thing", "checksum": null}',
        '{"format": 3, "kind": "thing", "checksum": ["a"]}',
        '{"format": 3, "kind": "thing", "a": "\\ud800"}',
    ],
    ids=lambda raw: raw[:40],
)
def test_metadata_that_is_none_is_refused(tmp_path, raw):
    forge(tmp_path / "a", raw)
    refused(tmp_path / "a", "unreadable metadata|cannot be read|checksum does not match")


def test_any_change_is_noticed(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    head, body = content[8 : 8 + length], content[8 + length :]
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(body), 40):
        changed = bytearray(body)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(content[: 8 + length] + changed)
        refused(path, "checksum does not match")
    for old, new in ((b"2.5", b"3.5"), (b'\\"a\\"', b'\\"b\\"'), (b"F64", b"I64"), (b"[3,4]", b"[4,3]")):
        assert old in head
        path.write_bytes(content[:8] + head.replace(old, new) + body)
        refused(path, "checksum does not match|cannot be read")


def test_a_file_cut_short_anywhere_is_refused(path):
    content = path.read_bytes()
    for length in [*range(64), *range(64, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        refused(path, "cannot be read|not a file of trueup's|checksum")
    path.write_bytes(content + b"\0")
    refused(path, "cannot be read|checksum")


def test_a_header_that_claims_gigabytes_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**33], "data_offsets": [0, 2**35]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(100))
    refused(tmp_path / "a", "cannot be read")
    (tmp_path / "a").write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    refused(tmp_path / "a", "cannot be read")


def test_files_of_others_are_refused(tmp_path):
    (tmp_path / "other").write_bytes(save({"a": torch.zeros(2)}))
    refused(tmp_path / "other", "is not a file of trueup's")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path / "pickle", "cannot be read")
    refused(tmp_path / "nowhere", "nowhere does not exist")
    refused(tmp_path, "is a directory or a device, not a file")
    refused(tmp_path / ("x" * 5000), "cannot be read")


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(tmp_path):
    """In a process that is not root's, which reads everything."""
    save_tensors(tmp_path / "x", "things", META, TENSORS)
    tmp_path.chmod(0o755)
    (tmp_path / "x").chmod(0)
    code = "import os, sys, torch; from trueup.files import load_tensors\n"
    code += f"os.chdir({str(tmp_path)!r})\nif os.getuid() == 0:\n    os.setuid(65534)\n"
    code += "try:\n    load_tensors('x', 'things')\nexcept Exception as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "x cannot be read: [Errno 13] Permission denied" in done.stdout, done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is a directory or a device, not a file")


# Writing


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write(path, b"before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*a: No space left on device"):
        write(path, b"after", DataError)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", b"content")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_there_are_named(tmp_path):
    with pytest.raises(TrueupError, match=r"cannot write .*nowhere/a: No such file or directory"):
        write(tmp_path / "nowhere" / "a", b"content")
    with pytest.raises(TrueupError, match="cannot write"):
        write(tmp_path, b"content")


@pytest.mark.skipif(os.name == "nt", reason="needs permissions")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_permissions_the_user_set_without_touching_the_umask(tmp_path, mask):
    """os.umask is the whole process's: reading it changes it for every thread for a moment."""
    code = (
        "import os, sys; from pathlib import Path; set_mask = os.umask; set_mask(int(sys.argv[2]));"
        "os.umask = None; from trueup.files import write; write(Path(sys.argv[1]), b'a')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), str(mask)], check=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_nothing_in_the_package_calls_umask():
    package = Path(trueup.__file__).parent
    assert [p for p in package.rglob("*.py") if "umask(" in p.read_text(encoding="utf-8")] == []


# Folders


def test_a_folder_is_made_and_held(tmp_path):
    with Folder(tmp_path / "a" / "b") as folder:
        assert folder.path.is_dir()
        with pytest.raises(TrueupError, match="another process is working in"):
            Folder(folder.path)
    with Folder(folder.path):
        pass


def test_only_our_own_leftovers_are_removed(tmp_path):
    ours = tmp_path / ".a.safetensors.tmp-0123abcd"
    others = [".notes.tmp-old", ".a.tmp-", "a.tmp-0123abcd", ".vim.tmp-0123abcdef", "a.png"]
    for name in (ours.name, *others):
        (tmp_path / name).write_bytes(b"")
    with Folder(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_cannot_be_used_is_named(tmp_path, recwarn):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TrueupError, match=r"cannot use .*file: File exists"):
        Folder(tmp_path / "file")
    (tmp_path / "a" / ".x.tmp-0123abcd").mkdir(parents=True)
    with pytest.raises(TrueupError, match=r"cannot use .*a: Is a directory"):
        Folder(tmp_path / "a")
    assert [w for w in recwarn if "Unraisable" in w.category.__name__] == []


# Texts and errors


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 'text'", "plain é 漢 'text'"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("\udcff", "\\udcff"),  # a name that is not UTF-8
        ("back\\slash", "back\\slash"),
        ("", ""),
    ],
)
def test_printable_texts_only_appear(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
    shown.encode("utf-8")


def test_an_error_is_one_line():
    assert line(ValueError("a\n  b\x1b[0m")) == "a b\\x1b[0m"
    assert len(line(ValueError("x" * 1000))) == 200


def test_an_error_speaks_as_its_reader_does():
    error = ImageError(
        "a{b}.png is 9x9", "pass {} or {}", Argument("resize", "exact"), Argument("flip", True)
    )
    assert str(error) == "a{b}.png is 9x9: pass resize='exact' or flip=True"
    assert error.phrased(Argument.option) == "a{b}.png is 9x9: pass --resize exact or --flip"
    again = pickle.loads(pickle.dumps(error))  # as multiprocessing does
    assert (type(again), str(again), again.one_image) == (ImageError, str(error), True)


def test_only_what_comes_with_the_package_is_bundled():
    assert bundled("bundled:images").exists()
    assert bundled("elsewhere") == Path("elsewhere")
    with pytest.raises(TrueupError, match="nothing named bundled:x comes with trueup"):
        bundled("bundled:x")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ArtifactError("its rows make no sense"), "its rows make no sense"),
        (TrueupError("band edges must rise"), "damaged: TrueupError: band edges must rise"),
        (KeyError("rows"), "damaged: KeyError: 'rows'"),
        (ValueError("two\nlines"), "damaged: ValueError: two lines"),
    ],
)
def test_whatever_unpacking_stumbles_over_names_the_file(tmp_path, error, words):
    path = tmp_path / "thing.safetensors"
    save_tensors(path, "thing", {"name": "a"}, {})

    def unpack(meta, tensors):
        raise error

    with pytest.raises(ArtifactError) as caught:
        load_as(path, "thing", unpack)
    assert str(caught.value) == f"{path}: {words}"
    assert load_as(path, "thing", lambda meta, tensors: meta["name"]) == "a"
