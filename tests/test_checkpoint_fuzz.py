"""Whatever is in the files: a checkpoint or one sentence, and the files stay as they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from checkpoint_files import packed, sharded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitlib.checkpoint import INDEX, Checkpoint, CheckpointError, canonical
from kitlib.findings import KitError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["U8", "F4", "BF16", "m-a.safetensors", "../m-a.safetensors", "weight_map", "dtype"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def survives(folder: Path) -> None:
    """Open and use `folder` in every way; anything but success or KitError is a failure."""
    before = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}
    try:
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.dialect and isinstance(checkpoint.config, dict)
        for name, info in checkpoint.tensors.items():
            canonical(name)
            try:
                assert checkpoint.read(name).shape == info.shape
                assert checkpoint.sample(name, 64).nbytes <= 128  # bf16 doubles
                if info.shape:
                    checkpoint.read(name, slice(0, 1))
            except CheckpointError:
                raise
            except KitError:
                assert not info.dtype.isalnum() or info.dtype not in ("U8", "F32", "BF16")
    except CheckpointError as error:
        assert str(error).isprintable() and str(error).encode()
    assert before == {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}


def mutated(value: object, data: st.DataObject) -> object:
    """`value` with one place in it, found by walking down at random, replaced, removed or doubled."""
    if not isinstance(value, (dict, list)) or not value or data.draw(st.booleans()):
        return data.draw(VALUES)
    key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    copy = value.copy()
    kind = data.draw(st.sampled_from(["deeper", "deeper", "remove", "rename"]))
    if kind == "deeper":
        copy[key] = mutated(value[key], data)
    elif kind == "remove":
        del copy[key]
    elif isinstance(value, dict):
        copy[data.draw(st.text(max_size=5))] = copy.pop(key)
    else:
        copy.append(copy[key])
    return copy


FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_any_bytes_changed_in_any_file(tmp_path, data):
    folder = sharded(tmp_path)
    (folder / "config.json").write_text('{"hidden_size": 8, "eagle_config": {"x": [1, 2.5]}}')
    file = folder / data.draw(st.sampled_from(["m-a.safetensors", "config.json", INDEX]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        until = at + data.draw(st.sampled_from([0, 0, 1, 8, 10**6]))
        content[at:until] = data.draw(st.binary(max_size=9))
    file.write_bytes(content)
    survives(folder)


@FUZZ
@given(data=st.data())
def test_any_json_changed_in_header_index_and_config(tmp_path, data):
    folder = sharded(tmp_path)
    header = {
        "a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]},
        "__metadata__": {"format": "pt"},
    }
    index = {"metadata": {"total_size": 32}, "weight_map": {"a": "m-a.safetensors", "b": "m-b.safetensors"}}
    config = {"hidden_size": 8, "eagle_config": {"ids": [1, 2]}}
    which = data.draw(st.sampled_from(["header", "index", "config"]))
    changed = mutated({"header": header, "index": index, "config": config}[which], data)
    header, index, config = (
        changed if which == name else value
        for name, value in (("header", header), ("index", index), ("config", config))
    )
    (folder / "m-a.safetensors").write_bytes(packed(header, b"0123456789abcdef"))
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    survives(folder)
