"""Draft trees: a tree without branches is a chain, and a small tree counted by hand."""

from __future__ import annotations

import torch

from kitlib.acceptance import Cache
from kitlib.trees import accepted, draft_tree, replay_trees


def test_a_tree_of_one_branch_is_the_chain(lab_session):
    drafter, _ = lab_session.load()
    states, chain = lab_session.states()[:4], lab_session.measure().rounds[:4]
    assert replay_trees(drafter, states, 4, 1, 5).rounds == chain


def test_more_branches_accept_more(lab_session):
    drafter, _ = lab_session.load()
    lengths = [replay_trees(drafter, lab_session.states()[:4], 1, k, k + 1).accept_length for k in (1, 2, 4, 8)]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0]


def test_the_walk_takes_one_path():
    tree = {-1: [(0, 7), (1, 8)], 0: [(2, 5)], 1: [(3, 9), (4, 6)], 4: [(5, 1)]}
    assert accepted(tree, (8, 6, 1, 3)) == 3
    assert accepted(tree, (7, 6)) == 1
    assert accepted(tree, (9,)) == accepted(tree, ()) == 0


def test_the_tree_holds_the_best_candidates_and_their_parents(lab_session):
    """Every node's score is at most its parent's, so the D - 1 best candidates always hang together."""
    drafter, _ = lab_session.load()
    s = lab_session.states()[0]
    ids, prefix, rows = torch.tensor(s.text.ids), Cache(), len(s.text.ids) - 1
    with torch.inference_mode():
        first = drafter.step(ids[1:], drafter.fuse(s.select(drafter.wiring)[:rows]), torch.arange(rows), prefix)
        tree = draft_tree(drafter, first[20:21], prefix, 21, 3, 4, 8)
        best = drafter.to_target(drafter.logits(first[20:21]).topk(4).indices)[0].tolist()
    nodes = {child for children in tree.values() for child, _ in children}
    assert len(nodes) == 7 and set(tree) - {-1} <= nodes
    assert {token for _, token in tree[-1]} <= set(best) and tree[-1][0][1] == best[0]
