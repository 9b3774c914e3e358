"""What one run of the checks looks at."""

from __future__ import annotations

import os
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
    deep: bool = False  # read whole tensors where a sample would do

    @property
    def engine(self) -> str:
        return self.served.engine


Check = Callable[[Case], Iterator[Finding]]
BY_HEADERS = "a hub repository is judged by its headers, and no weights are fetched; download it to have them read"


def convert_command(case: Case, release: str = "") -> str:
    """The command that rewrites this drafter for this release, or for another one of the same engine."""
    hub = case.checkpoint.hub
    path = Path(_free(hub.name.partition("/")[2])) if hub else Path(case.checkpoint.path).resolve()
    engine = f"{case.engine.partition('==')[0]}=={release}" if release else case.engine
    out = _free(f"{path if hub or path.is_dir() else path.parent}-for-{engine.replace('==', '-')}")
    words = ["python", "-m", "kitlib", "convert", str(path), out, "--to", engine]
    command = shlex.join([*words, *(["--target", case.target.path] if case.target and case.target.path else [])])
    return f"{hub.download(str(path))} && {command}" if hub else command


def _free(path: str) -> str:
    """The path, with a number where something is there already: nothing is overwritten."""
    return next((p for p in (path, *(f"{path}-{i}" for i in range(2, 100))) if not os.path.lexists(p)), path)


def trained(case: Case) -> Wiring:
    """The trained wiring; without a target a depth of 32 may stand in, so judge no boundaries by it."""
    return case.contract.trained(case.target or shallow(case.contract))


def loader(case: Case) -> Mapping[str, Any]:
    """The row of the data that says what this release's loader does with names."""
    latent = entries(case, "mla_loader") if case.contract.latent else []
    return (latent or entries(case, "loader"))[0]


def table(case: Case, name: str) -> Sequence[Mapping[str, Any]]:
    """All rows of a table of the engine's data."""
    return Engine.load(case.engine.partition("==")[0]).data.get(name, ())


def entries(case: Case, name: str) -> list[Mapping[str, Any]]:
    """The rows of a table that hold for the release of this case."""
    engine, _, release = case.engine.partition("==")
    loaded = Engine.load(engine)
    return loaded.entries(name, loaded.known(release)[0])
