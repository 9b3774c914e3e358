"""The lab for real: SmolLM2-135M-Instruct, the committed drafter, 32 held-out prompts × 64 tokens, fp32, 4 steps."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from kitlib import lab
from kitlib.acceptance import replay, speculate
from kitlib.checkpoint import Checkpoint
from kitlib.checks import check
from kitlib.comparison import feature_findings, layer_findings
from kitlib.contract import Contract, Wiring
from kitlib.diagnose import Session, judge, measure
from kitlib.findings import KitError
from kitlib.lab.faults import FAULTS, plant
from kitlib.launch import parse

CLIFFS = {name: fault for name, fault in FAULTS.items() if fault.ceiling}
SERVED = (  # a checkpoint that says of itself what it was trained with, and is served as something else
    "layers0-flat", "wrong-prefix", "fc-bypass-eagle", "tied-head", "rope-theta", "d2t-absolute",
    "ids-plus-one", "ids-minus-one",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(lab_session):
    """Every fault's own wiring, measured once."""
    wirings = {name: fault.wiring(lab_session.trained) for name, fault in FAULTS.items()}
    lab_session.states(wirings.values())
    return {name: lab_session.measure(w) for name, w in wirings.items()}


@pytest.fixture(scope="module")
def controls(lab_session):
    return lab_session.controls()


def test_the_healthy_drafter_is_really_trained(measured):
    healthy = measured["healthy"]
    assert healthy.accept_length >= 1.6 and len(healthy.rounds) == 32
    assert healthy.interval()[0] > 1.5


def test_the_controls_are_at_the_floor(controls, measured):
    assert controls["random drafter"].accept_length <= 1.02
    assert controls["features zeroed"].accept_length <= 1.15
    for control in controls.values():
        assert measured["healthy"].minus(control)[0] > 0.3


@pytest.mark.parametrize("name", CLIFFS)
def test_each_cliff_stays_below_its_ceiling_and_apart_from_healthy(measured, name):
    assert measured[name].accept_length <= CLIFFS[name].ceiling
    assert measured[name].interval()[1] < measured["healthy"].interval()[0]


def test_faults_that_are_no_cliff_are_still_told_apart_by_paired_intervals(measured):
    healthy = measured["healthy"]
    for name in ("ids-plus-one", "feedback-post-norm"):
        assert healthy.minus(measured[name])[0] > 0, name
    assert measured["feedback-post-norm"].conditional[0] == pytest.approx(healthy.conditional[0], abs=0.04)


def test_verdicts(lab_session, measured, controls):
    def codes(name):
        return {f.code: (f.status, f.severity) for f in judge(measured[name], controls)}

    assert codes("healthy") == {"M201": ("pass", "info"), "M202": ("pass", "info")}
    for name in CLIFFS:
        assert codes(name)["M201"] == ("fail", "error"), name
    assert codes("feedback-post-norm") == {"M201": ("pass", "info"), "M202": ("fail", "error")}


def test_greedy_text_is_untouched_and_replay_equals_the_loop_on_sixteen_prompts(lab_session):
    drafter, _ = lab_session.load()
    texts = lab_session.texts[:16]
    rounds = replay(drafter, lab_session.states()[:16], 4).rounds
    for text, replayed in zip(texts, rounds, strict=True):
        out, loop = speculate(lab_session.target, drafter, text.ids[: text.prompt], 64, 4)
        assert out == text.answer  # transformers' own greedy text
        assert loop == replayed


@pytest.mark.parametrize("name", ["layer-dropped", "fc-bypass-config", "fc-bypass-eagle", "d2t-absent"])
def test_replay_equals_the_loop_for_faults(lab_session, name):
    wiring = FAULTS[name].wiring(lab_session.trained)
    drafter, _ = lab_session.load(wiring)
    states, text = lab_session.states([wiring])[0], lab_session.texts[0]
    out, loop = speculate(lab_session.target, drafter, text.ids[: text.prompt], 32, 4)
    assert out == text.answer[:32]
    assert loop == replay(drafter, [states], 4).rounds[0][: len(loop)]


@pytest.mark.parametrize("name", FAULTS)
def test_each_plant_is_what_its_wiring_says(lab_session, lab_target, measured, tmp_path, name):
    """The planted files, measured as they are (or as SGLang 0.5.9 serves them), give the wiring's own rounds."""
    fault = FAULTS[name]
    folder = plant(name, tmp_path / name)
    launch = parse((folder / "launch.txt").read_text()) if fault.launch else None
    found = {f.slug for f in check(folder, target=lab_target, engines=("0.5.9",), launch=launch).errors}
    assert found >= ({fault.found_by} - {""}) and (fault.found_by or not found)
    session = Session(Checkpoint.open(folder), None, lab_session.target, lab_session.texts[:6], 4)
    session.contract = Contract.of(session.checkpoint, lab_session.target.info)
    session._states, session._held = lab_session._states[:6], lab_session._held
    if fault.plants == "wiring":
        wiring = Wiring.from_dict(json.loads((folder / "wiring.json").read_text()))
    elif name in SERVED:
        from kitlib.engines import served

        algorithm = launch.algorithm if launch else "EAGLE3"
        state = served(
            session.checkpoint, session.contract, "0.5.9", target=lab_session.target.info, algorithm=algorithm
        )
        wiring = state.wiring
    else:
        wiring = session.trained
    assert session.measure(wiring).rounds == measured[name].rounds[:6]


def test_planting_refuses_to_overwrite_and_leaves_the_source_alone(tmp_path):
    before = lab.sha256(lab.drafter_path() / "model.safetensors")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(KitError, match="not empty"):
        plant("fc-dropped", tmp_path / "mine")
    with pytest.raises(KitError, match="no fault 'nothing'"):
        plant("nothing", tmp_path / "x")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert lab.sha256(lab.drafter_path() / "model.safetensors") == before == lab.DRAFTER_SHA256


def test_the_committed_files_are_what_they_say(lab_target):
    config = json.loads((lab.DRAFTER / "config.json").read_text())
    assert config["norm_before_residual"] is False and config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    checkpoint = Checkpoint.open(lab.DRAFTER)
    assert checkpoint.dialect == "layers.0" and "embed_tokens.weight" not in checkpoint.tensors
    assert (lab.DRAFTER / "model.safetensors").stat().st_size <= 24e6
    assert all(t.dtype == "BF16" for n, t in checkpoint.tensors.items() if n not in ("d2t", "t2d"))
    with gzip.open(lab.DATA / "lab-train.jsonl.gz", "rt") as lines:
        assert sum(1 for _ in lines) >= 3968
    assert (lab.DATA / "lab-train.jsonl.gz").stat().st_size <= 4e6


def test_the_second_drafter_is_another_one_and_fails_alike_under_eagle(lab_session, controls):
    second = Session(Checkpoint.open(lab.second_drafter_path()), None, lab_session.target, lab_session.texts[:12], 4)
    second.contract = Contract.of(second.checkpoint, lab_session.target.info)
    second._states, second._held = lab_session._states[:12], lab_session._held
    assert second.contract.dialect.name == "specforge" and second.checkpoint.dialect == "midlayer"
    assert second.trained == lab_session.trained
    right, eagle = second.measure(), second.measure(FAULTS["fc-bypass-eagle"].wiring(second.trained))
    assert right.accept_length > 1.15 > 1.10 > eagle.accept_length
    assert right.interval()[0] > controls["features zeroed"].interval()[1]


def test_a_missing_tensor_is_never_called_healthy(lab_session, tmp_path):
    folder = plant("healthy", tmp_path / "d")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.hidden_norm_.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    contract = Contract.of(checkpoint, lab_session.target.info)
    report = measure(Session(checkpoint, contract, lab_session.target, lab_session.texts[:4], 4))
    by_code = {f.code: f for f in report.findings}
    assert by_code["K103"].is_error and by_code["K103"].evidence[0].values["names"] == ["layers.0.hidden_norm.weight"]
    assert by_code["K104"].evidence[0].values["names"] == ["midlayer.hidden_norm_.weight"]
    assert report.exit_code == 1 and report.verdict().startswith("✗")


def test_features_and_layers_find_the_bypass_and_trust_the_trained_boundaries(lab_session):
    from kitlib.comparison import compare_wirings

    trained = lab_session.trained
    single = FAULTS["fc-bypass-config"].wiring(trained)
    rows = compare_wirings(lab_session, {"as trained": trained, "one layer": single})
    assert [(r["width that arrives"], r["fc runs"]) for r in rows] == [(1728, True), (576, False)]
    assert rows[0]["cosine"] == pytest.approx(1, abs=1e-5) and rows[1]["cosine"] < 0.5
    assert rows[0]["top-1 agreement"] > 3 * rows[1]["top-1 agreement"]
    assert [f.code for f in feature_findings(rows, "one layer") if f.is_error] == ["K133"]
    assert not [f for f in feature_findings(rows, "as trained") if f.status != "pass"]
    assert layer_findings(lab_session.shifted())[0].status == "pass"


def test_chat_template_gives_the_prompts_of_training(lab_session):
    first = lab_session.target.encode("How do submarines stay underwater?")
    text = lab_session.target.tokenizer.decode(first)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and lab_session.target.stop_ids == {2}
    assert torch.equal(torch.tensor(first), torch.tensor(lab_session.texts[0].ids[: lab_session.texts[0].prompt]))
