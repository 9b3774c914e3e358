"""What an attribution is made of: counts with their bootstrap, steps, and the whole with its findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..acceptance import Acceptance
from ..diagnose import PROMISE
from ..findings import Evidence, Finding

DRAWS, FEW = 2000, 3  # resamples; texts below which no interval is given


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
        gap = self.draws(0)
        if isinstance(before, Counts):
            paired = before.on == self.on and len(before.right) == len(self.right)
            gap = gap - before.draws(0 if paired else 1)
        else:
            gap = gap - before
        if len(self.right) < FEW:
            return None
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


@dataclass(frozen=True)
class Attribution:
    """The way from training's promise to what is served."""

    promised: float | None
    steps: tuple[Step, ...]
    last: Counts
    observed: float | None = None  # a server's own accept length
    claimed: float | None = None
    reading: str = ""  # how `claimed` comes about

    @property
    def whole(self) -> float:
        """From the first accept length to the last one, the observed one where there is any."""
        first = next(s.before for s in self.steps if s.before is not None)
        return (self.last.length if self.observed is None else self.observed) - first

    @property
    def residual(self) -> float | None:
        """What a server accepts beyond the last step; None where no server's counts were given."""
        return None if self.observed is None else self.observed - self.last.length

    def rows(self) -> list[dict[str, Any]]:
        """For a table: every step, the residual, and their sum."""
        out = []
        for s in self.steps:
            clear = s.interval is not None and not s.interval[0] <= 0 <= s.interval[1]
            row = {"step": s.name, "before": s.before, "after": s.after, "change": s.change if s.ran else None}
            state = "" if s.ran and not clear else "differs" if s.ran else "not-run"
            out.append({**row, "95 % of the change": s.interval, "how": s.how, "_status": state})
        end = self.last.length
        if self.observed is None:
            out.append(
                {"step": "residual", "before": end, "how": "no server's counts were given", "_status": "not-run"}
            )
        else:
            how = "what the server accepted, against the last replay"
            out.append({"step": "residual", "before": end, "after": self.observed, "change": self.residual, "how": how})
        first = next(s.before for s in self.steps if s.before is not None)
        return [*out, {"step": "sum", "before": first, "after": first + self.whole, "change": self.whole}]

    def findings(self) -> list[Finding]:
        """M203 with the drop divided, and M204 where a number follows another definition."""
        found = []
        if self.promised is None:
            found.append(Finding.of("M203", "training's accuracies are not known for every step", status="not-run"))
        else:
            found.append(self._below())
        if self.claimed is not None:
            text = f"{self.claimed:.2f} was quoted, the metrics give {self.promised or float('nan'):.2f}"
            evidence = [Evidence("training", text + f"; {self.reading}" * bool(self.reading))]
            if self.reading:
                found.append(Finding.of("M204", f"{self.claimed:.2f} is {self.reading}", evidence=evidence))
            else:
                found.append(Finding.of("M204", status="pass", evidence=evidence))
        return found

    def _below(self) -> Finding:
        end = self.last.length if self.observed is None else self.observed
        ran = [s for s in self.steps if s.ran and s.name != "quoted number"]
        parts = [f"{s.name} {s.change:+.2f}" for s in ran] + (
            [f"residual {self.residual:+.2f}"] if self.residual is not None else []
        )
        left = [s.name for s in self.steps if not s.ran]
        text = f"training promises {self.promised:.2f}, served {end:.2f}: {', '.join(parts)}"
        text += f"; not measured: {', '.join(left)}" * bool(left)
        values = {"promised": self.promised, "served": end, "steps": {s.name: s.change for s in ran}, "not run": left}
        evidence = [Evidence("training", text, values)]
        high = end if self.observed is not None else (self.last.interval() or (0, end))[1]
        if 1 + PROMISE * (self.promised - 1) <= high:
            return Finding.of("M203", status="pass", evidence=evidence)
        most = min(ran, key=lambda s: s.change)
        title = (
            f"accept length {end:.2f} where training promises {self.promised:.2f}; {most.change:+.2f} by {most.name}"
        )
        return Finding.of("M203", title, evidence=evidence)
