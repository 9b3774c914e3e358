"""Acceptance of draft trees (top-k > 1), as SGLang builds and verifies them, replayed without the engine.

Source: sglang 0.5.20 `speculative/spec_utils.py` (select_top_k_tokens), `eagle_utils.py` (organize_draft_results) and
`eagle_worker_v2.py` (draft_forward). Each step keeps the k best paths by the product of their probabilities; the
D - 1 best candidates of all steps become the tree. Keys and values stay with the slot and not with the path: after a
re-ordering a path attends to what its slot computed before, and the replay does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from .acceptance import Acceptance, Cache
from .drafter import Drafter
from .features import States, Text

Tree = dict[int, list[tuple[int, int]]]  # candidate (-1: the root) -> its children: (candidate, target id)


class Slots:
    """Attention of k slots that share a prefix: each sees the prefix and what its own slot computed since."""

    def __init__(self, prefix: Cache, rows: int) -> None:
        self.prefix, self.rows = prefix, rows
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # [k, kv heads, steps, D] each

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.transpose(0, 1)[:, :, None] for x in (k, v))  # [k, kv heads, 1, D]
        if layer in self.kv:
            k, v = (torch.cat([old, new], -2) for old, new in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        before = (x[:, : self.rows].expand(len(k), -1, -1, -1) for x in self.prefix.kv[layer])
        k, v = (torch.cat([old, new], -2) for old, new in zip(before, (k, v), strict=True))
        q = q.transpose(0, 1)[:, :, None]  # [k, heads, 1, D]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0].transpose(0, 1)


def draft_tree(
    drafter: Drafter,
    hidden: Tensor,  # [1, H] of the newest token's pass
    prefix: Cache,  # of the first pass over the whole text
    newest: int,  # rows of that pass which lie before the drafts
    steps: int,
    topk: int,
    draft_tokens: int,  # D, the root included
) -> Tree:
    """The tree of one round."""
    attend, device = Slots(prefix, newest), hidden.device
    scores, states, slots = torch.ones(1, 1, device=device), hidden, [-1]
    candidates: list[tuple[float, int, int]] = []  # score, parent, target id
    for i in range(steps):
        probability, best = drafter.logits(states).float().softmax(-1).topk(topk, -1)  # [slots, k]
        scores = (scores.reshape(-1, 1) * probability).flatten()
        ids, start = drafter.to_target(best).flatten(), len(candidates)
        parents = [slot for slot in slots for _ in range(topk)]
        candidates += zip(scores.tolist(), parents, ids.tolist(), strict=True)
        scores, kept = scores.topk(topk)
        slots = [start + j for j in kept.tolist()]
        if i < steps - 1:
            fed = drafter.feedback(states)[kept // topk]
            at = torch.full((topk,), newest + i, device=device)
            states = drafter.step(ids[kept], fed, at, attend)
    chosen = torch.tensor([score for score, *_ in candidates]).topk(min(draft_tokens - 1, len(candidates))).indices
    tree: Tree = {}
    for c in sorted(chosen.tolist()):
        tree.setdefault(candidates[c][1], []).append((c, candidates[c][2]))
    return tree


def accepted(tree: Tree, following: Iterable[int]) -> int:
    """How many of the target's own tokens the tree holds along one path from its root."""
    node, count = -1, 0
    for token in following:
        node = next((child for child, drafted in tree.get(node, ()) if drafted == token), None)
        if node is None:
            break
        count += 1
    return count


@torch.inference_mode()
def replay_trees(
    drafter: Drafter,
    states: Iterable[States],
    steps: int,
    topk: int,
    draft_tokens: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Acceptance:
    """Acceptance of trees along recorded greedy texts, round by round; a round past the limit is judged whole."""
    rounds = []
    for s in progress(states):
        text, device = s.text, drafter.target_embed.device
        ids, prefix, rows = torch.tensor(text.ids, device=device), Cache(), len(text.ids) - 1
        shift, selected = drafter.wiring.token_shift, s.select(drafter.wiring).to(device, drafter.target_embed.dtype)
        first = drafter.step(
            ids[shift : shift + rows], drafter.fuse(selected[:rows]), torch.arange(rows, device=device), prefix
        )
        rounds.append(_walk(drafter, first, prefix, text, steps, topk, draft_tokens))
    return Acceptance(tuple(rounds), steps)


def _walk(drafter: Drafter, first: Tensor, prefix: Cache, text: Text, *shape: int) -> tuple[int, ...]:
    newest, found = text.prompt, []
    last = min(text.prompt + text.limit, len(text.ids)) - 1
    while newest < last:
        tree = draft_tree(drafter, first[newest - 1 : newest], prefix, newest, *shape)
        found.append(accepted(tree, text.ids[newest + 1 :]))
        newest += found[-1] + 1
    return tuple(found)
