"""Whatever is in the files and flags, the whole chain ends in a code and a sentence, and writes where it was told to.

A healthy pair of any dialect is changed at random in its tensors, header, index, configs, launch line, log and metrics
(`mutations.py`) and goes through `check`, `convert` and `search` as the command line runs them (`watched.py`).
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import changed, known_key, other_bytes, other_command, other_tensors, tensors_of, write_tensors
from test_corpus import CORPUS, build, command
from watched import run

from kitlib import commands
from kitlib.findings import KitError

ENGINES = ("", "0.5.9", "sglang>=0.5.3,<=0.5.12", "sglang==99", "sglang==0.5.9rc1", "sglang", "vllm==0.20.0", "vllm>0")
ENGINES += (
    "all",
    "all",
    "x" * 1000,
    "==",
    "sglang==0.5.*",
    "sglang===0.5.9",
    "vllm==all",
    "sglang==1!9",
    ">=0,!=0.5.9",
)
READERS = ("sglang==0.4.9", "sglang==0.5.9", "sglang==0.5.23", "vllm", "vllm==0.20.0", "speculators", "specforge") * 3
READERS += (f"sglang=={'9' * 5000}", f"vllm=={'9' * 5000}", "vllm==0.20.0,", "sglang==0.5.*", "trt", "")
LOG = "[2026-01-01 10:00:00] server_args=ServerArgs(model_path='t', speculative_algorithm='EAGLE3', tp_size=1)\n"
LOG += "[2026-01-01 10:00:01] Decode batch, #running-req: 1, #token: 90, accept len: 1.40, accept rate: 0.20,\n"
LOG += "Traceback (most recent call last):\n  File 'x', line 1\nValueError: y\n"
METRICS = {"val/full_acc_0": 0.7, "val/full_acc_1": 0.4, "cond_acc_0": 0.7, "conditional": [0.7, 0.6]}
COUNTS = {"bench": {"rounds": [[0, 1], [2]], "histogram": [1, 1, 1], "accepted": 3, "verified": 3, "requests": []}}
EACH = {"requests": [{"prompt": 0, "counts": {"histogram": [1, 1]}}, {"prompt": 1, "counts": {"histogram": [2]}}]}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> list[dict]:
    """Healthy pairs of all dialects: tensors, both configs, the launch line and the engine."""
    found = []
    for case in CORPUS["healthy"]:
        drafter, target = build(tmp_path_factory.mktemp("pair"), case)
        configs = [json.loads((folder / "config.json").read_text()) for folder in (drafter, target)]
        line = command(case, drafter).replace(str(drafter), "DRAFTER")
        weights = (target / "model.safetensors").read_bytes()
        found.append({"tensors": tensors_of(drafter), "configs": configs, "line": line, "weights": weights} | case)
    return found


@pytest.fixture
def no_session(monkeypatch):
    """`search` reads its observations first, and would then load a target."""

    def stop(_args):
        raise KitError("No target is loaded here.")

    monkeypatch.setattr(commands, "_session", stop)


def example(root: Path, pairs: list[dict], rng: random.Random) -> None:
    """A changed pair on disk, and every command on it."""
    shutil.rmtree(root, ignore_errors=True)
    drafter, target, out = root / "drafter", root / "target", root / "out" / "new"
    for folder in (drafter, target, out.parent):
        folder.mkdir(parents=True)
    pair = rng.choice(pairs)
    tensors, (config, of_target), line = pair["tensors"], pair["configs"], pair["line"].replace("DRAFTER", str(drafter))
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.choice(["tensors", "config", "config", "key", "key", "target", "line"])
        if kind == "tensors" and tensors:
            tensors = other_tensors(tensors, rng)
        if kind in ("config", "key"):
            config = (changed if kind == "config" else known_key)(config, rng)
        if kind == "target":
            of_target = rng.choice([changed, known_key])(of_target, rng)
        if kind == "line":
            line = other_command(line, rng)
    write_tensors(drafter, tensors, rng)
    (drafter / "config.json").write_text(json.dumps(config))
    (target / "config.json").write_text(json.dumps(of_target))
    (target / "model.safetensors").write_bytes(pair["weights"])
    if rng.random() < 0.1:
        file = rng.choice(sorted(p for p in root.rglob("*") if p.is_file()))
        file.write_bytes(other_bytes(file.read_bytes(), rng))
    engine, reader = rng.choice([*ENGINES, pair["engine"], pair["engine"]]), rng.choice(READERS)
    aimed = rng.choice([["--target", str(target)], ["--target", str(target / "config.json")], []])
    named, more = rng.choice([[str(drafter)], [str(drafter)], []]), rng.choice([[], ["--json"], [f"--launch={line}"]])
    run("check", *named, *aimed, f"--launch={line}", f"--engine={pair['engine']}", "--json")
    run("check", str(drafter), *aimed, f"--engine={engine}", *more)
    more = rng.choice([[], ["--json"], ["--force"], ["--force", "--json"]])
    run("convert", str(drafter), str(out), f"--to={reader}", *aimed, *more, out=out)
    kind = rng.choice(["log", "metrics", "observed"])
    told = (
        LOG if kind == "log" else json.dumps(changed({"metrics": METRICS}.get(kind, rng.choice([COUNTS, EACH])), rng))
    )
    data = told.encode()
    (root / kind).write_bytes(other_bytes(data, rng) if kind == "log" or rng.random() < 0.3 else data)
    if kind == "observed":
        run("search", "--observed", str(root / kind), "--json")
    else:
        flag = "--log" if kind == "log" else "--train-metrics"
        run("check", str(drafter), flag, str(root / kind), "--json", *rng.choice([[], [f"--launch={line}"]]))


SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, suppress_health_check=SHARED)
@given(rng=st.randoms(use_true_random=False))
def test_anything_changed_anywhere(tmp_path, pairs, no_session, rng):
    example(tmp_path / "a" / "b", pairs, rng)


def resident() -> int:
    """MB of memory in use; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) >> 10 for x in lines if x.startswith("VmRSS")), 0)


@pytest.mark.verify
def test_thousands_of_changes_and_no_growth(tmp_path, pairs, no_session):
    used = []
    for seed in range(4000):
        example(tmp_path / "a" / "b", pairs, random.Random(seed))
        used += [resident()] if seed in (1000, 3999) else []
    assert used[1] - used[0] < 100, used
