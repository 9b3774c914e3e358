"""A conversion that would be refused is not advised: the nearest release that one can be written for is, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..engines import Engine
from ..findings import Evidence, Finding, Fix, KitError
from .case import Case, convert_command

CURED = ("K102", "K103", "K110", "K111", "K120", "K121", "K132")  # what converting may change; all else goes along


def settled(case: Case, finding: Finding, refusal: Callable[[str], str]) -> Finding:
    """The finding with a fix that works: `refusal` says why `convert` would not write for a release, or ""."""
    if not finding.fix or finding.fix.command != convert_command(case):
        return finding
    engine, _, release = case.engine.partition("==")
    if not (why := refusal(release)):
        return finding
    good = next((r for r in _nearest(Engine.load(engine), release) if not refusal(r)), None)
    if not good:
        text = f"no conversion for {engine} helps: {why}"
        return replace(finding, fix=Fix(text))
    told = f"convert cannot write for this release ({why}); the nearest it can write for is {good}"
    fix = Fix(f"convert for {engine} {good} and serve with it", convert_command(case, good))
    return replace(finding, fix=fix, evidence=(*finding.evidence, Evidence("config", told)))


def refusals(case: Case, engine: str, found: Iterable[Finding], judge: Callable) -> Callable[[str], str]:
    """Why `convert` would refuse this drafter, by release, as it would find out itself; every answer is kept.

    `found` are the findings that hold for every engine; `judge(checkpoint, engine, release)` the errors of a result.
    """
    known: dict[str, str] = {}
    stays = [f for f in found if f.is_error and f.engine is None and (f.code not in CURED or f.code == "K110")]

    def ask(release: str) -> str:
        from ..convert import Form, Plan

        try:
            plan = Plan.of(case.checkpoint, Form.of(f"{engine}=={release}"), case.target)
            errors: Sequence[Finding] = [f for f in stays if f.code != "K110" or not plan.rewritten]
            errors = [*plan.errors, *errors] or judge(plan.result, engine, release)
            return f"{errors[0].code} {errors[0].title}" if errors else ""
        except KitError as error:
            return str(error)

    def kept(release: str) -> str:
        if release not in known:
            known[release] = ask(release)
        return known[release]

    return kept


def _nearest(engine: Engine, release: str) -> list[str]:
    """The other releases that were read: later ones first, each way the nearest first."""
    known = engine.known(release)[0]
    at = engine.releases.index(known)
    return [*engine.releases[at + 1 :], *reversed(engine.releases[:at])]
