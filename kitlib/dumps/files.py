"""The files of a dump: which trainer wrote one, what it holds, and why it is left out if it cannot be used.

Pickles are read with `weights_only` and memory-mapped. Layouts, as their writers' code has them (L tokens, K
auxiliary states, each of width Ht):

- speculators v0 (.pt): input_ids [L], loss_mask [L], hidden_state [L, K*Ht], target [L, Ht]
- speculators v1 (.pt, 0.3 and 0.4): input_ids, loss_mask, hidden_states K + 1 times [L, Ht], all before the norm
- SpecForge (.ckpt, .ckpt.gz): input_ids, loss_mask, aux_hidden_state [1, L, K*Ht], hidden_state [1, L, Ht] (normed)
- speculators 0.5+ (hs_N.safetensors): token_ids [L], hidden_states [L, K + 1, Ht]; its loss mask is elsewhere
- kitlib (.safetensors, `write`): input_ids, loss_mask, hidden_states [L, K, Ht], last_hidden_state [L, Ht] (normed)
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..features import States
from ..findings import KitError, write_atomic

ENDINGS = (".pt", ".ckpt", ".ckpt.gz", ".safetensors")
LAYOUTS = {  # name: (keys that tell it, the norm state of its last tensor); the first that fits
    "kitlib": ({"input_ids", "hidden_states", "last_hidden_state"}, ""),  # its metadata say
    "SpecForge": ({"input_ids", "aux_hidden_state", "hidden_state"}, "post-norm"),
    "speculators v0": ({"input_ids", "hidden_state", "target"}, ""),  # nobody says
    "speculators v1": ({"input_ids", "hidden_states"}, "pre-norm"),
    "speculators 0.5+": ({"token_ids", "hidden_states"}, "pre-norm"),
}
UNPACKED = 4 << 30  # bytes of one .ckpt.gz at most


class Skip(Exception):
    """Why one file is left out, to be read after its name."""


@dataclass(frozen=True)
class Sample:
    """One file of a dump, as stored: nothing is converted, and nothing read that nobody looks at."""

    file: str
    layout: str
    ids: Tensor  # [L]
    answers: tuple[tuple[int, int], ...]  # spans of tokens that count, end exclusive, none empty
    aux: tuple[Tensor, ...]  # K times [L, Ht]
    last: Tensor  # [L, Ht]
    said: Mapping[str, str]  # the file's own metadata

    @property
    def kind(self) -> str:
        ids = f" of boundaries {self.said['boundaries']}" if "boundaries" in self.said else ""
        return f"{self.layout}, {len(self.aux)} + 1 states{ids}, {self.last.shape[-1]} wide"


def find(path: Path) -> list[Path]:
    """Every file under a folder whose name ends like a sample's, by number; KitError where there is none."""
    if not os.path.exists(path):
        raise KitError(f"There is nothing at {path}; name the folder of hidden states that a trainer wrote.")
    if path.is_file():
        return [path]
    found = [Path(root, name) for root, _, names in os.walk(path) for name in names if name.endswith(ENDINGS)]
    if not found:
        raise KitError(f"{path} holds no hidden states (*{', *'.join(ENDINGS)}); name the folder that a trainer wrote.")
    return sorted(found, key=lambda f: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(f))])


def read(file: Path) -> Sample:
    """One sample; Skip where the file is empty, truncated, foreign, hostile or inconsistent."""
    raw, said = _safetensors(file) if file.name.endswith(".safetensors") else (_pickle(file), {})
    layout = layout_of(raw)
    try:
        ids = raw["token_ids" if "token_ids" in raw else "input_ids"].flatten()
        aux, last = _states(layout, raw, len(ids))
        if not all(s.dim() == 2 for s in (*aux, last)) or not aux:
            raise ValueError("not one matrix a layer")
        marked = raw.get("loss_mask")
        mask = torch.ones(len(ids)) if marked is None else torch.as_tensor(marked).flatten()
    except (TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise Skip(f"holds no states of {layout}'s shapes ({str(error).splitlines()[0][:80]})") from None
    for name, rows in (*(("states", s) for s in (*aux, last)), ("loss mask", mask)):
        if len(rows) != len(ids):
            raise Skip(f"holds {len(ids)} tokens and a {name} of {len(rows)}")
    if ids.is_floating_point() or ids.is_complex() or {s.shape for s in aux} != {last.shape}:
        raise Skip(f"holds no states of {layout}'s shapes ({[list(s.shape) for s in (*aux, last)]})")
    if not all(s.is_floating_point() and s.itemsize > 1 and s.isfinite().all() for s in (*aux, last)):
        raise Skip("holds states that are no finite numbers of 16 bits or more")
    counts = (mask != 0).tolist()
    counts[:1] = [False]  # nothing precedes the first token
    runs = [(counts[at[0]], at[0], at[-1] + 1) for _, g in groupby(range(len(ids)), counts.__getitem__) if (at := [*g])]
    if not (answers := tuple((start, end) for marked, start, end in runs if marked)):
        raise Skip("marks no token of an answer: its loss mask is empty")
    return Sample(file.name, layout, ids, answers, aux, last, said)


def layout_of(keys: Iterable[str]) -> str:
    """The layout that has these keys."""
    keys = set(map(str, keys))
    for name, (needed, _) in LAYOUTS.items():
        if needed <= keys:
            return name
    raise Skip(f"is no sample of hidden states: it holds {', '.join(sorted(keys))[:80] or 'nothing'}")


def write(out: str | Path, states: Iterable[States]) -> Path:
    """Write a dump of the kit's own: one safetensors file a text, each with its boundaries in its metadata.

    The states are taken one at a time. The folder appears whole or not at all; KitError if `out` exists.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise KitError(f"{out} exists and is never overwritten; name a new folder.")
    if not out.parent.is_dir():
        raise KitError(f"{out.parent} is no folder; make it first, or name another place.")
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        for number, one in enumerate(states):
            at, mask = sorted(one.boundaries), torch.zeros(len(one.text.ids), dtype=torch.uint8)
            mask[one.text.prompt : one.text.prompt + one.text.limit] = 1
            tensors = {
                "input_ids": torch.tensor(one.text.ids),
                "loss_mask": mask,
                "hidden_states": torch.stack([one.boundaries[b] for b in at], 1).cpu(),
                "last_hidden_state": one.final.cpu().contiguous(),
            }
            said = {"boundaries": ",".join(map(str, at)), "last": "post-norm"}
            write_atomic(work / f"data_{number}.safetensors", save(tensors, said))
        work.chmod(0o755)
        os.rename(work, out)
    except OSError as error:
        raise KitError(f"Cannot write {out} ({error.strerror or error}); choose another place.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _states(layout: str, raw: Mapping[str, Any], length: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """K auxiliary states and the last one, each [L, Ht]."""
    if layout in ("SpecForge", "speculators v0"):
        aux, last = ("aux_hidden_state", "hidden_state") if layout == "SpecForge" else ("hidden_state", "target")
        aux, last = (raw[name].reshape(raw[name].shape[-2:]) for name in (aux, last))  # without the batch axis
        return aux.split(last.shape[-1], -1), last
    states = raw["hidden_states"]
    if isinstance(states, Tensor):
        axis = 0 if layout == "speculators v1" and states.shape[1] == length != states.shape[0] else 1
        states = states.unbind(axis) if states.dim() == 3 else ()
    *aux, last = (*states, raw["last_hidden_state"]) if layout == "kitlib" else states
    return tuple(aux), last


def _safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as handle:
            layout_of(handle.keys())  # a model's weights are not read to find out
            return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata() or {}  # noqa: SIM118
    except Skip:
        raise
    except Exception as error:  # safetensors raises its own and the system's
        raise Skip(_why(file, error)) from None


def _pickle(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise Skip("is no regular file")
        source: Any = file
        if packed := file.name.endswith(".gz"):
            with gzip.open(file) as handle:
                source = io.BytesIO(handle.read(UNPACKED))
        raw = torch.load(source, map_location="cpu", weights_only=True, mmap=None if packed else True)
    except Skip:
        raise
    except Exception as error:  # torch, pickle, zlib and the system raise what they trip over
        raise Skip(_why(file, error)) from None
    if not isinstance(raw, dict):
        raise Skip(f"is no sample of hidden states: it holds a {type(raw).__name__}")
    for value in raw.values():
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, Tensor) and (t.layout != torch.strided or t.device.type != "cpu" or _longer(t)):
                raise Skip("holds a tensor that is not stored as it is shaped")
    return raw


def _longer(t: Tensor) -> bool:
    """Whether a tensor claims more values than the file stores for it."""
    return t.numel() * t.itemsize > t.untyped_storage().nbytes()


def _why(file: Path, error: Exception) -> str:
    """One clause for what a reader tripped over."""
    if file.is_file() and not file.stat().st_size:
        return "is empty"
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and (asked := re.search(r"GLOBAL (\S+)", text)):
        return f"asks to run {asked[1]}, which no sample needs; it was not run"
    return f"is truncated, or of another format ({type(error).__name__}: {text[:100]})"
