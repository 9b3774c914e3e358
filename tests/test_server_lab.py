"""The real engine on the lab: one server, a few prompts, and the offline replay as its exact prediction."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from kitlib.server import Launch, bench, health_findings, start, text_findings, tie_gaps

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="sglang is not installed in this environment"
)
PROMPTS, TOKENS = 4, 16


@pytest.fixture(scope="module")
def predicted(lab_session):
    """(short session, acceptance by replay) for the first prompts, cut at TOKENS."""
    from kitlib.diagnose import Session

    texts = [replace(t, limit=min(TOKENS, t.limit)) for t in lab_session.texts[:PROMPTS]]
    session = Session(lab_session.checkpoint, lab_session.contract, lab_session.target, texts, 4)
    return session, session.measure()


@pytest.fixture(scope="module")
def served(lab_target, predicted, tmp_path_factory):
    from kitlib.lab.story import planted

    session, _ = predicted
    logs = tmp_path_factory.mktemp("logs")
    with start(Launch(lab_target, planted("healthy")), logs, engine="cpu", interval_s=1.0, limit_s=400) as server:
        assert server.ready, f"{server.findings[0]}\n{server.log.read_text()[-3000:]}"
        run = bench(server, [t.ids[: t.prompt] for t in session.texts], max_new_tokens=TOKENS, clients=2)
        yield server, run, server.chat("What is the capital of France? Answer in one word.", 12)
    assert server.process.ended()


def test_the_server_accepts_exactly_what_the_replay_predicts(served, predicted):
    from kitlib.acceptance import Acceptance

    (_, run, _), (_, replayed) = served, predicted
    assert not run.error and run.draft_steps == 4
    assert [sorted(r) for r in run.rounds] == [sorted(r) for r in replayed.rounds]
    measured = Acceptance(run.rounds, run.draft_steps)
    assert measured.histogram == run.histogram == replayed.histogram
    assert (measured.verified, measured.accepted) == (run.verified, run.accepted)
    assert run.interval == pytest.approx(measured.interval()) and run.interval == pytest.approx(replayed.interval())


def test_the_texts_are_those_of_transformers(served, predicted):
    (_, run, _), (session, _) = served, predicted
    recorded = [t.answer for t in session.texts]
    assert run.texts == recorded
    (finding,) = text_findings(run, recorded, "float32")
    assert finding.status == "pass" and finding.evidence[0].values["texts_total"] == PROMPTS


def test_health_is_seen_by_both_clocks_and_proves_nothing_alone(served):
    server, run, answer = served
    assert "Paris" in answer
    kinds = [e["what"] for e in server.timeline.events() if e["clock"] == "log"]
    assert {"arguments", "weights loaded", "listening"} <= {*kinds} and kinds[-1] == "ready"
    polled = [e["what"] for e in server.timeline.events() if e["clock"] == "health"]
    assert polled[0] == "refused" and polled[-1] == "200"
    assert "no more than the polling interval" in server.timeline.explain()
    told = server.info()
    assert (told.on, told.algorithm, told.steps, told.draft_tokens) == (True, "EAGLE3", 4, 5)
    assert told.release == "0.5.20"
    statuses = {f.code: f.status for f in health_findings(server, run)}
    assert statuses == {"S501": "pass", "S502": "not-run"}
    floored = {f.code: f.status for f in health_findings(server, run, floor=1.0)}
    assert floored["S502"] == "pass"
    assert run.ttft and run.tokens_per_s and run.engine_says["accept_length"] > 1


def test_the_gap_at_a_difference_is_the_target_s_own(served, predicted):
    import torch

    (server, run, _), (session, _) = served, predicted
    altered = [(text[0] + 1, *text[1:]) for text in run.texts]  # as if the answers parted at the first token
    gaps = tie_gaps(server, run, altered)
    assert [*gaps] == [0, 1, 2, 3]
    with torch.inference_mode():
        logits = session.target.model(input_ids=torch.tensor([run.prompts[0]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert gaps[0] == pytest.approx(first - second, abs=1e-3)
