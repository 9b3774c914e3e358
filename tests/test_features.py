"""The target's side: boundaries are what transformers says they are, recorded text is transformers' own greedy."""

from __future__ import annotations

import json

import pytest
import torch

from kitlib.contract import TargetInfo, Wiring
from kitlib.features import Target, Text, compare, read_prompts
from kitlib.findings import KitError


@pytest.fixture(scope="module")
def target(tiny_target):
    from transformers import AutoModelForCausalLM

    return Target(
        AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), None, TargetInfo.of(tiny_target)
    )


def test_boundaries_are_transformers_hidden_states(target):
    text = Text(tuple(range(3, 20)), 5, 12)
    states = target.states(text, range(9), range(9))
    with torch.inference_mode():
        out = target.model(torch.tensor([text.ids]), output_hidden_states=True)
    for b in range(8):
        assert torch.equal(states.boundaries[b], out.hidden_states[b][0]), b
    assert torch.equal(states.final, out.hidden_states[8][0])  # transformers' last one is post-norm
    assert torch.equal(target.final_norm(states.boundaries[8]), states.final)  # boundary N is pre-norm
    assert torch.equal(states.normed[8], states.final)
    assert torch.equal(states.normed[3], target.layers[3].input_layernorm(states.boundaries[3]))
    assert not target.layers[0]._forward_pre_hooks and not target.final_norm._forward_hooks  # hooks are gone


def test_select_gives_what_the_wiring_receives(target):
    states = target.states(Text((3, 4, 5, 6), 2, 2), (2, 4, 5), (2, 4, 5))
    w = Wiring((5, 2, 4))
    assert states.select(w).shape == (4, 96) and torch.equal(states.select(w)[:, :32], states.boundaries[5])
    assert torch.equal(states.select(w.but(capture="final")), states.final)
    assert not states.select(w.but(capture="zeros")).any()
    with pytest.raises(KitError, match="Boundary 7 was not captured"):
        states.select(w.but(boundaries=(7,)))
    with pytest.raises(KitError, match=r"Boundaries \[9\] do not exist in a target of 8 layers"):
        target.states(Text((3,), 1, 0), (9,))


def test_batched_recording_equals_one_by_one_and_is_cached(target, tmp_path):
    prompts = [(3, 4, 5), tuple(range(3, 23)), (7,)]
    texts = target.record(prompts, 12, lookahead=4, cache=tmp_path)
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            alone = target.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert alone[0].tolist()[: len(prompt) + 12] == list(text.ids[: text.prompt + text.limit])
        assert text.prompt == len(prompt) and (text.limit == 12 or text.answer[-1] == 2)
        assert len(text.ids) == text.prompt + text.limit + 4 and 2 not in text.answer[:-1]
    assert len(list(tmp_path.iterdir())) == 1
    target.greedy, kept = None, target.greedy
    try:
        assert target.record(prompts, 12, lookahead=4, cache=tmp_path) == texts  # nothing is generated again
    finally:
        target.greedy = kept


def test_scale_and_rotation_are_told_apart():
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    scaled, rotated = compare(50.6 * x, x), compare(x.roll(1, -1), x)
    assert scaled["cosine"] == pytest.approx(1) and scaled["norm_ratio"] == pytest.approx(50.6, rel=1e-4)
    assert rotated["norm_ratio"] == pytest.approx(1) and abs(rotated["cosine"]) < 0.5


def test_prompts_in_every_form(tmp_path):
    rows = [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "x"}]}, {"ids": [1, 2]}]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(file) == ["hello", rows[1]["messages"], [1, 2]] and read_prompts(file, 1) == ["hello"]


@pytest.mark.parametrize(
    ("text", "why"), [("", "no prompts"), ("{}", "line 1"), ('{"prompt": "a"}\nnot json', "line 2"), ("3", "line 1")]
)
def test_bad_prompts_are_one_sentence(tmp_path, text, why):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(KitError, match=why):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(KitError, match="Cannot read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(KitError, match="transformers cannot load the target"):
        Target.load(tmp_path, device="cpu")


def test_recorded_text_belongs_to_the_weights_and_not_to_a_path(tiny_target, tmp_path):
    from transformers import AutoModelForCausalLM

    from kitlib.contract import TargetInfo

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target = Target(model, None, TargetInfo.of(tiny_target))
    first = target.record([(3, 4, 5)], 12, 4, tmp_path)
    assert target.record([(3, 4, 5)], 12, 4, tmp_path) == first and len(list(tmp_path.iterdir())) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    second = target.record([(3, 4, 5)], 12, 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and second == target.record([(3, 4, 5)], 12, 4)
