"""The two-stage story on the real engine: predict by replay, serve, measure, divide.

On the lab there are five trials; on a drafter of your own there is one, on a server that the kit starts or attaches to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import lab
from .acceptance import Acceptance
from .checkpoint import Checkpoint
from .contract import Contract, Wiring
from .diagnose import FLOOR
from .findings import Finding
from .lab.faults import FAULTS
from .lab.story import planted
from .server import (
    Launch,
    Run,
    Server,
    attach,
    bench,
    compare,
    health_findings,
    noise_floor,
    speed_findings,
    start,
    text_findings,
    tie_gaps,
)
from .workbench import Workbench

Answer = tuple[Server, Run | None]
QUICK = 2.0  # seconds between polls once the story's own pace has been shown


@dataclass(frozen=True)
class Trial:
    """One server run: what is served how, and the wiring whose replay predicts it (None: no point prediction)."""

    name: str
    drafter: Path
    algorithm: str
    wiring: Callable[[Wiring], Wiring] | None
    role: str = "fault"


def trials(workbench: Workbench) -> list[Trial]:
    """The story's trials on the lab; the drafter as its command serves it otherwise."""
    if not workbench.is_lab:
        stage = workbench.last
        served = workbench.served(stage).wiring
        return [Trial("as served", stage.drafter, stage.launch.algorithm or "EAGLE3", lambda _: served, "fixed")]
    eagle = FAULTS["fc-bypass-eagle"].wiring
    return [
        Trial("a1 keys dropped (planted)", planted("layer-dropped"), "EAGLE3", lambda w: w),
        Trial("a2 keys really absent", planted("wrong-prefix"), "EAGLE3", None),
        Trial("b1 names repaired, EAGLE", planted("healthy"), "EAGLE", eagle),
        Trial("b2 another drafter, EAGLE", lab.second_drafter_path(), "EAGLE", eagle),
        Trial("c served right", planted("healthy"), "EAGLE3", lambda w: w, "fixed"),
    ]


@dataclass
class Serving:
    """Trials of one workbench on real servers, their predictions made before anything is measured."""

    workbench: Workbench
    clients: int = 4
    url: str = ""
    api_key: str = ""
    interval_s: float = 10.0
    limit: int = 60
    enabled: bool = True

    def __post_init__(self) -> None:
        self.trials = trials(self.workbench)
        self.answers: dict[str, Answer] = {}
        self.judged: list[Finding] = []  # of the run measured last, asked while its server lived
        self.gaps: dict[int, float] = {}  # where its text parts from the baseline's in low precision (M205)
        self.noise: float | None = None
        gain = max(c.accept_length for c in self.workbench.controls.values()) - 1
        self.floor = 1 + FLOOR * max(gain, 0.02)  # as M201 draws the line
        self.logs = Path(self.workbench.out or "reports/interactive") / "servers"
        self.predictions = {t.name: self._predict(t) for t in self.trials}

    def _predict(self, trial: Trial) -> Acceptance | None:
        """Replay of the trial's own files under its wiring, on the same prompts and states."""
        if trial.wiring is None:
            return None
        session = self.workbench.session
        checkpoint = Checkpoint.open(trial.drafter)
        contract = Contract.of(checkpoint, session.target.info)
        own = replace(session, checkpoint=checkpoint, contract=contract)
        return own.measure(trial.wiring(own.trained))

    def prediction_rows(self) -> list[dict[str, Any]]:
        """What each trial should give, said before it runs."""
        rows = []
        for trial in self.trials:
            p = self.predictions[trial.name]
            shown = {"accept length": p.accept_length, "histogram": p.histogram} if p else {"accept length": None}
            rows.append({"trial": trial.name, "algorithm": trial.algorithm, **shown})
        return rows

    def run(self, name: str) -> Server | None:
        """Serve one trial (or attach), measure it, stop the server. The server object keeps its timeline and log."""
        if not self.enabled:
            return None
        trial = next(t for t in self.trials if t.name == name)
        server, run = self._measure(self._open(trial.drafter, trial.algorithm))
        self.answers[name] = (server, run)
        return server

    def _open(self, drafter: Path | None, algorithm: str) -> Server:
        if self.url:
            return attach(self.url, self.api_key, interval_s=self.interval_s, limit=self.limit)
        launch = Launch(
            self.workbench.target_path,
            drafter,
            algorithm,
            self.workbench.draft_steps,
            dtype=self.workbench.session.target.dtype,
        )
        # the first start is watched at the story's pace, the others at a quick one
        pace = self.interval_s if not self.answers else min(self.interval_s, QUICK)
        limit_s = self.limit * self.interval_s
        return start(launch, self.logs, interval_s=pace, limit_s=limit_s, progress=self.workbench.progress)

    def _measure(self, server: Server) -> Answer:
        """One chat question, then the benchmark; a server that did not come up is an answer too."""
        texts = self.workbench.session.texts
        with server:
            if not server.ready:
                return server, None
            server.said = server.chat("What is the capital of France?")
            prompts = [t.ids[: t.prompt] for t in texts]
            limit, progress = self.workbench.max_new_tokens, self.workbench.progress
            run = bench(server, prompts, max_new_tokens=limit, clients=self.clients, progress=progress)
            if server.info().on is not False or not self.judged:
                self.judged = health_findings(server, run, self.floor)
            elif self.workbench.session.target.dtype != "float32" and (
                last := self.answers.get(self.trials[-1].name, (None, None))[1]
            ):
                self.gaps = tie_gaps(server, last, run)
                self.noise = noise_floor(server, prompts[:4], limit) if self.gaps else None
            return server, run

    def story(self, server: Server | None) -> str:
        """The start in words: the command, the engine and why, both clocks, and the answer to a question."""
        if server is None:
            return "not run"
        lines = [f"command  {server.launch or 'attached to ' + server.url}", f"engine   {server.why}"]
        lines.append(f"clocks   {server.timeline.explain()}")
        return "\n".join([*lines, f"answer   {getattr(server, 'said', '–')}"])

    def rest(self) -> None:
        """Every trial that has not run yet, one after another."""
        for trial in self.trials:
            if trial.name not in self.answers:
                self.run(trial.name)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Predicted, measured, ratio; whether the histograms are the same, and the texts the target's own."""
        recorded = [t.answer for t in self.workbench.session.texts]
        for trial in self.trials:
            server, run = self.answers.get(trial.name, (None, None))
            predicted = self.predictions[trial.name]
            row = {"trial": trial.name, "health": "200" if server and server.ready else "no"}
            if run is None or not run.verified:
                yield {
                    **row,
                    "predicted": predicted and predicted.accept_length,
                    "measured": None,
                    "_status": "not-run",
                }
                continue
            same = sum(a is not None and tuple(a) == tuple(b) for a, b in zip(run.texts, recorded, strict=True))
            yield {
                **row,
                "predicted": predicted.accept_length if predicted else "none",
                "measured": run.accept_length,
                "ratio": run.accept_length / predicted.accept_length if predicted else "none",
                "histogram": run.histogram,
                "histogram as predicted": run.histogram == predicted.histogram if predicted else "none",
                "texts as the target's own": f"{same} of {len(recorded)}",
                "tokens/s": run.tokens_per_s,
            }

    def accept_rows(self) -> list[dict[str, Any]]:
        """For the picture: measured accept lengths with their intervals."""
        done = [(t, *self.answers.get(t.name, (None, None))) for t in self.trials]
        return [
            {"name": t.name, "role": t.role, "accept_length": r and r.accept_length, "interval": r and r.interval}
            for t, _, r in done
        ]

    def baseline_rows(self) -> list[dict[str, Any]]:
        """The same prompts without speculation, against the last trial: speed-up with its interval, texts."""
        last = self.answers.get(self.trials[-1].name, (None, None))[1]
        if last is None or self.url:
            return [
                {"what": "not run", "value": "the baseline needs a server that the kit starts", "_status": "not-run"}
            ]
        server, run = self._measure(self._open(None, ""))
        self.answers["without speculation"] = (server, run)
        if run is None:
            return [{"what": "not run", "value": server.findings[0].title, "_status": "not-run"}]
        shown = {k: v for k, v in compare(last, run).items() if k != "errors"}
        return [{"what": k.replace("_", " "), "value": v} for k, v in shown.items()]

    def not_run(self) -> list[dict[str, str]]:
        """Trials without a measurement, for the report."""
        why = "the parameter `serve` is false" if not self.enabled else "the server did not come up"
        return [{"slug": t.name, "reason": why} for t in self.trials if self.answers.get(t.name, (0, None))[1] is None]

    def to_dict(self) -> dict[str, Any]:
        """Every run and its prediction, for the saved report."""
        runs = {name: run.to_dict() for name, (_, run) in self.answers.items() if run}
        for name, row in runs.items():
            row.pop("requests")
            predicted = self.predictions.get(name)
            row["predicted"] = predicted and predicted.to_dict()
        return runs

    def findings(self) -> list[Finding]:
        """The last trial judged: health, acceptance against the controls, and the text."""
        server, run = self.answers.get(self.trials[-1].name, (None, None))
        if server is None:
            return [Finding.of("S501", "no server was asked", status="not-run")]
        if run is None:
            return server.findings
        baseline = self.answers.get("without speculation", (None, None))[1]
        plain = baseline or [t.answer for t in self.workbench.session.texts]
        told = compare(run, baseline) if baseline else {}
        speed = speed_findings(told, server.why if server.engine == "cpu" else "") if told else []
        return (
            self.judged + text_findings(run, plain, self.workbench.session.target.dtype, self.gaps, self.noise) + speed
        )
