"""Unsound checkpoints are refused in one sentence (what was wrong, where, what to do) and left unchanged."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import one, packed, sharded
from safetensors.numpy import save_file

from kitlib.checkpoint import INDEX, Checkpoint, CheckpointError
from kitlib.findings import KitError


def refused(path: Path | str, *words: str, at: Path | None = None) -> CheckpointError:
    """The refusal of `path`: one line, naming the file at fault, saying what is wrong and what to do."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    error, message = caught.value, str(caught.value)
    assert isinstance(error, KitError) and message.isprintable() and "; " in message and len(message) < 700
    assert message.encode()  # can be printed
    assert error.path == (at or Path(path))
    for word in words:
        assert word in message
    return error


# ---- the bytes of one file

PLAIN = {"a": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}}
PLAIN["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
NEST = 100_000


def at(start: int, end: int) -> dict:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


# What the file holds and words of the sentence that refuses it.
BROKEN = {
    "empty": (b"", "is empty"),
    "three bytes": (b"abc", "only 3 bytes"),
    "header longer than the file": (packed(PLAIN, b"12345678", 5000), "header of 5000 bytes"),
    "header of 100 GB": (packed(PLAIN, b"12345678", 100 * 2**30), f"header of {100 * 2**30} bytes"),
    "header of 2^64": (b"\xff" * 8 + b"{}", "more than the 2 bytes"),
    "cut in the header": (packed(PLAIN)[:40], "more than the 32 bytes"),
    "cut in the data": (packed(PLAIN, b"1234567"), "'b' that ends at byte 8 of 7"),
    "not JSON": (packed(b"{oops}"), "not hold sound JSON", "line 1 column 2"),
    "no header": (packed(b""), "not hold sound JSON"),
    "a list": (packed(b"[1]"), "a JSON list"),
    "a number": (packed(b"1"), "a JSON int"),
    "null": (packed(b"null"), "a JSON NoneType"),
    "duplicate tensor": (packed(b'{"t":{},"t":{}}'), "the key 't' appears twice"),
    "duplicate field": (packed(b'{"t":{"dtype":"U8","dtype":"I8"}}'), "the key 'dtype' appears twice"),
    "deep lists": (packed(b"[" * NEST + b"]" * NEST), "nested too deeply"),
    "deep objects": (packed(b'{"a":' * NEST + b"1" + b"}" * NEST), "nested too deeply"),
    "NaN": (packed(b'{"t":NaN}'), "'NaN' is not a finite number"),
    "a number without end": (packed(b'{"t":' + b"9" * 9999 + b"}"), "not hold sound JSON"),
    "invalid UTF-8": (packed(b'{"\xff\xfe":1}'), "not hold sound JSON", "utf-8"),
    "half a character": (packed(rb'{"\ud800":1}'), "not hold sound JSON", "surrogates"),
    "entry is no object": (packed({"t": 1}), "'t' without a dtype"),
    "no dtype": (one(None), "'t' without a dtype"),
    "dtype is a number": (one(3), "'t' without a dtype"),
    "no shape": (packed({"t": {"dtype": "U8", "data_offsets": [0, 0]}}), "shape is no list of whole numbers"),
    "shape of strings": (one(shape=["4"]), "shape is no list of whole numbers"),
    "shape of bools": (one(shape=[True, 4]), "shape is no list of whole numbers"),
    "shape of floats": (one(shape=[4.0]), "shape is no list of whole numbers"),
    "negative shape": (one(shape=[-2, -2]), "shape is no list of whole numbers"),
    "shape is a number": (one(shape=4), "shape is no list of whole numbers"),
    "absurd shape": (one(shape=[2**40, 2**40]), "absurd shape"),
    "absurd empty shape": (one(shape=[0, 2**62, 2**62], offsets=[0, 0], data=b""), "absurd shape"),
    "absurd rank": (one(shape=[1] * 65 + [4]), "absurd shape"),
    "negative offset": (one(offsets=[-4, 0]), "data_offsets is no list of whole numbers"),
    "offset is a bool": (one(offsets=[False, 4]), "data_offsets is no list of whole numbers"),
    "offset is a string": (one(offsets=[0, "4"]), "data_offsets is no list of whole numbers"),
    "one offset": (one(offsets=[4]), "no start and end"),
    "end before start": (one(offsets=[4, 0]), "no start and end"),
    "offset out of range": (one(offsets=[0, 4 * 10**9]), "ends at byte 4000000000 of 4"),
    "shape against bytes": (one(shape=[5]), "4 bytes do not match U8 [5]"),
    "half a byte": (one("F4", [7]), "4 bytes do not match F4 [7]"),
    "overlap": (packed({"a": PLAIN["a"], "b": at(2, 6)}, b"123456"), "'b' that overlaps 'a'"),
    "the same bytes twice": (packed({"a": PLAIN["a"], "b": PLAIN["a"]}, b"1234"), "'b' that overlaps 'a'"),
    "hole in front": (packed({"b": PLAIN["b"]}, b"12345678"), "hole of 4 bytes after the header"),
    "hole between": (packed({"a": PLAIN["a"], "b": at(6, 10)}, b"1234567890"), "hole of 2 bytes after 'a'"),
    "bytes at the end": (packed(PLAIN, b"1234567890"), "2 bytes after 'b' that no tensor covers"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}}), "__metadata__ that is no map of strings"),
    "metadata is a list": (packed({"__metadata__": ["a"]}), "__metadata__ that is no map of strings"),
    "no tensors": (packed({}), "holds no tensors"),
    "name with a line break": (packed({"a\nb\x1b[31m": 1}), r"'a\nb\x1b[31m' without a dtype"),
    "very long name": (packed({"a" * 9999: 1}), "…"),
    "torch zip": (b"PK\x03\x04" + b"0" * 99, "never unpickles", "weights_only=True"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "GGUF": (b"GGUF\x03\0\0\0" + b"0" * 99, "is a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("content, words", [(v[0], v[1:]) for v in BROKEN.values()], ids=BROKEN)
def test_broken_file_is_refused(tmp_path, content, words):
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    for path in (tmp_path, file):
        refused(path, *words, at=path if words[0] == "holds no tensors" else file)
    assert file.read_bytes() == content and os.listdir(tmp_path) == ["m.safetensors"]


def test_100_gb_header_in_a_file_of_that_size_is_not_read(tmp_path):
    file = tmp_path / "m.safetensors"
    with open(file, "wb") as handle:
        handle.write(struct.pack("<Q", 100 * 2**30))
        try:
            handle.truncate(101 * 2**30)
        except OSError:
            pytest.skip("this file system has no sparse files")
    refused(file, "more than the 100000000 bytes allowed")


def test_file_that_shrinks_after_it_was_opened(tmp_path):
    file = tmp_path / "m.safetensors"
    save_file({"x": np.zeros(1000, np.float32)}, file)
    checkpoint = Checkpoint.open(file)
    os.truncate(file, 2000)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read("x")


# ---- paths and directories


def test_paths_that_cannot_be_read(tmp_path):
    refused(tmp_path / "absent", "No such file", "check the spelling")
    refused("nul\0byte", "cannot be read")
    refused(tmp_path / ("x" * 500), "too long")
    refused(tmp_path, "holds no .safetensors file")
    os.mkfifo(tmp_path / "m.safetensors")  # opening it would block for ever
    refused(tmp_path, "not a regular file", at=tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").unlink()
    (tmp_path / "m.safetensors").mkdir()
    refused(tmp_path, "not a regular file", at=tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").rmdir()
    (tmp_path / "m.safetensors").symlink_to("m.safetensors")
    refused(tmp_path, "cannot be read", at=tmp_path / "m.safetensors")


@contextmanager
def someone_else():
    """Run as another user where the tests run as root, whom no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_permission_denied():
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        save_file({"x": np.zeros(1, np.float32)}, folder / "m.safetensors")
        (folder / "config.json").write_text("{}")
        for name in ("m.safetensors", "config.json"):
            (folder / name).chmod(0)
            with someone_else():
                refused(folder, "Permission denied", at=folder / name)
            (folder / name).chmod(0o644)
        folder.chmod(0)
        with someone_else():
            refused(folder, "Permission denied")
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "eagle.pth", "last.ckpt", "w.pkl"])
def test_pickles_are_never_opened(tmp_path, name):
    trap = tmp_path / "trap"
    file = tmp_path / name
    file.write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % bytes(trap))
    refused(tmp_path, "never unpickles", "weights_only=True")
    refused(file, "never unpickles", "weights_only=True")
    assert not trap.exists()


def test_several_files_without_an_index(tmp_path):
    for name in ("one", "two", "three"):
        save_file({name: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, "holds 3 .safetensors files", "restore the index")
    assert list(Checkpoint.open(tmp_path / "two.safetensors").tensors) == ["two"]
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "three.safetensors").rename(tmp_path / "._two.safetensors")  # what macOS leaves behind
    assert list(Checkpoint.open(tmp_path).tensors) == ["two"]


JSON = {
    "list": (b"[]", "a JSON list"),
    "string": (b'"x"', "a JSON str"),
    "empty": (b"", "not hold sound JSON"),
    "cut": (b'{"hidden_size": 5', "not hold sound JSON"),
    "single quotes": (b"{'a': 1}", "not hold sound JSON"),
    "NaN": (b'{"rope_theta": NaN}', "'NaN' is not a finite number"),
    "Infinity": (b'{"rope_theta": -Infinity}', "'-Infinity' is not a finite number"),
    "too large a number": (b'{"rope_theta": 1e999}', "'1e999' is not a finite number"),
    "duplicate": (b'{"a": {"b": 1, "b": 2}}', "the key 'b' appears twice"),
    "deep": (b'{"a":' + b"[" * NEST + b"]" * NEST + b"}", "nested too deeply"),
    "invalid UTF-8": (b'{"a": "\xc3("}', "utf-8"),
    "half a character": (rb'{"a": ["\udc80"]}', "surrogates"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "utf-8"),
}


@pytest.mark.parametrize("content, words", [(v[0], v[1:]) for v in JSON.values()], ids=JSON)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_broken_config_or_index_is_refused(tmp_path, name, content, words):
    sharded(tmp_path)
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, *words, at=tmp_path / name)
    assert (tmp_path / name).read_bytes() == content


def test_config_that_is_no_file_or_far_too_large(tmp_path):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "m.safetensors")
    config = tmp_path / "config.json"
    config.symlink_to("gone.json")
    refused(tmp_path, "No such file", at=config)
    config.unlink()
    config.mkdir()
    refused(tmp_path, "not a regular file", at=config)
    config.rmdir()
    with open(config, "wb") as handle:
        handle.truncate(2**30)
    refused(tmp_path, "too many for a JSON file", at=config)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 1}, {"a": ["m-a.safetensors"]}])
def test_index_without_a_sound_weight_map(tmp_path, weight_map):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "no weight_map", at=tmp_path / INDEX)


def test_index_and_shards_disagree(tmp_path):
    a, b = "m-a.safetensors", "m-b.safetensors"
    refused(sharded(tmp_path, {"a": a, "b": b, "c": b}), "lists 1 tensors in it ('c'", at=tmp_path / b)
    refused(sharded(tmp_path, {"b": b, "c": a}), "disagrees", at=tmp_path / a)
    refused(sharded(tmp_path, {"a": b, "b": a}), "disagrees", at=tmp_path / a)
    save_file({"a": np.zeros(1, np.int8), "extra": np.zeros(1, np.int8)}, sharded(tmp_path) / a)
    refused(tmp_path, "does not list 1 tensors in it ('extra'", at=tmp_path / a)
    (sharded(tmp_path) / b).unlink()
    refused(tmp_path, "'m-b.safetensors', which is missing", at=tmp_path / INDEX)
    save_file({"a": np.zeros(1, np.int8)}, sharded(tmp_path) / "model.safetensors")
    refused(tmp_path, "does not list the model.safetensors beside it", at=tmp_path / INDEX)


@pytest.mark.parametrize(
    "shard",
    ["../out.safetensors", "../../../etc/passwd", "/etc/passwd", "OUT", "link", "deep", "sub/x", "..", "."],
)
def test_index_never_leads_out_of_its_folder(tmp_path, shard):
    secret = tmp_path / "out.safetensors"
    save_file({"a": np.zeros(4, np.float32)}, secret)
    folder = sharded(tmp_path / "d", {"a": str(secret) if shard == "OUT" else shard})
    (folder / "link").symlink_to(secret)
    (folder / "up").symlink_to("..")
    (folder / "deep").symlink_to("up/out.safetensors")
    refused(folder, "does not lie in its folder and is not followed", at=folder / INDEX)


def test_hub_cache_does_not_open_the_way_to_other_folders(tmp_path):
    snapshot = tmp_path / "models--o--n/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--o--n/blobs").mkdir()
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "blobs")
    sharded(snapshot, {"a": "x"})
    (snapshot / "x").symlink_to("../../../blobs")
    refused(snapshot, "is not followed", at=snapshot / INDEX)


def test_shard_names_that_name_nothing(tmp_path):
    refused(sharded(tmp_path, {"a": "m\0"}), "cannot be read", at=tmp_path / INDEX)
    refused(sharded(tmp_path, {"a": ""}), "not a regular file")
