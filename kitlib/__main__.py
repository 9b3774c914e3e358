"""The command line: `python -m kitlib COMMAND`. Exit codes: 0 no error found, 1 at least one, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from . import __version__
from .findings import KitError, Report, explain


class Parser(argparse.ArgumentParser):
    """argparse that refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise KitError(f"{self.prog}: {message}; see `{self.prog} --help`.")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except KitError as error:
        print(f"kitlib: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kitlib: stopped.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _parser() -> Parser:
    parser = Parser(
        prog="python -m kitlib",
        description=__doc__.split(". Exit")[0] + ".",
        epilog="Exit " + __doc__.split(". Exit ")[1],
    )
    parser.add_argument("--version", action="version", version=f"kitlib {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, run, text: str) -> Parser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    one = command(
        "check", _check, "pre-flight from files and flags: no model is loaded, no GPU needed, torch is not imported"
    )
    one.add_argument(
        "drafter",
        nargs="?",
        metavar="DRAFTER",
        help="a folder or a .safetensors file; may be left out where --launch names it",
    )
    one.add_argument("--target", metavar="DIR_OR_CONFIG", help="the target's folder or config.json")
    one.add_argument(
        "--engine",
        action="append",
        metavar="SPEC",
        help="sglang==0.5.9, sglang>=0.5.6,<=0.5.11, or all; may be repeated",
    )
    one.add_argument("--launch", metavar="COMMAND", help="the server's command line, as one quoted string, or @FILE")
    one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    one = command("measure", _measure, "exact acceptance offline; without arguments, of the built-in lab")
    one.add_argument("drafter", nargs="?", metavar="DRAFTER", help="a drafter's folder; empty takes the lab's")
    one.add_argument("--target", metavar="DIR", help="the target's folder or hub id; empty takes the lab's")
    one.add_argument(
        "--wiring", default="trained", metavar="W", help="trained, served, the name of a lab fault, or a wiring.json"
    )
    one.add_argument("--engine", default="", metavar="SPEC", help="the release whose wiring `served` means")
    one.add_argument("--launch", metavar="COMMAND", help="the server's command line, for `served`")
    one.add_argument(
        "--prompts", metavar="JSONL", help="prompts or chat messages, one a line; empty takes the lab's held-out ones"
    )
    one.add_argument("--count", type=int, default=0, metavar="N", help="only the first N prompts")
    one.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    one.add_argument("--steps", type=int, default=4, metavar="S", help="draft steps of a round")
    one.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    one.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16; exact comparisons hold in float32"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    one = command("report", _report, "all notebooks through papermill: HTML pages, index.html, findings.json")
    one.add_argument("-p", dest="pairs", action="append", default=[], metavar="NAME=VALUE", help="a notebook parameter")
    one.add_argument("--params", metavar="FILE", help="parameters in a YAML or JSON file")
    one.add_argument("--out", default="reports/lab", metavar="DIR", help="where the report goes (default reports/lab)")

    one = command("explain", _explain, "the full text of a finding")
    one.add_argument("code", metavar="CODE", help="K102, or a slug such as key-naming")

    lab = command("lab", None, "the built-in target, drafter and faults")
    actions = lab.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    for name, text in (("fetch", "fetch and convert the target, once"), ("faults", "list the plantable faults")):
        actions.add_parser(name, help=text, description=text).set_defaults(run=globals()[f"_lab_{name}"])
    one = actions.add_parser(
        "plant", help="write a folder that has a fault", description="write a folder that has a fault"
    )
    one.add_argument("fault", metavar="FAULT")
    one.add_argument("out", metavar="OUT")
    one.set_defaults(run=_lab_plant)
    one = actions.add_parser("train", help="retrain the drafter from data/lab-train.jsonl.gz")
    one.add_argument("--out", default="", metavar="DIR", help="default: lab/trained in the cache")
    one.set_defaults(run=_lab_train)
    return parser


def _finish(report: Report, as_json: bool) -> int:
    print(report.to_json() if as_json else _colour(str(report)))
    return report.exit_code


def _colour(text: str) -> str:
    """Colour doubles the marks; it is left out for pipes and where NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    codes = {"✗": 31, "☠": 31, "!": 33, "✓": 32, "?": 33, "–": 2}
    return re.sub(r"^\[(.)\]|^([✗✓?])", lambda m: f"\033[{codes[m[1] or m[2]]}m{m[0]}\033[0m", text, flags=re.M)


def _launch(text: str | None):
    """The parsed launch command; `@FILE` reads it from a file."""
    from .launch import Launch, parse

    if text and text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KitError(f"Cannot read the launch command from {text[1:]} ({error}).") from None
    return parse(text) if text else Launch()


def _check(args: argparse.Namespace) -> int:
    from .checks import check

    launch = _launch(args.launch)
    drafter = args.drafter or launch.drafter
    if not drafter:
        raise KitError(
            "No drafter was named; give its folder, or a --launch command with --speculative-draft-model-path."
        )
    target = args.target or (launch.target if Path(launch.target, "config.json").is_file() else None)
    report = check(drafter, target=target, engines=tuple(args.engine or [""]), launch=launch)
    if unreadable := next((f for f in report.errors if f.code == "K101"), None):
        if args.json:
            print(report.to_json())
        raise KitError(unreadable.title)
    code = _finish(report, args.json)
    return 0 if args.engine == ["all"] else code


def _measure(args: argparse.Namespace) -> int:
    from . import lab
    from .diagnose import Session, measure
    from .features import read_prompts
    from .paths import cache

    if args.steps < 1 or args.max_new_tokens < 1:
        raise KitError("--steps and --max-new-tokens must be at least 1.")
    if bool(args.drafter) != bool(args.target):
        raise KitError("Name both a drafter and its --target, or neither for the lab.")
    session = Session.open(
        args.drafter or lab.drafter_path(),
        args.target or lab.target_path(),
        read_prompts(args.prompts or lab.PROMPTS, args.count),
        max_new_tokens=args.max_new_tokens,
        steps=args.steps,
        device=args.device,
        dtype=args.dtype,
        cache=cache() / "greedy",
    )
    report = measure(session, _wiring(args, session))
    if not args.json:
        got = report.extra["acceptance"]
        low, high = got["interval"]
        print(f"accept length {got['accept_length']:.3f} ({low:.2f}-{high:.2f}); {got['definition']}")
        print(f"{got['accepted']} accepted draft tokens in {got['rounds']} rounds · histogram {got['histogram']}")
    return _finish(report, args.json)


def _wiring(args: argparse.Namespace, session):
    """`trained`, `served`, a lab fault's name, or a file that `lab plant` wrote."""
    from .contract import Wiring
    from .engines import Engine, served
    from .lab.faults import FAULTS

    if args.wiring == "trained":
        return session.trained
    if args.wiring == "served":
        launch = _launch(args.launch)
        release = Engine.load(launch.engine).resolve(args.engine)[0]
        state = served(
            session.checkpoint,
            session.contract,
            release,
            target=session.target.info,
            algorithm=launch.algorithm or "EAGLE3",
        )
        return state.wiring
    if args.wiring in FAULTS:
        return FAULTS[args.wiring].wiring(session.trained)
    try:
        return Wiring.from_dict(json.loads(Path(args.wiring).read_text(encoding="utf-8")))
    except OSError as error:
        raise KitError(
            f"--wiring {args.wiring}: {error.strerror}; use trained, served, a lab fault or a wiring.json."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise KitError(f"{args.wiring} is no wiring ({error}); `lab plant` writes one.") from None


def _report(args: argparse.Namespace) -> int:
    from .report import parse_params, run

    params = parse_params(args.pairs, Path(args.params) if args.params else None)
    return run(params, Path(args.out)).exit_code


def _explain(args: argparse.Namespace) -> int:
    print(explain(args.code))
    return 0


def _lab_fetch(_args: argparse.Namespace) -> int:
    from . import lab

    print(f"drafter {lab.drafter_path()}")
    print(f"target  {lab.target_path()}")
    return 0


def _lab_faults(_args: argparse.Namespace) -> int:
    from .lab.faults import FAULTS

    for fault in FAULTS.values():
        bound = f"accept length below {fault.ceiling:.2f}" if fault.ceiling else "no cliff"
        seen = f"check finds {fault.found_by}" if fault.found_by else "only a measurement finds it"
        print(f"{fault.name:<20} {fault.plants:<10} {fault.effect}\n{'':<31} {bound}; {seen}")
    return 0


def _lab_plant(args: argparse.Namespace) -> int:
    from .lab.faults import get, plant

    fault = get(args.fault)
    print(f"{plant(args.fault, args.out)}: {fault.effect}")
    return 0


def _lab_train(args: argparse.Namespace) -> int:
    from . import lab
    from .lab.train import train
    from .paths import cache

    train(lab.target_path(), lab.DATA / "lab-train.jsonl.gz", Path(args.out or cache() / "lab" / "trained"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
