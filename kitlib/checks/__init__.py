"""The pre-flight: drafter × target × engine release × flags → findings. Reads files and flags; loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, CheckpointError
from ..contract import Contract, TargetInfo
from ..engines import Engine, served
from ..findings import Evidence, Finding, KitError, Report, merge_engines
from ..launch import Launch
from . import files, flags, serving, weights, wiring
from .case import Case, Check

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


def check(
    drafter: str | Path,
    *,
    target: str | Path | None = None,
    engines: tuple[str, ...] = ("",),
    launch: Launch | None = None,
) -> Report:
    """Run every check for every release. Raises KitError only for unusable arguments, never for a sick drafter."""
    launch = launch or Launch()
    for flag in ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens", "context-length"):
        if (number := launch.number(flag)) is not None and not 1 <= number <= 1 << 24:
            raise KitError(f"--{flag} is {number} in the launch command; that is no sensible number.")
    engine = _engine(engines, launch)
    releases = list(dict.fromkeys(r for spec in engines for r in engine.resolve(spec)))
    subject = {
        "drafter": str(drafter),
        "target": str(target or ""),
        "engines": [f"{engine.name}=={r}" for r in releases],
    }
    try:
        checkpoint = Checkpoint.open(drafter)
    except CheckpointError as error:
        finding = Finding.of("K101", str(error), evidence=[Evidence("header", str(error))])
        return Report(subject, (finding,))
    info = TargetInfo.of(target) if target else None
    contract = Contract.of(checkpoint, info)
    found: list[tuple[str, Finding]] = []
    caveats: list[str] = []
    for release in releases:
        algorithm = launch.algorithm if launch.flags else "EAGLE3"
        state = served(checkpoint, contract, release, target=info, algorithm=algorithm or "EAGLE3", engine=engine.name)
        case = Case(checkpoint, contract, info, launch, state)
        caveats += [state.caveat] if state.caveat else []
        due = [one for one in CHECKS if release == releases[0] or one not in ONCE]
        found += [(f"{engine.name}=={release}", f) for one in due for f in _guarded(one, case)]
    general = list(dict.fromkeys(_Hashable(f) for _, f in found if f.engine is None))
    merged = merge_engines(subject["engines"], [(r, f) for r, f in found if f.engine is not None])
    return Report(subject, tuple([h.finding for h in general] + merged), extra={"caveats": caveats} if caveats else {})


def _engine(specs: tuple[str, ...], launch: Launch) -> Engine:
    """The engine of the specifiers, else of the launch command; KitError where they name different ones."""
    named = {n for spec in specs for n in ("sglang", "vllm") if spec.strip().startswith(n)}
    named |= {launch.engine} if launch.flags else set()
    if len(named) > 1:
        raise KitError(f"{' and '.join(sorted(named))} are named together; check one engine at a time.")
    return Engine.load(next(iter(named), launch.engine))


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
