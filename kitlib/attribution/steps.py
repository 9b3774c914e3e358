"""The steps, each measured: on training rows, on the served prompts, and under the served wiring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..acceptance import Acceptance, replay
from ..contract import Wiring
from ..diagnose import Session
from ..drafter import load_drafter
from ..findings import KitError
from ..texts import Row, outside
from ..training import Training
from .metric import by_metric, misread
from .parts import Attribution, Counts, Step

Stage = tuple[str, Counts | None, str]  # name, what was measured after it, how


def on_rows(session: Session, rows: Sequence[Row], training: Training | None, cache: Path | None = None) -> list[Stage]:
    """The steps that need training rows: the metric again, the vocabulary, the text, and rounds for positions."""
    names = ("validation rows", "draft vocabulary", "text policy", "metric definition")
    usable = [r for r in rows if 0 < r.prompt < len(r.ids) - 1]
    if not usable or not session.texts:
        why = "no training rows with a prompt and an answer were given" if session.texts else "no target is loaded"
        return [(name, None, why) for name in names]
    drafter, _ = session.load()
    stops, steps = session.target.stop_ids, session.steps
    cut = training is not None and "outside the draft vocabulary" in training.leaves_out
    own = replace(session, texts=[r.text for r in usable], _states=[], _held=set())
    states, masks = own.states(), [r.mask for r in usable]
    full, within = by_metric(drafter, states, masks, steps, stops)
    kept = drafter.to_target(torch.arange(session.contract.draft_vocab, device=drafter.d2t.device)).tolist()
    missed, targets, _ = outside(usable, kept)
    share = f"{missed} of {targets} target tokens are outside the draft vocabulary, which costs "
    share += f"{full.length - within.length:+.3f}"
    share += "" if cut else ", but is in the trainer's numbers already"
    longest = max(len(r.ids) - r.prompt for r in usable)
    texts = session.target.record([r.ids[: r.prompt] for r in usable], longest, steps + 1, cache)
    greedy = replace(session, texts=texts, _states=[], _held=set())
    same = sum(t.answer == r.ids[r.prompt :][: len(t.answer)] for t, r in zip(texts, usable, strict=True))
    ours = [[int(t.prompt <= i < t.prompt + t.limit) for i in range(len(t.ids))] for t in texts]
    policy, _ = by_metric(drafter, greedy.states(), ours, steps, stops)
    rounds = Counts.of(replay(drafter, greedy.states(), steps), "rows")
    return [
        (names[0], within if cut else full, f"{len(usable)} rows under the trained wiring, as the trainer counts"),
        (names[1], full, share),
        (names[2], policy, f"the target's own greedy answers instead; {same} of {len(usable)} rows are the same"),
        (names[3], rounds, "verify rounds instead of every position alike"),
    ]


def attribute(
    session: Session,
    served: Wiring | None = None,  # None: not known
    *,
    training: Training | None = None,
    stages: Sequence[Stage] = (),  # of `on_rows`
    swap: Callable[[Sequence[int]], tuple[int, ...]] | None = None,  # of `texts.Rendering`: a prompt as in training
    alike: bool = False,  # training rows are rendered as they are served
    claimed: float | None = None,  # an accept length that somebody quoted from training
    observed: float | None = None,  # a server's accept length on these prompts
    dtype: str = "bfloat16",  # what is served in
    measure: Callable[[Wiring], Acceptance] | None = None,  # `session.measure`, or one that remembers
    cache: Path | None = None,
) -> Attribution:
    """Divide the drop from training's promise to the served accept length. KitError where a rate is given as length."""
    if observed is not None and not 1 <= observed <= session.steps + 1:
        raise KitError(
            f"{observed:g} is no accept length of {session.steps} steps (1 to {session.steps + 1}); an accept rate "
            "has had several formulas, and its floor may be 1/D: give 1 + accepted drafts / verify rounds."
        )
    measure = measure or session.measure
    steps, known = session.steps, training is not None and len(training.values) >= session.steps
    promised = training.expected(steps) if known else None
    reading = misread(claimed, training, steps) if claimed is not None and known else ""
    chain = list(stages) or on_rows(session, (), training)
    trained = Counts.of(measure(session.trained), "prompts")
    prompts = f"{len(trained.right)} served prompts and the target's answers to them, under the trained wiring"
    if swap:
        texts = [swap(t.ids[: t.prompt]) for t in session.texts]
        longest = max(t.limit for t in session.texts)
        other = replace(session, texts=session.target.record(texts, longest, steps + 1, cache), _states=[], _held=set())
        chain.append(("prompts", Counts.of(other.measure(), "prompts"), f"{prompts}, rendered as in training"))
        chain.append(("template", trained, "the same prompts, rendered as they are served"))
    else:
        why = (
            "training rows are rendered as they are served" if alike else "how training rows were rendered is not known"
        )
        chain += [("prompts", trained, prompts), ("template", trained if alike else None, why)]
    counts = trained
    if served is None:
        chain.append(("wiring", None, "the served wiring is not known"))
    else:
        names = ", ".join(session.trained.diff(served))
        counts = Counts.of(measure(served), "prompts") if names else trained
        chain.append(("wiring", counts, f"differ: {names}" if names else "trained and served wiring are the same"))
    wiring = served or session.trained
    if not session.texts:
        chain.append(("numerics", None, "states of a dump are replayed as they were stored"))
    elif session.target.dtype != "float32":
        chain.append(("numerics", None, f"everything above ran in {session.target.dtype}"))
    else:
        device = str(session.target.device)
        model = (session.checkpoint, session.contract, wiring, session.target.embedding, session.target.head)
        low, _ = load_drafter(*model, device=device, dtype=dtype)
        counts = Counts.of(replay(low, session.states([wiring]), steps), "prompts")
        chain.append(("numerics", counts, f"drafter and states in {dtype}; the text stays the target's in float32"))
    found, at, was = [], promised, None
    if claimed is not None and promised is not None:
        found.append(Step("quoted number", claimed, promised, None, reading or "follows the metrics' own definition"))
    for name, after, how in chain:
        if after is None:
            found.append(Step(name, at, at, None, how, ran=False))
            continue
        if at is None:
            why = f"training tells {len(training.values) if training else 0} of {steps} steps; this is the start"
            found.append(Step(name, after.length, after.length, None, f"{how}; {why}", ran=False))
        else:
            found.append(Step(name, at, after.length, after.interval(at if was is None else was), how))
        at, was = after.length, after
    return Attribution(promised, tuple(found), was or trained, observed, claimed, reading)
