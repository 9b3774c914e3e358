"""Wiring search: every single switch is found again from what it accepts, two together as well, and weaker evidence
gives a set that holds the truth."""

from __future__ import annotations

import json

import pytest

from kitlib.acceptance import Acceptance
from kitlib.findings import KitError
from kitlib.observed import Observed
from kitlib.search import search, search_findings
from kitlib.switches import SWITCHES, candidates


def test_every_single_switch_is_found_by_its_rounds(tiny_session):
    wirings = candidates(tiny_session.trained, tiny_session.contract, tiny_session.target.info.layers)
    assert len(wirings) > 15 and "as trained" in wirings
    for name, wiring in wirings.items():
        found = search(tiny_session, Observed.of(tiny_session.measure(wiring)), pairs=False)
        assert found.exact and name in found.alike, (name, found.alike)


def test_two_switches_together_are_found_as_a_pair(tiny_session):
    wiring = SWITCHES["fc-bypass-config"](SWITCHES["layer-dropped"](tiny_session.trained))
    found = search(tiny_session, Observed.of(tiny_session.measure(wiring)))
    assert found.exact and wiring in [r.wiring for r in found.ranked if r.name in found.alike]
    (finding,) = search_findings(found)
    assert finding.code == "M208" and finding.status == "fail" and found.alike[0] in finding.title


@pytest.mark.parametrize("strength", ["histogram", "totals"])
def test_weaker_evidence_gives_a_set_that_holds_the_truth(tiny_session, strength):
    for name in ("as trained", "fc-bypass-config", "d2t-absent", "layer-dropped", "token-not-shifted"):
        wiring = candidates(tiny_session.trained, tiny_session.contract, tiny_session.target.info.layers)[name]
        found = search(tiny_session, Observed.of(tiny_session.measure(wiring), strength), pairs=False)
        assert not found.exact and name in found.alike
        assert 1 <= len(found.alike) < len(found.ranked) or strength == "totals"
        assert found.odds(found.alike[0]) == pytest.approx(1.0) and min(map(found.odds, found.alike)) >= 1.0


def test_the_healthy_drafter_passes(tiny_session):
    (finding,) = search_findings(search(tiny_session, Observed.of(tiny_session.measure()), pairs=False))
    assert finding.status == "pass"


def test_observations_are_read_from_bench_and_from_totals(tmp_path):
    file = tmp_path / "o.json"
    each = [{"prompt": 1, "counts": {"histogram": [0, 2, 1]}}, {"prompt": 0, "counts": {"histogram": [3]}}]
    file.write_text(json.dumps({"bench": {"requests": each, "verified": 6, "accepted": 4, "histogram": [3, 2, 1]}}))
    assert Observed.read(file) == Observed.of(Acceptance(((0, 0, 0), (1, 1, 2)), 2))
    file.write_text(json.dumps({"accepted": 4, "verified": 6}))
    assert Observed.read(file) == Observed((), (), 4, 6)
    file.write_text(json.dumps({"histogram": [3, 2, 1], "verified": 6}))
    assert Observed.read(file).histogram == (3, 2, 1) and Observed.read(file).accepted == 4
    for bad in ("", "[]", '{"accepted": 1}', '{"accepted": 0, "verified": 0}', '{"verified": "x"}'):
        file.write_text(bad)
        with pytest.raises(KitError):
            Observed.read(file)


def test_other_prompts_are_refused(tiny_session):
    with pytest.raises(KitError, match="use the same"):
        search(tiny_session, Observed(((0,),), (1,), 0, 1))


@pytest.mark.parametrize(
    "bad",
    [
        '{"histogram": [-50, 100]}', '{"histogram": [1.5, 2.5]}', '{"rounds": ["12"]}', '{"rounds": [[0.9]]}',
        '{"accepted": 1e999, "verified": 5}', '{"accepted": 1, "verified": Infinity}', '{"histogram": [1e999, 1]}',
        "[" * 100000, '{"rounds": [[100000000000]]}', '{"histogram": [3, 1], "accepted": 5, "verified": 4}',
    ],
)  # fmt: skip
def test_impossible_observations_are_refused_in_a_short_sentence(tmp_path, bad):
    (tmp_path / "o.json").write_text(bad)
    with pytest.raises(KitError) as error:
        Observed.read(tmp_path / "o.json")
    assert len(str(error.value)) < 400
    (tmp_path / "o.json").write_bytes(bytes(range(256)) * 1000)
    with pytest.raises(KitError) as error:
        Observed.read(tmp_path / "o.json")
    assert len(str(error.value)) < 400


def test_more_drafts_than_steps_are_refused(tiny_session):
    for observed in (Observed((), (), 1000, 5), Observed((), (0, 0, 0, 0, 0, 0, 1), 6, 1)):
        with pytest.raises(KitError, match="4 steps"):
            search(tiny_session, observed)
