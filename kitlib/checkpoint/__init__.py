"""What is in a checkpoint's files: headers and names at once, tensor bytes only when asked for."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ..findings import KitError
from . import headers
from .headers import AGAIN, BITS, NUMPY, CheckpointError, Remote, TensorInfo, read_json, read_spans, short
from .hub import HubError, Repository, named

__all__ = ["INDEX", "Checkpoint", "CheckpointError", "TensorInfo", "canonical", "prefix_of"]

INDEX = "model.safetensors.index.json"
BLOCK = 4096  # bytes read at each place that `sample` visits

# Naming dialects by how they spell the decoder layer; beside them there are "eagle-1" and "unknown".
DIALECTS = {
    "midlayer": r"(?:^|\.)midlayer\.",  # SGLang, SafeAILab, SpecForge, AngelSlim, modelopt (Megatron)
    "layers.0": r"(?:^|\.)(?<!\bmodel\.)layers\.[0-9]+\.",  # speculators, modelopt
    "model.layers.0": r"(?:^|\.)model\.layers\.[0-9]+\.",  # NeMo Automodel
    "mla": r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.",  # latent attention: DeepSeek, Kimi-K2
}
PREFIX = re.compile(r"(?:(?:draft_model|module|model|transformer|eagle)\.)*")
RENAMES = {  # applied in order, after the prefix is gone
    r"^midlayer\.(?=[0-9])": "layers.",
    r"^midlayer\.": "layers.0.",
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
}
KNOWN = re.compile(
    r"d2t|t2d|mask_hidden|(?:fc|norm|lm_head|embed_tokens|input_norm|fc_norm\.[0-9]+|layers\.[0-9]+\.(?:"
    r"input_layernorm|hidden_norm|post_attention_layernorm|mlp\.(?:gate|up|down)_proj|self_attn\.(?:"
    r"(?:q|k|v|o|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|q_norm|k_norm|q_a_layernorm|kv_a_layernorm)))"
    r"\.(?:weight|bias|weight_scale|weight_scale_2|weight_scale_inv|input_scale)"
)


def prefix_of(name: str) -> str:
    """The wrapper in front of a tensor name (`draft_model.`, `module.`, `model.`, `model.model.` …) or ""."""
    return PREFIX.match(name).group()


def canonical(name: str) -> str | None:
    """The kit's name for a tensor in any dialect, without its wrapper; None if no drafter has it."""
    name = name[len(prefix_of(name)) :]
    for old, new in RENAMES.items():
        name = re.sub(old, new, name)
    return name if KNOWN.fullmatch(name) else None


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, headers only; `open` raises CheckpointError if they are unsound."""

    path: Path  # what the user named: a directory, a file or a hub id
    files: tuple[Path | Remote, ...]
    config: dict = field(repr=False)  # {} when there is no config.json
    config_path: Path | Remote | None
    tensors: dict[str, TensorInfo] = field(repr=False)
    metadata: dict[Path | Remote, dict[str, str]] = field(repr=False)  # each file's own `__metadata__`
    hub: Repository | None = field(default=None, repr=False)  # where the files are, if not here

    canonical = staticmethod(canonical)

    @classmethod
    def open(cls, path: str | Path, *, hub: bool = False) -> Checkpoint:
        """Open a directory, a sharded directory with its index, or a single .safetensors file.

        `hub`: a hub id is opened as well, by range requests; else HubError says to download it first.
        """
        if (repository := named(path)) and not hub:
            why = f"There is no folder {repository} here, and only `check` looks into a hub repository"
            raise HubError(f"{why}; check the spelling, or download it first: {repository.download()}")
        path = Path(path)
        if not repository:
            with headers.readable(path):
                path.stat()
        whole = bool(repository) or path.is_dir()
        folder = repository or (path if whole else path.parent)
        listed: dict[str, str] = {}
        if path.name == INDEX or (whole and _has(folder, INDEX)):
            listed = _index(folder)
            files = tuple(_shard(folder, shard) for shard in sorted(set(listed.values())))
        else:
            files = (_only_file(folder) if whole else path,)
        tensors: dict[str, TensorInfo] = {}
        metadata = {}
        for file in files:
            found, metadata[file] = headers.read_header(file)
            if listed:
                _agree(file, found.keys(), {name for name, shard in listed.items() if shard == file.name})
            tensors |= found
        if not tensors:
            raise CheckpointError(path, "holds no tensors")
        config = folder / "config.json"
        if not _has(folder, "config.json"):
            return cls(path, files, {}, None, tensors, metadata, repository)
        return cls(path, files, read_json(config), config, tensors, metadata, repository)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor or some rows of it (first axis); bf16 becomes float32, a packed dtype raises KitError."""
        info = self._decodable(name)
        if rows is None:
            data = read_spans(info.file, [(info.start, info.nbytes)])
            return _decode(data, info.dtype).reshape(info.shape)
        first, stop, step = rows.indices(info.shape[0] if info.shape else 0)
        if not info.shape or step < 1:
            raise KitError(f"{info.file} cannot give {rows} of {short(name)}; ask for rows in rising order")
        count, width = max(stop - first, 0), info.nbytes // max(info.shape[0], 1)
        data = read_spans(info.file, [(info.start + first * width, count * width)])
        return _decode(data, info.dtype).reshape(count, *info.shape[1:])[::step]

    def sample(self, name: str, max_bytes: int = 65536) -> np.ndarray:
        """At most `max_bytes` of a tensor, flat: evenly spaced 4 KB blocks, or all of a small one."""
        info = self._decodable(name)
        item = BITS[info.dtype] // 8
        if max_bytes < item:
            raise KitError(f"{max_bytes} bytes cannot hold one value of {short(name)}; allow at least {item}")
        if info.nbytes <= max_bytes:
            return self.read(name).reshape(-1)
        block = min(BLOCK, max_bytes // item * item)
        count = max_bytes // block
        last = (info.nbytes - block) // item  # the last place where a block may start, in elements
        starts = [info.start + last * i // max(count - 1, 1) * item for i in range(count)]
        return _decode(read_spans(info.file, [(start, block) for start in starts]), info.dtype)

    def chunks(self, name: str, max_bytes: int = 1 << 24) -> Iterator[np.ndarray]:
        """All of a tensor, flat, in pieces of at most `max_bytes`."""
        info = self._decodable(name)
        step = max_bytes // 8 * 8
        for at in range(0, info.nbytes, step):
            yield _decode(read_spans(info.file, [(info.start + at, min(step, info.nbytes - at))]), info.dtype)

    @cached_property
    def dialect(self) -> str:
        """The dialect most of the layer's names follow: a key of DIALECTS, "eagle-1" or "unknown"."""
        names = {canonical(name): name for name in self.tensors if canonical(name)}
        fc = self.tensors[names["fc.weight"]].shape if "fc.weight" in names else ()
        eagle3 = {"lm_head.weight", "layers.0.hidden_norm.weight"} & names.keys()
        if len(fc) == 2 and fc[1] == 2 * fc[0] and not eagle3:  # fc of EAGLE-1 takes embedding and state
            return "eagle-1"
        votes = Counter(key for key, layer in DIALECTS.items() for n in names.values() if re.search(layer, n))
        return "mla" if "mla" in votes else max(votes, key=votes.__getitem__, default="unknown")

    def _decodable(self, name: str) -> TensorInfo:
        if (info := self.tensors.get(name)) is None:
            raise KitError(f"{self.path} has no tensor {short(name)}; it has {len(self.tensors)} others")
        if info.dtype not in NUMPY:
            what = f"{info.file} holds {short(name)} as {short(info.dtype)}, which the kit does not decode"
            raise KitError(f"{what}; pass an unquantized copy, or use what reads headers only")
        return info


def _decode(data: np.ndarray, dtype: str) -> np.ndarray:  # data: uint8 [nbytes]
    values = data.view(NUMPY[dtype])
    if dtype == "BF16":  # the upper half of a float32
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values != 0 if dtype == "BOOL" else values


def _has(folder: Path | Repository, name: str) -> bool:
    return name in folder.names if isinstance(folder, Repository) else os.path.lexists(folder / name)


def _only_file(folder: Path | Repository) -> Path | Remote:
    with headers.readable(folder):
        entries = folder.names if isinstance(folder, Repository) else os.listdir(folder)
    names = sorted(entry for entry in entries if not entry.startswith("."))
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return folder / found[0]
    if found:
        what = f"holds {len(found)} .safetensors files ({short(found[0])} …) and no {INDEX}"
        raise CheckpointError(folder, what, "pass the file you mean, or restore the index")
    if pickles := [name for name in names if name.endswith(headers.PICKLES)]:
        what = f"holds only pickled weights ({short(pickles[0])}), and the kit never unpickles"
        raise CheckpointError(folder, what, headers.CONVERT)
    raise CheckpointError(folder, "holds no .safetensors file", "pass the directory that holds the weights")


def _index(folder: Path | Repository) -> dict[str, str]:
    """The index's map from tensor name to shard name."""
    path = folder / INDEX
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(s, str) for s in listed.values()):
        raise CheckpointError(path, "has no weight_map from tensor names to shard names")
    if "model.safetensors" not in listed.values() and _has(folder, "model.safetensors"):
        what = "does not list the model.safetensors beside it, and engines differ in which they load"
        raise CheckpointError(path, what, "pass the file itself, or move one of the two away")
    return listed


def _shard(folder: Path | Repository, shard: str) -> Path | Remote:
    """The file an index names, provided it lies in the folder (or in the hub cache's blobs that serve it)."""
    index = folder / INDEX
    if isinstance(folder, Repository):
        there = shard in folder.names
    else:
        with headers.readable(index):  # a name with a NUL byte cannot be looked up
            home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / shard))
        homes = [home] + [up.parent / "blobs" for up in home.parents if up.name == "snapshots"]
        if Path(shard).name != shard or not any(map(real.is_relative_to, homes)):
            what = f"names the shard {short(shard)}, which does not lie in its folder and is not followed"
            raise CheckpointError(index, what, "put the files there and list them by plain name")
        there = os.path.lexists(real)
    if not there:
        raise CheckpointError(index, f"names the shard {short(shard)}, which is missing", AGAIN)
    return folder / shard


def _agree(file: Path | Remote, found: set[str], expected: set[str]) -> None:
    for names, verb in ((expected - found, "lists"), (found - expected, "does not list")):
        if names:
            what = f"disagrees with {INDEX}, which {verb} {len(names)} tensors in it ({short(min(names))} …)"
            raise CheckpointError(file, what, f"{AGAIN}, or save both again")
