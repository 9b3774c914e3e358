"""Layer ids: which boundaries a release captures, which ids to write for it, and how far its targets reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract import TargetInfo, default_boundaries, lookup
from .data import Engine


def explicit(config: Mapping[str, Any], row: Mapping[str, Any]) -> list[int] | None:
    """The ids in the drafter's config where this release looks for them (`row`: of the capture table)."""
    places = [row["ids"]] if isinstance(row["ids"], str) else row["ids"]
    ids = next((v for p in places if (v := lookup(config, p)) is not None), None)
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def captured(
    ids: Sequence[int] | None, engine: Engine, release: str, target: TargetInfo | None
) -> tuple[int, ...] | None:
    """Boundaries that the target's hook makes of explicit ids, or of none; None where the depth would decide.

    They are captured on the way up through the layers, so in ascending order and once each, whatever the config says.
    """
    if ids is None and target is None:
        return None
    named = target.architecture if target else ""
    rule = next((r["rule"] for r in engine.entries("id_rule", release) if named in r["classes"]), "")
    as_they_are = ids is None and rule != "defaults-too"
    ids = default_boundaries(target.layers) if ids is None else ids
    as_they_are |= rule == "first-is-1" and ids[0] != 1
    as_they_are |= rule == "below-depth" and max(ids) == target.layers
    shift = 0 if as_they_are else engine.entry("capture", release)["shift"]
    return tuple(sorted({i + shift for i in ids}))


def ids_for(
    boundaries: Sequence[int], engine: Engine, release: str, target: TargetInfo | None
) -> tuple[list[int], int] | None:
    """(ids that make this release capture these boundaries, boundary minus id); None where no ids do."""
    for shift in dict.fromkeys((engine.entry("capture", release)["shift"], 0)):
        ids = sorted(b - shift for b in boundaries)
        if min(ids) >= 0 and captured(ids, engine, release, target) == tuple(sorted(boundaries)):
            return ids, shift
    return None


def last_boundary(engine: Engine, release: str, target: TargetInfo) -> int:
    """The last boundary that this target's class hands out: its depth, or one less."""
    classes = {c for row in engine.entries("last_boundary", release) for c in row["classes"]}
    return target.layers - (not {target.architecture, "*"} & classes)


def reads_ids(engine: Engine, release: str) -> bool:
    """Whether this release reads explicit ids at all."""
    return bool(engine.entry("capture", release)["ids"])
