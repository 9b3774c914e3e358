"""The contract of one drafter: sizes and conventions from config.json and the shapes, each with its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import Checkpoint
from ..findings import KitError
from .dialects import PLACES, SPECULATORS_HOOK_AFTER, Dialect, dialect_of, lookup, malformed, number, read_rope
from .target import TargetInfo
from .wiring import Rope, Wiring, default_boundaries

AS_DEFAULT = ", as they equal the common default"  # ids that spell it in the other convention: most likely that

MOST, LAYERS = 1 << 40, 1024  # beyond these no size and no depth is believed


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
    latent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tensors of latent attention (MLA), as stored
    contradictions: tuple[str, ...] = ()  # config against shapes, one sentence each
    malformed: str = ""  # why the config as a whole cannot be read; nothing is then to be concluded from it
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
        own_head = "lm_head.weight" in self.has or (not self.tie and self.draft_vocab < self.vocab)
        return Wiring(
            boundaries=bounds,
            capture="boundaries" if self.use_aux else "final",
            fc=self.use_aux,
            norm_before_fc=self.norm_before_fc,
            fc_norm=self.fc_norm,
            residual="normed" if self.norm_before_residual else "hidden",
            feedback="post-norm" if self.norm_output else "pre-norm",
            embed_source="own" if "embed_tokens.weight" in self.has else "target",
            head_source="own" if own_head else "embedding" if self.tie else "target",
            d2t="offset" if "d2t" in self.has else "identity",
            rope=self.rope,
        )


def _resolve(checkpoint: Checkpoint, target: TargetInfo | None) -> Contract:
    config = checkpoint.config
    shapes = {c: t.shape for name, t in checkpoint.tensors.items() if (c := checkpoint.canonical(name))}
    marks = ("fc.weight", "layers.0.hidden_norm.weight")  # a language model has neither
    if not any(m in shapes for m in marks) and "draft_vocab_size" not in config:
        raise KitError(f"{checkpoint.path} holds no EAGLE-3 drafter: no fc and no hidden_norm among its tensors.")
    dialect = dialect_of(config, checkpoint.dialect)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, places in PLACES.items():
        for place in places:
            if (value := lookup(config, place)) is not None:
                values[name], sources[name] = value, f"config: {place}"
                break
    contradictions: list[str] = []

    def size(name: str, from_shape: int | None, tensor: str, default: int | None = None, most: int = MOST) -> int:
        """The shape wins over the config; their disagreement is kept."""
        said = values.get(name)
        if said is not None and (type(said) is not int or not 0 < said <= most):
            contradictions.append(f"{sources[name]} is {said!r}, not a positive number of a sensible size")
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
    listed = isinstance(ids, list) and 0 < len(ids) <= LAYERS and all(type(i) is int and 0 <= i <= LAYERS for i in ids)
    if ids is not None and not listed:
        contradictions.append(f"{sources['ids']} is {ids!r}, not a list of layer ids")
        ids = None
    if fused and fused > LAYERS * target_hidden:
        contradictions.append(f"fc.weight takes {fused} features, more than any target's states of {target_hidden}")
        fused = None
    aux = fused // target_hidden if fused and fused % target_hidden == 0 else (len(ids) if ids else 3)
    sources["aux_states"] = "shape: fc.weight" if fused else "config: ids" if ids else "default"
    if fused and fused % target_hidden:
        contradictions.append(f"fc.weight takes {fused} features, no multiple of the target's hidden {target_hidden}")
    if ids and fused and len(ids) != aux:
        contradictions.append(f"{sources['ids']} names {len(ids)} layers, fc.weight takes {aux} states")
    heads = size("heads", None, "", max(1, hidden // 64))
    head_dim = size("head_dim", None, "", max(1, hidden // heads))
    latent = _latent(shapes)
    q_rows, k_rows = dim(first + "self_attn.q_proj.weight", 0), dim(first + "self_attn.k_proj.weight", 0)
    if q_rows and q_rows != heads * head_dim and not latent:
        contradictions.append(f"q_proj has {q_rows} rows, the config says {heads} heads of {head_dim}")
    kv_heads = size("kv_heads", k_rows // head_dim if k_rows and k_rows % head_dim == 0 else None, "k_proj", heads)
    indices = {c.split(".")[1] for c in shapes if c.startswith("layers.")}
    rope, sources["rope"] = read_rope(config)
    version = str(values.get("trainer_version", ""))
    flags = {n: bool(values.get(n, False)) for n in ("norm_before_fc", "norm_output", "tie")}
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    residual = values.get("norm_before_residual")
    if residual is None:
        residual = dialect.norm_before_residual
        sources["norm_before_residual"] = f"default of the {dialect.name} dialect"
    return Contract(
        dialect=dialect,
        architecture=architecture,
        hidden=hidden,
        target_hidden=target_hidden,
        vocab=size("vocab", None, "", (target.vocab if target else dim("lm_head.weight", 0))),
        draft_vocab=size(
            "draft_vocab", dim("lm_head.weight", 0), "lm_head.weight", int(number(values.get("vocab")) or 0) or None
        ),
        aux_states=aux,
        layers=size("layers", len(indices) or None, "layers.*", 1, LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size("intermediate", dim(first + "mlp.gate_proj.weight", 0), "gate_proj", 4 * hidden),
        eps=number(values.get("eps")) or 1e-6,
        rope=rope,
        max_positions=int(number(values.get("max_positions")) or 0) or None,
        ids=tuple(ids) if ids else None,
        boundaries=_boundaries(ids, str(values.get("id_meaning") or dialect.ids), dialect, version, target, sources),
        use_aux=values.get("use_aux") is not False,
        norm_before_residual=bool(residual),
        fc_norm=bool(values.get("fc_norm")) or any(c.startswith("fc_norm.") for c in shapes),
        has=frozenset(shapes),
        sources=sources,
        latent=latent,
        contradictions=tuple(contradictions),
        malformed=malformed(config),
        verifier=str(values.get("verifier") or ""),
        trainer_version=version,
        **flags,
    )


def _latent(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a latent attention (DeepSeek, Kimi-K2); (0,) where the file lacks one it needs."""
    p = "layers.0.self_attn."
    if f"{p}kv_a_proj_with_mqa.weight" not in shapes:
        return {}
    query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if f"{p}q_proj.weight" not in shapes else ("q_proj",)
    names = [f"{p}{n}.weight" for n in (*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")]
    return {n: shapes.get(n, (0,)) for n in names}


def _boundaries(
    ids: list[int] | None,
    meaning: str,  # "boundary" | "layer-output"
    dialect: Dialect,
    version: str,
    target: TargetInfo | None,
    sources: dict[str, str],
) -> tuple[int, ...] | None:
    """Ids in their convention to boundaries; the common default where a trainer stores none."""
    if ids is not None:
        why, shift = "", int(meaning == "layer-output")
        if target is not None and "id_meaning" not in sources:
            if shift and max(ids) == target.layers:
                why, shift = ", as no layer has the last number", 0
            elif tuple(i - shift + 1 for i in ids) == default_boundaries(target.layers):
                why, shift = AS_DEFAULT, 1 - shift
        sources["boundaries"] = f"{sources['ids']}, read as {'layer-output' if shift else 'boundary'} ids{why}"
        return tuple(i + shift for i in ids)
    if dialect.name == "speculators" and version.startswith(SPECULATORS_HOOK_AFTER):
        sources["boundaries"] = f"not stored by speculators {version}"
        return None
    if target is None:
        sources["boundaries"] = "not stored; the default needs the target's depth"
        return None
    sources["boundaries"] = f"default for {target.layers} layers"
    return default_boundaries(target.layers)


def parameter_shapes(contract: Contract, wiring: Wiring) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter that runs under this wiring (d2t apart)."""
    c, shapes = contract, {}
    h, q, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    if wiring.fc:
        shapes["fc.weight"] = (h, c.aux_states * c.target_hidden)
        if "fc.bias" in c.has:
            shapes["fc.bias"] = (h,)
        if wiring.norm_before_fc:
            shapes["input_norm.weight"] = (c.aux_states * c.target_hidden,)
        if wiring.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (c.target_hidden,) for i in range(c.aux_states)}
    for i in range(c.layers):
        p, width = f"layers.{i}.", 2 * h if i == 0 else h
        if c.latent:
            shapes |= {n.replace("layers.0.", p): shape for n, shape in c.latent.items()}
        else:
            shapes |= {p + f"self_attn.{n}_proj.weight": (rows, width) for n, rows in (("q", q), ("k", kv), ("v", kv))}
            shapes[p + "self_attn.o_proj.weight"] = (h, q)
        shapes |= {p + f"mlp.{n}_proj.weight": (c.intermediate, h) for n in ("gate", "up")}
        shapes[p + "mlp.down_proj.weight"] = (h, c.intermediate)
        norms = ("input_layernorm", "hidden_norm") if i == 0 else (wiring.later_norm,)
        shapes |= {p + f"{n}.weight": (h,) for n in (*norms, "post_attention_layernorm")}
    shapes["norm.weight"] = (h,)
    if wiring.head_source == "own":
        shapes["lm_head.weight"] = (c.draft_vocab, h)
    if wiring.embed_source == "own":
        shapes["embed_tokens.weight"] = (c.vocab, h)
    return shapes
