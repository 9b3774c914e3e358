"""Switches: the changes of wiring that a search tries, one at a time and two together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .contract import Contract, Wiring, default_boundaries, parameter_shapes

MATRICES = tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo") + tuple(
    f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
)
NORMS = tuple(f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
Switch = Callable[[Wiring], Wiring]


def _shift(by: int) -> Switch:
    return lambda w: w.but(boundaries=tuple(b + by for b in w.boundaries))


def _order(*places: int) -> Switch:
    return lambda w: w.but(boundaries=tuple(w.boundaries[p] for p in places)) if len(w.boundaries) == 3 else w


def _dropped(*names: str) -> Switch:
    return lambda w: w.but(dropped=(*w.dropped, *(n for n in names if n not in w.dropped)))


SWITCHES: dict[str, Switch] = {
    "fc-bypass-config": lambda w: w.but(capture="final", fc=False),
    "fc-bypass-eagle": lambda w: w.but(capture="final", fc=False, head_source="target", d2t="identity", logit_cut=True),
    "layer-dropped": _dropped(*MATRICES, *NORMS),
    "attention-dropped": _dropped(*MATRICES[:4]),
    "mlp-dropped": _dropped(*MATRICES[4:]),
    "norms-dropped": _dropped(*NORMS, "norm.weight"),
    "fc-dropped": _dropped("fc.weight"),
    "head-dropped": _dropped("lm_head.weight"),
    "block-order": _order(2, 1, 0),
    "blocks-rotated": _order(1, 2, 0),
    "low-and-middle-swapped": _order(1, 0, 2),
    "ids-minus-one": _shift(-1),
    "ids-plus-one": _shift(1),
    "features-normed": lambda w: w.but(capture="normed"),
    "features-zeroed": lambda w: w.but(capture="zeros"),
    "residual-other": lambda w: w.but(residual="hidden" if w.residual == "normed" else "normed"),
    "feedback-other": lambda w: w.but(feedback="pre-norm" if w.feedback == "post-norm" else "post-norm"),
    "input-norm-off": lambda w: w.but(norm_before_fc=False),
    "fc-norm-off": lambda w: w.but(fc_norm=False),
    "later-norm-other": lambda w: w.but(later_norm="hidden_norm" if w.later_norm[0] == "i" else "input_layernorm"),
    "embedding-of-target": lambda w: w.but(embed_source="target"),
    "head-of-target": lambda w: w.but(head_source="target", logit_cut=True),
    "tied-head": lambda w: w.but(head_source="embedding", logit_cut=True),
    "d2t-absent": lambda w: w.but(d2t="identity"),
    "d2t-absolute": lambda w: w.but(d2t="doubled"),
    "rope-theta": lambda w: w.but(rope=type(w.rope)(10_000.0)),
    "token-not-shifted": lambda w: w.but(token_shift=0),
}


def candidates(trained: Wiring, contract: Contract, depth: int) -> dict[str, Wiring]:
    """The trained wiring and every single switch that changes it and can run."""
    found = {"as trained": trained, "default-boundaries": trained.but(boundaries=default_boundaries(depth))}
    found |= {name: switch(trained) for name, switch in SWITCHES.items()}
    return {n: w for n, w in found.items() if n == "as trained" or (w != trained and runs(w, contract, depth))}


def both(singles: Mapping[str, Wiring], known: Iterable[Wiring], contract: Contract, depth: int) -> dict[str, Wiring]:
    """Every second switch on each of these; none of `known`, none twice, and none that the first leaves unread."""
    found, seen = {}, set(known)
    for one, wiring in singles.items():
        for name, switch in SWITCHES.items():
            two = switch(wiring)
            two = two.but(boundaries=wiring.boundaries) if two.capture == "final" else two
            if one == "as trained" or not runs(two, contract, depth):
                continue
            read = parameter_shapes(contract, two)
            two = two.but(dropped=tuple(n for n in two.dropped if n in read))
            if two not in seen:
                found[f"{one} + {name}"] = two
                seen.add(two)
    return found


def runs(wiring: Wiring, contract: Contract, depth: int) -> bool:
    """Whether states, widths and tensors allow this wiring, and it is no other one in disguise."""
    low = wiring.capture == "normed"
    inside = all(0 <= b <= depth - low for b in wiring.boundaries)
    one = wiring.capture == "final" or len(wiring.boundaries) == 1
    fits = wiring.fc or (one and contract.target_hidden == contract.hidden)
    embeds = wiring.embed_source == "own" or contract.target_hidden == contract.hidden
    later = contract.layers > 1 or wiring.later_norm == "input_layernorm"
    return inside and fits and embeds and later and (wiring.d2t == "identity" or "d2t" in contract.has)
