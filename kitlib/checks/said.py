"""What a server's log and a trainer's metrics say of acceptance, as findings; nothing is measured."""

from __future__ import annotations

from ..findings import Evidence, Finding
from ..logs import Log
from ..training import Training


def by_training(trained: Training, steps: int | None = None) -> Finding:
    """M203, not run: the accept length that training promises, and by which formula."""
    steps = steps or len(trained.values)
    title = f"training promises accept length {trained.expected(steps):.2f} in chains of {steps} steps; "
    if steps > len(trained.values):
        low, high = trained.bracket(steps)
        title = f"training promises accept length {low:.2f} to {high:.2f} in chains of {steps} steps; "
    values = {"expected": trained.expected(steps), "conditional": trained.conditional, "formula": trained.formula}
    text = f"{trained.trainer}: {trained.kind} accuracies, {trained.formula}; {trained.leaves_out}"
    return Finding.of(
        "M203", title + "nothing was measured", status="not-run", evidence=[Evidence("training", text, values)]
    )


def by_log(log: Log) -> Finding:
    """M201 where decode lines say that nothing was accepted; without controls nothing else is judged."""
    lengths = [row["accept_len"] for row in log.rows if row["accept_len"] is not None]
    if not lengths:
        return Finding.of("M201", "the log holds no decode line with an accept length", status="not-run")
    text = f"{len(lengths)} decode lines, accept len {min(lengths):.2f} to {max(lengths):.2f}"
    evidence = [Evidence("log", text, {"lines": len(lengths), "most": max(lengths)})]
    if max(lengths) <= 1.0:
        return Finding.of("M201", "the log says accept len 1.00 throughout: nothing was accepted", evidence=evidence)
    return Finding.of("M201", "only controls can judge the log's accept length", status="not-run", evidence=evidence)
