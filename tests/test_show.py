"""What notebooks show: text and HTML from the same rows, alt text, headless behaviour."""

from __future__ import annotations

import base64
import math
import re
import subprocess
import sys
from datetime import datetime, timedelta
from html.parser import HTMLParser

import IPython.display
import numpy as np
import pytest

from kitlib import show
from kitlib.findings import STATUSES, Evidence, Finding, Fix, Report

WIRINGS = [
    {"name": "wired as trained", "accept_length": 1.64, "interval": (1.55, 1.72), "role": "trained"},
    {"name": "layer $dropped$ <b>", "accept_length": 1.05, "interval": (1.03, 1.08), "role": "fault"},
    {"name": "on a server", "accept_length": None, "interval": None, "role": "control"},
]
SICK = Finding.of(
    "K102", engine="sglang==0.5.9", evidence=[Evidence("header", "<script>alert(1)</script> `layers.0.*`")]
)


@pytest.fixture
def shown(monkeypatch):
    """Everything displayed, as (thing, metadata)."""
    things = []
    monkeypatch.setattr(
        IPython.display, "display", lambda thing, raw=False, metadata=None: things.append((thing, metadata))
    )
    return things


class Tags(HTMLParser):
    """Every tag with its attributes; fails on a tag that is closed but not open."""

    def __init__(self, html):
        super().__init__()
        self.seen, self.open = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("br", "img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_importing_kitlib_or_show_imports_no_plotting():
    heavy = {"matplotlib", "IPython", "ipywidgets", "torch"}
    code = f"import sys, kitlib, kitlib.show; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (49152, "49,152"),
        (1.64, "1.640"),
        (0.0, "0.000"),
        (3.1e-5, "3.10e-05"),
        (123.456, "123.5"),
        (12345.6, "12,346"),
        (math.nan, "nan"),
        (np.float32(0.5), "0.500"),
        (np.int64(7), "7"),
        (np.array([1.0, 2.0]), "[1.000, 2.000]"),
        ((1.5, None), "[1.500, –]"),
        ("two\nlines", "two lines"),
    ],
)
def test_number(value, text):
    assert show.number(value) == text


def test_table_text_is_aligned_and_names_the_status():
    rows = [
        {"name": "fc.weight", "size": 995328, "_status": "loaded", "_hidden": 1},
        {"name": "midlayer.x", "size": 5, "_status": "missing"},
        {"name": "t2d"},
    ]
    assert str(show.table(rows, caption="Keys")).splitlines() == [
        "Keys",
        "status     name           size",
        "─────────  ──────────  ───────",
        "✓ loaded   fc.weight   995,328",
        "✗ missing  midlayer.x        5",
        "           t2d",
    ]


def test_table_html_is_escaped_labelled_and_marked_beyond_colour():
    block = show.table(
        [{"<i>": "<script>", "x": 1.5}], caption="a & b", mark=lambda row: "fail" if row["x"] > 1 else None
    )
    tags = Tags(block._repr_html_())
    assert not {"script", "i"} & {tag for tag, _ in tags.seen}
    assert "<caption>a &amp; b</caption>" in block.body
    assert [a["scope"] for tag, a in tags.seen if tag == "th"] == ["col", "col", "col", "row"]
    assert 'class="kit-bad"' in block.body and "✗ fail" in block.body
    assert "var(--jp-content-font-color1,inherit)" in block._repr_html_()


def test_table_without_rows_says_so_and_unknown_status_raises():
    assert "(no rows)" in str(show.table([])) and "(no rows)" in show.table([]).body
    with pytest.raises(KeyError):
        show.table([{"a": 1, "_status": "lodaed"}])


def test_every_finding_status_has_a_look():
    assert set(STATUSES) <= set(show.STATUS)


def test_findings_text_is_the_findings_own_and_html_is_escaped():
    report = Report({}, (Finding.of("K103", status="pass"), SICK), ({"slug": "server", "reason": "no GPU"},))
    block = show.findings(report)
    assert str(block).startswith(str(SICK)) and str(block).endswith("[?] not run: server (no GPU)")
    tags = Tags(block._repr_html_())
    assert "script" not in {tag for tag, _ in tags.seen}
    assert [("open" in a) for tag, a in tags.seen if tag == "details"] == [True, False]
    assert "<code>layers.0.*</code>" in block.body and SICK.cause.split("(")[0].strip() in block.body
    fixed = Finding.of("K102", fix=Fix("rename", "python -m kitlib convert a b && <x>"))
    assert "<code>python -m kitlib convert a b &amp;&amp; &lt;x&gt;</code>" in show.findings([fixed]).body


@pytest.mark.parametrize(
    ("found", "tone"), [((SICK,), "bad"), ((Finding.of("K103", status="pass"),), "good"), ((), "warn")]
)
def test_verdict(found, tone):
    report = Report({}, found)
    block = show.verdict(report, "out/<01>.json")
    assert str(block) == f"{report.verdict()}\nfindings saved in out/<01>.json"
    assert f"kit-{tone}" in block.body and "out/&lt;01&gt;.json" in block.body


def test_provenance_is_folded():
    assert show.provenance({"torch": "2.13.0"}).body.startswith("<details><summary>Provenance")


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: show.accept_lengths(WIRINGS, expected=1.75), ["wired as trained", "1.640", "1.75"]),
        (lambda: show.histogram([{"name": "a", "histogram": [380, 130, 60]}]), ["380", "130"]),
        (lambda: show.by_position([{"name": "a", "by_position": np.array([0.38, 0.1])}]), ["0.380", "0.100"]),
        (
            lambda: show.norms([{"name": "b=2", "norm_ratio": 0.3, "cosine": 0.2, "top1": 0.1}]),
            ["0.300", "0.200"],
        ),
    ],
)
def test_figures_have_alt_text_and_a_table_with_the_same_numbers(shown, draw, said):
    assert draw() is None
    (bundle, metadata), (table, _) = shown
    png = base64.b64decode(bundle["image/png"])
    alt = metadata["image/png"]["alt"]
    assert png.startswith(b"\x89PNG") and len(png) > 5000 and alt == bundle["text/plain"]
    for text in said:
        assert text in alt and text in str(table)


def test_accept_length_that_was_not_run_is_not_drawn_as_a_number(shown):
    show.accept_lengths(WIRINGS)
    row = str(shown[1][0]).splitlines()[-1]
    assert row.startswith("? not-run") and not re.search(r"\d", row)


def test_figure_requires_alt_text_and_closes_pyplot_figures(shown):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig = plt.figure()
    with pytest.raises(TypeError):
        show.figure(fig)
    with pytest.raises(ValueError, match="alt text"):
        show.figure(fig, " ")
    show.figure(fig, "an empty square")
    assert not plt.fignum_exists(fig.number) and len(shown) == 1


def test_progress_leaves_its_last_state_in_plain_text_when_headless(monkeypatch, capsys):
    monkeypatch.setenv("KITLIB_HEADLESS", "1")
    assert list(show.progress(range(3), desc="prompts")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert "prompts: 100%" in captured.out and "3/3" in captured.out and captured.err == ""


def test_interactive_needs_a_front_end(monkeypatch):
    monkeypatch.delenv("KITLIB_HEADLESS", raising=False)
    assert not show.interactive()
    kernel = type("Shell", (), {"kernel": 1, "user_ns": {}})()
    monkeypatch.setattr(IPython, "get_ipython", lambda: kernel)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert not show.interactive()  # bare papermill or nbconvert
    kernel.user_ns["__vsc_ipynb_file__"] = "a.ipynb"
    assert show.interactive()
    kernel.user_ns.clear()
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    assert show.interactive()
    monkeypatch.setenv("KITLIB_HEADLESS", "1")
    assert not show.interactive()


def test_selector_shows_the_static_result_only_when_headless(monkeypatch, shown):
    monkeypatch.setenv("KITLIB_HEADLESS", "1")
    show.selector({"a": 1, "b": 2}, lambda name: f"result {name}", default="b")
    assert shown == [("result b", None)]


def test_selector_shows_the_static_result_then_a_control(monkeypatch, shown):
    monkeypatch.setenv("KITLIB_HEADLESS", "0")
    show.selector({"a": 1, "b": 2}, lambda name: f"result {name}", default="b")
    assert shown[0] == ("result b", None) and len(shown) == 2
    control, _ = shown[1][0].children
    assert control.options == ("a", "b") and control.value == "b"
    control.value = "a"
    assert shown[-1] == ("result a", None)


def test_selector_without_ipywidgets_is_static(monkeypatch, shown):
    monkeypatch.setenv("KITLIB_HEADLESS", "0")
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    show.selector(["a"], str.upper, default="a")
    assert shown == [("A", None)]


def test_timeline_shows_both_clocks_and_the_polling_error(shown):
    day = datetime(2026, 1, 1, 16, 26, 59)
    events = [
        {"clock": "health", "what": "503", "time": day, "since": None},
        {"clock": "log", "what": "ready", "time": day + timedelta(seconds=5), "since": None},
        {"clock": "health", "what": "200", "time": day + timedelta(seconds=10), "since": day},
    ]
    show.timeline(events)
    (drawn, metadata), (rows, _) = shown
    alt = metadata["image/png"]["alt"]
    assert "16:27:04" in alt and "16:27:09" in alt and "error_bar_s 10.000" in alt
    assert "16:27:09" in rows.text and drawn["text/plain"] == alt
    shown.clear()
    show.timeline([])
    assert "(no rows)" in shown[-1][0].text
