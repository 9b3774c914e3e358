"""Public failures, each built as a tiny pair, and healthy pairs of every dialect: found, and nothing else said."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import HIDDEN, LAYERS, VOCAB, write_drafter

from kitlib.checks import check
from kitlib.findings import catalogue
from kitlib.launch import parse

CORPUS = tomllib.loads((Path(__file__).parent / "corpus" / "cases.toml").read_text())
SGLANG = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1"
SGLANG += " --speculative-num-draft-tokens 4"
VLLM = '{"method": "eagle3", "num_speculative_tokens": 3}'


def build(folder: Path, case: dict) -> tuple[Path, Path]:
    """(drafter, target) of a case."""
    wanted = dict(case.get("drafter", {}))
    nested, full = wanted.pop("nested", False), wanted.pop("full_vocabulary", False)
    own, random = wanted.pop("own_embedding", False), wanted.pop("random_embedding", False)
    generator, extra, drop = torch.Generator().manual_seed(3), {}, wanted.pop("drop", [])
    # as trained embeddings are: rows of very different length
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator) * torch.linspace(0.2, 3, VOCAB)[:, None]
    if own:  # "frozen": the target's; "tuned": trained further
        noise = 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator)
        extra["embed_tokens.weight"] = embedding + (noise if own == "tuned" else 0)
    if random:
        extra["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02
    if full:
        extra["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
        wanted["draft_vocab_size"], drop = VOCAB, [*drop, "d2t", "t2d"]
    rename = ("", "") if nested else tuple(wanted.pop("rename", ("layers.0.", "midlayer.")))
    drafter = write_drafter(folder / "drafter", extra=extra, drop=drop, rename=rename, **wanted)
    if nested:
        nest(drafter)
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    values |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 512, **case.get("target", {})}
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values))
    save_file({"model.embed_tokens.weight": embedding}, target / "model.safetensors")
    return drafter, target


def nest(drafter: Path) -> None:
    """A flat config in speculators' form."""
    flat = json.loads((drafter / "config.json").read_text())
    outer = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
    outer += ("eagle_aux_hidden_state_layer_ids",)
    whole = {k: flat.pop(k) for k in outer if k in flat} | {"architectures": ["Eagle3Speculator"]}
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    whole |= {"speculators_model_type": "eagle3", "speculators_version": "0.7.0", "transformer_layer_config": flat}
    whole |= {"speculators_config": {"algorithm": "eagle3", "verifier": verifier}}
    (drafter / "config.json").write_text(json.dumps(whole))


def command(case: dict, drafter: Path) -> str:
    more = case.get("extra_flags", "")
    if case["engine"].startswith("vllm"):
        config = json.loads(case.get("flags", VLLM)) | {"model": str(drafter)}
        return f"vllm serve org/target {more} --speculative-config {shlex.quote(json.dumps(config))}"
    flags = f"{case.get('flags', SGLANG)} {more} --speculative-draft-model-path {drafter}"
    return f"{case.get('env', '')} python -m sglang.launch_server --model-path org/target {flags}"


def findings(tmp_path: Path, case: dict):
    drafter, target = build(tmp_path, case)
    return check(drafter, target=target, engines=(case["engine"],), launch=parse(command(case, drafter))).findings


@pytest.mark.parametrize("case", CORPUS["case"], ids=lambda c: c["id"])
def test_a_public_failure_is_found(tmp_path, case):
    assert case["slug"] in {e["slug"] for e in catalogue().values()}
    found = findings(tmp_path, case)
    failed = {f.slug for f in found if f.status == "fail" and f.severity in ("error", "warning")}
    assert case["slug"] in failed, sorted(failed)
    assert not [f for f in found if f.status == "crashed"]


@pytest.mark.parametrize("case", CORPUS["healthy"], ids=lambda c: c["id"])
def test_a_healthy_pair_raises_no_alarm(tmp_path, case):
    found = findings(tmp_path, case)
    alarms = [f for f in found if f.status in ("fail", "crashed") and f.severity in ("error", "warning")]
    assert not alarms, [f"{f.code} {f.title}" for f in alarms]


def test_the_corpus_is_large_enough_and_names_each_case_once():
    ids = [c["id"] for c in CORPUS["case"]]
    assert len(CORPUS["healthy"]) >= 12 and len(ids) == len(set(ids)) >= 25
    assert not set(ids) & set(CORPUS["excluded"])
