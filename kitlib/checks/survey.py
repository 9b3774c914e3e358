"""Many releases at once: findings by release as a matrix, and which release brought or cured each."""

from __future__ import annotations

from typing import Any

from packaging.specifiers import SpecifierSet

from ..findings import MARKS, Finding, Report

WORST = ("☠", "✗", "!", "?", "✓", "–")
SICK = {"☠", "✗", "!"}


def matrix(report: Report) -> dict[str, dict[str, str]]:
    """{"K102 key-naming": {"sglang==0.5.9": "✗", …}, …}: the worst mark of each code that fails in any release."""
    engines = report.subject["engines"]
    rows: dict[str, dict[str, str]] = {}
    for finding in report.findings:
        row = rows.setdefault(f"{finding.code} {finding.slug}", {})
        for engine in engines:
            if _holds(finding, engine):
                row[engine] = min(row.get(engine, "–"), _mark(finding), key=WORST.index)
    full = {name: {e: row.get(e, "–") for e in engines} for name, row in rows.items()}
    return {name: row for name, row in sorted(full.items()) if SICK & set(row.values())}


def lines(report: Report) -> list[str]:
    """The matrix as text; adjacent releases in which every row says the same share a column."""
    engines, rows = report.subject["engines"], matrix(report)
    if len(engines) < 2 or not rows:
        return []
    spans: list[list[str]] = []
    for engine in engines:
        same = spans and engine.partition("==")[0] == spans[-1][-1].partition("==")[0]
        if same and all(row[engine] == row[spans[-1][-1]] for row in rows.values()):
            spans[-1].append(engine)
        else:
            spans.append([engine])
    heads = [_head(span, engines) for span in spans]
    left = max(map(len, rows))
    shown = [" " * left + "  " + "  ".join(heads)]
    for name, row in rows.items():
        cells = (f"{row[span[0]]:^{len(head)}}" for span, head in zip(spans, heads, strict=True))
        shown.append(f"{name:<{left}}  {'  '.join(cells)}".rstrip())
    return [*shown, *(f"{name}: {told}" for name, row in rows.items() if (told := _turns(row)))]


def _turns(row: dict[str, str]) -> str:
    """Where an error or warning begins and ends within the releases of one engine."""
    told, before = [], None
    for engine, mark in row.items():
        sick = mark in SICK
        if before and before[0].partition("==")[0] == engine.partition("==")[0] and before[1] != sick:
            told.append(f"{'introduced' if sick else 'cured'} by {engine}")
        before = (engine, sick)
    return ", ".join(told)


def _head(span: list[str], engines: list[str]) -> str:
    """0.4.9-0.5.11, with the engine's name where there are several."""
    first, last = (span[i].partition("==")[2] for i in (0, -1))
    several = len({e.partition("==")[0] for e in engines}) > 1
    name = f"{span[0].partition('==')[0]} " if several else ""
    return name + (first if first == last else f"{first}-{last}")


def _holds(finding: Finding, engine: str) -> bool:
    if finding.engine is None:
        return True
    name, _, release = engine.partition("==")
    kept = finding.engine[: len(name)] == name and finding.engine[len(name)] in "=<>"
    return kept and SpecifierSet(finding.engine[len(name) :]).contains(release, prereleases=True)


def _mark(finding: Finding) -> str:
    soft = finding.status == "fail" and finding.severity != "error"
    return ("!" if finding.severity == "warning" else "✓") if soft else MARKS[finding.status]


def extra(report: Report) -> dict[str, Any]:
    """For the report's JSON; nothing where only one release was asked."""
    rows = matrix(report) if len(report.subject["engines"]) > 1 else {}
    return {"matrix": rows} if rows else {}
