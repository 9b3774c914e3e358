"""A strict report: what papermill forgives is refused or named, and nothing foreign is touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kitlib import report
from kitlib.findings import KitError, Report
from kitlib.report import pages

PARAMETERS = """\
drafter: str = ""              # where path = folder; papermill's own reader loses this line
target: str | None = None      # and this one
features: str = ""
seed: int = 0
rate: float = 0.5
deep: bool = False
layers: list[int] = []
out: str = ""
"""
MAKE = """\
from kitlib import show
from kitlib.findings import Evidence, Finding, Report
import os, sys
found = (Finding.of("K103", status="pass"), Finding.of("K130", status="not-run"))
left = ({"slug": "key-naming", "reason": "no target"}, {"slug": "missing-weights", "reason": "not here"})
"""
SAVE = 'show.verdict(r := Report({"drafter": drafter}, found, left, {}), r.save(f"{out}/STEM.json"))'


def book(folder, stem, *cells, parameters=PARAMETERS, save=SAVE):
    """A notebook `stem` with a parameters cell, the set-up, these cells (# makes markdown) and a verdict."""
    first = new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    body = [new_markdown_cell(c) if c.startswith("#") else new_code_cell(c) for c in cells]
    last = [new_code_cell(save.replace("STEM", stem))] if save else []
    notebook = new_notebook(cells=[new_markdown_cell(f"# The {stem}"), first, new_code_cell(MAKE), *body, *last])
    path = folder / f"{stem}.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One report over five notebooks, in a folder with braces, beside a broken kernel `python3`."""
    home = tmp_path_factory.mktemp("ho{me}")
    books = [
        book(
            home,
            "01_healthy",
            "## Look\nsee [the next](02_exit.ipynb)",
            "\n# a cell that only holds a comment",
            "facts = dict(python=sys.executable, cwd=os.getcwd(), headless=os.environ['KITLIB_HEADLESS'])\n"
            "facts |= dict(drafter=drafter, target=target, seed=seed, rate=rate, deep=deep, layers=layers)\n"
            "import json; open(f'{out}/facts.json', 'w').write(json.dumps(facts))",
            "print('key hf_abcdefgh1234', out)",
            "for _ in show.progress(range(3), desc='prompts'): pass",
            "show.accept_lengths([{'name': 'wired <b>', 'accept_length': 1.6, 'interval': (1.5, 1.7)}])",
            "from IPython.display import HTML; HTML('<script src=\"https://cdn.example/x.js\"></script>')",
        ),
        book(home, "02_exit", "## Half way", "import sys\nsys.exit(0)"),
        book(home, "03_failing", "## Divide", "1 / 0"),
        book(home, "04_killed", "## Kill", "os.kill(os.getpid(), 9)"),
        book(home, "05_unsaved", save=""),
    ]
    spec = home / "share" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["false"], "display_name": "broken", "language": "python"}))
    (home / "my.safetensors").touch()
    said = []
    pairs = ["drafter=007", "target=./my.safetensors", "rate=1", "deep=true", "layers=[2, 15]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("JUPYTER_DATA_DIR", str(home / "share"))
        before = dict(os.environ)
        merged = report.run(report.parse_params(pairs), home / "out", books, echo=said.append)
        assert dict(os.environ) == before
    return home, merged, said


def test_parameters_arrive_in_the_types_of_the_notebook_and_the_kernel_is_this_python(done):
    home, _, _ = done
    facts = json.loads((home / "out" / "facts.json").read_text())
    assert facts.pop("cwd") == str(home)
    assert facts == {
        "python": sys.executable,
        "headless": "1",
        "drafter": "007",
        "target": str(home / "my.safetensors"),
        "seed": 0,
        "rate": 1.0,
        "deep": True,
        "layers": [2, 15],
    }


def test_what_crashed_is_named_with_its_cell_and_the_rest_ran(done):
    _, merged, said = done
    verdicts = {one["notebook"]: one["verdict"] for one in merged.extra["notebooks"]}
    assert verdicts.pop("01_healthy") == "✓ no error found in 1 checks · 3 not run"
    assert verdicts == {
        "02_exit": "☠ crashed: it ended before its last cell, in the cell under “Half way” that begins `import sys`",
        "03_failing": "☠ crashed: ZeroDivisionError: division by zero, in the cell under “Divide” that begins `1 / 0`",
        "04_killed": "☠ crashed: DeadKernelError: Kernel died, in the cell under “Kill” that begins "
        "`os.kill(os.getpid(), 9)`",
        "05_unsaved": "☠ crashed: it saved no findings as 05_unsaved.json",
    }
    crashed = [f for f in merged.findings if f.status == "crashed"]
    assert [f.title.split()[1] for f in crashed] == list(verdicts) and merged.exit_code == 1
    assert said[-2] == merged.verdict() and str(done[0] / "out" / "index.html") in said[-1]


def test_merged_findings_are_saved_once_and_what_one_notebook_ran_is_not_listed_as_not_run(done):
    home, merged, _ = done
    loaded = Report.load(home / "out" / "findings.json")
    assert loaded.verdict() == merged.verdict()
    assert [f.code for f in loaded.findings].count("K103") == 1
    assert [item["slug"] for item in loaded.not_run] == ["key-naming"]
    assert loaded.subject == {"drafter": "007"}
    seconds = sum(one["seconds"] for one in loaded.extra["notebooks"])
    assert loaded.extra["notebook_seconds"] == pytest.approx(seconds, abs=0.05) and seconds > 0
    assert loaded.extra["provenance"]["kitlib"] and loaded.extra["parameters"]["layers"] == "[2, 15]"


def test_pages_load_nothing_from_outside_show_no_code_and_keep_alt_text(done):
    home, _, _ = done
    for page in (home / "out").glob("*.html"):
        html = page.read_text()
        assert not re.search(r"<(script|link|iframe)\b|@import|url\(", html)
        assert all(src.startswith("data:") for src in re.findall(r'<img[^>]*src="([^"]*)"', html))
        assert "color-scheme:light dark" in html
    html = (home / "out" / "01_healthy.html").read_text()
    assert re.search(r'<img[^>]*alt="Dots with intervals[^"]*wired &lt;b&gt;', html)
    assert "safetensors" not in html and "show.progress" not in html
    assert 'href="02_exit.html"' in html and "prompts: 100%" in html and "prompts:   0%" not in html
    assert "ZeroDivisionError" in (home / "out" / "03_failing.html").read_text()


def test_nothing_leaks(done):
    home, _, _ = done
    for path in (p for p in (home / "out").rglob("*") if p.is_file()):
        text = path.read_text()
        assert "hf_abcdefgh1234" not in text and ".build-" not in text, path
    printed = (home / "out" / "01_healthy.html").read_text()
    assert f"key [redacted] {home / 'out'}" in printed
    assert sorted(os.listdir(home / "share")) == ["kernels"]


def test_index_and_summary_say_the_same_as_the_findings(done):
    home, merged, _ = done
    index = (home / "out" / "index.html").read_text()
    assert merged.verdict() in index and "not run: key-naming (no target)" in index
    for one in merged.extra["notebooks"]:
        assert f'<a href="{one["notebook"]}.html">' in index
    assert (home / "out" / "summary.md").read_text().startswith(f"**{merged.verdict()}**")


def test_an_exit_in_the_last_cell_is_seen():
    begun = {"papermill": {"exception": False}}
    ran = {"cell_type": "code", "source": ["a\n", "b"], "outputs": [], "metadata": begun}
    left = {"output_type": "error", "ename": "SystemExit", "evalue": "0", "traceback": []}
    assert report._stopped([ran, {**ran, "source": " ", "metadata": {}}]) == ""
    assert report._stopped([{**ran, "source": "c"}, {**ran, "outputs": [left]}]).endswith("that begins `a`")
    assert report._stopped([ran, {**ran, "source": "c", "metadata": {}}]).endswith("that begins `a`")


def test_a_second_report_replaces_the_first_and_nothing_else(tmp_path, monkeypatch):
    def execute(path, params, build):
        Report({}).save(build / f"{path.stem}.json")
        (build / "executed").mkdir()
        shutil.copy(path, build / "executed")
        return {"notebook": path.stem, "verdict": "", "seconds": 1.0, "problem": "", "report": Report({})}

    monkeypatch.setattr(report, "_execute", execute)
    first, second = book(tmp_path, "01_a"), book(tmp_path, "02_b")
    out = tmp_path / "out"
    report.run({}, out, [first], echo=str)
    (out / "notes.txt").write_text("mine")

    def interrupted(line):
        raise KeyboardInterrupt

    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != report.MARKER}
    with pytest.raises(KeyboardInterrupt):
        report.run({}, out, [second], echo=interrupted)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != report.MARKER}
    (out / "02_b.html").write_text("mine")
    with pytest.raises(KitError, match=r"02_b\.html was made by no report"):
        report.run({}, out, [second], echo=str)
    (out / "02_b.html").unlink()
    report.run({}, out, [second], echo=str)
    assert (out / "notes.txt").read_text() == "mine"
    left = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    made = ["02_b.html", "02_b.json", "executed/02_b.ipynb", "findings.json", "index.html", "summary.md"]
    assert left == sorted([report.MARKER, *made, "notes.txt"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"drafterr": "x"}, r"^No notebook has a parameter 'drafterr'; did you mean 'drafter'\?$"),
        ({"zzz": "x"}, "they know deep, drafter, features, layers, rate, seed, target"),
        ({"out": "x"}, "--out"),
        ({"seed": "many"}, "^Parameter 'seed' takes int, not 'many'"),
        ({"seed": "1.5"}, "takes int"),
        ({"seed": True}, "takes int"),
        ({"deep": "1"}, "takes bool"),
        ({"layers": "2,15"}, "takes list"),
        ({"drafter": 7}, "takes str, not 7"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_written(tmp_path, params, message):
    with pytest.raises(KitError, match=message):
        report.run(params, tmp_path / "out", [book(tmp_path, "01_a")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "cell", ["a = 1\nb: int = a * 2", "import os", "a, b = 1, 2", "x: int", "%matplotlib inline", "a = ("]
)
def test_a_parameters_cell_that_is_not_literal_is_refused(tmp_path, cell):
    with pytest.raises(KitError, match="must hold `name: type = literal` lines only"):
        report.parameters(book(tmp_path, "01_a", parameters=cell))


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"cells": 3}'])
def test_a_notebook_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "01_a.ipynb"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KitError, match=r"^Cannot run .*01_a\.ipynb"):
        report.run({}, tmp_path / "out", [path])


def test_two_notebooks_of_one_name_are_refused(tmp_path):
    with pytest.raises(KitError, match="a name of its own"):
        report.run({}, tmp_path / "out", [tmp_path / "a" / "01.ipynb", tmp_path / "b" / "01.ipynb"])


def test_a_folder_that_is_not_ours_is_refused_and_untouched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(KitError, match=r"holds files that no report made; choose another folder with --out\.$"):
        report.run({}, out, [book(tmp_path, "01_a")])
    assert os.listdir(out) == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    places = [tmp_path / "file", tmp_path / "file" / "out"]
    places += ["/proc/kit-report"] if sys.platform == "linux" else []
    for out in places:
        with pytest.raises(KitError, match="Cannot write a report in"):
            report.run({}, out, [book(tmp_path, "01_a")])


def test_params_from_a_file_stay_as_written_and_pairs_win(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("drafter: 007\ndeep: yes\nlayers: [2, 15]\nseed: 1\n")
    params = report.parse_params(["seed=3", "launch=a=b --c d"], file)
    assert params == {
        "drafter": "007",
        "deep": "yes",
        "layers": ["2", "15"],
        "seed": "3",
        "launch": "a=b --c d",
    }
    path = book(tmp_path, "01_a")
    params = {name: params[name] for name in ("drafter", "layers", "seed")}
    assert report.params.assign(params, [path])[path] == {"drafter": "007", "layers": [2, 15], "seed": 3}


@pytest.mark.parametrize("text", ["- a\n", "a: [1\n", "\udcff"])
def test_a_params_file_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "p.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(KitError, match=re.escape(str(file))):
        report.parse_params([], file)
    with pytest.raises(KitError):
        report.parse_params([], tmp_path / "missing.yaml")
    with pytest.raises(KitError, match="name=value"):
        report.parse_params(["seed"], None)


@pytest.mark.parametrize(
    ("value", "resolved"),
    [("here", True), ("./absent", True), ("org/name", False), ("", False), ("~/absent", True)],
)
def test_paths_are_resolved_against_the_callers_folder(tmp_path, monkeypatch, value, resolved):
    (tmp_path / "here").mkdir()
    path = book(tmp_path, "01_a")
    monkeypatch.chdir(tmp_path)
    got = report.params.assign({"drafter": value}, [path])[path]["drafter"]
    assert got == (os.path.abspath(os.path.expanduser(value)) if resolved else value)


@pytest.mark.parametrize(
    "text",
    [
        "--api-key 'tops3cret'", '--api-key "tops3cret"', "--api_key  tops3cret", "HF_TOKEN='tops3cret'",
        'OPENAI_API_KEY="tops3cret"', "DB_PASSWORD=tops3cret", "TOKEN=tops3cret", "--hf-token tops3cret",
        "http://u:tops3cret@h", '--api-key \\"tops3cret\\"', "AWS_SECRET_ACCESS_KEY=tops3cret",
        "--api-key &#x27;tops3cret&#x27;", "--ssl-keyfile-password tops3cret",
    ],
)  # fmt: skip
def test_redact_in_quotes_json_and_html(text):
    assert "tops3cret" not in pages.redact(f"before {text} after") and "after" in pages.redact(f"before {text} after")


@pytest.mark.parametrize("marker", ["5", '[["a"]]', '["../x"]', '["/etc/passwd"]', "{"])
def test_a_foreign_marker_is_refused(tmp_path, marker):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".kitlib-report").write_text(marker)
    with pytest.raises(KitError, match="Cannot write a report"):
        report.run({}, tmp_path / "out", [book(tmp_path, "01_a")])


def test_redact_leaves_what_only_sounds_secret():
    text = "--speculative-num-draft-tokens 5 --tokenizer-path abc --speculative-token-map m num_tokens=4"
    assert pages.redact(text) == text


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijkl",
        "sk-abcdefghijkl",
        "--api-key tops3cret",
        "--admin-api-key=tops3cret",
        "HF_TOKEN=tops3cret",
    ],
)
def test_redact(secret):
    kept = re.split("[ =]", secret)[0] if "tops3cret" in secret else ""
    assert re.fullmatch(rf'"{kept}[ =]?\[redacted\] --next"', pages.redact(f'"{secret} --next"'))
    assert (
        pages.redact("the target's own token is first; eos_token=2") == "the target's own token is first; eos_token=2"
    )
