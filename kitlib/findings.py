"""Findings: what the kit says about a drafter, as data.

A diagnostic returns `Finding` objects; it never prints, plots or raises because a drafter is sick.
Every view (terminal, JSON, HTML, notebook) is a rendering of the same object, and `explain` prints the
catalogue text (`findings.toml`) that the finding itself is worded from.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import __version__

STATUSES = ("fail", "pass", "not-applicable", "not-run", "crashed")
SEVERITIES = ("error", "warning", "info")
MARKS = {"fail": "✗", "pass": "✓", "not-applicable": "–", "not-run": "?", "crashed": "☠"}


class KitError(Exception):
    """Bad input. The message is one sentence: what was wrong, where, and what to do."""


@dataclass(frozen=True)
class Evidence:
    """One observation behind a finding; `values` holds the numbers that `text` words."""

    source: str  # header, tensor, config, flags, log, server, probe, features, acceptance, training
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fix:
    """What to do, in words, and the command that does it (empty where there is none)."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Finding:
    """One diagnosis. Build with `Finding.of`, which words it from the catalogue."""

    code: str
    slug: str
    status: str
    severity: str
    title: str
    engine: str | None = None  # PEP 440 specifier such as "sglang==0.5.9"; None holds for every engine
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    effect: str = ""
    fix: Fix | None = None
    learn: str = ""
    references: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        code: str,
        title: str = "",
        *,
        status: str = "fail",
        engine: str | None = None,
        evidence: Iterable[Evidence] = (),
        fix: Fix | None = None,
        **overrides: Any,
    ) -> Finding:
        """Word a finding from the catalogue; whatever is given replaces the catalogue's text."""
        entry = catalogue()[code]
        if status not in STATUSES:
            raise ValueError(f"unknown status {status!r}")
        failed = status == "fail"
        texts = {
            "severity": entry["severity"] if failed else "info",
            "cause": entry["cause"] if failed else "",
            "effect": entry["effect"] if failed else "",
            "learn": entry.get("learn", ""),
            "references": tuple(entry.get("references", ())),
        }
        return cls(
            code,
            entry["slug"],
            status,
            title=brief(title or entry["title" if failed else "pass_title"]),
            engine=engine,
            evidence=tuple(replace(e, text=brief(e.text)) for e in evidence),
            fix=fix or (Fix(entry["fix"]) if failed else None),
            **{**texts, **overrides},
        )

    @property
    def is_error(self) -> bool:
        return self.status == "crashed" or (self.status == "fail" and self.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """The text form of the design: one block, marks that do not depend on colour."""
        mark = "!" if self.status == "fail" and self.severity != "error" else MARKS[self.status]
        lines = [f"[{mark}] {self.code} {self.slug}" + (f" · {self.engine}" if self.engine else "")]
        lines.append(f"    {self.title}")
        rows = [
            ("evidence", " · ".join(f"{e.source}: {e.text}" for e in self.evidence)),
            ("cause", self.cause),
            ("effect", self.effect),
            ("fix", (self.fix.command or self.fix.text) if self.fix else ""),
            ("learn", " · ".join(x for x in (self.learn, f"python -m kitlib explain {self.code}") if x)),
        ]
        shown = rows if self.status == "fail" else rows[:1]
        lines = [plain(line) for line in lines]
        shown = [(label, plain(text)) for label, text in shown]
        return "\n".join(lines + [f"    {label:<9} {text}" for label, text in shown if text])


@dataclass(frozen=True)
class Report:
    """What one run found, about what; the JSON of `check`, `probe`, `measure` and `findings.json`."""

    subject: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()
    not_run: tuple[Mapping[str, str], ...] = ()  # {"slug": …, "reason": …}
    extra: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"acceptance": {…}}

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.is_error)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == "fail" and f.severity == "warning")

    @property
    def exit_code(self) -> int:
        """0 without an error-level finding, 1 with at least one."""
        return 1 if self.errors else 0

    def verdict(self) -> str:
        """One line a reader can act on; a check that did not run is counted, never called a pass."""
        names = ", ".join(dict.fromkeys(f"{f.code} {f.slug}" for f in self.errors))
        soft = ", ".join(dict.fromkeys(f"{f.code} {f.slug}" for f in self.warnings))
        passed = sum(f.status == "pass" for f in self.findings)
        left = len(self.not_run) + sum(f.status == "not-run" for f in self.findings)
        tail = f" · {len(self.warnings)} warnings ({soft})" if soft else ""
        tail += f" · {left} not run" if left else ""
        if names:
            return f"✗ sick: {names}{tail}"
        if not passed:
            return f"? undecided: no check passed{tail}"
        return f"✓ no error found in {passed} checks{tail}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kitlib": __version__,
            "subject": dict(self.subject),
            "findings": [f.to_dict() for f in self.findings],
            "not_run": [dict(n) for n in self.not_run],
            **self.extra,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, default=_plain, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the JSON atomically and return where it went."""
        return write_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a saved report; KitError when the file is not one."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            raw.pop("kitlib")
            found = tuple(_finding(item) for item in raw.pop("findings"))
            return cls(raw.pop("subject"), found, tuple(raw.pop("not_run")), raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise KitError(f"{path} is not a report of this kit ({error}); make one with `kitlib report`.") from None

    def __str__(self) -> str:
        order = sorted(self.findings, key=lambda f: (not f.is_error, STATUSES.index(f.status), f.code))
        blocks = [str(f) for f in order]
        blocks += [f"[?] not run: {n['slug']} ({n['reason']})" for n in self.not_run]
        blocks += [f"note: {c}" for c in self.extra.get("caveats", ())]
        return "\n".join([*blocks, self.verdict()])


def merge_engines(releases: Sequence[str], findings: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Join equal findings of adjacent releases; `findings` holds (release, finding), releases like "sglang==0.5.9".

    The merged finding's engine is a specifier such as `sglang>=0.4.9,<=0.5.11`; its fix is the newest release's.
    """
    runs: list[tuple[int, int, Finding]] = []  # (first, last, finding without engine and fix)
    for release, finding in findings:
        at = releases.index(release)
        for i, (first, last, known) in enumerate(runs):
            if last in (at, at - 1) and replace(known, fix=None) == replace(finding, engine=None, fix=None):
                runs[i] = (first, at, replace(known, fix=finding.fix))
                break
        else:
            runs.append((at, at, replace(finding, engine=None)))
    merged = []
    for first, last, finding in runs:
        name, _, low = releases[first].partition("==")
        high = releases[last].partition("==")[2]
        merged.append(replace(finding, engine=f"{name}=={low}" if low == high else f"{name}>={low},<={high}"))
    return merged


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Every finding code with its texts, from `findings.toml`."""
    text = (Path(__file__).parent / "findings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def explain(code: str) -> str:
    """The full text of a finding; accepts the code or the slug."""
    known = catalogue()
    key = next((k for k, v in known.items() if code.lower() in (k.lower(), v["slug"])), None)
    if key is None:
        raise KitError(f"There is no finding {code!r}; the known ones are {', '.join(known)}.")
    entry = known[key]
    parts = [f"{key} {entry['slug']} ({entry['severity']})", "", entry["title"], "", entry["what"]]
    for label in ("cause", "effect", "fix"):
        parts += ["", f"{label.capitalize()}: {entry[label]}"]
    if entry.get("learn"):
        parts += ["", f"Learn: {entry['learn']}"]
    parts += [f"See: {ref}" for ref in entry.get("references", ())]
    return "\n".join(parts)


def brief(text: str, most: int = 1000) -> str:
    """The text, its middle left out where a file made it longer than anybody reads."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"


def plain(text: str) -> str:
    """One line that a terminal shows as it is: names in files may hold line ends and escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_bounded(path: str | Path, most: int, what: str) -> bytes:
    """A whole file, or what a pipe holds; KitError above `most` bytes: `/dev/zero` and old logs have no end."""
    try:
        with open(path, "rb", opener=_never_waiting) as file:
            os.set_blocking(file.fileno(), True)
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in a path
        raise KitError(f"Cannot read {what} {path}: {getattr(error, 'strerror', None) or error}.") from None
    if len(data) > most:
        raise KitError(f"{path} is larger than {most >> 20} MB, too large for {what}; cut out the part that matters.")
    return data


def _never_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is empty; to open it would take for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_atomic(path: str | Path, data: str | bytes) -> Path:
    """Write a file so that a reader sees the old content or the new one, never a half."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = handle.name
            handle.write(data.encode() if isinstance(data, str) else data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise KitError(f"Cannot write {path}: {error.strerror or error}; choose another output folder.") from None
    return path


def _finding(item: dict[str, Any]) -> Finding:
    """A Finding back from its JSON form."""
    item = dict(item)
    item["evidence"] = tuple(Evidence(**e) for e in item["evidence"])
    item["fix"] = Fix(**item["fix"]) if item["fix"] else None
    item["references"] = tuple(item["references"])
    return Finding(**item)


def _plain(value: Any) -> Any:
    """JSON form of what numpy, torch and pathlib hand us."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, tuple)):
        return list(value)
    return str(value)
