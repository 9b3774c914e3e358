"""Many releases at once: the matrix of findings by release, and what `--deep` reads that a sample does not."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tiny import write_drafter

from kitlib.__main__ import main
from kitlib.checks import check
from kitlib.checks.survey import lines, matrix
from kitlib.engines import Engine


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    """The story's first fault: `layers.0.*` in a flat config."""
    return write_drafter(tmp_path_factory.mktemp("survey") / "sick", rename=("", ""))


def test_the_matrix_says_of_each_release_what_its_own_check_says(sick):
    report = check(sick, engines=("all", "vllm==0.20.0"))
    rows = matrix(report)
    releases = Engine.load("sglang").resolve("all")
    assert list(rows["K102 key-naming"]) == [*(f"sglang=={r}" for r in releases), "vllm==0.20.0"]
    for engine in random.Random(0).sample(report.subject["engines"], 4):
        alone = check(sick, engines=(engine,))
        failed = {f"{f.code} {f.slug}" for f in alone.errors}
        assert {name for name, row in rows.items() if row[engine] in ("✗", "☠")} == failed, engine


def test_the_release_that_cured_it_is_named(sick, tmp_path):
    text = "\n".join(lines(check(sick, engines=("sglang>=0.5.9,<=0.5.12",))))
    assert "K102 key-naming: cured by sglang==0.5.12" in text and "0.5.9-0.5.11  0.5.12" in text
    assert lines(check(sick, engines=("0.5.9",))) == []
    healthy = write_drafter(tmp_path / "healthy")
    assert lines(check(healthy, engines=("0.5.9", "0.5.12"))) == []


def test_the_command_prints_it_and_the_json_holds_it(sick, capsys):
    arguments = ["check", str(sick), "--engine", "sglang>=0.5.9,<=0.5.12"]
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith(" " * 15 + "  0.5.9-0.5.11  0.5.12\nK102 key-naming")
    assert main([*arguments, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["matrix"]["K102 key-naming"]
    assert told["sglang==0.5.11"] == "✗" and told["sglang==0.5.12"] == "✓"


def test_deep_reads_what_lies_between_the_samples(tmp_path, capsys):
    weight = torch.randn(20_000, 32)  # 2.5 MB, of which a sample reads 64 KB
    weight[10_007, 3] = float("nan")
    drafter = write_drafter(tmp_path / "holed", extra={"lm_head.weight": weight}, drop=("d2t", "t2d"))
    sampled = next(f for f in check(drafter).findings if f.code == "K105")
    deep = next(f for f in check(drafter, deep=True).findings if f.code == "K105")
    assert sampled.status == "pass"
    assert deep.is_error and deep.title == "lm_head.weight holds 1 NaN or infinite values of 640000 read"
    main(["check", str(drafter), "--deep"])
    assert deep.title in capsys.readouterr().out


def test_deep_and_sampled_agree_on_small_files(tmp_path):
    drafter = write_drafter(tmp_path / "small")
    sampled, deep = (next(f for f in check(drafter, deep=d).findings if f.code == "K105") for d in (False, True))
    assert sampled.status == deep.status == "pass" and "read whole" in deep.evidence[0].text
