"""The story in three stages on the lab: keys dropped and one layer fed; names repaired; served right."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..findings import KitError
from ..launch import Launch, parse
from ..paths import cache
from . import DRAFTER_SHA256, drafter_path, faults
from .faults import plant

RELEASE = "sglang==0.5.9"  # a release whose loader drops `layers.0.*` without a word


@dataclass(frozen=True)
class Stage:
    """One moment: the files that are served and the command that serves them."""

    name: str
    drafter: Path
    launch: Launch
    engine: str
    role: str  # trained | fault | control | fixed, for the pictures
    planted: tuple[str, ...] = ()  # slugs that the pre-flight has to find


def planted(fault: str) -> Path:
    """A planted fault in the cache, made on first use and again when the drafter or the faults' code changes."""
    made_of = Path(faults.__file__).read_bytes() + drafter_path().joinpath("config.json").read_bytes()
    key = hashlib.sha256(made_of + DRAFTER_SHA256.encode()).hexdigest()[:12]
    folder = cache() / "lab" / "planted" / key / fault
    if not folder.exists():
        try:
            plant(fault, folder)
        except KitError:  # another process was first
            if not folder.exists():
                raise
    return folder


def command(algorithm: str, drafter: Path) -> Launch:
    """The story's launch command, with the lab's paths left out of what does not matter."""
    return parse(
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {drafter} --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )


def stages(engine: str = RELEASE) -> list[Stage]:
    """Plant what each stage serves (once, in the cache) and say what has to be found in it."""
    flat, repaired = planted("layers0-flat"), planted("healthy")
    engine = engine or RELEASE
    return [
        Stage(
            "1 keys dropped, one layer fed",
            flat, command("EAGLE", flat), engine, "fault", ("key-naming", "algorithm-flag", "fc-bypassed"),
        ),
        Stage(
            "2 names repaired, one layer fed",
            repaired, command("EAGLE", repaired), engine, "fault", ("algorithm-flag", "fc-bypassed"),
        ),
        Stage("3 served right", repaired, command("EAGLE3", repaired), engine, "fixed"),
    ]  # fmt: skip
