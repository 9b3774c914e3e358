"""The lab's trainer and generator, on a tiny seeded target."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

from kitlib.acceptance import Chains
from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract, TargetInfo
from kitlib.drafter import load_drafter
from kitlib.features import Target, read_prompts
from kitlib.findings import KitError
from kitlib.lab import generate as g
from kitlib.lab import passes, start
from kitlib.lab import rows as r
from kitlib.lab import train as t
from kitlib.paths import DATA

SYSTEM = [7, 8, 9]
ROWS = DATA / "lab-train.jsonl.gz"


class Letters:
    """A tokenizer for tests: one id a character, and a chat template that ends a turn with 2."""

    chat_template = "letters"

    def apply_chat_template(self, messages, **_: object) -> str:
        return messages[0]["content"]

    def __call__(self, text: str, **_: object):
        ids = [*SYSTEM, *(ord(c) % 80 + 10 for c in text), 2, 6]
        return type("Encoding", (), {"input_ids": ids})

    def decode(self, ids) -> str:
        return "".join(chr(i - 10 + 80) if i >= 10 else "?" for i in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Llama of 4 layers, saved as a model folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def tokenizer(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Letters())
        patch.setattr(g, "BATCH", 12)
        patch.setattr(g, "ANSWER", 20)
        yield


@pytest.fixture(scope="module")
def data(folder, tmp_path_factory) -> Path:
    """Rows of the tiny target, by `generate` itself."""
    out = tmp_path_factory.mktemp("data") / "rows.jsonl.gz"
    g.generate(folder, out, most_rows=60, seed=3, say=lambda _: None)
    return out


@pytest.fixture(scope="module")
def trained(folder, data, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("trained")
    return out, run(folder, data, out)


def run(folder: Path, data: Path, out: Path, **changes) -> dict:
    options = {"tokens": 3000, "batch": 4, "rate": 3e-3, "draft_vocab": 64, "validation": 8}
    return t.train(folder, data, out, cache=out / "cache", say=lambda _: None, **options | changes)


def random_drafter(folder: Path, out: Path, boundaries=(1, 2, 3)):
    """An untrained drafter of the tiny target in fp32, its matrices stirred with noise; and the target."""
    target, generator = Target.load(folder, device="cpu", dtype="float32"), torch.Generator().manual_seed(5)
    config, weights = start.new_drafter(target, torch.arange(10, 74), boundaries, torch.ones(96), generator)
    stirred = {n: w + torch.randn(w.shape, generator=generator) * 0.3 for n, w in weights.items() if w.dim() == 2}
    weights |= {n: w.bfloat16() for n, w in stirred.items()}
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").write_bytes(save(weights))
    checkpoint = Checkpoint.open(out)
    contract = Contract.of(checkpoint, target.info)
    wiring = contract.trained(target.info)
    return load_drafter(checkpoint, contract, wiring, target.embedding, device="cpu", dtype="float32")[0], target


def some_rows(count: int = 3) -> tuple[list[dict], list[torch.Tensor]]:
    """Rows of different lengths with random states; every third token of row 1 is a stop id at its end."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(6, 11), (9, 5), (4, 8)][:count]
    rows = [
        {"prompt_tokens": p, "ids": torch.randint(10, 74, (p + n,), generator=generator).tolist()} for p, n in lengths
    ]
    rows[1]["ids"][-1] = 2
    return rows, [torch.randn(len(row["ids"]), 4 * 32, generator=generator) for row in rows]


# Generation


def test_generation_repeats_with_its_seed(folder, data, tmp_path):
    again = g.generate(folder, tmp_path / "again.jsonl.gz", most_rows=60, seed=3, say=lambda _: None)
    assert (tmp_path / "again.jsonl.gz").read_bytes() == data.read_bytes()
    other = g.generate(folder, tmp_path / "other.jsonl.gz", most_rows=12, seed=4, say=lambda _: None)
    assert [row["ids"] for row in other[:12]] != [row["ids"] for row in again[:12]]


def test_rows_are_the_targets_own_greedy_answers(folder, data):
    rows = r.read_rows(data)
    target = Target.load(folder, device="cpu", dtype="bfloat16")
    assert {"templ", "magpie"} == {row["kind"] for row in rows}
    assert {0.0, 0.7} == {row["temp"] for row in rows}
    assert max(len(row["ids"]) - row["prompt_tokens"] for row in rows) == g.ANSWER
    greedy = [row for row in rows if row["temp"] == 0][:12]
    agreed = total = 0
    for row in greedy:  # in bf16 a near tie may fall differently in another batch, so not every token must agree
        with torch.inference_mode():
            best = target.model(torch.tensor([row["ids"]])).logits[0].argmax(-1)[row["prompt_tokens"] - 1 : -1]
        answer = torch.tensor(row["ids"][row["prompt_tokens"] :])
        agreed, total = agreed + int((best == answer).sum()), total + len(answer)
    assert agreed / total > 0.9


def test_decoding_in_a_ragged_batch_equals_transformers_greedy(folder):
    target = Target.load(folder, device="cpu", dtype="float32")
    prompts = [[7, 8, 9, *range(20, 20 + n), 2, 6] for n in (1, 4, 9, 2)]
    expected = target.greedy(prompts, 20)
    target.model.set_attn_implementation("grouped")
    assert g.answer(target, prompts, 20, torch.zeros(4), torch.Generator()) == expected


def test_generation_goes_on_and_never_repeats_a_prompt(folder, data, tmp_path):
    out = tmp_path / "more.jsonl.gz"
    out.write_bytes(data.read_bytes())
    rows = g.generate(folder, out, most_rows=72, seed=3, say=lambda _: None)
    assert rows[:60] == r.read_rows(data)
    assert len(rows) == len({tuple(row["ids"][: row["prompt_tokens"]]) for row in rows}) == 72


def test_held_out_prompts_are_left_out(folder, tmp_path):
    first = g.template_questions(3)[0]
    ids = Letters()(first).input_ids
    free = g.generate(folder, tmp_path / "free.jsonl.gz", most_rows=12, seed=3, say=lambda _: None)
    assert any(row["ids"][: row["prompt_tokens"]] == ids for row in free)
    for held_out in ([first], [ids]):
        out = tmp_path / f"held-{type(held_out[0]).__name__}.jsonl.gz"
        kept = g.generate(folder, out, most_rows=12, seed=3, held_out=held_out, say=lambda _: None)
        assert not any(row["ids"][: row["prompt_tokens"]] == ids for row in kept)


def test_committed_rows_hold_no_held_out_prompt():
    from tokenizers import Tokenizer

    from kitlib.lab import target_path

    rows = r.read_rows(ROWS)
    prompts = [tuple(row["ids"][: row["prompt_tokens"]]) for row in rows]
    assert len(set(prompts)) == len(rows) > 3968
    assert {"templ", "magpie"} == {row["kind"] for row in rows}
    assert ROWS.stat().st_size <= 4_000_000
    tokenizer = Tokenizer.from_file(str(target_path() / "tokenizer.json"))
    texts = tokenizer.decode_batch(list(map(list, prompts)), skip_special_tokens=False)
    turns = {text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0].strip().lower() for text in texts}
    held_out = {prompt.strip().lower() for prompt in read_prompts(DATA / "prompts.jsonl")}
    assert len(turns) > 3900  # a few prompts differ in case alone
    assert len(held_out) == 32
    assert not turns & held_out


def test_a_torn_file_is_refused(data, tmp_path):
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(data.read_bytes()[:-40])
    with pytest.raises(KitError, match="not a gzipped"):
        r.read_rows(torn)


# Training


def test_attention_equals_the_drafters_own_chains(folder, tmp_path):
    """Every pass of a padded batch gives what `Chains` (replay's attention) gives for the row alone."""
    drafter, target = random_drafter(folder, tmp_path / "d")
    rows, states = some_rows()
    batch = r.collate(rows, states, 32, target.stop_ids)
    drafted = passes.draft_passes(drafter, batch, 4)
    for b, (row, state) in enumerate(zip(rows, states, strict=True)):
        ids, count = torch.tensor(row["ids"]), len(row["ids"]) - 1
        attend, hidden = Chains(), drafter.fuse(state[:-1, :-32])
        for k in range(4):
            if k:
                hidden = drafter.feedback(hidden)
            tokens = F.pad(ids[1 + k :], (0, k))
            hidden = drafter.step(tokens, hidden, torch.arange(count) + k, attend)
            first, valid = row["prompt_tokens"] - 1, len(row["ids"]) - row["prompt_tokens"] - k
            torch.testing.assert_close(
                drafted[k][b, :valid], hidden[first : first + valid], rtol=1e-4, atol=1e-4, msg=f"row {b}, pass {k}"
            )


def test_loss_equals_plain_cross_entropy_and_its_gradients(folder, tmp_path):
    drafter, target = random_drafter(folder, tmp_path / "d")
    rows, states = some_rows()
    batch = r.collate(rows, states, 32, target.stop_ids)
    kept = torch.arange(10, 74)
    to_draft = torch.full((96,), -1)
    to_draft[kept] = torch.arange(64)
    parameters = [drafter[name].requires_grad_() for name in drafter.shapes]
    loss, parts = passes.batch_loss(drafter, batch, target.head[kept], to_draft, 4)
    fast = torch.autograd.grad(loss, parameters)

    total = torch.tensor(0.0)
    for k, hidden in enumerate(passes.draft_passes(drafter, batch, 4)):
        losses = []
        for b, row in enumerate(rows):
            prompt, ids = row["prompt_tokens"], row["ids"]
            for at in range(prompt + k, len(ids)):  # the token read last; the next one is drafted
                if ids[at] == 2 or (at + 1 < len(ids) and to_draft[ids[at + 1]] < 0 and ids[at + 1] != 2):
                    continue
                teacher = (states[b][at, -32:] @ target.head[kept].T).softmax(-1)
                losses.append(F.cross_entropy(drafter.logits(hidden[b, at - prompt - k]), teacher))
        mean = torch.stack(losses).mean()
        assert parts[k] == pytest.approx(mean.item(), rel=1e-4)
        total = total + 0.8**k * mean
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-4)
    for name, one, other in zip(drafter.shapes, fast, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


def test_only_response_tokens_count(folder, tmp_path):
    """States of the answer after its stop id, of padding and of the last prompt token teach nothing."""
    drafter, target = random_drafter(folder, tmp_path / "d")
    rows, states = some_rows()
    head, to_draft = target.head[10:74], F.pad(torch.arange(64), (10, 22), value=-1)
    before = passes.batch_loss(drafter, r.collate(rows, states, 32, target.stop_ids), head, to_draft, 4)[0]
    assert r.collate(rows, states, 32, target.stop_ids).answers.sum(1).tolist() == [11, 4, 8]
    for row, state in zip(rows, states, strict=True):
        state[: row["prompt_tokens"], -32:] = 9.0  # what the target says inside the prompt is no lesson
    states[1][-1, -32:] = 9.0  # nor after the stop id
    after = passes.batch_loss(drafter, r.collate(rows, states, 32, target.stop_ids), head, to_draft, 4)[0]
    assert float(before) == float(after)
    states[0][rows[0]["prompt_tokens"], -32:] = 9.0
    changed = passes.batch_loss(drafter, r.collate(rows, states, 32, target.stop_ids), head, to_draft, 4)[0]
    assert float(changed) != float(before)


def test_fc_starts_blind_to_the_scale_of_a_boundary(folder):
    """Features of a thousandfold different scale reach the layer with equal weight; norm and head are the target's."""
    target = Target.load(folder, device="cpu", dtype="float32")
    rms = torch.cat([torch.full((32,), scale) for scale in (0.1, 1.0, 100.0)])
    config, weights = start.new_drafter(target, torch.arange(10, 74), (1, 2, 3), rms, torch.Generator().manual_seed(1))
    parts = (weights["fc.weight"].float() * rms).view(32, 3, 32).pow(2).mean((0, 2)).sqrt()
    torch.testing.assert_close(parts, torch.full((3,), 0.02), rtol=0.1, atol=0)
    torch.testing.assert_close(weights["lm_head.weight"], target.head[10:74].bfloat16())
    torch.testing.assert_close(weights["norm.weight"], target.final_norm.weight.bfloat16())
    assert config["speculators_config"]["verifier"]["name_or_path"] == folder.name  # no path of the trainer's machine


def test_the_streams_scale_is_free(folder, tmp_path):
    """A drafter whose stream is 16 times as large drafts the same; only norms read it."""
    drafter, target = random_drafter(folder, tmp_path / "d")
    rows, states = some_rows()
    batch = r.collate(rows, states, 32, target.stop_ids)
    before = [drafter.draft(h) for h in passes.draft_passes(drafter, batch, 4)]
    weights = {name: drafter[name].clone() for name in drafter.shapes}
    for name, weight in start.at_scale(weights, 16.0).items():
        drafter[name].copy_(weight)
        assert torch.equal(weight, weights[name]) != name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight"))
    after = [drafter.draft(h) for h in passes.draft_passes(drafter, batch, 4)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_training_lowers_the_loss(folder, data, trained, tmp_path):
    curve = trained[1]["curve"]
    assert sum(curve[-1]["loss"]) < 0.97 * sum(curve[0]["loss"])
    frozen = run(folder, data, tmp_path, rate=0.0)["curve"]
    assert frozen[-1]["tokens"] == curve[-1]["tokens"]
    assert sum(curve[-1]["loss"]) < 0.97 * sum(frozen[-1]["loss"])


def test_the_same_seed_gives_the_same_curve(folder, data, trained, tmp_path):
    again = run(folder, data, tmp_path)
    assert again["curve"] == trained[1]["curve"]
    assert (tmp_path / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()
    assert run(folder, data, tmp_path, seed=1, tokens=400)["curve"][0] != again["curve"][0]


def test_training_does_not_depend_on_the_scale_that_is_written(folder, data, trained, tmp_path, monkeypatch):
    """Written without a factor, the same run gives the same tensors, the stream's writers apart: by a power of two."""
    monkeypatch.setattr(t, "at_scale", lambda weights, factor: weights)
    run(folder, data, tmp_path)
    plain, scaled = (load_file(f / "model.safetensors") for f in (tmp_path, trained[0]))
    factor = float(scaled["fc.weight"].float().norm() / plain["fc.weight"].float().norm())
    factor = 2.0 ** round(math.log2(factor))
    assert factor != 1
    for name, tensor in start.at_scale(plain, factor).items():
        assert torch.equal(tensor, scaled[name]), name


def test_the_schedule_counts_tokens(folder, data, trained, tmp_path):
    metrics = trained[1]
    longest = 4 * g.ANSWER
    assert 3000 <= metrics["tokens"] < 3000 + longest
    assert [point["tokens"] for point in metrics["curve"]] == sorted({point["tokens"] for point in metrics["curve"]})
    short = run(folder, data, tmp_path, tokens=1000)
    assert 1000 <= short["tokens"] < 1000 + longest
    assert t.learning_rate(0.0, 1.0) < 0.1 < 0.9 < t.learning_rate(t.WARMUP, 1.0)
    assert t.learning_rate(1.0, 1.0) == pytest.approx(0.02)


def test_what_is_saved(folder, trained):
    out, metrics = trained
    checkpoint = Checkpoint.open(out)
    target = TargetInfo.of(folder)
    contract = Contract.of(checkpoint, target)
    assert not contract.contradictions
    assert contract.boundaries == contract.trained(target).boundaries == (2, 2, 1)
    assert {"d2t", "t2d", "fc.weight", "layers.0.self_attn.q_proj.weight"} < set(checkpoint.tensors)
    assert "embed_tokens.weight" not in checkpoint.tensors
    d2t = torch.tensor(checkpoint.read("d2t"))
    kept = d2t + torch.arange(64)
    assert torch.tensor(checkpoint.read("t2d")).nonzero()[:, 0].tolist() == kept.tolist()
    saved = json.loads((out / "metrics.json").read_text())
    assert saved == json.loads(json.dumps(metrics))
    assert saved["complete"]
    for kind in ("served", "restricted"):
        joint, conditional = saved[f"{kind}_joint"], saved[f"{kind}_conditional"]
        assert joint[0] == conditional[0]
        assert joint[0] >= max(joint[1:])  # each step counts the positions that have one
    assert all(a <= b for a, b in zip(saved["served_joint"], saved["restricted_joint"], strict=True))


def test_too_few_rows_are_refused(folder, data, tmp_path):
    few = tmp_path / "few.jsonl.gz"
    r.write_rows(few, [row for row in r.read_rows(data) if row["temp"] > 0][:3])
    with pytest.raises(KitError, match="3 rows"):
        run(folder, few, tmp_path / "out")
