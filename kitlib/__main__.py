"""The command line: `python -m kitlib COMMAND`. Exit codes: 0 no error found, 1 at least one, 2 could not run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import NoReturn

from . import __version__, commands
from .findings import KitError, brief, plain


class Parser(argparse.ArgumentParser):
    """argparse that refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise KitError(f"{self.prog}: {message}; see `{self.prog} --help`.")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # names in files may hold what a terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():  # so that a killed command still clears up
        for end in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(end) == signal.SIG_DFL:  # nohup ignores the second
                signal.signal(end, lambda number, _: sys.exit(128 + number))
    try:
        arguments = _parser().parse_args(argv)
        code = arguments.run(arguments)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except KitError as error:
        if sys.stderr:
            print(f"kitlib: {brief(plain(str(error)))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kitlib: stopped.", file=sys.stderr)
        return 2
    except OSError as error:  # stdout: its reader is gone, or its disk is full
        if sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"kitlib: {error.strerror or error}.", file=sys.stderr)
        return 2


def _parser() -> Parser:
    what, codes = __doc__.split(". Exit")
    parser = Parser(prog="python -m kitlib", description=f"{what}.", epilog=f"Exit{codes}")
    parser.add_argument("--version", action="version", version=f"kitlib {__version__}")
    groups = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _check(_command(groups, "check", "pre-flight from files and flags: no model is loaded, no GPU needed"))
    _probe(_command(groups, "probe", "ask a release's own loader, in a subprocess: every key's fate, whether fc ran"))
    _convert(_command(groups, "convert", "write a new checkpoint that means the same to an engine; verified"))
    _measure(_command(groups, "measure", "exact acceptance offline; without arguments, of the built-in lab"))
    _search(_command(groups, "search", "which wiring explains what an engine accepted, by replay"))
    _serve(_command(groups, "serve", "start SGLang on a GPU, or on the CPU engine, and wait with a timeline"))
    _bench(_command(groups, "bench", "acceptance and speed of a running server, with and without speculation"))
    _report(_command(groups, "report", "all notebooks through papermill: HTML pages, index.html, findings.json"))
    add = _command(groups, "explain", "the full text of a finding").add_argument
    add("code", metavar="CODE", help="K102, or a slug such as key-naming")

    lab = groups.add_parser("lab", help="the built-in target, drafter and faults")
    actions = lab.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    _command(actions, "fetch", "fetch and convert the target, once", commands.lab_fetch)
    _command(actions, "faults", "list the plantable faults", commands.lab_faults)
    add = _command(actions, "plant", "write a folder that has a fault", commands.lab_plant).add_argument
    add("fault", metavar="FAULT", help="a name from `lab faults`")
    add("out", metavar="OUT", help="a new folder")
    add = _command(
        actions, "train", "retrain the drafter from data/lab-train.jsonl.gz", commands.lab_train
    ).add_argument
    add("--out", default="", metavar="DIR", help="default: lab/trained in the cache")
    add("--seed", type=int, default=0, metavar="N", help="of the weights' draw, the held-out rows and the order")
    return parser


def _command(group, name: str, text: str, run=None) -> Parser:
    one = group.add_parser(name, help=text, description=text)
    one.set_defaults(run=run or getattr(commands, name))
    return one


def _check(one: Parser) -> None:
    add = one.add_argument
    text = "a folder, .safetensors file or hub id (org/name[@revision], headers only); --launch may name it instead"
    add("drafter", nargs="?", metavar="DRAFTER", help=text)
    add("--target", metavar="DIR_OR_CONFIG", help="the target's folder, config.json or hub id")
    text = "sglang==0.5.9, sglang>=0.5.6,<=0.5.11, vllm==0.20.0, or all (SGLang's; a survey, exit code 0); repeatable"
    add("--engine", action="append", metavar="SPEC", help=text)
    add("--launch", metavar="COMMAND", help="the server's command line, as one quoted string, or @FILE")
    add("--server", metavar="URL", help="a running SGLang server: its own flags are checked in place of --launch")
    add("--log", metavar="FILE", help="a server's log: its flags, where --launch is absent, and what it says of drafts")
    add("--train-metrics", metavar="FILE", help="the trainer's metrics (JSON, JSON lines or log): what they promise")
    add("--deep", action="store_true", help="read every weight; else 64 KB of each tensor are sampled")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _probe(one: Parser) -> None:
    add = one.add_argument
    add("drafter", metavar="DRAFTER", help="a folder or .safetensors file")
    add("--engine", action="append", metavar="SPEC", help="sglang==0.5.9; default: the installed release; repeatable")
    add("--target", metavar="DIR_OR_CONFIG", help="the target's folder or config.json")
    add("--wheel", metavar="FILE", help="a local wheel in place of a download")
    add("--device", default="cpu", help="cpu, or meta for a drafter larger than memory (names and shapes only)")
    add("--timeout", type=float, default=600, metavar="SECONDS")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _convert(one: Parser) -> None:
    add = one.add_argument
    add("drafter", metavar="DRAFTER", help="a folder or .safetensors file; it is only read")
    add("out", metavar="OUT", help="a new folder")
    add("--to", required=True, metavar="SPEC", help="sglang==0.5.9, vllm==0.33.0, …")
    add("--target", metavar="DIR_OR_CONFIG", help="the target's folder or config.json, to resolve default layers")
    add("--force", action="store_true", help="write what the engine cannot express all the same")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _measure(one: Parser) -> None:
    add = one.add_argument
    _replayed(one)
    text = "stored hidden states (of speculators, SpecForge or the kit) in place of prompts; --target may be left out"
    add("--features", metavar="DUMP", help=text)
    text = "layers after which the states of --features were taken, such as 2,15,27, where neither it nor DRAFTER says"
    add("--boundaries", default="", metavar="B,B,B", help=text)
    add("--wiring", default="trained", metavar="W", help="trained, served, the name of a lab fault, or a wiring.json")
    add("--engine", default="", metavar="SPEC", help="the release whose wiring `served` means")
    add("--launch", metavar="COMMAND", help="the server's command line, for `served`")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _search(one: Parser) -> None:
    add = one.add_argument
    _replayed(one)
    text = "what was accepted: the JSON of `bench`, or rounds, a histogram, or accepted and verified"
    add("--observed", required=True, metavar="JSON", help=text)
    add("--singles", action="store_true", help="single switches only, no pairs")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _replayed(one: Parser) -> None:
    add = one.add_argument
    add("drafter", nargs="?", metavar="DRAFTER", help="a drafter's folder; empty takes the lab's")
    add("--target", metavar="DIR", help="the target's folder or hub id; empty takes the lab's")
    add("--prompts", metavar="JSONL", help="prompts or chat messages, one a line; empty takes the lab's held-out ones")
    add("--count", type=int, default=0, metavar="N", help="only the first N prompts")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--steps", type=int, default=4, metavar="S", help="draft steps of a round")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16; exact comparisons hold in float32")


def _serve(one: Parser) -> None:
    add = one.add_argument
    add("drafter", nargs="?", metavar="DRAFTER", help="a drafter's folder; without one there is no speculation")
    add("--target", required=True, metavar="DIR", help="the target's folder or hub id")
    add("--algorithm", default="EAGLE3", help="EAGLE3, EAGLE, …")
    add("--steps", type=int, default=4, metavar="S", help="draft steps of a round")
    add("--dtype", default="float32", help="float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, gpu or cpu")
    add("--port", type=int, default=0, help="0 takes a free one; the server listens on the loopback only")
    add("--interval", type=float, default=10.0, metavar="SECONDS", help="between two polls of /health")
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="wait no longer than this")
    add("--log", default="reports/servers", metavar="DIR", help="where the server's log goes")


def _bench(one: Parser) -> None:
    add = one.add_argument
    add("--server", required=True, metavar="URL", help="a running SGLang server")
    add("--baseline", metavar="URL", help="the same target without speculation")
    add("--prompts", metavar="JSONL", help="prompts or chat messages, one a line; empty takes the lab's held-out ones")
    add("--count", type=int, default=0, metavar="N", help="only the first N prompts")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--clients", type=int, default=4, metavar="N", help="concurrent requests")
    add("--dtype", default="bfloat16", help="the server's dtype: in float32 any difference of texts fails")
    add("--api-key-env", default="", metavar="NAME", help="the environment variable that holds the API key")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _report(one: Parser) -> None:
    add = one.add_argument
    add("-p", dest="pairs", action="append", default=[], metavar="NAME=VALUE", help="a notebook parameter")
    add("--params", metavar="FILE", help="parameters in a YAML or JSON file")
    add("--out", default="reports/lab", metavar="DIR", help="where the report goes (default reports/lab)")


if __name__ == "__main__":
    sys.exit(main())
