"""A pair that a test trains by itself in seconds: untied embeddings, grouped attention, and a drafter that is good.

The language: a first token names one of a few rules, each token then follows from the one before it by that rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract
from kitlib.diagnose import Session
from kitlib.features import Target
from kitlib.lab.rows import write_rows
from kitlib.lab.train import train

RULES, WORDS, FIRST = 6, 48, 16  # ids 3..8 name a rule, 16..63 are words
VOCAB, LENGTH, ANSWER = 64, 40, 40


def sentences(count: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:  # [count, length]
    """Rule r maps word x to one word of its own table; one time in ten any word follows."""
    table = torch.stack([torch.randperm(WORDS, generator=torch.Generator().manual_seed(r)) for r in range(RULES)])
    rule = torch.randint(RULES, (count,), generator=generator)
    word = torch.randint(WORDS, (count,), generator=generator)
    out = [rule + 3, word + FIRST]
    while len(out) < length:
        word = table[rule, word]
        noise = torch.rand(count, generator=generator) < 0.1
        word = torch.where(noise, torch.randint(WORDS, (count,), generator=generator), word)
        out.append(word + FIRST)
    return torch.stack(out, 1)


def train_target(folder: Path, steps: int = 120) -> Path:
    """A Llama of 8 layers with untied embeddings and two query heads a key head, trained on these sentences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_theta": 1e5, "rope_type": "default"},
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = sentences(16, generator)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (steps - step) / 40)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def trained_pair(folder: Path, prompts: int = 24, tokens: int = 40_000) -> Session:
    """The pair in float32 with greedy text on prompts that training has not seen, 4 draft steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)
        path = train_target(folder / "target")
        target, generator = Target.load(path, device="cpu", dtype="float32"), torch.Generator().manual_seed(2)
        starts = [tuple(s[: 2 + i % 5]) for i, s in enumerate(sentences(256 + prompts, generator).tolist())]
        rows = [
            {"kind": "rule", "temp": 0, "prompt_tokens": len(p), "ids": [*p, *a]}
            for p, a in zip(starts[prompts:], target.greedy(starts[prompts:], ANSWER, 128), strict=True)
        ]
        write_rows(folder / "rows.jsonl.gz", rows)
        train(
            path, folder / "rows.jsonl.gz", folder / "drafter", tokens=tokens, cache=folder / "states", batch=8,
            rate=4e-3, draft_vocab=56, validation=8, say=lambda _: None,
        )  # fmt: skip
    checkpoint = Checkpoint.open(folder / "drafter")
    contract = Contract.of(checkpoint, target.info)
    return Session(checkpoint, contract, target, target.record(starts[:prompts], ANSWER, 5), 4)
