"""Where the lab's training starts: the draft vocabulary, the drafter's config, and its first weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..features import Target


def new_drafter(
    target: Target,
    kept: Tensor,  # [Vd] target ids that the drafter can write, ascending
    boundaries: Sequence[int],
    rms: Tensor,  # [K*Ht] of each feature
    generator: torch.Generator,
    name: str = "",  # of the target, as others know it
) -> tuple[dict, dict[str, Tensor]]:
    """Config (speculators) and starting weights: the target's norm and head, norms of 1, matrices N(0, 0.02).

    `fc` is that draw over `rms`: the features' scales differ tenfold, and no boundary may drown the others.
    """
    config = target.info.config
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {key: config[key] for key in (*same, "hidden_act", "max_position_embeddings", "rms_norm_eps")}
    layer["head_dim"] = config.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    layer["rms_norm_eps"] = float(f"{layer['rms_norm_eps']:.6g}")  # a GGUF holds it in float32
    layer["rope_theta"] = (config.get("rope_parameters") or config)["rope_theta"]
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    name = name or Path(target.info.path).name  # never a path of this machine
    verifier = {"name_or_path": name, "architectures": [target.info.architecture]}
    method = {"proposal_type": "greedy", "speculative_tokens": 4}
    h, inter, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    q, kv = (layer[f"num_{name}_heads"] * layer["head_dim"] for name in ("attention", "key_value"))
    p, norms = "layers.0.", ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {f"{p}self_attn.{n}_proj.weight": (rows, 2 * h) for n, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {f"{p}self_attn.o_proj.weight": (h, q), f"{p}mlp.down_proj.weight": (h, inter)}
    shapes |= {f"{p}mlp.{n}_proj.weight": (inter, h) for n in ("gate", "up")} | {"fc.weight": (h, len(rms))}
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    weights |= {f"{p}{n}.weight": torch.ones(h) for n in norms}
    weights["fc.weight"] /= rms
    weights |= {"norm.weight": target.final_norm.weight.detach(), "lm_head.weight": target.head[kept]}
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    maps = {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": len(kept),
        "norm_before_residual": False,
        "target_hidden_size": target.info.hidden,
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": fixed | layer | {"tie_word_embeddings": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }, {k: v.bfloat16().contiguous() for k, v in weights.items()} | maps


def at_scale(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The same drafter with its residual stream `factor` times as large; exact for powers of two.

    Whatever reads the stream norms it first, so its scale is free. Training is best off near 1; a drafter that was
    started plainly lives at the scale of the target's own stream, and so does what is written.
    """
    writers = ("fc.weight", "o_proj.weight", "down_proj.weight")
    return {n: w * factor if n.endswith(writers) else w for n, w in weights.items()}


def draft_vocabulary(rows: Sequence[dict], vocab: int, size: int) -> Tensor:
    """The most frequent tokens of the answers, ascending; ties go to the smaller id."""
    answers = torch.tensor([token for row in rows for token in row["ids"][row["prompt_tokens"] :]])
    return torch.bincount(answers, minlength=vocab).argsort(descending=True, stable=True)[:size].sort().values
