"""Reads an engine's data and says how that engine would run a drafter: the served wiring, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, Wiring, lookup, parameter_shapes
from ..contract.dialects import LAYER, number
from ..findings import KitError
from . import layers
from .data import Engine

STACKED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class Fate:
    """What the engine does with one tensor of the file."""

    name: str  # in the file
    status: str  # loaded | renamed | dropped | refused | ignored (by design) | overwritten (by the target's)
    into: str = ""  # the engine's parameter


@dataclass(frozen=True)
class Served:
    """How one release runs one drafter under these flags."""

    engine: str  # "sglang==0.5.9"
    wiring: Wiring
    fates: tuple[Fate, ...]
    missing: tuple[str, ...]  # canonical names of parameters that get nothing
    refused: str = ""  # why the engine would not start, in one sentence
    refused_as: str = ""  # the code of the finding that tells it
    misfit: str = ""  # the tensor of the file whose shape is not that of the parameter it goes into
    unasked: tuple[str, ...] = ()  # of `missing`: what the release builds whatever the config says, and fills itself
    capture_off: str = ""  # "" | "config" | "algorithm": which of the two routes of K133
    caveat: str = ""  # e.g. a release that was not read
    sources: tuple[str, ...] = ()  # the data entries used

    def of(self, *statuses: str) -> tuple[Fate, ...]:
        return tuple(f for f in self.fates if f.status in statuses)


def served(
    checkpoint: Checkpoint,
    contract: Contract,
    release: str,
    *,
    target: TargetInfo | None = None,
    algorithm: str = "EAGLE3",
    engine: str = "sglang",
) -> Served:
    """How this release would run the drafter. Files and flags decide; nothing is loaded."""
    loaded = Engine.load(engine)
    known, caveat = loaded.known(release)
    rows = {t: loaded.entry(t, known) for t in ("loader", "config", "fc", "capture", "d2t", "head", "later_norm")}
    if contract.latent and (row := loaded.entry("mla_loader", known)):
        rows["loader"] = row
    rule = loaded.entry("algorithm", known, name=algorithm)
    if rule is None:
        raise KitError(
            f"{engine} {release} has no rules for --speculative-algorithm {algorithm}; EAGLE3 is meant here."
        )
    trained = contract.trained(target or shallow(contract))
    read = [r for r in loaded.entries("flag", known) if r.get("latent", True) or not contract.latent]
    flags = _flags(checkpoint.config, read)
    output, residual = flags.pop("norm_output"), flags.pop("norm_before_residual")
    switch = lookup(checkpoint.config, rows["capture"]["switch"])
    off = "algorithm" if not rule["capture"] else "config" if switch is False else ""
    head = rows["head"]
    stated = contract.sources.get("target_hidden") != "default"  # else the target's embedding is put in, wrong or not
    own_embed = stated and contract.target_hidden != contract.hidden
    own_embed |= head["embedding"] == "own" and "embed_tokens.weight" in contract.has
    borrows = rule["head"] == "target" or (contract.draft_vocab == contract.vocab and _borrowed(head, contract))
    tied = contract.tie and bool(head.get("tied"))  # the head is the embedding's module; other engines build their own
    borrows |= not tied and _size(checkpoint, contract, rows) == "target"
    captured = layers.captured(layers.explicit(checkpoint.config, rows["capture"]), loaded, known, target)
    wiring = trained.but(
        boundaries=captured or trained.boundaries,
        capture="final" if off else "boundaries",
        fc=(contract.target_hidden if off else contract.aux_states * contract.target_hidden) != contract.hidden,
        residual="normed" if residual else "hidden",
        feedback="post-norm" if output else "pre-norm",
        later_norm=rows["later_norm"]["norm"] if contract.layers > 1 else trained.later_norm,
        embed_source="own" if own_embed else "target",
        head_source="target" if borrows else "embedding" if tied else "own",
        d2t="offset" if rule["d2t"] and "d2t" in contract.has else "identity",
        logit_cut=rule["cut"] or (tied and not borrows),
        **flags,
    )
    built = _built(checkpoint, contract, wiring.but(later_norm=rows["later_norm"]["norm"]), rows)
    fates, arrived = _fates(checkpoint, wiring, rows["loader"], built)
    missing = tuple(n for n, runs in built.items() if runs and n not in arrived)
    unasked = ("fc.bias",) if "fc.bias" in missing and rows["loader"]["fc_bias"] == "always" else ()
    part, odd = _misfit(checkpoint, contract, rows)
    misfit = next((f.name for f in fates if odd and f.into and checkpoint.canonical(f.name) == part), "")
    code, refused = _refusal(checkpoint, contract, fates, rows) if "refused" not in rule else ("K130", rule["refused"])
    fates = tuple(Fate(f.name, "refused") if f.name == misfit else f for f in fates)
    if misfit and code in ("", "K102"):
        code, refused = "K106", odd
    sources = tuple(r["source"] for r in (*rows.values(), rule) if r)
    final = wiring.but(dropped=missing)
    name = f"{engine}=={release}"
    return Served(name, final, fates, missing, refused, code, misfit, unasked, off, caveat, sources)


def _flags(config: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> dict[str, bool]:
    """Fields of the config that change the forward pass, as far as this release reads them."""
    form = "nested" if isinstance(config.get(LAYER), Mapping) else "flat"
    told = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), False)
    for row in rows:
        if row.get("form", form) == form:
            said = [v for p in row["places"] if (v := lookup(config, p)) is not None]
            said = said[:1] if row.get("first") else said
            told[row["name"]] = any(said) if said else form == "nested" and row.get("nested_default", False)
    return told


def _borrowed(head: Mapping[str, Any], contract: Contract) -> bool:
    """Whether a head of the target's own shape is the target's in this release."""
    return head.get("shared", False) or (head["absent"] == "target" and "lm_head.weight" not in contract.has)


def shallow(contract: Contract) -> TargetInfo | None:
    """Without a target the boundaries may be unknown; names and flags can still be judged."""
    if contract.boundaries:
        return None
    return TargetInfo("", contract.target_hidden, contract.vocab, 32, False, None, {})


def _size(checkpoint: Checkpoint, contract: Contract, rows: Mapping[str, Any]) -> str:
    """What the release makes of draft_vocab_size: "given", or of its absence or null "error" | "target" | "whole"."""
    if checkpoint.config.get("draft_vocab_size") is not None:
        return "given"
    row = rows["loader"] if contract.latent else rows["config"]
    return row["no_draft_vocab" if "draft_vocab_size" not in checkpoint.config else "null_draft_vocab"]


def _layer_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table that becomes the drafter's transformers config: the nested one where there is one."""
    inner = config.get(LAYER, config)
    return inner if isinstance(inner, Mapping) else {}


def _layers(config: Mapping[str, Any], contract: Contract) -> int:
    """How many layers the config asks the class for; where a flat one is silent, LlamaConfig's default. Cut at 128."""
    inner = _layer_fields(config)
    said = inner.get("num_hidden_layers", contract.layers if inner is not config or not config else 32)
    return min(said, 128) if type(said) is int and said > 0 else 1


def _states(config: Mapping[str, Any], places: list[str]) -> int:
    """How many target states fc is built for: a number or the length of a list, in the first place that has one."""
    for place in places:
        said = lookup(config, place)
        if isinstance(said, list) and said:
            return len(said)
        if type(said) is int and said > 0:
            return said
    return 3


def _qk_norm(config: Mapping[str, Any], contract: Contract, row: Mapping[str, Any]) -> bool:
    """Whether the class that this config leads to norms the heads of q and k (`row`: of the config table)."""
    nested = isinstance(config.get(LAYER), Mapping)
    return (config[LAYER].get("model_type") if nested else contract.architecture) in row.get("qk_norm", ())


def _built(checkpoint: Checkpoint, contract: Contract, wiring: Wiring, rows: Mapping[str, Any]) -> dict[str, bool]:
    """Canonical names of the parameters that the release's class builds from this config, and whether each runs."""
    config, row = _layer_fields(checkpoint.config), rows["loader"]
    depth = _layers(checkpoint.config, contract) if row["layers"] == "many" else 1
    sized = replace(contract, layers=depth, has=contract.has - {"fc.bias"})
    runs = parameter_shapes(sized, wiring)
    names = list(parameter_shapes(sized, wiring.but(fc=True, embed_source="own", head_source="own")))
    if wiring.head_source == "embedding":  # the embedding's module, so it has no parameter of its own
        names.remove("lm_head.weight")
    built = {n: n in runs for n in names}
    built = {f"layers.{i}.input_layernorm.weight": False for i in range(1, depth)} | built  # later ones never run
    if row["fc_bias"] == "always" or (row["fc_bias"] == "config" and config.get("bias")):
        built["fc.bias"] = wiring.fc
    if config.get("bias") or config.get("attention_bias"):
        built |= {f"layers.{i}.self_attn.o_proj.bias": True for i in range(depth)}
    if row.get("qkv_bias") and config.get("attention_bias"):
        built |= {f"layers.{i}.self_attn.{n}_proj.bias": True for i in range(depth) for n in "qkv"}
    if _qk_norm(checkpoint.config, contract, rows["config"]):
        built |= {f"layers.{i}.self_attn.{n}_norm.weight": True for i in range(depth) for n in "qk"}
    return built


def _fates(
    checkpoint: Checkpoint, wiring: Wiring, row: Mapping[str, Any], built: Mapping[str, bool]
) -> tuple[tuple[Fate, ...], set[str]]:
    """Replay the release's own load_weights on names alone: (fates, canonical names that arrived)."""
    parameters = {_engine_name(n, row["block"]): n for n in built}
    fates, arrived = [], set()
    for name in checkpoint.tensors:
        if "d2t" in name or "t2d" in name:
            fates.append(Fate(name, "loaded" if "d2t" in name else "ignored", "hot_token_id" if "d2t" in name else ""))
            continue
        new = name
        for old, to in row["rename"]:
            new = new.replace(old, to)
        with_model = new if "lm_head" in new else f"model.{new}"
        tries = [with_model] if row["prefix"] == "always" else [new, f"model.{new}"]
        into = next((t for t in tries if t in parameters), None)
        if into is None:
            stacked = any(part in name for part in STACKED)
            fate = row["unknown_stacked" if stacked else "unknown"]
            fate = "silent" if any(part in name for part in row.get("silent", ())) else fate
            fates.append(Fate(name, "refused" if fate == "error" else "dropped"))
            continue
        canonical = parameters[into]
        taken = canonical == "lm_head.weight" and wiring.head_source != "own"
        taken |= canonical == "embed_tokens.weight" and wiring.embed_source != "own"
        status = "overwritten" if taken else "renamed" if new != name else "loaded"
        fates.append(Fate(name, status, into))
        arrived.add(canonical)
    return tuple(fates), arrived


def _engine_name(canonical: str, block: str) -> str:
    if canonical == "lm_head.weight":
        return canonical
    if canonical.startswith("layers."):
        _, index, rest = canonical.split(".", 2)
        return f"model.{block.format(i=index)}.{rest}"
    return f"model.{canonical}"


def _refusal(
    checkpoint: Checkpoint, contract: Contract, fates: tuple[Fate, ...], rows: Mapping[str, Any]
) -> tuple[str, str]:
    """(code of the finding, why this release would not start with these files), or ("", "")."""
    if why := _config_refusal(checkpoint, contract, rows):
        return "K120", why
    if rows["d2t"]["absent"] == "error" and "d2t" not in contract.has:
        return "K110", "there is no d2t, and this release reads it without asking"
    if rows["d2t"].get("full") == "error" and "d2t" in contract.has and contract.draft_vocab == contract.vocab:
        why = "it has a d2t although its vocabulary is not reduced, and this release has no parameter for it then"
        return "K110", why
    if hit := next((f for f in fates if f.status == "refused"), None):
        return "K102", f"the name {hit.name} raises {rows['loader']['raises']} in this release's loader"
    return "", ""


def _misfit(checkpoint: Checkpoint, contract: Contract, rows: Mapping[str, Any]) -> tuple[str, str]:
    """(canonical name, why) of a tensor that the release builds in another size, or ("", "")."""
    norms = _qk_norm(checkpoint.config, contract, rows["config"])
    places = rows["fc"].get("states_qk_norm" if norms else "states", rows["fc"]["states"])
    if (states := _states(checkpoint.config, places)) != contract.aux_states and "fc.weight" in contract.has:
        why = f"fc.weight takes {contract.aux_states} states, and this release builds fc for {states}"
        return "fc.weight", why
    built = contract.vocab if _size(checkpoint, contract, rows) in ("target", "whole") else contract.draft_vocab
    tied = contract.tie and rows["head"].get("tied")
    if "lm_head.weight" in contract.has and not tied and built != contract.draft_vocab:
        why = f"lm_head.weight has {contract.draft_vocab} rows, and without a number in draft_vocab_size this release"
        return "lm_head.weight", f"{why} builds {built}"
    return "", ""


def _config_refusal(checkpoint: Checkpoint, contract: Contract, rows: Mapping[str, Any]) -> str:
    """Why this release does not take the config, or ""."""
    config, row = checkpoint.config, rows["config"]
    if not config:
        return "there is no config.json beside the tensors"
    if contract.malformed.startswith(tuple(row["tables"])):
        return contract.malformed
    nested = isinstance(config.get(LAYER), Mapping)  # then the engine chooses the class
    if nested and row["nested"] == "refused":
        return f"config.json nests the layer's sizes under {LAYER} (speculators), which it does not read"
    if not nested and contract.architecture not in row["architectures"]:
        known = ", ".join(row["architectures"])
        return f"the architecture {contract.architecture or '(none)'} is not registered; the drafter class is {known}"
    fields = {**config, **_layer_fields(config)}
    bad = [n for n in row["numbers"] if n in fields and number(fields[n]) is None]
    bad += [n for n in row["sizes"] if fields.get(n) is not None and number(fields[n]) is None]
    if bad:
        return f"{bad[0]} is {str(fields[bad[0]])[:40]!r} in config.json, where a number is needed"
    if rows["loader"]["layers"] == "one" and (asked := _layers(config, contract)) != 1:
        return f"its config asks for {asked} layers, this release builds exactly one"
    if _size(checkpoint, contract, rows) == "error":
        absent = "has no" if "draft_vocab_size" not in config else "says null for"
        return f"config.json {absent} draft_vocab_size, which the drafter class reads"
    return ""
