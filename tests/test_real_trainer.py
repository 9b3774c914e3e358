"""A real trainer's numbers, reproduced: speculators 0.3.0 as it ran (bench/real_trainer.py), and our `Drafter`."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from verified import write_table

from kitlib import lab
from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract, TargetInfo
from kitlib.diagnose import Session
from kitlib.drafter import load_drafter, rms_norm
from kitlib.dumps import files as dumps
from kitlib.features import Text, read_prompts
from kitlib.findings import KitError
from kitlib.trainer_rules import Row, counts, trainer_accuracy

HERE = Path(__file__).parent / "fixtures" / "real-trainer"
REPORT = json.loads((HERE / "report.json").read_text())
JOB = REPORT["job"]
METRICS = ("full_acc", "cond_acc", "loss")


def row_of(tensors: dict, name: str) -> Row:
    *states, last = (tensors[f"{name}.{i}"].float() for i in range(4))
    return Row(tensors[f"{name}.input_ids"], torch.cat(states, -1), last, tensors[f"{name}.loss_mask"])


@pytest.fixture(scope="module")
def tiny():
    """(drafter as loaded from what the trainer saved, its validation batches, the target's final norm)."""
    tensors, info = load_file(HERE / "rows.safetensors"), TargetInfo.of(HERE / "target.json")
    checkpoint = Checkpoint.open(HERE / "checkpoint")
    contract = Contract.of(checkpoint, info)
    embed, head = tensors["target.embed"], tensors["target.head"]
    drafter, result = load_drafter(checkpoint, contract, contract.trained(info), embed, head, device="cpu")
    assert result.complete and result.not_needed == ("t2d",)
    batches = [[row_of(tensors, name) for name in batch] for batch in REPORT["batches"]]
    return drafter, batches, lambda x: rms_norm(x, tensors["target.norm"], info.config["rms_norm_eps"])


def measure(drafter, batches, **changes) -> dict:
    return trainer_accuracy(drafter, batches, **{k: JOB[k] for k in ("width", "steps", "decay")} | changes)


def apart(ours: dict, theirs: dict, metrics=METRICS) -> float:
    """The largest difference over metrics and steps."""
    return max(abs(v - theirs[f"{m}_{k}"]) for m in metrics for k, v in enumerate(ours[m]))


def test_what_it_saved_is_known_for_what_it_is(tiny):
    contract = tiny[0].contract
    assert (contract.dialect.name, contract.trainer_version) == ("speculators", "0.3.0")
    assert contract.norm_before_residual and contract.boundaries is None
    assert contract.sources["boundaries"] == "not stored by speculators 0.3.0"
    assert tiny[0].wiring.boundaries == (2, 4, 5) and tiny[0].wiring.embed_source == "own"


def test_the_trainers_numbers_come_out_again(tiny):
    assert apart(measure(*tiny[:2]), REPORT["saved"]) < 1e-5


def test_each_rule_is_needed(tiny):
    """Any other rule gives other numbers, so the equality above is none by chance."""
    drafter, batches, norm = tiny
    unmasked = [[replace(r, mask=torch.ones_like(r.mask)) for r in batch] for batch in batches]
    others = {
        "teacher normed": measure(drafter, batches, norm=norm),
        "every row alone": measure(drafter, [[row] for batch in batches for row in batch]),
        "not cut to the width": measure(drafter, batches, width=512),
        "no loss mask": measure(drafter, unmasked),
    }
    found = {name: apart(ours, REPORT["saved"], METRICS[:2]) for name, ours in others.items()}
    assert min(found.values()) > 1e-3, found
    assert apart(measure(drafter, batches, decay=1.0), REPORT["saved"]) > 1e-3


def test_the_counts_of_one_batch():
    mask = torch.tensor([1, 1, 1, 0, 1]).bool()
    right = [torch.tensor([1, 0, 1, 1, 1]).bool(), torch.tensor([1, 1, 1, 1]).bool()]
    # Step 0: columns 0, 2 and 4 are right, of four that count. Step 1 judges columns 1 to 4, of which three count, from
    # 0 and 2, the chains so far: 0 is right at 1; 2 falls on 3, which the mask hides, and yet it divides cond_acc.
    assert counts(right, mask) == [(3, 4, 4), (1, 3, 2)]


def test_the_trainers_own_files_are_read(tiny, tmp_path):
    """What the trainer was given, written and read as a dump, is the row that it packed."""
    tensors, name = load_file(HERE / "rows.safetensors"), REPORT["batches"][0][0]
    raw = {key: tensors[f"{name}.{key}"] for key in ("input_ids", "loss_mask")}
    torch.save(raw | {"hidden_states": [tensors[f"{name}.{i}"] for i in range(4)]}, tmp_path / name)
    read, row = Row.of(dumps.read(tmp_path / name)), tiny[1][0][0]
    same = [torch.equal(a, b) for a, b in ((read.ids, row.ids), (read.states, row.states), (read.last, row.last))]
    assert all(same) and torch.equal(read.mask[1:], row.mask[1:].bool())


def test_other_trainers_are_refused(tiny):
    drafter = tiny[0]
    with pytest.raises(KitError, match="no validation rows"):
        measure(drafter, [])
    other = copy(drafter)
    other.contract = replace(drafter.contract, trainer_version="0.5.0")
    with pytest.raises(KitError, match=r"this drafter is of speculators 0\.5\.0"):
        measure(other, tiny[1])


@pytest.mark.verify
def test_the_lab_trained_by_the_real_trainer(tmp_path, lab_target):
    """speculators 0.3.0 trains for minutes on the lab's states: its reports, and ours from what it saved."""
    from bench.real_trainer import lab_run, load_target

    folder = tmp_path / "run"
    report, target = lab_run(folder), load_target(lab_target)
    job, info = report["job"], target.info
    stored = {name: dumps.read(folder / "rows" / name) for batch in report["batches"] for name in batch}
    batches = [[Row.of(stored[name]) for name in batch] for batch in report["batches"]]
    settings = {"width": job["width"], "steps": job["steps"], "decay": job["decay"]}
    weights = {
        "in memory, after the last epoch (float32)": (folder / "exact", report["val"][-1]),
        "as its checkpointer saved them (bfloat16)": (folder / "checkpoints" / str(job["epochs"] - 1), report["saved"]),
    }
    table, gaps = [], {}
    for words, (where, theirs) in weights.items():
        checkpoint = Checkpoint.open(where)
        contract = Contract.of(checkpoint, info)
        assert (contract.dialect.name, contract.trainer_version) == ("speculators", "0.3.0")
        args = (checkpoint, contract, contract.trained(info), target.embedding, target.head)
        drafter, load = load_drafter(*args, device="cpu", dtype="float32")
        assert load.complete
        ours = trainer_accuracy(drafter, batches, **settings)
        for metric, k in ((m, k) for m in METRICS for k in range(job["steps"])):
            told, found = theirs[f"{metric}_{k}"], ours[metric][k]
            table.append([words, f"`{metric}_{k}`", f"{told:.6f}", f"{found:.6f}", f"{found - told:+.1e}"])
        gaps[words] = apart(ours, theirs, METRICS[:2])
    # the drafter as saved, from here on: the same rows with the right teacher, then as an engine serves it
    normed = trainer_accuracy(drafter, batches, norm=target.final_norm, **settings)
    rows = [r for batch in batches for r in batch]
    answered = [r.mask[1:] for r in rows]
    kept = drafter.to_target(torch.arange(drafter.contract.draft_vocab))
    with torch.inference_mode():
        choices = [
            [(x @ target.head[kept].T).argmax(-1) for x in (r.last[1:], target.final_norm(r.last[1:]))] for r in rows
        ]
    agree = sum(int(((a == b) & m).sum()) for (a, b), m in zip(choices, answered, strict=True))
    total = int(sum(m.sum() for m in answered))
    texts = [Text(tuple(r.ids.tolist()), (at := stored_start(r)), len(r.ids) - at) for r in rows]
    own = Session(checkpoint, contract, target, texts, job["steps"]).measure()
    prompts = read_prompts(lab.PROMPTS)
    served = Session.open(
        where, lab_target, prompts, max_new_tokens=64, steps=job["steps"], device="cpu", dtype="float32"
    ).measure()
    lines = [
        ("the trainer's rules", ours["full_acc"]),
        ("the same, the teacher's state normed as the target norms it", normed["full_acc"]),
        ("serving rules, on the text of the same rows", own.by_position),
        (f"serving rules, {len(prompts)} held-out prompts", served.by_position),
    ]
    assert abs(own.accept_length - 1 - sum(own.by_position)) < 1e-9
    heads = [f"step {k}" for k in range(job["steps"])]
    second = [
        "| the checkpoint as saved, judged by | " + " | ".join([*heads, "accept length"]) + " |",
        "|---" * 5 + "|",
    ]
    second += [f"| {w} | " + " | ".join(f"{x:.3f}" for x in [*v, 1 + sum(v)]) + " |" for w, v in lines]
    write_table(
        "real-trainer",
        "A real trainer's numbers",
        "make verify ARGS='-k real_trainer'",
        f"""**The largest difference of an accuracy is {max(gaps.values()):.1e}.** speculators 0.3.0's own `Trainer` ran
for {job["epochs"]} epochs ({len(report["train"])} steps, {report["seconds"]:.0f} s, one thread) on the lab target's
states at boundaries 2, 15, 27 and 30, and validated on {len(rows)} rows ({total} answer tokens), which it packed into
{len(batches)} batches of {job["width"]} columns. `trainer` is what it reported; `ours` is `kitlib.trainer_rules`
with the kit's `Drafter`, loaded from the files it saved. Packages: {", ".join(report["packages"])}.
Not as released: its device is the CPU, `torch.compile` is off, and while gradients are taken attention is dense under
its own mask (PyTorch's flex attention has no backward pass on a CPU). It validates with its own attention.""",
        ["weights", "metric", "trainer", "ours", "difference"],
        table,
        f"""Joint accuracy by draft step; the accept length is 1 + their sum. The trainer's teacher is the target's head
on the last state *without* its final norm: on {agree / total:.1%} of the answer tokens it chooses what the target would
within the draft vocabulary. Serving counts tokens outside that vocabulary as well, and only rounds that start where the
one before ended. A drafter of a few minutes: the equality is what is shown here.

"""
        + "\n".join(second),
    )
    assert max(gaps.values()) < 5e-4, gaps


def stored_start(row: Row) -> int:
    """The first token of the answer."""
    return int(row.mask.nonzero()[0])
