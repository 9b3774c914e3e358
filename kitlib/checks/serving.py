"""Checks that need the release's data: the target's capture hook, and hazards of flags, simulation and known bugs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..contract import default_boundaries
from ..findings import Evidence, Finding, KitError
from .case import Case, entries, table


def capture_hook(case: Case) -> Iterator[Finding]:
    """K131: whether the target's class has the hook in this release; a class the data does not name is unknown."""
    if case.target is None or not case.target.architecture:
        yield Finding.of("K131", "no target was named", status="not-run")
        return
    if case.served.capture_off:
        yield Finding.of("K131", "nothing is captured; see K133", status="not-applicable", engine=case.engine)
        return
    name = case.target.architecture
    kind = str(case.target.config.get("model_type", ""))
    listed = [r for r in entries(case, "hook") if "types" in r and kind]
    listed = listed if not case.served.caveat else []  # lists grew from release to release
    if listed and not any(part in kind for r in listed for part in r["types"]):
        title = f"EAGLE3 refuses a target of type {kind} in this release; it takes {', '.join(listed[0]['types'])}"
        yield Finding.of("K131", title, engine=case.engine, evidence=[Evidence("config", listed[0]["source"])])
        return
    rows = [r for r in entries(case, "hook") if name in r["classes"]] or listed
    if any(r["has"] for r in rows):
        yield Finding.of("K131", status="pass", engine=case.engine, evidence=[Evidence("config", rows[0]["source"])])
        return
    known = [r for r in table(case, "hook") if name in r["classes"]]
    if not known or "newer" in case.served.caveat:
        title = f"it is not known whether {name} hands out auxiliary states in this release"
        yield Finding.of("K131", title, status="not-run", engine=case.engine)
        return
    windows = ", ".join(r["window"] for r in known if r["has"])
    where = f"; it has it in {windows}" if windows else ""
    title = f"{name} has no set_eagle3_layers_to_capture in this release{where}"
    yield Finding.of("K131", title, engine=case.engine, evidence=[Evidence("config", known[0]["source"])])


def spec_params(case: Case) -> Iterator[Finding]:
    """K134: steps, top-k, draft tokens, page size and backend."""
    yield from _hazards(case, "K134", "flags")


def simulated_acceptance(case: Case) -> Iterator[Finding]:
    """K135: switches that make the measured numbers those of something else."""
    yield from _hazards(case, "K135", "flags")


def known_engine_bug(case: Case) -> Iterator[Finding]:
    """K136: the release's documented bugs; without a launch command its defaults are judged."""
    yield from _hazards(case, "K136", "config")


def holds(value: Any, wanted: str) -> bool:
    """Whether a flag's or variable's value (None: absent) is as a hazard's condition says."""
    given = value is not None and value != ""
    if wanted in ("absent", "present"):
        return given == (wanted == "present")
    if not given:
        return False
    text = str(value).strip().lower()
    if wanted == "on":
        return text in ("1", "true", "yes", "y", "on")
    listed = wanted[1:].lower().split("|")
    if wanted[0] in "=!":
        return (text in listed) == (wanted[0] == "=")
    try:
        return float(text) > float(listed[0]) if wanted[0] == ">" else float(text) < float(listed[0])
    except ValueError:
        return False


def _hazards(case: Case, code: str, source: str) -> Iterator[Finding]:
    """One finding for each row that holds, or a pass."""
    flags, env, target = case.launch.flags, case.launch.env, case.target
    if source == "flags" and not flags:
        yield Finding.of(code, "no launch command was given", status="not-run")
        return
    try:
        facts = _facts(case)
    except KitError as error:
        yield Finding.of(code, str(error), engine=case.engine, evidence=[Evidence("flags", str(error))])
        return
    found = False
    for row in entries(case, "hazard"):
        if row["code"] != code or not set(row.get("facts", ())) <= set(facts):
            continue
        if "classes" in row and (target is None or target.architecture not in row["classes"]):
            continue
        if not all(holds(flags.get(n), w) for n, w in row.get("flags", {}).items()):
            continue
        if not all(holds(env.get(n), w) for n, w in row.get("env", {}).items()):
            continue
        found = True
        yield _finding(case, row, source, facts)
    if not found:
        yield Finding.of(code, status="pass", engine=case.engine)


def _finding(case: Case, row: Mapping[str, Any], source: str, facts: Mapping[str, str]) -> Finding:
    flags, env = case.launch.flags, case.launch.env
    seen = [f"--{n} {flags.get(n, '(absent)')}" for n in row.get("flags", {})]
    seen += [f"{n}={env[n]}" for n in row.get("env", {})] + [facts[f] for f in row.get("facts", ())]
    seen += [f"target {case.target.architecture}"] if "classes" in row else []
    evidence = [Evidence(source, " · ".join([*seen, f"rule: {row['source']}"]))]
    return Finding.of(row["code"], row["says"], engine=case.engine, evidence=evidence)


def _facts(case: Case) -> dict[str, str]:
    """What hazards ask for beyond single flags: name -> the numbers behind it. KitError if a number is none."""
    number = case.launch.number
    steps, topk = number("speculative-num-steps"), number("speculative-eagle-topk")
    tokens = number("speculative-num-draft-tokens")
    facts = {}
    if steps and topk and tokens:
        said = f"steps {steps}, top-k {topk}, draft tokens {tokens}"
        if topk == 1 and tokens != steps + 1:
            facts["chain-length"] = said
        if topk > 1 and steps >= tokens:
            facts["wasted-steps"] = said
        if topk > 1 and tokens - 1 > topk + (steps - 1) * topk * topk:
            facts["tree-too-small"] = f"{said}, {topk + (steps - 1) * topk * topk} nodes"
    draft, whole = number("speculative-draft-tensor-parallel-size"), number("tensor-parallel-size") or 1
    if draft and draft not in (1, whole):
        facts["draft-tensor-parallel"] = f"of the drafter {draft}, of the target {whole}"
    served, usual = case.served.wiring.boundaries, default_boundaries(case.target.layers) if case.target else ()
    if usual and not case.served.capture_off and served != usual:
        facts["non-default-ids"] = f"boundaries {list(served)}, default {list(usual)}"
    return facts
