"""Acceptance: counts first, ratios once, each with its definition; the loop itself, and its exact replay.

A round drafts S tokens in a chain and lets the target verify them. v rounds accept a draft tokens in all.
Accept length = 1 + a/v: it includes the token that the target itself adds, so 1.00 means nothing was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .drafter import Drafter
from .features import Capture, States, Target, Text

ROWS = 256  # query rows whose scores exist at the same time


@dataclass(frozen=True)
class Acceptance:
    """Accepted draft tokens of every round, prompt by prompt; every number is derived from these."""

    rounds: tuple[tuple[int, ...], ...]  # [prompt][round] accepted draft tokens, 0..draft_steps
    draft_steps: int  # S

    @property
    def verified(self) -> int:
        """v: verify rounds."""
        return sum(map(len, self.rounds))

    @property
    def accepted(self) -> int:
        """a: accepted draft tokens."""
        return sum(map(sum, self.rounds))

    @property
    def accept_length(self) -> float:
        """1 + a/v, the bonus token included."""
        return 1 + self.accepted / self.verified if self.verified else float("nan")

    @property
    def histogram(self) -> list[int]:
        """Rounds by accepted draft tokens; index 0 counts the rounds that accepted none."""
        flat = [n for r in self.rounds for n in r]
        return np.bincount(flat, minlength=self.draft_steps + 1).tolist() if flat else [0] * (self.draft_steps + 1)

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that accepted at least i + 1 drafts (joint, as vLLM and speculators' full_acc count)."""
        tail = np.cumsum(self.histogram[::-1])[::-1]
        return [float(n) / self.verified if self.verified else float("nan") for n in tail[1:]]

    @property
    def conditional(self) -> list[float]:
        """Acceptance of position i where it was reached (speculators' cond_acc, SpecForge's acc)."""
        joint = [1.0, *self.by_position]
        return [b / a if a else float("nan") for a, b in pairwise(joint)]

    def interval(self, level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap over prompts of the accept length (rounds of one prompt are not independent)."""
        lengths = self._resampled(draws, seed)
        low, high = np.nanquantile(lengths, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def minus(self, other: Acceptance, level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Interval of the difference of accept lengths on the same prompts (paired bootstrap)."""
        gaps = self._resampled(draws, seed) - other._resampled(draws, seed)
        low, high = np.nanquantile(gaps, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def _resampled(self, draws: int, seed: int) -> np.ndarray:
        counts = np.array([(sum(r), len(r)) for r in self.rounds], dtype=float)
        pick = np.random.default_rng(seed).integers(0, len(counts), (draws, len(counts)))
        total = counts[pick].sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 + total[:, 0] / total[:, 1]

    def to_dict(self) -> dict:
        if not self.verified:
            return {"accept_length": None, "interval": None, "accepted": 0, "rounds": 0}
        return {
            "accept_length": round(self.accept_length, 4),
            "interval": [round(x, 4) for x in self.interval()],
            "accepted": self.accepted,
            "rounds": self.verified,
            "histogram": self.histogram,
            "by_position": [round(x, 4) for x in self.by_position],
            "draft_steps": self.draft_steps,
            "prompts": len(self.rounds),
            "definition": "accept_length = 1 + accepted/rounds, bonus token included; by_position is joint",
        }


def expected_length(conditional: Sequence[float]) -> float:
    """Accept length of a chain from conditional accuracies: 1 + c0 + c0·c1 + …"""
    return 1 + float(np.cumprod(conditional).sum())


class Cache:
    """Keys and values of one sequence, row by row; `keep` forgets the rows of rejected drafts."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            k, v = (torch.cat([old, new], -2) for old, new in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        rows, length = q.shape[-2], k.shape[-2]
        mask = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]

    def keep(self, rows: int) -> None:
        self.kv = {i: (k[..., :rows, :], v[..., :rows, :]) for i, (k, v) in self.kv.items()}


class Chains:
    """Attention of one chain of drafts from every position at once.

    The first pass is causal over the sequence. In later passes row t sees the first pass up to t, and its own
    chain. Scores exist for `ROWS` rows at a time, so memory grows with the length and not with its square.
    """

    def __init__(self) -> None:
        self.kv: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        passes = self.kv.setdefault(layer, [])
        passes.append((k, v))
        if len(passes) == 1:
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        (first_k, first_v), own = passes[0], passes[1:]  # [kv, L, D], and [kv, rows, D] each
        skip = first_k.shape[-2] - q.shape[-2]  # later passes may leave out the first rows
        group, scale = q.shape[0] // k.shape[0], q.shape[-1] ** -0.5
        q = q.unflatten(0, (k.shape[0], group)) * scale  # [kv, group, L, D]
        out = []
        for at in range(0, q.shape[-2], ROWS):
            rows, to = q[..., at : at + ROWS, :], min(at + ROWS, q.shape[-2])
            end = to + skip
            scores = rows @ first_k[:, None, :end].transpose(-1, -2)  # [kv, group, rows, end]
            future = torch.ones(to - at, end, dtype=torch.bool, device=q.device).triu(at + skip + 1)
            chain = [(rows * kk[:, None, at:to]).sum(-1, keepdim=True) for kk, _ in own]
            weights = torch.cat([scores.masked_fill(future, float("-inf")), *chain], -1).float().softmax(-1).to(q.dtype)
            mixed = weights[..., :end] @ first_v[:, None, :end]
            for i, (_, vv) in enumerate(own):
                mixed = mixed + weights[..., end + i, None] * vv[:, None, at:to]
            out.append(mixed)
        return torch.cat(out, -2).flatten(0, 1)


@torch.inference_mode()
def draft_everywhere(drafter: Drafter, states: Tensor, ids: Tensor, steps: int, first: int = 0) -> Tensor:
    """Greedy drafts from every position t >= first: the tokens after t + 1. Returns [L-1-first, steps] target ids.

    `states` is [L, K*Ht] (or [L, Ht]), `ids` [L].
    """
    rows = len(ids) - 1
    shift = drafter.wiring.token_shift
    tokens, hidden = ids[shift : shift + rows], drafter.fuse(states[:rows].to(drafter.target_embed.dtype))
    positions, attend, drafts = torch.arange(rows, device=ids.device), Chains(), []
    for i in range(steps):
        hidden = drafter.step(tokens, hidden, positions + i, attend)
        if i == 0:
            hidden, positions = hidden[first:], positions[first:]
        tokens = drafter.draft(hidden)
        hidden = drafter.feedback(hidden)
        drafts.append(tokens)
    return torch.stack(drafts, -1)


def walk(drafts: Sequence[Sequence[int]], text: Text) -> tuple[int, ...]:
    """Rounds along the recorded greedy text: each starts at the newest token and accepts while drafts agree.

    `drafts` begin at the prompt's last position.

    A round that starts within the answer is judged whole, past the limit and past a stop token, as SGLang's own
    histogram counts it. Only where the record ends inside a round (it has no lookahead) is that round left out.
    """
    ids, newest, rounds = text.ids, text.prompt, []
    last = min(text.prompt + text.limit, len(ids)) - 1  # the answer's last token starts no round
    while newest < last:
        row, accepted = drafts[newest - text.prompt], 0
        while accepted < len(row) and newest + 1 + accepted < len(ids) and row[accepted] == ids[newest + 1 + accepted]:
            accepted += 1
        if accepted < len(row) and newest + 1 + accepted >= len(ids):
            break
        rounds.append(accepted)
        newest += accepted + 1
    return tuple(rounds)


def replay(
    drafter: Drafter,
    states: Iterable[States],
    steps: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Acceptance:
    """Exact acceptance without running the target again: `steps` drafter passes for each text, then a walk."""
    rounds = []
    for s in progress(states):
        ids = torch.tensor(s.text.ids, device=drafter.target_embed.device)
        drafts = draft_everywhere(drafter, s.select(drafter.wiring).to(ids.device), ids, steps, s.text.prompt - 1)
        rounds.append(walk(drafts.tolist(), s.text))
    return Acceptance(tuple(rounds), steps)


@torch.inference_mode()
def speculate(
    target: Target, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int, steps: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The speculative loop itself, one token and one round at a time: (text, accepted drafts of each round).

    The reference for `replay`. It rolls both caches back after every round, as an engine does.
    """
    from transformers import DynamicCache

    wiring, device, stops = drafter.wiring, target.device, target.stop_ids
    cache, attend, out, rounds = DynamicCache(config=target.model.config), Cache(), [], []

    def verify(ids: list[int]) -> tuple[list[int], Tensor]:
        """The target's choice after each of these tokens, and the states they produced."""
        normed = wiring.boundaries if wiring.capture == "normed" else ()
        with Capture(target, wiring.boundaries, normed) as capture:
            output = target.model(input_ids=torch.tensor([ids], device=device), past_key_values=cache, use_cache=True)
        states = States(Text(tuple(ids), 0, 0), *capture.take()).select(wiring)
        return output.logits[0].argmax(-1).tolist(), states

    choices, states = verify(list(prompt))
    out.append(choices[-1])
    tokens = [*prompt[1:], choices[-1]]  # the token that follows each state
    before, done = list(prompt), 0  # tokens of the states themselves; rows in the drafter's cache
    while not stops & set(out) and len(out) < max_new_tokens:
        paired = torch.tensor(tokens if wiring.token_shift == 1 else before, device=device)
        hidden = drafter.fuse(states.to(drafter.target_embed.dtype))
        hidden = drafter.step(paired, hidden, torch.arange(done, done + len(paired), device=device), attend)[-1:]
        done += len(paired)
        drafts = [int(drafter.draft(hidden))]
        for i in range(1, steps):
            at = torch.tensor([done + i - 1], device=device)
            hidden = drafter.step(torch.tensor(drafts[-1:], device=device), drafter.feedback(hidden), at, attend)
            drafts.append(int(drafter.draft(hidden)))
        attend.keep(done)
        choices, states = verify([out[-1], *drafts])
        accepted = 0
        while accepted < steps and drafts[accepted] == choices[accepted]:
            accepted += 1
        new = [*drafts[:accepted], choices[accepted]]
        rounds.append(accepted)
        before, tokens, states = [out[-1], *new[:-1]], new, states[: len(new)]
        cache.crop(cache.get_seq_length() - (steps + 1 - len(new)))
        out += new
    text = out[:max_new_tokens]
    end = next((i + 1 for i, t in enumerate(text) if t in stops), len(text))
    return tuple(text[:end]), tuple(rounds)
