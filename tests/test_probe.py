"""The probe: what the installed release does with real files, and a front that survives any child."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tiny import HIDDEN, contract_of, write_drafter

from kitlib.contract import TargetInfo
from kitlib.engines import Engine, served
from kitlib.findings import KitError
from kitlib.probe import findings, probe, probe_many, release, report
from kitlib.rows import probe_rows

INSTALLED = importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else ""
needs_sglang = pytest.mark.skipif(INSTALLED != "0.5.20", reason="sglang 0.5.20 is not installed in this environment")
K_PROJ = "layers.0.self_attn.k_proj.weight"
LAYOUTS = {
    "healthy": {},
    "flat": {"rename": ("", "")},
    "prefix": {"rename": ("layers.0.", "draft_model.midlayer.")},
    "holes": {"drop": (K_PROJ, "fc.weight"), "extra": {"mask_hidden": torch.ones(3)}},
    "nan": {"extra": {"norm.weight": torch.full((HIDDEN,), float("nan"))}},
    "shape": {"extra": {"layers.0.mlp.down_proj.weight": torch.ones(3, 3)}},
    "class": {"architectures": ["Eagle3LlamaForCausalLM"]},
    "mla": {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory, tiny_target):
    """All layouts through the installed release, one subprocess a device: {device: {name: (folder, result)}}."""
    home = tmp_path_factory.mktemp("layouts")
    folders = {name: write_drafter(home / name, **changes) for name, changes in LAYOUTS.items()}
    answers = {d: probe_many(list(folders.values()), target=tiny_target, device=d) for d in ("cpu", "meta")}
    return {d: {n: (folders[n], r) for n, r in zip(folders, a, strict=True)} for d, a in answers.items()}


@needs_sglang
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("shape", "class", "mla")])
def test_the_installed_release_agrees_with_the_rules(asked, tiny_target, name, device):
    folder, result = asked[device][name]
    assert (result.status, result.reason) == ("ran", "")
    checkpoint, contract, _ = contract_of(folder, tiny_target)
    rule = served(checkpoint, contract, INSTALLED, target=TargetInfo.of(tiny_target))
    assert {(k.name, k.status, k.into) for k in result.keys} == {(f.name, f.status, f.into) for f in rule.fates}
    assert set(result.missing) - {"embed_tokens.weight"} == set(rule.missing)
    assert (result.at(3 * HIDDEN).fc, result.at(HIDDEN).fc) == (True, False) and not any(
        f.error for f in result.forward
    )
    assert all(f.finite is (True if device == "cpu" else None) for f in result.forward)


@needs_sglang
def test_a_row_for_a_table_says_whether_the_rules_had_said_so(asked, tiny_target):
    rules = {}
    for name in ("healthy", "prefix", "class"):
        checkpoint, contract, _ = contract_of(asked["cpu"][name][0], tiny_target)
        rules[name] = served(checkpoint, contract, INSTALLED, target=TargetInfo.of(tiny_target))
    healthy, prefix, refused = (probe_rows(asked["cpu"][n][1], r) for n, r in rules.items())
    assert (healthy["dropped"], healthy["parameters without a tensor"], healthy["as the rules say"]) == (0, 0, True)
    assert (healthy[f"fc ran at {3 * HIDDEN}"], healthy[f"fc ran at {HIDDEN}"]) == (True, False)
    assert prefix["dropped"] and prefix["_status"] == "dropped" and prefix["as the rules say"]
    assert refused["status"] == "refused" and refused["as the rules say"]
    assert not probe_rows(asked["cpu"]["prefix"][1], rules["healthy"])["as the rules say"]


@needs_sglang
def test_the_settings_it_needs_are_those_of_the_data(asked):
    imported = asked["cpu"]["healthy"][1].imported
    assert imported["release"] == INSTALLED
    assert imported["settings"] == Engine.load("sglang").entry("probe", INSTALLED)["settings"]


@needs_sglang
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_written_fractions_and_findings(asked, device):
    of = {name: {f.code: f for f in findings(result)} for name, (_, result) in asked[device].items()}
    assert {f.status for f in of["healthy"].values()} == {"pass"} == {f.status for f in of["nan"].values()}
    assert asked[device]["healthy"][1].written["lm_head.weight"] == 1
    holes = asked[device]["holes"][1].written
    assert (
        holes["model.layers.0.self_attn.qkv_proj.weight"] == 0.75 and holes["model.fc.weight"] == 0
    )  # k: 16 of 64 rows
    assert of["holes"]["K103"].status == "fail" and K_PROJ in of["holes"]["K103"].title
    assert of["holes"]["K102"].evidence[0].values["names"] == ["mask_hidden"]
    assert of["prefix"]["K102"].status == of["prefix"]["K103"].status == "fail"
    assert "although the file has them" in of["prefix"]["K103"].title
    assert of["healthy"]["K133"].evidence[0].source == "probe" and "skipped" in of["healthy"]["K133"].evidence[0].text


@needs_sglang
def test_what_the_release_refuses(asked):
    shape, cls = asked["cpu"]["shape"][1], asked["cpu"]["class"][1]
    assert shape.status == cls.status == "refused" and "down_proj" in shape.reason and "Eagle3Llama" in cls.reason
    assert [k.status for k in shape.keys].count("error") == 1 and len(shape.keys) == 15
    assert {f.code: f.status for f in findings(shape)}["K120"] == "fail"
    mla = asked["cpu"]["mla"][1]  # a class the release has, and the probe does not ask
    assert mla.status == "not-run" and {f.status for f in findings(mla)} == {"not-run"}
    assert {f.code: f.status for f in findings(cls)} == {"K120": "fail"} | dict.fromkeys(
        ("K102", "K103", "K133"), "not-run"
    )


HEADER = {"release": "0.5.9", "file": "ROOT/sglang/__init__.py", "settings": "global"}
ANSWER = {"refused": "", "keys": [{"name": "norm.weight", "status": "loaded", "into": "model.norm.weight"}]}
FAKE = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
assert all(os.path.exists(p) for layout in job["layouts"] for p in (layout["drafter"], *layout["files"]))
def say(text, root=job["root"]):
    with open(job["out"], "a") as out:
        out.write(text.replace("ROOT", root) + "\\n")
"""


@pytest.fixture
def fake(tmp_path, tiny_target, monkeypatch):
    """Two drafters asked of 0.5.9 with a child that runs this code; the results."""
    root = tmp_path / "unpacked"
    monkeypatch.setattr("kitlib.probe.fetch", lambda *_: root)
    monkeypatch.chdir(tmp_path)
    drafters = [write_drafter(Path(n)) for n in "ab"]  # the child runs elsewhere

    def ask(code: str, **options):
        script = tmp_path / "fake.py"
        script.write_text(FAKE + code)
        monkeypatch.setattr(release, "CHILD", script)
        return probe_many(drafters, "0.5.9", target=tiny_target, **options)

    return ask


def test_a_child_that_answers(fake, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    first, second = fake(
        f"say({json.dumps(json.dumps(HEADER))}); [say({json.dumps(json.dumps(ANSWER))}) for _ in job['layouts']]"
    )
    assert first.status == second.status == "ran" and first.of("loaded")[0].into == "model.norm.weight"
    assert (first.trained_width, first.single_width) == (3 * HIDDEN, HIDDEN)
    seen = fake("say(json.dumps({'release': '0.5.9', 'file': 'ROOT/x', 'environment': sorted(os.environ)}))")[0]
    assert "PATH" in seen.imported["environment"] and "HF_TOKEN" not in seen.imported["environment"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('not json')\nsay('<html>')", "cannot be read"),
        ("say('[1]')", "cannot be read"),
        ("say('{}')", "cannot be read"),
        ("pass", "cannot be read"),
        ("print('noise')\nraise ModuleNotFoundError('no torch here')", "ModuleNotFoundError: no torch here"),
        ('say(\'{"release": "0.5.20", "file": "ROOT/x"}\')', "asked for 0.5.9, but 0.5.20 was imported"),
        ('say(\'{"release": "0.5.9", "file": "/elsewhere/x"}\')', "imported from /elsewhere"),
    ],
)
def test_a_child_that_never_gets_there_is_not_run_with_a_reason(fake, code, reason):
    for result in fake(code):
        assert result.status == "not-run" and reason in result.reason and "\n" not in result.reason
        assert {f.status for f in findings(result)} == {"not-run"}


def test_a_child_that_dies_on_the_way_crashed_there(fake):
    first, second = fake(f"say({json.dumps(json.dumps(HEADER))}); say({json.dumps(json.dumps(ANSWER))}); os.abort()")
    assert first.status == "ran" and second.status == "crashed" and "-6" in second.reason
    assert all(f.status == "crashed" and f.is_error for f in findings(second))
    first, second = fake(f"say({json.dumps(json.dumps(HEADER))}); raise MemoryError('too large')")
    assert (first.status, second.status) == ("crashed", "not-run") and first.reason == "MemoryError: too large"


def test_a_child_that_hangs_is_ended_with_its_own_children(fake, tmp_path):
    mark = tmp_path / "alive"
    late = f"time.sleep(3); open({str(mark)!r}, 'w')"
    code = f"import subprocess; subprocess.Popen([sys.executable, '-c', {('import time; ' + late)!r}]); time.sleep(600)"
    assert fake(code, timeout=1)[0].reason == "no answer within 1 s"
    time.sleep(4)
    assert not mark.exists()
    assert fake("pass", python="/no/such/python")[0].reason == "cannot start /no/such/python: No such file or directory"


def test_bad_arguments_are_refused_in_one_sentence(tmp_path):
    drafter = write_drafter(tmp_path / "d")
    for options in (
        {"spec": "all"},
        {"spec": "0.5.9", "device": "cuda"},
        {"spec": "0.5.9", "wheel": tmp_path / "no.whl"},
    ):
        with pytest.raises(KitError):
            probe(drafter, **options)


def test_a_release_that_cannot_be_asked_is_data(tmp_path):
    result = probe(write_drafter(tmp_path / "d"), "0.4.4")
    assert result.status == "not-run" and "VideoInput" in result.reason
    shown = report(write_drafter(tmp_path / "e"), ["0.4.4"])
    assert shown.exit_code == 0 and {f.status for f in shown.findings} == {"not-run"}
    assert json.loads(shown.to_json())["probe"][0]["status"] == "not-run"


def test_a_release_that_pip_cannot_fetch_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("KITLIB_CACHE", str(tmp_path / "cache"))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: failed)
    result = probe(write_drafter(tmp_path / "d"), "0.5.9")
    assert result.status == "not-run" and result.reason.endswith("ERROR: No matching distribution found")
    assert list((tmp_path / "cache" / "probe").iterdir()) == []


def test_a_local_wheel_is_unpacked_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("KITLIB_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "sglang-0.5.9-py3-none-any.whl"
    wheel.write_bytes(b"PK no wheel")
    with pytest.raises(KitError, match="is no wheel"):
        release.fetch("0.5.9", wheel, sys.executable)
    assert list((tmp_path / "cache" / "probe").iterdir()) == []
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/__init__.py", "__version__ = '0.5.9'\n")
        archive.writestr("../../outside.py", "")
    root = release.fetch("0.5.9", wheel, sys.executable)
    assert (root / "sglang" / "__init__.py").is_file() and root == release.fetch("0.5.9", wheel, sys.executable)
    assert {p.name for p in tmp_path.rglob("outside.py")} == {"outside.py"} and (root / "outside.py").is_file()
    result = probe(write_drafter(tmp_path / "d"), "0.5.9", wheel=wheel)  # the real child on half a release
    assert result.status == "not-run" and "ModuleNotFoundError: No module named 'sglang.srt'" in result.reason


def test_the_front_imports_no_torch():
    code = "import sys, kitlib.probe; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


@pytest.mark.verify
@needs_sglang
def test_the_rules_agree_with_every_release():
    """All layouts through all releases that were read; wheels are fetched once (1.3 GB unpacked in the cache)."""
    grid = Path(__file__).parent / "bench" / "probe_grid.py"
    assert subprocess.run([sys.executable, str(grid)]).returncode == 0, "see data/verified/probe-grid.md"
