"""What every test shares: the thread settings, made before anything imports torch, and the fixtures."""

from __future__ import annotations

import os

# `make` exports these already; the same defaults hold for a bare `pytest`. Two OpenMP teams that wait busily
# on the same cores slow a server down twenty times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """A random 8-layer Llama on disk; see `tiny.py`."""
    from tiny import write_target

    return write_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_session(tiny_target, tmp_path_factory):
    """A random pair whose small vocabulary lets drafts be accepted now and then: 8 prompts × 40 tokens."""
    import torch
    from tiny import VOCAB, contract_of, write_drafter
    from transformers import AutoModelForCausalLM

    from kitlib.contract import TargetInfo
    from kitlib.diagnose import Session
    from kitlib.features import Target

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target = Target(model, None, TargetInfo.of(tiny_target))
    folder = write_drafter(tmp_path_factory.mktemp("pair") / "d", rope_theta=5e5)
    checkpoint, contract, _ = contract_of(folder, tiny_target)
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, VOCAB, (6,), generator=generator).tolist()) for _ in range(8)]
    return Session(checkpoint, contract, target, target.record(prompts, 40, 5), 4)


@pytest.fixture(scope="session")
def lab_target() -> Path:
    """The lab's target, fetched and converted on first use (a network is needed once)."""
    from kitlib import lab

    return lab.target_path()


@pytest.fixture(scope="session")
def lab_session(lab_target):
    """The lab in float32 on the CPU, 32 held-out prompts × 64 tokens, 4 draft steps; nothing may change it."""
    from kitlib import lab
    from kitlib.diagnose import Session
    from kitlib.features import read_prompts
    from kitlib.paths import cache

    return Session.open(
        lab.drafter_path(), lab_target, read_prompts(lab.PROMPTS), max_new_tokens=64, steps=4,
        device="cpu", dtype="float32", cache=cache() / "greedy",
    )  # fmt: skip
