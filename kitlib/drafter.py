"""The EAGLE-3 drafter: one readable forward that runs under a given `Wiring`, and a strict loader.

The same code is the healthy drafter and each fault: a wiring says which states arrive, whether `fc` runs, which
norm sits where, whose embedding and head are used. Semantics follow SafeAILab/EAGLE `cnets.py` and SGLang
`llama_eagle3.py`; rotary embeddings are transformers' own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .contract import Contract, Rope, Wiring, parameter_shapes
from .findings import KitError

# (layer, q [..., heads, rows, D], k [..., kv, rows, D], v [..., kv, rows, D]) -> [..., heads, rows, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LoadResult:
    """What a strict load did; names in the file's own spelling, `missing` in the kit's."""

    loaded: tuple[str, ...]
    renamed: dict[str, str]  # file name -> canonical name, where they differ
    missing: tuple[str, ...]  # parameters that the wiring needs and no tensor filled
    unused: tuple[str, ...]  # tensors that nothing reads
    not_needed: tuple[str, ...]  # t2d, and an own embedding the wiring does not use
    device: str = ""
    device_reason: str = ""
    dtype: str = ""

    @property
    def complete(self) -> bool:
        return not self.missing and not self.unused


def choose_device(asked: str = "auto") -> tuple[torch.device, str]:
    """A device and the reason for it. KitError when the one asked for is not there."""
    if asked == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), f"CUDA is available: {torch.cuda.get_device_name(0)}"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "no CUDA; Apple's MPS is available"
        return torch.device("cpu"), "neither CUDA nor MPS is available"
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:90]
        raise KitError(f"Device {asked!r} cannot be used here ({reason}); use auto, cpu, cuda or mps.") from None
    return device, "asked for"


def choose_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """A dtype and the reason for it. Exact comparisons hold in float32 only."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if asked in names:
        return names[asked], "asked for"
    if asked != "auto":
        raise KitError(f"There is no dtype {asked!r} here; use auto, {', '.join(names)}.")
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16, "the GPU computes bfloat16"
    return torch.float32, f"{device.type}: float32 is exact, and fast enough for replay"


def fill_value(name: str, shape: tuple[int, ...], fill: str = "random") -> Tensor:
    """What stands for a tensor that never arrived: norms one; else N(0, 0.02) seeded by name, or zeros (bf16)."""
    if name.endswith("norm.weight") or "fc_norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    if fill == "zeros":
        return torch.zeros(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, scaled in the input's dtype, as transformers and SGLang compute it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Drafter(nn.Module):
    """An EAGLE-3 drafter under one wiring. Shapes are those of one sequence; leading batch axes pass through."""

    def __init__(self, contract: Contract, wiring: Wiring, target_embed: Tensor, target_head: Tensor | None = None):
        super().__init__()
        self.contract, self.wiring = contract, wiring
        self.rotary = _rotary(contract, wiring.rope)
        self.shapes = parameter_shapes(contract, wiring)
        for name, shape in self.shapes.items():
            self.register_parameter(_key(name), nn.Parameter(torch.empty(shape), requires_grad=False))
        self.register_buffer("d2t", torch.zeros(contract.draft_vocab, dtype=torch.long))
        self.register_buffer("target_embed", target_embed, persistent=False)  # [V, Ht]
        self.register_buffer("target_head", target_embed if target_head is None else target_head, persistent=False)

    def __getitem__(self, name: str) -> Tensor:
        """A parameter by its canonical name."""
        return self.get_parameter(_key(name))

    @property
    def embedding(self) -> Tensor:  # [V, H]
        return self["embed_tokens.weight"] if self.wiring.embed_source == "own" else self.target_embed

    def embed(self, ids: Tensor) -> Tensor:  # [rows] target ids -> [rows, H]
        return F.embedding(ids, self.embedding) * self.wiring.embed_scale

    def fuse(self, states: Tensor) -> Tensor:  # [rows, K*Ht] -> [rows, H]; [rows, H] where fc is bypassed
        """Project the concatenated target states, or pass them on when the wiring bypasses `fc`."""
        if not self.wiring.fc:
            if states.shape[-1] != self.contract.hidden:
                width = f"{states.shape[-1]} wide, the drafter {self.contract.hidden}"
                raise KitError(f"fc is bypassed, but the states are {width}; an engine would crash here.")
            return states
        width = self.shapes["fc.weight"][1]
        if states.shape[-1] != width:
            raise KitError(f"fc takes {width} features, the states have {states.shape[-1]}; check the boundaries.")
        if self.wiring.norm_before_fc:
            states = rms_norm(states, self["input_norm.weight"], self.contract.eps)
        if self.wiring.fc_norm:
            parts = states.chunk(self.contract.aux_states, -1)
            normed = [rms_norm(p, self[f"fc_norm.{i}.weight"], self.contract.eps) for i, p in enumerate(parts)]
            states = torch.cat(normed, -1)
        return F.linear(states, self["fc.weight"], self._bias("fc.bias"))

    def step(
        self,
        ids: Tensor,  # [rows] target ids, each one token ahead of its state
        hidden: Tensor,  # [rows, H] fused target states, or the previous step's feedback
        positions: Tensor,  # [rows]
        attend: Attend,
    ) -> Tensor:  # [rows, H] residual stream before the final norm
        """One pass of the decoder layer(s); `attend` owns the keys and values."""
        eps = self.contract.eps
        turn = self.rotary(hidden, positions[None] + self.wiring.position_base)  # cos and sin, [1, rows, D] each
        for i in range(self.contract.layers):
            p = f"layers.{i}."
            if i == 0:
                normed = rms_norm(hidden, self[p + "hidden_norm.weight"], eps)
                x = torch.cat([rms_norm(self.embed(ids), self[p + "input_layernorm.weight"], eps), normed], -1)
                residual = normed if self.wiring.residual == "normed" else hidden
            else:
                x = rms_norm(hidden, self[p + f"{self.wiring.later_norm}.weight"], eps)
                residual = hidden
            hidden = residual + self._attention(i, x, turn, attend)
            y = rms_norm(hidden, self[p + "post_attention_layernorm.weight"], eps)
            gate, up = F.linear(y, self[p + "mlp.gate_proj.weight"]), F.linear(y, self[p + "mlp.up_proj.weight"])
            hidden = hidden + F.linear(F.silu(gate) * up, self[p + "mlp.down_proj.weight"])
        return hidden

    def _attention(self, i: int, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = []
        for part, count in (("q", self.contract.heads), ("k", self.contract.kv_heads), ("v", self.contract.kv_heads)):
            y = F.linear(x, self[f"layers.{i}.self_attn.{part}_proj.weight"])
            heads.append(y.view(*x.shape[:-1], count, self.contract.head_dim).transpose(-3, -2))
        q, k = (_rotate(h, *turn) for h in heads[:2])
        out = attend(i, q, k, heads[2]).transpose(-3, -2).flatten(-2)
        return F.linear(out, self[f"layers.{i}.self_attn.o_proj.weight"])

    def feedback(self, hidden: Tensor) -> Tensor:  # [rows, H] -> [rows, H]
        """What the next draft step receives in place of a target state."""
        if self.wiring.feedback == "post-norm":
            return rms_norm(hidden, self["norm.weight"], self.contract.eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, H] -> [rows, Vd] (or fewer: logit_cut)
        head = {"own": lambda: self["lm_head.weight"], "embedding": lambda: self.embedding}.get(
            self.wiring.head_source, lambda: self.target_head
        )()
        head = head[: self.contract.draft_vocab] if self.wiring.logit_cut else head
        return F.linear(rms_norm(hidden, self["norm.weight"], self.contract.eps), head)

    def to_target(self, draft_ids: Tensor) -> Tensor:  # [...] draft ids -> [...] target ids
        """Draft ids to target ids; an id past the vocabulary (a broken map) wraps, as it can match nothing anyway."""
        offsets, mode = self.d2t[draft_ids] if self.wiring.d2t != "identity" else 0, self.wiring.d2t
        start = {"absolute": 0, "doubled": 2 * draft_ids}.get(mode, draft_ids)
        return (start + offsets) % len(self.target_embed)

    def draft(self, hidden: Tensor) -> Tensor:  # [rows, H] -> [rows] greedy target ids
        return self.to_target(self.logits(hidden).argmax(-1))

    def _bias(self, name: str) -> Tensor | None:
        return self[name] if name in self.shapes else None


def load_drafter(
    checkpoint: Checkpoint,
    contract: Contract,
    wiring: Wiring,
    target_embed: Tensor,  # [V, Ht]
    target_head: Tensor | None = None,  # [V, Ht]; None: tied to the embedding
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> tuple[Drafter, LoadResult]:
    """Load a drafter strictly and say what happened to every tensor; nothing is skipped in silence.

    A parameter without a tensor gets `fill_value` and is listed as missing. A shape that does not fit raises
    KitError, as every engine would.
    """
    if contract.latent:
        raise KitError(
            f"{checkpoint.path} has latent attention (MLA), which is checked and converted but not replayed."
        )
    where, why = choose_device(device)
    kind, _ = choose_dtype(dtype, where)
    with torch.device("meta"):
        drafter = Drafter(contract, wiring, target_embed, target_head)
    by_canonical = {checkpoint.canonical(name): name for name in checkpoint.tensors}
    optional = {"t2d"} | ({"embed_tokens.weight"} if wiring.embed_source == "target" else set())
    loaded, missing, values = [], [], {}
    wanted = dict(drafter.shapes) | ({} if wiring.d2t == "identity" else {"d2t": (contract.draft_vocab,)})
    for name, shape in wanted.items():
        source = by_canonical.get(name)
        if source is None or name in wiring.dropped:
            missing.append(name)
            values[name] = torch.zeros(shape) if name == "d2t" else fill_value(name, shape, wiring.fill)
            continue
        tensor = _read(checkpoint, source)
        if tuple(tensor.shape) != shape:
            raise KitError(f"{source} is {list(tensor.shape)}, the drafter needs {list(shape)}; see `kitlib check`.")
        values[name] = tensor
        loaded.append(source)
    for name, tensor in values.items():
        if name != "d2t":
            drafter.register_parameter(_key(name), nn.Parameter(tensor.to(where, kind), requires_grad=False))
    drafter.d2t = values.get("d2t", torch.zeros(contract.draft_vocab)).long().to(where)
    drafter.target_embed = target_embed.to(where, kind)
    drafter.target_head = drafter.target_embed if target_head is None else target_head.to(where, kind)
    drafter.rotary = _rotary(contract, wiring.rope).to(where)
    rest = [n for n in checkpoint.tensors if n not in loaded]
    spare = tuple(n for n in rest if checkpoint.canonical(n) in optional)
    renamed = {n: c for n in loaded if (c := checkpoint.canonical(n)) != n}
    unused = tuple(n for n in rest if n not in spare)
    result = LoadResult(tuple(loaded), renamed, tuple(missing), unused, spare, str(where), why, str(kind)[6:])
    return drafter.eval(), result


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    with safe_open(checkpoint.tensors[name].file, "pt") as handle:
        return handle.get_tensor(name)


def _key(name: str) -> str:
    """torch forbids dots in parameter names; canonical names have them."""
    return name.replace(".", "/")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [..., heads, rows, D]; cos, sin [1, rows, R <= D]
    turn, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = turn.shape[-1] // 2
    turned = turn * cos + torch.cat([-turn[..., half:], turn[..., :half]], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _rotary(contract: Contract, rope: Rope) -> nn.Module:
    """transformers' rotary module for this rope; all its scaling types come with it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": rope.theta, "rope_type": rope.type, **dict(rope.scaling)}
    if rope.partial != 1.0:
        parameters["partial_rotary_factor"] = rope.partial
    config = LlamaConfig(
        hidden_size=contract.hidden,
        num_attention_heads=contract.heads,
        head_dim=contract.head_dim,
        max_position_embeddings=contract.max_positions or 4096,
        rope_parameters=parameters,
    )
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(config)
