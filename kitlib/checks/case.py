"""What one run of the checks looks at."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, Wiring
from ..engines import Engine, Served
from ..engines.rules import shallow
from ..findings import Finding
from ..launch import Launch


@dataclass(frozen=True)
class Case:
    """Everything one run of the checks looks at."""

    checkpoint: Checkpoint
    contract: Contract
    target: TargetInfo | None
    launch: Launch
    served: Served

    @property
    def engine(self) -> str:
        return self.served.engine


Check = Callable[[Case], Iterator[Finding]]


def convert_command(case: Case) -> str:
    """The command that rewrites this drafter for this release."""
    path = Path(case.checkpoint.path).resolve()
    words = ["python", "-m", "kitlib", "convert", str(path), f"{path}-for-{case.engine.replace('==', '-')}"]
    words += ["--to", case.engine, *(["--target", case.target.path] if case.target and case.target.path else [])]
    return shlex.join(words)


def trained(case: Case) -> Wiring:
    """The trained wiring; without a target a depth of 32 may stand in, so judge no boundaries by it."""
    return case.contract.trained(case.target or shallow(case.contract))


def table(case: Case, name: str) -> Sequence[Mapping[str, Any]]:
    """All rows of a table of the engine's data."""
    return Engine.load(case.engine.partition("==")[0]).data.get(name, ())


def entries(case: Case, name: str) -> list[Mapping[str, Any]]:
    """The rows of a table that hold for the release of this case."""
    engine, _, release = case.engine.partition("==")
    loaded = Engine.load(engine)
    return loaded.entries(name, loaded.known(release)[0])
