"""Checks that the config, the launch flags and the release decide: dialect, algorithm, captured layers, fc."""

from __future__ import annotations

from collections.abc import Iterator

from ..contract.contract import AS_DEFAULT
from ..engines import Engine, layers
from ..findings import Evidence, Finding, Fix
from .case import Case, convert_command

DEFAULT = "safeailab"  # what a flat config without a trainer's marks is taken for


def config_schema(case: Case) -> Iterator[Finding]:
    """K120: would this release start with this config at all? K106 and K110 where a shape or the map is why not."""
    code, why = case.served.refused_as, case.served.refused
    if case.checkpoint.dialect == "eagle-1":
        yield Finding.of("K120", "no EAGLE-3 drafter; see K130", status="not-applicable", engine=case.engine)
        return
    if code in ("K106", "K110"):
        evidence = [Evidence("header", why)]
        effect = "the engine fails while it loads the drafter"
        yield Finding.of(code, f"this release refuses it: {why}", engine=case.engine, evidence=evidence, effect=effect)
    if broken := case.contract.malformed:
        evidence = [Evidence("config", "every other check of the config is left out")]
        fix = Fix("write it as a table of fields, or take config.json from the export again")
        yield Finding.of("K120", broken, engine=case.engine, evidence=evidence, fix=fix)
    elif code != "K120":  # K102 and K130 have checks of their own
        yield Finding.of("K120", status="pass", engine=case.engine)
    else:
        evidence = [Evidence("config", f"dialect: {case.contract.dialect.name} · {why}")]
        title = f"this release refuses the drafter: {why}"
        fix = Fix("write the config in the engine's dialect", convert_command(case))
        yield Finding.of("K120", title, engine=case.engine, evidence=evidence, fix=fix)


def algorithm_flag(case: Case) -> Iterator[Finding]:
    """K130: the flag that is silently wrong."""
    if case.checkpoint.dialect == "eagle-1" and case.launch.algorithm in ("", "EAGLE3"):
        title = "fc takes one state and the embedding, and there is no hidden_norm: an EAGLE-1 or EAGLE-2 drafter"
        effect = "EAGLE3 does not serve it: the class it needs is built otherwise"
        fix = Fix("serve it with EAGLE", "--speculative-algorithm EAGLE")
        evidence = [Evidence("header", title)]
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence, effect=effect, fix=fix)
        return
    if not case.launch.flags:
        yield Finding.of("K130", "no launch command was given", status="not-run")
        return
    algorithm = case.launch.algorithm
    evidence = [Evidence("flags", f"--speculative-algorithm {algorithm or '(absent)'}")]
    if not algorithm:
        title = "speculation is off: the launch command has no --speculative-algorithm"
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence)
    elif case.checkpoint.dialect == "eagle-1":
        yield Finding.of("K130", status="pass", engine=case.engine, evidence=evidence)
    elif algorithm != "EAGLE3":
        title = f"an EAGLE-3 drafter is served with --speculative-algorithm {algorithm}"
        fix = Fix("serve with EAGLE3", "--speculative-algorithm EAGLE3")
        told = {"effect": case.served.refused} if case.served.refused_as == "K130" else {}
        yield Finding.of("K130", title, engine=case.engine, evidence=evidence, fix=fix, **told)
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
    elif case.contract.ids is None and case.checkpoint.dialect == "layers.0" and case.contract.dialect.name == DEFAULT:
        title = (
            f"no layer ids are stored, though trainers that name tensors layers.0 store them; {list(served_at)} assumed"
        )
        fix = Fix("write the ids that the trainer used into config.json")
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence, severity="warning", fix=fix)
    elif deep := _unreachable(case):
        n = case.target.layers
        title = f"boundary {deep[0]} is never captured: the target has {n} layers, its last reachable one is {deep[1]}"
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence)
    elif served_at != case.contract.boundaries and sorted(served_at) == sorted(case.contract.boundaries):
        title = f"the ids {list(case.contract.ids or ())} are not ascending, and states are captured in ascending order"
        fix = Fix("ask the trainer in which order the states were concatenated")
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence, severity="warning", fix=fix)
    elif tuple(served_at) != tuple(case.contract.boundaries) and source.endswith(AS_DEFAULT):
        ids = list(case.contract.ids)
        apart = "later" if served_at[0] > case.contract.boundaries[0] else "earlier"
        looks = f"the ids {ids} look like {'boundaries' if apart == 'later' else 'layer outputs'}"
        title = f"{looks}, and this release captures {list(served_at)}, one layer {apart}"
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence, severity="warning")
    elif tuple(served_at) != tuple(case.contract.boundaries):
        title = f"trained on boundaries {list(case.contract.boundaries)}, served with {list(served_at)}"
        yield Finding.of("K132", title, engine=case.engine, evidence=evidence)
    else:
        yield Finding.of("K132", status="pass", engine=case.engine, evidence=evidence)


def fc_bypassed(case: Case) -> Iterator[Finding]:
    """K133: the width that arrives decides whether fc runs."""
    c, w = case.contract, case.served.wiring
    if case.served.refused_as == "K130":
        yield Finding.of("K133", "nothing is served; see K130", status="not-applicable", engine=case.engine)
        return
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


def _unreachable(case: Case) -> tuple[int, int] | None:
    """The first served boundary that this target's class never hands out, and the last that it does."""
    if case.target is None:
        return None
    engine, _, release = case.engine.partition("==")
    loaded = Engine.load(engine)
    last = layers.last_boundary(loaded, loaded.known(release)[0], case.target)
    beyond = [b for b in case.served.wiring.boundaries if not 0 <= b <= last]
    return (beyond[0], last) if beyond else None
