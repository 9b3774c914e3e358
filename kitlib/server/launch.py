"""Typed parameters → command line and environment of an SGLang server, on a GPU or on the kit's CPU engine."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..findings import KitError
from ..logs import redact

HERE = Path(__file__).resolve().parent
CPU_PATH = HERE.parent / "cpu_engine" / "path"
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
ALGORITHMS = ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE", "NGRAM", "")
CPU_FLAGS = (
    "--device cpu --disable-cuda-graph --mem-fraction-static 0.2 --max-total-tokens 8192 --context-length 1024 "
    "--max-running-requests 32 --decode-log-interval 1"
)


@dataclass(frozen=True)
class Launch:
    """What is served. Without a drafter, or with algorithm "", there is no speculation (NGRAM needs no drafter)."""

    target: str | Path
    drafter: str | Path | None = None
    algorithm: str = "EAGLE3"
    steps: int = 4  # S: draft steps of a round
    topk: int = 1
    draft_tokens: int | None = None  # D, the root included; None: steps + 1
    dtype: str = "float32"
    port: int = 0  # 0: a free one
    extra: tuple[str, ...] = ()  # more flags; they come last, so they win
    server: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server")  # another environment's may serve

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise KitError(f"The algorithm {self.algorithm!r} is none of {', '.join(filter(None, ALGORITHMS))} or ''.")
        if min(self.steps, self.topk, self.draft_tokens or 1) < 1 or not 0 <= self.port < 65536:
            raise KitError("Steps, top-k and draft tokens must be at least 1, and the port between 0 and 65535.")
        if self.topk == 1 and self.draft_tokens not in (None, self.steps + 1):
            raise KitError(f"A chain of {self.steps} steps has {self.steps + 1} draft tokens, not {self.draft_tokens}.")
        for path in filter(None, (self.target, self.drafter)):
            if str(path).startswith(("/", ".", "~")) and not Path(path).expanduser().exists():
                raise KitError(f"There is nothing at {path}; name a model folder or a hub id.")

    @property
    def speculates(self) -> bool:
        """Whether the server is to speculate."""
        return bool(self.algorithm) and (self.drafter is not None or self.algorithm == "NGRAM")

    def command(self, engine: str = "auto", port: int = 0) -> list[str]:
        """The command line, word by word."""
        engine = choose_engine(engine)[0] if engine == "auto" else engine
        words = [*self.server, "--model-path", str(self.target), "--host", "127.0.0.1"]
        words += ["--port", str(port or self.port), "--dtype", self.dtype, "--enable-metrics"]
        words += CPU_FLAGS.split() if engine == "cpu" else []
        if self.speculates:
            words += ["--speculative-algorithm", self.algorithm]
            words += ["--speculative-draft-model-path", str(self.drafter)] if self.drafter else []
            if self.algorithm != "NGRAM":
                words += ["--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk)]
            words += ["--speculative-num-draft-tokens", str(self.draft_tokens or self.steps + 1)]
        return [*words, *self.extra]

    def __str__(self) -> str:
        return redact(shlex.join(self.command()))

    def environment(self, engine: str) -> dict[str, str]:
        """What is set for the server on top of this process's environment."""
        local = all(Path(p).exists() for p in (self.target, self.drafter or self.target))
        env = {"PYTHONUNBUFFERED": "1"} | ({"HF_HUB_OFFLINE": "1"} if local else {})
        if engine == "cpu":
            path = os.pathsep.join(filter(None, (str(CPU_PATH), os.environ.get("PYTHONPATH"))))
            env |= {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            env |= {"OMP_NUM_THREADS": str(threads()), "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        return env


def choose_engine(engine: str = "auto") -> tuple[str, str]:
    """("gpu" or "cpu", why). KitError where a GPU was asked for and none answers."""
    if engine not in ("auto", "gpu", "cpu"):
        raise KitError(f"The engine {engine!r} is none of auto, gpu, cpu.")
    if engine == "cpu":
        return "cpu", "the CPU engine was asked for"
    gpu, why = "", "nvidia-smi is not installed"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        why = "CUDA_VISIBLE_DEVICES is empty"
    elif shutil.which("nvidia-smi"):
        why = "nvidia-smi lists no GPU"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
            gpu = said.stdout.partition(" (UUID")[0].strip() if said.returncode == 0 else ""
    if engine == "gpu" and not gpu:
        raise KitError(f"A GPU was asked for, but {why}; use engine='cpu', or attach to a server elsewhere.")
    return ("gpu", gpu) if gpu else ("cpu", f"{why}, so SGLang runs on the kit's CPU engine")


def check_installed(launch: Launch) -> None:
    """KitError where this Python would serve and has no SGLang."""
    if launch.server[:3] == (sys.executable, "-m", "sglang.launch_server") and not importlib.util.find_spec("sglang"):
        where = "run `make env`" if sys.platform == "linux" else "it has no wheels for this system"
        raise KitError(f"SGLang is not installed here; {where}, or attach to a server elsewhere by its URL.")


def threads() -> int:
    """One compute thread for each core that is free now; OMP_NUM_THREADS decides where it is set."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(cores - busy()))


def busy(seconds: float = 0.5) -> float:
    """Cores at work right now. A load average would still count what has just ended."""
    try:
        first, second = _times(), time.sleep(seconds) or _times()
    except (OSError, ValueError):  # no /proc
        return os.getloadavg()[0]
    idle, spent = second[3] + second[4] - first[3] - first[4], sum(second) - sum(first)
    return (1 - idle / spent) * (os.cpu_count() or 1) if spent > 0 else 0.0


def _times() -> list[int]:
    """The kernel's clock ticks of all cores: user, nice, system, idle, waiting, …"""
    return [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def free_port(port: int = 0) -> int:
    """This port of the loopback if it is free, or any free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise KitError(f"Port {port} is taken by another process; take port 0 for a free one.") from None
        return probe.getsockname()[1]


class Process:
    """A server under `guard.py`, in a session of its own: it and all that it starts end with this process."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        guard = [sys.executable, "-I", str(HERE / "guard.py"), str(GRACE)]
        with open(log, "ab") as out:
            self._guard = subprocess.Popen(
                [*guard, *command], stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **env},
                start_new_session=True,
            )  # fmt: skip
        self._owner = os.getpid()
        atexit.register(self.stop)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it ends within this time."""
        try:
            self._guard.wait(within_s)
            return True
        except subprocess.TimeoutExpired:
            return False

    def stop(self) -> None:
        """End it and wait until all of it is gone."""
        if os.getpid() != self._owner:  # a fork of this process owns nothing
            return
        atexit.unregister(self.stop)
        self._guard.stdin.close()
        if not self.ended(GRACE + 15):
            self._guard.kill()  # the server dies with it: PDEATHSIG
            self._guard.wait()
