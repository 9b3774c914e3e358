"""Acceptance: definitions on known counts, and the replay equal to the speculative loop, round by round."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import contract_of, write_drafter

from kitlib.acceptance import Acceptance, Chains, draft_everywhere, expected_length, replay, speculate, walk
from kitlib.contract import Rope
from kitlib.drafter import load_drafter
from kitlib.features import Target, Text


def test_definitions_on_known_counts():
    a = Acceptance(((0, 2, 4), (1, 0, 0)), 4)  # a = 7 drafts in v = 6 rounds
    assert (a.accepted, a.verified) == (7, 6) and a.accept_length == 1 + 7 / 6
    assert a.histogram == [3, 1, 1, 0, 1]
    assert a.by_position == pytest.approx([3 / 6, 2 / 6, 1 / 6, 1 / 6])
    assert a.conditional == pytest.approx([3 / 6, 2 / 3, 1 / 2, 1.0])
    assert a.accept_length == pytest.approx(1 + sum(a.by_position)) == pytest.approx(expected_length(a.conditional))
    low, high = a.interval()
    assert 1.0 <= low <= a.accept_length <= high <= 3.0


def test_nothing_accepted_is_one_and_nothing_measured_is_not_a_number():
    assert Acceptance(((0, 0, 0),), 4).accept_length == 1.0
    assert math.isnan(Acceptance((), 4).accept_length) and Acceptance((), 4).histogram == [0] * 5


def test_paired_interval_of_a_drafter_with_itself_is_zero():
    a = Acceptance(tuple(tuple(np.random.default_rng(i).integers(0, 5, 20)) for i in range(8)), 4)
    assert a.minus(a) == (0.0, 0.0)
    better = Acceptance(tuple(tuple(min(4, n + 1) for n in r) for r in a.rounds), 4)
    assert better.minus(a)[0] > 0


@pytest.mark.parametrize(
    ("drafts_right", "limit", "rounds"),
    [
        ([0] * 12, 6, (0, 0, 0, 0, 0)),  # one token a round; the token at the limit starts none
        ([3] * 12, 8, (3, 3)),  # 1 + 4 + 4 tokens: the second round passes the limit and is judged whole
        ([1, 0, 3, 0] * 3, 7, (1, 3)),
    ],
)
def test_walk_judges_the_round_that_crosses_the_limit_whole(drafts_right, limit, rounds):
    ids = tuple(range(10, 30))
    text = Text(ids, prompt=4, limit=limit)
    drafts = [
        [ids[t + 2 + i] if i < right else -1 for i in range(3)]
        for t, right in zip(range(3, 15), drafts_right, strict=True)
    ]
    assert walk(drafts, text) == rounds


def test_walk_judges_a_round_whole_past_a_stop_token_and_leaves_out_one_the_record_cuts():
    ids = (5, 6, 7, 2, 8, 9)  # prompt 5, answer 6 7 2 (2 stops), then the lookahead
    assert walk([[7, 2, 8]] * 5, Text(ids, 1, 3)) == (3,)  # one draft beyond the stop counts, as in SGLang
    assert walk([[7, 2, 1]] * 5, Text(ids, 1, 3)) == (2,)
    assert walk([[7, 2, 8, 9, 1]] * 5, Text(ids, 1, 3)) == ()  # agrees to the end of the record: cut


@pytest.fixture(scope="module")
def target(tiny_target):
    from transformers import AutoModelForCausalLM

    from kitlib.contract import TargetInfo

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    return Target(model, None, TargetInfo.of(tiny_target))


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(3, 24, (n,), generator=generator).tolist()) for n in (1, 4, 9, 17, 30)]


WIRINGS = {
    "trained": {},
    "one layer, fc bypassed": {"capture": "final", "fc": False},
    "EAGLE": {"capture": "final", "fc": False, "head_source": "target", "d2t": "identity", "logit_cut": True},
    "normed states": {"capture": "normed"},
    "zeros": {"capture": "zeros"},
    "last boundary, pre-norm": {"boundaries": (0, 4, 8)},
    "blocks reversed": {"boundaries": (5, 4, 2)},
    "normed residual": {"residual": "normed"},
    "post-norm feedback": {"feedback": "post-norm"},
    "not shifted": {"token_shift": 0},
    "d2t identity": {"d2t": "identity"},
    "d2t absolute": {"d2t": "absolute"},
    "tied head": {"head_source": "embedding", "logit_cut": True},
    "rope theta": {"rope": Rope(1e6)},
    "llama3 rope": {
        "rope": Rope(
            1e4, "llama3",
            scaling=(
                ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
                ("original_max_position_embeddings", 64),
            ),
        )
    },
    "half of each head rotates": {"rope": Rope(1e4, partial=0.5)},
    "positions from 1": {"position_base": 1},
    "embedding scaled": {"embed_scale": 5.6},
    "layer dropped": {"dropped": ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight")},
}  # fmt: skip


@pytest.mark.parametrize("name", WIRINGS)
def test_replay_equals_the_loop_for_every_wiring(tmp_path, tiny_target, target, prompts, name):
    checkpoint, contract, trained = contract_of(write_drafter(tmp_path / "d"), tiny_target)
    wiring = trained.but(**WIRINGS[name])
    drafter, _ = load_drafter(
        checkpoint, contract, wiring, target.embedding, target.head, device="cpu", dtype="float32"
    )
    texts = target.record(prompts, 24, lookahead=5)
    states = [target.states(t, wiring.boundaries, wiring.boundaries) for t in texts]
    replayed = replay(drafter, states, 4)
    assert replayed.verified > 40
    for prompt, text, rounds in zip(prompts, texts, replayed.rounds, strict=True):
        out, loop = speculate(target, drafter, prompt, 24, 4)
        assert out == text.answer, "speculation changed the greedy text"
        assert loop == rounds


@pytest.mark.parametrize("config", [{"layers": 2}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}])
def test_replay_equals_the_loop_for_other_architectures(tmp_path, tiny_target, target, prompts, config):
    checkpoint, contract, wiring = contract_of(write_drafter(tmp_path / "d", **config), tiny_target)
    drafter, load = load_drafter(
        checkpoint, contract, wiring, target.embedding, target.head, device="cpu", dtype="float32"
    )
    assert load.complete, load
    texts = target.record(prompts[:3], 16, lookahead=5)
    replayed = replay(drafter, [target.states(t, wiring.boundaries) for t in texts], 4)
    for prompt, text, rounds in zip(prompts, texts, replayed.rounds, strict=False):
        assert speculate(target, drafter, prompt, 16, 4) == (text.answer, rounds)


def test_chains_keep_no_square_of_the_length(monkeypatch):
    """Chunking the rows changes nothing: scores for 7 rows at a time against all rows at once."""
    generator = torch.Generator().manual_seed(0)
    passes = [[torch.randn(h, 50, 8, generator=generator) for h in (4, 2, 2)] for _ in range(3)]
    outs = []
    for rows in (7, 1000):
        monkeypatch.setattr("kitlib.acceptance.ROWS", rows)
        attend = Chains()
        outs.append([attend(0, *p) for p in passes])
    for small, large in zip(*outs, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)


def test_drafts_do_not_see_the_future(tmp_path, tiny_target, target, prompts):
    checkpoint, contract, wiring = contract_of(write_drafter(tmp_path / "d"), tiny_target)
    drafter, _ = load_drafter(
        checkpoint, contract, wiring, target.embedding, target.head, device="cpu", dtype="float32"
    )
    text = target.record(prompts[-1:], 8, lookahead=5)[0]
    states, ids = target.states(text, wiring.boundaries).select(wiring), torch.tensor(text.ids)
    whole = draft_everywhere(drafter, states, ids, 4)
    part = draft_everywhere(drafter, states[:20], ids[:20], 4)
    assert torch.equal(whole[:19], part)
    assert torch.equal(whole[11:], draft_everywhere(drafter, states, ids, 4, first=11))
