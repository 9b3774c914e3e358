"""Acceptance along the text: by prompt length, and by position in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..acceptance import Acceptance
from ..features import Text
from ..findings import Evidence, Finding

NAMES = {"prompt": "length of the prompt", "position": "position in the sequence"}
FEW, BEYOND = 3, 30  # prompts, and rounds past the drafter's positions, that a judgement needs


def starts(acceptance: Acceptance, texts: Sequence[Text]) -> list[list[int]]:
    """Where every round began: the position of its newest token in the sequence."""
    return [
        (t.prompt + np.cumsum([0, *(n + 1 for n in rounds[:-1])])).tolist() if rounds else []
        for rounds, t in zip(acceptance.rounds, texts, strict=True)
    ]


def along(acceptance: Acceptance, texts: Sequence[Text], by: str = "prompt", bins: int = 4) -> list[dict[str, Any]]:
    """Acceptance by prompt length (`prompt`) or by position in the sequence (`position`), in bins of equal counts."""
    if len(texts) != len(acceptance.rounds):  # states of a dump: nobody kept the texts
        return []
    lengths = [[t.prompt] * len(r) for t, r in zip(texts, acceptance.rounds, strict=True)]
    places = lengths if by == "prompt" else starts(acceptance, texts)
    flat = [p for row in places for p in row]
    if not flat:
        return []
    edges = sorted({int(e) for e in np.quantile(flat, np.linspace(0, 1, bins + 1))[1:-1]})
    out = []
    for low, high in pairwise([min(flat), *(e for e in edges if min(flat) < e <= max(flat)), max(flat) + 1]):
        part = _between(acceptance, places, low, high)
        prompts = sum(map(bool, part.rounds))
        row = {
            "by": NAMES[by],
            "tokens": f"{low}-{high - 1}",
            "prompts": prompts,
            "rounds": part.verified,
            "accepted": part.accepted,
        }
        interval = part.interval() if prompts >= FEW else None
        out.append({**row, "accept_length": part.accept_length, "interval": interval})
    return out


def _between(acceptance: Acceptance, places: Sequence[Sequence[int]], low: int, high: float) -> Acceptance:
    """The rounds that lie in this range, prompt by prompt; prompts without any are left out."""
    picked = (
        tuple(n for n, p in zip(rounds, at, strict=True) if low <= p < high)
        for rounds, at in zip(acceptance.rounds, places, strict=True)
    )
    return Acceptance(tuple(r for r in picked if r), acceptance.draft_steps)


def position_findings(acceptance: Acceptance, texts: Sequence[Text], most: int | None) -> list[Finding]:
    """K122 by measurement: whether acceptance falls past the drafter's `max_position_embeddings` (`most`)."""
    if not most or len(texts) != len(acceptance.rounds):
        return [Finding.of("K122", "the drafter's positions or the texts are not known", status="not-run")]
    places = starts(acceptance, texts)
    within, beyond = _between(acceptance, places, 0, most), _between(acceptance, places, most, float("inf"))
    farthest = max((p for row in places for p in row), default=0)
    if not beyond.verified:
        title = f"no round lies past the drafter's {most} positions; the last one begins at {farthest}"
        return [Finding.of("K122", title, status="not-applicable")]
    if any(x.verified < BEYOND or len(x.rounds) < FEW for x in (within, beyond)):
        title = f"{beyond.verified} rounds lie past the drafter's {most} positions, too few to judge"
        return [Finding.of("K122", title, status="not-run")]
    (low, up), (_, high) = within.interval(), beyond.interval()
    text = f"accept length {within.accept_length:.2f} ({low:.2f}-{up:.2f}) in {within.verified} rounds up to "
    text += f"position {most}, {beyond.accept_length:.2f} (up to {high:.2f}) in {beyond.verified} rounds past it"
    evidence = [Evidence("acceptance", text, {"within": within.to_dict(), "beyond": beyond.to_dict()})]
    if high < low:
        title = f"acceptance falls from {within.accept_length:.2f} to {beyond.accept_length:.2f} past position {most}"
        return [Finding.of("K122", title, evidence=evidence)]
    return [
        Finding.of("K122", "acceptance does not fall past the drafter's positions", status="pass", evidence=evidence)
    ]
