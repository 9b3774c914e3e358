"""Reads an engine's data file and says how that engine would run a drafter: the served wiring, tensor by tensor."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, Wiring, default_boundaries, lookup, parameter_shapes
from ..findings import KitError

STACKED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
RATES: dict[str, Callable[[float, float, int, int], float | None]] = {
    "none": lambda a, v, D, S: None,
    "(a+v)/(v*(S+1))": lambda a, v, D, S: (a + v) / (v * (S + 1)),
    "(a+v)/(v*D)": lambda a, v, D, S: (a + v) / (v * D),
    "a/(v*(D-1))": lambda a, v, D, S: a / (v * (D - 1)),
}


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
    capture_off: str = ""  # "" | "config" | "algorithm": which of the two routes of K133
    caveat: str = ""  # e.g. a release that was not read
    sources: tuple[str, ...] = ()  # the data entries used

    def of(self, *statuses: str) -> tuple[Fate, ...]:
        return tuple(f for f in self.fates if f.status in statuses)


@dataclass(frozen=True)
class Engine:
    """One engine's data. `entry` finds the row of a table that holds for a release."""

    name: str
    data: Mapping[str, Any]

    @classmethod
    def load(cls, name: str = "sglang") -> Engine:
        return _load(name)

    @property
    def releases(self) -> tuple[str, ...]:
        return tuple(self.data["engine"]["read"])

    @property
    def default(self) -> str:
        """The installed release where it is known, else the data file's default."""
        return self.data["engine"]["default"]

    def entries(self, table: str, release: str, **match: Any) -> list[Mapping[str, Any]]:
        """All rows of a table whose window holds `release` and whose fields equal `match`."""
        rows = (r for r in self.data.get(table, ()) if all(r.get(k) == v for k, v in match.items()))
        return [r for r in rows if SpecifierSet(r["window"]).contains(release, prereleases=True)]

    def entry(self, table: str, release: str, **match: Any) -> Mapping[str, Any] | None:
        """The one row that holds; the schema test sees to it that windows do not overlap."""
        return next(iter(self.entries(table, release, **match)), None)

    def resolve(self, spec: str) -> tuple[str, ...]:
        """Releases of a specifier: `sglang==0.5.9`, `>=0.5.6,<=0.5.9`, `0.5.9`, `all`, or "" for the default."""
        text = spec.strip().removeprefix(self.name).strip()
        if not text:
            return (self.default,)
        if text == "all":
            return self.releases
        try:
            if text[0].isdigit():
                text = f"=={text}"
            specifiers = SpecifierSet(text)
            exact = [s.version for s in specifiers if s.operator == "==" and "*" not in s.version]
            return tuple(exact) or tuple(r for r in self.releases if r in specifiers) or _nothing(self, spec)
        except (InvalidSpecifier, ValueError):
            raise KitError(
                f"{spec[:60]!r} is no engine release; write for example {self.name}==0.5.9, or all."
            ) from None

    def known(self, release: str) -> tuple[str, str]:
        """The release whose rules hold, and a caveat where this one itself was not read."""
        releases = [Version(r) for r in self.releases]
        try:
            wanted = Version(release)
        except ValueError:  # InvalidVersion is one
            raise KitError(f"{release[:40]!r} is no release of {self.name}; write for example 0.5.9.") from None
        if wanted in releases:
            return release, ""
        older = [r for r in releases if r < wanted]
        if not older:
            raise KitError(f"{self.name} {release} is older than all releases that were read ({self.releases[0]}).")
        newer = "newer than all that were read" if older[-1] == releases[-1] else "not read"
        return str(older[-1]), f"{self.name} {release} is {newer}; judged by the rules of {older[-1]}"


@cache
def _load(name: str) -> Engine:
    file = Path(__file__).parent / f"{name}.toml"
    if not file.exists():
        known = ", ".join(sorted(p.stem for p in file.parent.glob("*.toml")))
        raise KitError(f"The kit knows no engine {name!r}; it knows {known}.")
    return Engine(name, tomllib.loads(file.read_text(encoding="utf-8")))


def _nothing(engine: Engine, spec: str) -> tuple[str, ...]:
    raise KitError(f"No release of {engine.name} that was read fits {spec!r}; they are {', '.join(engine.releases)}.")


def accept_rate(release: str, a: float, v: float, draft_tokens: int, steps: int, engine: str = "sglang") -> tuple:
    """The accept rate that this release's log prints, and its formula; (None, "none") where it prints no rate."""
    loaded = Engine.load(engine)
    row = loaded.entry("rate", loaded.known(release)[0])
    if not row or not v:
        return None, row["formula"] if row else "unknown"
    return RATES[row["formula"]](a, v, draft_tokens, steps), row["formula"]


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
    flags = _flags(checkpoint.config, loaded.entries("flag", known))
    output, residual = flags.pop("norm_output"), flags.pop("norm_before_residual")
    switch = lookup(checkpoint.config, rows["capture"]["switch"])
    off = "algorithm" if not rule["capture"] else "config" if switch is False else ""
    head = rows["head"]
    own_embed = contract.target_hidden != contract.hidden
    own_embed |= head["embedding"] == "own" and "embed_tokens.weight" in contract.has
    borrows = rule["head"] == "target" or (contract.draft_vocab == contract.vocab and _borrowed(head, contract))
    captured = _captured(checkpoint, rows["capture"], loaded.entries("id_rule", known), target)
    wiring = trained.but(
        boundaries=captured or trained.boundaries,
        capture="final" if off else "boundaries",
        fc=(contract.target_hidden if off else contract.aux_states * contract.target_hidden) != contract.hidden,
        residual="normed" if residual else "hidden",
        feedback="post-norm" if output else "pre-norm",
        later_norm=rows["later_norm"]["norm"] if contract.layers > 1 else trained.later_norm,
        embed_source="own" if own_embed else "target",
        head_source="target" if borrows else "embedding" if contract.tie else "own",
        d2t="offset" if rule["d2t"] and "d2t" in contract.has else "identity",
        logit_cut=rule["cut"] or (contract.tie and not borrows),
        **flags,
    )
    built = _built(checkpoint, contract, wiring.but(later_norm=rows["later_norm"]["norm"]), rows["loader"])
    fates, arrived = _fates(checkpoint, wiring, rows["loader"], built)
    missing = tuple(n for n, runs in built.items() if runs and n not in arrived)
    refused = rule.get("refused") or _refusal(checkpoint, contract, fates, rows)
    sources = tuple(r["source"] for r in (*rows.values(), rule) if r)
    final = wiring.but(dropped=missing)
    return Served(f"{engine}=={release}", final, fates, missing, refused, off, caveat, sources)


def _flags(config: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> dict[str, bool]:
    """Fields of the config that change the forward pass, as far as this release reads them."""
    form = "nested" if "transformer_layer_config" in config else "flat"
    told = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), False)
    for row in rows:
        if row.get("form", form) == form:
            said = [v for p in row["places"] if (v := lookup(config, p)) is not None]
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


def _captured(
    checkpoint: Checkpoint, row: Mapping[str, Any], id_rules: list[Mapping[str, Any]], target: TargetInfo | None
) -> tuple[int, ...] | None:
    """Boundaries the engine captures: explicit ids where it reads them, else its default for this depth."""
    places = [row["ids"]] if isinstance(row["ids"], str) else row["ids"]
    ids = next((v for p in places if (v := lookup(checkpoint.config, p)) is not None), None)
    explicit = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    if not explicit and not target:
        return None
    rule = next((r["rule"] for r in id_rules if target and target.architecture in r["classes"]), "")
    ids = ids if explicit else default_boundaries(target.layers)
    as_they_are = not explicit and rule != "defaults-too"
    as_they_are |= rule == "first-is-1" and ids[0] != 1
    as_they_are |= rule == "below-depth" and max(ids) == target.layers
    return tuple(i if as_they_are else i + row["shift"] for i in ids)


def _layers(config: Mapping[str, Any], contract: Contract) -> int:
    """How many layers a flat config asks the class for; where it is silent, LlamaConfig's default. Cut at 128."""
    if not config or "transformer_layer_config" in config:
        return contract.layers
    said = config.get("num_hidden_layers", 32)
    return min(said, 128) if type(said) is int and said > 0 else 1


def _built(checkpoint: Checkpoint, contract: Contract, wiring: Wiring, row: Mapping[str, Any]) -> dict[str, bool]:
    """Canonical names of the parameters that the release's class builds from this config, and whether each runs."""
    config = checkpoint.config
    layers = _layers(config, contract) if row["layers"] == "many" else 1
    sized = replace(contract, layers=layers, has=contract.has - {"fc.bias"})
    runs = parameter_shapes(sized, wiring)
    names = list(parameter_shapes(sized, wiring.but(fc=True, embed_source="own", head_source="own")))
    if contract.tie:  # the head is the embedding's module, so it has no parameter of its own
        names.remove("lm_head.weight")
    built = {n: n in runs for n in names}
    built = {f"layers.{i}.input_layernorm.weight": False for i in range(1, layers)} | built  # later ones never run
    if row["fc_bias"] == "always" or (row["fc_bias"] == "config" and config.get("bias")):
        built["fc.bias"] = wiring.fc
    if config.get("bias") or config.get("attention_bias"):
        built |= {f"layers.{i}.self_attn.o_proj.bias": True for i in range(layers)}
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


def _refusal(checkpoint: Checkpoint, contract: Contract, fates: tuple[Fate, ...], rows: Mapping[str, Any]) -> str:
    """Why this release would not start with these files, or ""."""
    config = checkpoint.config
    if not config:
        return "there is no config.json beside the tensors"
    if "transformer_layer_config" in config and rows["config"]["nested"] == "refused":
        return (
            "config.json nests the layer's sizes under transformer_layer_config (speculators), which it does not read"
        )
    nested = "transformer_layer_config" in config  # then the engine chooses the class
    if not nested and contract.architecture not in rows["config"]["architectures"]:
        known = ", ".join(rows["config"]["architectures"])
        return f"the architecture {contract.architecture or '(none)'} is not registered; the drafter class is {known}"
    if rows["loader"]["layers"] == "one" and (layers := _layers(config, contract)) != 1:
        return f"its config asks for {layers} layers, this release builds exactly one"
    if "draft_vocab_size" not in config and rows["config"].get("draft_vocab") != "optional":
        return "config.json has no draft_vocab_size, which the drafter class reads"
    if rows["d2t"]["absent"] == "error" and "d2t" not in contract.has:
        return "there is no d2t, and this release reads it without asking"
    if rows["d2t"].get("full") == "error" and "d2t" in contract.has and contract.draft_vocab == contract.vocab:
        return "it has a d2t although its vocabulary is not reduced, and this release has no parameter for it then"
    if hit := next((f for f in fates if f.status == "refused"), None):
        return f"the name {hit.name} raises an error in this release's loader"
    return ""
