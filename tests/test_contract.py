"""The contract: fields from any dialect with their provenance; shapes win over the config; wirings compare."""

from __future__ import annotations

import json

import pytest
from tiny import HIDDEN, LAYERS, contract_of, write_drafter

from kitlib.checkpoint import Checkpoint
from kitlib.contract import Contract, Rope, TargetInfo, Wiring, default_boundaries
from kitlib.contract.dialects import doubts
from kitlib.findings import KitError


def edit(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def test_specforge_ids_are_layer_outputs(tmp_path, tiny_target):
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    _, contract, trained = contract_of(write_drafter(tmp_path / "d", eagle_config=eagle), tiny_target)
    assert contract.dialect.name == "specforge" and trained.boundaries == (2, 4, 5)
    assert "eagle_config" in contract.sources["boundaries"] and contract.sources["hidden"] == "shape: fc.weight"
    assert trained.residual == "hidden" and trained.head_source == "own" and trained.embed_source == "target"


def test_without_ids_the_default_needs_the_depth(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d")
    assert Contract.of(Checkpoint.open(folder)).boundaries is None
    with pytest.raises(KitError, match="--target"):
        Contract.of(Checkpoint.open(folder)).trained()
    _, contract, trained = contract_of(folder, tiny_target)
    assert trained.boundaries == default_boundaries(LAYERS) == (2, 4, 5)
    assert contract.sources["boundaries"] == "default for 8 layers"


def nested(version, **top):
    inner = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24}
    return {
        "speculators_version": version, "draft_vocab_size": 12, "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": {**inner, "num_hidden_layers": 1, "rope_parameters": {"rope_theta": 5e5}}, **top,
    }  # fmt: skip


def test_speculators_reads_nested_fields_and_its_own_default(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d", rename=("", ""))
    (folder / "config.json").write_text(json.dumps(nested("0.5.0", eagle_aux_hidden_state_layer_ids=[2, 4, 5])))
    _, contract, trained = contract_of(folder, tiny_target)
    assert contract.dialect.name == "speculators" and trained.boundaries == (2, 4, 5)  # boundaries as they are
    assert trained.residual == "normed" and "default" in contract.sources["norm_before_residual"]
    assert trained.rope.theta == 5e5 and "rope_parameters" in contract.sources["rope"]
    (folder / "config.json").write_text(json.dumps(nested("0.5.0", norm_before_residual=False)))
    assert contract_of(folder, tiny_target)[2].residual == "hidden"


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_speculators_of_the_story_stores_no_boundaries(tmp_path, tiny_target, version):
    folder = write_drafter(tmp_path / "d", rename=("", ""))
    (folder / "config.json").write_text(json.dumps(nested(version)))
    contract = Contract.of(Checkpoint.open(folder), TargetInfo.of(tiny_target))
    assert contract.boundaries is None and version in contract.sources["boundaries"]


def test_shapes_win_and_contradictions_are_kept(tmp_path, tiny_target):
    folder = edit(write_drafter(tmp_path / "d"), hidden_size=64, draft_vocab_size=11, num_key_value_heads=4)
    _, contract, _ = contract_of(folder, tiny_target)
    assert (contract.hidden, contract.draft_vocab, contract.kv_heads) == (HIDDEN, 12, 2)
    assert len(contract.contradictions) >= 3 and all("says" in c for c in contract.contradictions[:3])


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": None}, {"hidden_size": "64"}, {"draft_vocab_size": None}, {"draft_vocab_size": -1},
        {"rms_norm_eps": "x"}, {"rope_theta": "fast"}, {"rope_scaling": 3}, {"rope_parameters": []},
        {"eagle_config": []}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2"}}, {"architectures": 4},
        {"architectures": {}}, {"num_attention_heads": 0}, {"vocab_size": []}, {"rms_norm_eps": None},
    ],
)  # fmt: skip
def test_odd_values_never_raise_anything_but_a_sentence(tmp_path, tiny_target, values):
    folder = edit(write_drafter(tmp_path / "d"), **values)
    try:
        contract = Contract.of(Checkpoint.open(folder), TargetInfo.of(tiny_target))
    except KitError as error:
        assert str(error).strip()
    else:
        assert contract.hidden == HIDDEN


def test_no_drafter_at_all_is_one_sentence(tiny_target):
    with pytest.raises(KitError, match="no EAGLE-3 drafter"):
        Contract.of(Checkpoint.open(tiny_target))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "x", "vocab_size": 1, "num_hidden_layers": 2}'])
def test_a_broken_target_config_is_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(KitError, match="config"):
        TargetInfo.of(tmp_path)
    with pytest.raises(KitError, match="Cannot read"):
        TargetInfo.of(tmp_path / "absent")


def test_multimodal_targets_are_read_through_their_text_part(tmp_path):
    text = {"hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 61, "max_position_embeddings": 262144}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    info = TargetInfo.of(tmp_path)
    assert (info.hidden, info.layers, info.architecture) == (7168, 61, "KimiK25ForConditionalGeneration")
    assert default_boundaries(info.layers) == (2, 30, 58)


def test_wirings_differ_by_name_and_survive_json():
    one = Wiring((2, 15, 27), rope=Rope(1e5, "llama3", scaling=(("factor", 8.0), ("low_freq_factor", 1.0))))
    two = one.but(fc=False, capture="final")
    assert one.diff(two) == {"capture": ("boundaries", "final"), "fc": (True, False)} and one.diff(one) == {}
    assert Wiring.from_dict(json.loads(json.dumps(two.to_dict()))) == two


# Dialects beyond the first ones ---------------------------------------------------------------------------------------


def contract_config(folder):
    return Checkpoint.open(folder).config


def test_angelslim_is_known_by_its_config_and_stores_no_ids(tmp_path, tiny_target):
    """AngelSlim 0.5.0: Eagle3LlamaForCausalLM, target_model_type; it takes 1, N//2-1, N-4, which is the default."""
    folder = write_drafter(tmp_path / "d", architectures=["Eagle3LlamaForCausalLM"], target_model_type="qwen3")
    _, contract, trained = contract_of(folder, tiny_target)
    assert contract.dialect.name == "angelslim" and contract.ids is None
    assert trained.boundaries == default_boundaries(LAYERS) and trained.residual == "hidden"
    edit(folder, eagle_aux_hidden_state_layer_ids=[0, 3, 5])  # where somebody adds them, they are layer outputs
    assert contract_of(folder, tiny_target)[2].boundaries == (1, 4, 6)


@pytest.mark.parametrize("rename", [("layers.0.", "model.layers.0."), ("", "")])
def test_automodel_is_known_by_its_names_or_its_class(tmp_path, tiny_target, rename):
    """NeMo Automodel: model. before the layer, layer-output ids, EAGLE-3.1 with the engines' meaning of norm_output."""
    more = {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    folder = write_drafter(tmp_path / "d", rename=rename, architectures=["LlamaEagle3DraftModel"], **more)
    _, contract, trained = contract_of(folder, tiny_target)
    assert contract.dialect.name == "automodel" and trained.boundaries == (1, 4, 6)
    assert trained.fc_norm and trained.feedback == "post-norm" and not doubts(contract_config(folder), contract.dialect)


@pytest.mark.parametrize("said", [True, False])
def test_what_specforge_meant_by_norm_output_is_left_open(tmp_path, tiny_target, said):
    """SpecForge before its PR 879 fed back the un-normed state whatever the flag said; the file has no version."""
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    folder = write_drafter(tmp_path / "d", norm_output=said, **ids)
    _, contract, trained = contract_of(folder, tiny_target)
    assert contract.dialect.name == "specforge" and (trained.feedback == "post-norm") == said
    assert "879" in doubts(contract_config(folder), contract.dialect)["norm_output"]
    edit(folder, kitlib={"converted_from": "speculators"})  # then it was never SpecForge's
    assert doubts(contract_config(folder), contract.dialect) == {}
    plain = write_drafter(tmp_path / "plain", **ids)
    assert doubts(contract_config(plain), contract_of(plain, tiny_target)[1].dialect) == {}


@pytest.mark.parametrize(
    ("ids", "boundaries", "why"),
    [
        ([1, 3, 4], (2, 4, 5), "layer-output"),
        ([2, 4, 5], (2, 4, 5), "equal the common default"),
        ([4, 6, 8], (4, 6, 8), "no layer has the last number"),
        ([0, 3, 5], (1, 4, 6), "layer-output"),
    ],
)
def test_layer_output_ids_that_can_only_be_boundaries(tmp_path, tiny_target, ids, boundaries, why):
    folder = write_drafter(tmp_path / "d", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    _, contract, trained = contract_of(folder, tiny_target)
    assert trained.boundaries == boundaries and why in contract.sources["boundaries"]


@pytest.mark.parametrize("name", ["transformer_layer_config", "speculators_config", "eagle_config"])
def test_a_table_that_is_none_makes_the_config_unreadable(tmp_path, tiny_target, name):
    info = TargetInfo.of(tiny_target)
    for value, kind in ((["a"], "a list"), ("a", "a string"), (3, "a number"), (False, "a boolean")):
        folder = edit(write_drafter(tmp_path / f"{name}{kind}"), **{name: value})
        assert (
            Contract.of(Checkpoint.open(folder), info).malformed
            == f"{name} in config.json is {kind}, not a table of fields"
        )
    folder = edit(write_drafter(tmp_path / "fine"), **{name: {}})
    assert not Contract.of(Checkpoint.open(folder), info).malformed
