"""Wiring search: which wiring explains what an engine accepted; single switches, then pairs, each replayed.

Evidence comes in three strengths. Rounds prompt by prompt, on the same prompts in float32, are matched exactly. A
histogram, or totals alone, give a likelihood, and wirings that they cannot tell apart are reported as a set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .acceptance import Acceptance
from .contract import Contract, Wiring, default_boundaries
from .diagnose import Session
from .findings import Evidence, Finding, KitError, read_bounded

MATRICES = tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo") + tuple(
    f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
)
NORMS = tuple(f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
LARGEST, ROUNDS = 1 << 24, 1 << 22  # bytes of a file of observations; rounds that it may tell one by one
DEEPEST = 256  # drafts that one round may accept
BEAM, KEEP, FIRST = 5, 10, 4  # pairs are built on so many; singles that see all prompts; prompts of the first look
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


@dataclass(frozen=True)
class Observed:
    """What an engine accepted. `rounds` are sorted within a prompt where the engine tells a histogram a request."""

    rounds: tuple[tuple[int, ...], ...] = ()  # [prompt][round]; empty where only totals are known
    histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, 2 … drafts
    accepted: int = 0
    verified: int = 0

    @classmethod
    def of(cls, acceptance: Acceptance, strength: str = "rounds") -> Observed:
        """From a measurement, as strong as asked: rounds, histogram or totals."""
        rounds = tuple(tuple(sorted(r)) for r in acceptance.rounds) if strength == "rounds" else ()
        counted = tuple(acceptance.histogram) if strength != "totals" else ()
        return cls(rounds, counted, acceptance.accepted, acceptance.verified)

    @classmethod
    def read(cls, path: str | Path) -> Observed:
        """From the JSON of `bench`, or {"rounds"}, {"histogram"} or {"accepted", "verified"}."""
        try:
            raw = json.loads(read_bounded(path, LARGEST, "counts"))
            raw = raw.get("bench", raw)
            each = [r["counts"]["histogram"] for r in sorted(raw.get("requests") or (), key=lambda r: r["prompt"])]
            if sum(sum(_counts(h)) for h in each) > ROUNDS:
                raise ValueError("there are too many of them")
            given = raw.get("rounds") or [[k for k, n in enumerate(h) for _ in range(n)] for h in each]
            rounds = tuple(tuple(sorted(_counts(r, DEEPEST))) for r in given)
            flat = [k for r in rounds for k in r]
            counted = _counts(np.bincount(flat).tolist() if flat else raw.get("histogram") or [])
            a, v = sum(k * n for k, n in enumerate(counted)), sum(counted)
            told = _counts([raw.get("accepted", a), raw.get("verified", v)], 1 << 40)
            if counted and told != (a, v):
                raise ValueError(f"its histogram has {a} accepted in {v} rounds, beside it stands {told}")
            found = cls(rounds, counted, *told)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = str(error)[:100] or type(error).__name__
            raise KitError(f"{path} tells no rounds, histogram, or accepted and verified ({reason}).") from None
        if found.verified < 1 or found.accepted < 0:
            raise KitError(f"{path} tells no verify round, so nothing can be explained.")
        return found


def _counts(values: Any, most: int = 1 << 24) -> tuple[int, ...]:
    """Whole numbers from 0 to `most`; ValueError for anything else."""
    if not isinstance(values, (list, tuple)) or any(type(x) is not int or not 0 <= x <= most for x in values):
        raise ValueError("counts are whole numbers of 0 or more")
    if len(values) > LARGEST:
        raise ValueError("there are too many of them")
    return tuple(values)


@dataclass(frozen=True)
class Ranked:
    """One wiring against what was observed."""

    name: str
    wiring: Wiring
    acceptance: Acceptance
    equal: int | None  # prompts whose rounds are the same; None where rounds are not known
    likelihood: float  # natural logarithm, as if rounds were independent

    @property
    def key(self) -> tuple[int, float]:
        return (self.equal or 0, self.likelihood)


@dataclass(frozen=True)
class Explanation:
    """The ranking, best first; `alike`: names that the evidence cannot tell from the best (95 %)."""

    ranked: tuple[Ranked, ...]
    alike: tuple[str, ...]
    exact: bool  # the best one gives every prompt's rounds
    cluster: float = 1.0  # rounds that count as one, as rounds of one prompt are alike

    def odds(self, name: str) -> float:
        """How many times likelier the best one is than this."""
        other = next(r for r in self.ranked if r.name == name)
        best = max(r.likelihood for r in self.ranked)
        return math.exp(min(700.0, (best - other.likelihood) / self.cluster))

    def rows(self, most: int = 10) -> list[dict[str, Any]]:
        """For a table: accept length with interval, equal prompts, odds of the best one over it."""
        return [
            {
                "wiring": r.name,
                "accept_length": r.acceptance.accept_length,
                "interval": "{:.2f}-{:.2f}".format(*r.acceptance.interval()),
                "prompts equal": r.equal,
                "best over it": f"{self.odds(r.name):.3g} : 1",
                "_status": "pass" if r.name in self.alike else "",
            }
            for r in self.ranked[:most]
        ]


def candidates(trained: Wiring, contract: Contract, depth: int) -> dict[str, Wiring]:
    """The trained wiring and every single switch that changes it and can run."""
    found = {"as trained": trained, "default-boundaries": trained.but(boundaries=default_boundaries(depth))}
    found |= {name: switch(trained) for name, switch in SWITCHES.items()}
    return {n: w for n, w in found.items() if n == "as trained" or (w != trained and runs(w, contract, depth))}


def runs(wiring: Wiring, contract: Contract, depth: int) -> bool:
    """Whether states, widths and tensors allow this wiring."""
    low = wiring.capture == "normed"
    inside = all(0 <= b <= depth - low for b in wiring.boundaries)
    fits = wiring.fc or contract.target_hidden == contract.hidden
    embeds = wiring.embed_source == "own" or contract.target_hidden == contract.hidden
    return inside and fits and embeds and (wiring.d2t == "identity" or "d2t" in contract.has)


def search(
    session: Session,
    observed: Observed,
    *,
    pairs: bool = True,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Explanation:
    """Rank the single switches, then pairs on the best of them; it stops where rounds are matched exactly.

    A first look at a few prompts leaves the less likely half behind. KitError where other prompts were observed.
    """
    if observed.rounds and len(observed.rounds) != len(session.texts):
        raise KitError(
            f"{len(observed.rounds)} prompts were observed, {len(session.texts)} are replayed; use the same."
        )
    deepest = max((k for k, n in enumerate(observed.histogram) if n), default=0)
    if deepest > session.steps or observed.accepted > session.steps * observed.verified:
        raise KitError(f"More drafts were accepted in a round than {session.steps} steps can give; name the steps.")
    depth, contract = session.target.info.layers, session.contract
    singles = candidates(session.trained, contract, depth)
    states = session.states(singles.values())
    few = len(session.texts) if len(session.texts) < 3 * FIRST else max(FIRST, len(session.texts) // 4)
    start = replace(session, texts=session.texts[:few], _states=states[:few], _held=set(session._held))
    part = replace(observed, rounds=observed.rounds[:few])
    if observed.rounds:
        part = Observed.of(Acceptance(part.rounds, session.steps))
    look = _rank(start, part, singles, progress) if few < len(session.texts) else ()
    kept = {r.name for r in look[: max(KEEP, len(look) // 2)]} | {"as trained"} if look else set(singles)
    ranked = _rank(session, observed, {n: w for n, w in singles.items() if n in kept}, progress)
    if pairs and not _exact(ranked, observed):
        both = {}
        for one in ranked[:BEAM]:
            for name, switch in SWITCHES.items():
                wiring = switch(one.wiring)
                fresh = wiring not in (r.wiring for r in ranked) and wiring not in both.values()
                if one.name != "as trained" and fresh and runs(wiring, contract, depth):
                    both[f"{one.name} + {name}"] = wiring
        session.states(both.values())
        held = replace(session, texts=session.texts[:few], _states=session._states[:few], _held=set(session._held))
        look = _rank(held, part, both, progress)
        best = {r.name: r.wiring for r in look[:KEEP]}
        ranked = tuple(sorted((*ranked, *_rank(session, observed, best, progress)), key=lambda r: r.key, reverse=True))
    exact = _exact(ranked, observed)
    cluster = _cluster(ranked)
    alike = [r.name for r in ranked if r.equal == len(observed.rounds)] if exact else _alike(ranked, cluster)
    return Explanation(ranked, tuple(alike), exact, cluster)


def _rank(
    session: Session, observed: Observed, wirings: Mapping[str, Wiring], progress: Callable[[Iterable], Iterable]
) -> tuple[Ranked, ...]:
    found = []
    for name, wiring in progress(list(wirings.items())):
        acceptance = session.measure(wiring)
        equal = None
        if observed.rounds:
            equal = sum(tuple(sorted(a)) == b for a, b in zip(acceptance.rounds, observed.rounds, strict=True))
        found.append(Ranked(name, wiring, acceptance, equal, _likelihood(acceptance, observed)))
    return tuple(sorted(found, key=lambda r: r.key, reverse=True))


def _exact(ranked: Sequence[Ranked], observed: Observed) -> bool:
    return bool(observed.rounds) and ranked[0].equal == len(observed.rounds)


def _likelihood(acceptance: Acceptance, observed: Observed) -> float:
    """Logarithm of the probability of what was observed, if rounds were independent."""
    share = _share(acceptance)
    if observed.histogram:
        seen = np.zeros(len(share))
        for k, n in enumerate(observed.histogram):
            seen[min(k, len(share) - 1)] += n
        return float(seen @ np.log(share))
    gap, spread = observed.accepted / observed.verified - float(share @ np.arange(len(share))), _spread(share)
    return -0.5 * gap**2 * observed.verified / spread - 0.5 * math.log(spread)


def _share(acceptance: Acceptance) -> np.ndarray:
    """Probability of accepting 0, 1, 2 … drafts; what never occurred counts as half a round."""
    counts = np.array(acceptance.histogram, dtype=float)
    return (counts + 0.5) / (counts.sum() + 0.5 * len(counts))


def _spread(share: np.ndarray) -> float:
    levels = np.arange(len(share))
    return float(share @ levels**2 - (share @ levels) ** 2)


def _cluster(ranked: Sequence[Ranked]) -> float:
    """How many rounds count as one, as those of a prompt are alike: the bootstrap's variance over that of free ones."""
    found = [1.0]
    for r in ranked:
        if r.acceptance.verified:
            low, high = r.acceptance.interval()
            found.append(((high - low) / 3.92) ** 2 * r.acceptance.verified / _spread(_share(r.acceptance)))
    return max(1.0, float(np.median(found)))


def _alike(ranked: Sequence[Ranked], cluster: float) -> list[str]:
    """The smallest set that holds 95 % of the probability, all wirings being equally likely before."""
    order = sorted(ranked, key=lambda r: r.likelihood, reverse=True)
    weight = np.exp([(r.likelihood - order[0].likelihood) / cluster for r in order])
    enough = int(np.searchsorted(np.cumsum(weight) / weight.sum(), 0.95)) + 1
    return [r.name for r in order[:enough]]


def search_findings(found: Explanation) -> list[Finding]:
    """M208: what explains the engine's acceptance, if the trained wiring does not."""
    best = found.ranked[0]
    others = len(found.alike) - 1
    how = (
        "gives every prompt's rounds exactly" if found.exact else f"explains it best; {others} others do as well (95 %)"
    )
    text = f"{best.name} {how}: accept length {best.acceptance.accept_length:.3f}"
    values = {"alike": list(found.alike), "exact": found.exact, "wiring": best.wiring.to_dict()}
    evidence = [Evidence("acceptance", text, values)]
    if "as trained" in found.alike and not found.exact and others:
        title = (
            f"the trained wiring is one of {len(found.alike)} that explain what was accepted; more rounds would tell"
        )
        return [Finding.of("M208", title, status="not-run", evidence=evidence)]
    if "as trained" in found.alike:
        return [Finding.of("M208", status="pass", evidence=evidence)]
    names = " or ".join(found.alike[:4])
    return [Finding.of("M208", f"the engine accepts what {names} accepts, not the trained wiring", evidence=evidence)]
