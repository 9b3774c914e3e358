"""The draft tree: built before verification, walked after it.

Semantics follow SGLang's CPU kernels (spec.cpp; Apache-2.0). A tree of D nodes has the last committed token
as node 0; it is kept as first child and next sibling of each node (-1: none), with a [D, D] mask of who sees
whom.
The spelling `retrive` is upstream's.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,  # [requests, topk * (depth - 1) + 1]: candidate index of each expanded node
    selected_index: Tensor,  # [requests, D - 1]: candidate index of nodes 1..D-1, ascending
    verified_seq_len: Tensor,  # [requests]: committed length
    tree_mask: Tensor,  # flat bool, written: D rows of D a request, or with FULL_MASK of length + D
    positions: Tensor,  # [requests * D], written
    retrive_index: Tensor,  # [requests, D], written: flat index of each node
    retrive_next_token: Tensor,  # [requests, D], written: first child
    retrive_next_sibling: Tensor,  # [requests, D], written
    topk: int,
    depth: int,
    draft_token_num: int,  # D
    tree_mask_mode: int,
) -> None:
    """Turn each request's selected draft candidates into a tree: links, positions, mask."""
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            "sgl_kernel.build_tree_kernel_efficient_cpu: the kit's CPU engine does not have bit-packed masks"
        )
    nodes, flat_mask, offset = draft_token_num, tree_mask.view(-1), 0
    positions = positions.view(-1, nodes)
    for i, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_list[i].tolist(), selected_index[i].tolist(), topk)
        retrive_index[i] = torch.arange(i * nodes, (i + 1) * nodes)
        child, sibling = _links(parents)
        retrive_next_token[i] = torch.tensor(child)
        retrive_next_sibling[i] = torch.tensor(sibling)
        mask = torch.zeros(nodes, nodes, dtype=torch.bool)
        mask[:, 0] = True
        for node in range(nodes):
            walk, steps = node, 0
            while walk:
                mask[node, walk], walk, steps = True, parents[walk], steps + 1
            positions[i, node] = length + steps
        width = nodes if tree_mask_mode == QLEN_ONLY else length + nodes
        flat_mask[offset : offset + nodes * width].view(nodes, width)[:, width - nodes :] = mask
        offset += nodes * width


def _parents(expanded: list[int], selected: list[int], topk: int) -> list[int]:
    """Return the parent node of each node (0 for the root itself).

    Candidate c is a child of expansion c // topk: the root for 0, else candidate `expanded[c // topk]`.
    """
    parents = [0]
    for candidate in selected:
        expansion = candidate // topk
        parents.append(0 if expansion == 0 else selected.index(expanded[expansion]) + 1)
    return parents


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return each node's first child and next sibling, -1 for none; siblings ascend, orphans are left out."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        if parents[node] >= 0:
            sibling[node], child[parents[node]] = child[parents[node]], node
    return child, sibling


def verify_tree_greedy_cpu(
    predicts: Tensor,  # [requests * D] int32, written: target token after each node on the accepted path
    accept_index: Tensor,  # [requests, steps + 1] int32, -1 before, written: flat index of accepted nodes
    accept_token_num: Tensor,  # [requests] int32, written: accepted drafts, the bonus token not counted
    candidates: Tensor,  # [requests, D]: the nodes' tokens
    retrive_index: Tensor,  # [requests, D]
    retrive_next_token: Tensor,  # [requests, D]
    retrive_next_sibling: Tensor,  # [requests, D]
    target_predict: Tensor,  # [requests, D]: the target's choice after each node
) -> None:
    """Walk each tree from its root as long as a child carries the token that the target chose."""
    chosen = target_predict.flatten().tolist()
    for i, tokens in enumerate(candidates.tolist()):
        links = (retrive_index, retrive_next_token, retrive_next_sibling)
        flat, child, sibling = (link[i].tolist() for link in links)
        node, accepted = 0, [flat[0]]
        while len(accepted) < accept_index.shape[1]:
            node = child[node]
            while node != -1 and tokens[node] != chosen[accepted[-1]]:
                node = sibling[node]
            if node == -1:
                break
            accepted.append(flat[node])
        for place, index in enumerate(accepted):
            accept_index[i, place] = index
            predicts[index] = chosen[index]
        accept_token_num[i] = len(accepted) - 1


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,  # [requests * D * D] bool: node i sees node j
    verified_seq_len: Tensor,  # [requests]: committed length
    positions: Tensor,  # [requests * D], written
    retrive_index: Tensor,  # [requests, D], written
    retrive_next_token: Tensor,  # [requests, D], written
    retrive_next_sibling: Tensor,  # [requests, D], written
    batch_size: int,
    draft_token_num: int,  # D
) -> None:
    """Recover links and positions from the mask alone, for NGRAM: a node's parent is the last one it sees."""
    nodes = draft_token_num
    links = (positions, retrive_index, retrive_next_token, retrive_next_sibling)
    positions, indices, children, siblings = (link.view(-1, nodes) for link in links)
    masks = tree_mask.view(-1, nodes, nodes).tolist()
    for i, length in enumerate(verified_seq_len[:batch_size].tolist()):
        ancestors = [[j for j in range(node) if masks[i][node][j]] for node in range(nodes)]
        child, sibling = _links([seen[-1] if seen else -1 for seen in ancestors])
        indices[i] = torch.arange(i * nodes, (i + 1) * nodes)
        children[i], siblings[i] = torch.tensor(child), torch.tensor(sibling)
        positions[i] = length + torch.tensor([len(seen) for seen in ancestors])
