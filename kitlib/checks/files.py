"""Checks that the drafter's files decide: names, shapes, maps, shared weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..checkpoint import INDEX, Checkpoint
from ..checkpoint.headers import read_json
from ..contract import parameter_shapes
from ..contract.dialects import number
from ..findings import Evidence, Finding, Fix, KitError
from .case import BY_HEADERS, Case, convert_command, loader, trained
from .weights import drawn, unused

LATER = "once it starts, what is missing keeps its initial memory"
MAP = 1 << 25  # bytes of a d2t or t2d that are read; 4 million ids


def readable(case: Case) -> Iterator[Finding]:
    """K101: whoever gets here has read every header."""
    count, files = len(case.checkpoint.tensors), len(case.checkpoint.files)
    yield Finding.of("K101", status="pass", evidence=[Evidence("header", f"{count} tensors in {files} file(s)")])


def key_naming(case: Case) -> Iterator[Finding]:
    """K102: names the engine drops or refuses although the kit knows what they are."""
    idle = unused(case)  # K104
    refused = [f.name for f in case.served.of("refused") if f.name != case.served.misfit]  # K106
    lost = [f.name for f in case.served.of("dropped") if f.name not in idle and _needed(case, f.name)]
    names = [n for n in case.checkpoint.tensors if n in {*lost, *refused}]
    total, row = len(case.checkpoint.tensors), loader(case)
    rule = f"rule: {row['source']}"
    if not names:
        evidence = [Evidence("header", f"{total} tensors · {rule}")]
        yield Finding.of("K102", status="pass", engine=case.engine, evidence=evidence)
        return
    what, effect = "drops them without a message", {}
    if refused:
        what = f"does not start: {row['raises']} at {refused[0]}"
        effect = {"effect": f"loading ends in a {row['raises']}, after the target has been loaded; nothing is served"}
    elif row["unknown"] == "warning":
        what = f"drops them with a warning each ({row['warns']})"
    if case.served.refused and not refused:
        effect = {"effect": f"none as long as this release refuses the files; {LATER}"}
    layer = any(".self_attn." in n or ".mlp." in n for n in names)
    knows = f"`{row['block'].format(i=0)}.*`" if layer else "other names"
    yield Finding.of(
        "K102",
        f"{len(names)} of {total} tensors are named `{_pattern(names)}`; this release knows {knows} and {what}",
        engine=case.engine,
        evidence=[Evidence("header", f"{names[0]} … ({len(names)}) · {rule}", {"names": names})],
        fix=Fix("rename the tensors for this release", convert_command(case)),
        **effect,
    )


def missing_weights(case: Case) -> Iterator[Finding]:
    """K103: parameters that neither the file nor a rename can fill."""
    have = {c for n in case.checkpoint.tensors if (c := case.checkpoint.canonical(n))}
    absent = [n for n in case.served.missing if n not in have]
    if case.contract.tie or case.contract.target_hidden == case.contract.hidden:
        absent = [n for n in absent if n != "embed_tokens.weight"]
    hard = [n for n in absent if n not in case.served.unasked]
    evidence = [Evidence("header", f"absent from the file: {_some(absent)}", {"missing": absent})]
    if hard:
        title = f"{len(hard)} parameters get no tensor: {_some(hard)}"
        effect = {"effect": f"none as long as this release refuses the files; {LATER}"} if case.served.refused else {}
        yield Finding.of("K103", title, engine=case.engine, evidence=evidence, **effect)
    elif absent:
        title = "fc has a bias in this release whatever the config says, and the file holds none"
        most = (case.contract.aux_states * case.contract.target_hidden) ** -0.5
        effect = f"a random bias of at most {most:.2g} a feature, too small to be seen in the accept length"
        fix = Fix("none is needed; 0.4.9 and later build fc without a bias")
        yield Finding.of(
            "K103", title, engine=case.engine, evidence=evidence, severity="info", effect=effect, fix=fix,
            cause="torch.nn.Linear builds a bias unless it is told not to",
        )  # fmt: skip
    else:
        yield Finding.of("K103", status="pass", engine=case.engine)


def shapes(case: Case) -> Iterator[Finding]:
    """K106: config against shapes, and shapes against what the forward pass needs."""
    problems = list(case.contract.contradictions)
    wanted = parameter_shapes(case.contract, trained(case).but(embed_source="own"))
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
    if c.sources.get("vocab") == "default":
        yield Finding.of("K110", "the target's vocabulary is not known; name the target", status="not-run")
        return
    maps = {p: n for n in case.checkpoint.tensors if (p := case.checkpoint.canonical(n)) in ("d2t", "t2d")}
    if large := [n for n in maps.values() if case.checkpoint.tensors[n].nbytes > MAP]:
        title = f"{large[0]} has {case.checkpoint.tensors[large[0]].nbytes} bytes, more than any vocabulary needs"
        yield Finding.of("K110", title, evidence=[Evidence("header", title)])
        return
    name = maps["d2t"]
    if (dtype := case.checkpoint.tensors[name].dtype) not in ("I64", "I32", "I16", "U16", "U32"):
        title = f"d2t is stored as {dtype}; offsets are whole numbers"
        yield Finding.of("K110", title, evidence=[Evidence("header", f"{name}: {dtype}")])
        return
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
        marked = np.flatnonzero(case.checkpoint.read(maps["t2d"]).ravel())
        if not np.array_equal(marked, np.sort(ids)):
            problem = f"t2d marks {len(marked)} target ids, d2t names {len(ids)}, and they are not the same"
    values = {"first": d2t[:5].tolist(), "last": d2t[-5:].tolist(), "length": len(d2t)}
    if problem:
        yield Finding.of("K110", problem, evidence=[Evidence("tensor", f"d2t ends {values['last']}", values)])
    else:
        text = f"{len(d2t)} offsets, target ids {int(ids.min())} to {int(ids.max())}, all distinct"
        yield Finding.of("K110", status="pass", evidence=[Evidence("tensor", text, values)])


def shared_weights(case: Case) -> Iterator[Finding]:
    """K111: a trained embedding or head in whose place the engine uses another one."""
    if case.served.wiring.head_source == "embedding" and "lm_head.weight" in case.contract.has:
        yield Finding.of(
            "K111",
            "tie_word_embeddings is true, so the engine uses the embedding as head and not the trained lm_head.weight",
            engine=case.engine,
            evidence=[Evidence("config", f"tie_word_embeddings: true ({case.contract.sources.get('tie')})")],
        )
        return
    taken = [f for f in case.served.of("overwritten") if _plain(case, f.name)]
    if taken and (case.checkpoint.hub or (case.target and case.target.hub)):
        yield Finding.of("K111", BY_HEADERS, status="not-run", engine=case.engine)
        return
    unseen = ""
    for fate in taken:
        what = "embedding" if case.checkpoint.canonical(fate.name) == "embed_tokens.weight" else "head"
        there = _of_target(case, fate.name) if case.target and case.target.path else None
        if there is None and what == "head" and not case.served.capture_off:  # heads are trained, embeddings seldom
            title = f"{fate.name} has the shape of the target's head, and this release puts the target's in its place"
            evidence = [Evidence("header", "whether it is a copy, the target's weights would tell, which are not here")]
            yield Finding.of("K111", title, engine=case.engine, evidence=evidence, severity="warning")
            return
        if there is None:  # frozen copies are common, and without the target's weights nobody can tell
            unseen = f"this release uses the target's {what} and not {fate.name}; whether it is a copy was not compared"
            continue
        apart = float(np.abs(_middle(case.checkpoint, fate.name) - there).max()) / (float(np.abs(there).max()) or 1)
        if apart > 0.02:
            title = f"the drafter's own {what} is not the target's, and this release uses the target's"
            evidence = [Evidence("tensor", f"{fate.name}: rows differ by up to {apart:.0%} of the largest value")]
            yield Finding.of("K111", title, engine=case.engine, evidence=evidence, fix=Fix("train with it frozen"))
            return
    yield Finding.of("K111", unseen, status="not-run" if unseen else "pass", engine=case.engine)


def untrained_embedding(case: Case) -> Iterator[Finding]:
    """K105 for an own embedding that this engine would use: drawn at random when the file was written."""
    if case.served.wiring.embed_source != "own" or case.checkpoint.hub:  # from a hub: K105 has not run anyway
        return
    for name in case.checkpoint.tensors:
        if case.checkpoint.canonical(name) == "embed_tokens.weight" and _plain(case, name):
            spread = number(case.checkpoint.config.get("initializer_range")) or 0.02
            if drawn(case.checkpoint.sample(name).astype(np.float64), spread):
                title = f"{name} is as initialised, N(0, {spread:g}), and this release uses it and not the target's"
                fix = Fix("leave the embedding out of the file, so that the target's is used")
                yield Finding.of("K105", title, engine=case.engine, evidence=[Evidence("tensor", title)], fix=fix)


def _plain(case: Case, name: str) -> bool:
    info = case.checkpoint.tensors[name]
    usual = len(info.shape) == 2 and info.shape[0] > 0 and 0 < info.shape[1] < 1 << 20
    return info.dtype in ("F16", "BF16", "F32") and usual


def _middle(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Four rows of a matrix."""
    at = checkpoint.tensors[name].shape[0] // 2
    return checkpoint.read(name, slice(at, at + 4)).astype(np.float32)


def _of_target(case: Case, name: str) -> np.ndarray | None:
    """The same rows of the target's embedding or head; None where its weights are not here or do not compare."""
    head = case.checkpoint.canonical(name) == "lm_head.weight" and not case.target.tie
    part = "lm_head.weight" if head else "embed_tokens.weight"
    folder = Path(case.target.path) if Path(case.target.path).is_dir() else Path(case.target.path).parent
    try:
        listed = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else {}
        file = next((f for n, f in listed.items() if n.endswith(part)), "model.safetensors")
        weights = Checkpoint.open(folder / Path(file).name)
        found = next(n for n in weights.tensors if n.endswith(part))
        same = tuple(weights.tensors[found].shape) == tuple(case.checkpoint.tensors[name].shape)
        return _middle(weights, found) if same else None
    except (KitError, OSError, StopIteration, AttributeError, TypeError):
        return None


def _needed(case: Case, name: str) -> bool:
    """Known to the kit as something the drafter computes with."""
    canonical = case.checkpoint.canonical(name)
    tied = canonical == "lm_head.weight" and case.contract.tie  # dropped, which K111 tells
    return canonical is None or not (tied or canonical in ("t2d", "embed_tokens.weight"))


def _pattern(names: list[str]) -> str:
    """`layers.0.*` for names that share a prefix, else the first name."""
    shared = os.path.commonprefix(names).rpartition(".")[0]  # noqa: RUF071
    return f"{shared}.*" if shared and len(names) > 1 else names[0]


def _some(names: list[str] | tuple[str, ...], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
