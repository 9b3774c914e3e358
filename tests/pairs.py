"""Tiny pairs from a few words of TOML: a drafter with a target, and the command that serves them (tests/corpus)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, write_drafter

from kitlib.checkpoint import INDEX

CHAIN = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1"
CHAIN += " --speculative-num-draft-tokens 4"
VLLM = '{"method": "eagle3", "num_speculative_tokens": 3}'
USUAL = {  # launch lines as people write them; none of them should raise an alarm
    "sglang": (
        CHAIN,
        "--speculative-algorithm EAGLE3",
        "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 8"
        " --speculative-num-draft-tokens 32 --mem-fraction-static 0.8 --cuda-graph-max-bs 2 --dtype bfloat16",
        "--speculative-algorithm EAGLE3 --speculative-num-steps 1 --speculative-eagle-topk 1"
        " --speculative-num-draft-tokens 2 --tp 8 --page-size 64 --attention-backend fa3 --trust-remote-code",
    ),
    "vllm": (VLLM, '{"method": "eagle3", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'),
}
OUTER = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")  # not nested
OUTER += ("eagle_aux_hidden_state_layer_ids",)
MAPS = {  # d2t by name, made of the healthy offsets
    "zeros": lambda d2t: d2t * 0,
    "absolute": lambda d2t: d2t + torch.arange(len(d2t)),
    "short": lambda d2t: d2t[:-4],
    "shifted": lambda d2t: d2t + 1,
    "identity": lambda d2t: torch.arange(VOCAB),
    "full": lambda d2t: torch.zeros(VOCAB, dtype=torch.long),
    "twice": lambda d2t: torch.cat([d2t[:1], d2t[:-1]]),  # draft ids 1 and 2 both mean target id 2
    "beyond": lambda d2t: d2t.index_fill(0, torch.tensor([len(d2t) - 1]), VOCAB),
}
LATENT = {"q_a_proj": (16, 2 * HIDDEN), "q_a_layernorm": (16,), "q_b_proj": (48, 16), "kv_a_layernorm": (16,)}
LATENT |= {"kv_a_proj_with_mqa": (24, 2 * HIDDEN), "kv_b_proj": (64, 16)}


FORM = ("keys", "prefix", "cast", "fill", "dtype", "shards", "damage", "lose")  # how the files are written


def build(folder: Path, case: Mapping[str, Any]) -> tuple[Path, Path]:
    """(drafter, target) of a case."""
    wanted = dict(case.get("drafter", {}))
    special = ("nested", "full_vocabulary", "own_embedding", "random_embedding", "states", "d2t", "tensors", "fp8")
    special += ("initial", "latent", "later_norm", "verifier", *FORM, "outer")
    ask = {name: wanted.pop(name, None) for name in special}
    if ask["dtype"]:
        wanted["dtype"] = wanted["torch_dtype"] = ask["dtype"]
    drop, layer = wanted.pop("drop", []), "layers.0.self_attn."
    wanted |= dict.fromkeys(wanted.pop("without", ()), ...) | dict.fromkeys(wanted.pop("null", ()))
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    values |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 512, **case.get("target", {})}
    wrapped = values.pop("wrapped", None)
    values = {k: v for k, v in values.items() if k not in values.get("without", ()) and k != "without"}
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # as trained embeddings are: rows of very different length
    embedding = normal(VOCAB, values["hidden_size"]) * torch.linspace(0.2, 3, VOCAB)[:, None]
    extra = {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in (ask["tensors"] or {}).items()}
    if ask["own_embedding"]:  # "frozen": the target's; "tuned": trained further; "own": of its own width
        noise = 0.3 * normal(VOCAB, HIDDEN) * (ask["own_embedding"] != "frozen")
        extra["embed_tokens.weight"] = embedding[:, :HIDDEN] + noise
    if ask["random_embedding"]:
        extra["embed_tokens.weight"] = normal(VOCAB, HIDDEN) * 0.02
    if ask["full_vocabulary"]:
        extra["lm_head.weight"] = normal(VOCAB, HIDDEN)
        wanted["draft_vocab_size"] = VOCAB
        drop = [*drop, "t2d", *(() if ask["d2t"] else ("d2t",))]
    if ask["states"]:
        extra["fc.weight"] = normal(HIDDEN, ask["states"] * HIDDEN)
    if ask["latent"]:
        wanted["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
        drop = [*drop, *(f"{layer}{n}_proj.weight" for n in "qkv")]
        extra |= {f"{layer}{n}.weight": normal(*shape) for n, shape in LATENT.items()}
    rename = ("", "") if ask["nested"] else tuple(wanted.pop("rename", ("layers.0.", "midlayer.")))
    wanted.pop("rename", None)
    drafter = write_drafter(folder / "drafter", extra=extra, drop=drop, rename=rename, **wanted)
    rewrite(drafter / "model.safetensors", ask, normal)
    if ask["nested"]:
        nest(drafter, ask["verifier"] or "org/target", ask["outer"] or {})
    put(drafter, ask)
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**wrapped, "text_config": values} if wrapped else values))
    named = "language_model.model.embed_tokens.weight" if wrapped else "model.embed_tokens.weight"
    save_file({named: embedding}, target / "model.safetensors")
    return drafter, target


def put(drafter: Path, ask: Mapping[str, Any]) -> None:
    """The files in the form that is asked of them: names, dtypes, shards, damage."""
    config, file = drafter / "config.json", drafter / "model.safetensors"
    values = json.loads(config.read_text())
    for within in (values, values.get("transformer_layer_config")):
        if isinstance(within, dict):
            within |= {k: None for k, v in within.items() if v == "null"}
    config.write_text(json.dumps(values))
    dtypes = dict.fromkeys(ask["cast"] or ()) and {k: getattr(torch, v) for k, v in ask["cast"].items()}
    tensors = {}
    for name, tensor in load_file(file).items():
        if any(lost in name for lost in ask["lose"] or ()):
            continue
        if name in (ask["fill"] or {}):
            tensor = torch.full_like(tensor, float(ask["fill"][name]))
        if ask["dtype"] and tensor.dtype == torch.float32:
            tensor = tensor.to(getattr(torch, ask["dtype"]))
        tensor = tensor.to(dtypes.get(name, tensor.dtype))
        bare = name in ("lm_head.weight", "d2t", "t2d") and ask["prefix"] == "model."
        name = name.replace(*ask["keys"]) if ask["keys"] else name
        tensors[name if bare else (ask["prefix"] or "") + name] = tensor
    save_file(tensors, file)
    if ask["shards"]:
        names = sorted(tensors)
        parts = [f"model-{i + 1:05}-of-{ask['shards']:05}.safetensors" for i in range(ask["shards"])]
        where = {n: parts[i * len(parts) // len(names)] for i, n in enumerate(names)}
        for part in parts:
            save_file({n: tensors[n] for n in names if where[n] == part}, drafter / part)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        (drafter / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
        file.unlink()
        file = drafter / parts[-1]
    match ask["damage"]:
        case "missing shard":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "lfs":
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 2390000\n")
        case "pickle":
            torch.save(tensors, drafter / "pytorch_model.bin")
            file.unlink()


def rewrite(file: Path, ask: Mapping[str, Any], normal: Any) -> None:
    """What is asked of tensors that are there already."""
    tensors = load_file(file)
    if ask["d2t"]:
        tensors["d2t"] = MAPS[ask["d2t"]](tensors.get("d2t", torch.arange(DRAFT_VOCAB)))
    for name in list(tensors):
        if ask["later_norm"] and name == "layers.1.input_layernorm.weight":
            tensors[f"layers.1.{ask['later_norm']}.weight"] = tensors.pop(name)
        elif ask["fp8"] and name.endswith("_proj.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        elif ask["initial"] and "layer" in name:
            shape = tensors[name].shape
            tensors[name] = normal(*shape) * 0.02 if len(shape) == 2 else torch.ones(shape)
    save_file(tensors, file)


def nest(drafter: Path, verifier: str, outer: Mapping[str, Any]) -> None:
    """A flat config in speculators' form; `outer` changes its own fields."""
    flat = json.loads((drafter / "config.json").read_text())
    whole = {k: flat.pop(k) for k in OUTER if k in flat} | {"architectures": ["Eagle3Speculator"]}
    whole |= {"speculators_model_type": "eagle3", "speculators_version": "0.7.0", "transformer_layer_config": flat}
    named = {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}
    whole |= {"speculators_config": {"algorithm": "eagle3", "verifier": named}} | outer
    (drafter / "config.json").write_text(json.dumps(whole))


def command(case: Mapping[str, Any], drafter: Path, flags: str = "") -> str:
    """The launch command: `flags` (default: the case's own, else a chain) and what the case adds."""
    more, served = case.get("extra_flags", ""), case.get("served", "org/target")
    if "launch" in case:
        return case["launch"].replace("{drafter}", str(drafter))
    if case["engine"].startswith("vllm"):
        config = json.loads(flags or case.get("flags", VLLM)) | {"model": str(drafter)}
        return f"vllm serve {served} {more} --speculative-config {shlex.quote(json.dumps(config))}"
    line = f"{flags or case.get('flags', CHAIN)} {more} --speculative-draft-model-path {drafter}"
    return f"{case.get('env', '')} python -m sglang.launch_server --model-path {served} {line}"
