"""Wiring: how a drafter's tensors are put together, in training or in an engine.

A drafter's weights mean something only under the wiring they were trained with. An engine has its own, set by
its version, its flags and the config dialect it reads. `trained.diff(served)` names the suspects at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

CHOICES = {  # what each field may be; the defaults come first
    "capture": ("boundaries", "normed", "final", "zeros"),
    "fc": (True, False),
    "norm_before_fc": (False, True),
    "fc_norm": (False, True),
    "residual": ("hidden", "normed"),
    "feedback": ("pre-norm", "post-norm"),
    "later_norm": ("input_layernorm", "hidden_norm"),
    "embed_source": ("target", "own"),
    "head_source": ("own", "target", "embedding"),
    "d2t": ("offset", "identity", "absolute", "doubled"),
    "logit_cut": (False, True),
    "token_shift": (1, 0),
    "fill": ("random", "zeros"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base `theta`, type, share of each head that rotates, and the scaling's own numbers."""

    theta: float = 10_000.0
    type: str = "default"
    partial: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()  # sorted items, e.g. (("factor", 8.0),)


@dataclass(frozen=True)
class Wiring:
    """One way to run a drafter; see the field comments for what each value means.

    Boundary b is the residual stream after b target layers, before any final norm (b = 0: the embedding).
    """

    boundaries: tuple[int, ...]  # target states that are concatenated, in this order
    capture: str = "boundaries"  # boundaries | normed (by the norm of the next block) | final (post-norm) | zeros
    fc: bool = True  # fc applied to what arrives; False: bypassed
    norm_before_fc: bool = False  # one RMSNorm over the concatenation
    fc_norm: bool = False  # one RMSNorm for each concatenated state (EAGLE-3.1)
    residual: str = "hidden"  # hidden | normed: what the first residual connection carries
    feedback: str = "pre-norm"  # pre-norm | post-norm: the state that the next draft step receives
    later_norm: str = "input_layernorm"  # norm on the input of layers >= 1: input_layernorm | hidden_norm
    embed_source: str = "target"  # target | own
    head_source: str = "own"  # own | target | embedding (tied)
    d2t: str = (
        "offset"  # offset: i + d2t[i] | identity: i | absolute: d2t[i] | doubled: 2i + d2t[i] (ids read as offsets)
    )
    logit_cut: bool = False  # the head's logits are cut to the first draft_vocab ids
    rope: Rope = field(default_factory=Rope)
    position_base: int = 0  # position of the first row
    token_shift: int = 1  # state t is paired with the embedding of token t + shift
    embed_scale: float = 1.0
    dropped: tuple[str, ...] = ()  # canonical names of tensors that never arrive
    fill: str = "random"  # what dropped tensors hold: random (N(0, 0.02), norms one) | zeros

    def diff(self, other: Wiring) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as {name: (mine, theirs)}."""
        names = (f.name for f in fields(self))
        return {n: (a, b) for n in names if (a := getattr(self, n)) != (b := getattr(other, n))}

    def but(self, **changes: Any) -> Wiring:
        """The same wiring with these fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Wiring:
        """Inverse of `to_dict`, also after a round trip through JSON."""
        rope = dict(raw.get("rope", {}))
        rope["scaling"] = tuple((str(k), v) for k, v in rope.get("scaling", ()))
        values = {**raw, "rope": Rope(**rope), "boundaries": tuple(raw["boundaries"])}
        values["dropped"] = tuple(raw.get("dropped", ()))
        for name, allowed in CHOICES.items():
            if raw.get(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} is {raw[name]!r}, none of {', '.join(map(str, allowed))}")
        for name in ("boundaries", "dropped"):
            kind = int if name == "boundaries" else str
            if not isinstance(raw.get(name, []), list) or any(type(x) is not kind for x in values[name]):
                raise ValueError(f"{name} is {raw[name]!r}")
        if not values["boundaries"]:
            raise ValueError("boundaries is empty")
        return cls(**values)


def default_boundaries(layers: int) -> tuple[int, ...]:
    """The three boundaries that SGLang, vLLM and most trainers take when no ids are given: 2, N//2, N-3."""
    return (2, layers // 2, layers - 3)
