"""Plain rows for `show`: what the notebooks put into tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .contract import Wiring
from .engines import accept_rate

if TYPE_CHECKING:
    from .acceptance import Acceptance
    from .drafter import LoadResult
    from .engines import Served
    from .probe import ProbeResult


def wiring_rows(wirings: Mapping[str, Wiring]) -> list[dict[str, Any]]:
    """Wirings side by side; a row that differs from the first column is marked."""
    (first, reference), *_ = wirings.items()
    rows = []
    for name in reference.to_dict():
        values = {label: getattr(w, name) for label, w in wirings.items()}
        shown = {
            k: f"{len(v)} tensors" if name == "dropped" and v else "–" if v in ((), None) else v
            for k, v in values.items()
        }
        differs = any(v != values[first] for v in values.values())
        rows.append({"field": name, **shown, "_status": "differs" if differs else ""})
    return rows


def probe_rows(result: ProbeResult, rules: Served) -> dict[str, Any]:
    """What a release really did with the file, in one row, and whether the rules had said so tensor by tensor."""
    row = {"release": result.engine.partition("==")[2], "status": result.status}
    if result.status not in ("ran", "refused"):
        return row | {"why": result.reason, "_status": "not-run"}
    for status in ("loaded", "renamed", "dropped"):
        row[status] = len(result.of(status))
    given = {"embed_tokens.weight"} if rules.wiring.embed_source == "target" else set()  # the target's is put in
    row["parameters without a tensor"] = len(set(result.missing) - given)
    for width in (result.trained_width, result.single_width):
        ran = result.at(width)
        row[f"fc ran at {width}"] = ran.fc if ran and not ran.error else None
    said = {f.name for f in rules.of("dropped")}
    agrees = (result.status == "refused") == bool(rules.refused)
    agrees &= result.status == "refused" or {k.name for k in result.of("dropped")} == said
    row["as the rules say"] = agrees
    return row | {"_status": "dropped" if said else "loaded" if agrees else "fail"}


def load_rows(result: LoadResult) -> list[dict[str, Any]]:
    """One row a tensor: what the strict load did with it."""
    rows = [
        {"tensor": n, "fate": "renamed" if n in result.renamed else "loaded", "as": result.renamed.get(n, "")}
        for n in result.loaded
    ]
    rows += [{"tensor": n, "fate": "missing", "as": "filled in"} for n in result.missing]
    rows += [{"tensor": n, "fate": "unused", "as": ""} for n in result.unused]
    rows += [{"tensor": n, "fate": "not needed", "as": ""} for n in result.not_needed]
    return [{**row, "_status": row["fate"].replace(" ", "-")} for row in rows]


def accept_row(name: str, acceptance: Acceptance, role: str) -> dict[str, Any]:
    """One wiring's acceptance as plain data."""
    return {
        "name": name,
        "role": role,
        "accept_length": acceptance.accept_length,
        "interval": acceptance.interval(),
        "accepted": acceptance.accepted,
        "rounds": acceptance.verified,
        "histogram": acceptance.histogram,
        "by_position": acceptance.by_position,
    }


def log_rows(measured: Mapping[str, Acceptance], releases: Iterable[str]) -> list[dict[str, Any]]:
    """The accept rate that each SGLang release's log would print for these counts; formulas from the data file."""
    rows = []
    for name, a in measured.items():
        row: dict[str, Any] = {"wiring": name, "accept len": f"{a.accept_length:.2f}"}
        for release in releases:
            rate, _ = accept_rate(release, a.accepted, a.verified, a.draft_steps + 1, a.draft_steps)
            row[release] = "not printed" if rate is None else f"{rate:.2f}"
        rows.append(row)
    steps = next(iter(measured.values())).draft_steps
    nothing = {r: accept_rate(r, 0, 1, steps + 1, steps)[0] for r in releases}
    shown = {r: "not printed" if v is None else f"{v:.2f}" for r, v in nothing.items()}
    formulas = {r: accept_rate(r, 0, 1, steps + 1, steps)[1] for r in releases}
    return [
        *rows,
        {"wiring": "nothing accepted", "accept len": "1.00", **shown},
        {"wiring": "formula", "accept len": "(a+v)/v", **formulas},
    ]


def training_rows(expected: Iterable[float], predicted: float | None, measured: Acceptance) -> list[dict[str, Any]]:
    """Training's conditional accuracy beside the measured one, position by position, and the accept lengths."""
    if predicted is None:
        return [
            {
                "position": "not run",
                "training": "no metrics.json beside the drafter",
                "measured": "–",
                "_status": "not-run",
            }
        ]
    pairs = zip(expected, measured.conditional, strict=False)
    rows = [{"position": i + 1, "training": c, "measured": m, "ratio": m / c} for i, (c, m) in enumerate(pairs)]
    total = measured.accept_length
    return [*rows, {"position": "accept length", "training": predicted, "measured": total, "ratio": total / predicted}]
