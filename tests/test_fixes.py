"""A fix that `check` prints is one that works; what is said of a release is what that release does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from tiny import HIDDEN, LAYERS, VOCAB, write_drafter

from kitlib.__main__ import main
from kitlib.checks import check
from kitlib.contract import Contract
from kitlib.convert import convert
from kitlib.engines import Engine
from kitlib.findings import Finding, KitError
from kitlib.launch import parse

IDS = "eagle_aux_hidden_state_layer_ids"
SGLANG = ("0.4.4", "0.4.6", "0.4.8", "0.4.9", "0.5.1", "0.5.9", "0.5.11", "0.5.12", "0.5.17", "0.5.23")
RELEASES = [f"sglang=={r}" for r in SGLANG] + [f"vllm=={r}" for r in ("0.10.0", "0.11.0", "0.13.0", "0.20.0", "0.33.0")]


def target(folder: Path, **changes) -> Path:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    values |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 512, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def nested(drafter: Path, **changes) -> Path:
    """The drafter with its config in speculators' form."""
    flat = json.loads((drafter / "config.json").read_text())
    whole = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.7.0"}
    whole |= {"draft_vocab_size": flat.pop("draft_vocab_size"), "transformer_layer_config": flat, **changes}
    whole["speculators_config"] = {"algorithm": "eagle3", "verifier": {"name_or_path": None}}
    (drafter / "config.json").write_text(json.dumps(whole))
    return drafter


def sick(kind: str, folder: Path) -> Path:
    """Drafters that some releases do not take as they are."""
    plain = {"rename": ("", ""), "eagle_config": {IDS: [1, 3, 4]}}
    if kind.startswith("speculators"):
        drafter = write_drafter(folder, rename=("", ""), layers=2 if "two" in kind else 1)
        return nested(
            drafter, **{IDS: [2, 4, 5] if "other" not in kind else [1, 4, 6]}, norm_before_residual="normed" in kind
        )
    return write_drafter(
        folder,
        **{
            "layers.0": plain,
            "layers.0, other ids": plain | {"eagle_config": {IDS: [0, 3, 5]}},
            "layers.0, zeros": plain | {"extra": {"norm.weight": torch.zeros(HIDDEN)}},
            "rope of transformers 5": {
                "rope_theta": ...,
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
            },
            "class of AngelSlim": {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "llama"},
            "prefix": {"rename": ("layers.0.", "draft_model.midlayer.")},
            "norm_output": plain | {"norm_output": True},
            "q_proj is missing": plain | {"drop": ["layers.0.self_attn.q_proj.weight"]},
        }[kind],
    )


KINDS = ["layers.0", "layers.0, other ids", "layers.0, zeros", "rope of transformers 5", "class of AngelSlim", "prefix"]
KINDS += ["norm_output", "q_proj is missing", "speculators", "speculators, other ids", "speculators, normed"]
KINDS += ["speculators, two layers"]


def commands(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    """The conversions that findings advise."""
    return {f.fix.command: f for f in findings if f.fix and " convert " in f.fix.command}


@pytest.mark.parametrize("kind", KINDS)
def test_an_advised_conversion_works_and_cures(tmp_path, kind):
    drafter, config = sick(kind, tmp_path / "drafter"), target(tmp_path / "target")
    seen = set()
    for release in RELEASES:
        for command, finding in commands(check(drafter, target=config, engines=(release,)).findings).items():
            words = shlex.split(command)
            assert words[:4] == ["python", "-m", "kitlib", "convert"]
            _, out, to = words[4], words[5], words[words.index("--to") + 1]
            if command not in seen:
                assert main(words[3:]) == 0, command
                seen.add(command)
            again = check(out, target=config, engines=(to,)).findings
            assert not [f for f in again if f.is_error or (f.code == finding.code and f.status == "fail")]
            if to != release:
                assert any("cannot write for this release" in e.text for e in finding.evidence)
    assert seen or kind in ("layers.0, zeros", "q_proj is missing", "speculators, normed")


@pytest.mark.parametrize("kind", ["layers.0, zeros", "q_proj is missing", "speculators, normed"])
def test_where_no_conversion_helps_none_is_advised(tmp_path, kind):
    """And none would: every release of SGLang that was read is tried."""
    drafter, config = sick(kind, tmp_path / "drafter"), target(tmp_path / "target")
    found = check(drafter, target=config, engines=("sglang==0.5.9",)).findings
    blamed = [f for f in found if f.code in ("K102", "K120") and f.status == "fail"]
    assert blamed and not commands(found)
    assert all("no conversion for sglang helps: K1" in f.fix.text for f in blamed)
    for release in Engine.load("sglang").releases:
        with pytest.raises(KitError):
            convert(drafter, tmp_path / "out", f"sglang=={release}", target=config)


def test_nothing_is_advised_that_lies_in_the_checkpoint_or_exists(tmp_path):
    drafter = sick("layers.0", tmp_path / "drafter")
    (tmp_path / "drafter-for-sglang-0.5.9").mkdir()
    for path in (drafter, drafter / "model.safetensors"):
        command = next(iter(commands(check(path, engines=("sglang==0.5.9",)).findings)))
        words = shlex.split(command)
        assert words[5] == str(tmp_path / "drafter-for-sglang-0.5.9-2")
    assert main(words[3:]) == 0


# SGLang 0.4.4 to 0.4.8: the loader raises at stacked names, warns of others, and fc has a bias in any case ------------


@pytest.mark.parametrize(
    ("release", "says", "effect"),
    [
        ("0.4.6", "knows `midlayer.*` and does not start: KeyError at layers.0.", "nothing is served"),
        ("0.4.8", "does not start: KeyError", "nothing is served"),
        ("0.4.9", "knows `midlayer.*` and drops them without a message", "the server stays healthy"),
        ("0.5.11", "drops them without a message", "the server stays healthy"),
    ],
)
def test_what_a_wrong_name_does_is_said_as_the_release_does_it(tmp_path, release, says, effect):
    found = check(sick("layers.0", tmp_path / "d"), engines=(f"sglang=={release}",)).findings
    names = next(f for f in found if f.code == "K102")
    assert says in names.title and effect in names.effect
    assert ("healthy" in names.effect) != ("KeyError" in names.title)
    assert [f.status for f in found if f.code == "K120"] == ["pass"]  # the config is not at fault


def test_names_that_are_only_warned_about(tmp_path):
    """0.4.6 lets names through that are not stacked: a norm under another name."""
    extra = {"draft_model.norm.weight": torch.rand(HIDDEN) + 0.5}
    found = check(write_drafter(tmp_path / "d", drop=["norm.weight"], extra=extra), engines=("sglang==0.4.6",)).findings
    names = next(f for f in found if f.code == "K102")
    assert "drops them with a warning each" in names.title and "healthy" in names.effect


def test_a_release_that_refuses_the_config_is_not_called_healthy(tmp_path):
    found = check(sick("speculators", tmp_path / "d"), engines=("sglang==0.5.9",)).findings
    for code in ("K102", "K120"):
        one = next(f for f in found if f.code == code)
        assert one.status == "fail" and "healthy" not in one.effect


@pytest.mark.parametrize(("release", "status"), [("0.4.4", "fail"), ("0.4.8", "fail"), ("0.4.9", "pass")])
def test_the_bias_that_old_releases_build_unasked_is_no_alarm(tmp_path, release, status):
    report = check(write_drafter(tmp_path / "d"), engines=(f"sglang=={release}",))
    found = next(f for f in report.findings if f.code == "K103")
    assert found.status == status and found.severity == "info"
    assert not report.errors and not report.warnings
    both = check(write_drafter(tmp_path / "e", drop=["fc.weight"]), engines=(f"sglang=={release}",))
    assert [f.title for f in both.errors] == ["1 parameters get no tensor: fc.weight"]


# A table of fields that is none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["llama", [1, 2], 7, None, True])
@pytest.mark.parametrize("release", ["sglang==0.5.9", "sglang==0.5.23", "vllm==0.10.0", "vllm==0.33.0"])
def test_a_layer_config_of_another_type_is_one_finding(tmp_path, release, value):
    config = {"transformer_layer_config": value, "speculators_config": {"algorithm": "eagle3"}}
    drafter = write_drafter(tmp_path / "d", rename=("layers.0.", "layers.0." if "vllm" in release else "midlayer."))
    flat = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**flat, **config}))
    found = check(drafter, target=target(tmp_path / "t"), engines=(release,)).findings
    failed = [f for f in found if f.status in ("fail", "crashed")]
    assert [f.code for f in failed if f.code != "K102"] == ["K120"], [str(f) for f in failed]
    told = next(f for f in failed if f.code == "K120")
    assert "transformer_layer_config in config.json is " in told.title and "not a table of fields" in told.title
    assert not commands((told,))
    assert {f.code: f.status for f in found if f.code in ("K123", "K132", "K103")} == dict.fromkeys(
        ("K103", "K123", "K132"), "not-run"
    )
    with pytest.raises(KitError, match="not a table of fields"):
        convert(drafter, tmp_path / "out", release)


# Several specifiers ---------------------------------------------------------------------------------------------------


def test_specifiers_of_two_engines_are_both_judged(tmp_path, capsys):
    drafter = write_drafter(tmp_path / "d", rename=("layers.0.", "model.layers.0."))
    report = check(drafter, engines=("all", "vllm==0.20.0", "sglang==0.5.9"))
    assert report.subject["engines"] == [*(f"sglang=={r}" for r in Engine.load().releases), "vllm==0.20.0"]
    windows = {f.engine for f in report.findings if f.code == "K102" and f.status == "fail"}
    assert windows == {"sglang>=0.4.4,<=0.4.8", "sglang>=0.4.9,<=0.5.11", "vllm==0.20.0"}
    for specs, code in (
        (["all"], 0),
        (["all", "sglang==0.5.20"], 0),
        (["all", "sglang==0.5.9"], 1),
        (["all", "vllm==0.20.0"], 1),
    ):
        assert main(["check", str(drafter), *(w for s in specs for w in ("--engine", s))]) == code, specs
    capsys.readouterr()


def test_a_launch_command_of_another_engine_is_refused(tmp_path):
    launch = parse("python -m sglang.launch_server --model-path m --speculative-algorithm EAGLE3")
    with pytest.raises(KitError, match=r"launch command is sglang's; check vllm==0\.20\.0 without it"):
        check(write_drafter(tmp_path / "d"), engines=("sglang==0.5.9", "vllm==0.20.0"), launch=launch)


# Round trips through a class whose hook has a rule of its own ---------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "release", "boundaries", "written"),
    [
        ("LlamaForCausalLM", "0.5.20", [2, 4, 6], [1, 3, 5]),
        ("DeepseekV3ForCausalLM", "0.5.12", [3, 4, 6], [2, 3, 5]),
        ("DeepseekV3ForCausalLM", "0.5.13", [3, 4, 6], [3, 4, 6]),
        ("DeepseekV3ForCausalLM", "0.5.13", [2, 4, 6], [1, 3, 5]),
        ("GptOssForCausalLM", "0.5.17", [4, 6, 8], [3, 5, 7]),
        ("MiniMaxM3SparseForConditionalGeneration", "0.5.18", [2, 4, 5], [1, 3, 4]),
    ],
)
def test_ids_are_written_as_the_target_s_hook_takes_them(tmp_path, architecture, release, boundaries, written):
    from kitlib.checkpoint import Checkpoint

    config = target(tmp_path / "t", architectures=[architecture], model_type="x")
    drafter = nested(write_drafter(tmp_path / "d", rename=("", "")), norm_before_residual=False, **{IDS: boundaries})
    out, back = tmp_path / "out", tmp_path / "back"
    assert convert(drafter, out, f"sglang=={release}", target=config).exit_code == 0
    assert Checkpoint.open(out).config["eagle_config"][IDS] == written
    assert Contract.of(Checkpoint.open(out)).boundaries == tuple(boundaries)  # without the target as well
    assert convert(out, back, "speculators").exit_code == 0
    assert Checkpoint.open(back).config[IDS] == boundaries and "ids" not in Checkpoint.open(back).config["kitlib"]


def test_ids_that_no_hook_takes_are_refused(tmp_path):
    """DeepSeek since 0.5.13: [0, …] stays as it is, and [1, …] becomes [2, …]; boundary 1 cannot be asked for."""
    config = target(tmp_path / "t", architectures=["DeepseekV3ForCausalLM"])
    drafter = nested(write_drafter(tmp_path / "d", rename=("", "")), norm_before_residual=False, **{IDS: [1, 4, 6]})
    assert convert(drafter, tmp_path / "old", "sglang==0.5.12", target=config).exit_code == 0
    with pytest.raises(KitError, match="K132"):
        convert(drafter, tmp_path / "new", "sglang==0.5.13", target=config)


def test_a_default_that_the_target_s_hook_shifts_is_written_out(tmp_path):
    """The MiniMax-M3 wrapper adds one to the default too, so a drafter without ids needs them there."""
    from kitlib.checkpoint import Checkpoint

    config = target(tmp_path / "t", architectures=["MiniMaxM3SparseForConditionalGeneration"])
    drafter = write_drafter(tmp_path / "d")
    before = check(drafter, target=config, engines=("sglang==0.5.20",)).findings
    assert [f.status for f in before if f.code == "K132"] == ["fail"]
    assert convert(drafter, tmp_path / "out", "sglang==0.5.20", target=config).exit_code == 0
    assert Checkpoint.open(tmp_path / "out").config["eagle_config"][IDS] == [1, 3, 4]
