"""Tiny checkpoints for the tests, sound and broken, written by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kitlib.checkpoint import INDEX


def packed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file by hand: `header` as an object or as raw bytes, and the length it declares."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), data: bytes = b"1234") -> bytes:
    return packed({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data)


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    """Two shards that hold `a` and `b`, and an index for them."""
    folder.mkdir(exist_ok=True)
    for name in "ab":
        save_file({name: np.arange(4, dtype=np.float32)}, folder / f"m-{name}.safetensors")
    listed = {"a": "m-a.safetensors", "b": "m-b.safetensors"} if weight_map is None else weight_map
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": listed}))
    return folder
