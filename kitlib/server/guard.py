"""The process between the kit and a server: it ends the server, and all that the server started, with the kit.

`python -I guard.py GRACE_SECONDS COMMAND …` runs the command and watches its own stdin, a pipe that the kit holds.
The pipe closes when the kit stops the server, exits, or is killed (SIGKILL too); then everything below this process
gets SIGTERM, and SIGKILL after the grace. On Linux no descendant can leave: orphans come back here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

DEATHSIG, SUBREAPER = 1, 36  # prctl(2)


def main() -> int:
    """Run the command until it or the kit ends; its exit code, 128 + n for signal n."""
    grace, command, kit = float(sys.argv[1]), sys.argv[2:], os.getppid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    prctl(SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=lambda: prctl(DEATHSIG, signal.SIGKILL)
    )
    try:
        while server.poll() is None and os.getppid() == kit:
            if select.select([0], [], [], 0.2)[0] and not os.read(0, 1):
                break
        return 128 - server.returncode if (server.returncode or 0) < 0 else server.returncode or 0
    finally:
        end(server.pid, grace)


def end(group: int, grace: float) -> None:
    """SIGTERM to the group and every descendant; SIGKILL to whatever is there after `grace` seconds."""
    started, sign = time.monotonic(), signal.SIGTERM
    told: set[int] = set()
    while time.monotonic() < started + grace + 10:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = descendants()
        if time.monotonic() > started + grace:
            sign, told = signal.SIGKILL, set()
        for pid in [-group, *alive]:
            if pid not in told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.kill if pid > 0 else lambda p, s: os.killpg(-p, s))(pid, sign)
                told.add(pid)
        if not alive and (sign == signal.SIGKILL or Path("/proc/self/stat").exists()):
            return
        time.sleep(0.05)


def descendants() -> set[int]:
    """Every process below this one, by /proc; empty where there is none."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


if __name__ == "__main__":
    sys.exit(main())
