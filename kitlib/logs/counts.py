"""Verify rounds and accepted draft tokens, from `/server_info`, `meta_info` and `/metrics` of any release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ..engines.data import RATES, Engine
from ..findings import KitError

_DATA = Engine.load().data


@dataclass(frozen=True)
class Counts:
    """Verify rounds v and accepted draft tokens a, of one request or of a server; None is "not told"."""

    v: int | None = None
    a: int | None = None
    D: int | None = None  # draft tokens a round, the root included
    S: int | None = None  # draft steps
    histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, 2 … draft tokens
    caveat: str = ""
    tokens: int | None = None  # completion tokens
    stated: float | None = None  # accept length with the bonus token, where no counts are told

    @property
    def accept_length(self) -> float | None:
        """1 + a/v, else the length that the engine states; None without a round."""
        return 1 + self.a / self.v if self.v and self.a is not None else self.stated

    @property
    def overrun(self) -> int | None:
        """Tokens counted past the end of the answer: a round adds its accepted drafts and one more."""
        return None if None in (self.v, self.a, self.tokens) else max(0, 1 + self.v + self.a - self.tokens)


@dataclass(frozen=True)
class Speculation:
    """What a server runs, by its own options; `on` is None where they do not say."""

    on: bool | None
    algorithm: str
    drafter: str
    release: str
    steps: int | None
    topk: int | None
    draft_tokens: int | None
    threshold_single: float | None  # below 1: accepts what the target would not have said
    threshold_acc: float | None


def speculation(info: Any) -> Speculation:
    """Speculation on or off, and how, from `/server_info` or a log's flags."""
    live = next((s for s in _states(info) if "speculative_accept_threshold_acc" in s), {})
    told = {**_dict(info), **{k: v for k, v in live.items() if "_accept_threshold_" in k}}
    keys = ("speculative_algorithm", "speculative_draft_model_path", "version")
    name, *texts = (str(told.get(k) or "") for k in keys)
    numbers = [_whole(told.get(f"speculative_{k}")) for k in ("num_steps", "eagle_topk", "num_draft_tokens")]
    limits = [number(told.get(f"speculative_accept_threshold_{k}")) for k in ("single", "acc")]
    on = bool(name) if "speculative_algorithm" in told else None
    return Speculation(on, name.upper(), *texts, *numbers, *limits)


def server_counts(info: Any) -> Counts:
    """The average since start from `/server_info`, in either of its places; v and a are not told there."""
    has = speculation(info)
    row, caveat = _rule("server_info", has.release)
    found = [x for p in (_dict(info), *_states(info)) if (x := number(p.get(row["length"]))) is not None]
    caveat = _join(caveat, row["caveat"], "" if found else f"{row['length']} is absent")
    return Counts(D=has.draft_tokens, S=has.steps, caveat=caveat, stated=fmean(found) if found else None)


def request_counts(body: Any, release: str = "", D: int | None = None, S: int | None = None) -> Counts:
    """Counts of one request, from a `/generate`, chat or completion answer or a `meta_info`.

    The release's field names are tried first, then all others; D and S are the server's, where known.
    """
    meta = _meta(body)
    first, caveat = _rule("meta", release)
    row = next((r for r in (first, *_DATA["meta"][::-1]) if _whole(meta.get(r.get("accepted"))) is not None), first)
    names = [row.get(k, k) for k in ("rounds", "accepted", "proposed", "completion_tokens")]
    v, a, proposed, tokens = (_whole(meta.get(n)) for n in names)
    if not v:
        caveat = _join(caveat, "no verify round is reported: speculation is off, or the answer ended before one")
        return Counts(v, v, D, S, caveat=caveat, tokens=tokens)
    D = D or (proposed // v + 1 if proposed else None)
    rate = number(meta.get(row.get("rate")))
    if a is None and rate is not None and (share := invert(row["formula"], rate, D, S)) is not None:
        a, caveat = round(share * v), _join(caveat, f"a inverted from {row['rate']} = {row['formula']}")
    elif a is None and tokens is not None:
        a = max(0, tokens - 1 - v)
        caveat = _join(caveat, "a = completion_tokens - 1 - v: what was accepted past the end is missing")
    counted = meta.get(row.get("histogram"))
    counted = [_whole(n) for n in counted] if isinstance(counted, list) else []
    histogram = () if None in counted else tuple(counted)
    if histogram and (sum(histogram), sum(i * n for i, n in enumerate(histogram))) != (v, a):
        caveat = _join(caveat, f"the histogram {histogram} contradicts v = {v}, a = {a}")
    return Counts(v, a, D, S, histogram, caveat, tokens)


def invert(formula: str, rate: float, D: int | None, S: int | None) -> float | None:
    """a/v from an accept rate under a release's formula; None where that needs a number which is not known."""
    rule = {"a/(v*S)": lambda a, v, D, S: a / (v * S), **RATES}[formula]
    try:
        none, one = rule(0, 1, D, S), rule(1, 1, D, S)  # every formula is linear in a
        return max(0.0, (rate - none) / (one - none))
    except (TypeError, ZeroDivisionError):
        return None


def metrics_counts(text: str | bytes, release: str = "") -> Counts:
    """Counts from `/metrics`: the rounds of finished requests, and the accept length of the last logged window."""
    row, caveat = _rule("prometheus", release)
    told: dict[str, list[float]] = {k: [] for k in ("rounds", "length", "draft_tokens", "steps")}
    fields = {row[k]: k for k in told if k in row}
    try:
        families = text_string_to_metric_families(plain(text))
        for sample in (s for family in families for s in family.samples):
            if sample.name in fields and number(sample.value):  # a gauge at 0 has not been set yet
                told[fields[sample.name]].append(sample.value)
    except Exception as error:  # the library raises whatever its parser trips over
        caveat = _join(f"/metrics is malformed ({type(error).__name__})", caveat)
    v = int(sum(told["rounds"])) if told["rounds"] else None
    D, S = (_whole(max(told[k], default=None)) for k in ("draft_tokens", "steps"))
    length = fmean(told["length"]) if told["length"] else None
    return Counts(v, None, D, S, caveat=_join(caveat, row["caveat"]), stated=length)


def _rule(table: str, release: str) -> tuple[Mapping[str, Any], str]:
    """The row of a table for a release, else for the newest that was read; and a caveat then."""
    engine = Engine.load()
    try:
        known, caveat = engine.known(release)
    except KitError:
        known, caveat = engine.releases[-1], f"release {release[:40] or 'unknown'}: judged by {engine.releases[-1]}"
    return engine.entry(table, known), caveat


def _meta(body: Any) -> Mapping[str, Any]:
    """The part of an answer that holds the speculative fields."""
    body = _dict(body)
    choice = _dict(body.get("choices"))
    places = (body.get("meta_info"), choice.get("meta_info"), _dict(body.get("sglext")).get("spec_tokens_details"))
    return {**_dict(body.get("usage")), **next((_dict(p) for p in places if _dict(p)), body)}


def _states(info: Any) -> list[Mapping[str, Any]]:
    """`internal_states`, one a data-parallel rank."""
    states = _dict(info).get("internal_states")
    return [_dict(s) for s in (states if isinstance(states, list) else [states])]


def _dict(value: Any) -> Mapping[str, Any]:
    """The mapping, or the first of a list of mappings; else an empty one."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, Mapping) else {}


def plain(data: str | bytes) -> str:
    """Text, whatever the bytes."""
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data


def number(value: Any) -> float | None:
    """A number of 0 or more, also from text; else None."""
    try:
        value = None if isinstance(value, bool) else float(value) if isinstance(value, str) else value
        return value if 0 <= value < 1e18 else None
    except (TypeError, ValueError):
        return None


def _whole(value: Any) -> int | None:
    value = None if isinstance(value, str) else number(value)
    return int(value) if value is not None and value == int(value) else None


def _join(*parts: str) -> str:
    return "; ".join(p for p in parts if p)
