"""The checks that need a GPU, as one script of a few minutes: python tests/gpu/check.py [--device cuda] [--out FILE].

On the lab: the drafter loads completely on the device; captured states and the replay's rounds in float32 are the
CPU's; bfloat16 stays within the prompts' interval; the loop itself writes transformers' greedy text. Prints one JSON
object. Exit code 0: all hold, 1: one does not, 2: there is no such device. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from kitlib import lab
from kitlib.acceptance import speculate
from kitlib.diagnose import Session
from kitlib.drafter import choose_device
from kitlib.features import read_prompts
from kitlib.findings import KitError, write_atomic


def session(device: str, dtype: str, count: int, tokens: int) -> Session:
    prompts = read_prompts(lab.PROMPTS, count)
    target, drafter = lab.target_path(), lab.drafter_path()
    return Session.open(drafter, target, prompts, max_new_tokens=tokens, steps=4, device=device, dtype=dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    try:
        device, why = choose_device(args.device)
    except KitError as error:
        print(error, file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    began, size = time.monotonic(), (args.prompts, args.tokens)
    cpu, here = session("cpu", "float32", *size), session(args.device, "float32", *size)
    drafter, load = here.load()
    states, other = cpu.states(), here.states()
    worst = max(
        float((a.boundaries[b] - c.boundaries[b].cpu()).norm() / a.boundaries[b].norm())
        for a, c in zip(states, other, strict=True) for b in a.boundaries
    )  # fmt: skip
    one, two, low = cpu.measure(), here.measure(), session(args.device, "bfloat16", *size)
    half = low.measure()
    begin, end = one.interval()
    loop = [speculate(here.target, drafter, t.ids[: t.prompt], args.tokens, 4) for t in here.texts[:4]]
    checks = {
        "drafter loads completely on the device": load.complete and load.device.startswith(device.type),
        "texts equal to the CPU's": [t.answer for t in cpu.texts] == [t.answer for t in here.texts],
        "states within 1e-4 of the CPU's": worst < 1e-4,
        "rounds equal to the CPU's, float32": one.rounds == two.rounds,
        "bfloat16 within the interval": begin <= half.accept_length <= end,
        "the loop writes the greedy text": [text for text, _ in loop] == [t.answer for t in here.texts[:4]],
    }
    told = {
        "device": why if args.device == "auto" else str(device),
        "name": torch.cuda.get_device_name(0) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "accept_length": {
            "cpu float32": one.accept_length,
            "float32": two.accept_length,
            "bfloat16": half.accept_length,
        },
        "interval": [begin, end],
        "worst relative difference of a state": worst,
        "seconds": round(time.monotonic() - began, 1),
        "checks": checks,
    }
    text = json.dumps(told, indent=1)
    print(text)
    if args.out:
        write_atomic(Path(args.out), text + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
