"""The command line as people meet it: help, one-sentence refusals with exit code 2, JSON and nothing else."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from tiny import write_drafter, write_target

from kitlib.__main__ import main
from kitlib.contract import Wiring
from kitlib.paths import ROOT


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return write_drafter(tmp_path_factory.mktemp("cli") / "drafter")


def refused(capsys, *argv) -> str:
    """Exit code 2, nothing on stdout, one line on stderr without a traceback."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kitlib: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["check"],
        ["probe"],
        ["convert"],
        ["measure"],
        ["search"],
        ["serve"],
        ["bench"],
        ["report"],
        ["explain"],
        ["lab"],
        ["lab", "plant"],
        ["lab", "train"],
    ],
)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0 and "usage:" in capsys.readouterr().out


def test_check_healthy_and_sick(capsys, drafter, tiny_target, tmp_path):
    flags = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {drafter}"
    launch = f"python -m sglang.launch_server --model-path {tiny_target} {flags}"
    assert main(["check", "--launch", launch, "--engine", "sglang==0.5.9"]) == 0
    assert "✓ no error found" in capsys.readouterr().out
    (tmp_path / "launch.sh").write_text(launch.replace("EAGLE3", "EAGLE"))
    assert main(["check", "--launch", f"@{tmp_path / 'launch.sh'}"]) == 1
    assert "K130" in capsys.readouterr().out
    sick = write_drafter(tmp_path / "sick", rename=("", ""))
    assert main(["check", str(sick), "--target", str(tiny_target), "--engine", "sglang>=0.4.9,<=0.5.12"]) == 1
    assert "[✗] K102 key-naming · sglang>=0.4.9,<=0.5.11" in capsys.readouterr().out
    assert main(["check", str(sick), "--target", str(tiny_target), "--engine", "all"]) == 0  # a survey


def test_json_is_one_object_and_nothing_else(capsys, drafter, tiny_target):
    assert main(["check", str(drafter), "--target", str(tiny_target), "--engine", "0.5.9", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert {"kitlib", "subject", "findings", "not_run"} <= set(raw) and raw["subject"]["engines"] == ["sglang==0.5.9"]
    keys = {
        "code",
        "slug",
        "status",
        "severity",
        "engine",
        "title",
        "evidence",
        "cause",
        "effect",
        "fix",
        "learn",
        "references",
    }
    assert all(set(f) == keys for f in raw["findings"])


def broken(tmp_path, name):
    folder = write_drafter(tmp_path / name)
    file = folder / "model.safetensors"
    if name == "missing":
        return tmp_path / "nowhere"
    if name == "empty file":
        file.write_bytes(b"")
    if name == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if name == "huge header":
        file.write_bytes(struct.pack("<Q", 10**11) + b"{}")
    if name == "wrong json":
        (folder / "config.json").write_text("{")
    if name == "a list":
        (folder / "config.json").write_text("[]")
    if name == "pickle":
        file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return folder


@pytest.mark.parametrize(
    "name", ["missing", "empty file", "truncated", "huge header", "wrong json", "a list", "pickle"]
)
def test_unreadable_input(capsys, tmp_path, tiny_target, name):
    folder = broken(tmp_path, name)
    refused(capsys, "check", folder)
    refused(capsys, "measure", folder, "--target", tiny_target)
    assert main(["check", str(folder), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "K101"


def test_bad_arguments(capsys, drafter, tiny_target, tmp_path):
    assert "invalid choice: 'chek'" in refused(capsys, "chek")
    assert "required" in refused(capsys)
    assert "No drafter was named" in refused(capsys, "check")
    assert "no engine release" in refused(capsys, "check", drafter, "--engine", "sglang=0.5")
    assert "unrecognized" in refused(capsys, "check", drafter, "--nothing")
    assert "Cannot read the target" in refused(capsys, "check", drafter, "--target", tmp_path / "absent")
    assert "no known server" in refused(capsys, "check", drafter, "--launch", "ls")
    assert "Cannot read the launch" in refused(capsys, "check", drafter, "--launch", f"@{tmp_path / 'x'}")
    assert "no finding" in refused(capsys, "explain", "K999")
    assert "both a drafter and its --target" in refused(capsys, "measure", drafter)
    assert "at least 1" in refused(capsys, "measure", "--steps", "0")
    assert "no fault" in refused(capsys, "lab", "plant", "x", tmp_path / "y")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [3, 4]}\n')
    with_prompts = ("measure", drafter, "--target", tiny_target, "--prompts", prompts)
    assert "cannot be used here" in refused(capsys, *with_prompts, "--device", "cuda:77")
    assert "no dtype" in refused(capsys, *with_prompts, "--dtype", "int3")


def test_a_target_of_another_width(capsys, drafter, tmp_path):
    other = write_target(tmp_path / "wide", hidden_size=64, num_attention_heads=8)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [3, 4]}\n')
    capsys.readouterr()
    assert "fc takes 96 features" in refused(capsys, "measure", drafter, "--target", other, "--prompts", prompts)


BAD_PROMPTS = [
    {"prompt": 5}, {"prompt": None}, {"prompt": ""}, {"prompt": "\ud800"}, {"prompt": ["a"]}, {"messages": []},
    {"messages": [{"role": "user"}]}, {"messages": {}}, {"ids": []}, {"ids": [-1]}, {"ids": ["a"]}, 3, [],
]  # fmt: skip


@pytest.mark.parametrize("row", BAD_PROMPTS, ids=str)
def test_prompts_that_are_none(capsys, drafter, tiny_target, tmp_path, row):
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    assert "line 1" in refused(capsys, "measure", drafter, "--target", tiny_target, "--prompts", tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    "change",
    [
        {"boundaries": ["a"]}, {"boundaries": []}, {"capture": "bogus"}, {"d2t": "x"}, {"fc": "no"},
        {"token_shift": -5}, {"dropped": "fc.weight"}, {"rope": {"theta": "x", "nothing": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_wirings_that_are_none(change):
    good = Wiring((2, 4, 5)).to_dict()
    with pytest.raises((ValueError, TypeError)):
        Wiring.from_dict(json.loads(json.dumps(good | change)))


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", ["Infinity", "0", "-1", '"x"', "null", "1" + "0" * 400])
def test_target_sizes_that_are_none(capsys, drafter, tmp_path, name, value):
    sizes = {"hidden_size": "32", "vocab_size": "24", "num_hidden_layers": "8"} | {name: value}
    (tmp_path / "config.json").write_text("{" + ", ".join(f'"{k}": {v}' for k, v in sizes.items()) + "}")
    assert name in refused(capsys, "check", drafter, "--target", tmp_path)


def test_long_names_files_as_folders_and_odd_urls(capsys, drafter, tmp_path, monkeypatch):
    refused(capsys, "check", drafter, "--target", "x" * 300)
    refused(capsys, "lab", "plant", "healthy", tmp_path / ("y" * 300))
    refused(capsys, "measure", "--count", "-1")
    assert "like http://host:port" in refused(capsys, "bench", "--server", "http://[::1")
    monkeypatch.setenv("KEY", "sekret\u20ac")
    said = refused(capsys, "bench", "--server", "http://127.0.0.1:1", "--api-key-env", "KEY")
    assert "API key" in said and "sekret" not in said
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KITLIB_CACHE", str(tmp_path / "file"))
    assert "cannot be used" in refused(capsys, "measure", "--count", "1")


def test_names_in_files_cannot_forge_lines_or_send_escapes(capsys, tmp_path, tiny_target):
    extra = {"evil\n[✓] K999 all good\x1b[2J": torch.ones(3)}
    folder = write_drafter(tmp_path / "my dir; touch x", extra=extra, rename=("", ""))
    main(["check", str(folder), "--target", str(tiny_target), "--engine", "0.5.9"])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\n[✓] K999" not in out
    assert f"convert '{folder}'" in out  # the suggested command can be pasted


def test_other_spellings_of_the_flags_that_matter(capsys, drafter, tiny_target):
    flags = f"--speculative-algo EAGLE --speculative-draft {drafter}"
    main(["check", "--launch", f"sglang serve {tiny_target} {flags}", "--engine", "0.5.9"])
    out = capsys.readouterr().out
    assert "served with --speculative-algorithm EAGLE" in out and "speculation is off" not in out


def test_a_reader_that_leaves_early_gets_no_traceback(drafter):
    command = f"{sys.executable} -m kitlib explain K102 | true; {sys.executable} -m kitlib check {drafter} >&-"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_read_only_output(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    assert "Cannot write" in refused(capsys, "lab", "plant", "healthy", tmp_path / "file" / "out")


def test_measure_the_lab_in_json(capsys, lab_session):
    assert main(
        ["measure", "--count", "4", "--max-new-tokens", "16", "--json", "--device", "cpu", "--dtype", "float32"]
    ) in (0, 1)
    raw = json.loads(capsys.readouterr().out)
    got = raw["acceptance"]
    assert got["accept_length"] == pytest.approx(1 + got["accepted"] / got["rounds"], abs=1e-3)
    assert (
        sum(got["histogram"]) == got["rounds"]
        and got["draft_steps"] == 4
        and got["wiring"]["boundaries"] == [2, 15, 27]
    )
    assert (
        main(["measure", "--count", "4", "--max-new-tokens", "16", "--wiring", "fc-bypass-eagle", "--device", "cpu"])
        == 1
    )
    assert "M201" in capsys.readouterr().out


def test_numbers_and_wirings_are_refused_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("kitlib.features.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    assert "nonsense" in refused(capsys, "measure", "--wiring", "nonsense")
    assert "--clients" in refused(capsys, "bench", "--server", "http://127.0.0.1:1", "--clients", "0")
    assert "--count" in refused(capsys, "bench", "--server", "http://127.0.0.1:1", "--count", "-1")


def test_check_reads_flags_and_release_from_a_log_and_metrics_from_training(drafter, tmp_path, capsys):
    log, metrics = tmp_path / "server.log", tmp_path / "metrics.json"
    line = "Decode batch, #running-req: 1, #token: 90, token usage: 0.01, accept len: 1.00, accept rate: 0.20,"
    flags = {"model_path": "t", "speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(drafter)}
    flags |= {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5, "tp_size": 1}
    said = f"server_args=ServerArgs({', '.join(f'{k}={v!r}' for k, v in flags.items())}, api_key=None)"
    log.write_text(
        "\n".join(
            [f"[2026-01-01 10:00:00] {said}", *[f"[2026-01-01 10:00:01] {line} gen throughput (token/s): 25.0"] * 3]
        )
    )
    metrics.write_text(json.dumps({"full_acc_0": 0.745}))
    assert (
        main(["check", "--log", str(log), "--train-metrics", str(metrics), "--engine", "sglang==0.5.9", "--json"]) == 1
    )
    found = {f["slug"]: f for f in json.loads(capsys.readouterr().out)["findings"] if f["status"] != "pass"}
    assert found["algorithm-flag"]["status"] == "fail" and "EAGLE" in found["algorithm-flag"]["title"]
    assert found["fc-bypassed"]["status"] == "fail"
    assert found["accept-length-floor"]["evidence"][0]["values"] == {"lines": 3, "most": 1.0}
    assert "1.75 to 3.0" in found["below-training"]["title"] and found["below-training"]["status"] == "not-run"


def test_check_asks_a_running_server_for_its_flags(drafter, capsys):
    from misbehaving import INFO, serving

    told = INFO | {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(drafter), "version": "0.5.9"}
    with serving(lambda _, path, body: (200, json.dumps(told).encode())) as (url, _):
        assert main(["check", "--server", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["subject"]["engines"] == ["sglang==0.5.9"]
    assert "algorithm-flag" in {f["slug"] for f in report["findings"] if f["status"] == "fail"}
    assert "the last saw refused" in refused(capsys, "check", drafter, "--server", "http://127.0.0.1:9")
    assert "Cannot read the log" in refused(capsys, "check", drafter, "--log", "/nowhere/x.log")
