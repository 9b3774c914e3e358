"""What the notebooks stand on: their parameters resolved once, and plain rows for `show` to draw.

Empty paths mean the lab. On the lab there are three stages of the story; on a drafter of your own there is one.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import lab
from .checkpoint import Checkpoint
from .checks import check
from .contract import Contract, TargetInfo, Wiring
from .engines import Engine, served
from .findings import Evidence, Finding, Fix, KitError, Report
from .lab.story import RELEASE, Stage, stages
from .launch import parse
from .paths import DATA, ROOT, cache
from .rows import accept_row, log_rows, probe_rows, training_rows
from .training import Training, read_training

if TYPE_CHECKING:
    from .acceptance import Acceptance
    from .attribution import Attribution, TrainingSide


@dataclass
class Workbench:
    """The parameters of a notebook, resolved. Everything expensive happens on first use."""

    drafter: str = ""
    target: str = ""
    engine: str = ""
    launch: str = ""
    device: str = "auto"
    dtype: str = "auto"
    prompts: str = ""
    prompt_count: int = 0
    max_new_tokens: int = 64
    draft_steps: int = 4
    features: str = ""  # a dump of hidden states in place of a loaded target
    boundaries: str = ""  # of its states, such as "2,15,27", where nobody else says
    train_rows: str = ""
    train_row_count: int = 6  # of them are replayed; all are read
    train_metrics: str = ""  # a trainer's metrics or log; empty takes the metrics.json beside the drafter
    claimed: float = 0.0  # an accept length quoted from training; 0 where none was
    observed: float = 0.0  # a server's own; 0 where none is known
    url: str = ""  # a running server, whose own rendering training rows are compared with
    out: str = ""
    progress: Any = iter
    story: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _attributed: dict[str, Attribution] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if bool(self.drafter) != bool(self.target) and not self.features:
            raise KitError("Set both `drafter` and `target`, or neither for the built-in lab.")
        if self.draft_steps < 1 or self.max_new_tokens < 1:
            raise KitError("`draft_steps` and `max_new_tokens` must be at least 1.")

    @property
    def is_lab(self) -> bool:
        return not self.drafter

    @cached_property
    def target_path(self) -> Path:
        if self.drafter and not self.target:
            raise KitError("This reads more of the target than a dump holds; set `target` to its folder.")
        return Path(self.target) if self.target else lab.target_path()

    @cached_property
    def stages(self) -> list[Stage]:
        """The story's three on the lab; the given drafter under the given command otherwise."""
        if self.is_lab:
            return stages(self.engine or RELEASE)
        command = parse(self.launch) if self.launch else parse("--speculative-algorithm EAGLE3")
        return [Stage("as served", Path(self.drafter), command, self.engine, "fixed")]

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    @cached_property
    def info(self) -> TargetInfo:
        return TargetInfo.of(self.target_path)

    @cached_property
    def session(self):
        """Target loaded, its greedy texts recorded; see `diagnose.Session`. A dump's, where one was named."""
        from .diagnose import Session
        from .features import read_prompts

        if self.features:
            from .dumps import StoredSession

            return StoredSession.open(
                self.last.drafter, self.features, self.target, boundaries=self.boundaries, steps=self.draft_steps,
                count=self.prompt_count, device=self.device, dtype=self.dtype, progress=self.progress,
            )  # fmt: skip
        return Session.open(
            self.last.drafter,
            self.target_path,
            read_prompts(self.prompts or lab.PROMPTS, self.prompt_count),
            max_new_tokens=self.max_new_tokens,
            steps=self.draft_steps,
            device=self.device,
            dtype=self.dtype,
            cache=cache() / "greedy",
            progress=self.progress,
        )

    def preflight(self, stage: Stage) -> Report:
        """The pre-flight of one stage; on the lab, whether each planted fault was found goes into the story."""
        report = check(stage.drafter, target=self.target_path, engines=(stage.engine,), launch=stage.launch)
        found = {f.slug for f in report.errors}
        if stage.planted:
            self.story.append({"stage": stage.name, "planted": stage.planted, "found": sorted(found)})
        return report

    def served(self, stage: Stage, engine: str = ""):
        """How the stage's engine runs its files; see `engines.served`."""
        checkpoint = Checkpoint.open(stage.drafter)
        contract = Contract.of(checkpoint, self.info)
        release = Engine.load(stage.launch.engine).resolve(engine or stage.engine)[0]
        return served(checkpoint, contract, release, target=self.info, algorithm=stage.launch.algorithm or "EAGLE3")

    def wirings(self) -> dict[str, tuple[Wiring, str]]:
        """Name -> (wiring, role): as trained, as each stage serves it, and single faults for comparison."""
        from .lab.faults import FAULTS

        trained, single = self.session.trained, {}
        if self.session.contract.target_hidden == self.session.contract.hidden:
            single["one layer fed, capture off"] = (FAULTS["fc-bypass-config"].wiring(trained), "fault")
            if not self.is_lab:
                single["one layer fed, EAGLE"] = (FAULTS["fc-bypass-eagle"].wiring(trained), "fault")
        single["layer dropped, all else right"] = (FAULTS["layer-dropped"].wiring(trained), "fault")
        at = {s.name: (self.served(s).wiring, s.role) for s in self.stages}
        last = at.popitem()
        return {"as trained": (trained, "trained"), **at, **single, last[0]: last[1]}

    @cached_property
    def measured(self) -> dict[str, Acceptance]:
        """Exact acceptance under every wiring of `wirings`."""
        return {name: self.session.measure(wiring) for name, (wiring, _) in self.wirings().items()}

    @cached_property
    def controls(self) -> dict[str, Acceptance]:
        return self.session.controls()

    def accept_rows(self) -> list[dict[str, Any]]:
        """One row a wiring and a control, for tables and pictures."""
        roles = {name: role for name, (_, role) in self.wirings().items()}
        return [accept_row(n, a, roles.get(n, "control")) for n, a in (self.measured | self.controls).items()]

    def feature_rows(self) -> list[dict[str, Any]]:
        """What arrives under each wiring, against training; the last row but one is the last stage."""
        from .comparison import compare_wirings

        wirings = {n: w for n, (w, _) in self.wirings().items() if n != "layer dropped, all else right"}
        return compare_wirings(self.session, wirings | {"features zeroed": self.session.trained.but(capture="zeros")})

    def log_rows(self, releases: Iterable[str]) -> list[dict[str, Any]]:
        """What each release's log would print for every wiring; see `rows.log_rows`."""
        return log_rows(self.measured | self.controls, releases)

    @cached_property
    def expected(self) -> tuple[float, ...]:
        """Conditional accuracies from training, where they are known."""
        return self.training.conditional[: self.draft_steps] if self.training else ()

    @cached_property
    def training(self) -> Training | None:
        """What the trainer's metrics tell."""
        file = Path(lab.drafter_path() if self.is_lab else self.last.drafter) / "metrics.json"
        return read_training(self.train_metrics or file) if self.train_metrics or file.is_file() else None

    @property
    def expected_length(self) -> float | None:
        """The accept length that training promises; None without its metrics."""
        from .acceptance import expected_length

        return expected_length(self.expected) if len(self.expected) == self.draft_steps else None

    def training_rows(self) -> list[dict[str, Any]]:
        """Training's promise against the measurement; see `rows.training_rows`."""
        return training_rows(self.expected, self.expected_length, self.measured["as trained"])

    @cached_property
    def trained(self) -> TrainingSide:
        """The training rows (of a file, or those the lab's trainer held out) and the promise; see `attribution`."""
        from .attribution import TrainingSide
        from .server import Client
        from .texts import as_row, read_rows, served_ids

        rows = read_rows(self.train_rows) if self.train_rows else []
        if self.is_lab and not rows:
            from .lab.train import validation_rows

            rows = [as_row(r) for r in validation_rows(lab.drafter_path(), DATA / "lab-train.jsonl.gz")]
        few = [r.cut(self.max_new_tokens) for r in rows[: self.train_row_count]]
        ask = served_ids(Client(self.url).post) if self.url else None
        return TrainingSide(self.session, rows, few, self.training, cache() / "greedy", ask)

    def attribution(self, stage: Stage) -> Attribution:
        """The way from training's promise to this stage, step by step; measured once."""
        if stage.name not in self._attributed:
            known = {wiring: self.measured[name] for name, (wiring, _) in self.wirings().items()}
            numbers = {"claimed": self.claimed or None, "observed": self.observed or None}
            self._attributed[stage.name] = self.trained.attribution(self.served(stage).wiring, known, **numbers)
        return self._attributed[stage.name]

    def along(self) -> list[dict[str, Any]]:
        """Acceptance of the last stage by prompt length and by position in the sequence."""
        from .texts import along

        acceptance, texts = self.measured[self.last.name], self.session.texts
        return [*along(acceptance, texts, "prompt"), *along(acceptance, texts, "position")]

    def choices(self) -> list[str]:
        """Names that `chosen` measures on demand: as trained, and every fault of the lab."""
        from .lab.faults import FAULTS

        return ["as trained", *(n for n in FAULTS if n != "healthy")]

    def chosen(self, name: str) -> list[dict[str, Any]]:
        """The row of one wiring, measured when it is asked for."""
        from .lab.faults import FAULTS

        trained = self.session.trained
        wiring = trained if name == "as trained" else FAULTS[name].wiring(trained)
        return [accept_row(name, self.session.measure(wiring), "")]

    def accepted(self) -> dict[str, Any]:
        """The acceptance of every wiring and control, for the saved report."""
        return {name: a.to_dict() for name, a in (self.measured | self.controls).items()}

    def judged(self) -> list[Finding]:
        """The last stage against the controls and against training, along the text, and the training rows' text."""
        from .diagnose import judge
        from .texts import position_findings

        _, load = self.session.load(self.served(self.last).wiring)
        acceptance, most = self.measured[self.last.name], self.session.contract.max_positions
        found = judge(acceptance, self.controls, load) + self.attribution(self.last).findings()
        return found + position_findings(acceptance, self.session.texts, most) + self.trained.findings()

    def tensor_rows(self, stage: Stage, releases: Iterable[str]) -> list[dict[str, Any]]:
        """One row a tensor of the file, its fate in each release."""
        checkpoint = Checkpoint.open(stage.drafter)
        fates = {r: {f.name: f.status for f in self.served(stage, r).fates} for r in releases}
        rows = []
        for name, info in sorted(checkpoint.tensors.items()):
            each = {release: fate[name] for release, fate in fates.items()}
            worst = next((s for s in ("refused", "dropped", "overwritten", "renamed") if s in each.values()), "loaded")
            rows.append({"tensor": name, "shape": list(info.shape), "dtype": info.dtype, **each, "_status": worst})
        return rows

    def probe_rows(self, stage: Stage, releases: Iterable[str]) -> list[dict[str, Any]]:
        """One row a release whose own loader is asked about the stage's file; no row where none was named."""
        from .probe import probe

        asked = {release: probe(stage.drafter, release, target=self.target_path) for release in releases}
        return [probe_rows(result, self.served(stage, release)) for release, result in asked.items()]

    def contract_rows(self, stage: Stage) -> list[dict[str, Any]]:
        """What the trainer meant, each field with where it came from."""
        contract = Contract.of(Checkpoint.open(stage.drafter), self.info)
        names = ["hidden", "target_hidden", "aux_states", "boundaries", "vocab", "draft_vocab"]
        names += ["layers", "heads", "kv_heads"]
        rows = [{"field": "dialect", "value": contract.dialect.name, "from": contract.dialect.source}]
        return rows + [{"field": n, "value": getattr(contract, n), "from": contract.sources.get(n, "")} for n in names]

    def finish(
        self, findings: Iterable[Finding], stem: str, not_run: Iterable[dict] = (), **extra: Any
    ) -> tuple[Report, Path]:
        """The notebook's report, saved as `<out>/<stem>.json`. A planted fault that was missed is an error."""
        found = list(findings)
        for told in self.story:
            if missed := sorted(set(told["planted"]) - set(told["found"])):
                title = f"planted but not found in stage {told['stage']!r}: {', '.join(missed)}"
                found.append(Finding.of("E901", title, status="crashed"))
        engines = [s.engine or Engine.load(s.launch.engine).default for s in self.stages[-1:]]
        subject = {"drafter": str(self.last.drafter), "target": str(self.target_path), "engines": engines}
        extra |= {"story": self.story} if self.story else {}
        report = Report(subject, tuple(found), tuple(not_run), extra)
        return report, report.save(Path(self.out or ROOT / "reports" / "interactive") / f"{stem}.json")


def environment() -> list[Finding]:
    """E901 for every package that is absent or not the locked version; one pass finding where all is well."""
    lock = ROOT / "requirements.lock"
    wanted = {}
    for line in lock.read_text().splitlines() if lock.exists() else ():
        name, _, version = line.split("#")[0].split(";")[0].strip().partition("==")
        if version:
            wanted[name.strip()] = version.strip()
    wrong = []
    for name, version in wanted.items():
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "absent"
        if have.partition("+")[0] != version:
            wrong.append(f"{name} {have} (locked {version})")
    text = f"Python {platform.python_version()} · {len(wanted)} locked packages"
    evidence = [Evidence("config", text, {"python": sys.version.split()[0], "wrong": wrong})]
    if not wrong:
        return [Finding.of("E901", status="pass", evidence=evidence)]
    title = f"{len(wrong)} packages differ from the lock: {', '.join(wrong[:4])}"
    return [Finding.of("E901", title, evidence=evidence, fix=Fix("set up again", "make env"))]
