"""Where the lab's training starts: the draft vocabulary, the drafter's config, and its first weights.

The start is the best linear guess of the target's next final state from the states and the newest token. Random
weights start with a loss of about 20, as the target's own norm and head make any state confident, and stay long on
the plateau of not reading the newest token: attention finds it only where it already looks. So `fc` holds the guess's
part from the states; in each group one head looks at its own position, and values and output hold the token's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter import rms_norm
from ..features import Target

PAIRS, FOCUS, RIDGE = 4, 16.0, 0.01  # fastest rotary pairs, and score, of a head that looks at its own position


@dataclass(frozen=True)
class Guess:
    """A linear guess of the next final state, before the weight of the norm."""

    fc: Tensor  # [H, K*Ht] its part from the states
    token: Tensor  # [H, H] its part from the newest token's normed embedding
    token_root: Tensor  # [H, H] Cholesky factor of that embedding's second moments
    one: Tensor  # [2*H] the best constant 1 from the layer's input: embedding and state, both normed
    rms: Tensor  # [K*Ht] of each feature


def linear_guess(
    answers: Sequence[tuple[Tensor, Sequence[int]]],  # states [n+1, (K+1)*Ht] from the last prompt token; n tokens
    norm: Tensor,  # [Ht] weight of the target's final norm
    embedding: Tensor,  # [V, H]
) -> Guess:
    """Two ridge regressions over answers."""
    width, unit = len(norm), torch.ones(len(norm))

    def batches():
        for states, tokens in answers:
            embed = rms_norm(embedding[torch.tensor(tokens)].float(), unit, 1e-5)
            yield states[:-1, :-width].float(), embed, states[1:, -width:].float() / norm

    guess, gram = _ridge((torch.cat([x, embed], -1), y) for x, embed, y in batches())
    fc, token = guess[:, :-width].contiguous(), guess[:, -width:]
    layer = ((torch.cat([e, rms_norm(x @ fc.T, unit, 1e-5)], -1), torch.ones(len(e), 1)) for x, e, _ in batches())
    one = _ridge(layer)[0][0]
    root = torch.linalg.cholesky(gram[-width:, -width:] + 1e-4 * gram.diag().mean() * torch.eye(width))
    return Guess(fc, token, root.float(), one, gram.diag()[:-width].sqrt().clamp_min(1e-3).float())


def _ridge(pairs) -> tuple[Tensor, Tensor]:
    """Coefficients [out, in] of y on x, and the second moments [in, in] of x."""
    gram, cross, count = 0.0, 0.0, 0
    for x, y in pairs:
        gram, cross, count = gram + (x.T @ x).double(), cross + (x.T @ y).double(), count + len(x)
    penalty = RIDGE * gram.diag().clamp_min(1e-9).diag()
    return torch.linalg.solve(gram + penalty, cross).T.float(), gram / count


def attention_of(guess: Guess, weights: dict[str, Tensor], heads: int, kv_heads: int) -> None:
    """Write the guess's token part into `weights`, whose attention is random so far and whose o_proj is zero."""
    q, k, v, o = (weights[f"layers.0.self_attn.{n}_proj.weight"] for n in "qkvo")
    size, hidden, group = len(q) // heads, len(guess.token), heads // kv_heads
    rows = torch.arange(min(PAIRS, size // 2))
    rows = torch.cat([rows, rows + size // 2])  # both halves of the fastest rotary pairs
    height = (FOCUS * size**0.5 / len(rows)) ** 0.5  # equal positions then score FOCUS
    left, scale, right = torch.linalg.svd(guess.token @ guess.token_root)
    out, read = left * scale, torch.linalg.solve(guess.token_root.T, right.T).T
    for j in range(kv_heads):
        part = slice(j * size, j * size + size)
        q[j * group * size + rows] = height * guess.one
        k[j * size + rows] = height * guess.one
        v[part] = 0
        v[part, :hidden] = read[part]
        o[:, j * group * size : j * group * size + size] = out[:, part]


def new_drafter(
    target: Target, kept: Tensor, boundaries: Sequence[int], guess: Guess, generator: torch.Generator
) -> tuple[dict, dict[str, Tensor]]:
    """Config (speculators) and starting weights: the guess, the target's norm (at 0.6) and head, the rest N(0, 0.02).

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
    attention_of(guess, weights, layer["num_attention_heads"], layer["num_key_value_heads"])
    weights |= {"fc.weight": guess.fc, "norm.weight": 0.6 * target.final_norm.weight.detach()}
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
