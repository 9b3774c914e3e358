"""Where the lab's training starts: the draft vocabulary, the drafter's config, and its first weights.

A random `fc` starts with a loss of about 20, as the target's own norm and head make it confident; the best linear
guess of the target's next state starts below 5, so `linear_fc` fits that. The layer's two output projections are
zero at first, so that the guess passes through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..features import Target


def linear_fc(
    answers: Sequence[Tensor],  # [tokens, (K+1)*Ht] each: boundaries, then the final state
    norm: Tensor,  # [Ht] weight of the target's final norm
    ridge: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """fc [Ht, K*Ht], the best guess of the next final state (before that norm's weight); each feature's RMS [K*Ht]."""
    width = len(norm)
    features = answers[0].shape[1] - width
    gram = torch.zeros(features, features, dtype=torch.float64)
    cross = torch.zeros(features, width, dtype=torch.float64)
    for states in answers:
        x, y = states[:-1, :-width].float(), states[1:, -width:].float() / norm
        gram += x.T @ x
        cross += x.T @ y
    squares = gram.diag().clamp_min(1e-6)
    rms = (squares / sum(len(states) - 1 for states in answers)).sqrt()
    return torch.linalg.solve(gram + ridge * squares.diag(), cross).T.float(), rms.float()


def new_drafter(
    target: Target, kept: Tensor, boundaries: Sequence[int], fc: Tensor, generator: torch.Generator
) -> tuple[dict, dict[str, Tensor]]:
    """Config (speculators) and starting weights: norm (at 0.6) and head are the target's, the rest N(0, 0.02).

    `kept` [Vd] are the target ids that the drafter can write, ascending.
    """
    config = target.info.config
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {key: config[key] for key in (*same, "hidden_act", "max_position_embeddings", "rms_norm_eps")}
    layer["head_dim"] = config.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    layer["rope_theta"] = (config.get("rope_parameters") or config)["rope_theta"]
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    verifier = {"name_or_path": target.info.path, "architectures": [target.info.architecture]}
    method = {"proposal_type": "greedy", "speculative_tokens": 4}
    h, inter, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    q, kv = (layer[f"num_{name}_heads"] * layer["head_dim"] for name in ("attention", "key_value"))
    p, norms = "layers.0.", ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {f"{p}self_attn.{n}_proj.weight": (rows, 2 * h) for n, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {f"{p}mlp.{n}_proj.weight": (inter, h) for n in ("gate", "up")}
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    weights |= {f"{p}{n}.weight": torch.ones(h) for n in norms}
    weights |= {p + "self_attn.o_proj.weight": torch.zeros(h, q), p + "mlp.down_proj.weight": torch.zeros(h, inter)}
    weights |= {"fc.weight": fc, "norm.weight": 0.6 * target.final_norm.weight.detach()}
    weights["lm_head.weight"] = target.head[kept]
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    maps = {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": len(kept),
        "norm_before_residual": False,
        "target_hidden_size": None,
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


def draft_vocabulary(rows: Sequence[dict], vocab: int, size: int) -> Tensor:
    """The most frequent tokens of the answers, ascending; ties go to the smaller id."""
    answers = torch.tensor([token for row in rows for token in row["ids"][row["prompt_tokens"] :]])
    return torch.bincount(answers, minlength=vocab).argsort(descending=True, stable=True)[:size].sort().values
