"""Dense layers: linear, RMS norm, gated activation, rotary embedding.

Semantics follow SGLang's CPU kernels (gemm.cpp, norm.cpp, activation.cpp, rope.cpp; Apache-2.0): reductions
run in fp32 and only the result is rounded to the tensor's own type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convert_weight_packed(
    weight: Tensor,  # [out, in]
) -> Tensor:
    """Return the weight as it is: upstream re-tiles it for AMX, plain torch needs no tiles."""
    return weight.clone()


def weight_packed_linear(
    mat1: Tensor,  # [tokens, in]
    mat2: Tensor,  # [out, in], from convert_weight_packed
    bias: Tensor | None,  # [out], fp32 whatever the other types
    is_vnni: bool,
) -> Tensor:
    """Return `mat1 @ mat2.T + bias`, shape [tokens, out]."""
    return F.linear(mat1, mat2, None if bias is None else bias.to(mat1.dtype))


def rms_norm(
    x: Tensor,  # [tokens, hidden], fp32
    weight: Tensor,  # [hidden]
    eps: float,
) -> Tensor:
    """Return `x / rms(x) * weight` in fp32, shape [tokens, hidden]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm_cpu(
    input: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
) -> Tensor:
    """Return the RMS norm of `input` in its own type, shape [tokens, hidden]."""
    return rms_norm(input.float(), weight, eps).to(input.dtype)


def fused_add_rmsnorm_cpu(
    input: Tensor,  # [tokens, hidden], becomes the norm of the sum
    residual: Tensor,  # [tokens, hidden], becomes the sum
    weight: Tensor,  # [hidden]
    eps: float,
) -> None:
    """Add `input` to `residual` and normalise the (unrounded) sum; both tensors are written in place."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(rms_norm(total, weight, eps))


def silu_and_mul_cpu(
    input: Tensor,  # [tokens, 2 * width]: gate, then up
) -> Tensor:
    """Return `silu(gate) * up`, shape [tokens, width]."""
    gate, up = input.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(input.dtype)


def rotary_embedding_cpu(
    positions: Tensor,  # [tokens]
    query: Tensor,  # [tokens, heads * head_size] or [tokens, heads, head_size]
    key: Tensor,  # [tokens, kv_heads * head_size] or [tokens, kv_heads, head_size]
    head_size: int,
    cos_sin_cache: Tensor,  # [max_position, rotary_dim]: cosines, then sines
    is_neox: bool,  # halves are rotated against each other; else even and odd elements
) -> tuple[Tensor, Tensor]:
    """Return query and key rotated by their positions, shapes as given; elements past rotary_dim stay."""
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, half]
    rotary_dim = cos_sin_cache.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(positions.numel(), -1, head_size)
        turning, fixed = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        if is_neox:
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned.to(x.dtype), fixed], dim=-1).reshape(x.shape)

    return rotate(query), rotate(key)
