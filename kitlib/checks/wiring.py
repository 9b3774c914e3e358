"""Checks of the trained against the served wiring, and of the drafter against its target."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..contract import Rope, lookup
from ..contract.dialects import doubts, number, read_rope
from ..findings import Evidence, Finding, Fix
from .case import Case, convert_command, entries, trained

NORMS = {  # wiring field -> what the config calls it
    "residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "feedback": "norm_output",
    "later_norm": "the norm on the input of layers after the first",
}
CONTEXT_ENV = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def target_pair(case: Case) -> Iterator[Finding]:
    """K112: sizes and the verifier's name against the target's."""
    c, t = case.contract, case.target
    if t is None:
        yield Finding.of("K112", "no target was named", status="not-run")
        return
    evidence = [Evidence("config", f"drafter: {c.target_hidden} wide, {c.vocab} ids · target: {t.hidden}, {t.vocab}")]
    named, served = c.verifier, case.launch.target or t.path
    if c.target_hidden != t.hidden:
        title = f"the drafter was trained on states of {c.target_hidden}, the target has hidden size {t.hidden}"
        yield Finding.of("K112", title, evidence=evidence)
    elif c.hidden != t.hidden and c.sources.get("target_hidden") == "default":
        title = f"the drafter's hidden size is {c.hidden}, the target's {t.hidden}, and no target_hidden_size says why"
        yield Finding.of("K112", title, evidence=evidence)
    elif c.vocab != t.vocab:
        title = f"the drafter knows {c.vocab} target ids, the target has {t.vocab}"
        severity = "error" if c.vocab > t.vocab else "warning"  # a smaller one may be padding
        yield Finding.of("K112", title, evidence=evidence, severity=severity)
    elif (a := _hub_name(named)) and (b := _hub_name(served)) and not (a.startswith(b) or b.startswith(a)):
        title = f"the trainer recorded the target {named}, served is {served}"
        yield Finding.of("K112", title, evidence=evidence, severity="warning")
    else:
        yield Finding.of("K112", status="pass", evidence=evidence)


def rope(case: Case) -> Iterator[Finding]:
    """K121: theta, type and scaling as written against those this release reads."""
    config, written = case.checkpoint.config, case.contract.rope
    if "transformer_layer_config" in config and case.served.refused:
        title = "this release does not read this config; see K120"
        yield Finding.of("K121", title, status="not-run", engine=case.engine)
        return
    if case.contract.sources.get("rope", "").startswith("default"):
        yield Finding.of("K121", "config.json does not state rope theta", status="not-run")
        return
    rule = entries(case, "rope")[0]
    theta = next((v for p in rule["theta"] if (v := lookup(config, p)) is not None), None)
    inner = config.get("transformer_layer_config")
    inner = inner if isinstance(inner, Mapping) else config
    scaling = next((v for p in rule["scaling"] if isinstance(v := inner.get(p), Mapping)), None)
    read = {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": inner.get("partial_rotary_factor")}
    served, _ = read_rope(read)
    evidence = [Evidence("config", f"written {_rope(written)} · read {_rope(served)} · rule: {rule['source']}")]
    parts = [n for n in ("theta", "type", "scaling") if getattr(written, n) != getattr(served, n)]
    share = next((v for p in rule["partial"] if (v := number(lookup(config, p)))), 1.0)
    if parts:
        title = f"rope {' and '.join(parts)}: config.json says {_rope(written)}, this release reads {_rope(served)}"
        fix = Fix("write both spellings with the same values", convert_command(case))
        yield Finding.of("K121", title, engine=case.engine, evidence=evidence, fix=fix)
    elif share != 1:
        title = f"partial_rotary_factor {share:g}: this release turns that part of a head, trainers all of it"
        fix = Fix("leave partial_rotary_factor out, unless the trainer honoured it")
        yield Finding.of("K121", title, engine=case.engine, evidence=evidence, fix=fix)
    elif case.target and _mrope(case.target.config) and not _mrope(config):
        title = "the target turns positions by sections (mrope), the drafter's config has no mrope_section"
        yield Finding.of("K121", title, engine=case.engine, evidence=evidence)
    else:
        yield Finding.of("K121", status="pass", engine=case.engine, evidence=evidence)


def context_length(case: Case) -> Iterator[Finding]:
    """K122: the drafter's positions against the context that will be served."""
    asked = case.launch.number("context-length")
    served = asked or (case.target.max_positions if case.target else None)
    if not served or not isinstance(served, int):
        yield Finding.of("K122", "neither a target nor --context-length tells the served context", status="not-run")
        return
    own, scaling = case.contract.max_positions or 2048, dict(case.contract.rope.scaling)
    factor = number(scaling.get("factor")) or 1
    if "original_max_position_embeddings" in scaling or case.contract.rope.type == "llama3":
        factor = 1
    own = int(own * factor)
    source = "--context-length" if asked else "the target's max_position_embeddings"
    stated = "" if case.contract.max_positions else " (the default; the config states none)"
    evidence = [Evidence("flags" if asked else "config", f"served {served} ({source}) · drafter {own}{stated}")]
    rule = entries(case, "context")[0]["longer"]
    if own >= served or rule == "raised":
        yield Finding.of("K122", status="pass", engine=case.engine, evidence=evidence)
        return
    refused = rule == "refused"
    refused = refused and str(case.launch.env.get(CONTEXT_ENV, "")).lower() not in ("1", "true", "yes", "on", "y")
    then = "this release refuses to start" if refused else "this release runs it beyond them"
    fix = Fix("serve a context that the drafter was trained for", f"--context-length {own}")
    title = f"the drafter's positions end at {own}, {served} are served; {then}"
    yield Finding.of("K122", title, engine=case.engine, evidence=evidence, fix=fix)


def norm_wiring(case: Case) -> Iterator[Finding]:
    """K123: norms and feedback in training against those of this release; not run where a field has two meanings."""
    unsettled = doubts(case.checkpoint.config, case.contract.dialect)
    for name, why in unsettled.items():
        title = f"{name} is {case.checkpoint.config[name]}, and files do not tell what that meant: {why}"
        yield Finding.of("K123", title, status="not-run", engine=case.engine)
    differ = {n: v for n, v in trained(case).diff(case.served.wiring).items() if n in NORMS}
    if "later_norm" in differ and "layers.1.input_layernorm.weight" not in case.contract.has:
        del differ["later_norm"]  # the file holds hidden_norm, which is what runs
    if not differ:
        yield Finding.of("K123", status="pass", engine=case.engine)
        return
    doubtful = all(NORMS[n] in unsettled for n in differ)
    words = [f"{NORMS[n]}: trained {a}, served {b}" for n, (a, b) in differ.items()]
    source = [case.contract.sources.get(NORMS[n], "") for n in differ]
    evidence = [Evidence("config", " · ".join([*words, *dict.fromkeys(s for s in source if s)]), {"differ": differ})]
    title = f"this release applies norms elsewhere than training did: {'; '.join(words)}"
    less = {"severity": "warning"} if doubtful else {}
    yield Finding.of("K123", title, engine=case.engine, evidence=evidence, **less)


def _hub_name(path: str) -> str:
    """`name` of `org/name` or of a hub cache folder, in lower case; "" for any other path."""
    cached = next((p for p in Path(path).parts if p.startswith("models--")), "")
    parts = cached.split("--")[1:] if cached else [] if os.path.exists(path) else path.split("/")
    return parts[1].lower() if len(parts) == 2 and parts[0] not in ("", ".", "..", "~") else ""


def _mrope(config: Mapping[str, Any]) -> bool:
    scalings = (config.get(k) for k in ("rope_scaling", "rope_parameters"))
    return any("mrope_section" in s for s in scalings if isinstance(s, Mapping))


def _rope(rope: Rope) -> str:
    rest = "".join(f", {k} {v}" for k, v in rope.scaling)
    return f"theta {rope.theta:g}, {rope.type}{rest}"
