"""Attention over SGLang's slot-indexed key/value cache, one request at a time.

Semantics follow SGLang's CPU kernels (store_cache.cpp, decode.cpp, extend.cpp; Apache-2.0). What a dense
Llama never asks for (cross attention, sinks, sliding windows, scaled fp8 caches) is refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_cache_cpu(
    k: Tensor,  # [tokens, kv_heads, head_dim] or [tokens, kv_heads * head_dim]
    v: Tensor,  # the same for values
    k_cache: Tensor,  # [slots, kv_heads, head_dim], written
    v_cache: Tensor,  # [slots, kv_heads, head_dim], written
    indices: Tensor,  # [tokens], slot of each token
    row_dim: int,  # kv_heads * head_dim
) -> None:
    """Write each token's key and value into its slot."""
    k_cache[indices] = k.reshape(-1, *k_cache.shape[1:]).to(k_cache.dtype)
    v_cache[indices] = v.reshape(-1, *v_cache.shape[1:]).to(v_cache.dtype)


def attend(
    q: Tensor,  # [queries, heads, head_dim]
    k: Tensor,  # [keys, kv_heads, head_dim]
    v: Tensor,  # [keys, kv_heads, value_dim]
    scale: float,
    logit_cap: float,  # 0: no cap
    visible: Tensor | None,  # [queries, keys] bool; None: everything
) -> Tensor:
    """Return softmax attention in fp32, shape [queries, heads, value_dim], with grouped key/value heads."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().transpose(0, 1).repeat_interleave(group, dim=0)  # [heads, keys, head_dim]
    values = v.float().transpose(0, 1).repeat_interleave(group, dim=0)
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale  # [heads, queries, keys]
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)


def refuse_extras(op: str, scales: tuple[float, float], cross: bool, window: int, encoder_lens, sinks) -> None:
    """Raise NotImplementedError naming the op and the feature that these plain kernels lack."""
    extras = {
        "cross attention": cross or encoder_lens is not None,
        "a sliding window": window > 0,
        "attention sinks": sinks is not None,
        "scaled key/value caches": scales != (1.0, 1.0),
    }
    for feature, asked in extras.items():
        if asked:
            raise NotImplementedError(f"torch.ops.sgl_kernel.{op}: the kit's CPU engine does not have {feature}")


def decode_attention_cpu(
    query: Tensor,  # [requests, heads, head_dim], one new token each
    k_cache: Tensor,  # [slots, kv_heads, head_dim], written
    v_cache: Tensor,  # [slots, kv_heads, value_dim], written
    k_scale: float,
    v_scale: float,
    output: Tensor,  # [requests, heads, value_dim], written
    key: Tensor | None,  # [requests, kv_heads, head_dim]; None: already in the cache
    value: Tensor | None,
    loc: Tensor,  # [requests], slot of the new token
    attn_logits: Tensor,  # scratch of the upstream kernel, unused
    req_to_token: Tensor,  # [pool, context]: slot of every position
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    seq_lens: Tensor,  # [requests], the new token included
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,  # 0: none
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store each request's new key and value, then let its query attend to all of its positions."""
    scales = (k_scale, v_scale)
    refuse_extras("decode_attention_cpu", scales, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    if key is not None:
        store_cache_cpu(key, value, k_cache, v_cache, loc, 0)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length]
        output[i] = attend(query[i : i + 1], k_cache[slots], v_cache[slots], sm_scale, logit_cap, None)[0]


def extend_attention_cpu(
    q_extend: Tensor,  # [tokens, heads, head_dim], the requests' new tokens one after the other
    k_extend: Tensor | None,  # [tokens, kv_heads, head_dim]; None: already in the cache
    v_extend: Tensor | None,
    o_extend: Tensor,  # [tokens, heads, value_dim], written
    k_buffer: Tensor,  # [slots, kv_heads, head_dim]
    v_buffer: Tensor,  # [slots, kv_heads, value_dim]
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,  # [pool, context]: slot of every position
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    seq_lens: Tensor,  # [requests], new tokens included
    extend_seq_lens: Tensor,  # [requests]: number of new tokens
    extend_start_loc: Tensor,  # [requests]: where they start in q_extend
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,  # 0: none
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,  # [requests * max_len_extend * max_len_extend] bool: which new token sees which
    is_causal: bool,
) -> None:
    """Let each request's new tokens attend to its prefix and, causally or by the tree mask, to each other."""
    scales = (k_scale, v_scale)
    refuse_extras("extend_attention_cpu", scales, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    masks = None if tree_mask is None else tree_mask.view(-1, max_len_extend, max_len_extend).bool()
    requests = (t.tolist() for t in (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc))
    for i, (row, length, new, start) in enumerate(zip(*requests, strict=True)):
        if new == 0:
            continue
        prefix, here = length - new, slice(start, start + new)
        slots = req_to_token[row, : length if k_extend is None else prefix]
        k, v = k_buffer[slots], v_buffer[slots]
        if k_extend is not None:
            k = torch.cat([k, k_extend[here].reshape(new, *k.shape[1:]).to(k.dtype)])
            v = torch.cat([v, v_extend[here].reshape(new, *v.shape[1:]).to(v.dtype)])
        visible = torch.ones(new, length, dtype=torch.bool)
        if masks is not None:
            visible[:, prefix:] = masks[i, :new, :new]
        elif is_causal:
            visible = visible.tril(diagonal=prefix)
        o_extend[here] = attend(q_extend[here], k, v, sm_scale, logit_cap, visible).to(o_extend.dtype)
