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

from .findings import KitError

MOST = 64 << 20  # bytes of a log
KINDS = {  # name in the log, with its step -> (kind, who writes it, what it leaves out)
    r"full_acc_(\d+)": ("joint", "speculators", "tokens outside the draft vocabulary are not counted"),
    r"cond_acc_(\d+)": ("conditional", "speculators", "tokens outside the draft vocabulary are not counted"),
    r"acc(?:uracy)?_(\d+)": ("conditional", "SpecForge, SafeAILab or AngelSlim", "each step is fed the true tokens"),
    r"train_acc_?(\d+)": ("conditional", "modelopt", "tokens outside the draft vocabulary are not counted"),
    r"step_(\d+)_accuracy": ("conditional", "a trainer", "each step is fed the true tokens"),
}
NAME = re.compile("|".join(f"(?:{k})" for k in KINDS))
PAIR = re.compile(
    r"['\"]?(?:[\w.]+/)?(?P<name>\w+)['\"]?\s*[:=]\s*(?:tensor\()?(?P<value>-?\d*\.?\d+(?:[eE][-+]?\d+)?)"
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
        return 1 + c, 1 + math.fsum(c**k for k in range(1, steps + 1))

    @property
    def formula(self) -> str:
        return "1 + sum of joint accuracies" if self.kind == "joint" else "1 + c0 + c0*c1 + ..."


def silence(first: float, rounds: int) -> float:
    """Probability that `rounds` verify rounds accept nothing, if the first draft is right this often."""
    return (1 - first) ** rounds


def read_training(path: str | Path) -> Training:
    """The newest accuracies of a file; KitError where it holds none."""
    path = Path(path)
    try:
        if path.stat().st_size > MOST:
            raise KitError(f"{path} is larger than {MOST >> 20} MB; cut the end of the log off and name that.")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise KitError(f"Cannot read the training metrics {path}: {error.strerror}.") from None
    found: dict[str, dict[int, float]] = {}
    for name, value in _pairs(text):
        if (hit := NAME.fullmatch(name)) and 0 <= value <= 1:
            pattern = next(k for k in KINDS if re.fullmatch(k, name))
            found.setdefault(pattern, {})[int(next(g for g in hit.groups() if g is not None))] = value
    for pattern, (kind, trainer, leaves_out) in KINDS.items():
        steps = found.get(pattern, {})
        first = min(steps, default=0)  # some trainers count from 1
        if values := tuple(steps[k] for k in range(first, first + len(steps)) if k in steps):
            return Training(kind, values, trainer, leaves_out)
    lists = dict(_lists(text))
    for key, kind in (("served_conditional", "conditional"), ("conditional", "conditional"), ("joint", "joint")):
        if key in lists:
            return Training(kind, tuple(lists[key]), "the kit", "nothing: all tokens of the answers are counted")
    wanted = "full_acc_0, cond_acc_0, acc_0, or a list `conditional`"
    raise KitError(f"{path} holds no accuracies by draft step ({wanted}).")


def _pairs(text: str) -> Iterator[tuple[str, float]]:
    """Every `name: number` of the text, in order, whatever lies around it; names without their prefix."""
    for hit in PAIR.finditer(text):
        yield hit["name"], float(hit["value"])


def _lists(text: str) -> Iterator[tuple[str, list[float]]]:
    """Lists of accuracies in a JSON object, or in the last line of JSON lines."""
    for piece in (text, *reversed(text.splitlines()[-50:])):
        try:
            value: Any = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, Mapping):
            for name, item in value.items():
                if isinstance(item, list) and item and all(type(x) in (int, float) and 0 <= x <= 1 for x in item):
                    yield name, [float(x) for x in item]
            return
