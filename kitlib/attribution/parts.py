"""What an attribution is made of: counts with their bootstrap, steps, and the whole with its findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..acceptance import Acceptance
from ..diagnose import PROMISE
from ..findings import Evidence, Finding

DRAWS, FEW = 2000, 3  # resamples; texts below which no interval is given
NOTHING = 0.02  # a gain of as little is chance


@dataclass(frozen=True)
class Counts:
    """How often drafts 0..k were all right, and how often that was asked, text by text."""

    right: np.ndarray  # [texts, S]
    asked: np.ndarray  # [texts, S]
    on: str = ""  # which texts; equal ones are resampled together

    @classmethod
    def of(cls, acceptance: Acceptance, on: str) -> Counts:
        """From verify rounds: a round asks for every draft position."""
        steps = range(1, acceptance.draft_steps + 1)
        right = np.array([[sum(n >= k for n in r) for k in steps] for r in acceptance.rounds], dtype=float)
        return cls(right, np.array([[len(r) for _ in steps] for r in acceptance.rounds], dtype=float), on)

    @property
    def length(self) -> float:
        """1 + Σ joint, the bonus token included."""
        return float(self.lengths(np.ones((1, len(self.right)))).item())

    def lengths(self, weights: np.ndarray) -> np.ndarray:  # [draws, texts] -> [draws]
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 + ((weights @ self.right) / (weights @ self.asked)).sum(-1)

    def draws(self, seed: int) -> np.ndarray:
        """Bootstrap over texts, [DRAWS]; the same seed draws the same texts."""
        n = len(self.right)
        return self.lengths(np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS).astype(float))

    def interval(self, before: Counts | float = 0.0) -> tuple[float, float] | None:
        """95 % of the length, or of its change; paired where both are of the same texts."""
        if len(self.right) < FEW:
            return None
        gap = self.draws(0)
        if isinstance(before, Counts):
            paired = before.on == self.on and len(before.right) == len(self.right)
            gap = gap - before.draws(0 if paired else 1)
        else:
            gap = gap - before
        return tuple(float(x) for x in np.nanquantile(gap, [0.025, 0.975]))


@dataclass(frozen=True)
class Step:
    """One thing changed. Accept lengths before and after it; where it was not measured both are the same."""

    name: str
    before: float | None
    after: float | None
    interval: tuple[float, float] | None  # 95 % of the change
    how: str  # what was compared, or why it was not
    ran: bool = True

    @property
    def change(self) -> float:
        return 0.0 if self.before is None or self.after is None else self.after - self.before

    @property
    def kept(self) -> float | None:
        """Share of the gain over 1.00 that is left: unlike the change, it does not shrink with what was lost before."""
        return max(self.after - 1, NOTHING) / max(self.before - 1, NOTHING) if self.ran else None


@dataclass(frozen=True)
class Attribution:
    """The way from training's promise to what is served; the last step is what a server accepts beyond the replay."""

    promised: float | None
    steps: tuple[Step, ...]
    last: Counts  # of the last replay
    claimed: float | None = None
    reading: str = ""  # how `claimed` comes about

    @property
    def first(self) -> float:
        """The first accept length that is known."""
        return next(s.before for s in self.steps if s.before is not None)

    @property
    def served(self) -> float:
        """A server's accept length where there is one, the last replay's otherwise."""
        return self.steps[-1].after

    def rows(self) -> list[dict[str, Any]]:
        """For a table: every step, and their sum."""
        out = []
        for s in self.steps:
            row = {"step": s.name, "before": s.before, "after": s.after, "change": s.change if s.ran else None}
            row |= {"95 % of the change": s.interval, "gain kept": None if s.kept is None else f"{s.kept:.0%}"}
            clear = s.interval is not None and not s.interval[0] <= 0 <= s.interval[1]
            out.append({**row, "how": s.how, "_status": "differs" if clear else "" if s.ran else "not-run"})
        sums = {"before": self.first, "after": self.served, "change": self.served - self.first}
        return [*out, {"step": "sum", **sums}]

    def findings(self) -> list[Finding]:
        """M203 with the drop divided, and M204 where a number was quoted."""
        return [self._below(), *([] if self.claimed is None else [self._quoted()])]

    def _below(self) -> Finding:
        if self.promised is None:
            return Finding.of("M203", "training's accuracies are not known for every step", status="not-run")
        if not self.last.asked.any():
            return Finding.of("M203", "no verify round was measured", status="not-run")
        ran = [s for s in self.steps if s.ran and s.name != "quoted number"]
        left = [s.name for s in self.steps if not s.ran]
        text = f"training promises {self.promised:.2f}, served {self.served:.2f}: "
        text += ", ".join(f"{s.name} {s.change:+.2f}" for s in ran)
        text += f"; not measured: {', '.join(left)}" * bool(left)
        values = {"promised": self.promised, "served": self.served, "not run": left}
        evidence = [Evidence("training", text, values | {"steps": {s.name: s.change for s in ran}})]
        interval = None if self.steps[-1].ran else self.last.interval()
        if 1 + PROMISE * (self.promised - 1) <= (interval[1] if interval else self.served):
            return Finding.of("M203", status="pass", evidence=evidence)
        most = min(ran, key=lambda s: s.kept)
        title = f"accept length {self.served:.2f} where training promises {self.promised:.2f}; "
        return Finding.of("M203", title + f"{most.name} keeps {most.kept:.0%} of the gain", evidence=evidence)

    def _quoted(self) -> Finding:
        if self.promised is None:
            return Finding.of("M204", f"what {self.claimed:.2f} should be is not known", status="not-run")
        text = f"{self.claimed:.2f} was quoted, the metrics give {self.promised:.2f}"
        evidence = [Evidence("training", text)]
        if self.reading:
            return Finding.of("M204", f"{self.claimed:.2f} is {self.reading}", evidence=evidence)
        return Finding.of("M204", status="pass", evidence=evidence)
