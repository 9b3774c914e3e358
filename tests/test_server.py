"""Servers that misbehave, die or are orphaned: one sentence within the time-out, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import misbehaving
import numpy as np
import pytest
from misbehaving import cut, drip, endless, hang, healthy, serving, sse

import kitlib.launch
from kitlib.findings import KitError
from kitlib.logs import Counts
from kitlib.server import (
    Client,
    Launch,
    attach,
    bench,
    choose_engine,
    compare,
    health_findings,
    noise_floor,
    speed_findings,
    start,
    text_findings,
    tie_gaps,
)
from kitlib.server.bench import Request, Run
from kitlib.server.launch import threads

FIXTURES = Path(__file__).parent / "fixtures" / "sglang-0.5.20"
PROMPTS = [[10 * i, 2, 3] for i in range(1, 7)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_gone(pids: list[int], within: float = 20.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end and not all(map(gone, pids)):
        time.sleep(0.1)
    return all(map(gone, pids))


@pytest.fixture
def fake(tmp_path):
    """A Launch of a script that behaves like an engine; more flags can be given."""
    script = tmp_path / "engine.py"
    script.write_text(misbehaving.ENGINE)

    def make(*extra: str) -> Launch:
        return Launch(tmp_path, server=(sys.executable, str(script)), extra=extra)

    return make


# --- a server that works ---------------------------------------------------------------------------------------


def test_a_run_counts_what_the_server_says():
    with serving(healthy()) as (url, seen):
        server = attach(url)
        run = bench(server, PROMPTS, max_new_tokens=8, clients=3)
        assert server.chat("Capital of France?") == "Paris."
    assert not run.error and len(run.requests) == 6
    assert run.texts == [tuple(10 * i + k for k in range(8)) for i in range(1, 7)]
    assert run.rounds == ((0, 1, 2),) * 6 and run.histogram == [6, 6, 6, 0, 0]
    assert (run.verified, run.accepted, run.accept_length, run.draft_steps) == (18, 18, 2.0, 4)
    assert run.interval == (2.0, 2.0) and run.tokens == 48 and run.ttft > 0
    assert run.engine_says["accept_length"] == 1.5 and "prefill" in run.engine_says["why"]
    assert json.loads(json.dumps(run.to_dict()))["answered"] == 6
    asked = [body for path, body, _ in seen if path == "/generate"]
    assert all(b["sampling_params"] == {"temperature": 0, "max_new_tokens": 8} and b["stream"] for b in asked)
    assert len(asked) == 7  # one warm-up


def test_chat_prompts_count_too_without_ids():
    with serving(healthy()) as (url, seen):
        run = bench(attach(url), ["hello", [{"role": "user", "content": "hi"}]], max_new_tokens=8, warmup=0)
    assert run.texts == ["Paris.", "Paris."] and run.accept_length == 2.0 and run.ttft is None
    assert seen[-2][1]["messages"][0]["role"] == "user" and seen[-2][1]["return_meta_info"]


def test_chunks_that_hold_only_new_ids_are_joined():
    whole = misbehaving.answer(list(range(4)), [1, 1, 0, 0, 0])
    chunks = [whole | {"output_ids": [0, 1]}, whole | {"output_ids": [2, 3]}]
    with serving(healthy(lambda *_: (200, sse(*chunks)))) as (url, _):
        assert bench(attach(url), [[1]], warmup=0).texts == [(0, 1, 2, 3)]


def test_a_vllm_server_is_counted_by_the_difference_of_its_counters():
    """From vLLM's documentation, not run: counters of all requests, positions joint, other traffic before the run."""
    asked, drafts = [], iter([30, 40, 40, 40])

    def handle(_, path, body):
        if path in ("/health", "/metrics", "/version", "/v1/models", "/v1/completions"):
            if path == "/v1/completions":
                asked.append(body)
                choice = {"text": "ab", "token_ids": body["prompt"][:2]}
                return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 2}}).encode()
            if path == "/metrics":
                n = next(drafts)
                text = f"""# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {n}.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {n - 20}.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {3 * n}.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {n - 24}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {3 if n < 40 else 5}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="2"}} 1.0
"""
                return 200, text.encode()
            told = {"/version": {"version": "0.33.0"}, "/v1/models": {"data": [{"id": "m"}]}}.get(path, {})
            return 200, json.dumps(told).encode()
        return 404, b"{}"

    with serving(handle) as (url, _):
        server = attach(url)
        run = bench(server, PROMPTS, max_new_tokens=8, clients=2)
        found = health_findings(server, run)
    assert not run.error and server.ready and len(asked) == 7 and asked[0]["return_token_ids"]
    assert (run.verified, run.accepted, run.accept_length, run.draft_steps) == (10, 10, 2.0, 3)
    assert run.histogram == [0, 8, 2, 0] and run.interval is None and run.texts[0] == (10, 2)
    assert [f.status for f in found if f.code == "S502"] == ["not-run"]  # no control, no verdict
    assert json.loads(json.dumps(run.to_dict()))["accept_length"] == 2.0


# --- servers that do not ----------------------------------------------------------------------------------------

FAULTS = {
    "hangs": (hang, "did not answer within 1 s"),
    "drips": (drip, "did not answer within 1 s"),
    "cut stream": (cut, "ended in the middle of the answer"),
    "huge body": (endless, "more than 64 MB"),
    "500": (lambda *_: (500, b"CUDA error: device-side assert"), "answered with status 500: CUDA error: device-side"),
    "redirect": (lambda *_: (302, b"elsewhere"), "answered with status 302: elsewhere"),
    "not JSON": (lambda *_: (200, b"data: {oops\n\n"), "answered what is not JSON"),
    "deep JSON": (lambda *_: (200, b"data: " + b"[" * 100000 + b"\n\n"), "answered what is not JSON"),
    "wrong type": (lambda *_: (200, sse([1, 2])), "answered a list, not an object"),
    "no meta_info": (lambda *_: (200, sse({"text": "x"})), "answered without meta_info"),
    "no text": (lambda *_: (200, sse({"meta_info": {}, "output_ids": "no"})), "answered without a text"),
    "no chunk": (lambda *_: (200, sse()), "answered without meta_info"),
    "an error in the stream": (lambda *_: (200, sse({"error": {"message": "too long"}})), "refused: too long"),
    "half a stream": (lambda *_: (200, sse({"text": "x"})[:-14]), "ended in the middle"),
    "401": (lambda *_: (401, b"no"), "wants an API key, or another one (status 401)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_what_was_measured_is_kept(name):
    bad, says = FAULTS[name]
    with serving(healthy(bad, after=3)) as (url, _):
        server = attach(url, timeout_s=60.0 if name == "huge body" else 1.0)  # 64 MB have to arrive first
        began = time.monotonic()
        run = bench(server, PROMPTS, max_new_tokens=8, clients=1, warmup=1)
        took = time.monotonic() - began
    assert says in run.error and "\n" not in run.error and run.error.endswith((".", "?")) and len(run.error) < 320
    assert len(run.requests) == 2 and run.accept_length == 2.0  # the warm-up was the first of three
    assert run.texts[2:] == [None] * 4 and run.to_dict()["asked"] == 6
    assert took < 20 or name == "huge body"  # a bound on hanging, not a speed


def test_a_fault_with_many_clients_keeps_those_under_way():
    with serving(healthy(lambda *_: (500, b"no"), after=4)) as (url, _):
        run = bench(attach(url), PROMPTS, clients=6, warmup=0)
    assert len(run.requests) == 4 and "status 500" in run.error


@pytest.mark.parametrize("body", [b"[]", b"null", b"\xff\xfe", b""])
def test_server_info_that_is_nonsense(body):
    with serving(lambda *_: (200, body)) as (url, _):
        run = bench(attach(url), PROMPTS)
        assert "answered" in run.error and not run.requests
        with pytest.raises(KitError, match="answered"):
            attach(url).chat("hi")


def test_wrong_types_inside_never_raise():
    odd = {"text": "x", "output_ids": [1], "meta_info": {"spec_verify_ct": "many", "completion_tokens": [], "x": None}}
    with serving(healthy(lambda *_: (200, sse(odd)))) as (url, _):
        run = bench(attach(url), [[1]], warmup=0)
    assert not run.error and run.accept_length is None and "no verify round" in run.requests[0].counts.caveat


def test_refused_503_and_200_are_told_apart(tmp_path):
    began = []

    def handle(request, path, body):
        began.append(path)
        return (503, b"") if len(began) < 4 else (200, b"{}")

    refused = attach(f"http://127.0.0.1:{misbehaving.free_port()}")
    assert not refused.ready and refused.timeline.polls[0][1] == "refused"
    assert refused.findings[0].code == "S501" and refused.findings[0].is_error
    with pytest.raises(KitError, match="cannot be used"):
        bench(refused, PROMPTS)
    with pytest.raises(KitError, match="cannot be used"):
        refused.info()
    with serving(handle) as (url, _):
        late = attach(url, limit=10, interval_s=0.05)
        assert [what for _, what in late.timeline.polls] == ["503", "503", "503", "200"] and late.ready
    with serving(lambda *_: (503, b"")) as (url, _):
        never = attach(url, limit=3, interval_s=0.01)
        assert not never.ready and len(never.timeline.polls) == 3
        assert "the last saw 503" in never.findings[0].title
    with serving(lambda *_: time.sleep(5)) as (url, _):
        assert attach(url, timeout_s=0.3).timeline.polls[0][1] == "time-out"


def test_a_key_reaches_the_server_and_nothing_else(tmp_path):
    key = "very-secret-4711"

    def echo(request, body):
        return 500, request.headers["Authorization"].encode()

    with serving(healthy(echo, after=1), key=key) as (url, seen):
        server = attach(url, key)
        run = bench(server, PROMPTS, warmup=1)
        assert attach(url).timeline.polls[0][1] == "401"
    assert "status 500" in run.error
    shown = [repr(server), repr(server.client), repr(vars(server.client)), run.error, json.dumps(run.to_dict())]
    shown += [str(f) for f in health_findings(attach(url, key))] + [repr(run)]
    assert not any(key in text for text in shown)
    assert all(h.get("Authorization") in (f"Bearer {key}", None) for _, _, h in seen)


@pytest.mark.parametrize("url", ["localhost:1", "ftp://x", "http://", "http://me:key@host", None, 7])
def test_urls_that_are_none(url):
    with pytest.raises(KitError, match="http://host:port"):
        Client(url)


# --- launching --------------------------------------------------------------------------------------------------


def test_command_lines(tmp_path):
    launch = Launch(tmp_path, tmp_path, port=30000, extra=("--log-level", "info"))
    words = launch.command("cpu")
    line = " ".join(words)
    assert words[1:3] == ["-m", "sglang.launch_server"] and "--host 127.0.0.1 --port 30000 --dtype float32" in line
    assert "--speculative-algorithm EAGLE3" in line and "--speculative-num-draft-tokens 5" in line
    assert "--device cpu --disable-cuda-graph" in line and words[-2:] == ["--log-level", "info"]
    assert "--device" not in launch.command("gpu")
    assert "speculative" not in " ".join(replace(launch, algorithm="").command("gpu"))
    assert "speculative" not in " ".join(Launch(tmp_path).command("gpu"))
    ngram = " ".join(Launch(tmp_path, algorithm="NGRAM", draft_tokens=8, topk=2).command("cpu"))
    assert "--speculative-num-draft-tokens 8" in ngram and "draft-model-path" not in ngram
    assert "sk-12345678" not in str(Launch(tmp_path, extra=("--api-key", "sk-12345678")))
    env = launch.environment("cpu")
    assert env["PYTHONPATH"].startswith(str(Path(kitlib.__file__).parent / "cpu_engine" / "path"))
    assert env["CUDA_VISIBLE_DEVICES"] == "" and 1 <= int(env["OMP_NUM_THREADS"]) <= (os.cpu_count() or 1)
    assert "PYTHONPATH" not in launch.environment("gpu")
    parsed = kitlib.launch.parse(line)
    assert (parsed.algorithm, parsed.number("speculative-num-steps")) == ("EAGLE3", 4)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"algorithm": "EAGLE4"}, "EAGLE4"), ({"steps": 0}, "at least 1"), ({"draft_tokens": 4}, "has 5 draft tokens"),
        ({"port": 70000}, "65535"), ({"drafter": "/nowhere/at/all"}, "nothing at"),
    ],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(tmp_path, bad, says):
    with pytest.raises(KitError, match=says):
        Launch(tmp_path, **bad)


def test_the_engine_is_chosen_with_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_engine() == ("cpu", "CUDA_VISIBLE_DEVICES is empty, so SGLang runs on the kit's CPU engine")
    with pytest.raises(KitError, match="GPU was asked for, but CUDA_VISIBLE_DEVICES is empty"):
        choose_engine("gpu")
    with pytest.raises(KitError, match="none of auto, gpu, cpu"):
        choose_engine("tpu")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_engine() == ("gpu", "GPU 0: NVIDIA H200")


def test_threads_follow_the_load(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for load, free in ((0.2, 8), (3.0, 5), (50.0, 1)):
        monkeypatch.setattr("kitlib.server.launch.busy", lambda load=load: load)
        assert threads() == free
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3


def test_start_waits_for_both_clocks_and_stop_leaves_nothing(fake, tmp_path):
    with start(fake("--pids", str(tmp_path / "pids")), tmp_path / "logs", engine="cpu", interval_s=0.2) as server:
        assert server.ready, server.log.read_text()
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert len(pids) == 4 and not any(map(gone, pids))
    assert all_gone(pids, 1.0)
    polled = list(dict.fromkeys(what for _, what in server.timeline.polls))
    assert polled[-2:] == ["503", "200"]
    events = server.timeline.events()
    assert {"log", "health"} == {e["clock"] for e in events}
    assert next(e for e in events if e["what"] == "200")["since"] is not None
    assert "The log says ready at" in server.timeline.explain()
    assert server.findings[0].status == "pass"
    with start(fake(), tmp_path / "logs", engine="cpu", interval_s=0.2) as other:
        assert other.log != server.log and server.log.exists()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "raise", "exit", "fork"])
def test_however_the_client_ends_the_server_ends(fake, tmp_path, how):
    launch = fake("--pids", str(tmp_path / "pids"))
    code = textwrap.dedent(f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(Path(kitlib.__file__).parent.parent)!r})
        from kitlib.server import Launch, start
        server = start(Launch({str(tmp_path)!r}, server={launch.server!r}, extra={launch.extra!r}),
                       {str(tmp_path / "logs")!r}, engine="cpu", interval_s=0.2)
        assert server.ready
        how = {how!r}
        if how == "raise":
            raise RuntimeError("a cell failed")
        if how == "fork":
            if os.fork() == 0:
                sys.exit(0)  # runs atexit in a child that owns nothing
            os.wait()
            assert not server.process.ended(0.5)
            os._exit(1)
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(60)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    expected = {"SIGKILL": -9, "SIGTERM": -15, "raise": 1, "exit": 0, "fork": 1}[how]
    assert done.returncode == expected and "AssertionError" not in done.stderr, done.stderr
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(pids) == 4 and all_gone(pids)


def test_ctrl_c_while_waiting_stops_the_server(fake, tmp_path):
    def interrupted(polls):
        for n in polls:
            if (tmp_path / "pids").exists():
                raise KeyboardInterrupt
            yield n

    with pytest.raises(KeyboardInterrupt):
        start(fake("--pids", str(tmp_path / "pids")), tmp_path, engine="cpu", interval_s=0.05, progress=interrupted)
    assert all_gone(list(map(int, (tmp_path / "pids").read_text().split())), 1.0)


def test_the_guard_killed_takes_the_server_with_it(fake, tmp_path):
    with start(fake("--pids", str(tmp_path / "pids")), tmp_path, engine="cpu", interval_s=0.2) as server:
        server.process._guard.send_signal(signal.SIGKILL)
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert all_gone(pids[:1], 5.0)
    for pid in filter(lambda p: not gone(p), pids[1:]):  # the stand-in's children have no PDEATHSIG; SGLang's have
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("log", sorted(FIXTURES.glob("died-*.log")), ids=lambda p: p.stem)
def test_a_death_in_start_up_is_a_reason_and_no_time_out(fake, tmp_path, log):
    from kitlib.logs import reason

    kind, said = reason(log.read_bytes())
    server = start(fake("--log", str(log)), tmp_path, engine="cpu", interval_s=30.0, limit_s=600.0)
    (finding,) = server.findings
    assert not server.ready and server.timeline.ended and len(server.timeline.polls) <= 2
    assert (finding.code, finding.status, kind != "") == ("S501", "fail", True)
    assert said.rstrip(".") in finding.title and finding.evidence[-1].values["kind"] == kind
    assert health_findings(server) == [finding]


def test_a_taken_port_is_said_before_and_after_the_start(fake, tmp_path):
    with serving(lambda *_: (200, b"{}")) as (url, _):
        launch = replace(fake(), port=int(url.rpartition(":")[2]))
        with pytest.raises(KitError, match="taken by another process"):
            start(launch, tmp_path, engine="cpu")


def test_missing_sglang_and_a_log_folder_that_is_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KitError, match="SGLang is not installed here"):
        start(Launch(tmp_path), tmp_path, engine="cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(KitError, match="Cannot write a log"):
        start(Launch(tmp_path, server=("true",)), tmp_path / "file", engine="cpu")


# --- judging ----------------------------------------------------------------------------------------------------


def made(ids: list[tuple[int, ...]], histogram=(1, 1, 0, 0, 0), seconds: float = 1.0) -> Run:
    v, a = sum(histogram), sum(k * n for k, n in enumerate(histogram))
    requests = [
        Request(i, "", x, Counts(v, a, 5, 4, tuple(histogram), tokens=len(x)), seconds * (i + 1), 0.1)
        for i, x in enumerate(ids)
    ]
    return Run([[1, 2]] * len(ids), 4, 1, requests, seconds * len(ids))


def test_texts_are_judged_by_the_rule_of_m205():
    same, other = made([(1, 2, 3), (4, 5, 6)]), made([(1, 2, 3), (4, 9, 6)])

    def status(run, *args, **kw):
        return text_findings(run, *args, **kw)[0].status

    assert status(same, same, "float32") == "pass"
    (finding,) = text_findings(other, same, "float32")
    assert finding.status == "fail" and finding.is_error and "prompt 1 parts at 1" in finding.evidence[0].text
    assert status(other, [(1, 2, 3), (4, 5, 6)], "float32", {1: 0.01}, 0.05) == "fail"  # whatever the gap
    assert status(other, same, "bfloat16") == status(other, same, "bfloat16", {1: 0.01}) == "not-run"
    assert status(other, same, "bfloat16", {1: 0.01}, 0.05) == "pass"
    assert status(other, same, "bfloat16", {1: 0.90}, 0.05) == "fail"
    assert status(other, same, "bfloat16", {}, 0.05) == "not-run"
    short = made([(1, 2), (4, 5, 6)])
    assert status(short, same, "float32") == "fail"
    assert status(Run([[1, 2]], 4, 1), made([(1,)]), "float32") == "not-run"


def test_gaps_are_asked_where_answers_part_and_odd_answers_give_none():
    run, other = made([(1, 2, 3), (4, 5, 6)]), made([(1, 2, 3), (4, 9, 6)])
    told = {"meta_info": {"output_top_logprobs": [[[-0.1, 5, None], [-0.35, 9, None]]]}}
    with serving(healthy(lambda *_: (200, json.dumps(told).encode()))) as (url, seen):
        assert tie_gaps(attach(url), run, other) == {1: pytest.approx(0.25)}
    assert seen[-1][1]["input_ids"] == [1, 2, 4] and seen[-1][1]["top_logprobs_num"] == 2
    with serving(healthy(lambda *_: (200, b'{"meta_info": {"output_top_logprobs": [[[null]]]}}'))) as (url, _):
        assert tie_gaps(attach(url), run, other) == {}


def test_speed_up_and_its_interval_come_from_paired_prompts():
    ids = [tuple(range(8))] * 6
    told = compare(made(ids, seconds=1.0), made(ids, histogram=(0,) * 5, seconds=2.0))
    assert told["speedup"] == pytest.approx(2.0) and told["interval"] == pytest.approx((2.0, 2.0))
    assert (told["texts_identical"], told["texts_total"]) == (6, 6)
    assert compare(Run([[1, 2]], 4, 1, error="x"), made([(1,)]))["speedup"] is None
    with pytest.raises(KitError, match="different prompts"):
        compare(made(ids), made(ids[:2]))
    with pytest.raises(KitError, match="another number of answers"):
        text_findings(made(ids), [(1,)], "float32")


def test_the_interval_is_that_of_acceptance():
    from kitlib.acceptance import Acceptance

    draw = np.random.default_rng(1)
    runs = made([(1,)] * 9)
    runs.requests = [
        replace(r, counts=replace(r.counts, v=sum(h), a=sum(k * n for k, n in enumerate(h)), histogram=tuple(h)))
        for r, h in zip(runs.requests, draw.integers(0, 9, (9, 5)).tolist(), strict=True)
    ]
    same = Acceptance(runs.rounds, 4)
    assert runs.interval == pytest.approx(same.interval()) and runs.accept_length == pytest.approx(same.accept_length)
    assert runs.histogram == same.histogram


def test_health_is_judged_against_controls_only():
    with serving(healthy()) as (url, _):
        server = attach(url)
        ids = [(1,)] * 8

        def status(run, floor=None):
            return health_findings(server, run, floor)[-1].status

        assert status(None) == status(Run([[1]], 4, 1)) == "not-run"
        assert status(made(ids, (9, 0, 0, 0, 0))) == "fail"  # nothing at all was accepted
        assert status(made(ids, (9, 1, 0, 0, 0))) == "not-run"
        assert status(made(ids, (9, 1, 0, 0, 0)), 1.2) == "fail"
        assert status(made(ids, (9, 5, 0, 0, 0)), 1.2) == "pass"
    off = misbehaving.INFO | {"speculative_algorithm": None}
    with serving(lambda *_: (200, json.dumps(off).encode())) as (url, _):
        (_, finding) = health_findings(attach(url))
        assert finding.code == "S502" and "does not speculate" in finding.title and finding.is_error


def test_importing_the_server_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", "import kitlib.server, sys; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_a_run_can_be_stored():
    assert pickle.loads(pickle.dumps(made([(1,)]))).texts == [(1,)]  # noqa: S301 (our own bytes)


@pytest.mark.parametrize(
    ("interval", "unfit", "status"),
    [((1.1, 1.4), "", "pass"), ((0.5, 0.9), "", "fail"), ((0.9, 1.2), "", "not-run"), ((0.5, 0.9), "CPU", "not-run")],
)
def test_speed_is_judged_by_its_interval(interval, unfit, status):
    told = {"speedup": sum(interval) / 2, "interval": interval, "accept_length": 2.0, "tokens_per_s": [1.0, 1.0]}
    (found,) = speed_findings(told, unfit)
    assert (found.code, found.status) == ("M206", status)
    assert speed_findings({"speedup": None})[0].status == "not-run"


def test_the_noise_floor_is_twice_what_a_log_probability_moves():
    """Four tokens, scored one by one and at once; the third moves most."""
    slow, fast = [-1.0, -2.0, -0.5, -3.0], [-1.01, -2.0, -0.53, -3.01]

    def handle(_, path, body):
        if path != "/generate":
            return 200, b"{}"
        ids = body["input_ids"]
        if len(ids) == 3:
            meta = {"output_token_logprobs": [[p, 7 + i, None] for i, p in enumerate(slow)]}
        else:
            assert ids[3:] == [7, 8, 9, 10] and body["logprob_start_len"] == 2
            meta = {"input_token_logprobs": [[None, ids[2], None], *([p, 0, None] for p in fast)]}
        return 200, json.dumps({"text": "", "meta_info": meta}).encode()

    with serving(handle) as (url, _):
        assert noise_floor(attach(url), [[1, 2, 3]]) == pytest.approx(0.06)
    with serving(lambda _, path, body: (200, b'{"meta_info": {}}')) as (url, _):
        assert noise_floor(attach(url), [[1, 2, 3]]) is None
