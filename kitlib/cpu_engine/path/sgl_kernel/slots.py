"""Book-keeping of cache slots and accepted tokens, as speculation needs it.

Semantics follow SGLang's CPU kernels (spec.cpp, kvcache.cpp; Apache-2.0). A request's row of `req_to_token`
holds the cache slot of each of its positions; draft tokens take the slots that follow the committed ones.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def _rows(*columns: Tensor):
    """Return an iterator over the requests' numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    req_to_token: Tensor,  # [pool, context] int32, written
    start_offset: Tensor,  # [requests]
    end_offset: Tensor,  # [requests]
    out_cache_loc: Tensor,  # [sum of lengths]: the new slots
    pool_len: int,
) -> None:
    """Write new slots into positions start..end of each request's row."""
    done = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    req_to_token: Tensor,  # [pool, context] int32
    start_offset: Tensor,  # [requests]
    end_offset: Tensor,  # [requests]
    out_cache_loc: Tensor,  # [sum of lengths] int64, written
    pool_len: int,
) -> None:
    """Read the slots of positions start..end of each request's row, one request after the other."""
    done = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    req_to_token: Tensor,  # [pool, context] int32
    seq_lens: Tensor,  # [requests]: committed length
    out_cache_loc: Tensor,  # [requests * topk * num_steps] int64, written
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the topk * num_steps slots after each request's committed ones."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,  # [pool, context] int32
    req_pool_indices: Tensor,  # [requests]: row of req_to_token
    seq_lens: Tensor,  # [requests]: committed length
    topk: int,
    num_steps: int,
    pool_len: int,  # context
) -> Tensor:
    """Return the slots each draft branch sees, [requests * topk, context]: the prefix, then its drafts."""
    branches = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        for branch in range(topk):
            target, first = branches[i * topk + branch], length + branch * num_steps
            target[:length] = req_to_token[row, :length]
            target[length : length + num_steps] = req_to_token[row, first : first + num_steps]
    return branches


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor,  # [requests * accept_stride]: accepted drafts, then the bonus token
    accept_lens: Tensor,  # [requests], the bonus token included
    bonus_tokens: Tensor,  # [requests], written
    accept_stride: int,
) -> None:
    """Pick each request's last accepted token, the bonus token."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor,  # [requests, steps + 1]: index of each accepted token, -1 padded
    out_cache_loc: Tensor,  # [requests * draft_tokens]: slot of each verified token
    accept_out_cache_loc: Tensor,  # [accepted tokens or more], written
) -> None:
    """Collect the slots of the accepted tokens, in order."""
    kept = accept_index.flatten().long()
    kept = kept[kept >= 0]
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept]


def rotate_input_ids_cpu(
    input_ids: Tensor,  # [tokens], written
    extend_start_loc: Tensor,  # [requests]
    extend_seq_lens: Tensor,  # [requests]
    topk_index: Tensor,  # [requests]: the token that follows each segment
    select_index: Tensor | None = None,  # [requests]: where it goes; None: the segment's last place
) -> None:
    """Shift each request's tokens one place to the left and put its next token in."""
    new_tokens = topk_index.flatten()
    for i, (start, length) in enumerate(_rows(extend_start_loc, extend_seq_lens)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[start + length - 1 if select_index is None else int(select_index[i])] = new_tokens[i]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor,  # [buffers] addresses of the caches' first bytes
    strides: Tensor,  # [buffers] bytes a slot
    tgt_loc: Tensor,  # [slots]
    src_loc: Tensor,  # [slots]
) -> None:
    """Copy slots src to slots tgt in every buffer; all are read before any is written, so they may overlap.

    Addresses, not tensors, as SGLang passes them.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + slot * stride, row, stride)
