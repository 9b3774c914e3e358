"""The training side of one drafter: its rows and its metrics, against a session; what the notebooks ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..acceptance import Acceptance
from ..contract import Wiring
from ..diagnose import Session
from ..findings import Finding, KitError
from ..texts import Rendering, Row, outside, row_table, text_findings
from ..training import Training
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

    @cached_property
    def kept(self) -> list[int]:
        """Target ids that the drafter can write."""
        drafter, _ = self.session.load()
        return drafter.to_target(torch.arange(self.session.contract.draft_vocab, device=drafter.d2t.device)).tolist()

    def findings(self) -> list[Finding]:
        """T401: the rows' prompts and masks against the target's own template."""
        return text_findings(self.rows, self.session.target.tokenizer)

    def table(self) -> list[dict[str, Any]]:
        """What the rows train on."""
        return row_table(self.rows, self.kept, self.session.target.tokenizer)

    @property
    def coverage(self) -> float | None:
        """Share of the rows' target tokens that the draft vocabulary holds; None without rows."""
        missed, targets, _ = outside(self.rows, self.kept)
        return 1 - missed / targets if targets else None

    @cached_property
    def stages(self) -> list[Stage]:
        """The steps that need training rows, measured once."""
        return on_rows(self.session, self.few, self.training, self.cache)

    def attribution(
        self, served: Wiring | None, known: Mapping[Wiring, Acceptance], observed: float | None = None
    ) -> Attribution:
        """`attribute` with what was measured before in `known`."""
        swap, alike = None, False
        try:
            rendering = Rendering(self.session.target.tokenizer)
            alike = bool(self.rows) and not any(rendering.difference(r) for r in self.rows)
            swap = None if alike else rendering.swap(self.rows)
        except KitError:
            pass  # T401 says why
        return attribute(
            self.session, served, training=self.training, stages=self.stages, swap=swap, alike=alike,
            observed=observed, cache=self.cache,
            measure=lambda wiring: known[wiring] if wiring in known else self.session.measure(wiring),
        )  # fmt: skip
