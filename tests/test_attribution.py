"""Training against serving: the steps telescope, and what is planted is found in its own step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kitlib.acceptance import Acceptance
from kitlib.attribution import (
    Attribution,
    Counts,
    Step,
    TrainingSide,
    attribute,
    everywhere,
    misread,
    on_rows,
    promise_rows,
)
from kitlib.features import Text
from kitlib.findings import KitError
from kitlib.lab.faults import FAULTS
from kitlib.paths import DATA
from kitlib.texts import Row, as_row
from kitlib.training import Training

CONDITIONAL = (0.6, 0.5, 0.5, 0.5)
TOLD = Training("conditional", CONDITIONAL, "the test", "nothing")
CUT = replace(TOLD, leaves_out="tokens outside the draft vocabulary are not counted")


@pytest.fixture(scope="module")
def held() -> list[Row]:
    """Rows that the lab's trainer held out, cut to 16 tokens of their answers."""
    from kitlib import lab
    from kitlib.lab.train import validation_rows

    return [as_row(r).cut(16) for r in validation_rows(lab.drafter_path(), DATA / "lab-train.jsonl.gz")]


@pytest.fixture(scope="module")
def few(lab_session):
    """The lab over six of its prompts, 24 tokens each."""
    texts = [Text(t.ids[: t.prompt + 29], t.prompt, 24) for t in lab_session.texts[:6]]
    return replace(lab_session, texts=texts, _states=[], _held=set())


@pytest.fixture(scope="module")
def few_stages(few, held):
    return on_rows(few, held[:3], TOLD)


def telescopes(found) -> bool:
    """Every step begins where the one before ended, so that all of them sum to the whole."""
    known = [s for s in found.steps if s.before is not None]
    assert all(a.after == b.before for a, b in pairwise(known)) and all(s.ran or not s.change for s in found.steps)
    return sum(s.change for s in found.steps) == pytest.approx(found.served - found.first)


def changes(found) -> dict[str, float]:
    return {s.name: s.change for s in found.steps}


def test_the_lab_tells_which_rows_it_held_out(held):
    told = json.loads((DATA / "lab-drafter" / "metrics.json").read_text())
    assert len(held) == told["rows"]["validation"] == len({r.ids for r in held})


def test_the_metric_is_the_trainers_own(lab_session, held):
    """Position by position: `everywhere` counts what `lab.passes.accuracy` counts with its own batched attention."""
    from kitlib.lab.passes import accuracy
    from kitlib.lab.rows import collate

    drafter, _ = lab_session.load()
    session = replace(lab_session, texts=[r.text for r in held[:3]], _states=[], _held=set())
    states, stops = session.states(), session.target.stop_ids
    each = [everywhere(drafter, s, r.mask, 4, stops) for s, r in zip(states, held, strict=False)]
    right, within, asked = torch.tensor(each, dtype=torch.float64).sum(0)
    rows = [{"ids": list(r.ids), "prompt_tokens": r.prompt} for r in held[:3]]
    both = [torch.cat([s.select(drafter.wiring), s.final], -1) for s in states]
    batch = collate(rows, both, session.target.info.hidden, stops)
    told = accuracy(drafter, [batch], drafter.target_head, 4)
    assert told["served_joint"] == pytest.approx((right / asked).tolist(), abs=6e-5) and asked[0] > 40
    assert told["restricted_joint"] == pytest.approx((within / asked).tolist(), abs=6e-5)


@pytest.mark.verify
def test_the_labs_own_metrics_are_met_again(lab_session):
    """All 64 held-out rows in whole, in float32 where training ran in bfloat16."""
    from kitlib import lab
    from kitlib.attribution.metric import by_metric
    from kitlib.lab.train import validation_rows

    rows = [as_row(r) for r in validation_rows(lab.drafter_path(), DATA / "lab-train.jsonl.gz")]
    session = replace(lab_session, texts=[r.text for r in rows], _states=[], _held=set())
    drafter, _ = lab_session.load()
    full, within = by_metric(drafter, session.states(), [r.mask for r in rows], 4, session.target.stop_ids)
    told = json.loads((DATA / "lab-drafter" / "metrics.json").read_text())
    for counts, name in ((full, "served_joint"), (within, "restricted_joint")):
        assert (counts.right.sum(0) / counts.asked.sum(0)).tolist() == pytest.approx(told[name], abs=0.004)


@pytest.mark.parametrize("name", ["healthy", "fc-bypass-eagle", "layer-dropped", "feedback-post-norm"])
def test_a_fault_of_wiring_is_told_from_the_text(few, few_stages, name):
    """The same rows, prompts and metrics: whatever the wiring costs is in its own step, and in no other."""
    served, sound = FAULTS[name].wiring(few.trained), few.measure().accept_length
    found = attribute(few, served, training=TOLD, stages=few_stages, alike=True, dtype="float32")
    lost = changes(found)
    assert telescopes(found) and lost["template"] == lost["numerics"] == lost["draft vocabulary"] == 0
    assert lost["wiring"] == pytest.approx(few.measure(served).accept_length - sound)
    step = next(s for s in found.steps if s.name == "wiring")
    if name == "healthy":
        assert lost["wiring"] == 0 and step.how == "trained and served wiring are the same"
        return
    assert lost["wiring"] < -0.1 and step.interval[1] < 0
    assert set(step.how.removeprefix("differ: ").split(", ")) == set(few.trained.diff(served))
    if name != "feedback-post-norm":
        (below,) = found.findings()
        assert (below.code, below.status) == ("M203", "fail") and "; wiring keeps " in below.title


def test_a_planted_template_is_measured_in_its_own_step(few, held, tmp_path):
    """Rows without the system prompt: T401 names it, and the served prompts are replayed as training had them."""
    few = replace(few, texts=few.texts[:3], _states=[], _held=set())
    tokenizer = few.target.tokenizer
    system = tokenizer(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    cut = len(system.input_ids)
    rows = [Row(r.ids[cut:], r.mask[cut:]) for r in held[:4]]
    side = TrainingSide(few, rows, rows[:2], TOLD, tmp_path)
    assert "system prompt only served" in side.findings()[0].title
    found = side.attribution(few.trained, {})
    template = next(s for s in found.steps if s.name == "template")
    assert telescopes(found) and template.ran and template.interval is not None and changes(found)["wiring"] == 0
    other = few.target.record([t.ids[cut : t.prompt] for t in few.texts], 24, 5, tmp_path)
    bare = replace(few, texts=other, _states=[], _held=set()).measure().accept_length
    assert template.change == pytest.approx(few.measure().accept_length - bare)
    sound = TrainingSide(few, held[:4], (), TOLD).attribution(few.trained, {})
    assert changes(sound)["template"] == 0 and next(s.ran for s in sound.steps if s.name == "template")


def rows_of(session, count: int = 3) -> list[Row]:
    return [Row(t.ids, (0,) * t.prompt + (1,) * (len(t.ids) - t.prompt)) for t in session.texts[:count]]


def test_the_vocabularys_share_is_a_step_only_where_the_trainer_leaves_it_out(tiny_session):
    """The tiny drafter writes half of the ids, so that many tokens can only be missed."""
    rows = rows_of(tiny_session)
    by_name = {t.leaves_out: {n: c for n, c, _ in on_rows(tiny_session, rows, t)} for t in (TOLD, CUT)}
    full, within = (by_name[t.leaves_out]["validation rows"] for t in (TOLD, CUT))
    assert within.length > full.length and (within.right >= full.right).all()
    for t in (TOLD, CUT):
        found = attribute(tiny_session, tiny_session.trained, training=t, stages=on_rows(tiny_session, rows, t))
        cost = full.length - within.length if t is CUT else 0.0
        assert telescopes(found) and changes(found)["draft vocabulary"] == pytest.approx(cost)
    share = next(how for name, _, how in on_rows(tiny_session, rows, CUT) if name == "draft vocabulary")
    targets = [i for r in rows for i, on in zip(r.ids, r.mask, strict=True) if on]
    assert share.startswith(f"{sum(i % 2 for i in targets)} of {len(targets)} target tokens are outside")
    greedy = next(how for name, _, how in on_rows(tiny_session, rows, CUT) if name == "text policy")
    assert greedy.endswith("3 of 3 rows are the same")  # they are the target's own


def test_answers_that_are_not_the_targets_are_text_policy(tiny_session):
    """The same prompts with answers of other ids; by its own answers nothing else changes."""
    rows = rows_of(tiny_session, 8)
    foreign = [Row((*r.ids[: r.prompt], *((i + 7) % 21 + 3 for i in r.ids[r.prompt :])), r.mask) for r in rows]
    own, other = ({n: c for n, c, _ in on_rows(tiny_session, x, TOLD)} for x in (rows, foreign))
    for name in ("text policy", "metric definition"):
        assert own[name].length == other[name].length
    assert own["validation rows"].length != other["validation rows"].length


def test_a_servers_number_and_a_quoted_one_close_the_sum(tiny_session):
    found = attribute(tiny_session, tiny_session.trained, training=TOLD, claimed=1 + sum(CONDITIONAL), observed=1.02)
    assert telescopes(found) and found.steps[0].name == "quoted number" and found.served == 1.02
    assert changes(found)["residual"] == pytest.approx(1.02 - tiny_session.measure().accept_length, abs=0.02)
    rows = found.rows()
    assert rows[-1]["step"] == "sum" and rows[-1]["after"] == pytest.approx(1.02)
    assert sum(r.get("change") or 0 for r in rows[:-1]) == pytest.approx(rows[-1]["change"])
    below, quoted = found.findings()
    assert (below.code, below.status, quoted.code, quoted.status) == ("M203", "fail", "M204", "fail")
    assert "summed, though they are conditional" in quoted.title
    for rate in (0.2, 5.5):
        with pytest.raises(KitError, match="no accept length"):
            attribute(tiny_session, observed=rate)


def test_what_is_not_known_is_not_run(tiny_session):
    found = attribute(tiny_session, claimed=3.0)
    assert telescopes(found) and found.served == found.first == tiny_session.measure().accept_length
    ran = {s.name: s.ran for s in found.steps}
    assert not ran["validation rows"] and not ran["prompts"] and not ran["template"] and not ran["wiring"]
    assert {(f.code, f.status) for f in found.findings()} == {("M203", "not-run"), ("M204", "not-run")}
    one = attribute(tiny_session, training=Training("joint", (0.745,), "the test", ""))
    assert any("training tells 1 of 4 steps" in s.how for s in one.steps)
    short = [Row(r.ids[: r.prompt + 2], r.mask[: r.prompt + 2]) for r in rows_of(tiny_session)]
    assert all(counts is None for _, counts, _ in on_rows(tiny_session, short, TOLD))
    silent = attribute(replace(tiny_session, texts=[]), training=TOLD, measure=lambda _: Acceptance(((),), 4))
    assert [(f.code, f.status) for f in silent.findings()] == [("M203", "not-run")]


def test_numerics_of_nothing_is_not_run(few, few_stages):
    served = few.trained.but(capture="zeros", dropped=tuple(few.load()[0].shapes))
    found = attribute(few, served, training=TOLD, stages=few_stages)
    assert found.steps[-2].name == "numerics" and not found.steps[-2].ran and "nothing is left" in found.steps[-2].how


def test_what_is_left_of_nothing_is_not_blamed():
    """After the wiring took the gain, the half of the little that is left is chance."""
    counts = Counts(torch.ones(3, 4).numpy(), torch.ones(3, 4).numpy() * 400)
    lengths = {"prompts": (2.4, 1.8), "wiring": (1.8, 1.02), "numerics": (1.02, 1.001), "residual": (1.001, 1.0)}
    steps = tuple(Step(name, *ends, None, "") for name, ends in lengths.items())
    (below,) = Attribution(2.4, steps, counts).findings()
    assert "; wiring keeps 3% of the gain" in below.title
    assert [s.kept for s in steps] == pytest.approx([0.8 / 1.4, 0.02 / 0.8, 1, 1])


@pytest.mark.parametrize(
    ("claimed", "kind", "says"),
    [
        (1 + 0.6 + 0.3 + 0.15 + 0.075, "conditional", ""),
        (1 + sum(CONDITIONAL), "conditional", "summed, though they are conditional"),
        (1 + sum(CONDITIONAL), "joint", ""),
        (1 + 0.6 + 0.3 + 0.15 + 0.075, "joint", "multiplied, though they are joint"),
        (0.6 + 0.3 + 0.15 + 0.075, "conditional", "without the target's own token"),
        (0.6, "conditional", "first step's accuracy alone"),
        (1.6, "conditional", "later steps are left out"),
        (1 + 0.6 + 0.36 + 0.216 + 0.1296, "conditional", "taken for all steps"),
        (4.9, "conditional", "no known reading"),
    ],
)
def test_a_misreading_is_named(claimed, kind, says):
    reading = misread(claimed, Training(kind, CONDITIONAL, "", ""), 4)
    assert says in reading if says else reading == ""


def test_the_story_from_its_one_number():
    """0.745 at the first step: 1.745 to 3.02, scaled by the vocabulary; 40 silent rounds are no training."""
    whole, scaled = promise_rows(0.745, 4, 40, (1.0, 0.9))
    assert whole["lowest"] == pytest.approx(1.745) and whole["highest"] == pytest.approx(3.02, abs=0.005)
    assert whole["chance of nothing in 40 rounds"] < 1e-23
    assert scaled["lowest"] == pytest.approx(1 + 0.745 * 0.9) and scaled["highest"] < whole["highest"]
    assert whole["chance of nothing in 40 rounds"] < scaled["chance of nothing in 40 rounds"] < 1e-18


def test_the_vocabulary_scales_a_promise_only_where_it_was_left_out(tiny_session):
    for told, expected in ((TOLD, 1), (CUT, 2)):
        assert len(TrainingSide(tiny_session, rows_of(tiny_session), [], told).promise(40)) == expected
    assert TrainingSide(tiny_session, [], [], None).promise(40)[0]["_status"] == "not-run"


def test_counts_are_those_of_the_rounds(tiny_session):
    a = tiny_session.measure()
    counts = Counts.of(a, "prompts")
    assert counts.length == pytest.approx(a.accept_length)
    assert (counts.right.sum(0) / counts.asked.sum(0)).tolist() == pytest.approx(a.by_position)
    assert counts.interval() == pytest.approx(a.interval(), abs=0.03)
    assert counts.interval(counts) == (0.0, 0.0)  # paired: the same texts are drawn
    apart = counts.interval(replace(counts, on="others"))
    assert apart[0] < 0 < apart[1]
    assert Counts(counts.right[:2], counts.asked[:2]).interval() is None
