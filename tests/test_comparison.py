"""Features that differ in one known way each are told apart, and two paths part where the fault is."""

from __future__ import annotations

import copy

import pytest
import torch

from kitlib.comparison import (
    compare_wirings,
    every_state,
    fit,
    fit_findings,
    fit_wirings,
    noise_floor,
)
from kitlib.divergence import MARGIN, diverge, error
from kitlib.features import Target
from kitlib.findings import KitError
from kitlib.switches import SWITCHES


@pytest.fixture(scope="module")
def known(tiny_session):
    """(states of every boundary, what training read, trained boundaries, noise floor)."""
    states = every_state(tiny_session.target, tiny_session.texts)
    trained = tiny_session.trained
    arriving = torch.cat([s.select(trained) for s in states])
    return states, arriving, trained.boundaries, noise_floor(tiny_session.target, tiny_session.texts[0])


def turned(x: torch.Tensor) -> torch.Tensor:  # [tokens, width]
    q, _ = torch.linalg.qr(torch.randn(x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(3)))
    return x @ q


def moved(states, boundaries, form="boundaries"):
    return torch.cat([torch.cat([getattr(s, form)[b] for b in boundaries], -1) for s in states])


CHANGES = {  # what is done to the trained features -> the codes that fail
    "as trained": (lambda s, x, b: x, set()),
    "scaled by 50": (lambda s, x, b: x * 50.6, {"F301"}),
    "one block scaled": (lambda s, x, b: torch.cat([x[:, :32] * 2, x[:, 32:]], -1), {"F301"}),
    "one block rotated": (lambda s, x, b: torch.cat([x[:, :64], turned(x[:, 64:])], -1), {"F302"}),
    "foreign": (lambda s, x, b: torch.randn(x.shape, generator=torch.Generator().manual_seed(4)), {"F302"}),
    "one higher": (lambda s, x, b: moved(s, [i + 1 for i in b]), {"F303"}),
    "other order": (lambda s, x, b: moved(s, b[::-1]), {"F303"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_gives_its_own_finding(known, change):
    states, arriving, trained, floor = known
    alter, codes = CHANGES[change]
    fits = fit(alter(states, arriving, trained), states, trained, floor)
    found = {f.code: f for f in fit_findings(fits, floor)}
    assert {c for c, f in found.items() if f.status == "fail"} == codes
    assert set(found) == {"F301", "F302", "F303"}
    if change == "other order":
        assert [f.boundary for f in fits] == list(trained[::-1]) and "order" in found["F303"].title
    if change in ("foreign", "one block rotated"):
        assert ("rotated" in found["F302"].title) == (change != "foreign")
    if change == "foreign":
        assert found["F301"].status == found["F303"].status == "not-run"


def test_post_norm_is_told_from_a_scale(tiny_session, known):
    """The norms of a random target are ones, and the state would only be scaled: they are drawn here."""
    model = copy.deepcopy(tiny_session.target.model)
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data = 1 + 0.3 * torch.rand(32, generator=generator)
    target = Target(model, None, tiny_session.target.info)
    states, trained = every_state(target, tiny_session.texts), known[2]
    fits = fit(moved(states, trained, "normed"), states, trained, known[3])
    assert [(f.form, f.boundary) for f in fits] == [("post-norm", b) for b in trained]
    (finding,) = [f for f in fit_findings(fits, known[3]) if f.status == "fail"]
    assert finding.code == "F301" and "post-norm" in finding.title


def test_floors_are_those_of_the_arithmetic(tiny_session):
    """float32 and bfloat16 lie as far from float64 as their floors say, within the margin that is allowed for."""
    text, floors = tiny_session.texts[0], {}
    depth = range(tiny_session.target.info.layers + 1)
    exact = Target(copy.deepcopy(tiny_session.target.model).double(), None, tiny_session.target.info)
    truth = exact.states(text, depth).boundaries
    for dtype in ("float32", "bfloat16"):
        model = copy.deepcopy(tiny_session.target.model).to(getattr(torch, dtype))
        target = Target(model, None, tiny_session.target.info)
        floors[dtype] = noise_floor(target, text)
        got = target.states(text, depth).boundaries
        assert max(error(got[b], truth[b]) for b in depth) < MARGIN * floors[dtype]
    assert 100 * floors["float32"] < floors["bfloat16"] < 0.1
    assert noise_floor(tiny_session.target, text, "bfloat16") > 100 * floors["float32"]


def test_neighbouring_layers_of_a_real_target_are_alike_and_still_told_apart(lab_session):
    """Cosine 0.9 and more to the layer beside it, and an error of thousands of noise floors."""
    up = lab_session.trained.but(boundaries=tuple(b + 1 for b in lab_session.trained.boundaries))
    every, floor = fit_wirings(lab_session, {"up": up})
    fits = every["up"]
    assert [f.boundary for f in fits] == list(up.boundaries) and max(f.error for f in fits) < floor
    states = every_state(lab_session.target, lab_session.texts[:2])
    a, b = (torch.cat([s.boundaries[i] for s in states]) for i in up.boundaries[1:][:1] for i in (i, i - 1))
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).mean() > 0.9 and error(a, b) > 1000 * floor
    assert [f.code for f in fit_findings(fits, floor) if f.status == "fail"] == ["F303"]


PARTS = {
    "fc-bypass-config": "features",
    "block-order": "features",
    "layer-dropped": "after the layers",
    "rope-theta": "after the layers",
    "tied-head": "logits",
    "d2t-absent": "drafts",
    "feedback-other": "feedback",
    "token-not-shifted": "embedding",
}


@pytest.mark.parametrize("switch", PARTS)
def test_the_paths_part_where_the_switch_is(tiny_session, switch):
    rows, finding = diverge(tiny_session, SWITCHES[switch](tiny_session.trained))
    assert (finding.code, finding.status, rows[-1]["tensor"]) == ("F304", "fail", PARTS[switch])
    assert all(r["error"] <= r["line"] for r in rows[:-1])


def test_equal_paths_do_not_part(tiny_session):
    rows, finding = diverge(tiny_session, tiny_session.trained)
    assert finding.status == "pass" and len(rows) == 11


def test_every_level_is_compared_and_acceptance_is_the_replay_s(tiny_session):
    wirings = {n: SWITCHES[n](tiny_session.trained) for n in ("layer-dropped", "fc-bypass-config")}
    first, dropped, bypassed = compare_wirings(tiny_session, {"as trained": tiny_session.trained} | wirings)
    for row, wiring in ((first, tiny_session.trained), (dropped, wirings["layer-dropped"])):
        assert row["accept length"] == tiny_session.measure(wiring).accept_length
    assert first["cosine"] == first["logits: cosine"] == pytest.approx(1) and first["same top-1"] == 1
    assert dropped["cosine"] == pytest.approx(1) and dropped["after the layers: cosine"] < 0.999
    assert bypassed["features: cosine"] is None and bypassed["width that arrives"] == 32 and bypassed["cosine"] < 0.9
    assert dropped["same top-1"] < 1 and dropped["same top-1"] <= dropped["in top-5"]


def test_features_of_other_texts_are_refused(known):
    states, arriving, trained, floor = known
    with pytest.raises(KitError, match="do not fit"):
        fit(arriving[:-1], states, trained, floor)
