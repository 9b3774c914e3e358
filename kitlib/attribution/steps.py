"""The steps, each measured: on training rows, on the served prompts, and under the served wiring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..acceptance import Acceptance, replay
from ..contract import Wiring
from ..diagnose import Session
from ..drafter import load_drafter
from ..features import Text
from ..findings import KitError
from ..texts import Row, outside
from ..training import Training
from .metric import by_metric, misread, vocabulary
from .parts import NOTHING, Attribution, Counts, Step

Stage = tuple[str, Counts | None, str]  # name, what was measured after it, how
Swap = Callable[[Sequence[int]], tuple[int, ...]]  # a served prompt's ids -> the prompt as training rendered it
ROWS, PROMPTS = "rows", "prompts"  # texts that are resampled together


def on_rows(session: Session, rows: Sequence[Row], training: Training | None, cache: Path | None = None) -> list[Stage]:
    """The steps that need training rows: the metric again, the vocabulary, the text, and rounds for positions."""
    names, steps = ("validation rows", "draft vocabulary", "text policy", "metric definition"), session.steps
    usable = [r for r in rows if 0 < r.prompt < len(r.ids) - 1]
    if not session.texts or not any(len(r.ids) - r.prompt > steps for r in usable):
        why = f"no training rows with a prompt and more than {steps} tokens of an answer were given"
        return [(name, None, why if session.texts else "no target is loaded") for name in names]
    drafter, _ = session.load()
    stops = session.target.stop_ids
    cut = training is not None and "outside the draft vocabulary" in training.leaves_out
    states = _over(session, [r.text for r in usable]).states()
    full, within = by_metric(drafter, states, [r.mask for r in usable], steps, stops)
    missed, targets, _ = outside(usable, vocabulary(drafter).tolist())
    share = f"{missed} of {targets} target tokens are outside the draft vocabulary, which costs "
    share += f"{full.length - within.length:+.3f}"
    share += "" if cut else ", but is in the trainer's numbers already"
    longest = max(len(r.ids) - r.prompt for r in usable)
    texts = session.target.record([r.ids[: r.prompt] for r in usable], longest, steps + 1, cache)
    same = sum(t.answer == r.ids[r.prompt :][: len(t.answer)] for t, r in zip(texts, usable, strict=True))
    states = _over(session, texts).states()
    answers = [[int(t.prompt <= i < t.prompt + t.limit) for i in range(len(t.ids))] for t in texts]
    policy, _ = by_metric(drafter, states, answers, steps, stops)
    rounds = Counts.of(replay(drafter, states, steps), ROWS)
    return [
        (names[0], within if cut else full, f"{len(usable)} rows under the trained wiring, as the trainer counts"),
        (names[1], full, share),
        (names[2], policy, f"the target's own greedy answers instead; {same} of {len(usable)} rows are the same"),
        (names[3], rounds, "verify rounds instead of every position alike"),
    ]


def on_prompts(
    session: Session, trained: Counts, swap: Swap | None, alike: bool, cache: Path | None = None
) -> list[Stage]:
    """From the rows' prompts to the served ones, and from the rows' template to the served one."""
    how = f"{len(trained.right)} served prompts and the target's answers to them, under the trained wiring"
    why = "training rows are rendered as they are served" if alike else "how training rows were rendered is not known"
    if swap and session.texts:
        try:
            prompts = [swap(t.ids[: t.prompt]) for t in session.texts]
        except KitError as error:
            why = str(error)
        else:
            longest = max(t.limit for t in session.texts)
            other = _over(session, session.target.record(prompts, longest, session.steps + 1, cache))
            return [
                ("prompts", Counts.of(other.measure(), PROMPTS), f"{how}, rendered as in training"),
                ("template", trained, "the same prompts, rendered as they are served"),
            ]
    return [("prompts", trained, how), ("template", trained if alike else None, why)]


def on_numerics(session: Session, wiring: Wiring, before: Counts, dtype: str) -> Stage:
    """The drafter and its states in the type that is served, on the same text."""
    if before.length - 1 <= NOTHING:
        return "numerics", None, "nothing is left that it could cost"
    if not session.texts:
        return "numerics", None, "states of a dump are replayed as they were stored"
    if session.target.dtype != "float32":
        return "numerics", None, f"everything above ran in {session.target.dtype}"
    target = session.target
    parts = (session.checkpoint, session.contract, wiring, target.embedding, target.head)
    drafter, _ = load_drafter(*parts, device=str(target.device), dtype=dtype)
    counts = Counts.of(replay(drafter, session.states([wiring]), session.steps), PROMPTS)
    return "numerics", counts, f"drafter and states in {dtype}; the text stays the target's in float32"


def attribute(
    session: Session,
    served: Wiring | None = None,  # None: not known
    *,
    training: Training | None = None,
    stages: Sequence[Stage] = (),  # of `on_rows`
    swap: Swap | None = None,  # of `texts.Rendering`
    alike: bool = False,  # training rows are rendered as they are served
    claimed: float | None = None,  # an accept length that somebody quoted from training
    observed: float | None = None,  # a server's accept length on these prompts
    dtype: str = "bfloat16",  # what is served in
    measure: Callable[[Wiring], Acceptance] | None = None,  # `session.measure`, or one that remembers
    cache: Path | None = None,
) -> Attribution:
    """Divide the drop from training's promise to the served accept length. KitError where a rate is given as length."""
    steps, measure = session.steps, measure or session.measure
    if observed is not None and not 1 <= observed <= steps + 1:
        raise KitError(
            f"{observed:g} is no accept length of {steps} steps (1 to {steps + 1}); an accept rate has had several "
            "formulas, and its floor may be 1/D: give 1 + accepted drafts / verify rounds."
        )
    known = training is not None and len(training.values) >= steps
    promised = training.expected(steps) if known else None
    reading = misread(claimed, training, steps) if known and claimed is not None else ""
    trained = Counts.of(measure(session.trained), PROMPTS)
    chain = [*(stages or on_rows(session, (), training)), *on_prompts(session, trained, swap, alike, cache)]
    differ, rounds = ", ".join(session.trained.diff(served)) if served else "", trained
    if differ:
        rounds = Counts.of(measure(served), PROMPTS)
    if served:
        chain.append(("wiring", rounds, f"differ: {differ}" if differ else "trained and served wiring are the same"))
    else:
        chain.append(("wiring", None, "the served wiring is not known"))
    chain.append(on_numerics(session, served or session.trained, rounds, dtype))
    found, at, was = [], promised, None
    if claimed is not None and known:
        found.append(Step("quoted number", claimed, promised, None, reading or "follows the metrics' own definition"))
    for name, after, how in chain:
        if after is None:
            found.append(Step(name, at, at, None, how, ran=False))
            continue
        if at is None:
            how += f"; training tells {len(training.values) if training else 0} of {steps} steps; this is the start"
            found.append(Step(name, after.length, after.length, None, how, ran=False))
        else:
            found.append(Step(name, at, after.length, after.interval(at if was is None else was), how))
        at, was = after.length, after
    if observed is None:
        found.append(Step("residual", at, at, None, "no server's counts were given", ran=False))
    else:
        found.append(Step("residual", at, observed, None, "what the server accepted, against the last replay"))
    return Attribution(promised, tuple(found), was, claimed, reading)


def _over(session: Session, texts: Sequence[Text]) -> Session:
    """The same pair over other texts, with states of their own."""
    return replace(session, texts=texts, _states=[], _held=set())
