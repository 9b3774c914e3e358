"""The engine as a server: started or attached to, timed from refused to healthy, measured, and gone afterwards.

with start(Launch(target, drafter), "logs") as server:
    run = bench(server, prompts, max_new_tokens=64)
"""

from __future__ import annotations

from .bench import Request, Run, bench
from .client import Client
from .health import Timeline, watch
from .launch import Launch, choose_engine
from .paired import compare, noise_floor, speed_findings, text_findings, tie_gaps
from .serve import Server, attach, health_findings, start

__all__ = [
    "Client", "Launch", "Request", "Run", "Server", "Timeline", "attach", "bench", "choose_engine", "compare",
    "health_findings", "noise_floor", "speed_findings", "start", "text_findings", "tie_gaps", "watch",
]  # fmt: skip
