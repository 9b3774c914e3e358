"""`make verify`: the real engine against the offline replay, prompt by prompt, and under load.

Every row serves the lab in float32, greedily, on the CPU engine. Histograms have to be equal, not close. The table
goes to data/verified/server-exactness.md once every row has run, whatever came out.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from verified import write_table

from kitlib.paths import ROOT
from kitlib.server import Launch, bench, compare, noise_floor, start, text_findings, tie_gaps
from kitlib.server.paired import differences

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
PROMPTS, TOKENS, CLIENTS, REPEATS = 16, 64, 32, 3
ROWS = {  # fault: (what is served, algorithm)
    "healthy": ("healthy", "EAGLE3"),
    "layer-dropped": ("layer-dropped", "EAGLE3"),
    "d2t-absent": ("d2t-absent", "EAGLE3"),
    "fc-bypass-config": ("fc-bypass-config", "EAGLE3"),
    "fc-bypass-eagle": ("healthy", "EAGLE"),
}
HEADS = ("served", "predicted by replay", "measured on the server", "accept length", "prompts equal", "texts equal")


@pytest.fixture(scope="module")
def table():
    """Rows of the table, and the lines below it, by name; written when all of them are there."""
    lines: dict = {}
    yield lines
    if set(lines) == {*ROWS, "load", "off", "bf16"}:
        write_table(
            "server-exactness", "The server's acceptance is the replay's",
            "python -m pytest -m verify tests/test_server_verify.py",
            f"sglang 0.5.20 on the CPU engine, float32, greedy, {PROMPTS} prompts × {TOKENS} tokens, chains of 4. "
            "Histogram: rounds that accepted 0, 1, 2, 3, 4 drafts. Accept length: predicted / measured.",
            HEADS, [lines[name] for name in ROWS], "\n\n".join(lines[name] for name in ("off", "load", "bf16")),
        )  # fmt: skip


@pytest.fixture(scope="module")
def session(lab_session):
    from kitlib.diagnose import Session

    texts = lab_session.texts[:PROMPTS]
    return Session(lab_session.checkpoint, lab_session.contract, lab_session.target, texts, 4)


def serve(folder: str, algorithm: str, lab_target: Path, logs: Path, dtype: str = "float32"):
    from kitlib.lab.story import planted

    launch = Launch(lab_target, planted(folder), algorithm, dtype=dtype)
    return start(launch, logs, engine="cpu", interval_s=2.0, limit_s=600.0)


def ids(texts) -> list[tuple[int, ...]]:
    return [t.ids[: t.prompt] for t in texts]


@pytest.fixture(scope="module")
def healthy_run(session, lab_target, tmp_path_factory):
    """The healthy row's run, and three runs of everything at once on the same server."""
    with serve("healthy", "EAGLE3", lab_target, tmp_path_factory.mktemp("healthy")) as server:
        assert server.ready, server.findings[0]
        yield server, bench(server, ids(session.texts), max_new_tokens=TOKENS, clients=4)


def record(table, session, name, run) -> bool:
    """Compare with the replay and the recorded text, and write the row."""
    from kitlib.lab.faults import FAULTS

    predicted = session.measure(FAULTS[name].wiring(session.trained))
    equal = sum(sorted(a) == sorted(b) for a, b in zip(run.rounds, predicted.rounds, strict=False))
    apart, compared = differences(run, [t.answer for t in session.texts])
    cells = [f"`{name}` ({ROWS[name][1]})", predicted.histogram, run.histogram]
    cells += [f"{predicted.accept_length:.4f} / {run.accept_length:.4f}", f"{equal} of {PROMPTS}"]
    table[name] = [*cells, f"{compared - len(apart)} of {PROMPTS}"]
    return not run.error and run.histogram == predicted.histogram and equal == compared - len(apart) == PROMPTS


def test_healthy(table, session, healthy_run):
    assert record(table, session, "healthy", healthy_run[1]), table["healthy"]


def test_everything_at_once_three_times(table, healthy_run, lab_session):
    server, _ = healthy_run
    prompts, totals = ids(lab_session.texts), []
    assert len(prompts) == CLIENTS
    for _ in range(REPEATS):
        run = bench(server, prompts, max_new_tokens=TOKENS, clients=CLIENTS)
        assert not run.error and len(run.requests) == CLIENTS
        totals.append((run.accepted, run.verified, run.tokens, tuple(run.histogram), tuple(run.texts)))
    same = len(set(totals)) == 1
    a, v, tokens, *_ = totals[0]
    table["load"] = (
        f"{CLIENTS} requests at once, {REPEATS} times: {a} accepted drafts, {v} rounds, {tokens} tokens; "
        f"totals, histograms and texts {'the same every time' if same else 'DIFFER'}."
    )
    server.stop()  # an idle scheduler takes half a core from the servers that follow
    assert same, [t[:4] for t in totals]


@pytest.mark.parametrize("name", [n for n in ROWS if n != "healthy"])
def test_faults(table, session, name, lab_target, tmp_path):
    with serve(*ROWS[name], lab_target, tmp_path) as server:
        assert server.ready, server.findings[0]
        run = bench(server, ids(session.texts), max_new_tokens=TOKENS, clients=4)
    assert record(table, session, name, run), table[name]


def test_without_speculation(table, session, healthy_run, lab_target, tmp_path):
    with serve("healthy", "", lab_target, tmp_path) as server:
        assert server.ready and server.info().on is False
        run = bench(server, ids(session.texts), max_new_tokens=TOKENS, clients=4)
    told = compare(healthy_run[1], run)
    low, high = told["interval"]
    table["off"] = (
        f"Without speculation: {told['texts_identical']} of {told['texts_total']} texts the same as `healthy`; "
        f"speed-up of `healthy` on this CPU {told['speedup']:.2f} ({low:.2f}-{high:.2f}); no GPU was used."
    )
    assert told["texts_identical"] == PROMPTS and run.verified == 0
    assert not differences(run, [t.answer for t in session.texts])[0]


def test_in_bfloat16_texts_part_at_near_ties_only(table, session, lab_target, tmp_path):
    with serve("healthy", "EAGLE3", lab_target, tmp_path, "bfloat16") as server:
        run = bench(server, ids(session.texts), max_new_tokens=TOKENS, clients=1)
    with serve("healthy", "", lab_target, tmp_path, "bfloat16") as server:
        plain = bench(server, ids(session.texts), max_new_tokens=TOKENS, clients=1)
        gaps, noise = tie_gaps(server, run, plain), noise_floor(server, ids(session.texts))
    (found,) = text_findings(run, plain, "bfloat16", gaps, noise)
    shown = ", ".join(f"{g:.3f}" for g in sorted(gaps.values()))
    table["bf16"] = (
        f"In bfloat16, one client: {found.evidence[0].text}. Measured noise floor of a gap {noise:.3f}; "
        f"gaps of the two best tokens where texts part: {shown or 'none'}."
    )
    assert not run.error and not plain.error and noise and 0 < noise < 1
    assert found.status == "pass", found


def test_no_orphan_after_sigkill_of_the_client(lab_target, tmp_path):
    from kitlib.lab.story import planted

    code = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from kitlib.server import Launch, start
        launch = Launch({str(lab_target)!r}, {str(planted("healthy"))!r})
        server = start(launch, {str(tmp_path)!r}, engine="cpu", interval_s=2)
        print("ready", server.ready, server.process._guard.pid, flush=True)
        time.sleep(600)
    """)
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    _, ready, guard = client.stdout.readline().split()
    started = below(int(guard))
    client.kill()
    client.wait()
    assert ready == "True" and len(started) >= 4  # guard, server, scheduler, detokenizer
    end = time.monotonic() + 30
    while time.monotonic() < end and (left := [p for p in started if alive(p)]):
        time.sleep(0.2)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """This process and its descendants."""
    told = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    parents = dict(zip(map(int, told[::2]), map(int, told[1::2]), strict=True))
    found = {pid}
    while new := {p for p, parent in parents.items() if parent in found} - found:
        found |= new
    return sorted(found)
