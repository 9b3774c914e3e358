"""What replay needs of a target that is not loaded: embedding, head and final norm, read alone from its files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoint import Checkpoint
from ..contract import Contract, TargetInfo
from ..contract.dialects import number
from ..drafter import choose_device, choose_dtype, rms_norm
from ..features import _decoder as find_decoder
from ..findings import KitError

VOCABULARY, WIDE = 8192, (torch.float32, torch.bfloat16, torch.float16)  # rows of the head at a time
ELSEWHERE = r"(?:^|\.)layers\.|vis|audio|mtp"  # names of other parts' norms and embeddings


@dataclass(frozen=True)
class StoredTarget:
    """In the place of `features.Target`, where the states are stored."""

    info: TargetInfo
    embedding: Tensor  # [V, Ht]; the drafter's own, where no target was named
    head: Tensor | None  # [V, Ht]
    norm: Callable[[Tensor], Tensor] | None  # the final one: [rows, Ht] -> [rows, Ht], in float32
    norm_name: str
    why: str  # why the target's choices cannot be computed; empty where they can
    device: torch.device
    dtype: str

    @classmethod
    def of(cls, path: str | Path, checkpoint: Checkpoint, contract: Contract, device: str, dtype: str) -> StoredTarget:
        """Two or three tensors of a target's folder; of the drafter's where none was named and none is needed."""
        where, _ = choose_device(device)
        kind, _ = choose_dtype(dtype, where)
        if not path:
            own = _tensor(checkpoint, "embed_tokens", contract.vocab, contract.hidden)
            if own is None or contract.trained().head_source == "target":
                what = "embedding" if own is None else "head"
                raise KitError(f"The drafter borrows its target's {what}; name the target's folder with --target.")
            info = TargetInfo("", contract.target_hidden, contract.vocab, 0, False, None, {})
            return cls(info, own.to(where, kind), None, None, "", "no target was named", where, str(kind)[6:])
        info, files = TargetInfo.of(path), Checkpoint.open(path)
        embedding = _tensor(files, "embed_tokens", info.vocab, info.hidden)
        if embedding is None:
            raise KitError(f"{path} holds no embed_tokens of {info.vocab} × {info.hidden}; name the target's folder.")
        embedding = embedding.to(where, kind)  # once: every drafter shares it
        head = _tensor(files, "lm_head", info.vocab, info.hidden)
        if head is None and not any("lm_head" in name for name in files.tensors):
            head = embedding  # tied
        why = "" if head is not None else "the target's files hold no head that the kit can read"
        weight = _tensor(files, "norm", info.hidden)
        norm, name = (None, "") if weight is None else _norm(path, info, weight)
        head = None if head is None else head.to(where, kind)
        return cls(info, embedding, head, norm, name, why, where, str(kind)[6:])

    @torch.inference_mode()
    def normed(self, last: Tensor) -> Tensor:  # [rows, Ht] before the final norm -> after it, in float32
        return self.norm(last.float())

    @torch.inference_mode()
    def choices(self, final: Tensor) -> list[int]:  # [rows, Ht] after the final norm
        """The greedy next token after each row, in float32; a part of the vocabulary at a time."""
        rows = final.to(self.device).float()
        best, at = rows.new_full((len(rows),), float("-inf")), rows.new_zeros(len(rows), dtype=torch.long)
        for start in range(0, len(self.head), VOCABULARY):
            part = self.head[start : start + VOCABULARY].float()
            value, index = (rows @ part.T).max(-1)
            better = value > best
            best, at = torch.where(better, value, best), torch.where(better, index + start, at)
        return at.tolist()

    @torch.inference_mode()
    def norm_state(self, last: Tensor) -> str:  # [rows, Ht]
        """pre-norm or post-norm, by measurement: over its weight, what an RMSNorm gave has length 1 in every row."""
        weight = self.norm(torch.ones(1, last.shape[-1]))[0]
        used = weight.abs() > 1e-3 * weight.abs().max()
        off = ((last[:, used].float() / weight[used]).pow(2).mean(-1).sqrt() - 1).abs()
        return "post-norm" if off.quantile(0.9) < 0.05 else "pre-norm"


def _tensor(files: Checkpoint, part: str, *shape: int) -> Tensor | None:
    """The one tensor of a part and a shape, read alone; None where there is none, or it is packed."""
    pattern = rf"(?:^|\.){part}\.weight$"
    names = [n for n in files.tensors if re.search(pattern, n) and not re.search(ELSEWHERE, n)]
    names = [n for n in names if tuple(files.tensors[n].shape) == shape]
    if len(names) != 1:
        return None
    with safe_open(files.tensors[names[0]].file, "pt") as handle:
        tensor = handle.get_tensor(names[0])
    return tensor if tensor.dtype in WIDE else None


def _norm(path: str | Path, info: TargetInfo, weight: Tensor) -> tuple[Callable[[Tensor], Tensor] | None, str]:
    """The target's final norm in float32, and its name: of the class in transformers, else an RMSNorm if it has eps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):  # no memory: only the class of its norm is wanted
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            _, norm = find_decoder(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        name = type(norm).__name__
        norm = norm.to_empty(device="cpu").float()
        norm.load_state_dict({"weight": weight.float()})
        return (norm.eval(), name) if "RMS" in name else (None, "")
    except Exception:  # a class that transformers does not know, or a config it refuses
        eps, wide = number(info.config.get("rms_norm_eps")), weight.float()
        name = "RMSNorm by its rms_norm_eps, as transformers does not know the model"
        return (lambda x: rms_norm(x, wide, eps), name) if eps else (None, "")
