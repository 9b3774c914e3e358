"""From refused to 503 to 200, as a poll sees it and as the log says it: two clocks, and what lies between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..logs import Log, Tail, reason
from .client import Client

SETTLE = 5.0  # seconds in which the log's "ready" may follow the 200


@dataclass
class Timeline:
    """What `/health` answered and when, and the log's own stamps."""

    interval_s: float
    polls: list[tuple[datetime, str]] = field(default_factory=list)  # "refused", "503", "200", "time-out", …
    log: Log = field(default_factory=Log)
    ended: bool = False  # the process ended while we waited

    @property
    def ready(self) -> bool:
        """Whether the last poll saw 200 of a server that lives."""
        return bool(self.polls) and self.polls[-1][1] == "200" and not self.ended

    def events(self) -> list[dict[str, Any]]:
        """Both clocks in one list: {"clock", "what", "time", "since"}.

        A poll only knows that something changed after `since`, the poll before it (None: no poll before).
        """
        found, before = [], None
        for at, what in self.polls:
            if before is None or what != before[1]:
                found.append({"clock": "health", "what": what, "time": at, "since": before and before[0]})
            before = (at, what)
        stamps = (e for e in self.log.events if e.time and not e.kind.startswith("health"))
        found += ({"clock": "log", "what": e.kind, "time": e.time, "since": None} for e in stamps)
        return sorted(found, key=lambda e: e["time"])

    def explain(self) -> str:
        """Why the two clocks differ, in numbers."""
        seen = next((e for e in self.events() if (e["clock"], e["what"]) == ("health", "200")), None)
        said = next((e.time for e in self.log.events if e.kind == "ready" and e.time), None)
        if not seen:
            last = self.polls[-1][1] if self.polls else "nothing"
            return f"{len(self.polls)} polls, {self.interval_s:g} s apart; none saw 200, the last saw {last}."
        text = f"health 200 was first seen at {seen['time']:%H:%M:%S}"
        if seen["since"]:
            gap = (seen["time"] - seen["since"]).total_seconds()
            text += f" and not yet at {seen['since']:%H:%M:%S}: it turned 200 somewhere in these {gap:.1f} s"
        if not said:
            return text[0].upper() + text[1:] + "."
        apart = (seen["time"] - said).total_seconds()
        inside = -1 - SETTLE <= apart <= max(self.interval_s, 1) + 1 + SETTLE
        why = "no more than the polling interval explains" if inside else "more than the polling interval explains"
        return f"The log says ready at {said:%H:%M:%S} (whole seconds); {text}. They are {apart:.1f} s apart, {why}."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, times in ISO form."""
        rows = [{k: v.isoformat() if isinstance(v, datetime) else v for k, v in e.items()} for e in self.events()]
        return {"interval_s": self.interval_s, "polls": len(self.polls), "ready": self.ready, "events": rows}


def watch(
    client: Client,
    *,
    interval_s: float = 10.0,
    limit: int = 60,
    timeout_s: float = 20.0,  # of one poll: /health lets the server generate a token
    tail: Tail | None = None,
    ended: Callable[[float], bool] = lambda s: bool(time.sleep(s)),
    progress: Callable[[Iterable], Iterable] = iter,
) -> Timeline:
    """Poll `/health` until it says 200, the process ends, or `limit` polls are done; it never raises for a server.

    `ended(seconds)` waits that long, or less if the process ends, and says whether it did.
    """
    timeline = Timeline(interval_s)

    def read() -> None:
        for line in tail.read() if tail else ():
            timeline.log.feed(line)

    for n in progress(range(limit)):
        timeline.polls.append((datetime.now(), client.status("/health", timeout_s)))
        read()
        taken = any(reason(e.text)[0] == "port-in-use" for e in timeline.log.errors)  # it stays, and is useless
        timeline.ended = ended(0.0) or taken
        if timeline.ended or timeline.polls[-1][1] == "200" or n == limit - 1:
            break
        timeline.ended = ended(interval_s)
        if timeline.ended:
            break
    until = time.monotonic() + SETTLE
    while tail and timeline.ready and time.monotonic() < until and all(e.kind != "ready" for e in timeline.log.events):
        timeline.ended = ended(0.25)
        read()
    return timeline
