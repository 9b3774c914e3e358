"""Stored hidden states as a source of features: the dumps that trainers write, replayed one sample at a time.

Memory does not grow with the number of samples, and a target that fits nowhere is still measured: of it only the
embedding, the head and the final norm are read. `files.py` knows the layouts, and `write` makes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..acceptance import Acceptance, draft_everywhere, walk
from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo, Wiring, parameter_shapes
from ..contract.dialects import SPECULATORS_HOOK_AFTER
from ..diagnose import Session
from ..features import States, Text
from ..findings import KitError, Report, read_bounded
from .files import LAYOUTS, Sample, Skip, find, read, write
from .target import StoredTarget

__all__ = ["Dump", "StoredSession", "write"]


@dataclass
class Dump:
    """A folder of samples, and what is known of their states. `skipped`, `used` and `dtypes` are of the last pass."""

    path: Path
    files: list[Path]
    first: Sample
    boundaries: tuple[int, ...]  # of the K auxiliary states
    last: int | None  # boundary of the last state, where it was said
    source: str  # who says which boundaries these are
    norm: str  # state of the last tensor: pre-norm, post-norm or unknown
    norm_source: str
    count: int = 0  # samples to use; 0 takes all
    skipped: dict[str, str] = field(default_factory=dict)  # file -> reason
    used: int = 0
    dtypes: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: str | Path, boundaries: Sequence[int] = (), contract: Contract | None = None) -> Dump:
        """Read the first usable file, and learn which layers the dump holds; KitError where nobody says.

        `boundaries`: of the K auxiliary states, or of these and the last one; else what the dump says, else the ids
        that the drafter's config stores.
        """
        path = Path(path)
        files = find(path)
        first, why = None, ""
        for file in files:
            try:
                first = read(file)
                break
            except Skip as reason:
                why = why or f"{file.name} {reason}"
        if first is None:
            raise KitError(f"None of the {len(files)} files in {path} can be used (the first: {why}); dump them again.")
        ids, source = _boundaries(path, first, tuple(boundaries), contract)
        states = len(first.aux)
        if len(ids) not in (states, states + 1):
            what = f"{first.file} holds {states} states and the last one"
            raise KitError(f"{what}, but {source} says boundaries {list(ids)}; name those of the {states}.")
        last = ids[states] if len(ids) > states else None
        norm = first.said.get("last") or LAYOUTS[first.layout][1]
        said = "the files' metadata" if "last" in first.said else f"the code that writes {first.layout}"
        return cls(path, files, first, ids[:states], last, source, norm or "unknown", said if norm else "nobody")

    def samples(self, vocab: int) -> Iterator[Sample]:
        """Every usable sample, read when its turn comes; token ids must be below `vocab`."""
        self.used, self.skipped, self.dtypes = 0, {}, set()
        for file in self.files:
            if self.count and self.used == self.count:
                return
            try:
                sample = read(file)
                if sample.kind != self.first.kind:
                    raise Skip(f"is of another kind ({sample.kind}) than {self.first.file} ({self.first.kind})")
                if not 0 <= int(sample.ids.min()) <= int(sample.ids.max()) < vocab:
                    raise Skip(f"holds ids up to {int(sample.ids.max())}, outside the target's vocabulary of {vocab}")
            except Skip as why:
                name = file.relative_to(self.path) if file != self.path else file.name
                self.skipped[str(name)] = str(why)
                continue
            self.used += 1
            self.dtypes.add(str(sample.last.dtype).removeprefix("torch."))
            yield sample


@dataclass
class StoredSession(Session):
    """A `Session` whose states come from a dump: the same measurements, each one pass over the files."""

    dump: Dump = None  # type: ignore[assignment]
    counts: dict[str, int] = field(default_factory=dict)  # answer tokens; those not the target's choice; cut rounds
    _measured: dict[Wiring, Acceptance] = field(default_factory=dict, repr=False)

    @classmethod
    def open(  # type: ignore[override]
        cls,
        drafter: str | Path,
        features: str | Path,
        target: str | Path = "",
        *,
        boundaries: str = "",
        steps: int = 4,
        count: int = 0,
        device: str = "auto",
        dtype: str = "auto",
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> StoredSession:
        """Read the drafter's headers, the dump's first usable sample, and the target's two or three tensors."""
        if not re.fullmatch(r"([0-9]{1,4}(,[0-9]{1,4})*)?", given := boundaries.replace(" ", "")):
            raise KitError(f"The boundaries are {boundaries!r}; give whole numbers, such as 2,15,27.")
        checkpoint = Checkpoint.open(drafter)
        contract = Contract.of(checkpoint, TargetInfo.of(target) if target else None)
        dump = replace(Dump.open(features, [int(b) for b in given.split(",") if b], contract), count=count)
        if contract.ids is None and len(dump.boundaries) == contract.aux_states:  # the trainer's data say it
            why = f"the dump's, as the drafter's config stores none ({dump.source})"
            sources = {**contract.sources, "boundaries": why}
            contract = replace(contract, boundaries=dump.boundaries, sources=sources)
        if contract.boundaries is None:
            held, needs = list(dump.boundaries), contract.aux_states
            raise KitError(f"The drafter reads {needs} states and stores no ids; a dump of {held} cannot tell which.")
        stored = StoredTarget.of(target, checkpoint, contract, device, dtype)
        if (width := dump.first.last.shape[-1]) != contract.target_hidden or width != stored.info.hidden:
            what = f"The dump's states are {width} wide, those of the drafter's target {contract.target_hidden}"
            raise KitError(f"{what}; name the drafter that was trained on them, and its target.")
        if stored.norm and (found := stored.norm_state(dump.first.last)):
            other = f"; {dump.norm_source} says {dump.norm}" if dump.norm not in ("unknown", found) else ""
            dump.norm, dump.norm_source = found, f"measured against the target's final norm{other}"
        return cls(checkpoint, contract, stored, (), steps, progress, dump=dump)

    @property
    def judged_by(self) -> str:
        """What the drafts are compared with; a recorded text with the reason."""
        target, dump = self.target, self.dump
        last = dump.last if dump.last is not None else target.info.layers
        why = target.why
        if not why and last != target.info.layers:
            why = f"the dump's last state is that of boundary {last}, not of the last layer ({target.info.layers})"
        elif not why and (dump.norm == "unknown" or (dump.norm == "pre-norm" and not target.norm)):
            why = "the target's final norm cannot be read"
        if why:
            return f"the recorded text, as {why}"
        way = f"final norm ({target.norm_name}) and head" if dump.norm == "pre-norm" else "head"
        return f"the target's greedy choices: the dump's last state through the target's {way}"

    def states_of(self, sample: Sample) -> States:
        """What the dump holds for one sample; `final` only where the last state can be normed, or is."""
        held = dict(zip(self.dump.boundaries, sample.aux, strict=True))
        end, final = self.dump.last if self.dump.last is not None else self.target.info.layers, None
        if self.dump.norm == "post-norm":
            final = sample.last
        elif self.dump.norm == "pre-norm" and end:
            held[end] = sample.last
            final = self.target.normed(sample.last) if self.target.norm and end == self.target.info.layers else None
        text = Text(tuple(sample.ids.tolist()), sample.answers[0][0], sample.answers[-1][1] - sample.answers[0][0])
        return States(text, held, {}, final)

    def states(self, wirings: Iterable[Wiring] = ()) -> Iterator[States]:  # type: ignore[override]
        """States of every sample, one at a time; KitError where a wiring reads what the dump lacks."""
        self._holds(wirings)
        return (self.states_of(s) for s in self.progress(self.dump.samples(len(self.target.embedding))))

    def measure(self, wiring: Wiring | None = None) -> Acceptance:
        """Exact acceptance of the drafter under a wiring; the controls are replayed in the same pass."""
        wiring = wiring or self.trained
        if wiring not in self._measured:
            none = self.trained.but(dropped=tuple(parameter_shapes(self.contract, self.trained)))
            self._replay(w for w in (wiring, self.trained.but(capture="zeros"), none) if w not in self._measured)
        return self._measured[wiring]

    def _replay(self, wirings: Iterable[Wiring]) -> None:
        """One pass: the drafts from every position, walked along each answer."""
        drafters = {w: self.load(w)[0] for w in wirings}
        self._holds(drafters)
        choose, device = self.judged_by.startswith("the target"), self.target.device
        rounds: dict[Wiring, list[tuple[int, ...]]] = {w: [] for w in drafters}
        self.counts = counts = {"answer_tokens": 0, "off_record": 0, "cut_rounds": 0}
        for sample in self.progress(self.dump.samples(len(self.target.embedding))):
            states, first = self.states_of(sample), sample.answers[0][0] - 1
            ids = sample.ids.tolist()
            greedy = [*ids[1 : first + 1], *self.target.choices(states.final[first:])] if choose else None
            for wiring, drafter in drafters.items():
                received = states.select(wiring).to(device)
                drafts = draft_everywhere(drafter, received, sample.ids.to(device), self.steps, first).tolist()
                walked = [_rounds(drafts[s - 1 - first :], ids, greedy, s, e) for s, e in sample.answers]
                rounds[wiring].append(tuple(n for accepted, _ in walked for n in accepted))
                counts["cut_rounds"] += sum(cut for _, cut in walked) if wiring == next(iter(drafters)) else 0
            at = [p for s, e in sample.answers for p in range(s, e)]
            counts["answer_tokens"] += len(at)
            counts["off_record"] += sum(greedy[p - 1] != ids[p] for p in at) if greedy else 0
        self._measured |= {w: Acceptance(tuple(r), self.steps) for w, r in rounds.items()}

    def _holds(self, wirings: Iterable[Wiring]) -> None:
        held = self.states_of(self.dump.first)
        for wiring in wirings:
            lacks = sorted(set(wiring.boundaries) - set(held.boundaries))
            if lacks and wiring.capture in ("boundaries", "zeros"):
                have = f"the dump holds {sorted(held.boundaries)}, says {self.dump.source}"
                raise KitError(f"The wiring reads boundaries {lacks}; {have}; dump these, or correct one of the two.")
            if wiring.capture == "normed" or (wiring.capture == "final" and held.final is None):
                raise KitError(f"The wiring reads {wiring.capture} states, which the dump does not hold.")

    def told(self, report: Report) -> Report:
        """The report of a measurement with what the features were, and which files were left out and why."""
        dump, skipped = self.dump, [{"file": n, "reason": r} for n, r in self.dump.skipped.items()]
        about = {
            "kind": dump.first.layout,
            "path": str(dump.path),
            "used": dump.used,
            "skipped": skipped,
            "boundaries": [*dump.boundaries, *([] if dump.last is None else [dump.last])],
            "boundaries_from": dump.source,
            "wiring_boundaries_from": self.contract.sources.get("boundaries", ""),
            "dtype": ", ".join(sorted(dump.dtypes)),
            "last_state": dump.norm,
            "last_state_from": dump.norm_source,
            "judged_by": self.judged_by,
            **self.counts,
        }
        note = f"features: {dump.used} samples of {dump.first.layout} in {about['dtype']}, boundaries "
        note += f"{about['boundaries']} ({dump.source}), last state {dump.norm} ({dump.norm_source}); judged by "
        note += self.judged_by
        if self.counts.get("off_record"):
            note += f"; {self.counts['off_record']} of {self.counts['answer_tokens']} recorded tokens are another "
            note += f"choice, and {self.counts['cut_rounds']} rounds that accepted the target's are counted up to there"
        shown = "; ".join(f"{s['file']} {s['reason']}" for s in skipped[:3]) + ("; …" if len(skipped) > 3 else "")
        left = [{"slug": "features-skipped", "reason": f"{len(skipped)} files left out: {shown}"}] if skipped else []
        extra = {**report.extra, "features": about, "caveats": [*report.extra.get("caveats", ()), note]}
        return replace(report, not_run=(*report.not_run, *left), extra=extra)


def _boundaries(
    path: Path, first: Sample, given: tuple[int, ...], contract: Contract | None
) -> tuple[tuple[int, ...], str]:
    """The boundaries of a dump's states, and who says so."""
    file = (path if path.is_dir() else path.parent) / "data_config.json"
    if given:
        return given, "--boundaries"
    if said := first.said.get("boundaries"):
        return tuple(int(b) for b in said.split(",")), "the files' metadata"
    if first.layout.startswith("speculators v") and file.is_file():
        try:
            raw = json.loads(read_bounded(file, 1 << 20, "the dump's configuration"))
            ids, version = raw["hidden_states"]["layer_ids"], str(raw["speculators_version"])
            if not ids or any(type(i) is not int or i < 0 for i in ids):
                raise ValueError(f"layer_ids is {ids!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise KitError(f"{file} names no layers ({error}); give --boundaries, such as 2,15,27.") from None
        if not version.startswith(SPECULATORS_HOOK_AFTER):
            what = f"{file} names layers {ids} of speculators {version}, of which the kit does not know what they mean"
            raise KitError(f"{what}; give --boundaries, such as 2,15,27.")
        after = tuple(sorted({i + 1 for i in ids}))  # taken after each of these layers, in the order of the layers
        return after, f"data_config.json of speculators {version}: after layers {sorted(set(ids))}, counted from 0"
    if contract and contract.ids is not None:
        return contract.boundaries, f"the drafter's {contract.sources['boundaries']}; the dump itself says nothing"
    raise KitError(
        f"{path} does not say after how many layers its {len(first.aux)} states were taken, nor does the drafter; "
        "give --boundaries, such as 2,15,27."
    )


def _rounds(
    drafts: Sequence[Sequence[int]],  # from the answer's first token on
    ids: Sequence[int],
    greedy: Sequence[int] | None,  # the target's choice after each token, given the tokens up to it
    start: int,
    end: int,
) -> tuple[list[int], int]:
    """Rounds along one answer, and how many of them were cut: `walk` from one token that is not the target's
    choice to the next, each a record that ends with that choice. What a round would accept after it is unknown."""
    if greedy is None:
        return list(walk(drafts, Text(tuple(ids[start:end]), 0, end - start))), 0
    found, cut, at = [], 0, start
    while at < end:
        parted = next((p for p in range(at + 1, len(ids)) if greedy[p - 1] != ids[p]), len(ids))
        unknown = (-1,) if parted < len(ids) else ()  # matches no draft
        text = Text((*ids[at:parted], greedy[parted - 1], *unknown), 0, min(end, parted + 1) - at)
        rounds = walk(drafts[at - start :], text)
        cut += bool(unknown and rounds and rounds[-1] < len(drafts[0]) and at + sum(rounds) + len(rounds) == parted + 1)
        found, at = [*found, *rounds], parted
    return found, cut
