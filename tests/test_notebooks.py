"""Notebook hygiene by reading, and one healthy run of each as `make report` does it."""

from __future__ import annotations

import ast
import json

import nbformat
import papermill
import pytest

from kitlib.paths import NOTEBOOKS, ROOT

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))


def cells(path, kind="code"):
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == kind]


def test_they_are_there():
    assert [p.stem[:2] for p in ALL][:5] == ["00", "01", "02", "03", "04"]


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
class TestHygiene:
    def test_thin_and_clean(self, path):
        code = cells(path)
        assert len(code) <= 12
        for cell in code:
            assert not cell.outputs and cell.execution_count is None
            tagged = "parameters" in cell.metadata.get("tags", [])
            assert tagged or len(cell.source.splitlines()) <= 10
            assert "!pip" not in cell.source and "%pip" not in cell.source and "sys.path" not in cell.source
            for node in ast.walk(ast.parse(cell.source)):
                assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        raw = json.loads(path.read_text())
        assert raw["metadata"]["kernelspec"]["name"] == "python3" and "papermill" not in raw["metadata"]

    def test_parameters_are_seen_by_papermill(self, path):
        cell = next(c for c in cells(path) if "parameters" in c.metadata.get("tags", []))
        names = {n.target.id for n in ast.parse(cell.source).body if isinstance(n, ast.AnnAssign)}
        seen = papermill.inspect_notebook(str(path))
        assert set(seen) == names and {"drafter", "target", "out"} <= names
        assert all(p["help"] and p["inferred_type_name"] in ("str", "int", "float", "bool") for p in seen.values())

    def test_reads_as_a_page_and_ends_in_a_verdict(self, path):
        text = [c.source for c in cells(path, "markdown")]
        heads = [line for t in text for line in t.splitlines() if line.startswith("#")]
        assert heads[0].startswith("# ") and sum(h.startswith("# ") for h in heads) == 1
        assert "**Question.**" in text[0] and "*Time:" in text[0]
        assert any(h == "## Verdict" for h in heads) and "show.verdict(" in cells(path)[-1].source
        anchors = {h.lstrip("# ").replace(" ", "-") for h in heads}
        wanted = {part.split(")")[0] for part in text[0].split("](#")[1:]}
        assert wanted <= anchors, wanted - anchors

    def test_machine_paths_and_private_words_are_absent(self, path):
        raw = path.read_text()
        assert str(ROOT) not in raw and "/home/" not in raw and "/root" not in raw


@pytest.fixture(scope="module")
def made(lab_session, tmp_path_factory):
    from kitlib.report import run

    out = tmp_path_factory.mktemp("report") / "lab"
    small = {"max_new_tokens": 64, "device": "cpu", "dtype": "float32"}
    return run(small, out, [p for p in ALL if p.stem[:2] in ("00", "01", "02", "03", "04")], echo=lambda *_: None), out


def test_the_whole_report_on_the_lab(made):
    report, out = made
    assert report.exit_code == 0, report.verdict()
    assert (out / "index.html").is_file() and (out / "findings.json").is_file()
    codes = {f.code for f in report.findings if f.status == "pass"}
    assert {"K101", "K102", "K103", "K110", "K130", "K133", "F302", "F303", "M201", "M202"} <= codes


def test_the_story_was_found_stage_by_stage(made):
    _, out = made
    story = json.loads((out / "01_inspect_checkpoint.json").read_text())["story"]
    assert [set(s["planted"]) <= set(s["found"]) for s in story] == [True, True]
    assert {"key-naming", "fc-bypassed"} <= set(story[0]["found"]) and "key-naming" not in story[1]["found"]


def test_the_numbers_of_the_story(made):
    _, out = made
    got = json.loads((out / "04_measure_acceptance.json").read_text())["acceptance"]
    length = {name: a["accept_length"] for name, a in got.items()}
    assert length["as trained"] == length["3 served right"] >= 1.6
    assert length["1 keys dropped, one layer fed"] <= 1.15 and length["2 names repaired, one layer fed"] <= 1.10
    assert length["one layer fed, capture off"] <= 1.10 and length["random drafter"] <= 1.02
    page = (out / "04_measure_acceptance.html").read_text()
    assert "0.20" in page and "a/(v*(D-1))" in page


def test_pages_stand_alone_and_speak(made):
    _, out = made
    for page in out.glob("*.html"):
        html = page.read_text()
        assert "<script" not in html and 'src="http' not in html
        for tag in html.split("<img")[1:]:
            assert 'alt="' in tag.split(">")[0] and 'alt=""' not in tag.split(">")[0]
