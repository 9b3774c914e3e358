"""Features compared: what arrives against what training read, at every level, and what kind of difference it is.

A cosine alone misses a scale, a norm alone misses a rotation, and deep neighbouring layers reach cosine 0.98. So
every block that arrives is fitted to every state of the target, and judged by its error over a measured noise floor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .acceptance import Acceptance, walk
from .contract import Wiring
from .diagnose import Session
from .divergence import MARGIN, error, stages
from .features import States, Target, Text, compare
from .findings import Evidence, Finding, KitError

TOKENS = 1024  # rows that a fit reads; more change nothing
WIDTH_COLUMNS = ("name", "width that arrives", "embedding", "fc runs", "top-1 agreement", "accept length")
LEVELS = ("features", "after fc", "after the layers", "logits")


@dataclass(frozen=True)
class Fit:
    """Which of the target's states one block of arriving features is, and how well it fits."""

    block: int
    trained: int  # the boundary that training read here
    boundary: int  # the one that fits best
    form: str  # "pre-norm", or "post-norm": through the norm of the block that reads it
    ratio: float  # |arriving| / |state|
    cosine: float
    error: float  # |arriving - ratio * state| / |arriving|, a mean over tokens
    rotation: float | None = None  # of a block that no state explains: what no orthogonal map explains, as a share

    def row(self) -> dict[str, Any]:
        where = {"block": self.block, "trained boundary": self.trained, "best fit": self.boundary, "form": self.form}
        return where | {k: getattr(self, k) for k in ("ratio", "cosine", "error", "rotation")}


def noise_floor(target: Target, text: Text, dtype: str = "") -> float:
    """The error between two computations of the same states, over all boundaries: what no comparison can see below.

    In the target's own dtype the second computation is of the first half of the text alone, which is equal but for
    rounding. In another one (the dtype of a dump) it is of a copy of the target.
    """
    depth = range(len(target.layers) + 1)
    whole = target.states(text, depth).boundaries
    if dtype in ("", target.dtype):
        half = Text(text.ids[: max(2, len(text.ids) // 2)], 0, 0)
        again = target.states(half, depth).boundaries
    else:
        model = copy.deepcopy(target.model).to(getattr(torch, dtype))
        again = Target(model, target.tokenizer, target.info).states(text, depth).boundaries
    least = torch.finfo(again[0].dtype).eps * (2 * len(target.layers)) ** 0.5  # a rounding for each addition
    return max(least, *(error(again[b], whole[b][: len(again[b])]) for b in depth))


def every_state(target: Target, texts: Sequence[Text]) -> list[States]:
    """All boundaries of some texts, pre-norm and post-norm, until TOKENS rows are there."""
    depth, found, rows = range(len(target.layers) + 1), [], 0
    for text in texts:
        if rows >= TOKENS:
            break
        found.append(target.states(text, depth, depth))
        rows += len(text.ids)
    return found


def fit(
    arriving: Tensor,  # [tokens, blocks*Ht], over the texts of `states`
    states: Sequence[States],  # of `every_state`
    trained: Sequence[int],  # the boundaries that training concatenated
    floor: float,  # of `noise_floor`
) -> list[Fit]:
    """The best fit of every block over all boundaries and both forms. One block is compared with the first."""
    width = states[0].final.shape[-1]
    if arriving.shape[-1] % width or len(arriving) != sum(len(s.text.ids) for s in states):
        shape = f"{list(arriving.shape)} features do not fit {sum(len(s.text.ids) for s in states)} tokens of {width}"
        raise KitError(f"{shape}; pass the features of the same texts and of this target.")
    candidates = {
        (form, b): torch.cat([getattr(s, key)[b] for s in states]).double()
        for form, key in (("pre-norm", "boundaries"), ("post-norm", "normed"))
        for b in getattr(states[0], key)
    }
    found = []
    for block, x in enumerate(arriving.double().split(width, -1)):
        scaled = {key: _scaled(x, y) for key, y in candidates.items()}
        form, boundary = min(scaled, key=lambda key: scaled[key][1])
        ratio, least = scaled[form, boundary]
        cosine = compare(x, candidates[form, boundary])["cosine"]
        expected = trained[block] if block < len(trained) else -1
        turned = None
        if least > MARGIN * floor:
            turned = min(_procrustes(x, y) for (kind, _), y in candidates.items() if kind == "pre-norm")
        found.append(Fit(block, expected, boundary, form, ratio, cosine, least, turned))
    return found


def fit_wirings(session: Session, wirings: Mapping[str, Wiring]) -> tuple[dict[str, list[Fit]], float]:
    """What each block that a wiring feeds is, among all states of the target, and the noise floor to judge it by."""
    states, floor = every_state(session.target, session.texts), noise_floor(session.target, session.texts[0])
    arriving = {name: torch.cat([s.select(wiring) for s in states]) for name, wiring in wirings.items()}
    return {name: fit(x, states, session.trained.boundaries, floor) for name, x in arriving.items()}, floor


def fit_findings(fits: Sequence[Fit], floor: float) -> list[Finding]:
    """F301 (scale, pre- or post-norm), F302 (rotated, or no state of this target), F303 (other boundaries)."""
    line = MARGIN * floor
    same = [f for f in fits if f.error <= line]
    strange = [f for f in fits if f.error > line]
    text = " · ".join(
        f"block {f.block}: boundary {f.boundary} {f.form}, ratio {f.ratio:.4g}, error {f.error:.2g}" for f in fits
    )
    values = {"noise_floor": floor, "line": line, "fits": [f.row() for f in fits]}
    evidence = [Evidence("features", f"{text} · noise floor {floor:.2g}", values)]
    titles = {"F301": _scale(same, line), "F302": _rotated(strange, line), "F303": _places(same)}
    judged = {"F301": same, "F302": fits, "F303": same}
    found = []
    for code, title in titles.items():
        if title:
            found.append(Finding.of(code, title, evidence=evidence))
        elif judged[code]:
            found.append(Finding.of(code, status="pass", evidence=evidence))
        else:
            found.append(Finding.of(code, "no block is a state of this target", status="not-run"))
    return found


def _scale(same: Sequence[Fit], line: float) -> str:
    if normed := [f for f in same if f.form == "post-norm"]:
        return f"block {normed[0].block} arrives post-norm, training read it before the norm"
    wrong = [f for f in same if abs(f.ratio - 1) > max(line, 1e-3)]
    return (
        f"block {wrong[0].block} arrives {wrong[0].ratio:.4g} times as large, in the right direction" if wrong else ""
    )


def _rotated(strange: Sequence[Fit], line: float) -> str:
    if not strange:
        return ""
    one = strange[0]
    if one.rotation is not None and one.rotation <= max(line, 1e-3):
        return f"block {one.block} is a rotated copy of a state of this target (a rotated or re-based target)"
    near = f"boundary {one.boundary} comes nearest, with error {one.error:.2g}"
    return f"block {one.block} is no state of this target, whatever the boundary, scale or rotation; {near}"


def _places(same: Sequence[Fit]) -> str:
    moved = [f for f in same if f.boundary != f.trained and f.trained >= 0]
    if not moved:
        return ""
    got, meant = [f.boundary for f in same], [f.trained for f in same]
    if sorted(got) == sorted(meant):
        return f"the blocks arrive in another order: boundaries {got} where training concatenated {meant}"
    return f"boundaries {got} arrive, training read {meant}"


def _scaled(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The one scale that fits best (median over tokens), and the error that it leaves."""
    scale = ((x * y).sum(-1) / (y * y).sum(-1).clamp_min(1e-30)).median()
    left = (x - scale * y).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)
    return float(scale), float(left.mean())


def _procrustes(x: Tensor, y: Tensor) -> float:
    """The share of x that no orthogonal map of y explains, scale free: sqrt(1 - (|Y'X|* / (|X| |Y|))^2)."""
    unit = [m / m.norm(dim=-1, keepdim=True).clamp_min(1e-30) for m in (x, y)]
    a, b = (torch.linalg.qr(m.T, mode="r").R if len(m) < m.shape[-1] else None for m in unit)
    cross = a @ b.T if a is not None and b is not None else unit[0].T @ unit[1]
    aligned = float(torch.linalg.svdvals(cross).sum()) / len(x)
    return max(0.0, 1 - min(aligned, 1.0) ** 2) ** 0.5


@torch.inference_mode()
def compare_wirings(session: Session, wirings: Mapping[str, Wiring]) -> list[dict[str, Any]]:
    """Every wiring against the first one, level by level, over the answers of all texts; one row a wiring.

    `norm_ratio` and `cosine` are of the state that enters the decoder layer (after `fc`, where it runs). `same top-1`
    and `in top-5` compare the first draft with the first wiring's, `top-1 agreement` with the target's own token.
    """
    drafters = {name: session.load(wiring)[0] for name, wiring in wirings.items()}
    sums: dict[str, list[Tensor]] = {name: [] for name in wirings}
    rounds: dict[str, list] = {name: [] for name in wirings}
    for s in session.states(wirings.values()):
        ids = torch.tensor(s.text.ids, device=session.target.device)
        answer, first = slice(s.text.prompt - 1, s.text.prompt + s.text.limit - 2), None
        truth = ids[answer.start + 2 : answer.stop + 2]
        for name, drafter in drafters.items():
            found = stages(drafter, s.select(drafter.wiring).to(ids.device), ids, session.steps)
            first = first or found
            drafts, best = found["drafts"][answer], found["logits"][answer].topk(min(5, found["logits"].shape[-1]))[1]
            meant = first["drafts"][answer]
            hits = [drafts == meant, (drafter.to_target(best) == meant[:, None]).any(-1), drafts == truth]
            likeness = [_likeness(found[level][answer], first[level][answer]) for level in LEVELS]
            sums[name].append(torch.stack([*(h.double().sum().cpu() for h in hits), *torch.cat(likeness)]))
            chain = torch.stack([tokens for key, tokens in found.items() if key.startswith("drafts")], -1)
            rounds[name].append(walk(chain[s.text.prompt - 1 :].tolist(), s.text))
    rows = []
    for name, drafter in drafters.items():
        same, five, right, *rest = torch.stack(sums[name]).sum(0).tolist()
        tokens = max(sum(s.text.limit - 1 for s in session.states()), 1)
        width = (
            len(drafter.wiring.boundaries) if drafter.wiring.capture != "final" else 1
        ) * session.contract.target_hidden
        row = {"name": name, "width that arrives": width, "embedding": session.contract.hidden}
        row |= {"fc runs": drafter.wiring.fc}
        for i, level in enumerate(LEVELS):
            ours, theirs, cosine = rest[3 * i : 3 * i + 3]
            keys = ("norm_ratio", "cosine") if level == "after fc" else (f"{level}: ratio", f"{level}: cosine")
            row |= dict(zip(keys, (ours / theirs, cosine / tokens) if theirs else (None, None), strict=True))
        row |= {"same top-1": same / tokens, "in top-5": five / tokens, "top-1 agreement": right / tokens}
        rows.append(row | {"accept length": Acceptance(tuple(rounds[name]), session.steps).accept_length})
    return rows


def _likeness(a: Tensor, b: Tensor) -> Tensor:  # both [tokens, width] -> [3]
    """Sums over tokens of |a|, |b| and the cosine; zeros where the widths differ, as nothing can be said."""
    if a.shape != b.shape:
        return torch.zeros(3, dtype=torch.double)
    a, b = a.double(), b.double()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    return torch.stack([a.norm(dim=-1).sum(), b.norm(dim=-1).sum(), cosine.sum()]).cpu()


def feature_findings(rows: Sequence[dict], name: str) -> list[Finding]:
    """K133 for one row of `compare_wirings`: whether `fc` ran on what arrived."""
    row = next(r for r in rows if r["name"] == name)
    arrives = f"{row['width that arrives']} features arrive, the embedding has {row['embedding']}"
    text = f"{arrives} · norm ratio {row['norm_ratio']:.3f} · cosine {row['cosine']:.3f}"
    evidence = [Evidence("features", text, dict(row))]
    if not row["fc runs"]:
        return [Finding.of("K133", f"fc does not run: {arrives}", evidence=evidence)]
    return [Finding.of("K133", status="pass", evidence=evidence)]


def layer_findings(shifted: Mapping[str, Acceptance]) -> list[Finding]:
    """F303 where other boundaries accept more than the trained ones, by more than chance (paired by prompt)."""
    (name, reference), *others = shifted.items()
    gaps = {other: a.minus(reference) for other, a in others}
    text = " · ".join(f"{other}: {low:+.3f} to {high:+.3f}" for other, (low, high) in gaps.items())
    evidence = [Evidence("acceptance", f"accept length against {name}: {text}")]
    if better := [other for other, (low, _) in gaps.items() if low > 0]:
        return [Finding.of("F303", f"{better[0]} accepts more than {name}", evidence=evidence)]
    return [Finding.of("F303", status="pass", evidence=evidence)]
