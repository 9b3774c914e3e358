"""Training of the lab's drafter: EAGLE-3 with training-time test, from the target's own answers.

The schedule counts response tokens, never time; seeds are fixed; the forward is `kitlib.drafter.Drafter`.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save

from .. import __version__
from ..checkpoint import Checkpoint
from ..contract import Contract, default_boundaries
from ..drafter import load_drafter
from ..features import Target
from ..findings import KitError, write_atomic
from ..paths import cache as cache_folder
from .passes import accuracy, batch_loss
from .rows import Batch, collate, extract, read_rows
from .start import at_scale, draft_vocabulary, new_drafter

WARMUP, CLIP, DECAY = 0.02, 1.0, 0.01  # share of the tokens until the highest rate; longest gradient; weight decay
SHORTEST, CHECKS, SCALE = 4, 10, 200  # tokens of the shortest answer in use; points of the curve; rows for the scale


def batches_of(rows: Sequence[dict], chosen: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """One epoch of batches: shuffled, then alike in length within eight batches, then shuffled again."""
    order = [chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist()]
    batches = []
    for at in range(0, len(order), 8 * size):
        some = sorted(order[at : at + 8 * size], key=lambda i: len(rows[i]["ids"]) - rows[i]["prompt_tokens"])
        batches += [some[j : j + size] for j in range(0, len(some), size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def learning_rate(share: float, top: float) -> float:
    """Rate after this share of the tokens: a short ascent, then a cosine down to two hundredths of the top."""
    return top * min(1.0, (share + 1e-3) / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)


def held_out(rows: Sequence[dict], count: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Numbers of the rows for validation (greedy, drawn first from the seed's generator) and of those to train on."""
    usable = [i for i, row in enumerate(rows) if len(row["ids"]) - row["prompt_tokens"] >= SHORTEST]
    greedy = [i for i in usable if rows[i]["temp"] == 0]
    held = [greedy[i] for i in torch.randperm(len(greedy), generator=generator)[:count].tolist()]
    return held, sorted(set(usable) - set(held))


def validation_rows(drafter: Path, data: Path) -> list[dict]:
    """The rows that a drafter's training held out, told again from the seed in its metrics.json."""
    told, rows = json.loads((drafter / "metrics.json").read_text()), read_rows(data)
    generator = torch.Generator().manual_seed(told["settings"]["seed"])
    return [rows[i] for i in held_out(rows, told["rows"]["validation"], generator)[0]]


def train(
    target_dir: str | Path,
    data: Path,  # rows that `generate` made
    out: Path,  # a folder; receives model.safetensors, config.json and metrics.json
    *,
    tokens: int = 2_000_000,  # response tokens to train on, repetitions included
    cache: Path | None = None,  # a folder for the target's states (4.6 kB a token); None: in the kit's cache
    steps: int = 4,
    batch: int = 4,  # rows; small batches win while the budget is tokens: four times the steps of 16
    rate: float = 1e-3,  # of AdamW
    draft_vocab: int = 8192,
    validation: int = 64,
    seed: int = 0,
    name: str = "",  # of the target, for the config; "": its folder's
    say: Callable[[str], None] = print,
) -> dict:
    """Train a drafter and return its metrics, which also lie beside it; everything is written atomically."""
    begun, generator = time.monotonic(), torch.Generator().manual_seed(seed)
    target = Target.load(target_dir, device="cpu", dtype="bfloat16")
    boundaries = default_boundaries(target.info.layers)
    rows = read_rows(data)
    held, chosen = held_out(rows, validation, generator)
    if tokens < 1 or not held or not chosen:
        raise KitError(f"{data} holds {len(rows)} rows for {validation} of validation and {tokens} tokens; give more.")
    states = extract(target, rows, boundaries, cache or cache_folder() / "lab" / "states", say)
    kept = draft_vocabulary([rows[i] for i in chosen], target.info.vocab, draft_vocab)
    features = torch.cat([states[i] for i in chosen[:SCALE]])[:, : -target.info.hidden]
    rms = features.float().pow(2).mean(0).sqrt().clamp_min(1e-3)  # [K*Ht]
    config, weights = new_drafter(target, kept, boundaries, rms, generator, name)

    def level() -> float:
        """The power of two that brings the fused states to the size of the target's own."""
        fused = features[:4096].float() @ weights["fc.weight"].float().T
        return 2.0 ** round(math.log2(float(rms.pow(2).mean().sqrt() / fused.pow(2).mean().sqrt())))

    def save_all(metrics: dict, factor: float) -> None:
        write_atomic(out / "config.json", json.dumps(config, indent=1) + "\n")
        write_atomic(out / "model.safetensors", save(at_scale(weights, factor)))
        write_atomic(out / "metrics.json", json.dumps(metrics, indent=1) + "\n")

    save_all({"complete": False}, 1.0)  # read back at once: training runs at its own scale, not at that of the file
    checkpoint = Checkpoint.open(out)
    contract = Contract.of(checkpoint, target.info)
    wiring = contract.trained(target.info)
    drafter, _ = load_drafter(checkpoint, contract, wiring, target.embedding, device="cpu", dtype="bfloat16")
    names = list(drafter.shapes)
    parameters = [drafter[name].requires_grad_() for name in names]
    # fp32 masters; that of fc is scaled as if every feature had RMS 1, as the states' scales differ tenfold
    scales = [rms if name == "fc.weight" else torch.ones(()) for name in names]
    masters = [p.detach().float() * scale for p, scale in zip(parameters, scales, strict=True)]
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=DECAY)
    head, to_draft = target.head[kept], torch.full((target.info.vocab,), -1)
    to_draft[kept] = torch.arange(len(kept))
    hidden, stops = target.info.hidden, target.stop_ids

    def gather(some: Sequence[int]) -> Batch:
        return collate([rows[i] for i in some], [states[i] for i in some], hidden, stops)

    checks = [gather(held[at : at + batch]) for at in range(0, len(held), batch)]
    seen, since, recent, curve, queue, turn = 0, 0, [], [], [], 0
    started, used = time.monotonic(), time.process_time()
    while seen < tokens:
        queue = queue or batches_of(rows, chosen, batch, generator)
        one, share, turn = gather(queue.pop()), seen / tokens, turn + 1
        loss, parts = batch_loss(drafter, one, head, to_draft, steps)
        loss.backward()
        for master, parameter, scale in zip(masters, parameters, scales, strict=True):
            master.grad, parameter.grad = parameter.grad.float() / scale, None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.param_groups[0]["lr"] = learning_rate(share, rate)
        optimizer.step()
        with torch.no_grad():
            for master, parameter, scale in zip(masters, parameters, scales, strict=True):
                parameter.copy_(master / scale)
        seen += int(one.answers.sum())
        recent.append(parts)
        if turn % 100 == 1 or seen >= tokens:
            speed = seen / (time.monotonic() - started)
            say(f"{seen}/{tokens} tokens, {speed:.0f} a second, loss {[round(x, 3) for x in parts]}")
        if seen - since >= tokens / CHECKS or seen >= tokens:
            means = [round(sum(x) / len(recent), 4) for x in zip(*recent, strict=True)]
            curve.append({"tokens": seen, "loss": means} | accuracy(drafter, checks, target.head, steps))
            since, recent = seen, []
            weights |= {name: p.detach() for name, p in zip(names, parameters, strict=True)}
            metrics = {
                "complete": seen >= tokens,
                **curve[-1],
                "expected_accept_length": round(1 + sum(curve[-1]["served_joint"]), 4),
                "definition": "joint = speculators' full_acc, conditional = cond_acc; validation rows are greedy",
                "rows": {"train": len(chosen), "validation": len(held)},
                "distinct_tokens": sum(int(len(rows[i]["ids"]) - rows[i]["prompt_tokens"]) for i in chosen),
                "settings": {"tokens": tokens, "steps": steps, "batch": batch, "rate": rate}
                | {"draft_vocab": len(kept), "seed": seed, "threads": torch.get_num_threads()},
                "seconds": {
                    "wall": round(time.monotonic() - begun),
                    "training": round(time.monotonic() - started),
                    "training_cpu": round(time.process_time() - used),
                },
                "versions": {"kitlib": __version__, "python": platform.python_version(), "torch": torch.__version__}
                | {"transformers": transformers.__version__},
                "curve": curve,
            }
            save_all(metrics, level())
            say(f"validation at {seen} tokens: served {curve[-1]['served_joint']}, {metrics['expected_accept_length']}")
    return metrics
