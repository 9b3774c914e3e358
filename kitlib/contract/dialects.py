"""Config dialects as data: where each trainer writes what a drafter needs, and what its layer ids mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .wiring import Rope

LAYER = "transformer_layer_config"  # speculators' table of the layer's own fields
TABLES = (LAYER, "speculators_config", "eagle_config")

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
    "id_meaning": ("kitlib.ids",),  # what `convert` noted where it wrote ids in another convention than the dialect's
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
    doubts: Mapping[str, str] = field(default_factory=dict)  # fields that meant something else in some versions


# Source of all rows: research/checkpoint-formats.md §3, read from each trainer's own code.
DIALECTS = {
    d.name: d
    for d in (
        Dialect("speculators", "boundary", True, "speculators 0.3.0-0.9.0 models/eagle3"),
        Dialect(
            "specforge",
            "layer-output",
            False,
            "SpecForge 0.2.0 export/to_sglang.py",
            {
                "norm_output": "SpecForge before its PR 879 (September 2026) never normed the state it fed back, and "
                "with norm_output false not even the head's input; since then it means what engines make of it"
            },
        ),
        Dialect("modelopt", "layer-output", False, "Model-Optimizer a2fbac7b export"),
        Dialect("automodel", "layer-output", False, "NeMo Automodel 36044ad3"),
        Dialect("angelslim", "layer-output", False, "AngelSlim 0.5.0 (stores no ids; those of the common default)"),
        Dialect("safeailab", "boundary", False, "EAGLE cb7e0841 traineagle3/cnets.py"),
    )
}
SPECULATORS_HOOK_AFTER = ("0.3", "0.4")  # data generation took {3, N//2+1, N-2} and stored nothing


def lookup(config: Mapping[str, Any], place: str) -> Any:
    """config["a"]["b"] for "a.b"; None where it is absent, not a mapping, or no place was named."""
    if not place:
        return None
    value: Any = config
    for part in place.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def dialect_of(config: Mapping[str, Any], names: str) -> Dialect:
    """Which trainer wrote this: the config's shape first, then the tensor names."""
    if "speculators_config" in config or LAYER in config:
        return DIALECTS["speculators"]
    if names == "model.layers.0" or config.get("architectures") == ["LlamaEagle3DraftModel"]:
        return DIALECTS["automodel"]
    if isinstance(config.get("eagle_config"), Mapping):
        return DIALECTS["modelopt" if names == "layers.0" else "specforge"]
    if "target_model_type" in config:
        return DIALECTS["angelslim"]
    return DIALECTS["safeailab"]


def doubts(config: Mapping[str, Any], dialect: Dialect) -> dict[str, str]:
    """Fields of this config whose meaning its dialect does not settle; `convert` notes whose they were."""
    origin = lookup(config, "kitlib.converted_from") or dialect.name
    return {n: why for n, why in dialect.doubts.items() if config.get(n) is not None and origin == dialect.name}


def malformed(config: Mapping[str, Any]) -> str:
    """What makes the whole config unreadable, in one sentence: a table of fields that is none; or ""."""
    for name in TABLES:
        if name in config and not isinstance(config[name], Mapping) and (config[name] is not None or name == LAYER):
            kind = {str: "a string", list: "a list", type(None): "null", bool: "a boolean"}
            return f"{name} in config.json is {kind.get(type(config[name]), 'a number')}, not a table of fields"
    return ""


def read_rope(config: Mapping[str, Any]) -> tuple[Rope, str]:
    """Rope in either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    inner = config.get(LAYER)
    inner = inner if isinstance(inner, Mapping) else config
    raw = inner.get("rope_parameters")
    where = "rope_parameters" if isinstance(raw, Mapping) else "rope_theta"
    scaling = raw if isinstance(raw, Mapping) else inner.get("rope_scaling")
    scaling = dict(scaling) if isinstance(scaling, Mapping) else {}
    theta = scaling.pop("rope_theta", inner.get("rope_theta"))
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    partial = number(scaling.pop("partial_rotary_factor", inner.get("partial_rotary_factor")))
    scaling.pop("type", None)
    items = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items()))
    source = f"config: {where}" if theta is not None else "default: 10000"
    return Rope(number(theta) or 10_000.0, str(kind), partial or 1.0, items), source


def number(value: Any) -> float | None:
    """A positive number of a sensible size, else None: configs hold strings, nulls and NaN."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 < value < 1e30
    return float(value) if good else None
