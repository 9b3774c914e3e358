"""A real trainer on the lab: speculators 0.3.0 trains a drafter on the CPU, and what it reports is kept.

    python tests/bench/real_trainer.py [FOLDER]    # a few minutes; default: .cache/real-trainer/run
    python tests/bench/real_trainer.py --fixture   # the same in tiny: tests/fixtures/real-trainer, in seconds

The trainer runs in a subprocess with its own packages (fetched into the cache) in front; it never sees the kit. Its
`Trainer`, `Eagle3DraftModel`, data loader, sampler, vocabulary rule and checkpointer run as released. Three things are
ours: its device is "cpu" where it says 0 (a GPU), `torch.compile` is off, and while gradients are taken attention is
dense under the trainer's own mask, as PyTorch's flex attention has no backward pass on a CPU. Validation uses its own
flex attention. The layer's config and the loaders follow its scripts/train.py, which is not in its wheel.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "real-trainer"
PACKAGES = ("speculators==0.3.0", "transformers==4.57.3", "huggingface-hub==0.36.0")  # the rest is in .venv
LAB = {"draft_vocab": 4096, "width": 1024, "steps": 3, "epochs": 3, "lr": 1e-3, "decay": 1.0}
TINY = {"draft_vocab": 12, "width": 128, "steps": 3, "epochs": 8, "lr": 2e-2, "decay": 0.8}


# --- in the trainer's process -----------------------------------------------------------------------------------------


def train(job: dict) -> dict:
    """Train as scripts/train.py does, in the working directory: rows/, target/ → checkpoints/, exact/, the report."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, attention
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train import checkpointer
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.logger import FormatDictFilter
    from speculators.train.noise_transforms import AddUniformNoise
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, LlamaConfig

    sys.modules.setdefault("datasets", types.SimpleNamespace(Dataset=object))  # for one annotation in the next module
    from speculators.train import vocab_mapping

    def attend(module, query, key, value, attention_mask, scaling=None, **more):
        if not torch.is_grad_enabled():
            return attention.flex_attention_forward(module, query, key, value, attention_mask, scaling, **more)
        rows, columns = (torch.arange(x.shape[-2]) for x in (query, key))
        seen = attention_mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], columns[None])
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2).contiguous(), None

    attention.ALL_ATTENTION_FUNCTIONS.register("simple_flex_attention", attend)
    torch.manual_seed(0)
    files = {part: sorted(map(str, Path("rows").glob(f"{part}-*.pt"))) for part in ("train", "val")}
    data = [torch.load(f, weights_only=True) for f in files["train"]]
    vocab_mapping.save_token_frequency_distribution(data, "token_freq.pt")
    target = AutoConfig.from_pretrained("target")
    d2t, t2d = vocab_mapping.build_vocab_mappings_from_distribution(
        torch.load("token_freq.pt", weights_only=True), job["draft_vocab"], target.vocab_size
    )
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps")
    layer = LlamaConfig(num_hidden_layers=1, **{name: getattr(target, name) for name in same})
    layer._attn_implementation = "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=job["draft_vocab"],
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["steps"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_config(target, name_or_path="target"),
        ),
    )
    model = Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t)
    names, loaders = ("hidden_states", "verifier_last_hidden_states"), {}
    for part in files:
        noise = AddUniformNoise(tensors=names) if part == "train" else None
        rows = Eagle3SampleFileDataset(job["width"], file_list=files[part], transform=noise)
        sampler = MultipackDistributedBatchSamplerV2(job["width"], rows.approx_lengths, 1, 0)
        loaders[part] = DataLoader(rows, batch_sampler=sampler, collate_fn=create_collate_fn(job["width"]))
    call = {"use_off_policy_tokens": False, "ttt_steps": job["steps"], "ttt_step_loss_decay": job["decay"]}
    calls = {"train_call_kwargs": call, "val_call_kwargs": call}
    settings = TrainerConfig(job["lr"], job["epochs"], "checkpoints", local_rank="cpu", **calls)
    trainer = Trainer(model, settings, loaders["train"], loaders["val"])
    logging.basicConfig(filename="trainer.log", level=logging.INFO, format="%(message)s")
    logging.getLogger().handlers[0].addFilter(FormatDictFilter())  # its own spelling of the numbers
    said, log = [], logging.getLogger("speculators.metrics")
    log.addFilter(lambda record: said.append(dict(record.msg)) or True)  # its reports, as it makes them
    started = time.monotonic()
    trainer.run_training()
    seconds, last = time.monotonic() - started, job["epochs"] - 1
    model.save_pretrained("exact")  # float32, before its checkpointer rounds to bfloat16
    saved = checkpointer.load_safetensors_state_dict(trainer.checkpointer.model_path(last), "cpu")
    model.load_state_dict(checkpointer.convert_float_dtype(saved, model.dtype), strict=False)  # as it resumes
    trainer.val_epoch(last)
    batches = [[Path(files["val"][i]).name for i in batch] for batch in loaders["val"].batch_sampler]
    reports = [_plain(report["val"]) for report in said if "val" in report]
    return {
        "packages": [*PACKAGES, f"torch=={torch.__version__}"],
        "job": job,
        "seconds": round(seconds, 1),
        "train": [_plain(report["train"]) for report in said if "train" in report],
        "val": reports[:-1],  # after each epoch, with the weights in memory
        "saved": reports[-1],  # the same rows with the checkpoint it wrote
        "batches": batches,
    }


def _plain(metrics: dict) -> dict[str, float]:
    return {name.removesuffix("_epoch"): value for name, value in metrics.items()}


# --- in the kit's process ---------------------------------------------------------------------------------------------


def packages() -> Path:
    """The trainer's packages in a folder of their own, fetched once."""
    from kitlib.paths import cache

    folder = cache() / "real-trainer" / "site"
    if not (folder / "complete").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            subprocess.run([*pip, "--target", f"{work}/site", *PACKAGES], check=True)
            Path(work, "site", "complete").touch()
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(f"{work}/site", folder)
    return folder


def run(folder: Path, job: dict, target_path: Path, rows: dict[str, list[dict]]) -> dict:
    """Write the rows' states into a fresh `folder`, let the trainer work there, return (and keep) its report."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rows").mkdir(parents=True)
    (folder / "target").symlink_to(target_path.resolve())  # the trainer is named no path of this machine
    write_states(folder / "rows", load_target(target_path), rows)
    path = os.pathsep.join([str(packages()), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", json.dumps(job)]
    subprocess.run(command, cwd=folder, env={**os.environ, **threads}, check=True)
    return json.loads((folder / "report.json").read_text())


def load_target(path: Path):
    """The kit's `Target`, in float32; no tokenizer is needed."""
    from transformers import AutoModelForCausalLM

    from kitlib.contract import TargetInfo
    from kitlib.features import Target

    return Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), None, TargetInfo.of(path))


def write_states(folder: Path, target, rows: dict[str, list[dict]]) -> None:
    """One `.pt` a row in speculators' v1 format: three boundaries, then the last state before the final norm."""
    from kitlib.contract import default_boundaries
    from kitlib.features import Text

    ids = (*default_boundaries(target.info.layers), target.info.layers)
    for part, some in rows.items():
        for number, row in enumerate(some):
            length, prompt = len(row["ids"]), row["prompt_tokens"]
            states = target.states(Text(tuple(row["ids"]), prompt, length - prompt), ids).boundaries
            sample = {
                "input_ids": torch.tensor(row["ids"]),
                "loss_mask": (torch.arange(length) >= prompt).long(),
                "hidden_states": [states[b].bfloat16() for b in ids],
            }
            torch.save(sample, folder / f"{part}-{number:03}.pt")


def lab_run(folder: Path) -> dict:
    """96 greedy rows of the lab to train on, 24 others to validate on."""
    from kitlib import lab
    from kitlib.lab.rows import read_rows
    from kitlib.paths import DATA

    greedy = [row for row in read_rows(DATA / "lab-train.jsonl.gz") if row["temp"] == 0][::25]
    return run(folder, LAB, lab.target_path(), {"val": greedy[:24], "train": greedy[24:120]})


def tiny_run(folder: Path) -> dict:
    """Random rows for a random target: short prompts, so that packed rows are judged across their borders."""
    from safetensors.torch import load_file, save_file
    from tiny import VOCAB, write_target

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = write_target(folder.with_name("tiny-target"), **sizes)
    generator, rows = torch.Generator().manual_seed(5), {"train": [], "val": []}
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = 0.5 + torch.rand(16, generator=generator)  # trained norms are not all ones
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for part, lengths in (("train", [*range(20, 60)] * 3), ("val", (140, 50, 37, 61, 44, 23, 70, 31))):
        for n, length in enumerate(lengths):
            ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            rows[part].append({"ids": ids, "prompt_tokens": n % 4 if part == "val" else 3})
    return run(folder, TINY, path, rows)


def write_fixture() -> None:
    """What `kitlib.trainer_rules` needs to reproduce the tiny run, and its report."""
    from safetensors.torch import save_file

    from kitlib.findings import write_atomic

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        report = tiny_run(folder)
        target = load_target(folder / "target")
        tensors = {"target.embed": target.embedding, "target.head": target.head}
        tensors["target.norm"] = target.final_norm.weight.detach()
        for file in sorted(folder.glob("rows/val-*.pt")):
            raw = torch.load(file, weights_only=True)
            tensors |= {f"{file.name}.{i}": s for i, s in enumerate(raw.pop("hidden_states"))}
            tensors |= {f"{file.name}.{name}": t for name, t in raw.items()}
        (FIXTURE / "checkpoint").mkdir(parents=True, exist_ok=True)
        save_file(tensors, FIXTURE / "rows.safetensors")
        for name in ("config.json", "model.safetensors"):
            shutil.copy(folder / "checkpoints" / str(TINY["epochs"] - 1) / name, FIXTURE / "checkpoint" / name)
        shutil.copy(folder / "target" / "config.json", FIXTURE / "target.json")
        report["train"] = report["train"][-1:]
        write_atomic(FIXTURE / "report.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        Path("report.json").write_text(json.dumps(train(json.loads(sys.argv[2]))))
    else:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        from kitlib.paths import cache

        if sys.argv[1:2] == ["--fixture"]:
            write_fixture()
        else:
            result = lab_run(Path(sys.argv[1]) if sys.argv[1:] else cache() / "real-trainer" / "run")
            print(json.dumps({"val": result["val"], "saved": result["saved"], "seconds": result["seconds"]}, indent=1))
