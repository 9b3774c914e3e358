"""Wiring search: which wiring explains what an engine accepted; single switches, then pairs, each replayed.

Evidence comes in three strengths. Rounds prompt by prompt, on the same prompts in float32, are matched exactly. So
are the tensors that an engine computed over one text. A histogram, acceptance by position, or totals alone give a
likelihood, and wirings that they cannot tell apart are reported as a set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .acceptance import Acceptance
from .contract import Wiring
from .diagnose import Session
from .divergence import MARGIN, error, stage_floor, stages
from .findings import Evidence, Finding, KitError
from .observed import Observed
from .switches import both, candidates

BEAM, KEEP, FIRST = 5, 10, 4  # pairs are built on so many; wirings that see all prompts; prompts of the first look


@dataclass(frozen=True)
class Ranked:
    """One wiring against what was observed, on the prompts that it was replayed on (all, or those of a look)."""

    name: str
    wiring: Wiring
    acceptance: Acceptance
    equal: int | None  # prompts whose rounds are the same; None where rounds are not known
    likelihood: float  # natural logarithm, as if rounds were independent


@dataclass(frozen=True)
class Explanation:
    """The ranking, best first; `alike`: names that the evidence cannot tell from the best (95 %)."""

    ranked: tuple[Ranked, ...]
    alike: tuple[str, ...]
    exact: bool  # the best one gives every prompt's rounds
    cluster: float = 1.0  # rounds that count as one, as rounds of one prompt are alike

    def odds(self, name: str) -> float:
        """How many times likelier the best one is than this: no fault, one and two are equally likely before."""
        weight = dict(zip((r.name for r in self.ranked), _posterior(self.ranked, self.cluster), strict=True))
        return math.exp(min(700.0, max(weight.values()) - weight[name]))

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


def search(
    session: Session,
    observed: Observed,
    *,
    pairs: bool = True,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Explanation:
    """Rank the single switches, then pairs; it stops where one alone matches the rounds of every prompt.

    A look at a few prompts decides what is replayed on all of them; the others keep what the look gave, which is
    less certain and counts as such. Pairs are built on the best five, then on the other single switches. KitError
    where other prompts were observed.
    """
    if observed.rounds and len(observed.rounds) != len(session.texts):
        raise KitError(
            f"{len(observed.rounds)} prompts were observed, {len(session.texts)} are replayed; use the same."
        )
    deepest = max((k for k, n in enumerate(observed.histogram) if n), default=0)
    if deepest > session.steps or observed.accepted > session.steps * observed.verified:
        raise KitError(f"More drafts were accepted in a round than {session.steps} steps can give; name the steps.")
    depth, contract, count = session.target.info.layers, session.contract, len(session.texts)
    singles = candidates(session.trained, contract, depth)
    few = count if count < 3 * FIRST else max(FIRST, count // 4)
    ranked = _halve(session, observed, singles, few, max(KEEP, len(singles) // 2), progress)
    for beam, enough in ((ranked[:BEAM], _alone), (ranked[BEAM:], _exact)) if pairs else ():
        if not enough(ranked, observed):
            known = [*singles.values(), *(r.wiring for r in ranked)]
            more = both({r.name: r.wiring for r in beam}, known, contract, depth)
            ranked = _sorted([*ranked, *_halve(session, observed, more, min(few, FIRST), KEEP, progress)])
    exact, cluster = _exact(ranked, observed), _cluster(ranked)
    alike = [r.name for r in ranked if r.equal == len(observed.rounds)] if exact else _alike(ranked, cluster)
    return Explanation(ranked, tuple(alike), exact, cluster)


def _halve(
    session: Session, observed: Observed, wirings: Mapping[str, Wiring], few: int, keep: int,
    progress: Callable[[Iterable], Iterable],
) -> tuple[Ranked, ...]:  # fmt: skip
    """These wirings on the first `few` prompts, and the `keep` best of them (and the trained one) on the rest too."""
    states = session.states(wirings.values() or [session.trained])

    def replayed(names: Iterable[str], part: slice) -> dict[str, Acceptance]:
        some = replace(session, texts=session.texts[part], _states=states[part], _held=set(session._held))
        return {name: some.measure(wirings[name]) for name in progress(list(names))}

    def rank(measured: Mapping[str, Acceptance]) -> tuple[Ranked, ...]:
        found = []
        for name, a in measured.items():
            equal = sum(tuple(sorted(x)) == y for x, y in zip(a.rounds, observed.rounds, strict=False))
            told = equal if observed.rounds else None
            found.append(Ranked(name, wirings[name], a, told, _likelihood(a, observed)))
        return _sorted(found)

    look = replayed(wirings, slice(0, few))
    if few == len(session.texts):
        return rank(look)
    best = {r.name for r in rank(look)[:keep]} | ({"as trained"} & set(wirings))
    rest = replayed(best, slice(few, None))
    whole = {n: Acceptance((*look[n].rounds, *a.rounds), session.steps) for n, a in rest.items()}
    return rank(look | whole)


def _sorted(found: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Best first: equal prompts, then the posterior."""
    found = list(found)
    weight = _posterior(found, _cluster(found)) if found else ()
    order = sorted(zip(found, weight, strict=True), key=lambda x: (x[0].equal or 0, x[1]), reverse=True)
    return tuple(r for r, _ in order)


def _exact(ranked: Sequence[Ranked], observed: Observed) -> bool:
    return bool(observed.rounds) and ranked[0].equal == len(observed.rounds)


def _alone(ranked: Sequence[Ranked], observed: Observed) -> bool:
    """Exact, while every other switch fails on half of the prompts; else rounds tell little, and pairs may fit."""
    return _exact(ranked, observed) and 2 * (ranked[1].equal or 0) <= len(observed.rounds)


def _likelihood(acceptance: Acceptance, observed: Observed) -> float:
    """Logarithm of the probability of what was observed, if rounds were independent.

    What was replayed is a sample too: the share of each outcome is known from so many rounds and no better.
    """
    counts = np.array(acceptance.histogram, dtype=float)
    if observed.histogram:
        seen, known = np.zeros(len(counts)), counts + 0.5
        for k, n in enumerate(observed.histogram):
            seen[min(k, len(counts) - 1)] += n
        gamma = np.vectorize(math.lgamma)
        total = gamma(known.sum()) - gamma(known.sum() + seen.sum())
        return float(total + (gamma(known + seen) - gamma(known)).sum())
    gap = observed.accepted / observed.verified - acceptance.accept_length + 1
    spread = _spread(_share(acceptance)) * (1 / observed.verified + 1 / max(1, acceptance.verified))
    return -0.5 * gap**2 / spread - 0.5 * math.log(spread)


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


def _posterior(ranked: Sequence[Ranked], cluster: float) -> np.ndarray:  # [ranked]
    """Logarithm of each wiring's weight: no fault, one and two are equally likely, and so are all within each."""
    kinds = [0 if r.name == "as trained" else 1 + r.name.count(" + ") for r in ranked]
    return np.array([r.likelihood / cluster - math.log(kinds.count(k)) for r, k in zip(ranked, kinds, strict=True)])


def _alike(ranked: Sequence[Ranked], cluster: float) -> list[str]:
    """The smallest set that holds 95 % of the posterior."""
    log = _posterior(ranked, cluster)
    weight, order = np.exp(log - log.max()), np.argsort(-log, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weight[order]) / weight.sum(), 0.95)) + 1
    return [ranked[i].name for i in order[:enough]]


@dataclass(frozen=True)
class Matched:
    """One wiring against tensors that an engine computed: those that agree with it, and those that do not."""

    name: str
    wiring: Wiring
    agree: tuple[str, ...]
    differ: tuple[str, ...]


@torch.inference_mode()
def match(session: Session, seen: Mapping[str, Tensor], text: int = 0) -> tuple[Matched, ...]:
    """Wirings by the tensors of one text, names and shapes as in `divergence.stages`; features alone will do.

    Best first; those that agree in as many as the first cannot be told from it. Pairs are tried on the best five.
    """
    depth, contract, steps = session.target.info.layers, session.contract, 1 + max("step 2" in n for n in seen)
    singles = candidates(session.trained, contract, depth)
    floor: dict[str, float] = {}

    alone = replace(session, texts=[session.texts[text]], _states=[], _held=set())

    def against(wirings: Mapping[str, Wiring]) -> list[Matched]:
        found, (states,) = [], alone.states([*singles.values(), *wirings.values()])
        ids = torch.tensor(states.text.ids, device=session.target.device)
        for name, wiring in wirings.items():
            drafter, features = session.load(wiring)[0], states.select(wiring).to(ids.device)
            floor.update({} if floor else stage_floor(drafter, features, ids, steps))
            mine = stages(drafter, features, ids, steps)
            agree = tuple(n for n, x in seen.items() if _same(x.to(ids.device), mine[n], MARGIN * floor[n]))
            found.append(Matched(name, wiring, agree, tuple(n for n in seen if n not in agree)))
        return sorted(found, key=lambda m: -len(m.agree))

    ranked = against(singles)
    if ranked[0].differ:
        more = against(both({m.name: m.wiring for m in ranked[:BEAM]}, singles.values(), contract, depth))
        ranked = sorted([*ranked, *more], key=lambda m: -len(m.agree))
    return tuple(ranked)


def _same(a: Tensor, b: Tensor, line: float) -> bool:
    """Equal within the noise; of token ids the share that differs counts."""
    if a.shape != b.shape:
        return False
    return (error(a, b) if a.is_floating_point() else float((a != b).double().mean())) <= line


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
    names = " or ".join(found.alike[:4]) + (f" or one of {len(found.alike) - 4} others" if len(found.alike) > 4 else "")
    return [Finding.of("M208", f"the engine accepts what {names} accepts, not the trained wiring", evidence=evidence)]
