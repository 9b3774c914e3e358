"""The text side: planted differences of template are named, masks counted, and acceptance divided along the text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from tiny import DRAFT_VOCAB, VOCAB

from kitlib.acceptance import Acceptance
from kitlib.features import Text
from kitlib.findings import KitError
from kitlib.texts import (
    Rendering,
    Row,
    along,
    outside,
    position_findings,
    read_rows,
    row_table,
    served_ids,
    starts,
    text_findings,
)

NAMED = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEM = f"<|im_start|>system\n{NAMED}<|im_end|>\n"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = SYSTEM + TURNS + OPEN  # what the lab's own template renders for one user turn
TEMPLATES = {  # how training rendered -> the kind that is reported
    PLAIN.replace(NAMED, "You speak like a pirate."): "system prompt differs",
    TURNS + OPEN: "system prompt only served",
    "<|im_start|>" + PLAIN: "BOS doubled in the training rows",
    PLAIN.removeprefix("<|im_start|>"): "BOS missing in the training rows",
    PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif"): "think tags",
    PLAIN.replace("assistant\n{% endif", "bot\n{% endif"): "generation prompt",
    PLAIN.replace("{{ m.role }}", "{{ m.role }}:"): "template differs",
}  # fmt: skip
QUESTIONS = ["Name three rivers.", "Why is the sky blue?", "Write a short poem.", "Add two and two."]


@pytest.fixture(scope="module")
def tokenizer(lab_target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(lab_target)


@pytest.fixture(scope="module")
def rendered(tokenizer):
    """template -> rows as a trainer writes them; the second half tells its messages, the first does not."""
    from jinja2 import Template

    def make(template: str, answer: str = "Certainly, here it is.") -> list[Row]:
        rows = []
        for n, question in enumerate(QUESTIONS):
            said = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            prompt = Template(template).render(messages=said[:1], add_generation_prompt=True)
            ids, end = (
                tuple(tokenizer(t, add_special_tokens=False).input_ids) for t in (prompt, answer + "<|im_end|>")
            )
            rows.append(Row(ids + end, (0,) * len(ids) + (1,) * len(end), said if n >= 2 else ()))
        return rows

    return make


def test_rows_in_the_served_template_pass(tokenizer, rendered):
    (found,) = text_findings(rendered(PLAIN), tokenizer)
    assert (found.code, found.status) == ("T401", "pass") and "4 of them compared through" in found.evidence[0].text


@pytest.mark.parametrize(("template", "kind"), TEMPLATES.items(), ids=TEMPLATES.values())
def test_a_planted_difference_is_found_and_named(tokenizer, rendered, template, kind):
    rows = rendered(template)
    (found,) = text_findings(rows, tokenizer)
    assert found.status == "fail" and found.title == f"4 of 4 training rows are not what is served: {kind} (4)"
    at = found.evidence[0].values["at"]
    served = Rendering(tokenizer).ids([{"role": "user", "content": QUESTIONS[0]}])
    assert rows[0].ids[:at] == served[:at] and rows[0].ids[at : at + 1] != served[at : at + 1]


@pytest.mark.parametrize("template", [t for t, kind in TEMPLATES.items() if kind != "template differs"])
def test_served_prompts_are_rendered_as_in_training(tokenizer, rendered, template):
    """The swap is learned from the rows, and holds for a prompt that none of them has."""
    from jinja2 import Template

    question = [{"role": "user", "content": "How far is the moon?"}]
    rendering = Rendering(tokenizer)
    swap = rendering.swap(rendered(template))
    told = Template(template).render(messages=question, add_generation_prompt=True)
    assert swap(rendering.ids(question)) == tuple(tokenizer(told, add_special_tokens=False).input_ids)
    assert rendering.swap(rendered(PLAIN)) is None
    if "system prompt" in TEMPLATES[template]:  # the others put in or leave out tokens in a fixed place
        with pytest.raises(KitError, match="does not begin and end"):
            swap((5, 6, 7))


def test_a_server_answers_for_itself(tokenizer, rendered):
    """Rows equal the folder's template, but the server was started with another one."""

    def post(path: str, body: dict) -> dict:
        assert path == "/tokenize"
        return {"tokens": [*Rendering(tokenizer).ids(body["messages"])][3:]}

    (found,) = text_findings(rendered(PLAIN), tokenizer, served_ids(post))
    assert found.status == "fail"
    with pytest.raises(KitError, match="no list of ids"):
        served_ids(lambda path, body: {"tokens": [[1], [2]]})([])


def test_without_a_template_nothing_is_claimed(rendered):
    (found,) = text_findings(rendered(PLAIN), None)
    assert found.status == "not-run" and "no chat template" in found.title
    assert text_findings([], None)[0].status == "not-run"


def test_masks_that_train_on_nothing_or_on_everything(tokenizer, rendered):
    good = rendered(PLAIN)
    for value, what in ((0, "covers nothing in 4 of 4"), (1, "covers everything, the prompt included in 4 of 4")):
        rows = [Row(r.ids, (value,) * len(r.ids), r.messages) for r in good]
        found = text_findings(rows, tokenizer)
        assert what in " ".join(f.title for f in found) and not any(f.status == "pass" for f in found)


def test_loss_mask_sum_and_the_share_outside_the_draft_vocabulary(tokenizer, rendered):
    rows = rendered(PLAIN)
    answers = [i for r in rows for i, on in zip(r.ids, r.mask, strict=True) if on]
    kept = sorted(set(answers))[:-2]
    missing = sum(i not in kept for i in answers)
    table = {row["what"]: row["value"] for row in row_table(rows, kept, tokenizer)}
    assert table["loss-mask sum (target tokens)"] == len(answers) == sum(sum(r.mask) for r in rows)
    assert table["target tokens outside the draft vocabulary"] == missing > 0
    assert table["their share"] == pytest.approx(missing / len(answers))
    assert outside(rows, range(len(tokenizer)))[:2] == (0, len(answers))
    assert row_table(rows, kept, None)[-1]["value"] != "none"  # ids where no tokenizer tells their text


def test_the_labs_own_rows_lie_within_what_the_drafter_says(lab_session, tokenizer):
    """Every second target id of the tiny vocabulary can be written; the lab's share is that of its own metrics."""
    from kitlib.attribution import vocabulary
    from kitlib.paths import DATA

    rows = read_rows(DATA / "lab-train.jsonl.gz", 300)
    missed, targets, _ = outside(rows, vocabulary(lab_session.load()[0]).tolist())
    assert 0 < missed / targets < 0.06
    assert text_findings(rows[:50], tokenizer)[0].status == "pass"


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_read_in_both_dialects(tmp_path, packed):
    lines = [{"ids": [1, 2, 3], "prompt_tokens": 1}, {"input_ids": [4, 5], "loss_mask": [0, 1], "messages": [1]}]
    lines[1]["messages"] = [{"role": "user", "content": "line\u2028separator"}]
    data = "\n\n".join(json.dumps(x, ensure_ascii=False) for x in lines).encode()
    (tmp_path / "rows").write_bytes(gzip.compress(data) if packed else data)
    rows = read_rows(tmp_path / "rows")
    assert [(r.ids, r.mask, r.prompt) for r in rows] == [((1, 2, 3), (0, 1, 1), 1), ((4, 5), (0, 1), 1)]
    assert rows[1].messages[0]["content"] == "line\u2028separator" and rows[0].cut(1).ids == (1, 2)
    assert len(read_rows(tmp_path / "rows", 1)) == 1


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '{"ids": [1, -2], "prompt_tokens": 1}', '{"ids": [1], "loss_mask": [1, 1]}', '{"ids": 5}']
)
def test_what_is_no_row_is_refused_with_its_line(tmp_path, line):
    (tmp_path / "rows").write_text('{"ids": [1, 2], "prompt_tokens": 1}\n' + line)
    with pytest.raises(KitError, match="line 2, is no training row"):
        read_rows(tmp_path / "rows")
    (tmp_path / "rows").write_bytes(b"\x1f\x8b" + line.encode())
    with pytest.raises(KitError, match="is no training row"):
        read_rows(tmp_path / "rows")
    (tmp_path / "rows").write_text("\n")
    with pytest.raises(KitError, match="holds no training rows"):
        read_rows(tmp_path / "rows")


def texts(lengths: Sequence[int], answer: int = 40) -> list[Text]:
    return [Text(tuple(range(n + answer)), n, answer) for n in lengths]


def test_acceptance_along_the_text_sums_to_the_whole(tiny_session):
    acceptance = tiny_session.measure()
    for by in ("prompt", "position"):
        rows = along(acceptance, tiny_session.texts, by)
        assert sum(r["rounds"] for r in rows) == acceptance.verified
        assert sum(r["accepted"] for r in rows) == acceptance.accepted
    for begun, rounds, text in zip(
        starts(acceptance, tiny_session.texts), acceptance.rounds, tiny_session.texts, strict=True
    ):
        assert begun[0] == text.prompt and len(begun) == len(rounds)
        assert [b - a for a, b in pairwise(begun)] == [n + 1 for n in rounds[:-1]]
    assert along(acceptance, (), "prompt") == []  # states of a dump: the texts are not kept


def test_long_prompts_that_fare_worse_are_seen():
    acceptance = Acceptance(tuple((3,) * 10 if n < 100 else (0,) * 10 for n in (10, 20, 30, 200, 210, 220)), 4)
    rows = along(acceptance, texts((10, 20, 30, 200, 210, 220)), "prompt", bins=2)
    assert rows[0]["accept_length"] > rows[-1]["accept_length"] == 1.0
    assert rows[-1]["prompts"] == 3 and rows[-1]["interval"] == (1.0, 1.0)


def test_acceptance_that_ends_with_the_drafters_positions_is_k122():
    long = texts((10, 10, 10, 10), 200)
    falls = Acceptance(((3,) * 20 + (0,) * 100,) * 4, 4)  # 20 rounds of 4 tokens, from position 10 to 90
    (found,) = position_findings(falls, long, 90)
    assert (found.code, found.status) == ("K122", "fail") and "from 4.00 to 1.00 past position 90" in found.title
    assert position_findings(Acceptance(((3,) * 50,) * 4, 4), long, 90)[0].status == "pass"
    assert position_findings(falls, long, 500)[0].status == "not-applicable"
    assert position_findings(falls, long, 187)[0].status == "not-run"  # too few rounds past it
    assert position_findings(falls, long, None)[0].status == "not-run"
    assert position_findings(falls, (), 90)[0].status == "not-run"


def test_the_tiny_drafter_writes_every_second_id(tiny_session):
    from kitlib.attribution import vocabulary

    assert torch.equal(vocabulary(tiny_session.load()[0]), torch.arange(0, VOCAB, 2))
    row = Row(tuple(range(VOCAB)), (0,) * 4 + (1,) * (VOCAB - 4))
    missed, targets, which = outside([row], range(0, VOCAB, 2))
    assert (missed, targets) == (DRAFT_VOCAB - 2, VOCAB - 4) and all(i % 2 for i in which)
