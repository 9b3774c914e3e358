"""Every check fails where it must, passes on the healthy twin, and says when it does not apply or was not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import HIDDEN, LAYERS, VOCAB, random_tensors, write_drafter

from kitlib.checks import check
from kitlib.checks.serving import holds
from kitlib.findings import Finding, KitError
from kitlib.launch import parse

CODES = {f"K{n}" for n in (*range(101, 108), *range(110, 113), *range(120, 124), *range(130, 137))}
RECENT = ">=0.5.8,<=0.5.23"
RIGHT = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1"
RIGHT += " --speculative-num-draft-tokens 4"


def target_config(folder: Path, **changes) -> Path:
    """A target as check sees it: a config.json."""
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB}
    values |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 512, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


class Bench:
    """Runs the checks on a tiny drafter and hands out the findings of one code."""

    def __init__(self, tmp_path: Path):
        self.tmp = tmp_path
        self.target = target_config(tmp_path / "target")

    def run(self, code: str, release="0.5.20", *, flags: str | None = RIGHT, env="", target=None, **drafter):
        return [f for f in self.all(release, flags=flags, env=env, target=target, **drafter) if f.code == code]

    def all(
        self, release="0.5.20", *, flags: str | None = RIGHT, env="", target=None, **drafter
    ) -> tuple[Finding, ...]:
        folder = write_drafter(self.tmp / f"drafter{len(list(self.tmp.iterdir()))}", **drafter)
        where = target_config(self.tmp / "other", **target) if target else self.target
        command = f"{env} python -m sglang.launch_server --model-path m {flags} --speculative-draft-model-path {folder}"
        return check(folder, target=where, engines=(release,), launch=parse(command) if flags else None).findings

    def one(self, code: str, *args, **kwargs) -> Finding:
        found = self.run(code, *args, **kwargs)
        assert len(found) == 1, found
        return found[0]


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def test_a_healthy_drafter_has_no_error_and_no_warning(bench):
    """0.5.8 to 0.5.23 with a launch command that is right."""
    found = bench.all(RECENT, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    assert {f.status for f in found} == {"pass"}, [f for f in found if f.status != "pass"]
    assert {f.code for f in found} == CODES


def test_a_healthy_lab_drafter_has_none_either(tmp_path):
    from kitlib.lab.faults import plant

    folder = plant("healthy", tmp_path / "healthy")
    names = json.loads((folder / "config.json").read_text())
    sizes = {n: names[n] for n in ("hidden_size", "vocab_size", "max_position_embeddings")}
    target = target_config(tmp_path / "smol", **sizes, num_hidden_layers=30)
    launch = parse(f"python -m sglang.launch_server --model-path m {RIGHT} --speculative-draft-model-path {folder}")
    report = check(folder, target=target, engines=(RECENT,), launch=launch)
    assert not [f for f in report.findings if f.status not in ("pass", "not-applicable")]
    sick = plant("layer-dropped", tmp_path / "sick")
    report = check(sick, target=target, engines=(RECENT,), launch=launch)
    assert [f.code for f in report.errors] == ["K105"] and not report.warnings


# K104 ----------------------------------------------------------------------------------------------------------------

ONES = torch.ones(HIDDEN) + 0.1


@pytest.mark.parametrize(
    ("release", "drafter", "name", "why"),
    [
        ("0.5.20", {"extra": {"fc_norm.0.weight": ONES}}, "fc_norm.0.weight", "without fc_norm in the config"),
        ("0.5.20", {"extra": {"input_norm.weight": ONES.repeat(3)}}, "input_norm.weight", "without norm_before_fc"),
        ("0.5.20", {"extra": {"fc.bias": ONES}}, "fc.bias", "without bias"),
        ("0.5.20", {"layers": 2, "num_hidden_layers": 1}, "layers.1.", "no parameter for it"),
        ("0.5.20", {"layers": 2}, "layers.1.input_layernorm.weight", "hidden_norm"),
        ("0.5.9", {"extra": {"layers.0.mlp.up_proj.weight ": ONES}}, "weight ", "no part of an EAGLE-3 drafter"),
        ("0.5.16", {"norm_before_fc": True}, "input_norm.weight", "no parameter for it"),
    ],
)
def test_unused_weights(bench, release, drafter, name, why):
    found = bench.one("K104", release, **drafter)
    assert (found.status, found.severity) == ("fail", "warning")
    assert name in found.title and why in found.evidence[0].text
    assert bench.one("K102", release, **drafter).status == "pass"


def test_two_spellings_of_one_tensor(bench):
    twice = {f"draft_model.{n}": t for n, t in random_tensors(1, {}).items() if n.startswith("layers.0.mlp")}
    found = bench.one("K104", rename=("", ""), extra=twice)
    assert found.status == "fail" and "another name" in found.title and len(found.evidence) == 3
    assert bench.one("K102", rename=("", ""), extra=twice).status == "pass"


def test_used_weights(bench):
    assert bench.one("K104").status == "pass"
    assert bench.one("K104", fc_norm=True).status == "pass" == bench.one("K104", norm_before_fc=True).status
    named_wrongly = bench.one("K104", "0.5.9", rename=("", ""))  # that is K102's
    assert named_wrongly.status == "pass" and bench.one("K102", "0.5.9", rename=("", "")).status == "fail"


# K105 ----------------------------------------------------------------------------------------------------------------


def layer(norms: float | None = 1.0, skip: str = "") -> dict[str, torch.Tensor]:
    """The layer as an initialiser leaves it; `skip` keeps one trained matrix."""
    generator = torch.Generator().manual_seed(3)
    out = {}
    for name, tensor in random_tensors(1, {}).items():
        if name.startswith("layers.") and (not skip or skip not in name):
            initial = torch.randn(tensor.shape, generator=generator) * 0.02
            out[name] = initial if tensor.ndim == 2 else tensor if norms is None else torch.full(tensor.shape, norms)
    return out


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN), "is all zeros"),
        ("norm.weight", torch.zeros(HIDDEN), "is all zeros"),
        ("layers.0.self_attn.o_proj.weight", torch.full((HIDDEN, HIDDEN), float("nan")), "1024 NaN or infinite"),
        ("layers.0.mlp.down_proj.weight", torch.full((HIDDEN, 48), float("inf")), "NaN or infinite"),
        ("layers.0.mlp.up_proj.weight", torch.full((48, HIDDEN), 0.5), "is 0.5 everywhere"),
    ],
)
def test_untrained_weights(bench, name, value, says):
    found = bench.one("K105", extra={name: value})
    assert found.is_error and says in found.title and found.engine is None


def test_a_layer_as_initialised(bench):
    found = bench.one("K105", extra=layer())
    assert found.is_error and "layer 0 is as initialised" in found.title


@pytest.mark.parametrize("extra", [layer(None), layer(1.01), layer(skip="q_proj"), {"norm.weight": torch.ones(HIDDEN)}])
def test_one_sign_of_an_initial_state_is_no_proof(bench, extra):
    assert bench.one("K105", extra=extra).status == "pass"


def test_packed_weights_are_not_judged(bench):
    packed = {"layers.0.mlp.up_proj.weight": torch.zeros(48, HIDDEN).to(torch.float8_e4m3fn)}
    assert bench.one("K105", extra=packed).status == "not-run"


# K107 ----------------------------------------------------------------------------------------------------------------


def test_the_drafter_inherits_the_target_s_quantization(bench):
    awq = RIGHT + " --quantization awq"
    found = bench.one("K107", flags=awq)
    assert (found.status, found.severity) == ("fail", "warning")
    assert found.fix.command == "--speculative-draft-model-quantization unquant"
    old = bench.one("K107", "0.5.6", flags=awq + " --speculative-draft-model-quantization unquant")
    assert old.status == "fail" and not old.fix.command  # the flag came with 0.5.7
    told = awq + " --speculative-draft-model-quantization unquant"
    assert bench.one("K107", flags=told).status == "pass"
    assert bench.one("K107", flags=awq, quantization_config={"quant_method": "awq"}).status == "pass"
    assert bench.one("K107").status == "pass" == bench.one("K107", flags=RIGHT + " --quantization unquant").status
    quiet = bench.one("K107", target={"quantization_config": {"quant_method": "fp8"}})
    assert (quiet.status, quiet.severity) == ("fail", "info") and "fp8" in quiet.title


def test_a_packed_drafter_must_say_so(bench):
    packed = {"layers.0.mlp.up_proj.weight": torch.zeros(48, HIDDEN).to(torch.float8_e4m3fn)}
    assert "F8_E4M3" in bench.one("K107", extra=packed).title
    assert bench.one("K107", extra=packed, quantization_config={"quant_method": "fp8"}).status == "pass"


# K112, K121, K122, K123 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafter", "severity", "says"),
    [
        ({"hidden_size": 64}, {"target_hidden_size": HIDDEN}, "error", "hidden size 64"),
        ({"hidden_size": 16}, {}, "error", "no target_hidden_size"),
        ({"vocab_size": VOCAB - 1}, {}, "error", "24 target ids, the target has 23"),
        ({"vocab_size": VOCAB + 8}, {}, "warning", "24 target ids, the target has 32"),
    ],
)
def test_target_pair(bench, target, drafter, severity, says):
    found = bench.one("K112", target=target, **drafter)
    assert (found.status, found.severity) == ("fail", severity) and says in found.title


def test_target_pair_by_name(bench):
    def named(name, served):
        spec = {"verifier": {"name_or_path": name}}
        flags = f"{RIGHT} --model-path {served}"
        return bench.one("K112", flags=flags, speculators_config=spec, transformer_layer_config=...)

    assert "recorded the target Qwen/Qwen3-8B" in named("Qwen/Qwen3-8B", "Qwen/Qwen3-14B").title
    for same in (
        "Qwen/Qwen3-8B",
        "other/qwen3-8b-FP8",
        "/models/anything",
        "./a",
        "/c/models--Qwen--Qwen3-8B/snapshots/1",
    ):
        assert named("Qwen/Qwen3-8B", same).status == "pass", same
    assert bench.one("K112").status == "pass"
    folder = write_drafter(bench.tmp / "alone")
    assert [f.status for f in check(folder).findings if f.code == "K112"] == ["not-run"]


def test_rope_is_read_in_the_release_s_own_spelling(bench):
    new = {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    lost = bench.one("K121", "0.5.9", **new)
    assert (lost.status, lost.severity) == ("fail", "warning")
    assert "theta: config.json says theta 500000, default, this release reads theta 10000" in lost.title
    assert bench.one("K121", "0.5.10", **new).status == "pass"
    assert bench.one("K121", "0.5.9", rope_theta=5e5).status == "pass" == bench.one("K121", rope_theta=5e5).status
    yarn = {"rope_type": "yarn", "factor": 4.0}
    both = {"rope_theta": 5e5, "rope_scaling": yarn, "rope_parameters": {**yarn, "rope_theta": 5e5}}
    assert bench.one("K121", "0.5.9", **both).status == "pass" == bench.one("K121", **both).status
    half = bench.one("K121", "0.5.9", rope_theta=5e5, rope_parameters={**yarn, "rope_theta": 5e5})
    assert half.status == "fail" and half.title.startswith("rope type and scaling")
    assert bench.one("K121", rope_theta=...).status == "not-run"
    assert bench.one("K121", target={"rope_scaling": {"mrope_section": [2, 1, 1]}}).status == "fail"


def test_context_length(bench):
    short = bench.one("K122", max_position_embeddings=256)
    assert (short.status, short.severity) == ("fail", "warning") and "end at 256, 512 are served" in short.title
    assert "refuses to start" in short.title and short.fix.command == "--context-length 256"
    allowed = bench.one("K122", max_position_embeddings=256, env="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1")
    assert allowed.status == "fail" and "beyond them" in allowed.title
    assert "beyond them" in bench.one("K122", "0.4.10", max_position_embeddings=256).title
    assert bench.one("K122").status == "pass"
    assert bench.one("K122", flags=RIGHT + " --context-length 256", max_position_embeddings=256).status == "pass"
    assert bench.one("K122", flags=RIGHT + " --context-length 1024").status == "fail"
    scaled = {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert bench.one("K122", **scaled).status == "pass"
    assert bench.one("K122", max_position_embeddings=..., target={"max_position_embeddings": 4096}).status == "fail"
    assert [f.status for f in check(write_drafter(bench.tmp / "d")).findings if f.code == "K122"] == ["not-run"]


@pytest.mark.parametrize(
    ("drafter", "bad", "good"),
    [
        ({"norm_before_residual": True}, "0.5.23", None),
        ({"norm_before_fc": True}, "0.5.16", "0.5.17"),
        ({"fc_norm": True}, "0.5.11", "0.5.12"),
        ({"norm_output": True}, "0.5.11", "0.5.12"),
        ({"layers": 2}, "0.5.20", None),
        ({}, None, "0.4.9"),
    ],
)
def test_norm_wiring(bench, drafter, bad, good):
    if bad:
        found = bench.one("K123", bad, **drafter)
        assert found.is_error and len(found.evidence[0].values["differ"]) == 1
    if good:
        assert bench.one("K123", good, **drafter).status == "pass"


def test_later_layers_trained_with_the_norm_that_runs(bench):
    extra = {"layers.1.hidden_norm.weight": ONES}
    assert bench.one("K123", layers=2, extra=extra, drop=("layers.1.input_layernorm.weight",)).status == "pass"


# K131, K132 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "release", "status"),
    [
        ("Qwen3ForCausalLM", "0.4.8", "fail"),
        ("Qwen3ForCausalLM", "0.4.9", "pass"),
        ("KimiK25ForConditionalGeneration", "0.5.9", "fail"),
        ("KimiK25ForConditionalGeneration", "0.5.10", "pass"),
        ("Glm4vForConditionalGeneration", "0.5.4", "pass"),
        ("Glm4vForConditionalGeneration", "0.5.5", "fail"),
        ("MixtralForCausalLM", "0.5.23", "fail"),
        ("MixtralForCausalLM", "0.9.0", "not-run"),  # newer than all that were read
        ("LlamaForCausalLM", "0.9.0", "pass"),
        ("NeverHeardOfForCausalLM", "0.5.20", "not-run"),
    ],
)
def test_capture_hook(bench, architecture, release, status):
    found = bench.one("K131", release, target={"architectures": [architecture]})
    assert found.status == status and (status != "fail" or found.is_error)


def test_capture_hook_where_nothing_is_captured(bench):
    assert bench.one("K131", flags=RIGHT.replace("EAGLE3", "EAGLE")).status == "not-applicable"
    assert [f.status for f in check(write_drafter(bench.tmp / "d")).findings if f.code == "K131"] == ["not-run"]


@pytest.mark.parametrize(
    ("architecture", "ids", "release", "status", "says"),
    [
        ("LlamaForCausalLM", [1, 3, 7], "0.5.20", "fail", "boundary 8 is never captured"),
        ("Gemma3ForCausalLM", [1, 3, 7], "0.5.20", "pass", ""),
        ("GptOssForCausalLM", [1, 3, 8], "0.5.16", "fail", "boundary 9 is never captured"),
        ("GptOssForCausalLM", [1, 3, 8], "0.5.17", "pass", ""),
        ("DeepseekV3ForCausalLM", [0, 3, 5], "0.5.12", "pass", ""),
        ("DeepseekV3ForCausalLM", [0, 3, 5], "0.5.13", "fail", "served with [0, 3, 5]"),
        ("DeepseekV3ForCausalLM", [1, 3, 5], "0.5.13", "pass", ""),
        ("MiniMaxM3SparseForConditionalGeneration", None, "0.5.18", "fail", "served with [3, 5, 6]"),
        ("MiniMaxM3SparseForCausalLM", None, "0.5.18", "pass", ""),
    ],
)
def test_layers_of_classes_with_rules_of_their_own(bench, architecture, ids, release, status, says):
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
    found = bench.one("K132", release, target={"architectures": [architecture]}, **config)
    assert found.status == status and says in found.title


# K134, K135, K136 ----------------------------------------------------------------------------------------------------

BASE = "--speculative-algorithm EAGLE3"


def spec(steps=None, topk=None, tokens=None, rest="") -> str:
    names = {"num-steps": steps, "eagle-topk": topk, "num-draft-tokens": tokens}
    return " ".join([BASE, *(f"--speculative-{n} {v}" for n, v in names.items() if v is not None), rest])


@pytest.mark.parametrize(
    ("release", "flags", "env", "says"),
    [
        ("0.5.20", spec(2, 1, 2), "", "must be steps + 1"),
        ("0.4.6", spec(2, 1, 2), "", "must be steps + 1"),
        ("0.5.20", spec(8, 4, 8), "", "last draft steps"),
        ("0.5.20", spec(1, 2, 8), "", "fewer nodes"),
        ("0.5.20", spec(None, 1), "", "top-k without steps"),
        ("0.5.20", spec(None, None, 4), "", "draft tokens without steps"),
        ("0.5.20", spec(3, None, 4), "", "steps without top-k"),
        ("0.4.8", spec(5, 4, 8, "--page-size 64"), "", "sets top-k to 1"),
        ("0.5.5", spec(5, 4, 8, "--page-size 64 --attention-backend fa3"), "", "except by flashinfer"),
        ("0.5.12", spec(5, 4, 8, "--page-size 64 --attention-backend triton"), "", "flashinfer and fa3"),
        ("0.5.13", spec(5, 4, 8, "--page-size 64 --attention-backend flashmla"), "", "fa3 and triton"),
        ("0.5.9", spec(5, 4, 8, "--attention-backend trtllm_mha"), "", "chains only"),
        ("0.5.9", spec(5, 4, 8), "SGLANG_ENABLE_SPEC_V2=1", "SGLANG_ENABLE_SPEC_V2"),
    ],
)
def test_spec_params(bench, release, flags, env, says):
    found = bench.one("K134", release, flags=flags, env=env)
    assert (found.status, found.severity) == ("fail", "warning") and says in found.title


@pytest.mark.parametrize(
    ("release", "flags", "env"),
    [
        ("0.5.20", spec(), ""),
        ("0.5.20", spec(5, 4, 8), ""),
        ("0.5.20", spec(3, 1), ""),  # the engine takes steps + 1
        ("0.5.12", spec(5, 4, 8, "--page-size 64 --attention-backend fa3"), ""),
        ("0.5.13", spec(5, 4, 8, "--page-size 64 --attention-backend triton"), ""),
        ("0.5.12", spec(5, 4, 8), "SGLANG_ENABLE_SPEC_V2=1"),
        ("0.5.9", spec(5, 4, 8), "SGLANG_ENABLE_SPEC_V2=0"),
    ],
)
def test_spec_params_that_agree(bench, release, flags, env):
    assert bench.one("K134", release, flags=flags, env=env).status == "pass"


@pytest.mark.parametrize(
    ("release", "rest", "env"),
    [
        ("0.5.1", "", "SIMULATE_ACC_LEN=3"),
        ("0.5.20", "", "SGLANG_SIMULATE_ACC_LEN=1.0"),
        ("0.5.20", "--speculative-accept-threshold-single 0.9", ""),
        ("0.5.20", "--speculative-accept-threshold-acc=0.5", ""),
        ("0.5.20", "--speculative-draft-load-format dummy", ""),
        ("0.5.20", "--load-format dummy", ""),
    ],
)
def test_simulated_acceptance(bench, release, rest, env):
    assert bench.one("K135", release, flags=f"{RIGHT} {rest}", env=env).is_error


@pytest.mark.parametrize(
    ("release", "rest", "env"),
    [
        ("0.5.20", "", ""),
        ("0.5.20", "", "SIMULATE_ACC_LEN=3"),  # the old name, which this release does not read
        ("0.5.20", "", "SGLANG_SIMULATE_ACC_LEN=-1"),
        ("0.5.20", "--speculative-accept-threshold-single 1.0 --load-format safetensors", ""),
    ],
)
def test_real_acceptance(bench, release, rest, env):
    assert bench.one("K135", release, flags=f"{RIGHT} {rest}", env=env).status == "pass"


def test_without_a_launch_command_flags_are_not_judged(bench):
    assert {bench.one(code, flags=None).status for code in ("K134", "K135")} == {"not-run"}
    assert bench.one("K136", flags=None).status == "pass"


def test_known_engine_bugs(bench):
    other = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    graph = bench.one("K136", "0.5.9", **other)
    assert (graph.status, graph.severity) == ("fail", "warning") and "--disable-cuda-graph" in graph.title
    assert bench.one("K136", "0.5.9", flags=RIGHT + " --disable-cuda-graph", **other).status == "pass"
    assert bench.one("K136", "0.5.11", **other).status == "pass"
    usual = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    assert bench.one("K136", "0.5.9", **usual).status == "pass" == bench.one("K136", "0.5.9").status
    qwen = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    assert bench.one("K136", "0.5.21", target=qwen).status == "fail"
    assert bench.one("K136", "0.5.22", target=qwen).status == "pass"


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (None, "absent", True), ("", "absent", True), (True, "present", True), (None, "present", False),
        ("1", "on", True), ("False", "on", False), ("2", ">1", True), ("1", ">1", False), ("x", ">1", False),
        ("0.5", "<1", True), ("FA3", "=fa3|triton", True), ("fa3", "!fa3", False), (None, "!fa3", False),
    ],
)  # fmt: skip
def test_conditions(value, wanted, expected):
    assert holds(value, wanted) is expected


def test_check_imports_no_torch(bench):
    folder = write_drafter(bench.tmp / "d")
    code = "import sys\nfrom kitlib.checks import check\n"
    code += f"check({str(folder)!r}, target={str(bench.target)!r}, engines=('all',))\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.verify
def test_a_drafter_of_kimi_k2_5s_size_is_checked_in_a_second():
    script = Path(__file__).parent / "bench" / "check_speed.py"
    assert subprocess.run([sys.executable, str(script)]).returncode == 0, "see data/verified/check-speed.md"


@pytest.mark.parametrize(
    ("steps", "says"), [("three", "not a whole number"), ("0", "no sensible number"), ("9" * 23, "no")]
)
def test_a_number_that_is_none_is_refused_once(bench, steps, says):
    flags = f"--speculative-algorithm EAGLE3 --speculative-num-steps {steps} --speculative-eagle-topk 1"
    with pytest.raises(KitError, match=says):
        bench.all("0.5.9", flags=flags)


def test_a_dtype_that_no_library_reads_and_a_vocabulary_that_nobody_tells(bench, tmp_path):
    folder = write_drafter(tmp_path / "strange")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"XYZ"', 1))
    found = {f.code: f for f in check(folder, target=bench.target, engines=("0.5.20",)).findings}
    assert found["K107"].status == "fail" and "XYZ" in found["K107"].title
    alone = write_drafter(tmp_path / "alone")
    (alone / "config.json").unlink()
    found = {f.code: f for f in check(alone / "model.safetensors", engines=("0.5.20",)).findings}
    assert found["K110"].status == "not-run"
