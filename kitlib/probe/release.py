"""Where a release comes from, and how the child runs: a wheel unpacked whole, a clean environment, a time-out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..findings import KitError
from ..paths import cache

CHILD = Path(__file__).with_name("child.py")
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")  # no tokens


class Unfetched(Exception):
    """The release could not be fetched; the reason in one line."""


def fetch(release: str, wheel: str | Path | None, python: str) -> Path | None:
    """The folder of an unpacked release; None for the one that is installed beside `python`."""
    if wheel:
        if not Path(wheel).is_file():
            raise KitError(f"There is no wheel {wheel}; leave it out to fetch the release with pip.")
        return _unpacked(f"{Path(wheel).stem}-{os.stat(wheel).st_mtime_ns}", lambda _: Path(wheel))
    try:
        if python == sys.executable and importlib.metadata.version("sglang") == release:
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    return _unpacked(f"sglang-{release}", lambda folder: _download(release, folder))


def _unpacked(name: str, get: Callable[[Path], Path]) -> Path:
    """Unpack beside its place and move it there whole: half a package silently loses to an installed one."""
    place = cache().absolute() / "probe" / name
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".unpack-") as folder:
            file = get(Path(folder))
            with zipfile.ZipFile(file) as archive:
                archive.extractall(Path(folder, "all"))
            os.replace(Path(folder, "all"), place)
    except zipfile.BadZipFile:
        raise KitError(f"{file} is no wheel; fetch it again.") from None
    except OSError as error:
        if not place.is_dir():  # else another process was first
            raise KitError(f"Cannot unpack {name} into {place.parent} ({error.strerror}); make room there.") from None
    return place


def _download(release: str, folder: Path) -> Path:
    """The release's wheel from the package index, without what it depends on."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"sglang=={release}"]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True)
    if done.returncode:
        raise Unfetched(f"pip could not fetch sglang {release}: {_last_line(done.stderr)}")
    return next(folder.glob("*.whl"))


def run(python: str, job: dict[str, Any], work: Path, timeout: float) -> str:
    """Run the child on a job, which it answers in `work`/out; returns "" or why it did not end well."""
    Path(work, "job.json").write_text(json.dumps(job | {"out": str(work / "out")}), encoding="utf-8")
    environment = {k: os.environ[k] for k in PASSED_ON if k in os.environ} | {"HF_HOME": str(work)}
    with Path(work, "log").open("wb") as log:
        try:
            child = subprocess.Popen(
                [python, str(CHILD), str(work / "job.json")],
                env=environment,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot start {python}: {error.strerror}"
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout:g} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    last = _last_line(Path(work, "log").read_text(encoding="utf-8", errors="replace"))
    return "" if code == 0 else last or f"the child ended with code {code} and said nothing"


def _last_line(text: str) -> str:
    """The last line that says something, cut to 300 characters."""
    lines = (line.removeprefix("[rank0]:").strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")[:300]
