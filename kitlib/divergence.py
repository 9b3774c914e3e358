"""Two paths in lockstep, tensor by tensor, until the first real difference: trained and served, or another's code.

A difference is real above the noise of the arithmetic, which is measured and not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .acceptance import Chains
from .contract import Wiring
from .diagnose import Session
from .drafter import Drafter
from .findings import Evidence, Finding

MARGIN = 10.0  # a difference counts from this many times the noise floor


def error(a: Tensor, b: Tensor) -> float:  # both [tokens, width]
    """|a - b| / |b|, a mean over tokens, so that one huge token does not hide the others."""
    a, b = a.double(), b.double()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).mean())


@torch.inference_mode()
def stages(drafter: Drafter, features: Tensor, ids: Tensor, steps: int = 1) -> dict[str, Tensor]:
    """Every tensor between features and drafts, in the order of the computation, from all positions at once.

    `features` is [tokens, width], `ids` [tokens]; each value is [tokens - 1, …].
    """
    rows, shift, attend = len(ids) - 1, drafter.wiring.token_shift, Chains()
    tokens, states = ids[shift : shift + rows], features[:rows].to(drafter.target_embed.dtype)
    hidden = drafter.fuse(states)
    found = {"embedding": drafter.embed(tokens), "features": states, "after fc": hidden}
    for i in range(steps):
        nth = f" of step {i + 1}" if i else ""
        hidden = drafter.step(tokens, hidden, torch.arange(rows, device=ids.device) + i, attend)
        logits = drafter.logits(hidden)
        tokens = drafter.to_target(logits.argmax(-1))
        found |= {f"after the layers{nth}": hidden, f"logits{nth}": logits, f"drafts{nth}": tokens}
        hidden = drafter.feedback(hidden)
        found[f"feedback{nth}"] = hidden
    return found


def first_divergence(
    trained: Mapping[str, Tensor], served: Mapping[str, Tensor], floor: Mapping[str, float]
) -> tuple[list[dict[str, Any]], Finding]:
    """Two paths in lockstep, of `stages` or of another implementation; rows up to the first real difference, F304."""
    rows: list[dict[str, Any]] = []
    for name, a in trained.items():
        if (b := served.get(name)) is None:
            continue
        line = MARGIN * floor.get(name, 0.0)
        apart = _apart(a, b)
        rows.append({"tensor": name, "trained": list(a.shape), "served": list(b.shape), "error": apart, "line": line})
        if apart > line:
            widths = f"{a.shape[-1]} wide in training, {b.shape[-1]} served"
            sizes = widths if a.shape != b.shape else f"error {apart:.2g}"
            evidence = [Evidence("features", f"{name}: {sizes}; noise allows {line:.2g}", rows[-1])]
            return rows, Finding.of("F304", f"the paths part at: {name} ({sizes})", evidence=evidence)
    text = f"{len(rows)} tensors agree, up to {max((r['error'] for r in rows), default=0):.2g}"
    return rows, Finding.of("F304", status="pass", evidence=[Evidence("features", text)])


def stage_floor(drafter: Drafter, features: Tensor, ids: Tensor, steps: int = 1) -> dict[str, float]:
    """The noise of every stage: the first half of the text computed alone, against the same rows of the whole."""
    half = max(2, len(ids) // 2)
    whole, part = stages(drafter, features, ids, steps), stages(drafter, features[:half], ids[:half], steps)
    least = torch.finfo(drafter.target_embed.dtype).eps
    noise = {n: _apart(part[n], whole[n][: half - 1]) for n in whole}
    return {n: e if n.startswith("drafts") else max(e, least) for n, e in noise.items()}


def _apart(a: Tensor, b: Tensor) -> float:
    """Relative error; of token ids the share that differs; infinite where the shapes do."""
    if a.shape != b.shape:
        return float("inf")
    return error(b, a) if a.is_floating_point() else float((a != b).double().mean())


@torch.inference_mode()
def diverge(session: Session, served: Wiring, steps: int = 2) -> tuple[list[dict[str, Any]], Finding]:
    """`first_divergence` of a drafter as trained and as served, on the session's first text."""
    trained = session.trained
    states, paths, floor = session.states([trained, served])[0], {}, {}
    ids = torch.tensor(states.text.ids, device=session.target.device)
    for name, wiring in (("trained", trained), ("served", served)):
        drafter, _ = session.load(wiring)
        paths[name] = stages(drafter, states.select(wiring), ids, steps)
        floor = floor or stage_floor(drafter, states.select(wiring), ids, steps)
    return first_divergence(paths["trained"], paths["served"], floor)
