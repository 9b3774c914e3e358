"""`check` on a Kimi-K2.5-sized drafter of random bytes, for a target of 1e12 parameters in 64 shards (index alone).

    python tests/bench/check_speed.py [FOLDER]     # needs 3 GB free in FOLDER (default: the temporary folder)

Wall time with Python's start, the peak of memory, and whether torch was imported. Writes data/verified/check-speed.md;
exit code 1 if a bound is missed. A busy machine is slower; the load stands in the table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convert_speed import H, V, make

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from verified import write_table  # noqa: E402

ROUNDS, SECONDS, MEGABYTES = 5, 1.0, 150
CHILD = """
import contextlib, io, json, sys
from kitlib.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
found = json.loads(out.getvalue())["findings"]
print(json.dumps({"code": code, "memory": peak, "torch": "torch" in sys.modules, "findings": len(found)}))
"""


def target(folder: Path) -> Path:
    """config.json and index of a model like Kimi-K2.5: 61 layers of 384 experts."""
    folder.mkdir()
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "hidden_size": H}
    config |= {"vocab_size": V, "num_hidden_layers": 61, "max_position_embeddings": 262144}
    names = [f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight" for i in range(61) for e in range(384)
             for p in ("gate", "up", "down")]  # fmt: skip
    names += ["model.embed_tokens.weight", "lm_head.weight"]
    shards = {n: f"model-{i * 64 // len(names) + 1:05}-of-00064.safetensors" for i, n in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as temporary:
        drafter, goal = Path(temporary) / "drafter", target(Path(temporary) / "target")
        size = make(drafter)
        rows, missed = [], False
        for name, more in (("one release", ["--engine", "sglang==0.5.20"]), ("29 releases", ["--engine", "all"])):
            told, seconds = {}, []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                command = [sys.executable, "-c", CHILD, "check", str(drafter), "--target", str(goal), "--json", *more]
                done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
                seconds.append(time.perf_counter() - began)
                told = json.loads(done.stdout)
            wall = statistics.median(seconds)
            rows.append((name, f"{wall:.2f}", f"{told['memory']:.0f}", told["torch"], told["findings"]))
            missed |= wall >= SECONDS or told["memory"] >= MEGABYTES or told["torch"]
    write_table(
        "check-speed", "Pre-flight of a drafter of Kimi-K2.5's size", "python tests/bench/check_speed.py",
        f"Drafter: one file of {size / 1e9:.2f} GB, random bytes. Target: config and index of 64 shards, 70,274 names. "
        f"Median of {ROUNDS} runs, Python's start included; the bounds are {SECONDS:g} s and {MEGABYTES} MB.",
        ("releases", "seconds", "peak MB", "torch imported", "findings"), rows,
    )  # fmt: skip
    print("\n".join(map(str, rows)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
