"""With against without speculation: how much faster, and whether the text is the same (M205)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..findings import Evidence, Finding, KitError
from .bench import Run, bootstrap
from .serve import Server

Texts = Run | Sequence[Sequence[int] | str]  # a run, or recorded answers


def compare(run: Run, baseline: Run) -> dict[str, Any]:
    """With against without speculation, on the prompts that both answered.

    speedup: tokens a second of waiting client, over the baseline's; its interval is a bootstrap over paired prompts.
    """
    others = {r.prompt: r for r in baseline.requests}
    pairs = [(r, others[r.prompt]) for r in run.requests if r.prompt in others]
    sizes = [(a.tokens, a.seconds, b.tokens, b.seconds) for a, b in pairs]

    def gain(t: np.ndarray) -> np.ndarray:  # [draws, 4] → [draws]
        return (t[:, 0] / t[:, 1]) / (t[:, 2] / t[:, 3])

    apart, total = differences(run, baseline)
    return {
        "speedup": float(gain(np.array([sizes]).sum(1))[0]) if sizes else None,
        "interval": bootstrap(sizes, gain) if sizes else None,
        "tokens_per_s": [run.tokens_per_s, baseline.tokens_per_s],
        "ttft": [run.ttft, baseline.ttft],
        "accept_length": run.accept_length,
        "texts_identical": total - len(apart),
        "texts_total": total,
        "errors": [e for e in (run.error, baseline.error) if e],
    }


def differences(run: Run, baseline: Texts) -> tuple[dict[int, int], int]:
    """{prompt number: first token (or character) at which the answers part}, and how many could be compared."""
    theirs, apart, total = getattr(baseline, "prompts", run.prompts), {}, 0
    if [list(p) for p in theirs] != [list(p) for p in run.prompts]:
        raise KitError("These two runs asked different prompts; compare runs on the same ones.")
    if len(getattr(baseline, "texts", baseline)) != len(run.prompts):
        raise KitError(f"{len(run.prompts)} prompts were asked, and another number of answers was recorded.")
    for i, (mine, other) in enumerate(zip(run.texts, getattr(baseline, "texts", baseline), strict=True)):
        if None in (mine, other) or isinstance(mine, str) != isinstance(other, str):
            continue
        total += 1
        if list(mine) != list(other):
            same = [x == y for x, y in zip(mine, other, strict=False)]
            apart[i] = same.index(False) if False in same else len(same)
    return apart, total


def tie_gaps(server: Server, run: Run, baseline: Texts) -> dict[int, float]:
    """The target's top-two gap in log-probability where answers part, asked of a server without speculation."""
    gaps = {}
    for i, at in differences(run, baseline)[0].items():
        if isinstance(run.texts[i], str) or not isinstance(run.prompts[i][0], int):
            continue
        body = {"input_ids": [*run.prompts[i], *run.texts[i][:at]], "return_logprob": True, "top_logprobs_num": 2}
        told = server.client.post("/generate", body | {"sampling_params": {"temperature": 0, "max_new_tokens": 1}})
        try:
            first, second = (float(row[0]) for row in told["meta_info"]["output_top_logprobs"][0][:2])
            gaps[i] = first - second
        except (KeyError, TypeError, ValueError, IndexError):
            continue
    return gaps


def noise_floor(server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32) -> float | None:
    """How far the target's own log-probabilities move with the shape of the batch, asked without speculation.

    The same tokens are scored when they are generated one by one and when they are read at once, as verification
    does. A gap of two moves by up to twice the largest difference, which is what is returned; None: not told.
    """
    moved = []
    for ids in prompts:
        ask = {"return_logprob": True, "logprob_start_len": -1}
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        told = server.client.post("/generate", {"input_ids": list(ids), "sampling_params": sampling} | ask)
        try:
            slow = [(row[1], row[0]) for row in told["meta_info"]["output_token_logprobs"]]
            whole = {"input_ids": [*ids, *(token for token, _ in slow)], "sampling_params": {"max_new_tokens": 1}}
            told = server.client.post("/generate", whole | ask | {"logprob_start_len": len(ids) - 1})
            fast = {len(ids) + i: row for i, row in enumerate(told["meta_info"]["input_token_logprobs"][1:])}
            moved += [abs(fast[len(ids) + i][0] - p) for i, (_, p) in enumerate(slow) if fast[len(ids) + i][0]]
        except (KeyError, TypeError, IndexError):
            continue
    return 2 * max(moved) if moved else None


def speed_findings(told: Mapping[str, Any], unfit: str = "") -> list[Finding]:
    """M206 from what `compare` told: faster, slower, or not told apart. `unfit`: why speed is not judged here."""
    if told["speedup"] is None:
        return [Finding.of("M206", "no prompt was answered by both servers", status="not-run")]
    low, high = told["interval"]
    text = f"speed-up {told['speedup']:.2f} ({low:.2f}-{high:.2f}) at accept length {told['accept_length'] or 1:.2f}"
    evidence = [Evidence("server", text, {k: told[k] for k in ("speedup", "interval", "tokens_per_s")})]
    if unfit:
        return [Finding.of("M206", f"speed is not judged here: {unfit}", status="not-run", evidence=evidence)]
    if low > 1:
        return [Finding.of("M206", status="pass", evidence=evidence)]
    if high < 1:
        return [Finding.of("M206", f"speculation is slower: {text}", evidence=evidence)]
    return [Finding.of("M206", f"not told apart from no speculation: {text}", status="not-run", evidence=evidence)]


def text_findings(
    run: Run,
    baseline: Texts,
    dtype: str,
    gaps: Mapping[int, float] | None = None,
    noise: float | None = None,
) -> list[Finding]:
    """M205: answers against those without speculation.

    In float32 any difference fails. Otherwise a difference is explained where the target's top-two gap (`tie_gaps`)
    is within the measured `noise`; without gap or noise it is not judged.
    """
    others, gaps = getattr(baseline, "texts", baseline), gaps or {}
    apart, total = differences(run, baseline)
    ties = [i for i in apart if dtype != "float32" and noise is not None and gaps.get(i, noise + 1) <= noise]
    values = {"texts_identical": total - len(apart), "texts_explained_by_ties": len(ties), "texts_total": total}
    text = f"{total - len(apart)} of {total} answers are identical in {dtype}"
    if apart:
        i, at = next((x for x in apart.items() if x[0] not in ties), next(iter(apart.items())))
        here, there = (repr(x[at : at + 4]) for x in (run.texts[i], others[i]))
        text += f", {len(ties)} explained by near ties; prompt {i} parts at {at}: {here} where {there} was expected"
    evidence = [Evidence("server", text, values | {"differs_at": apart, "gaps": dict(gaps), "noise": noise})]
    if not total:
        return [Finding.of("M205", "no pair of answers can be compared", status="not-run", evidence=evidence)]
    if len(ties) == len(apart):
        return [Finding.of("M205", status="pass", evidence=evidence)]
    if dtype == "float32" or any(noise is not None and gaps.get(i, noise) > noise for i in apart):
        return [Finding.of("M205", evidence=evidence)]
    title = f"{len(apart)} texts differ in {dtype}, and whether these are near ties was not measured"
    return [Finding.of("M205", title, status="not-run", evidence=evidence)]
