"""The pre-flight: drafter × target × engine release × flags → findings. Reads files and flags; loads no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, CheckpointError
from ..contract import Contract, TargetInfo, lookup
from ..engines import Engine, served
from ..findings import Evidence, Finding, KitError, Report, merge_engines
from ..launch import Launch
from . import files, flags, serving, weights, wiring
from .case import Case, Check
from .fixes import refusals, settled

CHECKS: tuple[Check, ...] = (
    files.readable,
    files.key_naming,
    files.missing_weights,
    weights.unused_weights,
    weights.untrained_weights,
    files.shapes,
    weights.quantization,
    files.vocab_map,
    files.shared_weights,
    files.untrained_embedding,
    wiring.target_pair,
    flags.config_schema,
    wiring.rope,
    wiring.context_length,
    wiring.norm_wiring,
    flags.algorithm_flag,
    serving.capture_hook,
    flags.aux_layers,
    flags.fc_bypassed,
    serving.spec_params,
    serving.simulated_acceptance,
    serving.known_engine_bug,
)
ONCE = (files.readable, files.shapes, files.vocab_map, weights.untrained_weights, wiring.target_pair)  # of any release
BLIND = {  # without a readable config, what these say would be invented; and the code of each
    files.missing_weights: "K103",
    weights.unused_weights: "K104",
    files.shapes: "K106",
    weights.quantization: "K107",
    files.vocab_map: "K110",
    files.shared_weights: "K111",
    files.untrained_embedding: "K105",
    wiring.target_pair: "K112",
    wiring.rope: "K121",
    wiring.context_length: "K122",
    wiring.norm_wiring: "K123",
    flags.aux_layers: "K132",
    flags.fc_bypassed: "K133",
    serving.known_engine_bug: "K136",
}


def check(
    drafter: str | Path,
    *,
    target: str | Path | None = None,
    engines: tuple[str, ...] = ("",),
    launch: Launch | None = None,
    deep: bool = False,
) -> Report:
    """Run every check for every release. Raises KitError only for unusable arguments, never for a sick drafter.

    `deep`: every weight is read, where 64 KB of a tensor are else.
    """
    launch = launch or Launch()
    for flag in ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens", "context-length"):
        launch.number(flag)
    releases = _releases(engines, launch)
    names = [f"{name}=={release}" for name, release in releases]
    subject = {"drafter": str(drafter), "target": str(target or ""), "engines": names}
    try:
        checkpoint = Checkpoint.open(drafter, hub=True)
    except CheckpointError as error:
        finding = Finding.of("K101", str(error), evidence=[Evidence("header", str(error))])
        return Report(subject, (finding,))
    launch = _itself(launch, checkpoint, drafter)
    info = TargetInfo.of(target) if target else None
    contract = Contract.of(checkpoint, info)
    cases = [_case(checkpoint, contract, info, launch, name, release, deep) for name, release in releases]
    found = [(case, f) for i, case in enumerate(cases) for f in _judge(case, once=not i)]
    general = list(dict.fromkeys(_Hashable(f) for _, f in found if f.engine is None))

    def result(converted: Checkpoint, name: str, release: str) -> list[Finding]:
        case = _case(converted, Contract.of(converted, info), info, Launch(name), name, release)
        return [f for f in _judge(case, once=False) if f.is_error]

    merged: list[Finding] = []
    for name in dict.fromkeys(name for name, _ in releases):
        mine = [(case, f) for case, f in found if f.engine is not None and case.engine.startswith(f"{name}==")]
        refusal = refusals(cases[0], name, [h.finding for h in general], result)
        settle = [(case.engine, settled(case, f, refusal)) for case, f in mine]
        merged += merge_engines([n for n in names if n.startswith(f"{name}==")], settle)
    fetched, note = _fetched(checkpoint, info)
    caveats = [case.served.caveat for case in cases if case.served.caveat] + note
    extra = {**fetched, **({"caveats": caveats} if caveats else {})}
    return Report(subject, tuple([h.finding for h in general] + merged), extra=extra)


def _itself(launch: Launch, checkpoint: Checkpoint, drafter: str | Path) -> Launch:
    """`vllm serve SPECULATOR`: the drafter is named as the model, and its config tells the rest."""
    named = {str(drafter).rstrip("/"), str(checkpoint.path).rstrip("/")}
    if launch.engine != "vllm" or launch.algorithm or launch.target.rstrip("/") not in named:
        return launch
    proposals = lookup(checkpoint.config, "speculators_config.proposal_methods")
    if lookup(checkpoint.config, "speculators_config.algorithm") is None:
        return launch
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
    told = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(drafter)}
    told |= {"speculative-num-steps": first.get("speculative_tokens") or 3}
    return replace(launch, flags={k: v for k, v in launch.flags.items() if k != "model-path"} | told)


def _fetched(checkpoint: Checkpoint, target: TargetInfo | None) -> tuple[dict[str, Any], list[str]]:
    """What was asked of a hub, as data and as a sentence; nothing of local files."""
    asked = {"drafter": checkpoint.hub, "target": target.hub if target else None}
    named = {role: f"{r.name}@{r.commit or r.revision or 'main'}" for role, r in asked.items() if r}
    if not named:
        return {}, []
    size, count = (sum(getattr(r, name) for r in asked.values() if r) for name in ("fetched", "requests"))
    told = f"from the hub, {size:,} bytes were fetched in {count} requests: headers, configs and vocabulary maps"
    where = " and ".join(f"of the {role} {name}" for role, name in named.items())
    return {"hub": {"bytes": size, "requests": count, **named}}, [f"{told} {where}"]


def _releases(specs: tuple[str, ...], launch: Launch) -> list[tuple[str, str]]:
    """(engine, release) of every specifier; one without a name means the launch command's engine, else SGLang.

    KitError where a specifier names another engine than the launch command, whose flags it would not know.
    """
    found: list[tuple[str, str]] = []
    for spec in specs:
        name = next((n for n in ("sglang", "vllm") if spec.strip().startswith(n)), launch.engine)
        if launch.flags and name != launch.engine:
            raise KitError(f"The launch command is {launch.engine}'s; check {spec.strip()[:60]} without it.")
        found += [(name, release) for release in Engine.load(name).resolve(spec)]
    return list(dict.fromkeys(found))


def _case(
    checkpoint: Checkpoint, contract: Contract, target: TargetInfo | None, launch: Launch, engine: str, release: str,
    deep: bool = False,
) -> Case:  # fmt: skip
    rules = Engine.load(engine)
    known = {r["name"] for r in rules.entries("algorithm", rules.known(release)[0])}
    algorithm = launch.algorithm if launch.flags and launch.algorithm in known else "EAGLE3"  # others: K130
    state = served(checkpoint, contract, release, target=target, algorithm=algorithm, engine=engine)
    return Case(checkpoint, contract, target, launch, state, deep)


def _judge(case: Case, *, once: bool) -> Iterator[Finding]:
    """Every check of one release; `once`: with those that say the same of any release."""
    for one in CHECKS:
        if not once and one in ONCE:
            continue
        if (foreign := case.checkpoint.dialect == "eagle-1" or case.contract.malformed) and one in BLIND:
            why = "config.json cannot be read; see K120" if foreign is not True else "no EAGLE-3 drafter; see K130"
            yield Finding.of(BLIND[one], why, status="not-run")
        else:
            yield from _guarded(one, case)


class _Hashable:
    """Findings hold dicts; compare them by value."""

    def __init__(self, finding: Finding):
        self.finding, self.key = finding, repr(finding)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return self.key == other.key


def _guarded(one: Check, case: Case) -> list[Finding]:
    """A check that crashes is itself reported; the others go on."""
    try:
        return list(one(case))
    except KitError as error:
        return [Finding.of("E901", f"{one.__name__}: {error}", status="not-run")]
    except Exception as error:
        evidence = [Evidence("config", f"{type(error).__name__}: {error}")]
        return [Finding.of("E901", f"the check {one.__name__} crashed", status="crashed", evidence=evidence)]
