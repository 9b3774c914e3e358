"""A drafter's training metrics after the fact: the trainer's own accuracy, on rows it has not been trained on."""

from __future__ import annotations

from pathlib import Path

import torch

from ..checkpoint import Checkpoint
from ..contract import Contract
from ..drafter import load_drafter
from ..features import Target
from ..paths import cache
from .passes import accuracy
from .rows import collate, extract, read_rows


def evaluate(drafter: Path, target_dir: Path, data: Path, *, after: int = 0, count: int = 64, steps: int = 4) -> dict:
    """Accuracy by draft step, teacher-forced, on `count` greedy rows of `data` from row `after` on."""
    target = Target.load(target_dir, device="cpu", dtype="float32")
    rows = [row for row in read_rows(data)[after:] if row["temp"] == 0][:count]
    checkpoint = Checkpoint.open(drafter)
    contract = Contract.of(checkpoint, target.info)
    wiring = contract.trained(target.info)
    model, _ = load_drafter(checkpoint, contract, wiring, target.embedding, device="cpu", dtype="float32")
    states = extract(target, rows, wiring.boundaries, cache() / "lab" / "states", lambda _: None)
    batches = [
        collate(rows[at : at + 16], [s.float() for s in states[at : at + 16]], target.info.hidden, target.stop_ids)
        for at in range(0, len(rows), 16)
    ]
    with torch.inference_mode():
        found = accuracy(model, batches, target.head, steps)
    return {
        **found,
        "expected_accept_length": round(1 + sum(found["served_joint"]), 4),
        "definition": "joint = speculators' full_acc, conditional = cond_acc; teacher-forced, greedy rows",
        "rows": {"file": data.name, "after": after, "used": len(rows)},
        "origin": "measured after training, by `kitlib.lab.evaluate`, on rows generated later than the training rows",
    }
