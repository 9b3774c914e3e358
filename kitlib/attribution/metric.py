"""The trainers' side of a promise: joint accuracy at every position of a text, and how its numbers are misread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..acceptance import Chains
from ..drafter import Drafter
from ..features import States
from ..training import Training, silence
from .parts import Counts

SAME = 0.01  # lengths that are one number


def vocabulary(drafter: Drafter) -> torch.Tensor:  # [Vd]
    """Target ids that the drafter can write."""
    return drafter.to_target(torch.arange(drafter.contract.draft_vocab, device=drafter.d2t.device))


@torch.inference_mode()
def everywhere(
    drafter: Drafter,
    states: States,
    mask: Sequence[int],  # [tokens] 1: a token of the answer
    steps: int,
    stops: frozenset[int],
) -> tuple[list[int], list[int], list[int]]:
    """Joint accuracy counts by step at every position of a text, as trainers count: (right, right within, asked).

    Every step is fed the text's own tokens and has to name the target's choice. `right within` asks for the best token
    of the draft vocabulary instead, as trainers do that leave out the tokens outside it.
    """
    ids = torch.tensor(states.text.ids, device=drafter.target_embed.device)
    first, rows = states.text.prompt - 1, len(states.text.ids) - 1
    if first < 0 or rows - first < 1:
        return [0] * steps, [0] * steps, [0] * steps
    scores = F.linear(states.final[first + 1 :].to(drafter.target_head), drafter.target_head)  # [answer, V]
    kept = vocabulary(drafter)
    wanted = torch.stack([scores.argmax(-1), kept[scores[:, kept].argmax(-1)]])  # [2, answer]
    valid = torch.tensor([bool(m) and int(i) not in stops for m, i in zip(mask, ids, strict=True)][first + 1 :])
    valid = valid.to(ids.device)
    hidden = drafter.fuse(states.select(drafter.wiring)[:rows].to(drafter.target_embed))
    positions, attend = torch.arange(rows, device=ids.device), Chains()
    chain, right, asked = torch.ones_like(wanted, dtype=torch.bool), [], []
    for k in range(steps):
        at = drafter.wiring.token_shift + k
        tokens = F.pad(ids, (0, steps))[at : at + rows]
        hidden = drafter.step(tokens[len(tokens) - len(hidden) :], hidden, positions + k, attend)
        if k == 0:
            hidden, positions = hidden[first:], positions[first:]
        exists = valid[k:]
        chain = chain[:, : len(exists)] & exists & (drafter.draft(hidden)[: len(exists)] == wanted[:, k:])
        right.append(chain.sum(1).tolist())
        asked.append(int(exists.sum()))
        hidden = drafter.feedback(hidden)
    full, within = zip(*right, strict=True)
    return [*full], [*within], asked


def by_metric(
    drafter: Drafter, states: Iterable[States], masks: Sequence[Sequence[int]], steps: int, stops: frozenset[int]
) -> tuple[Counts, Counts]:
    """`everywhere` over many texts: over all tokens, and within the draft vocabulary."""
    each = [everywhere(drafter, s, m, steps, stops) for s, m in zip(states, masks, strict=True)]
    full, within, asked = (np.array(x, dtype=float) for x in zip(*each, strict=True))
    return Counts(full, asked, "rows"), Counts(within, asked, "rows")


def misread(claimed: float, training: Training, steps: int) -> str:
    """Which misreading of the metrics gives this number; "" where it is right."""
    values = training.values[:steps]
    if abs(claimed - training.expected(steps)) <= SAME:
        return ""
    joint, first = replace(training, kind="joint"), values[0]
    conditional = replace(training, kind="conditional")
    readings = {
        "the accuracies multiplied, though they are joint already": conditional.expected(steps),
        "the accuracies summed, though they are conditional": joint.expected(steps),
        "the accept length without the target's own token": training.expected(steps) - 1,
        "the first step's accuracy alone": first,
        "1 + the first step's accuracy: later steps are left out": 1 + first,
        "the first step's accuracy taken for all steps": training.bracket(steps)[1],
    }
    right = [text for text, value in readings.items() if abs(claimed - value) <= SAME]
    return right[0] if right else "a number that no known reading of the metrics gives"


def promise_rows(first: float, steps: int, rounds: int, coverage: Sequence[float] = (1.0,)) -> list[dict[str, Any]]:
    """What a first-step accuracy alone promises: lowest and highest accept length, and the chance of silence.

    `coverage`: shares of the target's tokens that the draft vocabulary holds.
    """
    out = []
    for share in coverage:
        low, high = Training("joint", (first,), "", "").bracket(steps, share)
        never = silence(first * share, rounds)
        row = {"first step": first, "coverage": share, "lowest": low, "highest": high}
        out.append({**row, f"chance of nothing in {rounds} rounds": never})
    return out
