"""Training-time test: several draft steps from every position of an answer at once, with gradients.

Pass k reads the tokens of the text and the state that pass k - 1 fed back, and learns the target's distribution over
the draft vocabulary. The forward is `kitlib.drafter.Drafter`; here are its attention, the loss and the accuracies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafter import Drafter, rms_norm
from .rows import Batch

ROWS = 256  # loss rows whose logits exist at the same time
DECAY = 0.8  # the loss of step k weighs DECAY**k


class Passes:
    """Attention of training-time test, with gradients: `acceptance.Chains` for a batch, over the last rows only.

    The first pass is causal. In later passes row t sees the first pass up to t, and its own chain.
    """

    def __init__(self, start: Tensor, width: int):  # start [B]: first column that is no padding
        column = torch.arange(width)
        real = (column >= start[:, None])[:, None] & torch.ones(width, width, dtype=torch.bool).tril()
        self.hidden = ~(real | torch.eye(width, dtype=torch.bool))[:, None, None]  # [B, 1, 1, width, width]
        self.kv: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        passes = self.kv.setdefault(layer, [])
        passes.append((k, v))
        (first_k, first_v), own = passes[0], passes[1:]  # [B, kv, L, D], and [B, kv, rows, D] each
        rows, length = q.shape[-2], first_k.shape[-2]
        q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv, group, rows, D]
        scores = (q.flatten(2, 3) @ first_k.mT).unflatten(2, q.shape[2:4])
        scores = scores.masked_fill(self.hidden[..., length - rows :, :], float("-inf"))
        chain = [(q * kk[:, :, None]).sum(-1, keepdim=True) for kk, _ in own]
        weights = torch.cat([scores, *chain], -1).float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ first_v).unflatten(2, q.shape[2:4])
        for i, (_, vv) in enumerate(own):
            mixed = mixed + weights[..., length + i, None] * vv[:, :, None]
        return mixed.flatten(1, 2)


class Distill(torch.autograd.Function):
    """Weighted cross-entropy against the target's distribution; gradients are made with the logits, block by block."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, teacher: Tensor, index: Tensor, weight: Tensor):
        """hidden [N, H], head [Vd, H], teacher [M, Vd], index [N] into it, weight [N] -> sum, and loss a row [N]."""
        losses, errors = torch.empty(len(hidden)), hidden.new_empty(len(hidden), len(head))
        for at in range(0, len(hidden), ROWS):
            part = slice(at, at + ROWS)
            wanted, log = teacher[index[part]].float(), (hidden[part] @ head.T).float().log_softmax(-1)
            losses[part] = -(wanted * log).sum(-1)
            errors[part] = log.exp_().sub_(wanted).mul_(weight[part, None])
        ctx.save_for_backward(errors @ head, errors.T @ hidden)
        ctx.mark_non_differentiable(losses)
        return (losses * weight).sum(), losses

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        to_hidden, to_head = ctx.saved_tensors
        return to_hidden * grad, to_head * grad, None, None, None


def draft_passes(drafter: Drafter, batch: Batch, steps: int) -> list[Tensor]:
    """Hidden states of every pass, [B, R - k, H] for pass k: its row j predicts what follows response token j + k."""
    base, count, out = batch.base, batch.answers.shape[1], []
    attend, positions = Passes(batch.start, base + count), torch.arange(base + count)
    hidden = drafter.step(batch.ids[:, 1:], drafter.fuse(batch.states[:, :-1]), positions, attend)[:, base:]
    for k in range(steps):
        if k:
            ids = F.pad(batch.ids[:, base + 1 + k :], (0, k))
            hidden = drafter.step(ids, drafter.feedback(hidden), positions[base:] + k, attend)
        out.append(hidden[:, : count - k])
    return out


def batch_loss(
    drafter: Drafter, batch: Batch, head: Tensor, to_draft: Tensor, steps: int
) -> tuple[Tensor, list[float]]:
    """Loss of one batch, and the mean of each step. head [Vd, Ht]: the target's; to_draft [V]: draft id, or -1.

    Only response tokens count, and of them those whose next token the drafter can write.
    """
    following = F.pad(batch.ids[:, batch.base + 2 :], (0, 1))
    following = torch.where(F.pad(batch.answers[:, 1:], (0, 1)), following, -1)
    learn = batch.answers & ((to_draft[following] >= 0) | (following < 0))
    with torch.no_grad():
        teacher = (batch.final[learn] @ head.T).float().softmax(-1).to(head.dtype)
    number = (learn.flatten().cumsum(0) - 1).view_as(learn)
    hidden, index, weight = [], [], []
    for k, state in enumerate(draft_passes(drafter, batch, steps)):
        mask = learn[:, k:]
        hidden.append(state[mask])
        index.append(number[:, k:][mask])
        weight.append(torch.full((len(index[-1]),), DECAY**k / max(1, len(index[-1]))))
    normed = rms_norm(torch.cat(hidden), drafter["norm.weight"], drafter.contract.eps)
    loss, rows = Distill.apply(normed, drafter["lm_head.weight"], teacher, torch.cat(index), torch.cat(weight))
    return loss, [float(part.mean()) if len(part) else 0.0 for part in rows.split([len(i) for i in index])]


@torch.inference_mode()
def accuracy(drafter: Drafter, batches: Sequence[Batch], head: Tensor, steps: int) -> dict[str, list[float]]:
    """Joint and conditional accuracy of each step (speculators' full_acc and cond_acc) over all response tokens.

    `served` counts as engines do: a target token outside the draft vocabulary can only be missed. `restricted` asks
    for the best of the draft vocabulary instead. 1 + the sum of the joint accuracies estimates the accept length.
    """
    ids, counts = drafter.to_target(torch.arange(drafter.contract.draft_vocab)), torch.zeros(2, 3, steps)
    for batch in batches:
        scores, wanted = batch.final[batch.answers] @ head.T, torch.full((2, *batch.answers.shape), -1)
        wanted[0, batch.answers], wanted[1, batch.answers] = scores.argmax(-1), ids[scores[:, ids].argmax(-1)]
        chain = torch.ones(2, *batch.answers.shape, dtype=torch.bool)  # every draft so far was right
        for k, state in enumerate(draft_passes(drafter, batch, steps)):
            exists = batch.answers[:, k:]
            reached = chain[..., : exists.shape[1]] & exists
            chain = reached & (drafter.draft(state) == wanted[..., k:])
            counts[:, 0, k] += exists.sum()
            counts[:, 1, k] += reached.sum((1, 2))
            counts[:, 2, k] += chain.sum((1, 2))
    named = {}
    for name, (exists, reached, right) in zip(("served", "restricted"), counts, strict=True):
        named[f"{name}_joint"] = [round(float(x), 4) for x in right / exists.clamp_min(1)]
        named[f"{name}_conditional"] = [round(float(x), 4) for x in right / reached.clamp_min(1)]
    return named
