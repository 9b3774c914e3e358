"""The text side: training rows against what a server renders, their loss masks, and acceptance along the text.

A drafter learns to follow the token ids of its training rows. A server that renders other ids (another system prompt,
no BOS, think tags) or a mask that trains nothing lowers acceptance without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..findings import Evidence, Finding, KitError
from .along import along, position_findings, starts
from .rendering import Difference, Rendering, Row, as_row, read_rows

__all__ = [
    "Difference", "Rendering", "Row", "along", "as_row", "outside", "position_findings", "read_rows", "row_table",
    "served_ids", "starts", "text_findings",
]  # fmt: skip
EMPTY = 0.01  # share of rows whose mask may cover nothing, or everything


def text_findings(
    rows: Sequence[Row],
    tokenizer,
    ask: Callable[[Sequence[dict]], Sequence[int]] | None = None,  # messages -> the ids that the server makes of them
) -> list[Finding]:
    """T401: the rows' prompts against what is served, and their loss masks."""
    if not rows:
        return [Finding.of("T401", "no training rows were given", status="not-run")]
    found = []
    nothing, everything = _masks(rows)
    for count, what in ((nothing, "nothing"), (everything, "everything, the prompt included")):
        if count > EMPTY * len(rows):
            title = f"the loss mask covers {what} in {count} of {len(rows)} training rows"
            text = f"{sum(sum(r.mask) for r in rows)} of {sum(len(r.ids) for r in rows)} tokens are trained on"
            found.append(Finding.of("T401", title, evidence=[Evidence("training", text, {"rows": count})]))
    try:
        rendering = Rendering(tokenizer, ask)
        parted = [d for n, r in enumerate(rows) if (d := rendering.difference(r, n))]
        whole = sum(rendering.conversation(r) is not None for r in rows)
    except KitError as error:
        return [*found, Finding.of("T401", str(error), status="not-run")]
    how = f"{len(rows)} rows, {whole} of them compared through their whole prompt"
    if not parted:
        if not found:
            found.append(Finding.of("T401", status="pass", evidence=[Evidence("training", f"{how}: no difference")]))
        return found
    kinds = Counter(d.kind for d in parted)
    first = next(d for d in parted if d.kind == kinds.most_common(1)[0][0])
    named = ", ".join(f"{kind} ({n})" for kind, n in kinds.most_common(4))
    title = f"{len(parted)} of {len(rows)} training rows are not what is served: {named}"
    text = f"row {first.row}, token {first.at}: trained on {first.trained!r}, served {first.served!r} ({how})"
    values = {"kinds": dict(kinds), "row": first.row, "at": first.at}
    return [*found, Finding.of("T401", title, evidence=[Evidence("training", text, values)])]


def _masks(rows: Sequence[Row]) -> tuple[int, int]:
    """Rows whose mask covers nothing, and everything."""
    return sum(not any(r.mask) for r in rows), sum(all(r.mask) for r in rows)


def outside(rows: Iterable[Row], kept: Iterable[int]) -> tuple[int, int, Counter]:
    """Target tokens outside the draft vocabulary, all target tokens, and the ones outside by how often they occur."""
    inside, targets = set(kept), Counter()
    for row in rows:
        targets.update(i for i, on in zip(row.ids, row.mask, strict=True) if on)
    missed = Counter({i: n for i, n in targets.items() if i not in inside})
    return missed.total(), targets.total(), missed


def row_table(rows: Sequence[Row], kept: Sequence[int], tokenizer) -> list[dict[str, Any]]:
    """What the rows train on, for a table."""
    missed, targets, which = outside(rows, kept)
    nothing, everything = _masks(rows)
    names = {i: tokenizer.decode([i], clean_up_tokenization_spaces=False) if tokenizer else i for i in which}
    often = ", ".join(f"{names[i]!r} {n}" for i, n in which.most_common(6))
    said = {
        "rows": len(rows),
        "tokens": sum(len(r.ids) for r in rows),
        "loss-mask sum (target tokens)": targets,
        "rows whose mask covers nothing": nothing,
        "rows whose mask covers everything": everything,
        "target tokens outside the draft vocabulary": missed,
        "their share": missed / targets if targets else None,
        "the most frequent of them": often or "none",
    }
    return [{"what": name, "value": value} for name, value in said.items()]


def served_ids(post: Callable[[str, dict], dict]) -> Callable[[Sequence[dict]], Sequence[int]]:
    """`ask` for a server: its `/tokenize` on chat messages, as SGLang and vLLM have it. `post`: path, body -> JSON."""

    def ask(messages: Sequence[dict]) -> Sequence[int]:
        ids = post("/tokenize", {"messages": list(messages)}).get("tokens")
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise KitError("The server's /tokenize answered no list of ids to chat messages; its release is too old.")
        return ids

    return ask
