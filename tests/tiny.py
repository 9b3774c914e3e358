"""A tiny seeded pair: a random Llama target of 8 layers and random drafters for it, in any wiring and dialect.

The vocabulary is so small that random drafts are accepted now and then; the lab is where drafters are good.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract, TargetInfo, Wiring, parameter_shapes

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 24, 12, 32, 8


def write_target(folder: Path, **changes) -> Path:
    """A random LlamaForCausalLM without tokenizer; seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**values | changes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_drafter(folder: Path, *, rename=("layers.0.", "midlayer."), drop=(), extra=None, layers=1, **config) -> Path:
    """A random drafter with a flat config; `rename` changes names, `drop` leaves tensors out."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **config,
    }
    values = {k: v for k, v in values.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {n: t for n, t in random_tensors(layers, values).items() if n not in drop} | (extra or {})
    save_file({n.replace(*rename): t for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(layers: int, config: dict) -> dict[str, torch.Tensor]:
    """Canonical names, seeded values, d2t offsets onto every second target id."""
    generator = torch.Generator().manual_seed(1)
    h, kv = HIDDEN, 16
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (DRAFT_VOCAB, h),
    }
    for i in range(layers):
        p, width = f"layers.{i}.", 2 * h if i == 0 else h
        shapes |= {p + "self_attn.q_proj.weight": (h, width), p + "self_attn.o_proj.weight": (h, h)}
        shapes |= {p + f"self_attn.{n}_proj.weight": (kv, width) for n in "kv"}
        shapes |= {p + f"mlp.{n}_proj.weight": (48, h) for n in ("gate", "up")} | {p + "mlp.down_proj.weight": (h, 48)}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        shapes |= {p + f"{n}.weight": (h,) for n in norms if i == 0 or n != "hidden_norm"}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * h,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(3)}
    out = {
        n: torch.randn(s, generator=generator) * (0.3 if len(s) == 2 else 0.2) + (len(s) == 1)
        for n, s in shapes.items()
    }
    ids = torch.arange(0, VOCAB, 2)
    out["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return out


def contract_of(folder: Path, target: Path) -> tuple[Checkpoint, Contract, Wiring]:
    """Checkpoint, contract and trained wiring of a folder that `write_drafter` made."""
    checkpoint, info = Checkpoint.open(folder), TargetInfo.of(target)
    contract = Contract.of(checkpoint, info)
    assert parameter_shapes(contract, contract.trained(info))
    return checkpoint, contract, contract.trained(info)
