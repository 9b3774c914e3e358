"""What an engine accepted, as it tells it: round by round, as a histogram, by position, or in totals alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .acceptance import Acceptance
from .findings import KitError, read_bounded

LARGEST, ROUNDS = 1 << 24, 1 << 22  # bytes of a file of observations; rounds that it may tell one by one
DEEPEST = 256  # drafts that one round may accept


@dataclass(frozen=True)
class Observed:
    """What an engine accepted. `rounds` are sorted within a prompt where the engine tells a histogram a request."""

    rounds: tuple[tuple[int, ...], ...] = ()  # [prompt][round]; empty where only totals are known
    histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, 2 … drafts
    accepted: int = 0
    verified: int = 0

    @classmethod
    def of(cls, acceptance: Acceptance, strength: str = "rounds") -> Observed:
        """From a measurement, as strong as asked: rounds, histogram or totals."""
        rounds = tuple(tuple(sorted(r)) for r in acceptance.rounds) if strength == "rounds" else ()
        counted = tuple(acceptance.histogram) if strength != "totals" else ()
        return cls(rounds, counted, acceptance.accepted, acceptance.verified)

    @classmethod
    def read(cls, path: str | Path) -> Observed:
        """From `bench`'s JSON, {"rounds"}, {"histogram"}, {"by_position", "verified"} or {"accepted", "verified"}.

        `by_position` are rounds that accepted draft 1, 2, … (vLLM's counters), or their shares of `verified`.
        """
        try:
            raw = json.loads(read_bounded(path, LARGEST, "counts"))
            raw = raw.get("bench", raw)
            each = [r["counts"]["histogram"] for r in sorted(raw.get("requests") or (), key=lambda r: r["prompt"])]
            if sum(sum(_counts(h)) for h in each) > ROUNDS:
                raise ValueError("there are too many of them")
            given = raw.get("rounds") or [[k for k, n in enumerate(h) for _ in range(n)] for h in each]
            rounds = tuple(tuple(sorted(_counts(r, DEEPEST))) for r in given)
            flat = [k for r in rounds for k in r]
            counted = raw.get("histogram") or _by_position(raw.get("by_position") or [], raw.get("verified"))
            counted = _counts(np.bincount(flat).tolist() if flat else counted)
            a, v = sum(k * n for k, n in enumerate(counted)), sum(counted)
            told = _counts([raw.get("accepted", a), raw.get("verified", v)], 1 << 40)
            if counted and told != (a, v):
                raise ValueError(f"its histogram has {a} accepted in {v} rounds, beside it stands {told}")
            found = cls(rounds, counted, *told)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            reason = str(error)[:100] or type(error).__name__
            raise KitError(f"{path} tells no rounds, histogram, or accepted and verified ({reason}).") from None
        if found.verified < 1 or found.accepted < 0:
            raise KitError(f"{path} tells no verify round, so nothing can be explained.")
        return found


def _by_position(told: Any, verified: Any) -> list[int]:
    """The histogram behind the rounds that accepted draft 1, 2, …, told as counts or as shares."""
    if not told:
        return []
    (rounds,) = _counts([verified])
    shares = any(type(x) is float for x in told)
    reached = [rounds, *_counts([round(x * rounds) for x in told] if shares else told), 0]
    if any(b > a for a, b in pairwise(reached)):
        raise ValueError("no position is accepted more often than the one before it")
    return [a - b for a, b in pairwise(reached)]


def _counts(values: Any, most: int = 1 << 24) -> tuple[int, ...]:
    """Whole numbers from 0 to `most`; ValueError for anything else."""
    if not isinstance(values, (list, tuple)) or any(type(x) is not int or not 0 <= x <= most for x in values):
        raise ValueError("counts are whole numbers of 0 or more")
    if len(values) > LARGEST:
        raise ValueError("there are too many of them")
    return tuple(values)
