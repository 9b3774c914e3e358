"""The lab's training data: the target's own answers to many questions, as token ids.

Most questions are templates put to topics (`questions.toml`); others the target invents itself, continuing its own
chat template at the user's turn. Greedy answers are in the majority because serving is greedy; the others
are drawn at T = 0.7 from the top 50. Held-out prompts never occur.
"""

from __future__ import annotations

import random
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..features import Target, _until
from .rows import read_rows, write_rows

ANSWER, TURN = 80, 48  # most new tokens of an answer, and of an invented user turn
BATCH, TOP, GREEDY, TEMPERATURE, TURN_TEMPERATURE = 256, 50, 0.75, 0.7, 0.9


class Layer(DynamicLayer):
    """Keys and values of one layer in memory taken once, so that a step copies one column and not the whole."""

    def __init__(self, room: int):
        super().__init__()
        self.room, self.store = room, ()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if not start:
            batch, heads, _, width = key_states.shape
            self.store = tuple(key_states.new_empty(batch, heads, self.room, width) for _ in range(2))
            self.is_initialized = True
        for store, new in zip(self.store, (key_states, value_states), strict=True):
            store[:, :, start:end] = new
        self.keys, self.values = (store[:, :, :end] for store in self.store)
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences only."""
        end = self.get_seq_length()
        self.store = tuple(store[rows] for store in self.store)
        self.keys, self.values = (store[:, :, :end] for store in self.store)


def grouped(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """Decoding with the heads of a group as rows of one query: keys are not copied for each head."""
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = query.view(len(query), key.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask)
    return out.view(len(query), 1, -1, query.shape[-1]), None


AttentionInterface.register("grouped", grouped)
AttentionMaskInterface.register("grouped", sdpa_mask)


@torch.inference_mode()
def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    most: int,  # new tokens
    temperatures: Tensor,  # [prompts]; 0 is greedy
    generator: torch.Generator,
) -> list[tuple[int, ...]]:
    """One batch of answers, stop id included; each is greedy or drawn from the top 50 at its own temperature."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    layers = [Layer(width + most) for _ in target.layers]
    cache, rows, out = Cache(layers=layers), torch.arange(len(prompts)), [[] for _ in prompts]
    stops = torch.tensor(sorted(target.stop_ids))
    for step in range(most):
        hidden = target.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        logits, heat = hidden @ target.head.T, temperatures[rows]
        new, warm = logits.argmax(-1, keepdim=True), heat > 0
        if warm.any():
            best, index = logits[warm].float().topk(TOP, -1)
            drawn = torch.multinomial((best / heat[warm, None]).softmax(-1), 1, generator=generator)
            new[warm] = index.gather(1, drawn)
        for row, token in zip(rows.tolist(), new[:, 0].tolist(), strict=True):
            out[row].append(token)
        going = ~torch.isin(new[:, 0], stops)
        if not going.any():
            break
        if step % 16 == 15 or going.float().mean() < 0.9:  # until then a finished row runs on, unread
            rows, new, mask, positions = rows[going], new[going], mask[going], positions[going]
            for layer in layers:
                layer.select(going)
        ids, positions = new, positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return [_until(row, target.stop_ids) for row in out]


def template_questions(seed: int) -> list[str]:
    """Every question put to every topic, shuffled."""
    raw = tomllib.loads((Path(__file__).parent / "questions.toml").read_text(encoding="utf-8"))
    topics, questions = raw["topics"].split("|"), raw["questions"].split("|")
    made = sorted(q.format(t) for q in questions for t in topics)
    random.Random(seed).shuffle(made)
    return made


def invented(target: Target, generator: torch.Generator) -> Iterator[str]:
    """User turns that the target makes up when its chat template stops where the user would write."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(target.encode("a"), target.encode("1"), strict=False))
    start = [token for token, _ in same]
    for ids in answer(target, [start] * BATCH, TURN, torch.full((BATCH,), TURN_TEMPERATURE), generator):
        if ids[-1] in target.stop_ids and len(ids) >= 4:
            yield target.tokenizer.decode(ids[:-1]).strip()


def generate(
    target_dir: str | Path,
    out: Path,  # a .jsonl.gz file; rows already in it are kept and the run goes on from there
    *,
    minutes: float = float("inf"),
    most_rows: float = float("inf"),
    seed: int = 0,
    held_out: Iterable = (),  # prompts that must not occur: text, chat messages or ids
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Fill `out` with answers for so many minutes, or until it has so many rows; it is whole after every batch."""
    target = Target.load(target_dir, device="cpu", dtype="bfloat16")
    target.model.set_attn_implementation("grouped")
    rows = read_rows(out) if out.exists() else []
    forbidden = {target.encode(prompt) for prompt in held_out}
    seen = forbidden | {tuple(row["ids"][: row["prompt_tokens"]]) for row in rows}
    generator = torch.Generator().manual_seed(seed * 1_000_003 + len(rows))
    templates, started, batches = iter(template_questions(seed)), time.monotonic(), 0
    while time.monotonic() - started < 60 * minutes and len(rows) < most_rows:
        batch: list[tuple[str, tuple[int, ...]]] = []
        sources = [("templ", templates)]
        if batches % 4 == 1:
            sources.insert(0, ("magpie", invented(target, generator)))
        for kind, source in sources:
            while len(batch) < BATCH and (text := next(source, None)) is not None:
                if (ids := target.encode(text)) not in seen:
                    seen.add(ids)
                    batch.append((kind, ids))
        if not batch:
            break
        heat = torch.where(torch.rand(len(batch), generator=generator) < GREEDY, 0.0, TEMPERATURE)
        answers = answer(target, [ids for _, ids in batch], ANSWER, heat, generator)
        for (kind, ids), temperature, new in zip(batch, heat.tolist(), answers, strict=True):
            row = {"kind": kind, "temp": round(temperature, 2), "prompt_tokens": len(ids), "ids": [*ids, *new]}
            rows.append(row)
        write_rows(out, rows)
        batches, tokens = batches + 1, sum(len(row["ids"]) - row["prompt_tokens"] for row in rows)
        say(f"batch {batches}: {len(rows)} rows, {tokens} response tokens, {time.monotonic() - started:.0f} s")
    return rows
