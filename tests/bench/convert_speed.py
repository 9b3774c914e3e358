"""`convert` against `cp` and against load-rename-save, on a Kimi-K2.5-sized drafter of random bytes.

    python tests/bench/convert_speed.py [FOLDER]     # needs 8 GB free in FOLDER (default: the temporary folder)

Every way ends with fsync and starts with the source in the page cache. Rounds are interleaved, so that a busy machine
slows all of them; compare ratios, not seconds. Writes data/verified/convert-speed.md; exit code 1 if a bound is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from verified import provenance  # noqa: E402

OUT = ROOT / "data" / "verified" / "convert-speed.md"
ROUNDS, AT_LEAST, AT_MOST = 3, 0.8, 200  # runs of each way; share of cp's throughput; MB of memory
H, V, VD, MLP, KV, Q = 7168, 163840, 65536, 18432, 896, 7168
CONFIG = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.5.0"}
CONFIG |= {"draft_vocab_size": VD, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
LAYER = {"model_type": "llama", "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": 64, "head_dim": 112}
LAYER |= {"num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "rope_theta": 5e4}
SHAPES = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H)}
SHAPES |= {f"layers.0.self_attn.{n}_proj.weight": (r, 2 * H) for n, r in (("q", Q), ("k", KV), ("v", KV))}
SHAPES |= {"layers.0.self_attn.o_proj.weight": (H, Q), "layers.0.mlp.down_proj.weight": (H, MLP)}
SHAPES |= {f"layers.0.mlp.{n}_proj.weight": (MLP, H) for n in ("gate", "up")}
SHAPES |= {f"layers.0.{n}.weight": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}

CHILD = """
import json, sys, time, os
source, out = sys.argv[1:]
{work}
with open("/proc/self/status") as status:  # getrusage would count what the parent held before exec
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))  # MB
print(json.dumps({{**seconds, "memory": peak, "torch": "torch" in sys.modules}}))
"""
CONVERT = """
from kitlib.convert import convert
seconds = convert(source, out, "sglang==0.5.9").extra["conversion"]["seconds"]
"""
LOAD_SAVE = """
from safetensors.torch import load_file, save_file
start = time.perf_counter()
tensors = load_file(source + "/model.safetensors")
renamed = {{name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}}
os.mkdir(out)
save_file(renamed, out + "/model.safetensors", metadata={{"format": "pt"}})
handle = os.open(out + "/model.safetensors", os.O_RDWR)
os.fsync(handle)
seconds = {{"write": time.perf_counter() - start}}
"""


def make(folder: Path) -> int:
    """Write the drafter and return the bytes of its file."""
    folder.mkdir()
    header, at = {"__metadata__": {"format": "pt"}}, 8 * VD
    header["d2t"] = {"dtype": "I64", "shape": [VD], "data_offsets": [0, at]}
    for name, shape in SHAPES.items():
        end = at + 2 * int(np.prod(shape))
        header[name], at = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}, end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    rng, left = np.random.default_rng(0), at - 8 * VD
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw + np.arange(VD, dtype="<i8").tobytes())  # target ids 0, 2, 4 …
        while left:
            left -= file.write(rng.bytes(min(left, 1 << 26)))
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "transformer_layer_config": LAYER, "speculators_config": {}})
    )
    return (folder / "model.safetensors").stat().st_size


def child(work: str, source: Path, out: Path) -> dict:
    command = [sys.executable, "-c", CHILD.format(work=work.format()), str(source), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def cp(source: Path, out: Path) -> dict:
    out.mkdir()
    start = time.perf_counter()
    file = out / "model.safetensors"
    subprocess.run(["cp", "--reflink=never", "--sparse=never", source / "model.safetensors", file], check=True)
    with open(file, "r+b") as handle:
        os.fsync(handle.fileno())
    return {"write": time.perf_counter() - start}


def main() -> int:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    if (free := shutil.disk_usage(place).free) < 8e9:
        sys.exit(f"{free / 1e9:.1f} GB are free; 8 GB are needed.")
    ways = {
        "cp": cp,
        "convert": lambda a, b: child(CONVERT, a, b),
        "load, rename, save": lambda a, b: child(LOAD_SAVE, a, b),
    }
    runs: dict[str, list[dict]] = {name: [] for name in ways}
    load = []
    with tempfile.TemporaryDirectory(dir=place, prefix="convert-speed-") as temporary:
        source, out = Path(temporary, "drafter"), Path(temporary, "out")
        size = make(source)
        for number in range(ROUNDS):
            for name, run in ways.items():
                os.sync()
                with open(source / "model.safetensors", "rb") as file:
                    while file.read(1 << 26):
                        pass
                load.append(os.getloadavg()[0])
                runs[name].append(run(source, out))
                print(number + 1, name, {k: round(v, 2) for k, v in runs[name][-1].items()}, flush=True)
                shutil.rmtree(out)

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[name])

    def row(way: str, name: str, phase: str) -> str:
        each = " · ".join(f"{run[phase]:.2f}" for run in runs[name])
        memory = f"{max(r['memory'] for r in runs[name]):.0f} MB" if "memory" in runs[name][0] else "–"
        middle = median(name, phase)
        share, speed = median("cp", "write") / middle, size / 1e6 / middle
        return f"| {way} | {each} | {middle:.2f} | {speed:.0f} | {share:.2f} | {memory} |"

    share, memory = median("cp", "write") / median("convert", "write"), max(r["memory"] for r in runs["convert"])
    good = share >= AT_LEAST and memory < AT_MOST and not any(r["torch"] for r in runs["convert"])
    kind = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True).stdout.strip()
    lines = "\n".join(provenance("python tests/bench/convert_speed.py"))
    text = f"""# Speed of `convert`

{lines}
File system {kind}. Load average while it ran: {min(load):.1f} to {max(load):.1f}; compare the shares, not
the seconds. One file of {size / 1e6:.0f} MB; source in the page cache; every way ended by fsync; {ROUNDS} interleaved
rounds; median. Memory is
the largest resident set of the process.

| way | seconds | median | MB/s | throughput / cp's | memory |
|---|---|---|---|---|---|
{row("`cp --reflink=never --sparse=never`, fsync", "cp", "write")}
{row("`convert`, writing phase", "convert", "write")}
{row("`convert`, verifying phase (both sides hashed)", "convert", "verify")}
{row("load, rename, save through safetensors.torch, fsync", "load, rename, save", "write")}

Bounds: the writing phase has at least {AT_LEAST} of cp's throughput ({share:.2f}), memory stays below {AT_MOST} MB
({memory:.0f} MB), torch is not imported: {"held" if good else "MISSED"}.
"""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(text)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
