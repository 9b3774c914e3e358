"""The target's side: greedy text, and the hidden states a drafter reads, from a transformers model.

Boundary b is the residual stream after b decoder layers, before any final norm. Hooks take it where it exists,
so that b = N is the pre-norm state (transformers' own `hidden_states[N]` is post-norm).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .contract import TargetInfo, Wiring
from .drafter import choose_device, choose_dtype
from .findings import KitError, read_bounded, write_atomic


@dataclass(frozen=True)
class Text:
    """One prompt and the target's own greedy answer.

    `ids` run past the answer (past its limit or its stop token), so that the round which crosses its end can be
    judged whole.
    """

    ids: tuple[int, ...]
    prompt: int  # tokens of the prompt
    limit: int  # tokens of the answer, a stop token included

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.prompt : self.prompt + self.limit]


@dataclass(frozen=True)
class States:
    """The target's hidden states over one text; every tensor is [tokens, Ht]."""

    text: Text
    boundaries: dict[int, Tensor]  # residual stream, un-normed
    normed: dict[int, Tensor]  # the same through the norm of the block that reads it
    final: Tensor  # last state after the final norm

    def select(self, wiring: Wiring) -> Tensor:  # [tokens, K*Ht], or [tokens, Ht] for a single layer
        """What a drafter receives under this wiring."""
        if wiring.capture == "final":
            return self.final
        source = self.normed if wiring.capture == "normed" else self.boundaries
        try:
            states = torch.cat([source[b] for b in wiring.boundaries], -1)
        except KeyError as error:
            raise KitError(f"Boundary {error} was not captured; capture it with the others.") from None
        return torch.zeros_like(states) if wiring.capture == "zeros" else states


class Target:
    """A causal language model with decoder layers, and where its states are."""

    def __init__(self, model: nn.Module, tokenizer, info: TargetInfo, device_reason: str = "given"):
        self.model, self.tokenizer, self.info, self.device_reason = model.eval(), tokenizer, info, device_reason
        self.layers, self.final_norm = _decoder(model)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", dtype: str = "auto") -> Target:
        """Load a model folder (or a hub id) with transformers; KitError with one sentence when it cannot."""
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.disable_progress_bar()
        where, why = choose_device(device)
        kind, _ = choose_dtype(dtype, where)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(where)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # transformers, safetensors and hub classes raise whatever they trip over
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
            raise KitError(f"transformers cannot load the target {path} ({reason}); give a model folder.") from None
        info = TargetInfo.of(path) if Path(path).exists() else _info(model)
        return cls(model, tokenizer, info, why)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> str:
        """As engines and torch spell it: float32, bfloat16, …"""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def embedding(self) -> Tensor:  # [V, Ht]
        return self.model.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:  # [V, Ht]
        return self.model.get_output_embeddings().weight.detach()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer, from the generation config (the tokenizer's own may differ)."""
        ids = self.model.generation_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def encode(self, prompt: str | Sequence[dict] | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a plain user prompt, of chat messages, or of ids given as they are."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if prompt and isinstance(prompt[0], int):
            if max(prompt) >= len(self.embedding):
                raise KitError(f"A prompt holds the id {max(prompt)}; the target has {len(self.embedding)} ids.")
            return tuple(prompt)
        if not getattr(self.tokenizer, "chat_template", None):
            return tuple(self.tokenizer("\n".join(m["content"] for m in prompt)).input_ids)
        try:
            text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs
            raise KitError(f"The target's chat template cannot be applied ({str(error)[:120]}); repair it.") from None
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch: int = 32) -> list[tuple[int, ...]]:
        """transformers' own greedy continuations, through stop ids, in left-padded batches."""
        from transformers import GenerationConfig

        plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
        answers: list[tuple[int, ...]] = []
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            width = max(map(len, part))
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(part):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            out = self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=plain,
            )
            answers += map(tuple, out[:, width:].tolist())
        return answers

    def fingerprint(self) -> str:
        """A hash of eight values of every parameter: another model, or the same one trained further, has another."""
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            values = parameter.detach().flatten()[:: max(1, parameter.numel() // 8)][:8]
            digest.update(name.encode() + values.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def record(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        lookahead: int = 8,
        cache: Path | None = None,
    ) -> list[Text]:
        """Greedy texts with `lookahead` tokens past their end; kept in `cache` (a folder) when one is given."""
        what = (self.fingerprint(), dict(self.info.config), [list(p) for p in prompts], max_new_tokens, lookahead)
        where = (str(self.model.dtype), self.device.type, torch.__version__)
        key = hashlib.sha256(json.dumps([what, where], default=str).encode()).hexdigest()[:20]
        file = cache / f"greedy-{key}.json" if cache else None
        if file and file.exists():
            answers = [tuple(a) for a in json.loads(file.read_text())]
        else:
            answers = self.greedy(prompts, max_new_tokens + lookahead)
            if file:
                write_atomic(file, json.dumps(answers))
        texts = []
        for prompt, answer in zip(prompts, answers, strict=True):
            limit = len(_until(answer[:max_new_tokens], self.stop_ids))
            texts.append(Text((*prompt, *answer[: limit + lookahead]), len(prompt), limit))
        return texts

    @torch.inference_mode()
    def states(self, text: Text, boundaries: Iterable[int], normed: Iterable[int] = ()) -> States:
        """The states over one text, from one prefill."""
        with Capture(self, boundaries, normed) as capture:
            self.model.base_model(input_ids=torch.tensor([text.ids], device=self.device), use_cache=False)
        return States(text, *capture.take())


class Capture:
    """Forward hooks on a target; `take` returns (boundaries, normed, final) of the last pass, without batch axis."""

    def __init__(self, target: Target, boundaries: Iterable[int], normed: Iterable[int] = ()):
        self.target = target
        self.at = {"raw": sorted(set(boundaries)), "normed": sorted(set(normed))}
        self.held: dict[tuple[str, int], Tensor] = {}
        self.handles: list = []
        depth = len(target.layers)
        if bad := [b for b in (*self.at["raw"], *self.at["normed"]) if not 0 <= b <= depth]:
            raise KitError(f"Boundaries {bad} do not exist in a target of {depth} layers (0 to {depth}).")

    def __enter__(self) -> Capture:
        layers, norm = self.target.layers, self.target.final_norm
        for b in self.at["raw"]:
            module = layers[b] if b < len(layers) else norm
            self.handles.append(module.register_forward_pre_hook(self._keep_input(b), with_kwargs=True))
        for b in self.at["normed"]:
            module = layers[b].input_layernorm if b < len(layers) else norm
            self.handles.append(module.register_forward_hook(self._keep_output("normed", b)))
        self.handles.append(norm.register_forward_hook(self._keep_output("final", 0)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def take(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        raw = {b: self.held["raw", b][0] for b in self.at["raw"]}
        return raw, {b: self.held["normed", b][0] for b in self.at["normed"]}, self.held["final", 0][0]

    def _keep_input(self, b: int):
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.held["raw", b] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def _keep_output(self, kind: str, b: int):
        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            self.held[kind, b] = output.detach()

        return hook


def compare(a: Tensor, b: Tensor) -> dict[str, float]:  # both [tokens, width]
    """Norm ratio |a|/|b| and mean cosine: one alone misses a scale error, the other a rotation."""
    x, y = a.float(), b.float()
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1).mean()
    ratio = x.norm(dim=-1).mean() / y.norm(dim=-1).mean().clamp_min(1e-12)
    return {"norm_ratio": float(ratio), "cosine": float(cosine)}


def read_prompts(path: str | Path, count: int = 0) -> list:
    """Prompts of a JSONL file: {"prompt": text}, {"messages": […]} or {"ids": […]} a line; 0 takes all."""
    prompts, number = [], 0
    try:
        for line in read_bounded(path, 64 << 20, "the prompts").decode().splitlines():
            number += 1
            if line.strip():
                prompts.append(_prompt(json.loads(line)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise KitError(
            f'{path}, line {number}, is not {{"prompt": text}}, {{"messages": […]}} or {{"ids": […]}}.'
        ) from None
    if not prompts:
        raise KitError(f"{path} holds no prompts.")
    return prompts[:count] if count else prompts


def _prompt(row: dict) -> str | list:
    """The prompt of one row; ValueError or TypeError where it is none."""
    if isinstance(row.get("prompt") if isinstance(row, dict) else None, str) and row["prompt"].strip():
        return row["prompt"].encode("utf-8").decode("utf-8")
    ids = row.get("ids")
    if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
        return ids
    said = row.get("messages")
    if isinstance(said, list) and said and all(isinstance(m.get(k), str) for m in said for k in ("role", "content")):
        return said
    raise ValueError("no prompt")


def _until(ids: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """Ids up to and with the first stop id."""
    end = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
    return tuple(ids[:end])


def _decoder(model: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers and the final norm, also inside multimodal wrappers."""
    for module in model.modules():
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(norm, nn.Module):
            return layers, norm
    raise KitError(f"{type(model).__name__} has no decoder layers with a final norm that the kit can find.")


def _info(model: nn.Module) -> TargetInfo:
    """What a hub model's own config says."""
    config = model.config.get_text_config()
    name = type(model).__name__
    positions = getattr(config, "max_position_embeddings", None)
    tie = bool(getattr(config, "tie_word_embeddings", False))
    sizes = (config.hidden_size, config.vocab_size, config.num_hidden_layers)
    return TargetInfo(name, *sizes, tie, positions, config.to_dict(), getattr(model.config, "_name_or_path", ""))
