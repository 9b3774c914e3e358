"""Acceptance and speed of a server on fixed prompts: counts request by request, ratios taken once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..findings import KitError
from ..logs import Counts, Speculation, request_counts, server_counts
from . import vllm
from .client import Client, Failed
from .serve import Server

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # a user message, token ids, or chat messages


@dataclass(frozen=True)
class Request:
    """One answered prompt. `ttft_s` and `ids` are None where the server does not tell them (chat)."""

    prompt: int  # its number
    text: str
    ids: tuple[int, ...] | None  # token ids of the answer
    counts: Counts
    seconds: float
    ttft_s: float | None  # time to first token

    @property
    def tokens(self) -> int:
        return self.counts.tokens or len(self.ids or ())


@dataclass
class Run:
    """What was measured, also where it ended early: then `error` says why, and `requests` has the finished ones."""

    prompts: Sequence[Prompt]
    draft_steps: int | None  # S; None: no speculation, or not told
    clients: int
    requests: list[Request] = field(default_factory=list)  # by prompt number
    seconds: float = 0.0  # wall time, warm-up not included
    error: str = ""
    engine_says: dict[str, Any] = field(default_factory=dict)
    totals: Counts | None = None  # where the server counts all requests together (vLLM)

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """[prompt][round] accepted drafts, for `Acceptance(run.rounds, run.draft_steps)`; sorted within a prompt.

        Engines tell a histogram a request and not the order. Empty where one of them tells none.
        """
        told = [r.counts for r in self.requests]
        if any(c.v and not c.histogram for c in told):
            return ()
        return tuple(tuple(k for k, n in enumerate(c.histogram) for _ in range(n)) for c in told)

    @property
    def texts(self) -> list[tuple[int, ...] | str | None]:
        """Token ids of every answer, its text where no ids are told, None where there is no answer."""
        found = {r.prompt: r.text if r.ids is None else r.ids for r in self.requests}
        return [found.get(i) for i in range(len(self.prompts))]

    @property
    def verified(self) -> int:
        """v: verify rounds."""
        return self.totals.v or 0 if self.totals else sum(r.counts.v or 0 for r in self.requests)

    @property
    def accepted(self) -> int:
        """a: accepted draft tokens."""
        return self.totals.a or 0 if self.totals else sum(r.counts.a or 0 for r in self.requests)

    @property
    def accept_length(self) -> float | None:
        """1 + a/v, the bonus token included; None without a verify round."""
        return 1 + self.accepted / self.verified if self.verified else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Bootstrap over prompts of the accept length, as `Acceptance.interval`; None where only totals are told."""
        rows = [(r.counts.a or 0, r.counts.v or 0) for r in self.requests]
        return (
            None
            if self.totals or not self.verified
            else tuple(1 + x for x in bootstrap(rows, lambda t: t[:, 0] / t[:, 1]))
        )

    @property
    def histogram(self) -> list[int]:
        """Rounds by accepted drafts, over all requests that tell it."""
        told = [c.histogram for c in ([self.totals] if self.totals else [r.counts for r in self.requests])]
        told = [h for h in told if h]
        longest = max((len(h) for h in told), default=0)
        size = max(longest, (self.draft_steps or 0) + 1) if told else 0  # engines leave trailing zeros out
        return [sum(h[k] for h in told if k < len(h)) for k in range(size)]

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.requests)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens over wall time, all clients together."""
        return self.tokens / self.seconds if self.requests and self.seconds else None

    @property
    def ttft(self) -> float | None:
        """Median time to first token in seconds."""
        told = [r.ttft_s for r in self.requests if r.ttft_s is not None]
        return float(np.median(told)) if told else None

    def to_dict(self) -> dict[str, Any]:
        """Totals and one row a request; no prompt and no text."""
        totals = ("accept_length", "interval", "accepted", "verified", "histogram", "draft_steps", "clients", "tokens")
        row = {name: getattr(self, name) for name in (*totals, "seconds", "tokens_per_s", "ttft", "error")}
        each = [{k: v for k, v in asdict(r).items() if k not in ("text", "ids")} for r in self.requests]
        asked = len(self.prompts)
        return {**row, "answered": len(each), "asked": asked, "engine_says": self.engine_says, "requests": each}


def bench(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    clients: int = 4,
    warmup: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Run:
    """Ask every prompt once, greedily, `clients` at a time. The first failure ends the run and what is done is kept.

    Warm-up asks the first prompts beforehand; on a server of the kit's own its cache is flushed afterwards.
    """
    prompts = list(prompts)
    if not prompts or min(clients, max_new_tokens) < 1 or not all(prompts):
        raise KitError("A benchmark needs prompts that are not empty, and at least one client and one new token.")
    server.require()
    run, info = Run(prompts, None, clients), None
    try:
        info = server.info()
        run.draft_steps = info.steps if info.on is not False else None
        foreign = info.release.startswith("vllm ")
        ask = partial(_ask_openai, server.client, vllm.model(server.client)) if foreign else partial(_ask, server, info)
        for i in range(warmup):
            ask(i, prompts[i % len(prompts)], max_new_tokens)
        if server.process and warmup:
            server.client.status("/flush_cache", 30.0)
        before = vllm.reading(server.client) if foreign else {}
    except KitError as error:
        run.error = str(error)
        return run
    todo, done, stop = iter(enumerate(prompts)), queue.Queue(), threading.Event()
    lock = threading.Lock()

    def work() -> None:
        while not stop.is_set():
            with lock:
                i, prompt = next(todo, (None, None))
            if i is None:
                return
            try:
                done.put(ask(i, prompt, max_new_tokens))
            except Exception as error:  # a thread must not die in silence: the reader would wait for ever
                stop.set()
                done.put(error if isinstance(error, KitError) else KitError(f"prompt {i}: {error!r}"))

    began = time.perf_counter()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(clients, len(prompts)))]
    for thread in threads:
        thread.start()
    try:
        for _ in progress(range(len(prompts))):
            result = done.get()
            if isinstance(result, KitError):
                run.error = str(result)
                break
            run.requests.append(result)
    finally:
        stop.set()
    run.seconds = time.perf_counter() - began
    if run.error:  # those that were under way may still finish
        for thread in threads:
            thread.join(server.client.timeout_s * 2)
        rest = [done.get() for _ in range(done.qsize())]
        run.requests += [r for r in rest if isinstance(r, Request)]
    run.requests.sort(key=lambda r: r.prompt)
    if foreign and not run.error:
        run.totals = vllm.difference(before, vllm.reading(server.client))
        run.draft_steps = run.totals.S
        run.engine_says = {"accept_length": run.totals.accept_length, "why": run.totals.caveat}
    elif not run.error:
        run.engine_says = _engine_says(server, run)
    return run


def _ask_openai(client: Client, model: str, number: int, prompt: Prompt, max_new_tokens: int) -> Request:
    """One greedy request to a server that only speaks OpenAI's protocol; its counts are the server's, not its own."""
    began, body = time.perf_counter(), {"model": model, "temperature": 0, "max_tokens": max_new_tokens}
    ids = not isinstance(prompt, str) and isinstance(prompt[0], int)
    try:
        if ids:
            answer = client.post("/v1/completions", body | {"prompt": list(prompt), "return_token_ids": True})
            choice = answer["choices"][0]
            text, told = choice["text"], choice.get("token_ids")
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            answer = client.post("/v1/chat/completions", body | {"messages": messages})
            text, told = answer["choices"][0]["message"]["content"], None
        counts = Counts(tokens=int(answer["usage"]["completion_tokens"]))
    except (KeyError, IndexError, TypeError, ValueError):
        raise Failed("fields", f"{client.url} answered a completion without a choice, a text or its usage.") from None
    return Request(number, str(text), tuple(told) if told else None, counts, time.perf_counter() - began, None)


def _ask(server: Server, info: Speculation, number: int, prompt: Prompt, max_new_tokens: int) -> Request:
    """One greedy request: ids are streamed from /generate, text goes through the server's chat template."""
    began, first, told, client = time.perf_counter(), None, None, server.client
    if isinstance(prompt, str) or not isinstance(prompt[0], int):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": max_new_tokens}
        answer = client.post("/v1/chat/completions", body | {"return_meta_info": True})
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
    else:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        body, answer = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}, {}
        for answer in client.stream("/generate", body):
            first = time.perf_counter() - began if first is None else first
            new = answer.get("output_ids")
            if isinstance(new, list) and all(isinstance(x, int) for x in new):
                so_far = request_counts(answer).tokens  # a chunk repeats all ids, or holds the new ones only
                told = new if so_far in (None, len(new)) else [*(told or []), *new]
        text = answer.get("text")
        meta = answer.get("meta_info")
        if not isinstance(meta, Mapping):
            raise Failed("fields", f"{client.url}/generate answered without meta_info; is this an SGLang server?")
    if not isinstance(text, str) and told is None:
        raise Failed("fields", f"{client.url} answered without a text; is this an SGLang server?")
    counts = request_counts(answer, info.release, info.draft_tokens, info.steps)
    ids = None if told is None else tuple(told)
    return Request(number, text if isinstance(text, str) else "", ids, counts, time.perf_counter() - began, first)


def _engine_says(server: Server, run: Run) -> dict[str, Any]:
    """The engine's own accept length, and why it is another number than ours."""
    try:
        told = server_counts(server.raw_info())
    except KitError as error:
        return {"accept_length": None, "why": str(error)}
    per_request = run.tokens / run.verified if run.verified else None
    why = f"/server_info: {told.caveat}; tokens over rounds: the first token comes from the prefill and lifts it, "
    return {
        "accept_length": told.stated,
        "tokens_over_rounds": per_request,
        "why": why + "the end of the answer cuts what the last round accepted; ours is 1 + a/v over these requests",
    }


def bootstrap(rows: Sequence[Sequence[float]], ratio: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
    """95 % bootstrap over prompts of a ratio of sums: sums first, the ratio once."""
    table = np.array(rows, dtype=float)  # [prompts, columns]
    pick = np.random.default_rng(0).integers(0, len(table), (2000, len(table)))
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = np.nanquantile(ratio(table[pick].sum(1)), [0.025, 0.975])
    return float(low), float(high)
