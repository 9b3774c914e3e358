"""Public failures, each built as a tiny pair, variants of them, and healthy pairs of every dialect."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import USUAL, build, command
from verified import write_table

from kitlib.checks import check
from kitlib.findings import Finding, catalogue
from kitlib.launch import parse

CORPUS = tomllib.loads((Path(__file__).parent / "corpus" / "cases.toml").read_text())
SICK = CORPUS["case"] + CORPUS["variant"]
DECISIVE = 50  # reports that the bug log calls decidable from files and flags


def judged(folder: Path, case: dict, lines: tuple[str, ...] = ("",)) -> Iterator[tuple[str, tuple[Finding, ...]]]:
    """(launch flags, findings) of a case under each of some launch lines."""
    drafter, target = build(folder, case)
    for flags in lines:
        launch = parse(command(case, drafter, flags))
        yield flags, check(drafter, target=target, engines=(case["engine"],), launch=launch).findings


def alarms(findings: tuple[Finding, ...]) -> list[Finding]:
    return [f for f in findings if f.status in ("fail", "crashed") and f.severity in ("error", "warning")]


def usual(case: dict) -> tuple[str, ...]:
    """The launch lines that a healthy case is tried with."""
    return USUAL["vllm" if case["engine"].startswith("vllm") else "sglang"]


@pytest.mark.parametrize("case", SICK, ids=lambda c: c["id"])
def test_a_failure_is_found(tmp_path, case):
    assert case["slug"] in {e["slug"] for e in catalogue().values()}
    ((_, found),) = judged(tmp_path, case)
    assert case["slug"] in {f.slug for f in alarms(found)}, sorted(f.slug for f in alarms(found))
    assert not [f for f in found if f.status == "crashed"]


@pytest.mark.parametrize("case", CORPUS["healthy"], ids=lambda c: c["id"])
def test_a_healthy_pair_raises_no_alarm(tmp_path, case):
    for flags, found in judged(tmp_path, case, usual(case)):
        assert not alarms(found), [f"{f.engine} {f.code} {f.title} ({flags})" for f in alarms(found)]


def test_every_decisive_report_is_built_or_excluded_with_a_reason():
    ids = [c["id"] for c in SICK + CORPUS["healthy"]]
    assert len(ids) == len(set(ids)) and len(CORPUS["healthy"]) >= 12 and len(CORPUS["variant"]) >= 15
    reports = {c["id"].partition(" ")[0] for c in CORPUS["case"]}
    assert not reports & set(CORPUS["excluded"]) and len(reports) + len(CORPUS["excluded"]) == DECISIVE
    assert all(reason.strip() for reason in CORPUS["excluded"].values())


@pytest.mark.verify
def test_detection_and_false_alarms(tmp_path):
    """data/verified/detection.md."""
    rows, found_all, quiet = [], 0, 0
    for case in SICK:
        ((_, found),) = judged(tmp_path / f"s{len(rows)}", case)
        said = list(dict.fromkeys(f.code for f in alarms(found)))
        hit = next((f.code for f in alarms(found) if f.slug == case["slug"]), "")
        found_all += bool(hit)
        others = ", ".join(c for c in said if c != hit) or "–"
        name = case["id"] if case in CORPUS["case"] else f"variant: {case['id']}"
        rows.append((name, case["kind"], f"`{case['engine']}`", case["slug"], hit or "**missed**", others))
    calm = []
    for case in CORPUS["healthy"]:
        lines = list(judged(tmp_path / f"h{len(calm)}", case, usual(case)))
        loud = list(dict.fromkeys(f"{f.code} ({f.engine})" for _, found in lines for f in alarms(found)))
        quiet += not loud
        calm.append(f"| {case['id']} | `{case['engine']}` | {len(lines)} | {', '.join(loud) or '–'} |")
    sick, healthy, out = len(SICK), len(CORPUS["healthy"]), [f"| {k} | {v} |" for k, v in CORPUS["excluded"].items()]
    text = f"""**{found_all} of {sick} sick pairs found under the slug that their cause asks for; {healthy - quiet} of
{healthy} healthy ones raised an alarm.** An alarm is a finding of severity error or warning. A case of
tests/corpus/cases.toml is a tiny drafter, a target and a launch line. The slug of a report was chosen from its cause
before the rule was written; a variant has no report behind it and was written beside the rules. `kind` is the bug
log's. A healthy pair is checked with every launch line that is usual for its engine, in every release of its range."""
    head = "| healthy pair | releases | launch lines | alarms |\n|---|---|---|---|\n"
    left = "\n\n| report | decidable from files and flags, and not built because it is |\n|---|---|\n"
    heads = ("sick pair", "kind", "release", "asked for", "found", "also said")
    title = "Detection and false alarms of the pre-flight"
    after = head + "\n".join(calm) + left + "\n".join(out)
    write_table("detection", title, "make verify ARGS='-k detection'", text, heads, rows, after)
    assert found_all == sick and quiet == healthy, "see data/verified/detection.md"
