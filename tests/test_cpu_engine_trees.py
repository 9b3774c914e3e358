"""The CPU engine's cache slots and draft trees against independent references."""

from __future__ import annotations

import pytest
import torch
from cpu_engine_kernels import DTYPES, generator, slots, trees


@pytest.fixture
def rng() -> torch.Generator:
    return generator()


def test_slots_are_written_and_read_back(rng):
    table, rows = torch.full((4, 10), -1, dtype=torch.int32), torch.tensor([3, 0, 2])
    start, end = torch.tensor([0, 4, 7]), torch.tensor([5, 4, 10])  # the middle request gets none
    new = torch.randperm(30, generator=rng)[:8]
    slots.assign_req_to_token_pool_cpu(rows, table, start, end, new, 10)
    expected = [[-1] * 10 for _ in range(4)]
    expected[3][0:5], expected[2][7:10] = new[:5].tolist(), new[5:].tolist()
    assert table.tolist() == expected

    read = torch.empty(8, dtype=torch.int64)
    slots.assign_extend_cache_locs_cpu(rows, table, start, end, read, 10)
    assert read.tolist() == new.tolist()


def test_draft_slots(rng):
    table = torch.randperm(60, generator=rng).view(3, 20).to(torch.int32)
    rows, lengths, topk, steps = torch.tensor([2, 0]), torch.tensor([6, 11]), 2, 3
    out = torch.empty(2 * topk * steps, dtype=torch.int64)
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, 20, topk, steps)
    seen = slots.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, 20)
    assert seen.shape == (4, 20) and seen.dtype == table.dtype
    for i, (row, n) in enumerate([(2, 6), (0, 11)]):
        drafts = table[row, n : n + 6].tolist()
        assert out[i * 6 : i * 6 + 6].tolist() == drafts
        for branch in range(topk):
            own = table[row, :n].tolist() + drafts[branch * steps : (branch + 1) * steps]
            assert seen[i * topk + branch, : n + steps].tolist() == own


def test_accepted_tokens_and_their_slots():
    tokens = torch.tensor([5, 6, 7, 0, 9, 0, 0, 0, 1, 2, 3, 4], dtype=torch.int32)
    bonus = torch.empty(3, dtype=torch.int32)
    slots.fill_bonus_tokens_cpu(tokens, torch.tensor([3, 1, 4], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [7, 9, 4]

    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    out = torch.full((7,), -5)
    slots.fill_accept_out_cache_loc_cpu(index, torch.arange(100, 109), out)
    assert out.tolist() == [100, 102, 103, 106, 107, 108, -5]


@pytest.mark.parametrize("select", [None, [1, 3, 4]])
def test_rotate_input_ids(select):
    ids, start, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3, 4]), torch.tensor([3, 0, 2])
    ids = torch.cat([ids, torch.tensor([6])])
    chosen = None if select is None else torch.tensor(select)
    slots.rotate_input_ids_cpu(ids, start, lengths, torch.tensor([[70], [80], [90]]), chosen)
    assert ids.tolist() == ([2, 3, 70, 4, 6, 90] if select is None else [2, 70, 3, 4, 90, 6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_between_slots_in_every_layer(rng, dtype):
    buffers = [torch.randn(9, 2, width, generator=rng).to(dtype) for width in (4, 6)]
    target, source = torch.tensor([1, 2, 8]), torch.tensor([0, 1, 2])  # overlapping
    expected = [b.clone() for b in buffers]
    for b in expected:
        b[target] = b[source]
    addresses = torch.tensor([b.data_ptr() for b in buffers])
    row_bytes = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    slots.copy_all_layer_kv_cache_cpu(addresses, row_bytes, target, source)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


class Tree:
    """A random draft tree as EAGLE makes one: candidates by expansion, some chosen with all their ancestors."""

    def __init__(self, rng, topk: int, depth: int, nodes: int) -> None:
        pick = lambda options: options[int(torch.randint(len(options), (1,), generator=rng))]  # noqa: E731
        self.expanded = [-1]  # candidate that each expansion starts from; the first starts from the root
        level, ancestor = list(range(topk)), dict.fromkeys(range(topk))
        for _ in range(depth - 1):
            chosen = sorted(level, key=lambda _: float(torch.rand(1, generator=rng)))[:topk]
            level = []
            for parent in chosen:
                children = range(len(self.expanded) * topk, (len(self.expanded) + 1) * topk)
                self.expanded.append(parent)
                ancestor.update(dict.fromkeys(children, parent))
                level += children
        selected: set[int] = set()
        while len(selected) < nodes - 1:
            selected.add(pick([c for c, p in ancestor.items() if c not in selected and (p is None or p in selected)]))
        self.selected = sorted(selected)
        place = {None: 0} | {c: i + 1 for i, c in enumerate(self.selected)}
        self.parents = [None] + [place[ancestor[c]] for c in self.selected]
        self.children = [[n for n in range(nodes) if self.parents[n] == node] for node in range(nodes)]

    def path(self, node: int | None) -> list[int]:
        return [] if node is None else [*self.path(self.parents[node]), node]


def build(forest: list[Tree], lengths, topk, depth, nodes, mode):
    """Run the kernel as SGLang does: links prefilled with -1, the mask with True."""
    full = sum(lengths) * nodes if mode == trees.FULL_MASK else 0
    mask = torch.ones(full + len(forest) * nodes * nodes, dtype=torch.bool)
    positions, links = (
        torch.empty(len(forest) * nodes, dtype=torch.int64),
        torch.full((3, len(forest), nodes), -1),
    )
    expanded = torch.tensor([t.expanded for t in forest])
    selected = torch.tensor([t.selected for t in forest])
    trees.build_tree_kernel_efficient_cpu(
        expanded, selected, torch.tensor(lengths), mask, positions, *links, topk, depth, nodes, mode
    )
    return mask, positions, *links


SHAPES = [(1, 4, 5), (2, 3, 6), (4, 5, 16), (3, 1, 4)]  # topk, depth, nodes; the first is a chain


@pytest.mark.parametrize(("topk", "depth", "nodes"), SHAPES)
@pytest.mark.parametrize("mode", [trees.FULL_MASK, trees.QLEN_ONLY])
@pytest.mark.parametrize("round", range(3))
def test_build_tree(rng, topk, depth, nodes, mode, round):
    rng.manual_seed(round)
    forest, lengths = [Tree(rng, topk, depth, nodes) for _ in range(3)], [4, 9, 1]
    mask, positions, index, child, sibling = build(forest, lengths, topk, depth, nodes, mode)
    assert index.tolist() == torch.arange(3 * nodes).view(3, nodes).tolist()
    offset = 0
    for i, tree in enumerate(forest):
        width = nodes + (lengths[i] if mode == trees.FULL_MASK else 0)
        rows = mask[offset : offset + nodes * width].view(nodes, width)
        offset += nodes * width
        for node in range(nodes):
            sees = [j in tree.path(node) for j in range(nodes)]
            assert rows[node].tolist() == [True] * (width - nodes) + sees
            assert positions[i * nodes + node] == lengths[i] + len(tree.path(node)) - 1
            assert child[i, node] == (tree.children[node][0] if tree.children[node] else -1)
            brothers = [] if node == 0 else tree.children[tree.parents[node]]
            after = [n for n in brothers if n > node]
            assert sibling[i, node] == (after[0] if after else -1)
    assert offset == len(mask)


def test_build_tree_refuses_packed_masks(rng):
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.build_tree_kernel_efficient_cpu.*bit-packed"):
        build([Tree(rng, 2, 2, 3)], [4], 2, 2, 3, mode=2)


@pytest.mark.parametrize(("topk", "depth", "nodes"), SHAPES)
def test_verify_tree_greedily(rng, topk, depth, nodes):
    lengths = set()
    for steps in (depth, max(1, depth - 1)):  # also with fewer places than the tree is deep
        for _ in range(20):
            forest = [Tree(rng, topk, depth, nodes) for _ in range(3)]
            _, _, *links = build(forest, [4, 9, 1], topk, depth, nodes, trees.QLEN_ONLY)
            tokens, chosen = (torch.randint(0, 2, (3, nodes), generator=rng) for _ in range(2))
            predicts = torch.full((3 * nodes,), -7, dtype=torch.int32)
            index, count = (
                torch.full((3, steps + 1), -1, dtype=torch.int32),
                torch.zeros(3, dtype=torch.int32),
            )
            trees.verify_tree_greedy_cpu(predicts, index, count, tokens, *links, chosen)

            expected = torch.full((3 * nodes,), -7)
            for i, tree in enumerate(forest):
                path = [0]
                while len(path) <= steps:
                    fits = [n for n in tree.children[path[-1]] if tokens[i, n] == chosen[i, path[-1]]]
                    if not fits:
                        break
                    path.append(fits[0])
                for node in path:
                    expected[i * nodes + node] = chosen[i, node]
                assert count[i] == len(path) - 1
                assert index[i].tolist() == [i * nodes + n for n in path] + [-1] * (steps + 1 - len(path))
                lengths.add(len(path) - 1)
            assert predicts.tolist() == expected.tolist()
    assert len(lengths) > 1  # the trees were neither all refused nor all accepted alike


@pytest.mark.parametrize(("topk", "depth", "nodes"), SHAPES)
def test_links_are_recovered_from_the_mask(rng, topk, depth, nodes):
    forest = [Tree(rng, topk, depth, nodes) for _ in range(3)]
    mask, positions, *links = build(forest, [4, 9, 1], topk, depth, nodes, trees.QLEN_ONLY)
    found_positions, found = torch.empty_like(positions), torch.full((3, 3, nodes), -9)
    trees.reconstruct_indices_from_tree_mask(mask, torch.tensor([4, 9, 1]), found_positions, *found, 3, nodes)
    assert found_positions.tolist() == positions.tolist()
    assert found.tolist() == torch.stack(links).tolist()


def test_a_node_that_sees_nothing_is_nobodys_child():
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)  # node 1 sees only itself
    positions, links = torch.empty(3, dtype=torch.int64), torch.full((3, 1, 3), -9)
    trees.reconstruct_indices_from_tree_mask(mask.flatten(), torch.tensor([6]), positions, *links, 1, 3)
    assert positions.tolist() == [6, 6, 7]
    assert links.tolist() == [[[0, 1, 2]], [[2, -1, -1]], [[-1, -1, -1]]]
