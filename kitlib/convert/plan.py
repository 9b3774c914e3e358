"""What a conversion would write, and what its reader could not do, from headers, d2t and rules alone.

Facts: research/checkpoint-formats.md §3 and §5; what an engine's releases do: engines/*.toml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..checks.files import MAP
from ..contract import Contract, TargetInfo
from ..contract.dialects import LAYER
from ..engines import Engine, layers, served
from ..findings import Evidence, Finding, KitError
from .form import Form

IDS = "eagle_aux_hidden_state_layer_ids"
KEPT = ("speculators_config", "speculators_version", "eagle_config")  # restored from `kitlib.kept` on the way back
AWAY = (*KEPT, LAYER, IDS, "num_aux_hidden_states", "use_aux_norm", "kitlib", "speculators_model_type")
AWAY += ("architectures", "auto_map")  # no remote code goes along
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
OUTER = (*FLAGS, IDS, "num_aux_hidden_states", "kitlib", "eagle_config", "norm_before_residual", "architectures")
OUTER += ("draft_vocab_size", "target_hidden_size", "tie_word_embeddings", "torch_dtype", "dtype")
OTHER_LAYERS = re.compile("Deepseek|MiniMax|Qwen")
# What a trainer's own format cannot say: the finding's code, and whether this drafter needs it.
NEEDS: dict[str, tuple[str, Callable[[Contract, TargetInfo | None], Any]]] = {
    "the state after the last layer": ("K132", lambda c, t: c.ids and t and max(c.boundaries or ()) >= t.layers),
    "other than three states": ("K106", lambda c, t: c.aux_states != 3),
    "several layers": ("K120", lambda c, t: c.layers > 1),
    "a layer that is not Llama's": ("K120", lambda c, t: OTHER_LAYERS.search(c.architecture)),
    **{n: ("K123", lambda c, t, n=n: getattr(c, n)) for n in ("norm_before_residual", "norm_before_fc", "norm_output")},
}
CANNOT = {"specforge": tuple(NEEDS), "speculators": ("a layer that is not Llama's",)}
CODES = {"boundaries": "K132", "capture": "K133", "fc": "K133", "d2t": "K110", "rope": "K121"}  # by field of Wiring
CODES |= {"head_source": "K111", "embed_source": "K111", "logit_cut": "K111"}  # every other field: K123


@dataclass(frozen=True)
class Plan:
    """What a conversion would write, and the findings that speak against it."""

    form: Form
    config: Mapping[str, Any]
    names: Mapping[str, str]  # in the source -> in the result
    rewritten: Mapping[str, bytes]  # tensors of the source whose bytes change (d2t) -> the new bytes
    result: Checkpoint  # as it will be read, with the bytes still where they are
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, source: Checkpoint, form: Form, target: TargetInfo | None = None) -> Plan:
        """Plan a conversion; KitError where nothing sensible could be written."""
        if not source.config:
            raise KitError(f"There is no config.json beside {source.path} to say what its tensors mean; add it.")
        contract = Contract.of(source, target)
        if contract.malformed:
            raise KitError(f"{source.path} cannot be converted: {contract.malformed}.")
        config = _config(source, contract, form, _ids(contract, form, target))
        names, rewritten = _names(source, form), _offsets(source, contract)
        tensors = {new: replace(source.tensors[old], name=new) for old, new in names.items()}
        result = replace(source, config=config, tensors=tensors)
        return cls(form, config, names, rewritten, result, tuple(_against(contract, result, form, target)))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.is_error)


def same_meaning(one: Contract, other: Contract) -> dict[str, tuple[Any, Any]]:
    """Fields in which two contracts differ beyond their spelling, as {name: (one, other)}; {} means the same."""
    spelling = ("dialect", "architecture", "ids", "sources", "contradictions", "verifier", "trainer_version")
    names = (f.name for f in fields(Contract) if f.name not in (*spelling, "has", "tie"))
    return {n: (a, b) for n in names if (a := getattr(one, n)) != (b := getattr(other, n))}


def _names(source: Checkpoint, form: Form) -> dict[str, str]:
    """The result's name of every tensor; one that no drafter has keeps its own."""
    have, names = {source.canonical(name) for name in source.tensors}, {}
    for name in source.tensors:
        new = source.canonical(name) or name
        if found := re.fullmatch(r"layers\.([1-9][0-9]*)\.(?:input_layernorm|hidden_norm)\.weight", new):
            norm = f"layers.{found[1]}.{form.later_norm}.weight"  # this layer has one input norm; each reader its name
            new = new if norm in have else norm
        if new.startswith("layers.0."):
            new = form.block.format(i=0) + new.removeprefix("layers.0")
        names[name] = new
    if clash := [new for new, count in Counter(names.values()).items() if count > 1]:
        raise KitError(f"{source.path} has several tensors that would all be called {clash[0]}; keep one of them.")
    return names


def _ids(c: Contract, form: Form, target: TargetInfo | None) -> tuple[list[int], int] | None:
    """(layer ids for the reader, boundary minus id); None where its default is meant, or no ids can say it."""
    if not (c.boundaries and c.use_aux):
        return None
    usual = int(bool(form.place))
    written = [b - usual for b in c.boundaries]
    if form.release:
        engine = Engine.load(form.engine)
        known = engine.known(form.release)[0]
        same = target is None or layers.captured(None, engine, known, target) == c.boundaries
        if not c.ids and same:  # where a trainer stores no ids, it and its readers share a default
            return None
        if layers.reads_ids(engine, known) and (found := layers.ids_for(c.boundaries, engine, known, target)):
            return found
    return (written, usual) if c.ids and min(written) >= 0 else None


def _config(source: Checkpoint, c: Contract, form: Form, ids: tuple[list[int], int] | None) -> dict[str, Any]:
    """config.json for the reader: the source's own fields, moved, and what it left to defaults."""
    old = source.config
    layer, kept = _map(old.get(LAYER)), _map(_map(old.get("kitlib")).get("kept"))
    kept = {**kept, **{k: old[k] for k in KEPT if k in old}}
    eagle = {k: v for k, v in _map(kept.pop("eagle_config", None)).items() if k not in (IDS, "norm_before_fc")}
    new = {k: v for k, v in {**layer, **old}.items() if k not in AWAY}
    architecture = c.architecture if OTHER_LAYERS.search(c.architecture) else form.architecture
    new = {"architectures": [architecture], "model_type": "llama", **new}
    sizes = {"hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_attention_heads": c.heads}
    sizes |= {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "num_hidden_layers": c.layers}
    sizes |= {"vocab_size": c.vocab, "rms_norm_eps": c.eps, "target_hidden_size": c.target_hidden}
    new |= {k: v for k, v in sizes.items() if new.get(k) is None}
    if "lm_head.weight" in c.has or "draft_vocab_size" not in old:
        new["draft_vocab_size"] = c.draft_vocab
    rope = {"rope_type": c.rope.type, **{k: list(v) if isinstance(v, tuple) else v for k, v in c.rope.scaling}}
    partial = {"partial_rotary_factor": c.rope.partial} if c.rope.partial != 1 else {}
    new |= {"rope_theta": c.rope.theta, "rope_scaling": rope if c.rope.type != "default" else None, **partial}
    new["rope_parameters"] = {"rope_theta": c.rope.theta, **rope, **partial}  # transformers 5 reads this, 4 the others
    new["norm_before_residual"] = c.norm_before_residual  # said aloud, as its default differs between dialects
    new |= {flag: getattr(c, flag) for flag in FLAGS if flag in new or getattr(c, flag)}
    new["tie_word_embeddings"] = c.tie and "lm_head.weight" not in c.has  # a trained head is there to be used
    new |= {"num_aux_hidden_states": c.aux_states} if c.aux_states != 3 else {}
    if ids:
        (eagle if form.place else new)[IDS] = ids[0]
    if form.place or not c.use_aux:
        new["eagle_config"] = {**eagle, "use_aux_hidden_state": c.use_aux}
    new["kitlib"] = {"converted_from": c.dialect.name, "kept": kept if form.place else {**kept, "eagle_config": eagle}}
    if ids and form.place and not ids[1]:  # unlike all other ids in this place
        new["kitlib"]["ids"] = "boundary"
    if form.engine != "speculators":
        return new
    outer = {k: new.pop(k) for k in OUTER if k in new}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    spec = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    spec["verifier"] = {"name_or_path": c.verifier or None}
    outer |= {"speculators_model_type": "eagle3", "speculators_version": kept.pop("speculators_version", "0.5.0")}
    outer["speculators_config"] = kept.pop("speculators_config", spec)
    outer["kitlib"]["kept"] = {"eagle_config": eagle}
    return {**outer, LAYER: {**new, "tie_word_embeddings": outer["tie_word_embeddings"]}}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _offsets(source: Checkpoint, c: Contract) -> dict[str, bytes]:
    """d2t as offsets where the file holds absolute ids; {} where it holds offsets already, or neither."""
    held = {source.canonical(name): name for name in source.tensors}
    if "d2t" not in held or source.tensors[held["d2t"]].dtype not in ("I32", "I64"):
        return {}
    if any(source.tensors[held[name]].nbytes > MAP for name in ("d2t", "t2d") if name in held):
        return {}  # K110
    table = source.read(held["d2t"]).reshape(-1)  # [Vd]
    marked = np.flatnonzero(source.read(held["t2d"])) if "t2d" in held else None
    count = np.arange(len(table), dtype=table.dtype)

    def valid(ids: np.ndarray) -> bool:  # ids: [Vd]
        distinct = len(ids) > 0 and ids.min() >= 0 and ids.max() < c.vocab and len(np.unique(ids)) == len(ids)
        return distinct and (marked is None or np.array_equal(np.sort(ids), marked))

    return {held["d2t"]: (table - count).tobytes()} if valid(table) and not valid(table + count) else {}


def _against(c: Contract, result: Checkpoint, form: Form, target: TargetInfo | None) -> Iterator[Finding]:
    """What the reader would do otherwise than the trainer meant: its wiring, its limits, what it reads back."""
    for text in c.contradictions:
        yield Finding.of("K106", text, evidence=[Evidence("config", text)])
    back = Contract.of(result, target)
    if form.release:
        yield from _by_rules(c, back, result, form, target)
    for what in CANNOT.get(form.engine, ()):
        code, needed = NEEDS[what]
        if needed(c, target):
            yield _finding(form, code, f"{form.to} cannot do {what}")
    for i in range(1, c.layers):
        if {f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"} <= c.has:
            yield _finding(form, "K123", f"layer {i} has two input norms, of which {form.to} runs {form.later_norm}")
    if c.boundaries is None and c.sources["boundaries"].startswith("not stored by"):
        title = f"boundaries {c.sources['boundaries']}: none were written, right only if the states were 2, N//2, N-3"
        yield _finding(form, "K132", title, severity="warning")
    for field, (said, reads) in same_meaning(c, back).items():
        if field != "boundaries" or c.ids:
            code = "K132" if field == "boundaries" else "K120"
            yield _finding(form, code, f"{form.to} would read {field} {reads} where the source says {said}")


def _by_rules(
    c: Contract, back: Contract, result: Checkpoint, form: Form, target: TargetInfo | None
) -> Iterator[Finding]:
    """What the release's own rules make of the result."""
    engine = Engine.load(form.engine)
    known = engine.known(form.release)[0]
    depth = target or TargetInfo("", c.target_hidden, c.vocab, 32, False, None, {})
    state = served(result, back, form.release, target=target, engine=form.engine)
    for field, (trained, runs) in c.trained(depth).diff(state.wiring).items():
        if field in ("dropped", "later_norm"):  # names are for `check`; the later norm has been renamed
            continue
        order = field == "boundaries" and sorted(trained) == sorted(runs)
        soft = {"severity": "warning"} if order or field == "embed_source" else {}  # the same weights, if it was frozen
        title = f"{form.to} runs {field} {runs}, training had {trained}"
        yield _finding(form, CODES.get(field, "K123"), title, **soft)
    if c.ids and not target and not layers.reads_ids(engine, known):
        yield _finding(form, "K132", f"{form.to} cannot do explicit layer ids")
    if target and c.boundaries and max(c.boundaries) > (last := layers.last_boundary(engine, known, target)):
        deep = "the state after the last layer" if max(c.boundaries) == target.layers else f"more than boundary {last}"
        yield _finding(form, "K132", f"{form.to} cannot do {deep}")
    own = c.target_hidden != c.hidden  # else the target's embedding is used, and no tensor is needed for it
    lost = [n for n in state.missing if n not in state.unasked and (own or n != "embed_tokens.weight")]
    if lost:
        yield _finding(form, "K103", f"{form.to} builds {', '.join(lost[:4])} and would get no tensor for it")
    if gone := [f.name for f in state.of("dropped") if result.canonical(f.name)]:
        yield _finding(form, "K104", f"{form.to} has no parameter for {', '.join(gone[:4])}", severity="error")
    if state.refused:
        yield _finding(form, state.refused_as, f"{form.to} refuses it: {state.refused}", severity="error")


def _finding(form: Form, code: str, title: str, **more: Any) -> Finding:
    engine = form.to if form.release else None
    return Finding.of(code, title, engine=engine, evidence=[Evidence("config", title)], **more)
