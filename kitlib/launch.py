"""A pasted server command line → engine, flags and environment. Nothing is executed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .findings import KitError

ALIASES = {  # other spellings of the same flag
    "model": "model-path",
    "speculative-draft-model": "speculative-draft-model-path",
    "speculative-algo": "speculative-algorithm",
    "speculative-draft": "speculative-draft-model-path",
    "max-model-len": "context-length",  # vLLM
}
ENGINES = {
    "sglang.launch_server": "sglang",
    "sglang": "sglang",
    "vllm": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
}
_SECRET = re.compile(r"key|token|secret|passw|auth", re.IGNORECASE)
_HARMLESS = re.compile(r"path|num|map|tokenizer|tokens|file$")  # flags whose names only look secret


@dataclass(frozen=True)
class Launch:
    """A server command as data. Flags have no leading dashes; a flag without a value is True."""

    engine: str = "sglang"
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    @classmethod
    def of_arguments(cls, told: Mapping[str, Any]) -> Launch:
        """From SGLang's own arguments, as its log or /server_info tells them; what is unset is absent."""
        kept = {k: v for k, v in told.items() if isinstance(k, str) and isinstance(v, (str, int, float))}
        plain = {k.replace("_", "-"): v for k, v in kept.items() if v is not False}
        plain = {k: "…" if _is_secret(k) else v for k, v in plain.items() if v != ""}
        return cls("sglang", plain)

    @property
    def algorithm(self) -> str:
        """The speculative algorithm in SGLang's spelling; "" when speculation is off."""
        return str(self.flags.get("speculative-algorithm", "")).upper()

    @property
    def drafter(self) -> str:
        return str(self.flags.get("speculative-draft-model-path", ""))

    @property
    def target(self) -> str:
        return str(self.flags.get("model-path", ""))

    def number(self, flag: str) -> int | None:
        """A count among the flags; None when absent, KitError when it is no whole number from 1 to 2**24."""
        value = self.flags.get(flag)
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise KitError(f"--{flag} is {value!r} in the launch command, not a whole number.") from None
        if not 1 <= number <= 1 << 24:
            raise KitError(f"--{flag} is {value!r} in the launch command; that is no sensible number.")
        return number


def parse(text: str) -> Launch:
    """Parse a shell command of SGLang or vLLM as people paste it: several lines, quotes, environment, comments.

    Raises KitError when it starts no server that the kit knows.
    """
    joined = re.sub(r"\\\s*\n", " ", text.strip())
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise KitError(f"The launch command cannot be split into words ({error}); check its quotes.") from None
    words = [w for w in words if w not in ("$", "&", "nohup", "env", "export", "exec", "sudo")]
    env: dict[str, str] = {}
    start, engine = _start(words, env)
    if start is None:
        raise KitError("The launch command starts no known server; paste `python -m sglang.launch_server …` whole.")
    flags = _flags(words[start:], engine)
    raw = flags.get("speculative-config")
    if isinstance(raw, str):
        flags |= _vllm(raw)
    shown = {k: "…" if _SECRET.search(k) else v for k, v in env.items()}
    return Launch(engine, flags, shown, joined)


def _start(words: list[str], env: dict[str, str]) -> tuple[int | None, str]:
    """Where the flags begin, and which engine; environment assignments before it go to `env`."""
    for i, word in enumerate(words):
        if i and words[i - 1] == "-m" and word in ENGINES:
            return i + 1, ENGINES[word]
        if word.rsplit("/", 1)[-1] in ("sglang", "vllm") and words[i + 1 : i + 2] == ["serve"]:
            return i + 2, ENGINES[word.rsplit("/", 1)[-1]]
        if match := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", word, re.DOTALL):
            env[match[1]] = match[2]
    if words and words[0].startswith("--"):
        return 0, "sglang"
    return None, ""


def _is_secret(flag: str) -> bool:
    return bool(_SECRET.search(flag)) and not _HARMLESS.search(flag)


def _flags(words: list[str], engine: str) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word in ("|", "||", "&&", ";", ">", ">>", "2>&1") or word.startswith((">", "2>")):
            break
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            name = ALIASES.get(name.replace("_", "-"), name.replace("_", "-"))
            flags[name] = "…" if value and _is_secret(name) else value or True
            name = "" if value else name
        elif name:
            flags[name] = "…" if _is_secret(name) else word
            name = ""
        elif "model-path" not in flags and not word.startswith("-"):
            flags["model-path"] = word  # `sglang serve MODEL`, `vllm serve MODEL`
    return flags


def _vllm(raw: str) -> dict[str, Any]:
    """vLLM's JSON in SGLang's vocabulary, so that the checks read one set of names."""
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise KitError("--speculative-config is not valid JSON; quote it with single quotes.") from None
    if not isinstance(config, dict):
        raise KitError("--speculative-config must be a JSON object.")
    out: dict[str, Any] = {}
    if method := str(config.get("method") or ("eagle3" if "eagle3" in str(config.get("model")).lower() else "")):
        out["speculative-algorithm"] = method.upper()  # without a method vLLM goes by the path
    if "model" in config:
        out["speculative-draft-model-path"] = config["model"]
    if "num_speculative_tokens" in config:
        out["speculative-num-steps"] = config["num_speculative_tokens"]
    return out
