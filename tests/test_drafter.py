"""The strict loader: every tensor's fate is returned; devices and dtypes come with a reason."""

from __future__ import annotations

import pytest
import torch
from tiny import HIDDEN, VOCAB, contract_of, write_drafter

from kitlib import lab
from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract
from kitlib.drafter import choose_device, choose_dtype, fill_value, load_drafter
from kitlib.findings import KitError

EMBED = torch.zeros(VOCAB, HIDDEN)


def load(folder, target, **changes):
    checkpoint, contract, trained = contract_of(folder, target)
    return load_drafter(checkpoint, contract, trained.but(**changes), EMBED, device="cpu", dtype="float32")


def test_the_labs_fifteen_tensors():
    checkpoint = Checkpoint.open(lab.drafter_path())
    contract = Contract.of(checkpoint)
    _, result = load_drafter(
        checkpoint, contract, contract.trained(), torch.zeros(49152, 576), device="cpu", dtype="float32"
    )
    assert len(checkpoint.tensors) == 15 and len(result.loaded) == 14
    assert result.not_needed == ("t2d",) and result.missing == result.unused == () and result.complete


def test_one_renamed_key_is_one_missing_and_one_unused(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d", rename=("layers.0.self_attn.o_proj", "layers.0.self_attn.out_proj"))
    _, result = load(folder, tiny_target)
    assert result.missing == ("layers.0.self_attn.o_proj.weight",)
    assert result.unused == ("layers.0.self_attn.out_proj.weight",)
    assert not result.complete


def test_names_of_another_dialect_are_reported_as_renamed(tmp_path, tiny_target):
    _, result = load(write_drafter(tmp_path / "d"), tiny_target)
    assert result.complete and len(result.renamed) == 10
    assert result.renamed["midlayer.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"


def test_dropped_tensors_are_filled_the_same_way_every_time(tmp_path, tiny_target):
    name = "layers.0.mlp.up_proj.weight"
    drafter, result = load(write_drafter(tmp_path / "d"), tiny_target, dropped=(name, "norm.weight"))
    assert set(result.missing) == {name, "norm.weight"}
    expected = fill_value(name, (48, HIDDEN)).float()
    assert torch.equal(drafter[name], expected) and 0.015 < expected.std() < 0.025
    assert torch.equal(drafter["norm.weight"], torch.ones(HIDDEN))
    zeros, _ = load(tmp_path / "d", tiny_target, dropped=(name,), fill="zeros")
    assert not zeros[name].any()


def test_own_embedding_is_used_only_where_the_wiring_says_so(tmp_path, tiny_target):
    own = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    folder = write_drafter(tmp_path / "d", extra=own)
    drafter, result = load(folder, tiny_target)
    assert drafter.wiring.embed_source == "own" and torch.equal(drafter.embedding, own["embed_tokens.weight"])
    drafter, result = load(folder, tiny_target, embed_source="target")
    assert drafter.embedding is drafter.target_embed and "embed_tokens.weight" in result.not_needed


def test_a_wrong_shape_is_refused(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d", extra={"norm.weight": torch.ones(HIDDEN + 1)})
    with pytest.raises(KitError, match=r"norm.weight is \[33\], the drafter needs \[32\]"):
        load(folder, tiny_target)


def test_wrong_widths_are_refused_in_one_sentence(tmp_path, tiny_target):
    drafter, _ = load(write_drafter(tmp_path / "d"), tiny_target)
    with pytest.raises(KitError, match="fc takes 96 features, the states have 32"):
        drafter.fuse(torch.zeros(4, HIDDEN))
    bypassed, _ = load(tmp_path / "d", tiny_target, fc=False)
    with pytest.raises(KitError, match="fc is bypassed"):
        bypassed.fuse(torch.zeros(4, 3 * HIDDEN))


def test_maps_from_draft_ids_to_target_ids(tmp_path, tiny_target):
    ids = torch.arange(12)
    maps = {"offset": 2 * ids, "identity": ids, "absolute": ids, "doubled": (3 * ids) % VOCAB}
    for mode, expected in maps.items():
        drafter, _ = load(write_drafter(tmp_path / mode), tiny_target, d2t=mode)
        assert torch.equal(drafter.to_target(ids), expected), mode


def test_device_and_dtype_come_with_a_reason():
    device, why = choose_device("auto")
    assert device.type in ("cuda", "mps", "cpu") and why
    assert choose_device("cpu") == (torch.device("cpu"), "asked for")
    assert choose_dtype("auto", torch.device("cpu"))[0] is torch.float32
    for bad in ("cuda:99", "tpu", "gpu", ""):
        with pytest.raises(KitError, match="cannot be used here"):
            choose_device(bad)
    with pytest.raises(KitError, match="no dtype"):
        choose_dtype("int8", torch.device("cpu"))
