"""`make verify`: draft trees and flags on the real engine against the replay; the lab, float32, greedy, CPU engine.

The table and the picture go to data/verified/flag-matrix.{md,png} once every row has run, whatever came out.
"""

from __future__ import annotations

import importlib.util

import pytest
from verified import write_table

from kitlib import show
from kitlib.matrix import GRID, Flags, flag_matrix, matrix_findings
from kitlib.paths import DATA
from kitlib.server import Launch, bench, start
from kitlib.server.paired import differences
from kitlib.workbench import Workbench

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
PROMPTS, TOKENS = 8, 32


@pytest.fixture(scope="module")
def workbench(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("matrix"))
    return Workbench(device="cpu", dtype="float32", prompt_count=PROMPTS, max_new_tokens=TOKENS, out=out)


def other(workbench, launch: Launch, name: str, logs) -> dict:
    """A row for an algorithm that reads no EAGLE-3 drafter."""
    texts = workbench.session.texts
    with start(launch, logs, engine="cpu", interval_s=2.0, limit_s=600.0) as server:
        assert server.ready, server.findings[0]
        run = bench(server, [t.ids[: t.prompt] for t in texts], max_new_tokens=TOKENS, clients=4)
    apart, compared = differences(run, [t.answer for t in texts])
    row = {"name": name, "accept_length": run.accept_length, "interval": run.interval, "histogram": run.histogram}
    return {**row, "texts as the target's own": f"{compared - len(apart)} of {PROMPTS}", "tokens/s": run.tokens_per_s}


def test_the_grid(workbench, lab_target, tmp_path, monkeypatch):
    rows = list(flag_matrix(workbench, engine="cpu"))
    own = other(workbench, Launch(lab_target, lab_target, "STANDALONE", dtype="float32"), "STANDALONE 4-1-5", tmp_path)
    free = other(workbench, Launch(lab_target, None, "NGRAM", draft_tokens=5, dtype="float32"), "NGRAM 5", tmp_path)
    drawn = []
    monkeypatch.setattr(show, "figure", lambda fig, alt: drawn.append(fig))
    monkeypatch.setattr(show, "_show", lambda _: None)
    table = [*rows, own | {"predicted": None, "role": "other"}, free | {"predicted": None, "role": "other"}]
    show.accept_lengths([r for r in table if r["name"] != str(Flags(""))])
    drawn[0].savefig(DATA / "verified" / "flag-matrix.png", dpi=96, bbox_inches="tight")
    heads = [
        "name", "predicted", "accept_length", "histogram", "histogram as predicted", "texts as the target's own",
        "tokens/s",
    ]  # fmt: skip
    cells = [[show.number(r.get(h)) if not isinstance(r.get(h), list) else str(r[h]) for h in heads] for r in table]
    write_table(
        "flag-matrix", "Speculation flags on the real engine", "python -m pytest -m verify tests/test_flag_matrix.py",
        f"sglang 0.5.20 on the CPU engine, float32, greedy, {PROMPTS} prompts × {TOKENS} tokens. A row reads algorithm "
        "steps-topk-draft tokens. Trees are replayed as SGLang grows them (`kitlib/trees.py`). The dummy drafter is "
        "the negative control. STANDALONE (the target drafts for itself) and NGRAM are not "
        "verified against a reference; only their texts are. ![accept lengths](flag-matrix.png)",
        heads, cells,
    )  # fmt: skip
    by_name = {r["name"]: r for r in rows}
    assert len(rows) == len(GRID) and all("why" not in r and "error" not in r for r in rows)
    assert [f.status for f in matrix_findings(rows, "float32")] == ["pass"]
    assert all(r["texts as the target's own"] == f"{PROMPTS} of {PROMPTS}" for r in table)
    assert by_name["EAGLE3 4-1-5 dummy"]["accept_length"] <= 1.02
    assert by_name["EAGLE3 4-4-16"]["accept_length"] > by_name["EAGLE3 4-1-5"]["accept_length"]
    assert own["accept_length"] > by_name["EAGLE3 4-4-16"]["accept_length"]
