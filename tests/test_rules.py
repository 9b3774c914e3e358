"""Engine knowledge: the data's schema, its windows, and what the rules make of a drafter in each release."""

from __future__ import annotations

import json
import re

import pytest
import torch
from packaging.specifiers import SpecifierSet
from tiny import HIDDEN, contract_of, write_drafter

from kitlib.contract import TargetInfo
from kitlib.engines import Engine, accept_rate, data, layers, served
from kitlib.findings import KitError

SGLANG = Engine.load("sglang")
ONE_ROW = ("loader", "config", "fc", "capture", "d2t", "head", "later_norm", "rate", "unloaded")  # one row a release
ONE_ROW += ("rope", "context", "quantization")
CONDITION = re.compile(r"absent|present|on|[<>]-?[0-9.]+|[=!][\w|]+")
FACTS = {"chain-length", "wasted-steps", "tree-too-small", "non-default-ids"}


@pytest.mark.parametrize("table", [t for t, rows in SGLANG.data.items() if isinstance(rows, list)])
def test_every_entry_has_a_window_and_a_source(table):
    for row in SGLANG.data[table]:
        assert isinstance(row["source"], str) and row["source"].strip()
        SpecifierSet(row["window"])
    if table in ONE_ROW:
        for release in SGLANG.releases:
            assert len(SGLANG.entries(table, release)) == 1, f"{table} has not one row for {release}"


def test_hooks_name_each_class_once_a_release():
    for row in SGLANG.data["hook"]:
        assert row["has"] in (True, False) and row["classes"]
    for release in SGLANG.releases:
        named = [c for r in SGLANG.entries("hook", release) for c in r["classes"]]
        assert len(named) == len(set(named)) and "LlamaForCausalLM" in named


def test_hazards_ask_only_for_what_the_checks_can_answer():
    for row in SGLANG.data["hazard"]:
        assert row["code"] in ("K134", "K135", "K136") and row["says"] and not row["says"].endswith(".")
        assert row.keys() & {"flags", "env", "facts", "classes"}, "it would hold for everything"
        for wanted in (*row.get("flags", {}).values(), *row.get("env", {}).values()):
            assert CONDITION.fullmatch(wanted), wanted
        assert set(row.get("facts", ())) <= FACTS


def test_id_rules_are_known_and_do_not_overlap():
    for release in SGLANG.releases:
        for table in ("id_rule", "last_boundary"):
            named = [c for r in SGLANG.entries(table, release) for c in r["classes"]]
            assert len(named) == len(set(named))
    assert {r["rule"] for r in SGLANG.data["id_rule"]} <= {"first-is-1", "below-depth", "defaults-too"}


@pytest.mark.parametrize("release", SGLANG.releases)
def test_algorithms_and_formulas_are_known(release):
    for name in ("EAGLE", "EAGLE3"):
        assert len(SGLANG.entries("algorithm", release, name=name)) == 1
    assert SGLANG.entry("rate", release)["formula"] in data.RATES


def test_specifiers():
    assert SGLANG.resolve("sglang==0.5.9") == ("0.5.9",) == SGLANG.resolve("0.5.9")
    assert SGLANG.resolve("sglang>=0.5.6,<=0.5.9") == ("0.5.6", "0.5.7", "0.5.8", "0.5.9")
    assert SGLANG.resolve("all") == SGLANG.releases and len(SGLANG.releases) == 29
    assert SGLANG.resolve("") == (SGLANG.default,)
    for bad in ("sglang=0.5", "vllm==1", "sglang>=9", "sglang==x.y"):
        with pytest.raises(KitError):
            SGLANG.resolve(bad)


def test_releases_that_were_not_read_borrow_and_say_so():
    assert SGLANG.known("0.5.9") == ("0.5.9", "")
    assert SGLANG.known("0.5.0")[0] == "0.4.10" and "not read" in SGLANG.known("0.5.0")[1]
    assert SGLANG.known("0.9.0")[0] == "0.5.23" and "newer" in SGLANG.known("0.9.0")[1]
    with pytest.raises(KitError, match="older"):
        SGLANG.known("0.3.0")


def test_a_new_release_is_a_data_change(tmp_path, monkeypatch, tiny_target):
    """A fictitious 0.6.0 that renames the layer is one row; no code changes."""
    known = {**SGLANG.data, "engine": {**SGLANG.data["engine"], "read": [*SGLANG.releases, "0.6.0"]}}
    old = [{**r, "window": r["window"] + ",<0.6"} if r["window"] == ">=0.5.12" else r for r in known["loader"]]
    row = {**known["loader"][-1], "window": ">=0.6", "block": "decoder", "rename": [], "source": "fictitious"}
    monkeypatch.setattr(data, "_load", lambda name: Engine(name, {**known, "loader": [*old, row]}))
    checkpoint, contract, _ = contract_of(write_drafter(tmp_path / "d"), tiny_target)
    info = TargetInfo.of(tiny_target)
    assert len(served(checkpoint, contract, "0.6.0", target=info).of("dropped")) == 10
    assert not served(checkpoint, contract, "0.5.23", target=info).of("dropped")


@pytest.mark.parametrize(
    ("rename", "release", "dropped", "refused"),
    [
        (("layers.0.", "midlayer."), "0.4.6", 0, 0),
        (("layers.0.", "midlayer."), "0.5.9", 0, 0),
        (("layers.0.", "midlayer."), "0.5.20", 0, 0),
        (("", ""), "0.4.6", 5, 5),  # q, k, v, gate, up raise KeyError; o, down and three norms are warned about
        (("", ""), "0.4.9", 10, 0),
        (("", ""), "0.5.9", 10, 0),
        (("", ""), "0.5.11", 10, 0),
        (("", ""), "0.5.12", 0, 0),
        (("", ""), "0.5.23", 0, 0),
        (("layers.0.", "draft_model.midlayer."), "0.5.20", 10, 0),
        (("layers.0.", "model.layers.0."), "0.5.20", 0, 0),
    ],
)
def test_fate_of_the_layer_by_name_and_release(tmp_path, tiny_target, rename, release, dropped, refused):
    checkpoint, contract, trained = contract_of(write_drafter(tmp_path / "d", rename=rename), tiny_target)
    state = served(checkpoint, contract, release, target=TargetInfo.of(tiny_target))
    assert (len(state.of("dropped")), len(state.of("refused"))) == (dropped, refused)
    bias = ("fc.bias",) if release == "0.4.6" else ()  # built with one; a random draw where the file has none
    layer = tuple(n for n in state.missing if n not in bias)
    assert len(layer) == dropped + refused and state.wiring.dropped == state.missing
    assert set(bias) <= set(state.missing) and bool(state.refused) == bool(refused)
    if not dropped:
        assert trained.diff(state.wiring.but(dropped=layer)) == {}


ONES = torch.ones(HIDDEN)


@pytest.mark.parametrize(
    ("changes", "name", "fate", "missing"),
    [
        ({"extra": {"fc.bias": ONES}}, "fc.bias", "dropped", ()),
        ({"extra": {"fc.bias": ONES}, "bias": True}, "fc.bias", "loaded", ("layers.0.self_attn.o_proj.bias",)),
        ({"extra": {"fc_norm.0.weight": ONES}}, "fc_norm.0.weight", "dropped", ()),
        ({"fc_norm": True}, "fc_norm.0.weight", "loaded", ()),
        ({"tie_word_embeddings": True}, "lm_head.weight", "dropped", ()),
        ({"layers": 2}, "layers.1.input_layernorm.weight", "loaded", ("layers.1.hidden_norm.weight",)),
        ({"layers": 2, "num_hidden_layers": 1}, "layers.1.mlp.up_proj.weight", "dropped", ()),
    ],
)
def test_what_the_releases_themselves_did(tmp_path, tiny_target, changes, name, fate, missing):
    """Cells of data/verified/probe-grid.md for 0.5.20, where the rules were once wrong."""
    checkpoint, contract, _ = contract_of(write_drafter(tmp_path / "d", **changes), tiny_target)
    state = served(checkpoint, contract, "0.5.20", target=TargetInfo.of(tiny_target))
    assert {f.name: f.status for f in state.fates}[name] == fate
    assert state.missing == missing and not state.refused


def test_algorithm_eagle_bypasses_fc_borrows_the_head_and_ignores_d2t(tmp_path, tiny_target):
    checkpoint, contract, trained = contract_of(write_drafter(tmp_path / "d"), tiny_target)
    state = served(checkpoint, contract, "0.5.20", target=TargetInfo.of(tiny_target), algorithm="EAGLE")
    assert state.capture_off == "algorithm"
    assert set(trained.diff(state.wiring)) == {"capture", "fc", "head_source", "d2t", "logit_cut"}
    old = served(checkpoint, contract, "0.4.6", target=TargetInfo.of(tiny_target), algorithm="EAGLE")
    assert not old.wiring.logit_cut
    with pytest.raises(KitError, match="no rules"):
        served(checkpoint, contract, "0.5.20", target=TargetInfo.of(tiny_target), algorithm="MEDUSA")


def test_capture_switched_off_keeps_head_and_d2t(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d", eagle_config={"use_aux_hidden_state": False})
    checkpoint, contract, _ = contract_of(folder, tiny_target)
    state = served(checkpoint, contract, "0.5.20", target=TargetInfo.of(tiny_target))
    assert state.capture_off == "config" and not state.wiring.fc
    assert (state.wiring.head_source, state.wiring.d2t) == ("own", "offset")
    assert not served(checkpoint, contract, "0.5.6", target=TargetInfo.of(tiny_target)).capture_off  # not read yet


def test_explicit_ids_are_shifted_where_they_are_read(tmp_path, tiny_target):
    folder = write_drafter(tmp_path / "d", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    checkpoint, contract, trained = contract_of(folder, tiny_target)
    info = TargetInfo.of(tiny_target)
    assert trained.boundaries == served(checkpoint, contract, "0.5.20", target=info).wiring.boundaries == (1, 3, 5)
    assert served(checkpoint, contract, "0.4.6", target=info).wiring.boundaries == (2, 4, 5)  # defaults only


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.5.3", None),
        ("0.5.4", 0.2),
        ("0.5.5", 0.2),
        ("0.5.6", 0.2),
        ("0.5.9", 0.2),
        ("0.5.10", 0.2),
        ("0.5.11", 0.0),
        ("0.5.20", 0.0),
    ],
)
def test_zero_acceptance_at_five_draft_tokens_prints_what_the_story_saw(release, expected):
    rate, formula = accept_rate(release, a=0, v=40, draft_tokens=5, steps=4)
    assert rate == expected and (formula == "none") == (expected is None)


def test_full_acceptance_prints_one_in_every_formula():
    for release in ("0.5.4", "0.5.9", "0.5.11"):
        assert accept_rate(release, a=160, v=40, draft_tokens=5, steps=4)[0] == 1.0


def test_latent_attention_is_known_by_its_names(tmp_path, tiny_target):
    """Kimi-K2's MLA drafters: a class of their own since 0.5.12; checked, and refused by the replay in one sentence."""
    from kitlib.drafter import load_drafter

    p, plain = "layers.0.self_attn.", [f"layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    shapes = {"q_a_proj": (16, 2 * HIDDEN), "q_a_layernorm": (16,), "q_b_proj": (48, 16), "kv_a_layernorm": (16,)}
    shapes |= {"kv_a_proj_with_mqa": (24, 2 * HIDDEN), "kv_b_proj": (64, 16)}
    extra = {f"{p}{n}.weight": torch.ones(s) for n, s in shapes.items()}
    arch = {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    checkpoint, contract, trained = contract_of(
        write_drafter(tmp_path / "d", drop=plain, extra=extra, **arch), tiny_target
    )
    info = TargetInfo.of(tiny_target)
    for release in ("0.5.12", "0.5.23"):
        state = served(checkpoint, contract, release, target=info)
        assert not state.refused and not state.missing and not state.of("dropped")
    assert "not registered" in served(checkpoint, contract, "0.5.11", target=info).refused
    del extra[f"{p}kv_b_proj.weight"]
    broken, half, _ = contract_of(write_drafter(tmp_path / "b", drop=plain, extra=extra, **arch), tiny_target)
    assert served(broken, half, "0.5.20", target=info).missing == (f"{p}kv_b_proj.weight",)
    with pytest.raises(KitError, match="not replayed"):
        load_drafter(checkpoint, contract, trained, torch.zeros(24, HIDDEN))


# Layer ids, both ways -----------------------------------------------------------------------------------------------

NAMED = sorted({c for t in ("id_rule", "last_boundary") for r in SGLANG.data[t] for c in r["classes"]})


def depth(architecture: str, layers: int = 36) -> TargetInfo:
    return TargetInfo(architecture, HIDDEN, 24, layers, False, None, {})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", *NAMED])
def test_ids_that_are_written_are_captured_as_meant(architecture):
    """In every release that reads ids, for classes with a rule of their own and one without; or none can be written."""
    info, impossible = depth(architecture), set()
    for release in (r for r in SGLANG.releases if layers.reads_ids(SGLANG, r)):
        last = layers.last_boundary(SGLANG, release, info)
        for boundaries in ((2, 18, 33), (3, 18, 33), (1, 5, 9), (2, 18, last), (0, 1, 2), (7, 20, 31, 34)):
            found = layers.ids_for(boundaries, SGLANG, release, info)
            if found is None:
                impossible.add((release, boundaries))
            else:
                assert layers.captured(found[0], SGLANG, release, info) == boundaries
                assert found[0] == [b - found[1] for b in boundaries]
    old = {r for r in SGLANG.releases if not SGLANG.entries("id_rule", r)}
    assert {b for r, b in impossible if r in old} == {(0, 1, 2)}  # id -1 is none
    as_they_are = "first-is-1" in {
        r["rule"] for r in SGLANG.entries("id_rule", "0.5.23") if architecture in r["classes"]
    }
    assert ((1, 5, 9) in {b for _, b in impossible}) == as_they_are


def test_states_are_captured_in_ascending_order_and_once():
    assert layers.captured([17, 2, 33], SGLANG, "0.5.20", depth("LlamaForCausalLM")) == (3, 18, 34)
    assert layers.captured([2, 2, 33], SGLANG, "0.5.20", depth("LlamaForCausalLM")) == (3, 34)
    assert layers.captured(None, SGLANG, "0.5.20", None) is None


def test_how_far_targets_reach():
    assert layers.last_boundary(SGLANG, "0.5.16", depth("GptOssForCausalLM")) == 35
    assert layers.last_boundary(SGLANG, "0.5.17", depth("GptOssForCausalLM")) == 36
    assert layers.last_boundary(Engine.load("vllm"), "0.20.0", depth("AnyForCausalLM")) == 36


# What makes a release refuse a drafter, and which finding tells it ---------------------------------------------------

REFUSED = [
    ("sglang", "0.5.9", {"architectures": ["LlamaForCausalLM"]}, "K120", "not registered"),
    ("sglang", "0.5.9", {"num_hidden_layers": 2}, "K120", "builds exactly one"),
    ("sglang", "0.5.9", {"num_attention_heads": None}, "K120", "num_attention_heads is 'None' in config.json"),
    ("sglang", "0.5.9", {"intermediate_size": "48"}, "K120", "where a number is needed"),
    ("sglang", "0.5.9", {"draft_vocab_size": ...}, "K120", "has no draft_vocab_size"),
    ("sglang", "0.5.1", {"draft_vocab_size": None}, "K120", "says null for draft_vocab_size"),
    ("sglang", "0.5.2", {"draft_vocab_size": None}, "K106", "lm_head.weight has 12 rows"),
    ("sglang", "0.5.2", {"draft_vocab_size": None, "drop": ["lm_head.weight"]}, "", ""),  # the target's head
    ("sglang", "0.4.8", {"drop": ["d2t"]}, "K110", "no d2t"),
    ("sglang", "0.4.8", {"rename": ("", "")}, "K102", "raises KeyError"),
    ("sglang", "0.5.11", {"extra": {"fc.weight": torch.ones(HIDDEN, 4 * HIDDEN)}}, "K106", "takes 4 states"),
    ("sglang", "0.5.12", {"extra": {"fc.weight": torch.ones(HIDDEN, 4 * HIDDEN)}}, "K106", "builds fc for 3"),
    (
        "sglang",
        "0.5.12",
        {"extra": {"fc.weight": torch.ones(HIDDEN, 4 * HIDDEN)}, "num_aux_hidden_states": 4},
        "",
        "",
    ),
    ("vllm", "0.20.0", {"draft_vocab_size": ...}, "K106", "builds 24"),
    ("vllm", "0.20.0", {"rename": ("layers.0.", "model.layers.0.")}, "K102", "raises KeyError"),
    ("vllm", "0.31.0", {"rename": ("layers.0.", "model.layers.0.")}, "K102", "raises ValueError"),
    ("vllm", "0.10.0", {}, "K120", "not registered"),
    ("vllm", "0.16.0", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "K120", "not registered"),
    ("vllm", "0.20.0", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "", ""),
]


@pytest.mark.parametrize(("engine", "release", "changes", "code", "why"), REFUSED)
def test_why_a_release_refuses(tmp_path, tiny_target, engine, release, changes, code, why):
    checkpoint, contract, _ = contract_of(write_drafter(tmp_path / "d", **changes), tiny_target)
    state = served(checkpoint, contract, release, target=TargetInfo.of(tiny_target), engine=engine)
    assert state.refused_as == code and why in state.refused and bool(state.refused) == bool(code)


def test_method_eagle_is_refused_by_vllm_as_an_algorithm(tmp_path, tiny_target):
    checkpoint, contract, _ = contract_of(write_drafter(tmp_path / "d"), tiny_target)
    state = served(checkpoint, contract, "0.20.0", target=TargetInfo.of(tiny_target), algorithm="EAGLE", engine="vllm")
    assert state.refused_as == "K130" and "prefix Eagle" in state.refused


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_a_layer_that_the_config_asks_for_and_the_file_lacks(tmp_path, tiny_target, form):
    folder = write_drafter(tmp_path / "d", rename=("", ""), num_hidden_layers=2)
    if form == "nested":
        flat = json.loads((folder / "config.json").read_text())
        whole = {"speculators_model_type": "eagle3", "transformer_layer_config": flat}
        (folder / "config.json").write_text(json.dumps(whole | {"draft_vocab_size": flat.pop("draft_vocab_size")}))
    checkpoint, contract, _ = contract_of(folder, tiny_target)
    for release in ("0.11.0", "0.33.0"):
        state = served(checkpoint, contract, release, target=TargetInfo.of(tiny_target), engine="vllm")
        assert not state.refused and {n[:9] for n in state.missing} == {"layers.1."} and len(state.missing) == 9


def test_vllm_s_tables_have_one_row_a_release():
    vllm = Engine.load("vllm")
    for table in (t for t in ONE_ROW if t != "unloaded"):
        for release in vllm.releases:
            assert len(vllm.entries(table, release)) == 1, f"{table} has not one row for {release}"
