"""A small matrix of speculation flags: serve, measure, stop, one row after another, each predicted before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .acceptance import Acceptance
from .diagnose import Session
from .findings import Evidence, Finding
from .lab.faults import FAULTS
from .paths import ROOT
from .server import Launch, bench, start
from .server.paired import differences
from .trees import replay_trees
from .workbench import Workbench

DUMMY = ("--speculative-draft-load-format", "dummy")


@dataclass(frozen=True)
class Flags:
    """One row. `dummy`: the engine fills the drafter with random values, the negative control."""

    algorithm: str = "EAGLE3"
    steps: int = 4
    topk: int = 1
    draft_tokens: int | None = None  # D; None: steps + 1
    dummy: bool = False

    def __str__(self) -> str:
        if not self.algorithm:
            return "no speculation"
        shape = f"{self.algorithm} {self.steps}-{self.topk}-{self.draft_tokens or self.steps + 1}"
        return shape + (" dummy" if self.dummy else "")


GRID = (
    Flags(""),
    Flags(steps=4),
    Flags(steps=1),
    Flags(steps=2),
    Flags(steps=3, topk=4, draft_tokens=8),
    Flags(steps=4, topk=4, draft_tokens=16),
    Flags("EAGLE", steps=4),
    Flags(dummy=True),
)


def predict(session: Session, flags: Flags) -> Acceptance | None:
    """Replay under these flags; None where there is nothing to predict from (no speculation, random weights)."""
    if flags.dummy or flags.algorithm not in ("EAGLE3", "EAGLE"):
        return None
    trained = session.trained
    wiring = trained if flags.algorithm == "EAGLE3" else FAULTS["fc-bypass-eagle"].wiring(trained)
    if flags.topk == 1:
        return replace(session, steps=flags.steps).measure(wiring)
    shape = (flags.steps, flags.topk, flags.draft_tokens or flags.steps + 1)
    return replay_trees(session.load(wiring)[0], session.states([wiring]), *shape)


def flag_matrix(
    workbench: Workbench,  # its `draft_steps` must be at least the longest of the grid
    grid: Sequence[Flags] = GRID,
    *,
    engine: str = "auto",
    clients: int = 4,
    limit_s: float = 600.0,
) -> Iterator[dict[str, Any]]:
    """One row a line of the grid, as soon as it is measured; a server that does not come up is a row, too."""
    session, drafter = workbench.session, workbench.last.drafter
    logs = Path(workbench.out or ROOT / "reports" / "interactive") / "servers"
    prompts, answers = [t.ids[: t.prompt] for t in session.texts], [t.answer for t in session.texts]
    for flags in workbench.progress(grid):
        predicted = predict(session, flags)
        launch = Launch(
            session.target.info.path, drafter if flags.algorithm else None, flags.algorithm, flags.steps, flags.topk,
            flags.draft_tokens, dtype=session.target.dtype, extra=DUMMY if flags.dummy else (),
        )  # fmt: skip
        role = "control" if flags.dummy else "fault" if flags.algorithm == "EAGLE" else "trained"
        row = {"name": str(flags), "role": role, "predicted": predicted and predicted.accept_length}
        with start(launch, logs, engine=engine, interval_s=2.0, limit_s=limit_s) as server:
            if not server.ready:
                yield {**row, "accept_length": None, "why": server.findings[0].title}
                continue
            run = bench(server, prompts, max_new_tokens=workbench.max_new_tokens, clients=clients)
        apart, compared = differences(run, answers)
        yield {
            **row,
            "accept_length": run.accept_length,
            "interval": run.interval,
            "histogram": run.histogram,
            "histogram as predicted": run.histogram == predicted.histogram if predicted else None,
            "texts as the target's own": f"{compared - len(apart)} of {len(answers)}",
            "tokens/s": run.tokens_per_s,
            **({"error": run.error} if run.error else {}),
        }


def matrix_findings(rows: Sequence[dict[str, Any]], dtype: str) -> list[Finding]:
    """M208 over the rows that have a prediction: exact in float32, within the interval otherwise."""
    told = [r for r in rows if r["predicted"] is not None and r["accept_length"] is not None]
    if not told:
        return [Finding.of("M208", "no row has both a prediction and a measurement", status="not-run")]
    exact = dtype == "float32"
    wrong = [
        r["name"] for r in told
        if (not r["histogram as predicted"] if exact else not r["interval"][0] <= r["predicted"] <= r["interval"][1])
    ]  # fmt: skip
    how = "histogram for histogram" if exact else "within the interval over prompts"
    evidence = [Evidence("server", f"{len(told) - len(wrong)} of {len(told)} rows are as predicted, {how}")]
    if wrong:
        return [Finding.of("M208", f"not as predicted: {', '.join(wrong)}", evidence=evidence)]
    return [Finding.of("M208", status="pass", evidence=evidence)]
