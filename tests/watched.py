"""Run a command of the kit in this process and see to what must hold whatever it was given.

A code of 0, 1 or 2; one sentence for 2; sound JSON where it was asked for; an end within half a minute; and nothing
changed, started or called outside the folder that it was told to write.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kitlib.__main__ import main

LIMIT = 30  # seconds for one command; a healthy one takes a tenth of one
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
CALLS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class"}
_heard: list[str] = []
_listening = False


def _hear(event: str, args: tuple) -> None:
    """Note every place that is changed, and every program or peer that is called."""
    if not _listening:
        return
    if event in CALLS:
        _heard.append(event)
    elif event in CHANGES or (event == "open" and args[2] & WRITING):
        handle = args[-1] if event in ("os.remove", "os.rmdir") else -1  # rmtree names files by their folder's handle
        folder = os.readlink(f"/proc/self/fd/{handle}") if handle >= 0 else ""
        paths = args[: 1 + (event == "os.rename")]
        _heard.extend(os.path.join(folder, p) for p in paths if isinstance(p, (str, os.PathLike)))


sys.addaudithook(_hear)


@contextmanager
def watchdog():
    """Fail what takes longer than LIMIT."""

    def bark(*_):
        pytest.fail(f"it took more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(*argv: str, out: Path | None = None) -> int:
    """One command's exit code. `out` is the only thing that it may make, in a folder of its own; it is then removed."""
    global _listening
    stdout, stderr = io.StringIO(), io.StringIO()
    _heard.clear()
    with watchdog(), redirect_stdout(stdout), redirect_stderr(stderr):
        _listening = True
        try:
            code = main(list(argv))
        finally:
            _listening = False
    said, complaint = stdout.getvalue(), stderr.getvalue()
    assert code in (0, 1, 2) and "Traceback" not in complaint and "crashed" not in said, said + complaint
    if code == 2:
        *before, sentence = complaint.splitlines()
        assert sentence.startswith("kitlib: ") and sentence.isprintable() and len(sentence) < 1200, complaint
        assert not any("kitlib: " in line for line in before), complaint
    else:
        assert said
    if "--json" in argv and said:
        json.loads(said, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    strays = [p for p in _heard if not (out and p.startswith(f"{out.parent}/"))]
    assert not strays, strays
    if out:
        left = os.listdir(out.parent)
        assert left == ([] if code == 2 else [out.name]), left
        shutil.rmtree(out, ignore_errors=True)
    return code
