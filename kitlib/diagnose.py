"""A drafter under measurement: states captured once, any wiring replayed, the result judged against controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .acceptance import Acceptance, expected_length, replay
from .checkpoint import Checkpoint
from .contract import Contract, TargetInfo, Wiring
from .drafter import Drafter, LoadResult, load_drafter
from .features import States, Target, Text
from .findings import Evidence, Finding, KitError, Report

FLOOR = 5.0  # a healthy drafter gains at least this many times what the better control gains
FEW = 3  # prompts below which an interval over prompts says nothing
PROMISE = 0.5  # of the gain that training promises: other prompts than the trainer's alone can cost a third
COLLAPSE = 0.5  # the second position's conditional acceptance, over the first's


@dataclass
class Session:
    """One drafter, one target, one set of recorded texts. Everything else is derived, and kept once computed."""

    checkpoint: Checkpoint
    contract: Contract
    target: Target
    texts: Sequence[Text]
    steps: int = 4
    progress: Callable[[Iterable], Iterable] = iter
    _states: list[States] = field(default_factory=list, repr=False)
    _held: set[tuple[str, int]] = field(default_factory=set, repr=False)

    @classmethod
    def open(
        cls,
        drafter: str | Path,
        target: str | Path,
        prompts: Sequence,
        *,
        max_new_tokens: int = 64,
        steps: int = 4,
        device: str = "auto",
        dtype: str = "auto",
        cache: Path | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> Session:
        """Load the target, record its greedy text on the prompts, and read the drafter's headers."""
        checkpoint, known = Checkpoint.open(drafter), Path(target).exists()
        if known:
            _fits(checkpoint, TargetInfo.of(target))
        model = Target.load(target, device=device, dtype=dtype)
        contract = Contract.of(checkpoint, model.info)
        texts = model.record([model.encode(p) for p in prompts], max_new_tokens, steps + 1, cache)
        return cls(checkpoint, contract, model, texts, steps, progress)

    @property
    def trained(self) -> Wiring:
        return self.contract.trained(self.target.info)

    def load(self, wiring: Wiring | None = None) -> tuple[Drafter, LoadResult]:
        """The drafter under a wiring, on the target's device and in its dtype."""
        embed, dtype = self.target.embedding, self.target.dtype
        return load_drafter(
            self.checkpoint, self.contract, wiring or self.trained, embed, self.target.head,
            device=str(self.target.device), dtype=dtype,
        )  # fmt: skip

    def states(self, wirings: Iterable[Wiring] = ()) -> list[States]:
        """States of every text, with what these wirings read; one prefill each, again only for new boundaries."""
        wirings = list(wirings) or [self.trained]
        need = {("normed" if w.capture == "normed" else "raw", b) for w in wirings for b in w.boundaries}
        if need - self._held or not self._states:
            self._held |= need
            raw, normed = ([b for kind, b in sorted(self._held) if kind == k] for k in ("raw", "normed"))
            self._states = [self.target.states(t, raw, normed) for t in self.progress(self.texts)]
        return self._states

    def measure(self, wiring: Wiring | None = None) -> Acceptance:
        """Exact acceptance of the drafter under a wiring, over all texts."""
        wiring = wiring or self.trained
        drafter, _ = self.load(wiring)
        return replay(drafter, self.states([wiring]), self.steps)

    def shifted(self) -> dict[str, Acceptance]:
        """Acceptance at the trained boundaries, and with all of them one lower and one higher."""
        trained, depth = self.trained, self.target.info.layers
        found = {}
        for by, name in ((0, "trained boundaries"), (-1, "one lower"), (1, "one higher")):
            at = tuple(b + by for b in trained.boundaries)
            if all(0 <= b <= depth for b in at):
                found[f"{name} {list(at)}"] = self.measure(trained.but(boundaries=at))
        return found

    def controls(self) -> dict[str, Acceptance]:
        """What no working drafter should resemble: features zeroed, and every tensor random."""
        drafter, _ = self.load()
        everything = (*drafter.shapes,)
        wirings = {
            "features zeroed": self.trained.but(capture="zeros"),
            "random drafter": self.trained.but(dropped=everything),
        }
        return {name: self.measure(w) for name, w in wirings.items()}


def _fits(checkpoint: Checkpoint, target: TargetInfo) -> None:
    """KitError where the drafter was made for a target of another width."""
    fc = next((t.shape for n, t in checkpoint.tensors.items() if checkpoint.canonical(n) == "fc.weight"), ())
    if len(fc) == 2 and fc[1] % target.hidden:
        raise KitError(
            f"The drafter's fc takes {fc[1]} features, no multiple of this target's hidden size {target.hidden}; "
            "name the target that it was trained on."
        )


def judge(
    acceptance: Acceptance,
    controls: dict[str, Acceptance],
    load: LoadResult | None = None,
    expected: Sequence[float] = (),
) -> list[Finding]:
    """Findings from a measurement: completeness, floor, collapse, and training's own prediction.

    `expected` are conditional accuracies from training, one a draft step.
    """
    found = load_findings(load) if load else []
    if len(acceptance.rounds) < FEW or not acceptance.verified:
        title = f"{len(acceptance.rounds)} prompts and {acceptance.verified} rounds are too few to judge acceptance"
        return [*found, Finding.of("M201", title, status="not-run")]
    low, high = acceptance.interval()
    best = max(controls.values(), key=lambda c: c.accept_length)
    line = 1 + FLOOR * max(best.accept_length - 1, 0.02)
    names = " · ".join(f"{name} {c.accept_length:.3f}" for name, c in controls.items())
    text = f"accept length {acceptance.accept_length:.3f} ({low:.2f}-{high:.2f}) · {names} · healthy above {line:.2f}"
    evidence = [Evidence("acceptance", text, {**acceptance.to_dict(), "line": line})]
    if high < line:
        found.append(
            Finding.of(
                "M201",
                f"accept length {acceptance.accept_length:.3f} is at the level of the controls",
                evidence=evidence,
            )
        )
        return found
    if low < line:
        title = "accept length is above the controls, but not by enough to call it healthy"
        found.append(Finding.of("M201", title, evidence=evidence, severity="warning"))
    else:
        found.append(Finding.of("M201", status="pass", evidence=evidence))
    found.append(_collapse(acceptance))
    if expected:
        found.append(_against_training(acceptance, expected))
    return found


def load_findings(load: LoadResult) -> list[Finding]:
    """K103 and K104 from a strict load; a pass where everything arrived."""
    missing, unused = list(load.missing), list(load.unused)
    found = []
    for code, names, what in (("K103", missing, "parameters got no tensor"), ("K104", unused, "tensors were not used")):
        if names:
            title = f"{len(names)} {what}: {', '.join(names[:4])}"
            found.append(Finding.of(code, title, evidence=[Evidence("tensor", ", ".join(names), {"names": names})]))
    return found or [
        Finding.of("K103", status="pass", evidence=[Evidence("tensor", f"{len(load.loaded)} tensors loaded")])
    ]


def _collapse(acceptance: Acceptance) -> Finding:
    """M202 where the second position's acceptance falls below half of the first's, by more than chance."""
    histogram = acceptance.histogram
    reached, second = sum(histogram[1:]), sum(histogram[2:])
    first = acceptance.conditional[0]
    if acceptance.draft_steps < 2 or not reached:
        return Finding.of("M202", "one draft position cannot collapse", status="not-applicable")
    rate = second / reached
    high = _wilson(second, reached)[1]
    text = f"conditional acceptance by position: {', '.join(f'{c:.2f}' for c in acceptance.conditional)}"
    evidence = [Evidence("acceptance", text, {"first": first, "second": rate, "second_upper": high})]
    if high < COLLAPSE * first:
        return Finding.of("M202", f"position 0 accepts {first:.2f}, position 1 only {rate:.2f}", evidence=evidence)
    return Finding.of("M202", status="pass", evidence=evidence)


def _against_training(acceptance: Acceptance, expected: Sequence[float]) -> Finding:
    predicted = expected_length(expected[: acceptance.draft_steps])
    low, high = acceptance.interval()
    text = f"training predicts {predicted:.2f}, measured {acceptance.accept_length:.2f} ({low:.2f}-{high:.2f})"
    evidence = [Evidence("training", text, {"predicted": predicted, "ratio": acceptance.accept_length / predicted})]
    if 1 + PROMISE * (predicted - 1) > high:
        return Finding.of(
            "M203",
            f"accept length {acceptance.accept_length:.2f} where training predicts {predicted:.2f}",
            evidence=evidence,
        )
    return Finding.of("M203", status="pass", evidence=evidence)


def _wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson interval of a share."""
    p, n = hits / total, total
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * ((p * (1 - p) + z * z / (4 * n)) / n) ** 0.5 / (1 + z * z / n)
    return centre - half, centre + half


def measure(session: Session, wiring: Wiring | None = None, expected: Sequence[float] = ()) -> Report:
    """One measurement as a report: the JSON of `kitlib measure`."""
    wiring = wiring or session.trained
    _, load = session.load(wiring)
    acceptance = session.measure(wiring)
    findings = judge(acceptance, session.controls(), load, expected)
    subject = {"drafter": str(session.checkpoint.path), "target": session.target.info.path, "engines": []}
    block = {
        **acceptance.to_dict(),
        "wiring": wiring.to_dict(),
        "dtype": session.target.dtype,
    }
    return Report(subject, tuple(findings), extra={"acceptance": block})
