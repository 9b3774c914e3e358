"""The hostile, by hand: what random changes do not find. Refused in one sentence, with little memory, and at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import packed
from mutations import save, tensors_of
from tiny import write_drafter
from watched import run

from kitlib.checkpoint import INDEX
from kitlib.paths import ROOT


def healthy(root: Path) -> Path:
    """A sound drafter of two shards at root/drafter, a file beside it that is not its own, and root/out."""
    folder = write_drafter(root / "drafter")
    save(folder, tensors_of(folder), 2)
    shutil.copy(folder / "model-0.safetensors", root / "other.safetensors")
    (root / "out").mkdir()
    return folder


def listing(shard: str) -> Callable[[Path], object]:
    return lambda f: (f / INDEX).write_text((f / INDEX).read_text().replace("model-0.safetensors", shard))


def linked(folder: Path) -> None:
    (folder / "model-0.safetensors").unlink()
    (folder / "model-0.safetensors").symlink_to("../other.safetensors")


def declared(folder: Path, size: int, real: int) -> None:
    with open(folder / "model-0.safetensors", "wb") as file:  # sparse: it takes no space
        file.write(struct.pack("<Q", size))
        file.truncate(real)


def pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % bytes(folder.parent / "trap"))


def holding(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda f: (f / name).write_bytes(packed(data) if name.endswith(".safetensors") else data)


JSON = {
    "duplicate keys": b'{"hidden_size": 32, "hidden_size": 33}',
    "deep": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "NaN": b'{"rope_theta": NaN}',
    "Infinity": b'{"rope_theta": -Infinity}',
    "beyond any number": b'{"rope_theta": 1e999}',
    "invalid UTF-8": b'{"a": "\xc3("}',
    "half a character": rb'{"a": "\ud800"}',
    "endless integer": b'{"a": ' + b"9" * 5000 + b"}",
    "ten million lists": b'{"a": [' + b"[]," * 10_000_000 + b"[]]}",
}
FILES = ("config.json", INDEX, "model-0.safetensors")
HOSTILE = {f"{what} in {name}": holding(name, data) for what, data in JSON.items() for name in FILES} | {
    "index ../": listing("../other.safetensors"),
    "index ../../x": listing("../../x"),
    "index /etc/passwd": listing("/etc/passwd"),
    "index /dev/zero": listing("/dev/zero"),
    "symlink out": linked,
    "100 GB header": lambda f: declared(f, 100 * 2**30, 100),
    "100 GB header in 101 GB": lambda f: declared(f, 100 * 2**30, 101 * 2**30),
    "pickle": pickled,
}


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_the_hostile_are_refused_in_one_sentence(tmp_path, spoil):
    folder, out = healthy(tmp_path), tmp_path / "out" / "new"
    assert run("check", str(folder)) == 0
    spoil(folder)
    assert run("check", str(folder), "--engine=all") == 2
    assert run("check", str(folder), "--json") == 2
    assert run("convert", str(folder), str(out), "--to", "sglang==0.5.9", "--force", out=out) == 2
    assert not (tmp_path / "trap").exists()


# What would fill the memory or take for ever, were it believed: the file x, and the command.
DIGITS = b'{"head_dim": 1%s, "num_attention_heads": 1%s, "draft_vocab_size": 12}' % ((b"0" * 4000,) * 2)
EACH = {"requests": [{"prompt": 0, "counts": {"histogram": [1 << 24] * 60}}]}
STEPS = f"--launch=--speculative-num-steps={10**18}"
ENDLESS = {
    "depth 10^9": (b'{"num_hidden_layers": 1000000000, "fc_norm": true, "draft_vocab_size": 12}', "check few"),
    "sizes of 4000 digits": (DIGITS, "check few"),
    "a log without end": (b"", "check drafter --log /dev/zero"),
    "a pipe that nobody writes to": (b"", "check drafter --log pipe"),
    "options of 8 MB": (b"server_args=ServerArgs(a=[" + b"1," * 4_000_000 + b"])", "check drafter --log x"),
    "a line of 40 MB": (b"Decode batch, #" + b"a: " * (13 << 20), "check drafter --log x"),
    "metrics without end": (b"", "check drafter --train-metrics /dev/zero"),
    "many lines of metrics": (b"[]\n" * (2 << 20), "check drafter --train-metrics x"),
    "10^18 steps": (b"acc_0: 0.5", f"check drafter --train-metrics x {STEPS}"),
    "a command without end": (b"", "check drafter --launch @/dev/zero"),
    "observations without end": (b"", "search --observed /dev/zero"),
    "10^9 rounds": (json.dumps(EACH).encode(), "search --observed x"),
    "a wiring without end": (b"", "measure --wiring /dev/zero"),
}
CHILD = """
import json, resource, sys
from kitlib import checks, convert  # what they take is not counted
from kitlib.__main__ import main
if sys.argv[1] != "check":
    from kitlib import search
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the memory in use")
@pytest.mark.parametrize("case", ENDLESS)
def test_the_endless_ends_within_600_mb(tmp_path, case):
    data, argv = ENDLESS[case]
    folder, few = healthy(tmp_path), tmp_path / "few"
    few.mkdir()
    save(few, {name: t for name, t in tensors_of(folder).items() if name in ("fc.weight", "lm_head.weight")})
    (tmp_path / "x").write_bytes(data)
    (few / "config.json").write_bytes(data)
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", CHILD, *argv.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(os.devnull) as nothing:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=nothing, timeout=300
        )
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr and "crashed" not in done.stdout
    assert done.stderr.count("\n") == (done.returncode == 2) and (done.stdout or done.returncode == 2)


KILLED = """
import os, signal, sys
signal.signal({number}, signal.default_int_handler if {number} == signal.SIGINT else signal.SIG_DFL)  # nohup's are off
from kitlib import convert, __main__
real = convert.{place}
def stopped(*args):
    convert.{place} = real
    os.kill(os.getpid(), {number})
    return real(*args)
convert.{place} = stopped
sys.exit(__main__.main(["convert", "drafter", "out/new", "--to", "sglang==0.5.9"]))
"""


@pytest.mark.parametrize("place", ["_copy", "_save", "_checked"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 2)])
def test_a_conversion_that_is_stopped_anywhere_leaves_nothing(tmp_path, number, code, place):
    healthy(tmp_path)
    script = KILLED.format(place=place, number=int(number))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert os.listdir(tmp_path / "out") == []
