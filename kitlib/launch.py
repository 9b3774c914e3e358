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
    "pp-size": "pipeline-parallel-size",
    "tp-size": "tensor-parallel-size",
    "tp": "tensor-parallel-size",
}
SHORT = {"-q": "quantization", "-pp": "pipeline-parallel-size", "-tp": "tensor-parallel-size"}  # vLLM's, with those
SHORT |= {"-sc": "speculative-config", "-dp": "data-parallel-size", "-n": "nnodes", "-ep": "enable-expert-parallel"}
WHOLE = (  # flags that the checks read: argparse takes any beginning of a name that fits one alone
    "speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps", "speculative-eagle-topk",
    "speculative-num-draft-tokens", "context-length", "attention-backend", "page-size", "disable-cuda-graph",
    "speculative-token-map", "speculative-draft-model-quantization", "speculative-accept-threshold-single",
    "speculative-accept-threshold-acc", "quantization",
)  # fmt: skip
DOTTED = "speculative-config."  # vLLM: --speculative-config.method eagle3
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
    parts = {k.removeprefix(DOTTED).replace("-", "_"): v for k, v in flags.items() if k.startswith(DOTTED)}
    if isinstance(raw, str) or parts:
        flags |= _vllm(raw if isinstance(raw, str) else "{}", parts)
    if engine == "vllm" and (length := _length(flags.get("context-length"))) != flags.get("context-length"):
        flags = {k: v for k, v in flags.items() if k != "context-length"}
        flags |= {"context-length": length} if length else {}
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
        word = f"--{SHORT[word]}" if engine == "vllm" and word in SHORT else word
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            name = ALIASES.get(name.replace("_", "-"), name.replace("_", "-"))
            begun = [n for n in WHOLE if n.startswith(name)]
            name = begun[0] if len(begun) == 1 and len(name) > 6 else name
            flags[name] = "…" if value and _is_secret(name) else value or True
            name = "" if value else name
        elif name:
            flags[name] = "…" if _is_secret(name) else word
            name = ""
        elif "model-path" not in flags and not word.startswith("-"):
            flags["model-path"] = word  # `sglang serve MODEL`, `vllm serve MODEL`
    return flags


def _length(said: object) -> object:
    """vLLM's --max-model-len as a number: 1k is 1000, 1K 1024, 25.6k 25600; None where the engine chooses it itself."""
    text, steps = str(said), {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if text in ("auto", "-1"):
        return None
    if match := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([kmgKMG])", text):
        return int(float(match[1]) * steps[match[2]])
    return said


def _vllm(raw: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's JSON and dotted arguments in SGLang's vocabulary, so that the checks read one set of names."""
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise KitError("--speculative-config is not valid JSON; quote it with single quotes.") from None
    if not isinstance(config, dict):
        raise KitError("--speculative-config must be a JSON object.")
    config |= parts
    out: dict[str, Any] = {}
    method, path = str(config.get("method") or "draft_model"), str(config.get("model") or "").lower()
    if method == "draft_model":  # also what an absent one becomes: vLLM then goes by the path
        method = "eagle" if "eagle-" in path else "eagle3" if "eagle3" in path else method
    out["speculative-algorithm"] = method.upper()
    if "model" in config:
        out["speculative-draft-model-path"] = config["model"]
    if "num_speculative_tokens" in config:
        out["speculative-num-steps"] = config["num_speculative_tokens"]
    for name in ("draft_tensor_parallel_size", "tensor_parallel_size"):
        if name in config:
            out[f"speculative-{name.replace('_', '-')}"] = config[name]
    return out
