"""Config dialects: where each trainer writes what a drafter needs, as data, and the `Contract` read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..findings import KitError
from .wiring import Rope, Wiring, default_boundaries

# Field -> places in config.json, first hit wins. "a.b" means config["a"]["b"].
PLACES: dict[str, tuple[str, ...]] = {
    "hidden": ("transformer_layer_config.hidden_size", "hidden_size"),
    "intermediate": ("transformer_layer_config.intermediate_size", "intermediate_size"),
    "heads": ("transformer_layer_config.num_attention_heads", "num_attention_heads"),
    "kv_heads": ("transformer_layer_config.num_key_value_heads", "num_key_value_heads"),
    "head_dim": ("transformer_layer_config.head_dim", "head_dim"),
    "vocab": ("transformer_layer_config.vocab_size", "vocab_size"),
    "max_positions": ("transformer_layer_config.max_position_embeddings", "max_position_embeddings"),
    "eps": ("transformer_layer_config.rms_norm_eps", "rms_norm_eps"),
    "layers": ("transformer_layer_config.num_hidden_layers", "num_hidden_layers"),
    "draft_vocab": ("draft_vocab_size",),
    "target_hidden": ("target_hidden_size",),
    "tie": ("tie_word_embeddings",),
    "ids": ("eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"),
    "use_aux": ("eagle_config.use_aux_hidden_state",),
    "norm_before_residual": ("norm_before_residual",),
    "norm_before_fc": ("norm_before_fc", "eagle_config.norm_before_fc"),
    "fc_norm": ("fc_norm", "use_aux_norm"),
    "norm_output": ("norm_output",),
    "trainer_version": ("speculators_version",),
    "verifier": ("speculators_config.verifier.name_or_path",),
}


@dataclass(frozen=True)
class Dialect:
    """One trainer's conventions. `ids`: what an explicit layer id means; `stores_ids`: whether it writes them."""

    name: str
    ids: str  # "boundary" | "layer-output" (boundary = id + 1)
    norm_before_residual: bool  # when the config does not say
    source: str


# Source of all rows: research/checkpoint-formats.md §3, read from each trainer's own code.
DIALECTS = {
    d.name: d
    for d in (
        Dialect("speculators", "boundary", True, "speculators 0.3.0-0.9.0 models/eagle3"),
        Dialect("specforge", "layer-output", False, "SpecForge 0.2.0 export/to_sglang.py"),
        Dialect("modelopt", "layer-output", False, "Model-Optimizer a2fbac7b export"),
        Dialect("automodel", "layer-output", False, "NeMo Automodel 36044ad3"),
        Dialect("safeailab", "boundary", False, "EAGLE cb7e0841 traineagle3/cnets.py (AngelSlim writes the same)"),
    )
}
SPECULATORS_HOOK_AFTER = ("0.3", "0.4")  # data generation took {3, N//2+1, N-2} and stored nothing


@dataclass(frozen=True)
class TargetInfo:
    """What the kit needs to know of a target, from its config.json alone."""

    architecture: str
    hidden: int
    vocab: int
    layers: int
    tie: bool
    max_positions: int | None
    config: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, path: str | Path) -> TargetInfo:
        """Read a model folder or a config.json; the text part of multimodal wrappers is found by name."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            whole = json.loads(file.read_text(encoding="utf-8"))
            text = next((whole[k] for k in ("text_config", "language_config", "llm_config") if k in whole), whole)
            return cls(
                architecture=str((whole.get("architectures") or [""])[0]),
                hidden=int(text["hidden_size"]),
                vocab=int(text["vocab_size"]),
                layers=int(text["num_hidden_layers"]),
                tie=bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                max_positions=text.get("max_position_embeddings"),
                config=text,
                path=str(path),
            )
        except OSError as error:
            raise KitError(f"Cannot read the target's {file}: {error.strerror}; give a model folder.") from None
        except KeyError as error:
            raise KitError(f"The target's {file} has no {error}; is it a language model's config?") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise KitError(f"The target's {file} is not a model config ({error}); give a model folder.") from None


@dataclass(frozen=True)
class Contract:
    """Sizes and conventions of one drafter. `sources[field]` says where each came from."""

    dialect: Dialect
    architecture: str
    hidden: int  # H
    target_hidden: int  # Ht
    vocab: int  # V
    draft_vocab: int  # Vd
    aux_states: int  # K
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Rope
    max_positions: int | None
    ids: tuple[int, ...] | None  # as written, in the dialect's own convention
    boundaries: tuple[int, ...] | None  # None: unknown without a target (or not stored at all)
    use_aux: bool
    tie: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has: frozenset[str]  # canonical names in the file
    sources: Mapping[str, str] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()  # config against shapes, one sentence each
    verifier: str = ""
    trainer_version: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: TargetInfo | None = None) -> Contract:
        """Resolve the contract; KitError when the files hold no EAGLE-3 drafter at all."""
        return _resolve(checkpoint, target)

    def trained(self, target: TargetInfo | None = None) -> Wiring:
        """The wiring this drafter was trained with. KitError when its boundaries cannot be known."""
        bounds = self.boundaries or (default_boundaries(target.layers) if target else None)
        if bounds is None:
            raise KitError("The drafter stores no layer ids and no target was named; add --target to resolve them.")
        return Wiring(
            boundaries=bounds,
            capture="boundaries" if self.use_aux else "final",
            fc=self.use_aux,
            norm_before_fc=self.norm_before_fc,
            fc_norm=self.fc_norm,
            residual="normed" if self.norm_before_residual else "hidden",
            feedback="post-norm" if self.norm_output else "pre-norm",
            embed_source="own" if "embed_tokens.weight" in self.has else "target",
            head_source="own" if "lm_head.weight" in self.has else "embedding" if self.tie else "target",
            d2t="offset" if "d2t" in self.has else "identity",
            rope=self.rope,
        )


def _lookup(config: Mapping[str, Any], place: str) -> Any:
    value: Any = config
    for part in place.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _dialect(config: Mapping[str, Any], names: str) -> Dialect:
    """Which trainer wrote this: the config's shape first, then the tensor names."""
    if "speculators_config" in config or "transformer_layer_config" in config:
        return DIALECTS["speculators"]
    if names == "model.layers.0":
        return DIALECTS["automodel"]
    if isinstance(config.get("eagle_config"), Mapping):
        return DIALECTS["modelopt" if names == "layers.0" else "specforge"]
    return DIALECTS["safeailab"]


def _rope(config: Mapping[str, Any]) -> tuple[Rope, str]:
    """Rope in either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    inner = config.get("transformer_layer_config")
    inner = inner if isinstance(inner, Mapping) else config
    raw = inner.get("rope_parameters")
    where = "rope_parameters" if isinstance(raw, Mapping) else "rope_theta"
    scaling = dict(raw) if isinstance(raw, Mapping) else dict(inner.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", inner.get("rope_theta"))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    partial = scaling.pop("partial_rotary_factor", inner.get("partial_rotary_factor", 1.0))
    scaling.pop("type", None)
    items = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items()))
    source = f"config: {where}" if theta is not None else "default: 10000"
    return Rope(float(theta or 10_000.0), str(kind), float(partial or 1.0), items), source


def _resolve(checkpoint: Checkpoint, target: TargetInfo | None) -> Contract:
    config = checkpoint.config
    shapes = {c: t.shape for name, t in checkpoint.tensors.items() if (c := checkpoint.canonical(name))}
    if not any(name.startswith("layers.") or name == "fc.weight" for name in shapes):
        raise KitError(f"{checkpoint.path} holds no EAGLE-3 drafter: no fc and no decoder layer among its tensors.")
    dialect = _dialect(config, checkpoint.dialect)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, places in PLACES.items():
        for place in places:
            if (value := _lookup(config, place)) is not None:
                values[name], sources[name] = value, f"config: {place}"
                break
    contradictions: list[str] = []

    def size(name: str, from_shape: int | None, tensor: str, default: int | None = None) -> int:
        """The shape wins over the config; their disagreement is kept."""
        said = values.get(name)
        if said is not None and (not isinstance(said, int) or isinstance(said, bool) or said <= 0):
            contradictions.append(f"{sources[name]} is {said!r}, not a positive number")
            said = None
        if from_shape:
            if said is not None and said != from_shape:
                contradictions.append(f"{sources[name]} says {said}, the shape of {tensor} says {from_shape}")
            sources[name] = f"shape: {tensor}"
            return from_shape
        if said is None:
            if default is None:
                raise KitError(f"{checkpoint.path}: neither config.json nor the tensors tell {name}; add it.")
            sources[name] = "default"
            return default
        return said

    def dim(tensor: str, axis: int) -> int | None:
        shape = shapes.get(tensor, ())
        return shape[axis] if len(shape) == 2 else None

    first = "layers.0."
    hidden = size("hidden", dim("fc.weight", 0) or dim(first + "mlp.down_proj.weight", 0), "fc.weight")
    target_hidden = size("target_hidden", None, "", (target.hidden if target else hidden))
    fused = dim("fc.weight", 1)
    ids = values.get("ids")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        contradictions.append(f"{sources['ids']} is {ids!r}, not a list of layer ids")
        ids = None
    aux = fused // target_hidden if fused and fused % target_hidden == 0 else (len(ids) if ids else 3)
    sources["aux_states"] = "shape: fc.weight" if fused else "config: ids" if ids else "default"
    if fused and fused % target_hidden:
        contradictions.append(f"fc.weight takes {fused} features, no multiple of the target's hidden {target_hidden}")
    if ids and fused and len(ids) != aux:
        contradictions.append(f"{sources['ids']} names {len(ids)} layers, fc.weight takes {aux} states")
    heads = size("heads", None, "", max(1, hidden // 64))
    head_dim = size("head_dim", None, "", max(1, hidden // heads))
    q_rows, k_rows = dim(first + "self_attn.q_proj.weight", 0), dim(first + "self_attn.k_proj.weight", 0)
    if q_rows and q_rows != heads * head_dim:
        contradictions.append(f"q_proj has {q_rows} rows, the config says {heads} heads of {head_dim}")
    kv_heads = size("kv_heads", k_rows // head_dim if k_rows and k_rows % head_dim == 0 else None, "k_proj", heads)
    indices = {int(c.split(".")[1]) for c in shapes if c.startswith("layers.")}
    rope, sources["rope"] = _rope(config)
    version = str(values.get("trainer_version", ""))
    flags = {n: bool(values.get(n, False)) for n in ("norm_before_fc", "norm_output", "tie")}
    residual = values.get("norm_before_residual")
    if residual is None:
        residual = dialect.norm_before_residual
        sources["norm_before_residual"] = f"default of the {dialect.name} dialect"
    return Contract(
        dialect=dialect,
        architecture=str((config.get("architectures") or [""])[0]),
        hidden=hidden,
        target_hidden=target_hidden,
        vocab=size("vocab", None, "", (target.vocab if target else dim("lm_head.weight", 0))),
        draft_vocab=size("draft_vocab", dim("lm_head.weight", 0), "lm_head.weight", values.get("vocab")),
        aux_states=aux,
        layers=size("layers", len(indices) or None, "layers.*", 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size("intermediate", dim(first + "mlp.gate_proj.weight", 0), "gate_proj", 4 * hidden),
        eps=float(values.get("eps", 1e-6)),
        rope=rope,
        max_positions=values.get("max_positions"),
        ids=tuple(ids) if ids else None,
        boundaries=_boundaries(ids, dialect, version, target, sources),
        use_aux=values.get("use_aux") is not False,
        norm_before_residual=bool(residual),
        fc_norm=bool(values.get("fc_norm")) or any(c.startswith("fc_norm.") for c in shapes),
        has=frozenset(shapes),
        sources=sources,
        contradictions=tuple(contradictions),
        verifier=str(values.get("verifier") or ""),
        trainer_version=version,
        **flags,
    )


def _boundaries(
    ids: list[int] | None, dialect: Dialect, version: str, target: TargetInfo | None, sources: dict[str, str]
) -> tuple[int, ...] | None:
    """Ids in the dialect's convention to boundaries; the common default where a trainer stores none."""
    if ids is not None:
        shift = 1 if dialect.ids == "layer-output" else 0
        sources["boundaries"] = f"{sources['ids']}, read as {dialect.ids} ids"
        return tuple(i + shift for i in ids)
    if dialect.name == "speculators" and version.startswith(SPECULATORS_HOOK_AFTER):
        sources["boundaries"] = f"not stored by speculators {version}"
        return None
    if target is None:
        sources["boundaries"] = "not stored; the default needs the target's depth"
        return None
    sources["boundaries"] = f"default for {target.layers} layers"
    return default_boundaries(target.layers)
