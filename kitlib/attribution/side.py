"""The training side of one drafter: its rows and its metrics, against a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..acceptance import Acceptance
from ..contract import Wiring
from ..diagnose import Session
from ..findings import Finding, KitError
from ..texts import Rendering, Row, outside, row_table, text_findings
from ..training import Training
from .metric import promise_rows, vocabulary
from .parts import Attribution
from .steps import Stage, attribute, on_rows


@dataclass
class TrainingSide:
    """Training rows beside a session. `few` of them, cut, are replayed; all of them are read as text."""

    session: Session
    rows: Sequence[Row]
    few: Sequence[Row]
    training: Training | None = None
    cache: Path | None = None
    ask: Callable[[Sequence[dict]], Sequence[int]] | None = None  # a server's own rendering; see `texts.Rendering`

    @property
    def tokenizer(self) -> Any:
        """The target's; None where only states are stored."""
        return getattr(self.session.target, "tokenizer", None)

    @cached_property
    def kept(self) -> list[int]:
        """Target ids that the drafter can write."""
        return vocabulary(self.session.load()[0]).tolist()

    def findings(self) -> list[Finding]:
        """T401: the rows' prompts and masks against what is served."""
        return text_findings(self.rows, self.tokenizer, self.ask)

    def table(self) -> list[dict[str, Any]]:
        """What the rows train on."""
        return row_table(self.rows, self.kept, self.tokenizer)

    def promise(self, rounds: int) -> list[dict[str, Any]]:
        """`promise_rows` of the metrics' first step: over all tokens, and scaled by the vocabulary's coverage."""
        if self.training is None:
            return [{"first step": "training's accuracies are not known", "_status": "not-run"}]
        missed, targets, _ = outside(self.rows, self.kept)
        scaled = [1 - missed / targets] if targets and "draft vocabulary" in self.training.leaves_out else []
        return promise_rows(self.training.conditional[0], self.session.steps, rounds, [1.0, *scaled])

    @cached_property
    def stages(self) -> list[Stage]:
        """The steps that need training rows, measured once."""
        return on_rows(self.session, self.few, self.training, self.cache)

    def attribution(
        self, served: Wiring | None, known: Mapping[Wiring, Acceptance], **numbers: float | None
    ) -> Attribution:
        """`attribute` with what was measured before in `known`; `numbers` are `claimed` and `observed`."""
        swap, alike = None, False
        try:
            rendering = Rendering(self.tokenizer, self.ask)
            alike = bool(self.rows) and not any(rendering.difference(r) for r in self.rows)
            swap = None if alike else rendering.swap(self.rows)
        except KitError:
            pass  # T401 says why
        return attribute(
            self.session, served, training=self.training, stages=self.stages, swap=swap, alike=alike,
            cache=self.cache, **numbers,
            measure=lambda wiring: known[wiring] if wiring in known else self.session.measure(wiring),
        )  # fmt: skip
