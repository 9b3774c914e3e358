"""Asks a real SGLang release what it makes of a drafter: its own loader and its own forward pass, in a subprocess.

Where `engines` says what was read in a release's code, this runs it. The child (`child.py`) needs torch, transformers
and SGLang's light dependencies, no GPU: what only a GPU machine has is stood in for (`absent.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..checkpoint import Checkpoint, canonical
from ..contract import Contract, TargetInfo
from ..engines import Engine
from ..findings import Evidence, Finding, KitError, Report, merge_engines
from .release import Unfetched, fetch, run

CODES = ("K102", "K103", "K133")  # what the probe decides


@dataclass(frozen=True)
class Key:
    """What the release did with one tensor of the file."""

    name: str
    status: str  # loaded | renamed | dropped | ignored (t2d) | overwritten (by the target's) | error
    into: str = ""  # the engine's parameter; a shard of a stacked one under its own name
    message: str = ""  # the warning that was logged or the exception that was raised


@dataclass(frozen=True)
class Forward:
    """One forward pass of the release's drafter class."""

    width: int  # features of the state it was fed
    fc: bool  # fc was called
    finite: bool | None  # None on the meta device
    error: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """What one release really did with one drafter."""

    drafter: str
    engine: str  # what was asked, "sglang==0.5.9"
    status: str  # ran | refused (the release would not start) | not-run | crashed
    reason: str = ""  # why it did not run or would not start, in one line
    trained_width: int = 0  # K·Ht features: what the target hands out when all states are captured
    single_width: int = 0  # Ht features: what it hands out when they are not
    keys: tuple[Key, ...] = ()
    written: Mapping[str, float] = field(default_factory=dict)  # engine's parameter → fraction that was written
    missing: tuple[str, ...] = ()  # canonical names of parameters that got nothing, or not enough
    forward: tuple[Forward, ...] = ()
    imported: Mapping[str, Any] = field(default_factory=dict)  # release, file, torch, transformers, settings, stand_ins

    def of(self, *statuses: str) -> tuple[Key, ...]:
        """The tensors with one of these fates."""
        return tuple(k for k in self.keys if k.status in statuses)

    def at(self, width: int) -> Forward | None:
        """The forward pass at a width, where one was made."""
        return next((f for f in self.forward if f.width == width), None)


def probe(drafter: str | Path, spec: str = "", **options: Any) -> ProbeResult:
    """Ask one release about one drafter; options as in `probe_many`."""
    return probe_many([drafter], spec, **options)[0]


def probe_many(
    drafters: Sequence[str | Path],
    spec: str = "",
    *,
    target: str | Path | None = None,
    wheel: str | Path | None = None,
    timeout: float = 600,
    device: str = "cpu",
    python: str = sys.executable,
) -> list[ProbeResult]:
    """Ask one release about many drafters, in one subprocess of at most `timeout` seconds.

    The release is the installed one where that is asked for, else it is fetched with pip into the cache; `wheel` names
    a local file instead. `device="meta"` reads names and shapes only, for a drafter larger than memory. Raises KitError
    for unusable arguments; whatever happens in the child is a status.
    """
    engine = Engine.load("sglang")
    releases = engine.resolve(spec)
    if len(releases) != 1 or device not in ("cpu", "meta"):
        raise KitError(f"The probe asks one release on cpu or meta, not {spec!r} on {device}; write sglang==0.5.9.")
    info = TargetInfo.of(target) if target else None
    checkpoints = [Checkpoint.open(d) for d in drafters]
    contracts = [Contract.of(c, info) for c in checkpoints]
    blank = [
        ProbeResult(str(d), f"sglang=={releases[0]}", "not-run", "", c.aux_states * c.target_hidden, c.target_hidden)
        for d, c in zip(drafters, contracts, strict=True)
    ]
    known = engine.entry("probe", releases[0])
    if known and not known["works"] and not wheel:
        return [replace(b, reason=known["reason"]) for b in blank]
    try:
        root = fetch(releases[0], wheel, python)
    except Unfetched as error:
        return [replace(b, reason=str(error)) for b in blank]
    layouts = [
        {
            "drafter": str(c.files[0].parent.absolute()),  # the child has another working directory
            "files": [str(f.absolute()) for f in c.files],
            "widths": [b.trained_width, b.single_width],
            "embedding": [k.vocab, k.target_hidden],
        }
        for c, k, b in zip(checkpoints, contracts, blank, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="kitlib-probe-") as folder:
        job = {"root": str(root or ""), "target": folder, "device": device, "layouts": layouts}
        Path(folder, "config.json").write_text(json.dumps(_any_target(contracts[0])), encoding="utf-8")
        reason = run(python, job, Path(folder), timeout)
        return _read(blank, Path(folder, "out"), reason, root)


def _any_target(contract: Contract) -> dict[str, Any]:
    """A config for the release's own settings, which want a model; its weights are never read."""
    sizes = {"hidden_size": contract.target_hidden, "vocab_size": contract.vocab, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64}
    return (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512} | sizes | heads
    )


def _read(blank: list[ProbeResult], out: Path, reason: str, root: Path | None) -> list[ProbeResult]:
    """The child's answers. Nothing imported or answered: not run; dead at a drafter: crashed, the rest not run."""
    asked = blank[0].engine.removeprefix("sglang==")
    try:
        imported, *answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        other = Version(imported["release"]) != Version(asked)
        if other or (root and not Path(imported["file"]).is_relative_to(root)):
            reason = f"asked for {asked}, but {imported['release']} was imported from {imported['file']}"
            return [replace(b, reason=reason, imported=imported) for b in blank]
        results = [_result(b, a, imported) for b, a in zip(blank, answers, strict=False)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = reason or f"the child's answer cannot be read ({type(error).__name__})"
        return [replace(b, reason=reason) for b in blank]
    rest = [replace(b, reason=reason or "the child ended early", imported=imported) for b in blank[len(results) :]]
    return results + [replace(b, status="crashed") for b in rest[:1]] + rest[1:]


def _result(blank: ProbeResult, answer: dict[str, Any], imported: dict[str, Any]) -> ProbeResult:
    refused = answer["refused"]
    return replace(
        blank,
        status="not-run" if "not_run" in answer else "refused" if refused else "ran",
        reason=answer.get("not_run", refused),
        keys=tuple(Key(**k) for k in answer.get("keys", ())),
        written=answer.get("written", {}),
        missing=tuple(canonical(n) or n for n in answer.get("missing", ())),
        forward=tuple(Forward(**f) for f in answer.get("forward", ())),
        imported=imported,
    )


def findings(result: ProbeResult) -> list[Finding]:
    """K102, K103 and K133, and K120 where the release would not start; each with source "probe"."""

    def say(code: str, title: str, status: str, text: str, **values: Any) -> Finding:
        evidence = [Evidence("probe", text, values)] if text else []
        return Finding.of(code, title, status=status, engine=result.engine, evidence=evidence)

    if result.status in ("not-run", "crashed"):
        return [say(c, f"the probe did not run: {result.reason}", result.status, "") for c in CODES]
    found = []
    if result.status == "refused":
        title = f"this release refuses the drafter: {result.reason}"
        found.append(say("K120", title, "fail", "the release's own class and loader were run"))
        if not result.keys:
            return found + [say(c, "refused before anything was loaded", "not-run", "") for c in CODES]
    lost = [k for k in result.of("dropped", "error") if canonical(k.name) not in ("t2d", "embed_tokens.weight")]
    said = next((k.message for k in lost if k.message), "")
    title = f"{len(lost)} of {len(result.keys)} tensors did not load: {lost[0].name} …" if lost else ""
    text = f"its own load_weights took {len(result.of('loaded', 'renamed'))} tensors"
    text += f", and said {said!r}" if said else ", and said nothing about the others" if lost else ""
    found.append(say("K102", title, "fail" if lost else "pass", text, names=[k.name for k in lost]))
    unfilled = [n for n in result.missing if n != "embed_tokens.weight"]  # where it is absent, the target's serves
    have = {canonical(k.name) for k in result.keys}
    title = f"{len(unfilled)} parameters get no tensor: {', '.join(unfilled[:4])}"
    title += ", although the file has them" if unfilled and have.issuperset(unfilled) else ""
    partly = {n: round(share, 3) for n, share in result.written.items() if 0 < share < 1}
    text = f"it wrote {sum(share == 1 for share in result.written.values())} of {len(result.written)} parameters"
    text += f", partly {partly}" if partly else ""
    status = "fail" if unfilled else "pass"
    found.append(say("K103", title if unfilled else "", status, text, written=dict(result.written)))
    full, single = result.at(result.trained_width), result.at(result.single_width)
    if full is None or full.error:
        return [*found, say("K133", f"no forward pass: {full.error if full else result.reason}", "not-run", "")]
    title = "" if full.fc else f"fc is skipped although all {full.width} features arrive: that is the hidden size"
    text = f"fed {full.width} features, fc {'ran' if full.fc else 'was skipped'}"
    if single:
        text += f"; fed {single.width}: {single.error or ('it ran' if single.fc else 'skipped without a message')}"
    return [*found, say("K133", title, "pass" if full.fc else "fail", text)]


def report(drafter: str | Path, specs: Sequence[str] = ("",), **options: Any) -> Report:
    """Ask every release of the specifiers, one subprocess each; equal findings of adjacent releases are merged."""
    releases = list(dict.fromkeys(r for spec in specs for r in Engine.load("sglang").resolve(spec)))
    results = [probe(drafter, f"sglang=={r}", **options) for r in releases]
    engines, target = [r.engine for r in results], str(options.get("target") or "")
    merged = merge_engines(engines, [(r.engine, f) for r in results for f in findings(r)])
    subject = {"drafter": str(drafter), "target": target, "engines": engines}
    return Report(subject, tuple(merged), extra={"probe": [asdict(r) for r in results]})
