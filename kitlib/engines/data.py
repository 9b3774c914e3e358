"""An engine's data file: which rows hold for a release, and which release a specifier means."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from ..findings import KitError

RATES: dict[str, Callable[[float, float, int, int], float | None]] = {
    "none": lambda a, v, D, S: None,
    "(a+v)/(v*(S+1))": lambda a, v, D, S: (a + v) / (v * (S + 1)),
    "(a+v)/(v*D)": lambda a, v, D, S: (a + v) / (v * D),
    "a/(v*(D-1))": lambda a, v, D, S: a / (v * (D - 1)),
}


@dataclass(frozen=True)
class Engine:
    """One engine's data. `entry` finds the row of a table that holds for a release."""

    name: str
    data: Mapping[str, Any]

    @classmethod
    def load(cls, name: str = "sglang") -> Engine:
        return _load(name)

    @property
    def releases(self) -> tuple[str, ...]:
        return tuple(self.data["engine"]["read"])

    @property
    def default(self) -> str:
        """The installed release where it is known, else the data file's default."""
        return self.data["engine"]["default"]

    def entries(self, table: str, release: str, **match: Any) -> list[Mapping[str, Any]]:
        """All rows of a table whose window holds `release` and whose fields equal `match`."""
        rows = (r for r in self.data.get(table, ()) if all(r.get(k) == v for k, v in match.items()))
        return [r for r in rows if SpecifierSet(r["window"]).contains(release, prereleases=True)]

    def entry(self, table: str, release: str, **match: Any) -> Mapping[str, Any] | None:
        """The one row that holds; the schema test sees to it that windows do not overlap."""
        return next(iter(self.entries(table, release, **match)), None)

    def resolve(self, spec: str) -> tuple[str, ...]:
        """Releases of a specifier: `sglang==0.5.9`, `>=0.5.6,<=0.5.9`, `0.5.9`, `all`, or "" for the default."""
        text = spec.strip().removeprefix(self.name).strip()
        if not text:
            return (self.default,)
        if text == "all":
            return self.releases
        try:
            if text[0].isdigit():
                text = f"=={text}"
            specifiers = SpecifierSet(text)
            exact = [s.version for s in specifiers if s.operator == "==" and "*" not in s.version]
            return tuple(exact) or tuple(r for r in self.releases if r in specifiers) or _nothing(self, spec)
        except (InvalidSpecifier, ValueError):
            raise KitError(
                f"{spec[:60]!r} is no engine release; write for example {self.name}==0.5.9, or all."
            ) from None

    def known(self, release: str) -> tuple[str, str]:
        """The release whose rules hold, and a caveat where this one itself was not read."""
        releases = [Version(r) for r in self.releases]
        try:
            wanted = Version(release)
        except ValueError:  # InvalidVersion is one
            raise KitError(f"{release[:40]!r} is no release of {self.name}; write for example 0.5.9.") from None
        if wanted in releases:
            return release, ""
        older = [r for r in releases if r < wanted]
        if not older:
            raise KitError(f"{self.name} {release} is older than all releases that were read ({self.releases[0]}).")
        newer = "newer than all that were read" if older[-1] == releases[-1] else "not read"
        return str(older[-1]), f"{self.name} {release} is {newer}; judged by the rules of {older[-1]}"


@cache
def _load(name: str) -> Engine:
    file = Path(__file__).parent / f"{name}.toml"
    if not file.exists():
        known = ", ".join(sorted(p.stem for p in file.parent.glob("*.toml")))
        raise KitError(f"The kit knows no engine {name!r}; it knows {known}.")
    return Engine(name, tomllib.loads(file.read_text(encoding="utf-8")))


def _nothing(engine: Engine, spec: str) -> tuple[str, ...]:
    raise KitError(f"No release of {engine.name} that was read fits {spec!r}; they are {', '.join(engine.releases)}.")


def accept_rate(release: str, a: float, v: float, draft_tokens: int, steps: int, engine: str = "sglang") -> tuple:
    """The accept rate that this release's log prints, and its formula; (None, "none") where it prints no rate."""
    loaded = Engine.load(engine)
    row = loaded.entry("rate", loaded.known(release)[0])
    if not row or not v:
        return None, row["formula"] if row else "unknown"
    return RATES[row["formula"]](a, v, draft_tokens, steps), row["formula"]
