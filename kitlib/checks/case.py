"""What one run of the checks looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo
from ..engines import Served
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
    path = case.checkpoint.path
    return f"python -m kitlib convert {path} {path}-for-{case.engine.replace('==', '-')} --to {case.engine}"
