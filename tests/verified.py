"""Tables that `make verify` commits: each with its command, commit and machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from kitlib.findings import write_atomic
from kitlib.paths import DATA, ROOT


def provenance(command: str) -> list[str]:
    """Two lines: the command and the commit, and the machine."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    said = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((x.partition(": ")[2] for x in said if "model name" in x), platform.machine())
    machine = f"{os.cpu_count()} × {cpu}, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    return [f"`{command}` at commit {commit};", f"{machine}, load {os.getloadavg()[0]:.1f} at the end."]


def write_table(
    name: str, title: str, command: str, text: str, heads: Sequence[str], rows: Iterable[Sequence], after: str = ""
) -> Path:
    """data/verified/<name>.md; `text` says what the columns mean."""
    lines = [f"# {title}", "", *provenance(command)]
    lines += ["", text, "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return write_atomic(DATA / "verified" / f"{name}.md", "\n".join([*lines, *(["", after] if after else [])]) + "\n")
