"""Findings are data: one catalogue text behind the message, the JSON and `explain`; exit codes; atomic writes."""

from __future__ import annotations

import json
import os

import pytest

from kitlib.findings import Evidence, Finding, KitError, Report, catalogue, explain, merge_engines, write_atomic

FIELDS = {"slug", "severity", "title", "pass_title", "what", "cause", "effect", "fix"}


@pytest.mark.parametrize("code", sorted(catalogue()))
def test_every_code_has_every_text_and_explains_itself(code):
    entry = catalogue()[code]
    assert set(entry) >= FIELDS and all(entry[f] for f in FIELDS)
    assert entry["severity"] in ("error", "warning", "info")
    text = explain(code)
    assert text == explain(entry["slug"]) and entry["what"] in text and entry["fix"] in text


def test_slugs_are_unique():
    slugs = [e["slug"] for e in catalogue().values()]
    assert len(slugs) == len(set(slugs))


def test_unknown_code_is_one_sentence():
    with pytest.raises(KitError, match="no finding 'K999'"):
        explain("K999")


def test_text_form_names_code_engine_evidence_and_fix():
    finding = Finding.of(
        "K102", "ten names", engine="sglang==0.5.9", evidence=[Evidence("header", "layers.0.x", {"n": 10})]
    )
    text = str(finding)
    assert text.startswith("[✗] K102 key-naming · sglang==0.5.9\n    ten names\n")
    assert "header: layers.0.x" in text and "fix" in text and "explain K102" in text


def test_exit_codes_and_verdicts():
    error, passed = Finding.of("K102"), Finding.of("K102", status="pass")
    warning = Finding.of("K104")
    assert Report({}, (error, passed)).exit_code == 1
    assert Report({}, (warning, passed)).exit_code == 0
    assert "sick: K102" in Report({}, (error,)).verdict()
    assert Report({}, ()).verdict().startswith("? undecided")
    assert "1 not run" in Report({}, (passed,), ({"slug": "probe", "reason": "no wheel"},)).verdict()
    assert Finding.of("K102", status="crashed").is_error


def test_not_run_is_never_a_pass():
    report = Report({}, (Finding.of("K130", status="not-run"),))
    assert report.verdict().startswith("?")


def test_json_round_trip(tmp_path):
    finding = Finding.of("K110", evidence=[Evidence("tensor", "d2t", {"first": [0, 1]})])
    report = Report({"drafter": "x"}, (finding,), ({"slug": "a", "reason": "b"},), {"acceptance": {"rounds": 3}})
    again = Report.load(report.save(tmp_path / "findings.json"))
    assert again == report
    raw = json.loads((tmp_path / "findings.json").read_text())
    assert {"kitlib", "subject", "findings", "not_run", "acceptance"} == set(raw)
    assert raw["findings"][0]["code"] == "K110" and raw["findings"][0]["evidence"][0]["values"] == {"first": [0, 1]}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kitlib": 1}', '{"kitlib":"0","findings":[{}],"subject":{},"not_run":[]}']
)
def test_a_foreign_file_is_no_report(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(KitError, match="not a report"):
        Report.load(tmp_path / "x.json")


def test_merge_joins_adjacent_releases_only():
    releases = [f"sglang==0.5.{i}" for i in range(1, 7)]
    found = [(r, Finding.of("K102", engine=r)) for r in releases[:3]] + [
        (releases[5], Finding.of("K102", engine=releases[5]))
    ]
    merged = merge_engines(releases, found)
    assert [f.engine for f in merged] == ["sglang>=0.5.1,<=0.5.3", "sglang==0.5.6"]


def test_write_atomic_leaves_the_old_content_when_it_fails(tmp_path, monkeypatch):
    file = write_atomic(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(KitError, match="Cannot write"):
        write_atomic(file, "new")
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
