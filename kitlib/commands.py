"""What each command of the command line does; the arguments are declared in `__main__`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import findings
from .findings import Finding, KitError, Report

if TYPE_CHECKING:
    from .diagnose import Session
    from .launch import Launch

LOG, COMMAND = 64 << 20, 1 << 20  # bytes of a log, and of a command or wiring


def _finish(report: Report, as_json: bool) -> int:
    print(report.to_json() if as_json else _colour(str(report)))
    return report.exit_code


def _colour(text: str) -> str:
    """Colour doubles the marks; it is left out for pipes and where NO_COLOR is set."""
    if not sys.stdout or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    codes = {"✗": 31, "☠": 31, "!": 33, "✓": 32, "?": 33, "–": 2}
    return re.sub(r"^\[(.)\]|^([✗✓?])", lambda m: f"\033[{codes[m[1] or m[2]]}m{m[0]}\033[0m", text, flags=re.M)


def _launch(text: str | None):
    """The parsed launch command; `@FILE` reads it from a file."""
    from .launch import Launch, parse

    if text and text.startswith("@"):
        try:
            text = findings.read_bounded(text[1:], COMMAND, "the launch command").decode()
        except UnicodeDecodeError as error:
            raise KitError(f"The launch command in {text[1:]} is no UTF-8 text ({error}).") from None
    return parse(text) if text else Launch()


def check(args: argparse.Namespace) -> int:
    """Pre-flight; a survey over `all` releases ends in 0, unless releases named beside it have errors."""
    from . import checks
    from .checks import survey

    launch, engines, more = _said(args)
    drafter = args.drafter or launch.drafter
    if not drafter:
        raise KitError(
            "No drafter was named; give its folder, or a --launch command with --speculative-draft-model-path."
        )
    target = args.target or (launch.target if os.path.isfile(os.path.join(launch.target, "config.json")) else None)
    found = checks.check(drafter, target=target, engines=engines, launch=launch, deep=args.deep)
    found = replace(found, findings=(*found.findings, *more), extra={**found.extra, **survey.extra(found)})
    if unreadable := next((f for f in found.errors if f.code == "K101"), None):
        if args.json:
            print(found.to_json())
        raise KitError(unreadable.title)
    if not args.json and (rows := survey.lines(found)):
        print(_colour("\n".join(rows)), end="\n\n")
    code = _finish(found, args.json)
    if "all" not in (args.engine or ()):
        return code
    named = tuple(e for e in args.engine if e != "all")
    return checks.check(drafter, target=target, engines=named, launch=launch).exit_code if named else 0


def _said(args: argparse.Namespace) -> tuple[Launch, tuple[str, ...], list[Finding]]:
    """What --launch, --server, --log and --train-metrics tell: the flags, the release, and findings of their own."""
    from .checks.said import by_log, by_training
    from .launch import Launch

    launch, engines, found = _launch(args.launch), tuple(args.engine or ()), []
    if args.server:
        from .server import attach

        told = attach(args.server).raw_info()
        launch = launch if args.launch else Launch.of_arguments(told)
        engines = engines or ((f"sglang=={told['version']}",) if told.get("version") else ())
    if args.log:
        from .logs import Log

        log = Log.parse(findings.read_bounded(args.log, LOG, "the log"))
        launch = launch if launch.flags else Launch.of_arguments(log.flags)
        found.append(by_log(log))
    if args.train_metrics:
        from .training import read_training

        found.append(by_training(read_training(args.train_metrics), launch.number("speculative-num-steps")))
    return launch, engines or ("",), found


def measure(args: argparse.Namespace) -> int:
    """Exact acceptance offline."""
    from . import diagnose

    wiring = _wiring(args)
    if args.features and args.wiring == "served" and not args.target:
        raise KitError("--wiring served needs the depth of the target; name its folder with --target.")
    session = _session(args, args.features or "", args.boundaries)
    found = diagnose.measure(session, wiring(session))
    if args.features:
        found = session.told(found)
    if not args.json:
        got = found.extra["acceptance"]
        if got["rounds"]:
            low, high = got["interval"]
            print(f"accept length {got['accept_length']:.3f} ({low:.2f}-{high:.2f}); {got['definition']}")
        print(f"{got['accepted']} accepted draft tokens in {got['rounds']} rounds · histogram {got.get('histogram')}")
    return _finish(found, args.json)


def search(args: argparse.Namespace) -> int:
    """Which wiring explains what an engine accepted."""
    from . import search as searching

    observed = searching.Observed.read(args.observed)
    session = _session(args)
    found = searching.search(session, observed, pairs=not args.singles)
    rows = found.rows()
    if not args.json:
        from .show import table

        kind = "rounds by prompt" if observed.rounds else "a histogram" if observed.histogram else "totals"
        print(table(rows, caption=f"What explains {kind}; marked: cannot be told from the best").text)
    extra = {"search": {"rows": rows, "alike": list(found.alike), "exact": found.exact}}
    subject = {"drafter": str(session.checkpoint.path), "target": session.target.info.path, "engines": []}
    return _finish(Report(subject, tuple(searching.search_findings(found)), extra=extra), args.json)


def _session(args: argparse.Namespace, features: str = "", boundaries: str = "") -> Session:
    """The session that the arguments of `measure` and `search` describe; bad ones are refused first."""
    from . import lab
    from .workbench import Workbench

    if args.steps < 1 or args.max_new_tokens < 1 or args.count < 0:
        raise KitError("--steps and --max-new-tokens must be at least 1, --count at least 0.")
    if args.target and args.target.startswith(("/", ".", "~")) and not os.path.exists(args.target):
        raise KitError(f"There is nothing at {args.target}; give the target's folder.")
    if bool(args.drafter) != bool(args.target) and not features:
        raise KitError("Name both a drafter and its --target, or neither for the lab.")
    bench = Workbench(
        args.drafter or str(lab.drafter_path()), args.target or ("" if features else str(lab.target_path())),
        device=args.device, dtype=args.dtype, prompts=args.prompts or "", prompt_count=args.count,
        max_new_tokens=args.max_new_tokens, draft_steps=args.steps, features=features, boundaries=boundaries,
    )  # fmt: skip
    return bench.session


def _wiring(args: argparse.Namespace) -> Callable:
    """`trained`, `served`, a lab fault's name, or a file that `lab plant` wrote; applied once a session is open."""
    from .contract import Wiring
    from .engines import Engine, served
    from .lab.faults import FAULTS

    if args.wiring == "trained":
        return lambda session: session.trained
    if args.wiring == "served":
        launch = _launch(args.launch)
        engine, algorithm = Engine.load(launch.engine), launch.algorithm or "EAGLE3"
        release = engine.resolve(args.engine)[0]
        engine.known(release)  # refuses one that is too old, before anything is loaded
        return lambda s: served(s.checkpoint, s.contract, release, target=s.target.info, algorithm=algorithm).wiring
    if args.wiring in FAULTS:
        return lambda session: FAULTS[args.wiring].wiring(session.trained)
    if not os.path.exists(args.wiring):
        raise KitError(f"There is no --wiring {args.wiring}; use trained, served, a lab fault or a wiring.json.")
    try:
        read = Wiring.from_dict(json.loads(findings.read_bounded(args.wiring, COMMAND, "the wiring")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise KitError(f"{args.wiring} is no wiring ({error}); `lab plant` writes one.") from None
    return lambda _: read


def report(args: argparse.Namespace) -> int:
    """All notebooks as one report."""
    from .report import parse_params, run

    params = parse_params(args.pairs, Path(args.params) if args.params else None)
    return run(params, Path(args.out)).exit_code


def convert(args: argparse.Namespace) -> int:
    """Rewrite a drafter for an engine."""
    from . import convert as conversion

    say = (lambda *_: None) if args.json else _progress
    found = conversion.convert(args.drafter, args.out, args.to, force=args.force, target=args.target, progress=say)
    if not args.json:
        print(f"{args.out} means to {args.to} what {args.drafter} means to its trainer")
    return _finish(found, args.json)


def _progress(phase: str, done: int, total: int) -> None:
    """A line a phase, on stderr."""
    if done == total:
        print(f"{phase}: {total / 1e6:,.1f} MB", file=sys.stderr)


def probe(args: argparse.Namespace) -> int:
    """Ask a release's own loader."""
    from . import probe as prober

    options = {"target": args.target, "wheel": args.wheel, "timeout": args.timeout, "device": args.device}
    found = prober.report(args.drafter, args.engine or [""], **options)
    code = _finish(found, args.json)
    return code if any(f.status in ("pass", "fail") for f in found.findings) else 2


def serve(args: argparse.Namespace) -> int:
    """Start SGLang on the GPU or on the CPU engine, show both clocks, and keep it until Ctrl-C."""
    from . import server

    launch = server.Launch(
        args.target, args.drafter, args.algorithm if args.drafter else "", args.steps, dtype=args.dtype, port=args.port
    )
    engine, why = server.choose_engine(args.device)
    print(f"{launch}\n{engine}: {why}", file=sys.stderr)
    with server.start(launch, args.log, engine=args.device, interval_s=args.interval, limit_s=args.limit) as started:
        print(started.timeline.explain(), file=sys.stderr)
        report = Report({"server": started.url, "log": str(started.log)}, tuple(started.findings))
        if not started.ready:
            return _finish(report, False)
        print(f"{started.url} is ready; Ctrl-C stops it. Its log is {started.log}.")
        while not started.process.ended(1.0):
            pass
    return 1


def bench(args: argparse.Namespace) -> int:
    """Acceptance and speed of a running server, with and without speculation where a baseline is named."""
    from . import lab, server
    from .features import read_prompts

    if min(args.clients, args.max_new_tokens) < 1 or args.count < 0:
        raise KitError("--clients and --max-new-tokens must be at least 1, --count at least 0.")
    if args.dtype not in ("float32", "bfloat16", "float16"):
        raise KitError(f"--dtype is {args.dtype!r}; give the server's: float32, bfloat16 or float16.")
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    prompts = read_prompts(args.prompts or lab.PROMPTS, args.count)
    options = {"max_new_tokens": args.max_new_tokens, "clients": args.clients}
    attached, plain = server.attach(args.server, key), server.attach(args.baseline, key) if args.baseline else None
    for one in filter(None, (attached, plain)):  # both, before minutes go by
        one.require()
    run = server.bench(attached, prompts, **options)
    extra, findings = {"bench": run.to_dict()}, server.health_findings(attached, run)
    if plain:
        other = server.bench(plain, prompts, **options)
        extra["compared"] = server.compare(run, other)
        gaps = server.tie_gaps(plain, run, other) if args.dtype != "float32" else {}
        noise = server.noise_floor(plain, [p for p in prompts if isinstance(p[0], int)][:4]) if gaps else None
        findings += server.text_findings(run, other, args.dtype, gaps, noise)
        findings += server.speed_findings(extra["compared"])
    if not args.json:
        print(f"accept length {run.accept_length} = 1 + {run.accepted}/{run.verified} · histogram {run.histogram}")
        print(f"{run.tokens_per_s} tokens/s · first token after {run.ttft} s · the engine says {run.engine_says}")
        print("".join(f"{k}: {v}\n" for k, v in extra.get("compared", {}).items()), end="")
    report = Report({"server": args.server, "baseline": args.baseline or ""}, tuple(findings), extra=extra)
    code = _finish(report, args.json)
    if run.error:
        raise KitError(f"The benchmark ended early: {run.error}")
    return code


def explain(args: argparse.Namespace) -> int:
    """The full text of a finding."""
    print(findings.explain(args.code))
    return 0


def lab_fetch(_args: argparse.Namespace) -> int:
    """Fetch and convert the lab's target."""
    from . import lab

    print(f"drafter {lab.drafter_path()}")
    print(f"target  {lab.target_path()}")
    return 0


def lab_faults(_args: argparse.Namespace) -> int:
    """List the plantable faults."""
    from .lab.faults import FAULTS

    for fault in FAULTS.values():
        bound = f"accept length below {fault.ceiling:.2f}" if fault.ceiling else "no cliff"
        seen = f"check finds {fault.found_by}" if fault.found_by else "only a measurement finds it"
        print(f"{fault.name:<20} {fault.plants:<10} {fault.effect}\n{'':<31} {bound}; {seen}")
    return 0


def lab_plant(args: argparse.Namespace) -> int:
    """Write a folder that has a fault."""
    from .lab.faults import get, plant

    fault = get(args.fault)
    print(f"{plant(args.fault, args.out)}: {fault.effect}")
    return 0


def lab_train(args: argparse.Namespace) -> int:
    """Retrain the lab's drafter."""
    from . import lab
    from .lab.train import train
    from .paths import cache

    out = Path(args.out or cache() / "lab" / "trained")
    train(lab.target_path(), lab.DATA / "lab-train.jsonl.gz", out, name=lab.TARGET, seed=args.seed)
    return 0
