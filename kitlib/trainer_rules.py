"""A drafter re-measured under its trainer's own rules: what its log calls full_acc_k, cond_acc_k and loss_k.

Rules of speculators 0.3.0 (train/data.py, train/trainer.py, models/eagle3/core.py), its oddities kept:

- state t is paired with token t + 1; step k is fed the drafter's own tokens and is judged k rows further on;
- the teacher is the target's head, cut to the draft vocabulary, on the last state as it is stored: *un-normed*;
- rows are packed into `width` columns and judged across their borders, where the loss mask lets them;
- cond_acc_k divides by the chains that were right so far, whether or not the mask lets step k count;
- an epoch's number is the mean over batches, each of them already a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .acceptance import Chains
from .drafter import Drafter
from .dumps.files import Sample
from .findings import KitError

READ = "0.3.0"  # the only release whose rules are here


@dataclass(frozen=True)
class Row:
    """One sequence as the trainer stored it."""

    ids: Tensor  # [L]
    states: Tensor  # [L, K*Ht]
    last: Tensor  # [L, Ht] the state behind the target's last layer, before its final norm
    mask: Tensor  # [L] nonzero: a token of the answer

    @classmethod
    def of(cls, sample: Sample) -> Row:
        """From a stored sample (`kitlib.dumps`), in float32, as the trainer reads it."""
        mask = torch.zeros(len(sample.ids), dtype=torch.bool)
        for start, end in sample.answers:
            mask[start:end] = True
        return cls(sample.ids.long(), torch.cat(sample.aux, -1).float(), sample.last.float(), mask)


@torch.inference_mode()
def trainer_accuracy(
    drafter: Drafter,
    batches: Sequence[Sequence[Row]],  # as the trainer packed them: its ratios are taken batch by batch
    width: int,  # the trainer's total_seq_len
    steps: int = 3,  # training-time-test steps
    decay: float = 1.0,  # the loss of step k is multiplied by decay**k
    norm: Callable[[Tensor], Tensor] | None = None,  # on the last state; None: un-normed, as 0.3.0 takes it
) -> dict[str, list[float]]:
    """{"loss", "full_acc", "cond_acc"}, one number a step; KitError for a drafter of another trainer."""
    contract = drafter.contract
    if (contract.dialect.name, contract.trainer_version) != ("speculators", READ):
        said = f"{contract.dialect.name} {contract.trainer_version}".strip()
        raise KitError(f"The rules of speculators {READ} were read, this drafter is of {said}; measure it by replay.")
    if not batches:
        raise KitError("There are no validation rows; name at least one batch.")
    head = drafter.target_head[drafter.to_target(torch.arange(contract.draft_vocab, device=drafter.d2t.device))]
    found = [_batch(drafter, [r for r in rows if len(r.ids) > 1], head, width, steps, decay, norm) for rows in batches]
    mean = torch.stack(found).mean(0)  # [3, steps]
    return dict(zip(("loss", "full_acc", "cond_acc"), mean.tolist(), strict=True))


def _batch(drafter, rows: Sequence[Row], head: Tensor, width: int, steps: int, decay: float, norm) -> Tensor:
    """[3, steps] of one packed batch."""
    last = torch.cat([r.last[1:] for r in rows])[:width]
    teacher = _pad(F.linear((norm(last) if norm else last).to(head), head), width)  # [width, Vd]
    mask = _pad(torch.cat([r.mask[1:] for r in rows])[:width].to(head.device), width).bool()
    drafted = [draft_logits(drafter, r, steps) for r in rows]
    logits = [_pad(torch.cat(k)[:width], width) for k in zip(*drafted, strict=True)]  # steps × [width, Vd]
    wanted, out = teacher.argmax(-1), []
    right = [logits[k][: width - k].argmax(-1) == wanted[k:] for k in range(steps)]
    for k, (hits, counted, reached) in enumerate(counts(right, mask)):
        apart = F.kl_div(logits[k][: width - k].log_softmax(-1), teacher[k:].softmax(-1), reduction="none").sum(-1)
        loss = decay**k * float((apart * mask[k:]).sum())
        out.append([loss / (counted + 1e-5), hits / (counted + 1e-5), hits / (reached + 1e-5)])
    return torch.tensor(out).T


def counts(right: Sequence[Tensor], mask: Tensor) -> list[tuple[int, int, int]]:
    """(right, columns that count, chains that were right so far) of each step of one batch.

    `right[k]` [width-k]: the draft of step k from column t is the teacher's choice at column t + k; `mask` [width].
    """
    chain, out = mask, []
    for k, hit in enumerate(right):
        reached = chain[: len(hit)]
        chain = reached & hit
        out.append((int((chain & mask[k:]).sum()), int(mask[k:].sum()), int(reached.sum())))
    return out


def draft_logits(drafter: Drafter, row: Row, steps: int) -> list[Tensor]:  # steps × [L-1, Vd]
    """Training-time test on the drafter's own tokens; positions are those of the embedded tokens."""
    device, rows, attend, out = drafter.d2t.device, len(row.ids) - 1, Chains(), []
    tokens, positions = row.ids[1:].to(device), torch.arange(1, rows + 1, device=device)
    hidden = drafter.fuse(row.states[:-1].to(drafter.target_embed))
    for k in range(steps):
        hidden = drafter.step(tokens, hidden, positions + k, attend)
        out.append(drafter.logits(hidden))
        tokens, hidden = drafter.to_target(out[-1].argmax(-1)), drafter.feedback(hidden)
    return out


def _pad(x: Tensor, width: int) -> Tensor:  # [n, ...] -> [width, ...]
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, width - len(x)])
