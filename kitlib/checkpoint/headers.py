"""Safetensors headers and JSON, read without believing them: every claim is checked against the real file.

The format: 8 bytes of header length, a JSON header, then the tensors end to end. Nothing here unpickles.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..findings import KitError

MAX_JSON = 100_000_000  # bytes; the safetensors library's own limit for a header
MAX_VALUES = 4_000_000  # of a JSON file; a header has eight a tensor
# Every dtype the format names (safetensors 0.8.0): numpy's code where the kit decodes it; bits per value.
NUMPY = {"BOOL": "u1", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2"}
NUMPY |= {"I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8"}
BITS = {name: 8 * np.dtype(code).itemsize for name, code in NUMPY.items()}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

AGAIN = "copy or download it again"
RESAVE = "save the checkpoint again with the safetensors library"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT = (
    'where you trust it, run python -c "import torch; from safetensors.torch import save_file; '
    "save_file({k: v.clone() for k, v in torch.load('IN', weights_only=True).items()}, 'model.safetensors')\""
)
FOREIGN = (  # first bytes, what the file is, what to do
    (b"PK\x03\x04", "is a zip archive, as torch pickles are, and the kit never unpickles", CONVERT),
    (b"version ", "is a Git LFS pointer, not the weights", "run git lfs pull"),
    (b"GGUF", "is a GGUF file, not safetensors", "pass the checkpoint it was converted from"),
)


class CheckpointError(KitError):
    """A checkpoint that cannot be read (K101): the `path` at fault and a `sentence`: fault; cure."""

    def __init__(self, path: str | Path, what: str, do: str = RESAVE) -> None:
        self.path, self.sentence = Path(path), f"{what}; {do}"
        shown = os.fspath(path).encode("utf-8", "backslashreplace").decode()
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{shown} {self.sentence}"))


class Remote(os.PathLike):
    """A file that is not on this machine; `hub.HubFile` is one. Its path is only printed."""

    name: str

    def size(self) -> int:
        raise NotImplementedError

    def read(self, start: int, count: int) -> bytes:
        raise NotImplementedError


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its dtype as safetensors spells it, its shape, and its bytes in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path | Remote
    start: int  # absolute byte offset in `file`
    nbytes: int


def read_header(path: Path | Remote) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors a file declares and its `__metadata__`; CheckpointError unless they fill it exactly."""
    size = file_size(path)
    head = bytes(read_spans(path, [(0, min(size, 8))]))
    for magic, what, do in FOREIGN:
        if head.startswith(magic):
            raise CheckpointError(path, what, do)
    if path.name.endswith(PICKLES):
        raise CheckpointError(path, "is named like a pickle, and the kit never unpickles", CONVERT)
    if size < 8:
        raise CheckpointError(path, f"has only {size} bytes" if size else "is empty", AGAIN)
    base = 8 + int.from_bytes(head, "little")
    if base > min(size, MAX_JSON + 8):
        limit = f"{size - 8} bytes that follow" if base > size else f"{MAX_JSON} bytes allowed"
        what = f"declares a header of {base - 8} bytes, more than the {limit}: damaged, or not safetensors"
        raise CheckpointError(path, what, AGAIN)
    header = read_json(path, 8, base - 8)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, "has a __metadata__ that is no map of strings")
    tensors = {}
    for name, entry in header.items():
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if fault := _fault(dtype, shape, offsets, size - base):
            raise CheckpointError(path, f"has a tensor {short(name)} {fault}")
        first, last = offsets
        tensors[name] = TensorInfo(name, dtype, tuple(shape), path, base + first, last - first)
    end, before = base, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start != end:
            fault = "overlaps" if info.start < end else f"leaves a hole of {info.start - end} bytes after"
            raise CheckpointError(path, f"has a tensor {short(info.name)} that {fault} {before}")
        end, before = info.start + info.nbytes, short(info.name)
    if end != size:
        raise CheckpointError(path, f"has {size - end} bytes after {before} that no tensor covers")
    return tensors, metadata


def _fault(dtype: object, shape: object, offsets: object, room: int) -> str | None:
    """What is wrong with one header entry, or None; `room` is the bytes the file really has for tensors."""
    if not isinstance(dtype, str):
        return "without a dtype"
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            return f"whose {what} is no list of whole numbers from 0 up ({short(value)})"
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"whose data_offsets are no start and end ({short(offsets)})"
    if offsets[1] > room:
        return f"that ends at byte {short(offsets[1])} of {room}, so the file was cut short or is damaged"
    if len(shape) > 64 or math.prod(max(number, 1) for number in shape) > 2**56:
        return f"of an absurd shape ({short(shape)})"
    nbytes, bits = offsets[1] - offsets[0], BITS.get(dtype)  # an unknown dtype is listed and never decoded
    if bits is not None and math.prod(shape) * bits != nbytes * 8:
        return f"whose {nbytes} bytes do not match {dtype} {short(shape)}"
    return None


def read_json(path: Path | Remote, start: int = 0, count: int | None = None) -> dict:
    """Strict JSON from a file or a part of it: one object, no key twice, finite numbers, printable text."""
    count = file_size(path) if count is None else count
    if count > MAX_JSON:
        raise CheckpointError(path, f"has {count} bytes, too many for a JSON file", "put the right one there")
    try:
        raw = bytes(read_spans(path, [(start, count)]))
        if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:  # before each of them becomes an object in memory
            raise ValueError(f"it has more than {MAX_VALUES} values")
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:  # escapes can spell half a character, which no output could carry
            json.dumps(value, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(path, f"does not hold sound JSON ({reason})", AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"holds a JSON {type(value).__name__} instead of an object", AGAIN)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict:
    if len(found := dict(pairs)) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(twice)} appears twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{short(text)} is not a finite number")
    return number


def file_size(path: Path | Remote) -> int:
    """Bytes of a regular file; a pipe or device, which would block or never end, is refused."""
    if isinstance(path, Remote):
        return path.size()
    with readable(path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, "is not a regular file", "put the file itself there")
    return status.st_size


def read_spans(path: Path | Remote, spans: list[tuple[int, int]]) -> np.ndarray:
    """The bytes of some (start, count) spans, one after the other: uint8 [sum of counts]."""
    if isinstance(path, Remote):
        return np.frombuffer(b"".join(path.read(start, count) for start, count in spans if count), np.uint8)
    out = np.empty(sum(count for _, count in spans), np.uint8)
    view, done = memoryview(out), 0
    with readable(path), open(path, "rb", buffering=0) as file:
        for start, count in spans:
            file.seek(start)
            end = done + count
            while done < end and (got := file.readinto(view[done:end])):  # one call gives at most 2 GB
                done += got
            if done < end:
                raise CheckpointError(path, "became shorter while it was read", AGAIN)
    return out


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever the file system says about `path` into a CheckpointError."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in a path
        reason = getattr(error, "strerror", None) or error
        do = "check the spelling and that you may read it"
        raise CheckpointError(path, f"cannot be read ({reason})", do) from None


def short(value: object) -> str:
    """Text from a file, made safe to print and short enough for one sentence."""
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 80 else text[:79] + "…"
