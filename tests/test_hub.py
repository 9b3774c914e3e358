"""Hub ids: headers by range requests from a server that speaks the hub's protocol, every byte of it counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import packed, sharded
from hub_server import COMMIT, LARGE, H, Hub, V, serving, sparse_drafter
from tiny import write_drafter

from kitlib.__main__ import main
from kitlib.checkpoint import INDEX
from kitlib.checkpoint.hub import named
from kitlib.paths import ROOT

SECRET = "hf_sEcReTsEcReTsEcReT"
CHILD = """
import contextlib, io, json, sys
from kitlib.__main__ import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT)} | more


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    home = tmp_path_factory.mktemp("hub")
    target = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 24, "num_hidden_layers": 8}
    wide = {**target, "hidden_size": H, "vocab_size": V, "num_hidden_layers": 61, "max_position_embeddings": 262144}
    for name, config in (("target", {**target, "max_position_embeddings": 512}), ("wide", wide)):
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(config))
    pickled, hostile, pieces = home / "pickled", home / "hostile", write_drafter(home / "pieces")
    for folder in (pickled, hostile):
        folder.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (hostile / INDEX).write_text(json.dumps({"weight_map": {"a": "../../x", "b": "/etc/passwd"}}))
    (home / "huge").mkdir()
    (home / "huge" / "model.safetensors").write_bytes(packed({}, length=100 << 30))
    (home / "long").mkdir()
    (home / "long" / "model.safetensors").write_bytes(packed(b" " * (40 << 20)))
    (home / "empty").mkdir()
    (home / "empty" / "model.safetensors").touch()
    os.rename(pieces / "model.safetensors", pieces / "one.safetensors")
    keys = list(json.loads((pieces / "one.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}"))
    (pieces / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(keys, "one.safetensors")}))
    repositories = {
        "org/drafter": write_drafter(home / "drafter"),
        "org/sick": write_drafter(home / "sick", rename=("", "")),
        "org/big": sparse_drafter(home / "big"),
        "org/shards": sharded(home / "shards"),
    }
    repositories |= {f"org/{f.name}": f for f in home.iterdir() if f.is_dir()}
    with serving(Hub(repositories)) as served:
        yield served


@pytest.fixture(scope="module")
def child(hub, tmp_path_factory):
    """The command line in one process, as importing huggingface_hub takes as long as ten checks."""
    cwd = tmp_path_factory.mktemp("cwd")
    env = environment(hub.url, cwd / "home", HF_TOKEN=SECRET)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD], cwd=cwd, env=env, **pipes) as process:

        def ask(*argv: object) -> tuple[int, str, str]:
            process.stdin.write(json.dumps([str(a) for a in argv]) + "\n")
            process.stdin.flush()
            code, out, err = json.loads(process.stdout.readline())
            assert SECRET not in out + err and "S3CR3T" not in out + err
            return code, out, err

        ask.cwd = cwd
        yield ask
        process.stdin.close()


@pytest.fixture(autouse=True)
def clean(hub):
    hub.refused, hub.ranges, hub.listing = {}, True, None
    hub.asked.clear()


def refused(answer: tuple[int, str, str]) -> str:
    code, _, err = answer
    assert code == 2 and err.startswith("kitlib: ") and err.count("\n") == 1, answer
    return err


def files(hub) -> list:
    return [a for a in hub.asked if "/api/" not in a.path]


# ---- what is fetched


def test_the_server_speaks_the_protocol_of_huggingface_hub(hub, tmp_path):
    code = (
        "from huggingface_hub import HfApi, HfFileSystem, hf_hub_download\n"
        "fs = HfFileSystem()\n"
        "print(HfApi().model_info('org/big').sha, sorted(f['name'] for f in fs.ls('org/big')))\n"
        "with fs.open('org/big/model.safetensors', block_size=1000) as f: print(f.size, f.read(500).hex())\n"
        "print(open(hf_hub_download('org/drafter', 'model.safetensors'), 'rb').read().hex())"
    )
    env = environment(hub.url, tmp_path, HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == f"{COMMIT} ['org/big/config.json', 'org/big/model.safetensors']"
    big = hub.repositories["org/big"] / "model.safetensors"
    with open(big, "rb") as file:
        assert second == f"{big.stat().st_size} {file.read(500).hex()}"
    assert third == (hub.repositories["org/drafter"] / "model.safetensors").read_bytes().hex()
    assert {a.role for a in hub.asked} == {"hub", "storage"}


def test_less_than_a_megabyte_of_a_drafter_of_2_4_gb_and_nothing_written(hub, tmp_path):
    size = (hub.repositories["org/big"] / "model.safetensors").stat().st_size
    env = environment(hub.url, tmp_path / "home", HF_TOKEN=SECRET)
    command = [sys.executable, "-m", "kitlib", "check", "org/big", "--target", "org/wide", "--engine", "sglang==0.5.12"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert size >= 2.4e9 and hub.sent < 1_000_000
    assert told["hub"] == {
        "bytes": hub.sent,
        "requests": len(hub.asked),
        "drafter": f"org/big@{COMMIT}",
        "target": "org/wide@main",
    }
    status = {f["code"]: f["status"] for f in told["findings"]}
    assert status["K105"] == "not-run" and status["K110"] == status["K101"] == status["K106"] == "pass"
    assert all(a.span for a in files(hub)) and all(a.sent <= 256_000 for a in hub.asked)
    assert {a.authorization for a in hub.asked if a.role == "hub"} == {f"Bearer {SECRET}"}
    stored = [a for a in hub.asked if a.role == "storage"]
    assert stored and not any(a.authorization for a in stored)  # another origin gets no token
    assert SECRET not in done.stdout + done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["drafter", "sick", "big", "pieces"])
def test_the_findings_are_those_of_the_folder_except_for_weights(hub, child, name):
    def findings(path):
        argv = ("--target", hub.repositories["org/wide" if name == "big" else "org/target"], "--engine", "0.5.9")
        code, out, _ = child("check", path, *argv, "--json")
        found = json.loads(out)["findings"]
        for f in found:
            f["fix"] = None
        return code, found

    code, here = findings(hub.repositories[f"org/{name}"])
    assert not hub.asked
    other, there = findings(f"org/{name}")
    weights = [f for f in there if f["code"] == "K105"]
    assert [f["status"] for f in weights] == ["not-run"] and "headers" in weights[0]["title"]
    strict = [f for f in here if f["code"] != "K105"]
    assert strict == [f for f in there if f["code"] != "K105"] and len(strict) > 15
    if name != "big":  # its weights are zeros: K105, which only the folder shows
        assert code == other


def test_one_fetch_serves_all_releases(hub, child):
    code, out, _ = child("check", "org/big", "--target", "org/wide", "--engine", "0.5.9")
    assert code == 0 and f"{hub.sent:,} bytes were fetched in {len(hub.asked)} requests" in out
    once = len(hub.asked)
    hub.asked.clear()
    assert child("check", "org/big", "--target", "org/wide", "--engine", "all")[0] == 0
    assert len(hub.asked) == once
    hub.asked.clear()
    child("check", "org/sick", "--target", "org/target", "--engine", "all")  # plans conversions, which need the map
    assert len({(a.path, a.span) for a in hub.asked}) == len(hub.asked) > 3


def test_the_drafter_of_a_launch_command_may_be_a_hub_id(hub, child):
    launch = "python -m sglang.launch_server --model-path m --speculative-algorithm EAGLE3"
    code, out, _ = child("check", "--launch", f"{launch} --speculative-draft-model-path org/drafter", "--json")
    assert code == 0 and json.loads(out)["hub"]["drafter"] == f"org/drafter@{COMMIT}"


def test_the_fix_downloads_first(hub, child):
    out = json.loads(child("check", "org/sick@main", "--target", "org/target", "--engine", "0.5.9", "--json")[1])
    fix = next(f["fix"]["command"] for f in out["findings"] if f["code"] == "K102")
    first, _, second = fix.partition(" && ")
    assert first == "hf download org/sick --revision main --local-dir sick"
    assert second == "python -m kitlib convert sick sick-for-sglang-0.5.9 --to sglang==0.5.9 --target org/target"


def test_a_target_needs_its_config_only(hub, child):
    assert child("check", hub.repositories["org/drafter"], "--target", "org/target", "--engine", "0.5.9")[0] == 0
    assert [a.path for a in hub.asked] == ["/org/target/resolve/main/config.json"]


def test_an_embedding_that_only_weights_can_judge_is_not_run(hub, child, tmp_path):
    import torch

    folder = write_drafter(tmp_path / "own", extra={"embed_tokens.weight": torch.ones(24, 32)})
    hub.repositories["org/own"], local = folder, hub.repositories["org/target"]
    for drafter, target in (("org/own", "org/target"), (folder, "org/target"), ("org/own", local), (folder, local)):
        out = json.loads(child("check", drafter, "--target", target, "--engine", "0.5.9", "--json")[1])
        found = [f for f in out["findings"] if f["code"] == "K111"]
        if (drafter, target) == (folder, local):
            assert [f["status"] for f in found] == ["not-run"] and "not compared" in found[0]["title"]
            assert "hub" not in out
        else:
            assert [f["status"] for f in found] == ["not-run"] and "headers" in found[0]["title"] and "hub" in out


# ---- which paths are hub ids


NO_IDS = ["", "name", "./org/name", "/org/name", "~/name", "a/b/c", "org/", "org/../x", "a--b/c", "org/-x", "org/x.git"]
NO_IDS += ["org/m.safetensors", "org/config.json", "org/m.bin", "org/x.", "o/n@", "org/na me", "org/n\0", "org/ñ"]
NO_IDS += ["org/n?x=1", "org/n@a b", "o/" + "n" * 97]


@pytest.mark.parametrize(
    ("path", "name", "revision"),
    [
        ("org/name", "org/name", ""),
        ("Org-1/EAGLE3_x.y@v1.0", "Org-1/EAGLE3_x.y", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        *((path, None, None) for path in NO_IDS),
    ],
)
def test_names(path, name, revision):
    found = named(path)
    assert (found and found.name, found and found.revision) == (name, revision)


def test_a_local_folder_wins(hub, child):
    shutil.copytree(hub.repositories["org/sick"], child.cwd / "org" / "drafter")
    shutil.copytree(hub.repositories["org/target"], child.cwd / "org" / "target")
    argv = ("check", "org/drafter", "--target", "org/target", "--engine", "0.5.9", "--json")
    code, out, _ = child(*argv)
    assert code == 1 and '"K102"' in out and not hub.asked
    shutil.rmtree(child.cwd / "org")
    assert child(*argv)[0] == 0 and hub.asked


def test_a_revision_is_asked_for(hub, child):
    code, out, _ = child("check", f"org/drafter@{COMMIT}", "--target", f"org/target@{COMMIT}", "--json")
    assert code == 0 and json.loads(out)["subject"]["drafter"] == f"org/drafter@{COMMIT}"
    assert [a.path for a in hub.asked if f"/{COMMIT}" not in a.path] == []
    assert "no revision elsewhere" in refused(child("check", "org/drafter@elsewhere"))
    assert "no revision a/b" in refused(child("check", "org/drafter", "--target", "org/target@a/b"))


# ---- refusals, one sentence each


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("check org/absent", "There is no folder org/absent here, and no such repository"),
        ("check org/drafter --target org/absent", "There is no folder org/absent here, and no such repository"),
        ("check org/pickled", "only pickled weights"),
        ("check org/target", "no .safetensors file"),
        ("check org/drafter --target org/pickled", "holds no config.json"),
        ("check org/hostile", "'../../x', which is missing"),
        ("check org/huge", "declares a header of 107374182400 bytes"),
        ("check org/long", "more than the 32 MB that are fetched of a hub repository"),
        ("check org/empty", "is empty"),
        ("check org/shards", "no EAGLE-3 drafter"),
    ],
)
def test_refused_in_one_sentence(hub, child, argv, sentence):
    assert sentence in refused(child(*argv.split()))
    assert hub.sent < 1_000_000


WEIGHTS = ["convert org/d@v2 out --to sglang==0.5.9", "probe org/d@v2", "measure org/d@v2 --target x"]


@pytest.mark.parametrize("argv", WEIGHTS)
def test_what_needs_weights_says_to_download_them(hub, capsys, monkeypatch, tmp_path, argv):
    monkeypatch.chdir(tmp_path)
    sentence = refused((main(argv.split()), *capsys.readouterr()))
    assert "hf download org/d --revision v2 --local-dir ./d" in sentence
    assert not hub.asked and os.listdir() == []


@pytest.mark.parametrize(
    ("part", "status", "code", "sentence"),
    [
        ("/resolve/", 401, "GatedRepo", "org/drafter is gated"),
        ("/resolve/", 403, "GatedRepo", "org/drafter is gated"),
        ("/api/", 403, "GatedRepo", "org/drafter is gated"),
        ("/api/", 401, "", "no such repository"),
        ("/api/", 404, "RepoNotFound", "no such repository"),
        ("/resolve/", 403, "", "answers 403"),
        ("/api/", 429, "", "answers 429"),
        ("/resolve/", 503, "", "answers 503"),
        ("model.safetensors", 500, "", "answers 500"),
    ],
)
def test_what_the_hub_refuses(hub, child, part, status, code, sentence):
    hub.refused = {part: (status, code)}
    assert sentence in refused(child("check", "org/drafter"))
    assert any(a.status == status for a in hub.asked)


def test_a_storage_that_refuses(hub, child):
    hub.refused = {str(hub.repositories["org/big"]): (403, "")}
    assert "answers 403 for org/big" in refused(child("check", "org/big"))


def test_a_server_without_range_requests(hub, child):
    hub.ranges = False
    code, out, _ = child("check", "org/big", "--target", "org/wide", "--engine", "0.5.9", "--json")
    assert code == 0 and json.loads(out)["hub"]["bytes"] < LARGE  # the header came first in the whole file's answer
    unread = [f for f in json.loads(out)["findings"] if "does not answer range requests" in f["title"]]
    assert [f["status"] for f in unread] == ["not-run"] and unread[0]["title"].startswith("vocab_map: ")
    assert max(a.sent for a in hub.asked) < 100 * LARGE  # what lay in socket buffers, not 2.4 GB


LISTINGS = [b"", b"[]", b"{}", b"{" * 9999, b'{"siblings": [{"rfilename": 5}]}', b'{"siblings": 1}', b"\xff"]


@pytest.mark.parametrize("listing", [*LISTINGS, b" " * (5 << 20)], ids=range(8))
def test_listings_that_are_none(hub, child, listing):
    hub.listing = listing
    assert "does not list the files of org/drafter" in refused(child("check", "org/drafter"))


@pytest.mark.parametrize(
    ("endpoint", "more", "sentence"),
    [
        ("http://user:passw0rd@127.0.0.1:9", {}, "the hub at 127.0.0.1:9 cannot be asked (ConnectError)"),
        ("nonsense", {}, "the hub at no address cannot be asked"),
        ("http://[", {}, "huggingface_hub cannot be imported (ValueError); check its installation and HF_ENDPOINT"),
        ("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}, "as HF_HUB_OFFLINE is set, no hub is asked"),
        ("http://127.0.0.1:9", {"HF_TOKEN": f"{SECRET}\x7fé"}, "cannot be asked"),
    ],
)
def test_no_hub(tmp_path, endpoint, more, sentence):
    command = [sys.executable, "-m", "kitlib", "check", "org/drafter"]
    env = environment(endpoint, tmp_path, **more)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert sentence in refused((done.returncode, done.stdout, done.stderr)) and not done.stdout
    assert "passw0rd" not in done.stderr and SECRET not in done.stderr
    assert os.listdir(tmp_path) == []


def test_local_files_do_not_import_it(hub, tmp_path):
    code = (
        "import sys\nfrom kitlib.__main__ import main\n"
        "codes = [main(['check', sys.argv[1], '--engine', '0.5.9', '--target', sys.argv[2]]),"
        " main(['convert', 'org/drafter', 'out', '--to', 'sglang==0.5.9'])]\n"
        "print(codes, [m for m in ('huggingface_hub', 'httpx', 'torch') if m in sys.modules])"
    )
    argv = [hub.repositories["org/drafter"], hub.repositories["org/target"]]
    env = environment(hub.url, tmp_path)
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 2] []" and not hub.asked, done.stderr
