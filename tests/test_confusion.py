"""Planted faults and what the search makes of them, by three strengths of evidence, on the lab and on a trained pair.

What is observed never comes from the search: rounds from the speculative loop, tensors from the drafter run token by
token on transformers' own hidden states, counts from a replay of the planted files; all under the wiring that SGLang
0.5.9 gives those files. `make verify` writes the tables to data/verified/confusion.md.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from trained_pair import trained_pair
from verified import write_table

from kitlib.acceptance import Acceptance, Cache, speculate
from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract, Wiring
from kitlib.diagnose import Session
from kitlib.engines import served
from kitlib.lab.faults import FAULTS, plant
from kitlib.observed import Observed
from kitlib.search import match, search
from kitlib.switches import SWITCHES

STORY = "layers0-flat and EAGLE"  # the story's first stage: keys dropped, one layer fed
QUICK = ("healthy", "layers0-flat", "fc-bypass-config", "block-order", "feedback-post-norm", STORY)
HEADS = (
    "planted", "by rounds: first", "rank", "alike", "by tensors: first", "rank", "alike", "by histogram: first", "rank",
    "in the 95 % set of", "odds", "by totals: first", "rank", "in the 95 % set of", "odds", "other prompts",
)  # fmt: skip


@dataclass
class Kept(Session):
    """A session that never replays the same wiring on the same text twice: the searches share most of theirs."""

    kept: dict = field(default_factory=dict, repr=False)

    def measure(self, wiring: Wiring | None = None) -> Acceptance:
        wiring, states = wiring or self.trained, self.states([wiring or self.trained])
        new = [i for i, t in enumerate(self.texts) if (wiring, t) not in self.kept]
        if new:
            some = replace(self, texts=[self.texts[i] for i in new], _states=[states[i] for i in new])
            found = Session.measure(some, wiring).rounds
            self.kept |= {(wiring, self.texts[i]): r for i, r in zip(new, found, strict=True)}
        return Acceptance(tuple(self.kept[wiring, t] for t in self.texts), self.steps)


def kept(session: Session, texts) -> Kept:
    return Kept(session.checkpoint, session.contract, session.target, texts, session.steps)


def planted(session: Session, name: str, folder) -> tuple[Session, Wiring, Wiring]:
    """(the planted files, the wiring they are served with, the wiring that has the same effect on the healthy ones)."""
    fault = FAULTS["layers0-flat" if name == STORY else name]
    plant(fault.name, folder, session.checkpoint.path)
    checkpoint, info = Checkpoint.open(folder), session.target.info
    sick = Session(checkpoint, Contract.of(checkpoint, info), session.target, session.texts, session.steps)
    truth = fault.wiring(session.trained)
    if fault.plants == "wiring":
        return sick, Wiring.from_dict(json.loads((folder / "wiring.json").read_text())), truth
    algorithm = "EAGLE" if name == STORY or fault.launch else "EAGLE3"
    wiring = served(checkpoint, sick.contract, "0.5.9", target=info, algorithm=algorithm).wiring
    return sick, wiring, SWITCHES["fc-bypass-eagle"](truth) if name == STORY else truth


@torch.inference_mode()
def tensors(sick: Session, wiring: Wiring, steps: int = 2) -> dict[str, torch.Tensor]:
    """What an engine would compute over the first text, token by token; named as in `divergence.stages`."""
    drafter, _ = sick.load(wiring)
    model, ids = sick.target.model, torch.tensor(sick.texts[0].ids)
    every = model.base_model(input_ids=ids[None], output_hidden_states=True).hidden_states
    if wiring.capture == "final":
        features = every[-1][0]
    else:
        norms = [sick.target.layers[b].input_layernorm if wiring.capture == "normed" else (lambda x: x)
                 for b in wiring.boundaries]  # fmt: skip
        features = torch.cat([norm(every[b])[0] for norm, b in zip(norms, wiring.boundaries, strict=True)], -1)
    attend, found = Cache(), []
    for t in range(len(ids) - 1):
        token = ids[t + wiring.token_shift, None]
        hidden = drafter.fuse(features[t, None])
        row = {"embedding": drafter.embed(token), "features": features[t, None], "after fc": hidden}
        for i in range(steps):
            nth = f" of step {i + 1}" if i else ""
            hidden = drafter.step(token, hidden, torch.tensor([t + i]), attend)
            token, logits = drafter.draft(hidden), drafter.logits(hidden)
            row |= {f"after the layers{nth}": hidden, f"logits{nth}": logits, f"drafts{nth}": token}
            hidden = drafter.feedback(hidden)
            row[f"feedback{nth}"] = hidden
        attend.keep(t + 1)
        found.append(row)
    return {n: torch.cat([row[n] for row in found]) for n in found[0]}


def rank(ranked, truth: Wiring, score) -> int:
    """1 for the best; wirings with the same score share a rank."""
    mine = next(score(r) for r in ranked if r.wiring == truth)
    return 1 + sum(score(r) > mine for r in ranked)


def confuse(session: Session, others, names, folder, loop: tuple[int, int], pairs: bool = True) -> dict[str, dict]:
    """Every fault by every evidence. `others` are texts for counts of other traffic; `loop` prompts × tokens.

    Without `pairs`, counts are searched for single faults only, and two together by rounds and tensors alone.
    """
    few = [replace(t, limit=min(loop[1], t.limit)) for t in session.texts[: loop[0]]]
    whole, short, found = kept(session, session.texts), kept(session, few), {}
    for name in names:
        sick, wiring, truth = planted(session, name, folder / name)
        row = found[name] = {"truth": truth, "config": wiring == truth}
        drafter, _ = sick.load(wiring)
        rounds = [speculate(session.target, drafter, t.ids[: t.prompt], t.limit, session.steps)[1] for t in few]
        by = search(short, Observed.of(Acceptance(tuple(rounds), session.steps)))
        row["rounds"] = (by.ranked[0].name, rank(by.ranked, truth, lambda r: r.equal), by.alike, by.exact)
        row["right"] = truth in [r.wiring for r in by.ranked if r.name in by.alike]
        matched = match(session, tensors(sick, wiring))
        alike = [m.name for m in matched if len(m.agree) == len(matched[0].agree)]
        row["tensors"] = (matched[0].name, rank(matched, truth, lambda m: len(m.agree)), alike, matched[0].differ)
        if name == STORY and not pairs:
            continue
        same, other = sick.measure(wiring), replace(sick, texts=others, _states=[], _held=set()).measure(wiring)
        for strength in ("histogram", "totals"):
            by = search(whole, Observed.of(same, strength), pairs=pairs)
            name_of = next((r.name for r in by.ranked if r.wiring == truth), "")
            at = [r.name for r in by.ranked].index(name_of) + 1 if name_of else 0
            odds = by.odds(name_of) if name_of else float("inf")
            row[strength] = (by.ranked[0].name, at, name_of in by.alike, len(by.alike), odds)
        by = search(whole, Observed.of(other, "histogram"), pairs=pairs)
        row["other"] = (truth in [r.wiring for r in by.ranked if r.name in by.alike], len(by.alike))
        print(name, {k: v for k, v in row.items() if k != "truth"}, flush=True)
    return found


def lines(found: dict[str, dict]) -> list[list]:
    """Rows of the table."""
    rows = []
    for name, row in found.items():
        cells = [name]
        for kind in ("rounds", "tensors"):
            first, at, alike, _ = row[kind]
            cells += [first, at, len(alike) if len(alike) == 1 else f"{len(alike)}: {', '.join(sorted(alike)[:4])}"]
        for kind in ("histogram", "totals"):
            first, at, inside, size, odds = row[kind]
            cells += [first, at or "–", size if inside else f"**not in it** ({size})", f"{odds:.3g} : 1"]
        inside, size = row["other"]
        rows.append([*cells, f"{'in' if inside else '**not in**'} {size}"])
    return rows


def judge(found: dict[str, dict]) -> None:
    """What must hold."""
    for name, row in found.items():
        assert row["rounds"][3] and row["rounds"][1] == 1 and row["right"], (name, "by rounds", row["rounds"])
        elsewhere = {"features"} if name == "block-order" else set()  # planted behind them, in the columns of fc
        assert row["tensors"][1] == 1 and elsewhere >= {*row["tensors"][3]}, (name, "by tensors", row["tensors"])
        for strength in {"histogram", "totals"} & {*row}:
            assert row[strength][2], (name, "by", strength, row[strength])
    healthy = found["healthy"]
    assert all(healthy[kind][0] == "as trained" for kind in ("rounds", "tensors", "histogram", "totals")), healthy


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return trained_pair(tmp_path_factory.mktemp("pair"))


def test_planted_faults_are_found_on_a_pair_that_is_trained_here(pair, tmp_path):
    """A few of them; `make verify` has them all."""
    assert pair.measure().accept_length > 2, "the drafter has learned nothing; the rest would be chance"
    session = Session(pair.checkpoint, pair.contract, pair.target, pair.texts[:8], 4)
    found = confuse(session, pair.texts[8:16], QUICK, tmp_path, (3, 20), pairs=False)
    judge(found)
    assert sum(len(row["rounds"][2]) == 1 for row in found.values()) >= 3, "rounds tell most of them apart"


@pytest.fixture(scope="module")
def tables():
    """Rows of both pairs, by name; written when both are there."""
    found: dict = {}
    yield found
    if len(found) == 2:
        (lab, told), (second, more) = found["lab"], found["second"]
        head = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        body = ["| " + " | ".join(map(str, row)) + " |" for row in lines(second)]
        write_table(
            "confusion", "Planted faults, and what the search makes of them",
            "make verify ARGS='-k confusion'", "\n\n".join((TEXT, summary("The lab", lab, told))),
            HEADS, lines(lab), "\n".join([summary("A second pair, trained here", second, more), "", *head, *body]),
        )  # fmt: skip


TEXT = (
    "Planted: files and flags of `lab faults`, served as SGLang 0.5.9 would; two of them together are the story's. "
    "Rounds: accepted drafts of every round, by the speculative loop, matched prompt by prompt. Tensors: what the "
    "planted drafter computes token by token over one text. Histogram (or acceptance by position, which is the same) "
    "and totals: replay of the planted files on the prompts that the search replays; other prompts: a histogram of "
    "other prompts. Rank: of the true wiring; equal ones share it. Alike: wirings that the evidence cannot tell from "
    "the first. Odds: of the first over the true one, no fault, one and two being equally likely before."
)


def summary(what: str, found: dict[str, dict], told: str) -> str:
    count = Counter()
    for row in found.values():
        count["rounds"] += row["rounds"][1] == 1 and row["right"]
        count["alone"] += row["right"] and len(row["rounds"][2]) == 1
        count["tensors"] += row["tensors"][1] == 1
        count["histogram"] += row["histogram"][2]
        count["totals"] += row["totals"][2]
        count["other"] += row["other"][0]
        count["config"] += row["config"]
    n = len(found)
    return (
        f"**{what}** ({told}): the true wiring is first by rounds in {count['rounds']} of {n} ({count['alone']} of "
        f"them alone), first by tensors in {count['tensors']}, inside the 95 % set by histogram in "
        f"{count['histogram']}, by totals in {count['totals']}, by a histogram of other prompts in {count['other']}. "
        f"Files and flags alone give the true wiring in {count['config']}; the others change what is in a tensor, or "
        "nothing that a file says."
    )


@pytest.mark.verify
def test_every_planted_fault_is_found_on_the_second_pair(tables, pair, tmp_path):
    session = Session(pair.checkpoint, pair.contract, pair.target, pair.texts[:12], 4)
    found = confuse(session, pair.texts[12:24], [*FAULTS, STORY], tmp_path, (6, 40))
    tables["second"] = found, "8 layers, untied, 12 prompts × 40 tokens; the loop 6 × 40; 12 other prompts"
    judge(found)


@pytest.mark.verify
def test_every_planted_fault_is_found_on_the_lab(tables, lab_session, tmp_path):
    texts = [replace(t, limit=min(48, t.limit)) for t in lab_session.texts]
    session = Session(lab_session.checkpoint, lab_session.contract, lab_session.target, texts[:12], 4)
    found = confuse(session, texts[12:24], [*FAULTS, STORY], tmp_path, (3, 24))
    tables["lab"] = found, "12 prompts × 48 tokens; the loop 3 × 24; 12 other prompts"
    judge(found)
