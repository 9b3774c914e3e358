"""An engine's log: decode lines, start-up options, stamps, warnings, errors, and why a server died."""

from __future__ import annotations

import ast
import io
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..engines.data import Engine
from .counts import number, plain

LONG = 1 << 20  # bytes of an unfinished line that are kept; characters of a line that are read
DEEP = 1000  # lines of a traceback that are kept
ARGUMENTS = 1 << 18  # characters of start-up options; a syntax tree takes 400 times their size
_DATA = Engine.load().data
_SAYS = _DATA["log"]  # the log has no levels: errors and warnings are known by their words
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?)(?: ([^\]\n]{1,60}))?\] ?")
_DECODE = re.compile(r"Decode batch(?: \[\d+\])?[.,] (#.*)")
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^.*\r(?=.)")  # colours; all but the last state of a progress bar


@dataclass(frozen=True)
class Event:
    """A stamp (`[[stamp]]`), warning, error or exception of the log; `detail` holds the traceback."""

    time: datetime | None  # the engine's own clock: whole seconds unless it logs milliseconds, no zone
    kind: str
    text: str
    detail: str = ""


@dataclass
class Log:
    """An engine's log, fed line by line."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # decode_row
    events: list[Event] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)
    errors: list[Event] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)  # in the engine's spelling, e.g. speculative_num_steps
    last: str = ""  # the last line that said something
    _time: datetime | None = None
    _trace: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str | bytes) -> Log:
        """Read a whole log."""
        log = cls()
        for line in io.StringIO(plain(text)):
            log.feed(line)
        log.close()
        return log

    def feed(self, line: str) -> None:
        """Take one line."""
        if not (line := _NOISE.sub("", line[:LONG].rstrip("\n")).rstrip()):
            return
        if row := decode_row(line):
            self.close()
            self.rows.append(row)
            return
        if stamp := _STAMP.search(line[:400]):
            self.close()
            self._time, line = _time(stamp[1]), line[stamp.end() :]
        said = redact(line.strip())[:400]
        if said and self._trace:
            if len(self._trace) < DEEP or not line[0].isspace():
                self._trace.append(redact(line)[:500])
            if not line[0].isspace():  # the exception itself
                self.close()
            return
        self.last = said or self.last
        if "server_args=" in said or said.startswith("ServerArgs("):
            self.flags = self.flags or flags(line)
        if "Traceback (most recent call last)" in said:
            self._trace = [said]
        elif found := next((r for r in _DATA["stamp"] if re.search(r["pattern"], said)), None):
            if not (found.get("once") and any(e.kind == found["kind"] for e in self.events)):
                self.events.append(Event(self._time, found["kind"], said))
        elif re.search(_SAYS["error"], said):
            self.errors.append(Event(self._time, "error", said))
        elif re.search(_SAYS["warning"], said):
            self.warnings.append(Event(self._time, "warning", said))

    def close(self) -> None:
        """End an open traceback; to be called when the log has ended."""
        if self._trace:
            text = self._trace[-1] if not self._trace[-1][0].isspace() else "a traceback without an end"
            if ":" not in text:  # a bare AssertionError: say where
                text += " at " + " ".join([x.strip() for x in self._trace[:-1] if x.strip(" ^~")][-2:])
            self.errors.append(Event(self._time, "exception", text, "\n".join(self._trace)))
        self._trace = []


class Tail:
    """The lines of a file that may still be growing, be rotated or truncated, or not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._file, self._rest = Path(path), None, b""

    def read(self, final: bool = False) -> list[str]:
        """The lines since the last call. A half-written one waits for its end, unless `final`, which also closes."""
        try:
            here = open(self.path, "rb")  # noqa: SIM115 (kept open: a rotated file is read to its end)
        except OSError:
            here = None
        mine = self._file
        if mine and os.fstat(mine.fileno()).st_size < mine.tell():  # truncated in place
            mine.seek(0)
            self._rest = b""
        self._rest += mine.read() if mine else b""
        if here and not (mine and os.path.sameopenfile(here.fileno(), mine.fileno())):  # rotated, or the first call
            self._rest += (b"\n" if self._rest else b"") + here.read()
            self._file, here = here, mine
        if here:
            here.close()
        if final and self._file:
            self._rest += b"\n" if self._rest else b""
            self._file = self._file.close()
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest[-LONG:]
        return [plain(x) for x in lines]


def decode_row(line: str) -> dict[str, Any] | None:
    """One decode line of any SGLang release since 0.4.4, with the columns of `[log.decode]`; None for another line.

    `accept_len` includes the bonus token; `accept_rate` follows its release's formula (`[[rate]]`).
    """
    if not (found := _DECODE.search(line)):
        return None
    stamp = _STAMP.search(line[: found.start()])
    row = {"time": _time(stamp[1]) if stamp else None, "rank": (stamp and stamp[2]) or ""}
    row |= {**dict.fromkeys(_SAYS["decode"].values()), "graph": None, "extra": {}}
    for name, value in re.findall(r"\s*([^:,]{1,80}): ([^,]*)", found[1]):
        if name in _SAYS["decode"]:
            row[_SAYS["decode"][name]] = number(value.strip())
        elif name.endswith(" graph"):  # cuda, cpu, npu, musa
            row["graph"] = value.strip() == "True"
        else:
            row["extra"][name] = redact(value.strip())
    return row


def flags(line: str) -> dict[str, Any]:
    """Start-up options from a `server_args=…` line, call or dict form; secrets are redacted."""
    text = (line.partition("server_args=")[2] or line).strip()
    if len(text) > ARGUMENTS:
        return {}
    for source in (text, re.sub(r"<[^<>]*>", "None", text)):  # with an object among the values: without it
        try:
            tree = ast.parse(source, mode="eval").body
            call = isinstance(tree, ast.Call)
            told = {k.arg: ast.literal_eval(k.value) for k in tree.keywords} if call else dict(ast.literal_eval(tree))
            return {k: _hide(str(k), v) for k, v in told.items()}
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
    return {}


def redact(text: str) -> str:
    """The text without tokens, keys and passwords."""
    return re.sub(_SAYS["secret_text"], "…", text)


def reason(log_text: str | bytes) -> tuple[str, str]:
    """Why a server died in start-up: (kind, one sentence); ("", "") where its log says that it became ready."""
    log = Log.parse(log_text)
    for i, error in enumerate(log.errors):  # the first that is understood: what follows are its consequences
        frames = "\n".join(e.detail for e in log.errors[i : i + 3])  # an exception comes before the one it caused
        for row in _DATA["death"]:
            found = re.search(row["pattern"], error.text)
            if found and re.search(row.get("frames", ""), frames):
                return row["kind"], row["says"].format(text=error.text, **found.groupdict("?"))
    if any(e.kind == "ready" for e in log.events):
        return "", ""
    if log.errors:
        return "other", f"it stopped with {log.errors[0].text}"
    return "unknown", f"the log holds no error; its last line is {log.last!r}"


def _hide(name: str, value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return value if redact(repr(value)) == repr(value) else "…"
    return ("…" if re.search(_SAYS["secret_name"], name) else redact(value)) if isinstance(value, str) else value


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
