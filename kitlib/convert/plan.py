"""What a conversion would write, and what its reader could not do, from headers, d2t and rules alone.

Facts: research/checkpoint-formats.md §3 and §5, sglang-eagle3.md §1-§3; SGLang's releases: engines/sglang.toml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from packaging.version import InvalidVersion, Version

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, default_boundaries
from ..engines import Engine, served
from ..findings import Evidence, Finding, KitError

IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
KEPT = ("speculators_config", "speculators_version", "eagle_config")  # restored from `kitlib.kept` on the way back
AWAY = (*KEPT, LAYER, IDS, "num_aux_hidden_states", "use_aux_norm", "kitlib", "speculators_model_type")
AWAY += ("architectures", "auto_map")  # no remote code goes along
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
OUTER = (*FLAGS, IDS, "num_aux_hidden_states", "kitlib", "eagle_config", "norm_before_residual", "architectures")
OUTER += ("draft_vocab_size", "target_hidden_size", "tie_word_embeddings", "torch_dtype", "dtype")
OTHER_LAYERS = re.compile("Deepseek|MiniMax|Qwen")
# What a drafter may need and a reader lack: the finding's code, and whether this drafter needs it.
NEEDS: dict[str, tuple[str, Callable[[Contract, TargetInfo | None], Any]]] = {
    "explicit layer ids": ("K132", lambda c, t: c.ids and (not t or c.boundaries != default_boundaries(t.layers))),
    "the state after the last layer": ("K132", lambda c, t: c.ids and t and max(c.boundaries or ()) >= t.layers),
    "other than three states": ("K106", lambda c, t: c.aux_states != 3),
    "several layers": ("K120", lambda c, t: c.layers > 1),
    "a layer that is not Llama's": ("K120", lambda c, t: OTHER_LAYERS.search(c.architecture)),
    "norm_before_residual": ("K123", lambda c, t: c.norm_before_residual),
    **{flag: ("K123", lambda c, t, flag=flag: getattr(c, flag)) for flag in FLAGS},
}
# First release that can ("" = none that was read), in the order of NEEDS. SGLang's other rows: engines/rules.py.
LAST = {"Gemma": "0.5.12", "MiniMaxM3": "0.5.16", "GptOss": "0.5.17"}  # by class of the target
SINCE: dict[str, dict[str, Any]] = {
    "sglang": dict(zip(NEEDS, ("0.4.9", LAST, "0.5.12"), strict=False)),
    "vllm": dict(zip(NEEDS, ("0.13", "0.20", "0.22.1", "0", "0.20", "0.11", "0.20", "0.22.1", "0.22.1"), strict=True)),
    "specforge": dict.fromkeys(list(NEEDS)[1:], ""),
    "speculators": {"a layer that is not Llama's": ""},
}
VLLM = ("0.10.0", "0.33.0")  # oldest and newest release behind these facts
CODES = {"boundaries": "K132", "capture": "K133", "fc": "K133", "d2t": "K110", "rope": "K121"}  # by field of Wiring
CODES |= {"head_source": "K111", "embed_source": "K111", "logit_cut": "K111"}  # every other field: K123


@dataclass(frozen=True)
class Form:
    """How one reader wants a drafter written; `release` is "" for a trainer's own format."""

    engine: str
    release: str
    block: str  # name of decoder layer {i}, or of the only one
    architecture: str
    place: str  # of the layer ids: "eagle_config" (layer-output ids) or "" (top level, boundaries)
    later_norm: str = "input_layernorm"  # norm on the input of layers >= 1

    @property
    def to(self) -> str:
        return f"{self.engine}=={self.release}" if self.release else self.engine

    @classmethod
    def of(cls, to: str) -> Form:
        """From `sglang==0.5.9`, `vllm==0.20.0`, `speculators` or `specforge`; KitError for anything else."""
        name = next((n for n in SINCE if to.strip().startswith(n)), "")
        spec = to.strip().removeprefix(name).strip()
        if name == "specforge" and not spec:
            return cls(name, "", "midlayer", "LlamaForCausalLMEagle3", "eagle_config")
        if name == "speculators" and not spec:
            return cls(name, "", "layers.{i}", "Eagle3Speculator", "")
        if name == "vllm":  # flat: read since 0.10 (speculators' own form: 0.11), and no verifier from a hub is needed
            try:
                release = Version(spec.removeprefix("==") or VLLM[1])
            except InvalidVersion:
                raise KitError(f"{to!r} is not one release; write for example vllm=={VLLM[1]}.") from None
            if release < Version(VLLM[0]):
                raise KitError(f"vllm {release} is older than all releases that were read ({VLLM[0]}).")
            return cls(name, str(release), "layers.{i}", "Eagle3LlamaForCausalLM", "")
        if name != "sglang":
            raise KitError(f"Cannot convert to {to!r}; write sglang==0.5.9, vllm=={VLLM[1]}, speculators or specforge.")
        engine = Engine.load(name)
        if len(releases := engine.resolve(to)) != 1:
            raise KitError(f"{to!r} means {len(releases)} releases; name the one that will serve, as in sglang==0.5.9.")
        loader, later = (engine.entry(t, engine.known(releases[0])[0]) for t in ("loader", "later_norm"))
        return cls(name, releases[0], loader["block"], "LlamaForCausalLMEagle3", "eagle_config", later["norm"])


@dataclass(frozen=True)
class Plan:
    """What a conversion would write, and the findings that speak against it."""

    form: Form
    config: Mapping[str, Any]
    names: Mapping[str, str]  # in the source -> in the result
    rewritten: Mapping[str, bytes]  # tensors of the source whose bytes change (d2t) -> the new bytes
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, source: Checkpoint, form: Form, target: TargetInfo | None = None) -> Plan:
        """Plan a conversion; KitError where nothing sensible could be written."""
        if not source.config:
            raise KitError(f"There is no config.json beside {source.path} to say what its tensors mean; add it.")
        contract = Contract.of(source, target)
        names, config, rewritten = _names(source, form), _config(source, contract, form), _offsets(source, contract)
        tensors = {new: replace(source.tensors[old], name=new) for old, new in names.items()}
        result = replace(source, config=config, tensors=tensors)  # as if it had been written
        return cls(form, config, names, rewritten, tuple(_against(contract, result, form, target)))

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


def _config(source: Checkpoint, c: Contract, form: Form) -> dict[str, Any]:
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
    if c.ids and c.boundaries and c.use_aux:  # where a trainer stores no ids, it and its readers share a default
        (eagle if form.place else new)[IDS] = [b - bool(form.place) for b in c.boundaries]
    if form.place or not c.use_aux:
        new["eagle_config"] = {**eagle, "use_aux_hidden_state": c.use_aux}
    new["kitlib"] = {"converted_from": c.dialect.name, "kept": kept if form.place else {**kept, "eagle_config": eagle}}
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
    table = source.read(held["d2t"]).reshape(-1)  # [Vd]
    marked = np.flatnonzero(source.read(held["t2d"])) if "t2d" in held else None
    count = np.arange(len(table), dtype=table.dtype)

    def valid(ids: np.ndarray) -> bool:  # ids: [Vd]
        distinct = len(ids) > 0 and ids.min() >= 0 and ids.max() < c.vocab and len(np.unique(ids)) == len(ids)
        return distinct and (marked is None or np.array_equal(np.sort(ids), marked))

    return {held["d2t"]: (table - count).tobytes()} if valid(table) and not valid(table + count) else {}


def _against(c: Contract, result: Checkpoint, form: Form, target: TargetInfo | None) -> Iterator[Finding]:
    """What the reader would do otherwise than the trainer meant: its wiring, its limits, what it reads back."""

    def finding(code: str, title: str, **more: Any) -> Finding:
        engine = form.to if form.release else None
        return Finding.of(code, title, engine=engine, evidence=[Evidence("config", title)], **more)

    for text in c.contradictions:
        yield Finding.of("K106", text, evidence=[Evidence("config", text)])
    back, version = Contract.of(result, target), Version(form.release or "0")
    if form.engine == "sglang":
        depth = target or TargetInfo("", c.target_hidden, c.vocab, 32, False, None, {})
        state = served(result, back, form.release, target=target)
        for field, (trained, runs) in c.trained(depth).diff(state.wiring).items():
            if field in ("dropped", "later_norm"):  # names are for `check`; the later norm has been renamed
                continue
            soft = {"severity": "warning"} if field == "embed_source" else {}  # the same weights, if it was frozen
            yield finding(CODES.get(field, "K123"), f"{form.to} runs {field} {runs}, training had {trained}", **soft)
        own = c.target_hidden != c.hidden  # else the target's embedding is used, and no tensor is needed for it
        if lost := [n for n in state.missing if own or n != "embed_tokens.weight"]:
            yield finding("K103", f"{form.to} builds {', '.join(lost[:4])} and would get no tensor for it")
        if gone := [f.name for f in state.of("dropped", "refused") if result.canonical(f.name)]:
            yield finding("K104", f"{form.to} has no parameter for {', '.join(gone[:4])}", severity="error")
        if state.refused:
            yield finding("K120", f"{form.to} refuses it: {state.refused}")
    elif form.engine == "vllm":
        if strange := [n for n in result.tensors if not result.canonical(n)]:
            yield finding("K102", f"{form.to} refuses names it does not know, such as {strange[0]}")
        if version >= Version("0.31") and "d2t" in c.has and c.draft_vocab == c.vocab:
            yield finding("K110", f"{form.to} refuses a d2t where the draft vocabulary is the whole one")
    for what, (code, needed) in NEEDS.items():
        first = SINCE[form.engine].get(what, "0")
        if isinstance(first, Mapping):
            first = next((v for k, v in first.items() if target and target.architecture.startswith(k)), "")
        if needed(c, target) and (not first or (form.release and version < Version(first))):
            yield finding(code, f"{form.to} cannot do {what}" + (f" ({first} can)" if first else ""))
    for i in range(1, c.layers):
        if {f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"} <= c.has:
            yield finding("K123", f"layer {i} has two input norms, of which {form.to} runs {form.later_norm}")
    if c.boundaries is None and c.sources["boundaries"].startswith("not stored by"):
        title = f"boundaries {c.sources['boundaries']}: none were written, right only if the states were 2, N//2, N-3"
        yield finding("K132", title, severity="warning")
    for field, (said, reads) in same_meaning(c, back).items():
        if field != "boundaries" or c.ids:
            code = "K132" if field == "boundaries" else "K120"
            yield finding(code, f"{form.to} would read {field} {reads} where the source says {said}")
