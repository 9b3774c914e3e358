"""A server to measure: started by the kit and gone with it, or somebody else's by its URL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..findings import Evidence, Finding, KitError
from ..logs import Speculation, Tail, reason, redact, speculation
from .client import Client, Failed
from .health import Timeline, watch
from .launch import Launch, Process, check_installed, choose_engine, free_port

if TYPE_CHECKING:
    from .bench import Run


class Server:
    """A server that answers, or one that did not come up: then `ready` is False and `findings` says why (S501)."""

    def __init__(
        self, client: Client, timeline: Timeline, *, log: Path | None = None, launch: Launch | None = None,
        process: Process | None = None, engine: str = "", why: str = "attached",
    ) -> None:  # fmt: skip
        self.client, self.url, self.timeline, self.log = client, client.url, timeline, log
        self.launch, self.process = launch, process
        self.engine, self.why = engine, why  # "gpu", "cpu" (the kit's CPU engine), or "" for an attached one
        self.findings = [_started(self)]

    def __repr__(self) -> str:
        return f"Server({self.url!r}, ready={self.ready})"

    @property
    def ready(self) -> bool:
        return self.timeline.ready

    def require(self) -> None:
        """KitError unless it came up."""
        if not self.ready:
            raise KitError(f"The server at {self.url} cannot be used: {self.findings[0].title}.")

    def raw_info(self) -> dict:
        """`/server_info` under its new or old name; it may hold secrets, so show `info()` in its place."""
        self.require()
        try:
            return self.client.get("/server_info")
        except Failed as failed:
            if failed.kind != "404":
                raise
        return self.client.get("/get_server_info")

    def info(self) -> Speculation:
        """Speculation on or off and how, and the release, by the server's own words.

        vLLM tells its version only: `release` is then "vllm " and that version, and `on` is None.
        """
        try:
            return speculation(self.raw_info())
        except Failed as failed:
            if failed.kind != "404":
                raise
        version = self.client.get("/version").get("version")
        return replace(speculation({}), release=f"vllm {version}")

    def chat(self, text: str, max_tokens: int = 48) -> str:
        """The greedy answer to one user message."""
        self.require()
        body = {"model": "default", "messages": [{"role": "user", "content": text}], "temperature": 0}
        answer = self.client.post("/v1/chat/completions", body | {"max_tokens": max_tokens})
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise KitError(f"{self.url} answered a chat request without a message; is this an SGLang server?") from None

    def stop(self) -> None:
        """End a server that the kit started, with every process of it; leave an attached one alone."""
        if self.process:
            self.process.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    launch: Launch,
    log_dir: str | Path,
    *,
    engine: str = "auto",
    progress: Callable[[Iterable], Iterable] = iter,
    limit_s: float = 600.0,
    interval_s: float = 10.0,
) -> Server:
    """Start a server and wait until it is ready, has died, or `limit_s` is over.

    KitError for bad input only; a server that does not come up is returned with its reason, and is already gone.
    """
    name, why = choose_engine(engine)
    check_installed(launch)
    client, log = Client(f"http://127.0.0.1:{free_port(launch.port)}", timeout_s=limit_s), _new_log(Path(log_dir))
    process = Process(launch.command(name, int(client.url.rpartition(":")[2])), launch.environment(name), log)
    try:
        limit = max(1, round(limit_s / interval_s) + 1)
        timeline = watch(
            client, interval_s=interval_s, limit=limit, tail=Tail(log), ended=process.ended, progress=progress
        )
        if not timeline.ready:
            process.stop()
        return Server(client, timeline, log=log, launch=launch, process=process, engine=name, why=why)
    except BaseException:  # Ctrl-C too
        process.stop()
        raise


def attach(
    url: str, api_key: str = "", *, log: str | Path | None = None, limit: int = 1, interval_s: float = 10.0,
    timeout_s: float = 120.0,
) -> Server:  # fmt: skip
    """A server that runs already; `log` is its log file, where this machine has it. The key is never shown."""
    client, log = Client(url, api_key, timeout_s), Path(log) if log else None
    limits = {"interval_s": interval_s, "limit": limit, "timeout_s": min(20.0, timeout_s)}
    return Server(client, watch(client, **limits, tail=Tail(log) if log else None), log=log)


def health_findings(server: Server, run: Run | None = None, floor: float | None = None) -> list[Finding]:
    """S501, and S502: what a 200 does not prove.

    `floor` is the accept length below which a drafter counts as broken, from controls (`line` of M201); without
    one, a run that accepted something is not judged.
    """
    if not server.ready:
        return server.findings
    told = server.info()
    values = {"on": told.on, "algorithm": told.algorithm, "release": told.release}
    evidence = [Evidence("server", f"/health 200 · speculative_algorithm {told.algorithm or 'none'}", values)]
    if told.on is False:
        return [*server.findings, Finding.of("S502", "the server is healthy and does not speculate", evidence=evidence)]
    if run is None or run.verified == 0:
        title = "no verify round was measured, and health alone proves nothing about the drafter"
        return [*server.findings, Finding.of("S502", title, status="not-run", evidence=evidence)]
    low, high = run.interval or (run.accept_length, run.accept_length)  # vLLM tells totals only
    said = f"({low:.2f}-{high:.2f}): {run.accepted} drafts in {run.verified} rounds"
    text = f"accept length {run.accept_length:.3f} {said}"
    evidence.append(Evidence("acceptance", text + (f" · broken below {floor:.2f}" if floor else ""), {"floor": floor}))
    title = f"the server is healthy and accept length is {run.accept_length:.2f}"
    if run.accepted == 0 or (floor and high < floor):
        return [*server.findings, Finding.of("S502", title, evidence=evidence)]
    if floor is None:
        title += "; only controls can say whether the drafter works (M201)"
        return [*server.findings, Finding.of("S502", title, status="not-run", evidence=evidence)]
    good = (
        {"status": "pass"} if low > floor else {"severity": "warning", "title": title + ", too close to the controls"}
    )
    return [*server.findings, Finding.of("S502", evidence=evidence, **good)]


def _started(server: Server) -> Finding:
    """S501, with the reason from the log where there is one."""
    timeline, log = server.timeline, server.log
    evidence = [Evidence("server", timeline.explain(), timeline.to_dict())]
    if server.ready:
        return Finding.of("S501", status="pass", evidence=evidence)
    kind, said = "", ""
    with contextlib.suppress(OSError):
        kind, said = reason(log.read_bytes()) if log else ("", "")
    if said:
        evidence.append(Evidence("log", redact(said), {"kind": kind, "log": str(log)}))
    what = "died in start-up" if timeline.ended else "did not become ready"
    title = f"the server {what}: {redact(said) or timeline.explain()}".rstrip(".")
    return Finding.of("S501", title, evidence=evidence, cause=redact(said) or "the server says nothing about it")


def _new_log(folder: Path) -> Path:
    """A log file that did not exist before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for n in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                path = folder / f"server-{n}.log"
                path.touch(exist_ok=False)
                return path
    except OSError as error:
        raise KitError(f"Cannot write a log in {folder} ({error.strerror}); choose another folder.") from None
    raise AssertionError("unreachable")
