"""The pre-flight: drafter × target × engine release × flags → findings. Reads files and flags; loads no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, CheckpointError
from .contract import Contract, TargetInfo, parameter_shapes
from .engines import Engine, Served, served
from .findings import Evidence, Finding, Fix, KitError, Report, merge_engines
from .launch import Launch


@dataclass(frozen=True)
class Case:
    """Everything one run of the checks looks at."""

    checkpoint: Checkpoint
    contract: Contract
    target: TargetInfo | None
    launch: Launch
    served: Served

    @property
    def engine(self) -> str:
        return self.served.engine


Check = Callable[[Case], Iterator[Finding]]


def readable(case: Case) -> Iterator[Finding]:
    """K101: whoever gets here has read every header."""
    count, files = len(case.checkpoint.tensors), len(case.checkpoint.files)
    yield Finding.of("K101", status="pass", evidence=[Evidence("header", f"{count} tensors in {files} file(s)")])


def key_naming(case: Case) -> Iterator[Finding]:
    """K102: names the engine drops or refuses although the kit knows what they are."""
    names = [f.name for f in case.served.of("dropped", "refused") if _needed(case, f.name)]
    total = len(case.checkpoint.tensors)
    rule = f"rule: {case.served.sources[0]}"
    if not names:
        yield Finding.of(
            "K102", status="pass", engine=case.engine, evidence=[Evidence("header", f"{total} tensors · {rule}")]
        )
        return
    refused = any(f.status == "refused" for f in case.served.fates)
    what = "raises KeyError on them" if refused else "drops them without a message"
    if not refused and case.served.of("dropped") and "warning" in rule:
        what = "only warns about them"
    block = _pattern(names)
    yield Finding.of(
        "K102",
        f"{len(names)} of {total} tensors are named `{block}`; this release knows other names and {what}",
        engine=case.engine,
        evidence=[Evidence("header", f"{names[0]} … ({len(names)}) · {rule}", {"names": names})],
        fix=Fix("rename the tensors for this release", _convert(case)),
    )


def missing_weights(case: Case) -> Iterator[Finding]:
    """K103: parameters that neither the file nor a rename can fill."""
    have = {c for n in case.checkpoint.tensors if (c := case.checkpoint.canonical(n))}
    absent = [n for n in case.served.missing if n not in have]
    if case.contract.tie or case.contract.target_hidden == case.contract.hidden:
        absent = [n for n in absent if n != "embed_tokens.weight"]
    if not absent:
        yield Finding.of("K103", status="pass", engine=case.engine)
        return
    yield Finding.of(
        "K103",
        f"{len(absent)} parameters get no tensor: {_some(absent)}",
        engine=case.engine,
        evidence=[Evidence("header", f"absent from the file: {_some(absent)}", {"missing": absent})],
    )


def shapes(case: Case) -> Iterator[Finding]:
    """K106: config against shapes, and shapes against what the forward pass needs."""
    problems = list(case.contract.contradictions)
    trained = case.contract.trained(case.target or _any_depth(case.contract))
    wanted = parameter_shapes(case.contract, trained.but(embed_source="own"))
    for name, info in case.checkpoint.tensors.items():
        canonical = case.checkpoint.canonical(name)
        expected = wanted.get(canonical or "")
        if expected and tuple(info.shape) != expected:
            problems.append(f"{name} is {list(info.shape)}, the drafter needs {list(expected)}")
    if problems:
        evidence = [Evidence("header", p) for p in problems[:6]]
        yield Finding.of("K106", f"{len(problems)} contradictions: {problems[0]}", evidence=evidence)
    else:
        yield Finding.of("K106", status="pass", evidence=[Evidence("header", f"{len(wanted)} shapes compared")])


def vocab_map(case: Case) -> Iterator[Finding]:
    """K110: d2t must be a table of offsets onto distinct target ids, and agree with t2d."""
    c = case.contract
    if "d2t" not in c.has:
        if c.draft_vocab == c.vocab:
            yield Finding.of(
                "K110", "the draft vocabulary is the whole vocabulary; no map is needed", status="not-applicable"
            )
            return
        title = f"there is no d2t, although the draft vocabulary has {c.draft_vocab} of {c.vocab} ids"
        yield Finding.of("K110", title, evidence=[Evidence("header", "no tensor named d2t")])
        return
    name = next(n for n in case.checkpoint.tensors if case.checkpoint.canonical(n) == "d2t")
    d2t = case.checkpoint.read(name).astype(np.int64).ravel()
    ids = d2t + np.arange(len(d2t))
    problem = ""
    if len(d2t) != c.draft_vocab:
        problem = f"d2t has {len(d2t)} entries, the head {c.draft_vocab} rows"
    elif not d2t.any() and c.draft_vocab < c.vocab:
        problem = "d2t is all zeros although the vocabulary is reduced: the map never left its start"
    elif (np.diff(d2t) > 0).all() and d2t.max(initial=0) > c.vocab - len(d2t):
        problem = f"d2t rises strictly to {d2t[-1]}; offsets end at {c.vocab - len(d2t)}: these are absolute ids"
    elif (ids < 0).any() or (ids >= c.vocab).any():
        problem = f"{int(((ids < 0) | (ids >= c.vocab)).sum())} target ids i + d2t[i] lie outside 0..{c.vocab - 1}"
    elif len(np.unique(ids)) != len(ids):
        problem = f"{len(ids) - len(np.unique(ids))} draft ids share a target id"
    elif "t2d" in c.has:
        mask = case.checkpoint.read(next(n for n in case.checkpoint.tensors if case.checkpoint.canonical(n) == "t2d"))
        marked = np.flatnonzero(mask.ravel())
        if not np.array_equal(marked, np.sort(ids)):
            problem = f"t2d marks {len(marked)} target ids, d2t names {len(ids)}, and they are not the same"
    values = {"first": d2t[:5].tolist(), "last": d2t[-5:].tolist(), "length": len(d2t)}
    if problem:
        yield Finding.of("K110", problem, evidence=[Evidence("tensor", f"d2t ends {values['last']}", values)])
    else:
        text = f"{len(d2t)} offsets, target ids {int(ids.min())} to {int(ids.max())}, all distinct"
        yield Finding.of("K110", status="pass", evidence=[Evidence("tensor", text, values)])


def shared_weights(case: Case) -> Iterator[Finding]:
    """K111: a trained head beside a flag that makes the engine use the embedding instead."""
    if case.contract.tie and "lm_head.weight" in case.contract.has:
        yield Finding.of(
            "K111",
            "tie_word_embeddings is true, so the engine uses the embedding as head and not the trained lm_head.weight",
            engine=case.engine,
            evidence=[Evidence("config", f"tie_word_embeddings: true ({case.contract.sources.get('tie')})")],
        )
    else:
        yield Finding.of("K111", status="pass", engine=case.engine)


def config_schema(case: Case) -> Iterator[Finding]:
    """K120: would this release start with this config at all?"""
    if case.served.refused:
        yield Finding.of(
            "K120",
            f"this release refuses the drafter: {case.served.refused}",
            engine=case.engine,
            evidence=[Evidence("config", f"dialect: {case.contract.dialect.name} · {case.served.refused}")],
            fix=Fix("write the config in the engine's dialect", _convert(case)),
        )
    else:
        yield Finding.of("K120", status="pass", engine=case.engine)


def algorithm_flag(case: Case) -> Iterator[Finding]:
    """K130: the flag that is silently wrong."""
    if not case.launch.flags:
        yield Finding.of("K130", "no launch command was given", status="not-run")
        return
    algorithm = case.launch.algorithm
    evidence = [Evidence("flags", f"--speculative-algorithm {algorithm or '(absent)'}")]
    if not algorithm:
        title = "speculation is off: the launch command has no --speculative-algorithm"
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence)
    elif algorithm != "EAGLE3":
        title = f"an EAGLE-3 drafter is served with --speculative-algorithm {algorithm}"
        fix = Fix("serve with EAGLE3", "--speculative-algorithm EAGLE3")
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence, fix=fix)
    elif not case.launch.drafter:
        title = "EAGLE3 without --speculative-draft-model-path"
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence)
    else:
        yield Finding.of("K130", status="pass", engine=case.engine, evidence=evidence)


def aux_layers(case: Case) -> Iterator[Finding]:
    """K132: the boundaries in force against those of training."""
    if case.contract.boundaries is None and case.target is None:
        yield Finding.of("K132", "no target was named, so the default boundaries are unknown", status="not-run")
        return
    if case.served.capture_off:
        yield Finding.of("K132", "nothing is captured; see K133", status="not-applicable", engine=case.engine)
        return
    served_at, source = case.served.wiring.boundaries, case.contract.sources.get("boundaries", "")
    evidence = [
        Evidence("config", f"trained {list(case.contract.boundaries or ())} ({source}) · served {list(served_at)}")
    ]
    if case.contract.boundaries is None:
        n = case.target.layers
        usual, hooked = [2, n // 2, n - 3], [3, n // 2 + 1, n - 2]
        title = f"the boundaries are not stored; they are {usual} or, by this trainer's own data generation, {hooked}"
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence, severity="warning")
    elif tuple(served_at) != tuple(case.contract.boundaries):
        title = f"trained on boundaries {list(case.contract.boundaries)}, served with {list(served_at)}"
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence)
    else:
        yield Finding.of("K132", status="pass", engine=case.engine, evidence=evidence)


def fc_bypassed(case: Case) -> Iterator[Finding]:
    """K133: the width that arrives decides whether fc runs."""
    c, w = case.contract, case.served.wiring
    if not c.use_aux and "fc.weight" not in c.has:
        yield Finding.of("K133", "this drafter has no fc", status="not-applicable")
        return
    width = c.target_hidden if case.served.capture_off else c.aux_states * c.target_hidden
    evidence = [
        Evidence(
            "config",
            f"{width} features arrive, the embedding has {c.hidden}: {width} != {c.hidden} is {w.fc}",
            {"width": width},
        )
    ]
    if w.fc:
        yield Finding.of("K133", status="pass", engine=case.engine, evidence=evidence)
        return
    route = {
        "config": "(i) eagle_config.use_aux_hidden_state is false: own head and d2t are kept",
        "algorithm": f"(ii) algorithm {case.launch.algorithm}: the target's head runs and d2t is ignored as well",
    }.get(case.served.capture_off, "the drafter takes a single state")
    yield Finding.of("K133", f"fc does not run, by route {route}", engine=case.engine, evidence=evidence)


CHECKS: tuple[Check, ...] = (
    readable, key_naming, missing_weights, shapes, vocab_map, shared_weights,
    config_schema, algorithm_flag, aux_layers, fc_bypassed,
)  # fmt: skip


def check(
    drafter: str | Path,
    *,
    target: str | Path | None = None,
    engines: tuple[str, ...] = ("",),
    launch: Launch | None = None,
) -> Report:
    """Run every check for every release. Raises KitError only for unusable arguments, never for a sick drafter."""
    launch = launch or Launch()
    engine = Engine.load(launch.engine)
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
        state = served(checkpoint, contract, release, target=info, algorithm=algorithm or "EAGLE3")
        case = Case(checkpoint, contract, info, launch, state)
        caveats += [state.caveat] if state.caveat else []
        found += [(f"{engine.name}=={release}", f) for one in CHECKS for f in _guarded(one, case)]
    general = list(dict.fromkeys(_Hashable(f) for _, f in found if f.engine is None))
    merged = merge_engines(subject["engines"], [(r, f) for r, f in found if f.engine is not None])
    return Report(subject, tuple([h.finding for h in general] + merged), extra={"caveats": caveats} if caveats else {})


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


def _needed(case: Case, name: str) -> bool:
    """Known to the kit as something the drafter computes with."""
    canonical = case.checkpoint.canonical(name)
    return canonical is None or canonical not in ("t2d", "embed_tokens.weight")


def _pattern(names: list[str]) -> str:
    """`layers.0.*` for names that share a prefix, else the first name."""
    shared = os.path.commonprefix(names).rpartition(".")[0]  # noqa: RUF071
    return f"{shared}.*" if shared and len(names) > 1 else names[0]


def _some(names: list[str] | tuple[str, ...], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _convert(case: Case) -> str:
    path = case.checkpoint.path
    return f"python -m kitlib convert {path} {path}-for-{case.engine.replace('==', '-')} --to {case.engine}"


def _any_depth(contract: Contract) -> TargetInfo:
    return TargetInfo("", contract.target_hidden, contract.vocab, 32, False, None, {})
