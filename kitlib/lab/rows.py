"""Training rows of the lab: token ids in a gzipped JSONL file, the target's states on disk, and batches of both."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..features import Capture, Target
from ..findings import KitError, write_atomic

BLOCK = 512  # rows whose states share a file


def read_rows(path: Path) -> list[dict]:
    """Rows of a training file: {"kind", "temp", "prompt_tokens", "ids"} each."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise KitError(f"{path} is not a gzipped JSONL file of training rows ({error}); make it again.") from None


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write rows atomically; equal rows give equal bytes."""
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    write_atomic(path, gzip.compress(lines.encode(), 9, mtime=0))


@dataclass(frozen=True)
class Batch:
    """Rows side by side, their prompts aligned at the end: column `base` is each prompt's last token.

    `answers[b, r]`: response token r exists and is no stop id, so that the target predicts something after it.
    """

    ids: Tensor  # [B, L]
    states: Tensor  # [B, L, K*Ht]
    final: Tensor  # [B, R, Ht] the target's last state at the response tokens
    start: Tensor  # [B] first column that is no padding
    base: int
    answers: Tensor  # [B, R]


def collate(rows: Sequence[dict], states: Sequence[Tensor], hidden: int, stop_ids: frozenset[int]) -> Batch:
    """Put rows ({"ids", "prompt_tokens"}) and their states ([tokens, (K+1)*Ht], the final one last) in one batch."""
    base = max(row["prompt_tokens"] for row in rows) - 1
    length = base + 1 + max(len(row["ids"]) - row["prompt_tokens"] for row in rows)
    ids, start = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), dtype=torch.long)
    both = torch.zeros(len(rows), length, states[0].shape[1], dtype=states[0].dtype)
    answers = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, (row, state) in enumerate(zip(rows, states, strict=True)):
        at = base + 1 - row["prompt_tokens"]
        end = at + len(row["ids"])
        start[b], ids[b, at:end], both[b, at:end] = at, torch.tensor(row["ids"]), state
        answer = row["ids"][row["prompt_tokens"] :]
        answers[b, base + 1 : end] = torch.tensor([token not in stop_ids for token in answer])
    return Batch(ids, both[..., :-hidden], both[:, base + 1 :, -hidden:], start, base, answers[:, base + 1 :])


def extract(
    target: Target, rows: Sequence[dict], boundaries: Sequence[int], cache: Path, say: Callable[[str], None]
) -> list[Tensor]:
    """States of every row, [tokens, (K+1)*Ht] in bf16: the boundaries, then the final state.

    They lie memory-mapped in `cache`, a file for each block of rows, and a file that is there is not made again.
    """
    cache.mkdir(parents=True, exist_ok=True)
    width, out, started = (len(boundaries) + 1) * target.info.hidden, [], time.monotonic()
    for at in range(0, len(rows), BLOCK):
        block = [row["ids"] for row in rows[at : at + BLOCK]]
        ends = torch.tensor([0, *map(len, block)]).cumsum(0).tolist()
        key = [dict(target.info.config), str(target.info.path), boundaries, torch.__version__, block]
        file = cache / f"states-{hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:20]}.bin"
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            _states(target, block, boundaries, torch.from_file(str(part), True, ends[-1] * width, dtype=torch.bfloat16))
            os.replace(part, file)
            say(f"states of {at + len(block)}/{len(rows)} rows, {time.monotonic() - started:.0f} s")
        mapped = torch.from_file(str(file), True, ends[-1] * width, dtype=torch.bfloat16).view(-1, width)
        out += [mapped[a:b] for a, b in pairwise(ends)]
    return out


@torch.inference_mode()
def _states(target: Target, block: Sequence[Sequence[int]], boundaries: Sequence[int], out: Tensor) -> None:
    """Fill `out` with the states of a block, in batches of similar length (padding at the end changes nothing)."""
    ends = torch.tensor([0, *map(len, block)]).cumsum(0).tolist()
    out, order = out.view(ends[-1], -1), sorted(range(len(block)), key=lambda i: len(block[i]))
    for at in range(0, len(order), 16):
        some = order[at : at + 16]
        long = len(block[some[-1]])
        with Capture(target, boundaries) as capture:
            ids = torch.tensor([[*block[i], *[0] * (long - len(block[i]))] for i in some])
            target.model.base_model(input_ids=ids, use_cache=False)
            states = torch.cat([*(capture.held["raw", b] for b in boundaries), capture.held["final", 0]], -1)
        for row, i in enumerate(some):
            out[ends[i] : ends[i + 1]] = states[row, : len(block[i])]
