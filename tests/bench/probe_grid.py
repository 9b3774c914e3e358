"""The rules of `kitlib.engines` against the releases themselves: every layout through every release's own loader.

    python tests/bench/probe_grid.py [SPEC …]     # default: all releases that were read; under a minute a release

One subprocess a release. Writes data/verified/probe-grid.md; exit code 1 if a rule and a release disagree anywhere.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from tiny import DRAFT_VOCAB, HIDDEN, VOCAB, write_drafter  # noqa: E402
from verified import provenance  # noqa: E402

from kitlib.checkpoint import Checkpoint  # noqa: E402
from kitlib.contract import Contract, TargetInfo  # noqa: E402
from kitlib.engines import Engine, served  # noqa: E402
from kitlib.findings import write_atomic  # noqa: E402
from kitlib.probe import ProbeResult, probe_many  # noqa: E402

OUT = ROOT / "data" / "verified" / "probe-grid.md"
TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 8}
LAYER, ONES = "layers.0.", torch.ones(HIDDEN)
LAYOUTS: dict[str, dict] = {
    "`midlayer.*`": {},
    "`layers.0.*`": {"rename": ("", "")},
    "`model.layers.0.*`": {"rename": (LAYER, "model.layers.0.")},
    "`model.midlayer.*`": {"rename": (LAYER, "model.midlayer.")},
    "`draft_model.midlayer.*`": {"rename": (LAYER, "draft_model.midlayer.")},
    "no `fc.weight`": {"drop": ("fc.weight",)},
    "no `k_proj`": {"drop": (LAYER + "self_attn.k_proj.weight",)},
    "no `up_proj`, no `norm`": {"drop": (LAYER + "mlp.up_proj.weight", "norm.weight")},
    "no `lm_head`": {"drop": ("lm_head.weight",)},
    "an unknown tensor": {"extra": {"mask_hidden": ONES}},
    "an unknown `q_proj`": {"extra": {"other.q_proj.weight": ONES}},
    "two layers": {"layers": 2},
    "two layers, the config says one": {"layers": 2, "num_hidden_layers": 1},
    "no `num_hidden_layers`": {"num_hidden_layers": ...},
    "`fc.bias`": {"extra": {"fc.bias": ONES}},
    "`fc.bias`, `bias: true`": {"extra": {"fc.bias": ONES}, "bias": True},
    "no `t2d`": {"drop": ("t2d",)},
    "no `d2t`": {"drop": ("d2t", "t2d")},
    "own `embed_tokens`": {"extra": {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}},
    "`tie_word_embeddings: true`": {"tie_word_embeddings": True},
    "no `draft_vocab_size`": {"draft_vocab_size": ...},
    "`fc_norm: true`": {"fc_norm": True},
    "`fc_norm.*`, no flag": {"extra": {f"fc_norm.{i}.weight": ONES.clone() for i in range(3)}},
    "`norm_before_fc: true`": {"norm_before_fc": True},
    "a target of another width": {
        "extra": {"fc.weight": torch.ones(HIDDEN, 3 * 48) / 9, "embed_tokens.weight": torch.ones(VOCAB, HIDDEN)},
        "target_hidden_size": 48,
    },
    "another class name": {"architectures": ["Eagle3LlamaForCausalLM"]},
}


def compare(folder: Path, result: ProbeResult, release: str, target: TargetInfo) -> tuple[str, list[str]]:
    """(what the release did, in short; every disagreement with the rules in words)."""
    checkpoint = Checkpoint.open(folder)
    rule = served(checkpoint, Contract.of(checkpoint, target), release, target=target)
    if result.status in ("not-run", "crashed"):
        return f"{result.status}: {result.reason}", []
    said = {f.name: ("error" if f.status == "refused" else f.status, f.into) for f in rule.fates}
    wrong = [
        f"`{k.name}`: rule {said[k.name]}, release {(k.status, k.into)}"
        for k in result.keys
        if (k.status, k.into) != said[k.name]
    ]
    if result.status == "refused" or rule.refused:
        if (result.status == "refused") != bool(rule.refused):
            wrong.append(f"rule: {rule.refused or 'starts'}; release: {result.reason or 'starts'}")
        errors = len(result.of("error"))
        return "refused" + (f" ({errors} tensors raise)" if errors else ""), wrong
    idle = {"embed_tokens.weight"} if rule.wiring.embed_source == "target" else set()
    idle |= {n for n in result.missing if re.match(r"layers\.[1-9]\d*\.input_layernorm", n)}  # built, never run
    unfilled = set(result.missing) - idle
    if unfilled != set(rule.missing):
        only, more = sorted(set(rule.missing) - unfilled), sorted(unfilled - set(rule.missing))
        wrong.append(f"nothing arrives in: the rule alone says {only[:9]}, the release alone {more[:9]}")
    fc, fits = result.at(result.trained_width), result.at(result.single_width)
    if fc is None or fc.fc is not rule.wiring.fc or fc.error or not fc.finite:
        wrong.append(
            f"fc fed {result.trained_width} features: rule says it {'runs' if rule.wiring.fc else 'is skipped'}; {fc}"
        )
    skips = result.single_width == HIDDEN  # any other width reaches fc, which cannot take it
    if fits is None or fits.fc or bool(fits.error) is skips:
        wrong.append(
            f"fc fed {result.single_width} features: rule says it {'is skipped' if skips else 'raises'}; {fits}"
        )
    counts = {s: len(result.of(s)) for s in ("loaded", "renamed", "dropped", "overwritten", "ignored")}
    text = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    return text + (f", {len(unfilled)} unfilled" if unfilled else ""), wrong


def spans(cells: dict[str, str]) -> str:
    """Adjacent releases that do the same, joined."""
    runs: list[list[str]] = []
    for release, text in cells.items():
        if text.startswith(("not-run", "crashed")):  # the second table says why
            continue
        if runs and runs[-1][2] == text:
            runs[-1][1] = release
        else:
            runs.append([release, release, text])
    return "<br>".join(f"{a}{'' if a == b else f' to {b}'}: {text}" for a, b, text in runs)


def main() -> int:
    """Run the grid, print it and write it."""
    engine = Engine.load("sglang")
    specs = sys.argv[1:] or ["all", "0.4.4.post3"]  # 0.4.4 was read as its post release
    releases = sorted({r for spec in specs for r in engine.resolve(spec)}, key=Version)
    asked, cells, wrong = [], {name: {} for name in LAYOUTS}, []
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "config.json").write_text(json.dumps(TARGET))
        target = TargetInfo.of(home)
        folders = [write_drafter(Path(home) / str(i), **changes) for i, changes in enumerate(LAYOUTS.values())]
        for release in releases:
            start = time.monotonic()
            results = probe_many(folders, f"sglang=={release}", target=home)
            seen = results[0].imported
            for name, folder, result in zip(LAYOUTS, folders, results, strict=True):
                cells[name][release], bad = compare(folder, result, release, target)
                wrong += [f"{release}, {name}: {b}" for b in bad]
            state = f"{sum(r.status in ('ran', 'refused') for r in results)} of {len(results)}"
            row = [
                release,
                seen.get("release", "–"),
                state,
                seen.get("settings", "–"),
                results[0].reason[:120],
            ]
            asked.append(f"| {' | '.join(row)} | {time.monotonic() - start:.0f} s |")
            print(asked[-1], f"{len(wrong)} disagreements so far", flush=True)
    compared = sum(not t.startswith(("not-run", "crashed")) for row in cells.values() for t in row.values())
    lines = "\n".join(provenance(f"python tests/bench/probe_grid.py {' '.join(specs)}"))
    text = f"""# The rules against the releases

{lines}

torch {torch.__version__}. Drafters are random, of hidden size {HIDDEN}, {VOCAB} ids and {DRAFT_VOCAB} draft ids.
Compared: whether the release starts, each tensor's
fate and the parameter it went into, which parameters get nothing (`unfilled`), whether fc is called when all states
arrive and when only one does; where the release refuses, its start and the fates. A release is
its own wheel, fetched with pip, with its own loader and forward pass.

**{compared} of {len(LAYOUTS) * len(releases)} cells compared, {len(wrong)} disagreements.**

{chr(10).join([*(f"- {w}" for w in wrong), ""])}
| layout | what the releases do |
|---|---|
{chr(10).join(f"| {name} | {spans(row)} |" for name, row in cells.items())}

| asked | imported | layouts answered | settings | note on the first layout | time |
|---|---|---|---|---|---|
{chr(10).join(asked)}
"""
    print(text, write_atomic(OUT, text))
    return int(bool(wrong) or not compared)


if __name__ == "__main__":
    sys.exit(main())
