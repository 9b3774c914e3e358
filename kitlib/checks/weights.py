"""Checks on the weights themselves: tensors nothing reads, tensors never trained, dtypes read as something else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..checkpoint.headers import BITS
from ..contract.dialects import lookup, number
from ..findings import Evidence, Finding, Fix
from .case import BY_HEADERS, Case, entries

PACKED = ("F4", "F6", "F8", "I8", "U8", "I32", "U32")  # how quantized matrices are stored
MATRICES = 7  # of a layer: q, k, v, o, gate, up, down
FLAGS = {"input_norm": "norm_before_fc", "fc_norm": "fc_norm", "fc.bias": "bias"}  # what announces a tensor


def unused(case: Case) -> dict[str, str]:
    """Tensors of the file that this release has no use for, and why; those a naming fault drops are K102's."""
    found = {}
    by_canonical = {f.name: case.checkpoint.canonical(f.name) for f in case.served.fates}
    arrived = {by_canonical[f.name] for f in case.served.of("loaded", "renamed")}
    for fate in case.served.of("dropped"):
        canonical = by_canonical[fate.name]
        if canonical is None:
            why = "" if case.served.missing else "no part of an EAGLE-3 drafter"
        elif canonical in case.served.missing or canonical in ("t2d", "embed_tokens.weight"):
            why = ""
        elif canonical == "lm_head.weight" and case.contract.tie:
            why = ""  # K111
        elif canonical in arrived:
            why = "the file holds this tensor under another name as well"
        else:
            flag = next((f for part, f in FLAGS.items() if canonical.startswith(part)), "")
            flag = "" if lookup(case.checkpoint.config, flag) else flag
            why = f"this release has no parameter for it{f' without {flag} in the config' if flag else ''}"
        if why:
            found[fate.name] = why
    if case.served.wiring.later_norm == "hidden_norm":
        later = (f.name for f in case.served.of("loaded", "renamed") if _later_input_norm(by_canonical[f.name]))
        found |= dict.fromkeys(later, "this release loads it and normalises later layers with hidden_norm")
    return found


def unused_weights(case: Case) -> Iterator[Finding]:
    """K104: tensors the kit knows that this release drops or never runs."""
    found = unused(case)
    if not found:
        yield Finding.of("K104", status="pass", engine=case.engine)
        return
    name, why = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    evidence = [Evidence("header", f"{n}: {w}", {"name": n}) for n, w in list(found.items())[:6]]
    yield Finding.of("K104", f"{name}{more} is not used: {why}", engine=case.engine, evidence=evidence)


@dataclass
class Values:
    """What is kept of the values of a tensor, piece by piece."""

    size: int = 0
    unsound: int = 0  # NaN or infinite
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, pieces: Iterable[np.ndarray]) -> Values:
        seen = cls()
        for piece in pieces:
            seen.size += piece.size
            sound = np.isfinite(piece)
            if not sound.all():
                seen.unsound += int(piece.size - sound.sum())
                piece = piece[sound]
            if piece.size:
                seen.low, seen.high = min(seen.low, float(piece.min())), max(seen.high, float(piece.max()))
                seen.total += float(piece.sum(dtype=np.float64))
                seen.squares += float(np.square(piece, dtype=np.float64).sum())
        return seen

    def as_drawn(self, spread: float) -> bool:
        """Mean and deviation of N(0, spread) within four standard errors, and bf16's rounding."""
        mean = self.total / self.size
        error = 4 / math.sqrt(2 * self.size) + 0.005
        deviation = math.sqrt(max(self.squares / self.size - mean**2, 0))
        return abs(deviation / spread - 1) < error and abs(mean) < 4 * spread / self.size**0.5


def untrained_weights(case: Case) -> Iterator[Finding]:
    """K105: zeros, NaN, constants, and layers that are as an initialiser leaves them; 64 KB a tensor, or all of it."""
    if case.checkpoint.hub:
        yield Finding.of("K105", BY_HEADERS, status="not-run")
        return
    layers: dict[str, dict[str, Values]] = defaultdict(dict)
    problems, skipped, seen = {}, [], 0
    for name, info in case.checkpoint.tensors.items():
        canonical = case.checkpoint.canonical(name)
        if canonical is None or not canonical.endswith(".weight"):
            continue
        if info.dtype not in ("F16", "BF16", "F32", "F64"):
            skipped.append(f"{name} is {info.dtype}")
            continue
        pieces = case.checkpoint.chunks(name) if case.deep else [case.checkpoint.sample(name)]
        values = Values.of(pieces)
        seen += 1
        if not values.size:
            continue
        if values.unsound:
            problems[name] = f"holds {values.unsound} NaN or infinite values of {values.size} read"
        elif values.low == values.high == 0:
            problems[name] = "is all zeros"
        elif len(info.shape) == 2 and values.size > 1 and values.low == values.high:
            problems[name] = f"is {values.low:g} everywhere"
        if canonical.startswith("layers."):
            layers[canonical.split(".")[1]][canonical] = values
    spread = number(case.checkpoint.config.get("initializer_range")) or 0.02
    for index, tensors in layers.items():
        if _as_initialised(tensors, spread):
            problems[f"layer {index}"] = f"is as initialised: its matrices are N(0, {spread:g}), its norms exactly one"
    if problems:
        name, what = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        evidence = [Evidence("tensor", f"{n} {w}", {"name": n}) for n, w in list(problems.items())[:6]]
        yield Finding.of("K105", f"{name} {what}{more}", evidence=evidence)
    elif skipped:
        yield Finding.of("K105", f"{len(skipped)} tensors are not decoded: {skipped[0]}", status="not-run")
    else:
        yield Finding.of(
            "K105",
            status="pass",
            evidence=[Evidence("tensor", f"{seen} tensors {'read whole' if case.deep else 'sampled'}")],
        )


def quantization(case: Case) -> Iterator[Finding]:
    """K107: an unquantized drafter that inherits the target's quantization, or a packed one that does not say so."""
    config = case.checkpoint.config
    says = bool(config.get("quantization_config") or config.get("compression_config"))
    if strange := [n for n, t in case.checkpoint.tensors.items() if t.dtype not in BITS]:
        dtype = case.checkpoint.tensors[strange[0]].dtype
        title = f"{strange[0]} has the dtype {dtype[:20]}, which safetensors does not know"
        yield Finding.of("K107", title, engine=case.engine, evidence=[Evidence("header", f"{len(strange)} tensors")])
        return
    packed = [n for n, t in case.checkpoint.tensors.items() if len(t.shape) == 2 and t.dtype.startswith(PACKED)]
    if packed and not says:
        title = f"{packed[0]} is {case.checkpoint.tensors[packed[0]].dtype}, and config.json has no quantization_config"
        evidence = [Evidence("header", f"{len(packed)} such tensors")]
        yield Finding.of("K107", title, engine=case.engine, evidence=evidence)
        return
    rule = entries(case, "quantization")[0]
    flags = case.launch.flags
    flag = str(flags.get("quantization") or "")
    wanted = "" if flag in ("", "unquant") else flag
    own = rule["flag"] and rule["flag"] in flags
    target = case.target and case.target.config.get("quantization_config")
    method = target.get("quant_method", "?") if isinstance(target, dict) else ""
    evidence = [Evidence("flags", f"--quantization {flag or '(absent)'} · rule: {rule['source']}")]
    if says or own or rule.get("inherits") == "no" or not (wanted or method):
        yield Finding.of("K107", status="pass", engine=case.engine, evidence=evidence)
        return
    fix = None
    if rule["flag"]:
        fix = Fix("say that the drafter is not quantized", f"--{rule['flag']} unquant")
    if wanted:
        title = f"--quantization {wanted} holds for the unquantized drafter as well"
        yield Finding.of("K107", title, engine=case.engine, evidence=evidence, fix=fix)
        return
    if rule.get("inherits") == "error":
        title = f"the target is quantized ({method}), and this release builds the unquantized drafter the same way"
        yield Finding.of("K107", title, engine=case.engine, evidence=evidence)
        return
    title = f"the target is quantized ({method}), the drafter is not, and no flag tells them apart"
    effect = "none while the flag stays absent and this target's class does not set it itself"
    yield Finding.of("K107", title, engine=case.engine, evidence=evidence, fix=fix, severity="info", effect=effect)


def _later_input_norm(canonical: str | None) -> bool:
    parts = (canonical or "").split(".")
    return len(parts) == 4 and parts[0] == "layers" and parts[1] != "0" and parts[2] == "input_layernorm"


def _as_initialised(tensors: dict[str, Values], spread: float) -> bool:
    """All seven matrices N(0, spread) within sampling error, and every norm exactly one: no single matrix proves it."""
    norms = [v for n, v in tensors.items() if n.endswith("norm.weight")]
    matrices = [v for n, v in tensors.items() if n.endswith("_proj.weight")]
    if len(matrices) < MATRICES or not norms or not all(v.low == v.high == 1 for v in norms):
        return False
    return all(values.as_drawn(spread) for values in matrices)


def drawn(values: np.ndarray, spread: float) -> bool:
    """Whether values look drawn from N(0, spread), its fourth moment included: one matrix can tell, if it has many."""
    if values.size < 500 or not Values.of([values]).as_drawn(spread):
        return False
    fourth = float((values**4).mean()) / spread**4
    return abs(fourth - 3) < 4 * (96 / values.size) ** 0.5 + 0.1
