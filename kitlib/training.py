"""A trainer's accuracies, from its JSON, JSON lines or log, and the accept length they promise by the right formula.

Joint accuracy (speculators' full_acc_k) is summed; conditional accuracy (cond_acc_k) and the marginal accuracies that
SpecForge, SafeAILab, AngelSlim and modelopt log per step are multiplied. Source: research/checkpoint-formats.md §4.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from .findings import KitError, read_bounded

MOST, LONGEST = 32 << 20, 4 << 20  # bytes of a log; characters of the JSON in it
KINDS = {  # name in the log, with its step -> (kind, who writes it, what it leaves out)
    r"full_acc_(\d{1,3})": ("joint", "speculators", "tokens outside the draft vocabulary are not counted"),
    r"cond_acc_(\d{1,3})": ("conditional", "speculators", "tokens outside the draft vocabulary are not counted"),
    r"acc(?:uracy)?_(\d{1,3})": (
        "conditional",
        "SpecForge, SafeAILab or AngelSlim",
        "steps are fed true tokens",
    ),
    r"train_acc_?(\d{1,3})": ("conditional", "modelopt", "tokens outside the draft vocabulary are not counted"),
    r"step_(\d{1,3})_accuracy": ("conditional", "a trainer", "steps are fed true tokens"),
}
NAME = re.compile("|".join(f"(?:{k})" for k in KINDS))
PAIR = re.compile(
    r"(?<![\w./])['\"]?(?P<prefix>[\w.]{1,60}/)?(?P<name>\w{1,40})['\"]?\s{0,4}[:=]\s{0,4}(?:tensor\()?"
    r"(?P<value>-?\d{0,12}\.?\d{1,20}(?:[eE][-+]?\d{1,3})?)(?P<percent>\s?%)?"
)


@dataclass(frozen=True)
class Training:
    """Accuracies by draft step, the last that were logged."""

    kind: str  # "joint" or "conditional"
    values: tuple[float, ...]
    trainer: str
    leaves_out: str

    @property
    def joint(self) -> tuple[float, ...]:
        """P(steps 0..k all right)."""
        return self.values if self.kind == "joint" else tuple(accumulate(self.values, mul))

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(step k right, given that the steps before it were)."""
        if self.kind == "conditional":
            return self.values
        before = (1.0, *self.values)
        return tuple(b / a if a else 0.0 for a, b in zip(before, self.values, strict=False))

    def expected(self, steps: int | None = None) -> float:
        """Accept length of a chain, the bonus token included: 1 + Σ joint = 1 + c0 + c0·c1 + …"""
        return 1 + math.fsum(self.joint[:steps])

    def bracket(self, steps: int, coverage: float = 1.0) -> tuple[float, float]:
        """Where only the first step is known: all later ones fail, or all are as good; `coverage` of the vocabulary."""
        c = self.conditional[0] * coverage
        return 1 + c, 1 + (c * (1 - c**steps) / (1 - c) if c < 1 else steps)

    @property
    def formula(self) -> str:
        return "1 + sum of joint accuracies" if self.kind == "joint" else "1 + c0 + c0*c1 + ..."


def silence(first: float, rounds: int) -> float:
    """Probability that `rounds` verify rounds accept nothing, if the first draft is right this often."""
    return (1 - first) ** rounds


def read_training(path: str | Path) -> Training:
    """The newest accuracies of a file; KitError where it holds none."""
    text = read_bounded(path, MOST, "the training metrics").decode("utf-8", "replace")
    found: dict[tuple[str, str], dict[int, float]] = {}  # by prefix (val/, train/) and pattern; the last one wins
    above = False
    for prefix, name, value in _pairs(text):
        if hit := NAME.fullmatch(name):
            above |= value > 1
            if 0 <= value <= 1:
                pattern = next(k for k in KINDS if re.fullmatch(k, name))
                found.setdefault((prefix, pattern), {})[int(next(g for g in hit.groups() if g is not None))] = value
    told = []
    for (prefix, pattern), steps in found.items():
        first = min(steps)  # some trainers count from 1
        values = tuple(steps[k] for k in range(first, first + len(steps)) if k in steps)
        told.append(("val" in prefix or "test" in prefix, len(values), -list(KINDS).index(pattern), pattern, values))
    if told:
        *_, pattern, values = max(told)  # held-out rows before training rows, then the longest chain
        kind, trainer, leaves_out = KINDS[pattern]
        if kind == "joint" and list(values) != sorted(values, reverse=True):
            raise KitError(f"{path}: joint accuracies {values} rise with the step, which they cannot; check the log.")
        return Training(kind, values, trainer, leaves_out)
    lists = dict(_lists(text))
    for key, kind in (("served_conditional", "conditional"), ("conditional", "conditional"), ("joint", "joint")):
        if key in lists:
            return Training(kind, tuple(lists[key]), "the kit", "nothing: all tokens of the answers are counted")
    wanted = "full_acc_0, cond_acc_0, acc_0, or a list `conditional`"
    hint = "; what is there is above 1: divide percentages by 100" if above else ""
    raise KitError(f"{path} holds no accuracies by draft step ({wanted}){hint}.")


def _pairs(text: str) -> Iterator[tuple[str, str, float]]:
    """Every `name: number` of the text, in order, whatever lies around it: (prefix, name, number)."""
    for hit in PAIR.finditer(text):
        yield hit["prefix"] or "", hit["name"], float(hit["value"]) / (100 if hit["percent"] else 1)


def _lists(text: str) -> Iterator[tuple[str, list[float]]]:
    """Lists of accuracies in a JSON object, or in the last line of JSON lines."""
    for piece in (text, *reversed(text[-LONGEST:].splitlines()[-50:])):
        if len(piece) > LONGEST:
            continue
        try:
            value: Any = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, Mapping):
            for name, item in value.items():
                if isinstance(item, list) and item and all(type(x) in (int, float) and 0 <= x <= 1 for x in item):
                    yield name, [float(x) for x in item]
            return
