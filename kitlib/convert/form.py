"""How each reader wants a drafter written: an engine's release, or a trainer's own format."""

from __future__ import annotations

from dataclasses import dataclass

from ..engines import Engine
from ..findings import KitError

CLASSES = {"sglang": "LlamaForCausalLMEagle3", "vllm": "Eagle3LlamaForCausalLM"}


@dataclass(frozen=True)
class Form:
    """How one reader wants a drafter written; `release` is "" for a trainer's own format."""

    engine: str
    release: str
    block: str  # name of decoder layer {i}, or of the only one
    architecture: str
    place: str  # of the layer ids: "eagle_config" (layer-output ids) or "" (top level, boundaries)
    later_norm: str = "input_layernorm"  # norm on the input of layers >= 1

    @property
    def to(self) -> str:
        return f"{self.engine}=={self.release}" if self.release else self.engine

    @classmethod
    def of(cls, to: str) -> Form:
        """From `sglang==0.5.9`, `vllm==0.20.0`, `speculators` or `specforge`; KitError for anything else."""
        name = next((n for n in (*CLASSES, "specforge", "speculators") if to.strip().startswith(n)), "")
        spec = to.strip().removeprefix(name).strip()
        if name == "specforge" and not spec:
            return cls(name, "", "midlayer", "LlamaForCausalLMEagle3", "eagle_config")
        if name == "speculators" and not spec:
            return cls(name, "", "layers.{i}", "Eagle3Speculator", "")
        if name not in CLASSES:
            raise KitError(f"Cannot convert to {to!r}; write sglang==0.5.9, vllm==0.20.0, speculators or specforge.")
        engine = Engine.load(name)
        if len(releases := engine.resolve(to)) != 1:
            one = f"{name}=={engine.default}"
            raise KitError(f"{to!r} means {len(releases)} releases; name the one that will serve, as in {one}.")
        loader, later = (engine.entry(t, engine.known(releases[0])[0]) for t in ("loader", "later_norm"))
        # vLLM gets the flat form as well: read since 0.10 (speculators' own: 0.11), and it needs no verifier from a hub
        place = "eagle_config" if name == "sglang" else ""
        return cls(name, releases[0], loader["block"], CLASSES[name], place, later["norm"])
