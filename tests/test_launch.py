"""Pasted launch commands."""

from __future__ import annotations

import pytest

from kitlib.findings import KitError
from kitlib.launch import parse


def test_several_lines_quotes_environment_and_comments():
    text = """
    export SGLANG_SIMULATE_ACC_LEN=2.5 HF_TOKEN=hf_abc  # left over
    CUDA_VISIBLE_DEVICES=0,1 python3 -m sglang.launch_server \\
      --model-path "/models/Kimi K2.5" --tp 8 \\
      --speculative-algorithm=EAGLE3 --speculative_draft_model_path '/models/drafter' \\
      --speculative-num-steps 4 --trust-remote-code --api-key s3cret > server.log 2>&1 &
    """
    launch = parse(text)
    assert launch.engine == "sglang" and launch.algorithm == "EAGLE3"
    assert (launch.target, launch.drafter) == ("/models/Kimi K2.5", "/models/drafter")
    assert launch.number("speculative-num-steps") == 4 and launch.flags["trust-remote-code"] is True
    assert launch.env["SGLANG_SIMULATE_ACC_LEN"] == "2.5" and launch.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert launch.env["HF_TOKEN"] == "…" and launch.flags["api-key"] == "…"


DOCKER = "docker run lmsys/sglang python -m sglang.launch_server --model M --speculative-algorithm eagle3"
VLLM = """vllm serve M --speculative-config '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3}'"""


@pytest.mark.parametrize(
    ("text", "engine", "algorithm", "drafter"),
    [
        ("sglang serve M --speculative-algorithm EAGLE --speculative-draft-model D", "sglang", "EAGLE", "D"),
        (DOCKER, "sglang", "EAGLE3", ""),
        (VLLM, "vllm", "EAGLE3", "D"),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path D", "sglang", "EAGLE3", "D"),
        ("python -m sglang.launch_server --model-path M", "sglang", "", ""),
    ],
)
def test_forms(text, engine, algorithm, drafter):
    launch = parse(text)
    assert (launch.engine, launch.algorithm, launch.drafter) == (engine, algorithm, drafter)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no known server"), ("ls -l", "no known server"), ('python -m sglang.launch_server --x "', "quotes"),
        ("vllm serve M --speculative-config '{'", "valid JSON"),
        ("vllm serve M --speculative-config '[]'", "JSON object"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(text, why):
    with pytest.raises(KitError, match=why):
        parse(text)


def test_a_number_that_is_none():
    with pytest.raises(KitError, match="whole number"):
        parse("sglang serve M --speculative-num-steps many").number("speculative-num-steps")
