"""Plantable faults: each a checkpoint, a wiring or a launch flag that makes the lab's healthy drafter sick."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, Wiring
from ..drafter import fill_value
from ..findings import KitError, write_atomic
from . import drafter_path, target_path

Tensors = dict[str, Tensor]
Config = dict[str, Any]
LAYER = "midlayer."
MATRICES = tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo") + tuple(
    f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
)
NORMS = tuple(f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))


@dataclass(frozen=True)
class Fault:
    """One fault: what is planted, the wiring that has the same effect, and what should be seen."""

    name: str
    plants: str  # checkpoint | wiring | launch
    effect: str  # what it should do, in words
    found_by: str  # the slug of the finding that names it from files or flags; "" where only a measurement can
    ceiling: float | None  # accept length on the lab stays below (None: no cliff)
    wiring: Callable[[Wiring], Wiring]
    change: Callable[[Tensors, Config], None] | None = None
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


def _shift(wiring: Wiring, by: int) -> Wiring:
    return wiring.but(boundaries=tuple(b + by for b in wiring.boundaries))


def _theta(wiring: Wiring) -> Wiring:
    return wiring.but(rope=type(wiring.rope)(10_000.0))


EAGLE = "--speculative-algorithm EAGLE"
FAULTS: dict[str, Fault] = {
    f.name: f
    for f in (
        Fault("healthy", "checkpoint", "the control: SGLang's names and config, nothing wrong", "", None, lambda w: w, lambda t, c: None),
        Fault(
            "layers0-flat", "checkpoint",
            "what the story's engineer served: flat config, `layers.0.*` names; SGLang 0.4.9-0.5.11 drops ten keys",
            "key-naming", 1.15, lambda w: w.but(dropped=MATRICES + NORMS), _flat,
        ),
        Fault("wrong-prefix", "checkpoint", "`draft_model.` before the layer's names; every release drops them", "key-naming", 1.15, lambda w: w.but(dropped=MATRICES + NORMS), _prefix),
        Fault("layer-dropped", "checkpoint", "the layer as a loader leaves it: matrices N(0, 0.02) with a fixed seed, norms one", "", 1.15, lambda w: w.but(dropped=MATRICES + NORMS), _drop_layer),
        Fault("fc-dropped", "checkpoint", "no fc.weight", "missing-weights", 1.15, lambda w: w.but(dropped=("fc.weight",)), _without("fc.weight")),
        Fault("head-dropped", "checkpoint", "no lm_head.weight although draft_vocab_size is set", "missing-weights", 1.05, lambda w: w.but(dropped=("lm_head.weight",)), _without("lm_head.weight")),
        Fault("fc-bypass-config", "checkpoint", "route (i) of K133: use_aux_hidden_state false; one layer arrives, own head and d2t kept", "fc-bypassed", 1.10, lambda w: w.but(capture="final", fc=False), _no_capture),
        Fault("fc-bypass-eagle", "launch", "route (ii) of K133: the flag EAGLE; one layer, the target's head, no d2t, logits cut", "algorithm-flag", 1.10, lambda w: w.but(capture="final", fc=False, head_source="target", d2t="identity", logit_cut=8192), launch=EAGLE),
        Fault("block-order", "checkpoint", "fc's three blocks in reverse order", "", 1.15, lambda w: w.but(boundaries=w.boundaries[::-1]), _reverse),
        Fault("ids-minus-one", "checkpoint", "layer ids one too low: a small loss, no cliff", "", None, lambda w: _shift(w, -1), _ids(-1)),
        Fault("ids-plus-one", "checkpoint", "layer ids one too high: a small loss, no cliff", "", None, lambda w: _shift(w, 1), _ids(1)),
        Fault("d2t-absolute", "checkpoint", "d2t holds target ids in place of offsets", "vocab-map", 1.05, lambda w: w.but(d2t="doubled"), _absolute),
        Fault("d2t-absent", "checkpoint", "no d2t although the vocabulary is reduced", "vocab-map", 1.05, lambda w: w.but(d2t="identity"), _without("d2t", "t2d")),
        Fault("tied-head", "checkpoint", "tie_word_embeddings true: the embedding's first rows replace the head", "shared-weights", 1.10, lambda w: w.but(head_source="embedding", logit_cut=8192), _config(tie_word_embeddings=True)),
        Fault("residual-normed", "wiring", "norm_before_residual flipped: the residual carries the normed state", "", None, lambda w: w.but(residual="normed")),
        Fault("feedback-post-norm", "wiring", "the next step is fed the normed state: position 0 fine, later ones dead", "", None, lambda w: w.but(feedback="post-norm")),
        Fault("features-normed", "wiring", "each state after the norm of the next block", "", 1.15, lambda w: w.but(capture="normed")),
        Fault("rope-theta", "checkpoint", "rope_theta 10,000 for 100,000: acceptance on short text hardly shows it", "", None, _theta, _config(rope_theta=10_000.0)),
        Fault("token-not-shifted", "wiring", "each state is paired with its own token, not the next one", "", 1.20, lambda w: w.but(token_shift=0)),
    )
}  # fmt: skip


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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
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
            command = f"python -m sglang.launch_server --model-path TARGET {fault.launch} --speculative-draft-model-path {out}"
            write_atomic(work / "launch.txt", command + "\n")
        work.chmod(0o755)
        out.exists() and out.rmdir()
        os.replace(work, out)
    except OSError as error:
        raise KitError(f"Cannot write {out}: {error.strerror}; choose another folder.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def get(name: str) -> Fault:
    """A fault by name."""
    if name not in FAULTS:
        raise KitError(f"There is no fault {name!r}; `python -m kitlib lab faults` lists {', '.join(FAULTS)}.")
    return FAULTS[name]


def lab_target() -> TargetInfo:
    """The lab's target, from its config alone."""
    return TargetInfo.of(target_path())
