"""Plantable faults: each a checkpoint, a wiring or a launch flag that makes the lab's healthy drafter sick."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoint import Checkpoint
from ..contract import Contract, Wiring
from ..drafter import fill_value
from ..findings import KitError, write_atomic
from ..switches import MATRICES, NORMS, SWITCHES
from . import drafter_path

Tensors = dict[str, Tensor]
Config = dict[str, Any]
LAYER = "midlayer."


@dataclass(frozen=True)
class Fault:
    """One fault: its row in `faults.toml`, the wiring that has the same effect, and the change to the files."""

    name: str
    plants: str
    effect: str
    found_by: str
    wiring: Callable[[Wiring], Wiring]
    change: Callable[[Tensors, Config], None] | None = None
    ceiling: float | None = None
    launch: str = ""


def _prefix(tensors: Tensors, _config: Config) -> None:
    for name in [n for n in tensors if n.startswith(LAYER)]:
        tensors[f"draft_model.{name}"] = tensors.pop(name)


def _flat(tensors: Tensors, _config: Config) -> None:
    for name in [n for n in tensors if n.startswith(LAYER)]:
        tensors[name.replace(LAYER, "layers.0.")] = tensors.pop(name)


def _drop_layer(tensors: Tensors, _config: Config) -> None:
    for name in MATRICES + NORMS:
        key = name.replace("layers.0.", LAYER)
        tensors[key] = fill_value(name, tuple(tensors[key].shape))


def _reverse(tensors: Tensors, _config: Config) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, 1)[::-1], 1).contiguous()


def _absolute(tensors: Tensors, _config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _without(*names: str) -> Callable[[Tensors, Config], None]:
    return lambda tensors, _config: [tensors.pop(n) for n in names] and None


def _config(**values: Any) -> Callable[[Tensors, Config], None]:
    return lambda _tensors, config: config.update(values)


def _ids(shift: int) -> Callable[[Tensors, Config], None]:
    def change(_tensors: Tensors, config: Config) -> None:
        key = "eagle_aux_hidden_state_layer_ids"
        config["eagle_config"][key] = [i + shift for i in config["eagle_config"][key]]

    return change


def _no_capture(_tensors: Tensors, config: Config) -> None:
    config["eagle_config"]["use_aux_hidden_state"] = False


WIRINGS: dict[str, Callable[[Wiring], Wiring]] = {
    **SWITCHES,
    "healthy": lambda w: w,
    "layers0-flat": SWITCHES["layer-dropped"],
    "wrong-prefix": SWITCHES["layer-dropped"],
    "residual-normed": SWITCHES["residual-other"],
    "feedback-post-norm": SWITCHES["feedback-other"],
}
CHANGES: dict[str, Callable[[Tensors, Config], None]] = {
    "layers0-flat": _flat,
    "wrong-prefix": _prefix,
    "layer-dropped": _drop_layer,
    "fc-dropped": _without("fc.weight"),
    "head-dropped": _without("lm_head.weight"),
    "fc-bypass-config": _no_capture,
    "block-order": _reverse,
    "ids-minus-one": _ids(-1),
    "ids-plus-one": _ids(1),
    "d2t-absolute": _absolute,
    "d2t-absent": _without("d2t", "t2d"),
    "tied-head": _config(tie_word_embeddings=True),
    "rope-theta": _config(rope_theta=10_000.0),
}


def _faults() -> dict[str, Fault]:
    rows = tomllib.loads((Path(__file__).parent / "faults.toml").read_text(encoding="utf-8"))
    return {n: Fault(name=n, wiring=WIRINGS[n], change=CHANGES.get(n), **row) for n, row in rows.items()}


FAULTS = _faults()


def sglang_config(contract: Contract) -> Config:
    """The flat config that SGLang's drafter class reads, for the lab's drafter."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": contract.hidden,
        "intermediate_size": contract.intermediate,
        "num_attention_heads": contract.heads,
        "num_key_value_heads": contract.kv_heads,
        "head_dim": contract.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": contract.vocab,
        "draft_vocab_size": contract.draft_vocab,
        "max_position_embeddings": contract.max_positions,
        "rms_norm_eps": contract.eps,
        "rope_theta": contract.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in contract.boundaries or ()],
            "use_aux_hidden_state": True,
        },
    }


def plant(name: str, out: str | Path, drafter: str | Path | None = None) -> Path:
    """Write a folder that has the fault: a checkpoint, with `wiring.json` or `launch.txt` where that is the fault.

    Refuses a folder that is not empty. The source is never touched.
    """
    fault = get(name)
    checkpoint = Checkpoint.open(drafter or drafter_path())
    contract = Contract.of(checkpoint)
    names = {n: (checkpoint.canonical(n) or n).replace("layers.0.", LAYER) for n in checkpoint.tensors}
    tensors = {names[n]: t for f in checkpoint.files for n, t in load_file(f).items()}
    config = sglang_config(contract)
    if fault.change:
        fault.change(tensors, config)
    out = Path(out)
    if os.path.lexists(out) and (not os.path.isdir(out) or any(out.iterdir())):
        raise KitError(f"{out} exists and is not empty; name a new folder for the planted fault.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise KitError(f"Cannot write to {out.parent}: {error.strerror}; choose another folder.") from None
    try:
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        write_atomic(work / "config.json", json.dumps(config, indent=1) + "\n")
        if fault.plants == "wiring":
            wiring = fault.wiring(contract.trained()).to_dict()
            write_atomic(work / "wiring.json", json.dumps(wiring, indent=1) + "\n")
        if fault.launch:
            command = f"python -m sglang.launch_server --model-path TARGET {fault.launch}"
            command += f" --speculative-draft-model-path {out}"
            write_atomic(work / "launch.txt", command + "\n")
        work.chmod(0o755)
        out.exists() and out.rmdir()
        os.replace(work, out)
    except (OSError, SafetensorError) as error:
        raise KitError(f"Cannot write {out} ({error}); choose another folder.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def get(name: str) -> Fault:
    """A fault by name."""
    if name not in FAULTS:
        raise KitError(f"There is no fault {name!r}; `python -m kitlib lab faults` lists {', '.join(FAULTS)}.")
    return FAULTS[name]
