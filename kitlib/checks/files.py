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
from .case import Case, convert_command, trained
from .weights import drawn, unused


def readable(case: Case) -> Iterator[Finding]:
    """K101: whoever gets here has read every header."""
    count, files = len(case.checkpoint.tensors), len(case.checkpoint.files)
    yield Finding.of("K101", status="pass", evidence=[Evidence("header", f"{count} tensors in {files} file(s)")])


def key_naming(case: Case) -> Iterator[Finding]:
    """K102: names the engine drops or refuses although the kit knows what they are."""
    idle = unused(case)  # K104
    names = [f.name for f in case.served.of("dropped", "refused") if f.name not in idle and _needed(case, f.name)]
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
        fix=Fix("rename the tensors for this release", convert_command(case)),
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
    name = next(n for n in case.checkpoint.tensors if case.checkpoint.canonical(n) == "d2t")
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
    """K111: a trained embedding or head in whose place the engine uses another one."""
    if case.contract.tie and "lm_head.weight" in case.contract.has:
        yield Finding.of(
            "K111",
            "tie_word_embeddings is true, so the engine uses the embedding as head and not the trained lm_head.weight",
            engine=case.engine,
            evidence=[Evidence("config", f"tie_word_embeddings: true ({case.contract.sources.get('tie')})")],
        )
        return
    taken = [f for f in case.served.of("overwritten") if _plain(case, f.name)]
    for fate in taken:
        what = "embedding" if case.checkpoint.canonical(fate.name) == "embed_tokens.weight" else "head"
        there = _of_target(case, fate.name) if case.target and case.target.path else None
        if there is None:
            continue  # frozen copies are common, and without the target's weights nobody can tell
        apart = float(np.abs(_middle(case.checkpoint, fate.name) - there).max()) / (float(np.abs(there).max()) or 1)
        if apart > 0.02:
            title = f"the drafter's own {what} is not the target's, and this release uses the target's"
            evidence = [Evidence("tensor", f"{fate.name}: rows differ by up to {apart:.0%} of the largest value")]
            yield Finding.of("K111", title, engine=case.engine, evidence=evidence, fix=Fix("train with it frozen"))
            return
    yield Finding.of("K111", status="pass", engine=case.engine)


def untrained_embedding(case: Case) -> Iterator[Finding]:
    """K105 for an own embedding that this engine would use: drawn at random when the file was written."""
    if case.served.wiring.embed_source != "own":
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
    return info.dtype in ("F16", "BF16", "F32") and len(info.shape) == 2 and info.shape[0] > 0


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
