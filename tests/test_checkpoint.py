"""Sound checkpoints are read exactly, whoever wrote them, and no further than asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import one, packed, sharded
from safetensors.numpy import load_file, save_file

from kitlib.checkpoint import INDEX, Checkpoint, canonical, prefix_of
from kitlib.findings import KitError

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
LAYER += ("mlp.up_proj", "mlp.down_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm")


def named(layer: str, top: str = "", rest: tuple[str, ...] = ("fc", "norm", "lm_head")) -> list[str]:
    return [f"{top}{layer}.{part}.weight" for part in LAYER] + [f"{top}{part}.weight" for part in rest]


# ---- sound checkpoints


def test_directory_file_and_shards_give_the_same_tensors(tmp_path):
    folder = sharded(tmp_path / "s")
    single = tmp_path / "one"
    single.mkdir()
    save_file({n: np.arange(4, dtype=np.float32) for n in "ab"}, single / "x.safetensors", {"format": "pt"})
    (single / "config.json").write_text('{"hidden_size": 8, "rope_scaling": null}')
    opened = [Checkpoint.open(p) for p in (folder, folder / INDEX, single, str(single / "x.safetensors"))]
    for checkpoint in opened:
        assert sorted(checkpoint.tensors) == ["a", "b"]
        assert checkpoint.read("b").tolist() == [0, 1, 2, 3]
    assert [len(c.files) for c in opened] == [2, 2, 1, 1]
    assert opened[0].config == {} and opened[0].config_path is None
    assert opened[2].config == opened[3].config == {"hidden_size": 8, "rope_scaling": None}
    assert opened[2].path == single and opened[2].metadata[single / "x.safetensors"] == {"format": "pt"}


@pytest.mark.parametrize("code", ["?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "f8", "i8", "u8", "c8"])
def test_every_plain_dtype_reads_as_the_library_reads_it(tmp_path, code):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (7, 3, 16), dtype=np.uint8)
    values = values.view(code) if code != "?" else values > 127
    file = tmp_path / "m.safetensors"
    save_file({"pad": np.zeros(3, np.uint8), "x": values, "scalar": values[0, 0, :1].copy().reshape(())}, file)
    checkpoint, reference = Checkpoint.open(file), load_file(file)
    for name, value in reference.items():
        assert checkpoint.read(name).dtype == value.dtype and checkpoint.read(name).shape == value.shape
        assert checkpoint.read(name).tobytes() == value.tobytes()
        info = checkpoint.tensors[name]
        assert file.read_bytes()[info.start : info.start + info.nbytes] == value.tobytes()
    for rows in (slice(2, 5), slice(None, None, 3), slice(-2, None), slice(5, 2), slice(0, 99)):
        assert checkpoint.read("x", rows).tobytes() == values[rows].tobytes()
        assert checkpoint.read("x", rows).shape == values[rows].shape


def test_bf16_is_widened_exactly(tmp_path):
    file = tmp_path / "m.safetensors"
    floats = np.array([0, 1, -2.5, 3.140625, 1e38, -np.inf, np.nan, 2.0**-130], np.float32)
    halves = (floats.view(np.uint32) >> 16).astype("<u2")
    file.write_bytes(one("BF16", [2, 4], [0, 16], halves.tobytes()))
    got = Checkpoint.open(file).read("t")
    assert got.dtype == np.float32 and got.shape == (2, 4)
    assert np.array_equal(got.reshape(-1).view(np.uint32), halves.astype(np.uint32) << 16)


@pytest.mark.parametrize("dtype, shape", [("F8_E4M3", [4]), ("F4", [8]), ("F6_E2M3", [4]), ("Q9_NEW", [7, 7])])
def test_packed_and_unknown_dtypes_are_listed_but_not_decoded(tmp_path, dtype, shape):
    nbytes = 3 if dtype == "F6_E2M3" else 4
    (tmp_path / "m.safetensors").write_bytes(one(dtype, shape, [0, nbytes], b"1234"[:nbytes]))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors["t"].dtype == dtype and checkpoint.tensors["t"].shape == tuple(shape)
    for ask in (checkpoint.read, checkpoint.sample):
        with pytest.raises(KitError, match=f"{dtype}.*does not decode"):
            ask("t")


def test_sample_is_spread_evenly_and_bounded(tmp_path, monkeypatch):
    values = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
    save_file({"x": values, "small": values[0]}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.sample("small").tolist() == values[0].tolist()
    sample = checkpoint.sample("x")
    assert sample.nbytes == 65536 and sample[0] == 0 and sample[-1] == values[-1, -1]  # both ends are seen
    gaps = np.diff(sample)
    jumps = gaps[gaps != 1]
    assert len(jumps) == 15 and jumps.max() - jumps.min() <= 1  # 16 blocks, equally far apart
    for limit in (4, 10, 4095, 4097, 9000):
        assert 0 < checkpoint.sample("x", limit).nbytes <= limit
    with pytest.raises(KitError, match="allow at least 4"):
        checkpoint.sample("x", 3)


def test_bad_requests_are_kit_errors(tmp_path):
    save_file({"x": np.zeros((2, 2), np.float32), "scalar": np.zeros((), np.float32)}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for name, rows in (("absent", None), ("scalar", slice(0, 1)), ("x", slice(None, None, -1))):
        with pytest.raises(KitError, match=name):
            checkpoint.read(name, rows)


def test_empty_tensors_and_any_order_of_offsets_are_sound(tmp_path):
    header = {"z": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}
    header["e"] = {"dtype": "F32", "shape": [0, 9], "data_offsets": [2, 2]}
    header["a"] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    (tmp_path / "m.safetensors").write_bytes(packed(header, b"abcd"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("z").tobytes() == b"cd" and checkpoint.read("e").shape == (0, 9)
    assert checkpoint.read("e", slice(0, 3)).shape == (0, 9)


def test_hub_cache_links_into_its_own_blobs_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--o--n/snapshots/abc", tmp_path / "models--o--n/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    sharded(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert sorted(Checkpoint.open(snapshot).tensors) == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes a process reads")
def test_opening_a_large_drafter_reads_only_its_header(tmp_path):
    """3 GB on paper (a sparse file); the bytes really read are counted by the kernel."""
    shape = [163840, 9216]
    nbytes = 2 * shape[0] * shape[1]
    file = tmp_path / "m.safetensors"
    header = packed({"lm_head.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, nbytes]}})
    with open(file, "wb") as handle:
        handle.write(header)
        handle.truncate(len(header) + nbytes)
    code = (
        "import sys; from pathlib import Path; from kitlib.checkpoint import Checkpoint\n"
        "def count(): return int(Path('/proc/self/io').read_text().split()[1])\n"
        "before = count(); c = Checkpoint.open(sys.argv[1]); opened = count() - before\n"
        "c.sample('lm_head.weight'); print(opened, count() - before - opened, 'torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, file], cwd=root, capture_output=True, text=True, check=True)
    opened, sampled, torch = done.stdout.split()
    assert int(opened) < 10_000 and int(sampled) < 80_000 and torch == "False"


# ---- names


@pytest.mark.parametrize(
    "names, dialect",
    [
        ([*named("midlayer"), "d2t", "t2d"], "midlayer"),
        (named("midlayer.0") + named("midlayer.1", rest=()), "midlayer"),
        (named("midlayer", "model."), "midlayer"),
        ([*named("layers.0"), "embed_tokens.weight"], "layers.0"),
        (named("layers.0", "draft_model."), "layers.0"),
        (named("layers.0", "module."), "layers.0"),
        (named("layers.0", "model."), "model.layers.0"),
        (named("layers.0", "model.model."), "model.layers.0"),
        ([*named("layers.0"), "layers.0.self_attn.q_a_proj.weight"], "mla"),
        ([*named("midlayer"), "midlayer.self_attn.kv_a_proj_with_mqa.weight"], "mla"),
        (["encoder.weight", "midlayers.weight", "fc.weight"], "unknown"),
    ],
)
def test_dialects(tmp_path, names, dialect):
    save_file({name: np.zeros((2, 6), np.float32) for name in names}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dialect == dialect
    known = [n for n in names if canonical(n)]
    assert len({canonical(n) for n in known}) == len(known) and checkpoint.canonical(known[0]) == canonical(known[0])


def test_eagle_1_is_told_by_its_fc(tmp_path):
    names = [name for name in named("layers.0", rest=("fc", "embed_tokens")) if "hidden_norm" not in name]
    shapes = {name: (4, 8) if name == "fc.weight" else (4,) for name in names}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "m.safetensors")
    assert Checkpoint.open(tmp_path).dialect == "eagle-1"
    shapes["layers.0.hidden_norm.weight"] = (4,)  # an EAGLE-3 drafter of two states
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "m.safetensors")
    assert Checkpoint.open(tmp_path).dialect == "layers.0"


@pytest.mark.parametrize(
    "name, known, prefix",
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", ""),
        ("midlayer.2.hidden_norm.weight", "layers.2.hidden_norm.weight", ""),
        ("layers.1.mlp.up_proj.bias", "layers.1.mlp.up_proj.bias", ""),
        ("model.layers.0.self_attn.k_norm.weight", "layers.0.self_attn.k_norm.weight", "model."),
        ("model.model.norm.weight", "norm.weight", "model.model."),
        ("draft_model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", "draft_model."),
        ("module.d2t", "d2t", "module."),
        ("transformer.fc.weight", "fc.weight", "transformer."),
        ("eagle.lm_head.weight", "lm_head.weight", "eagle."),
        ("aux_norm_high.weight", "fc_norm.2.weight", ""),
        ("fc_norm.0.weight", "fc_norm.0.weight", ""),
        ("model.input_norm.weight", "input_norm.weight", "model."),
        ("layers.0.self_attn.kv_a_layernorm.weight", "layers.0.self_attn.kv_a_layernorm.weight", ""),
        ("layers.0.mlp.gate_proj.weight_scale", "layers.0.mlp.gate_proj.weight_scale", ""),
        ("verifier_lm_head.weight", None, ""),
        ("layers.0.self_attn.rotary_emb.inv_freq", None, ""),
        ("layers.0.mlp.experts.3.up_proj.weight", None, ""),
        ("models.fc.weight", None, ""),
        ("fc.weight\n", None, ""),
        ("", None, ""),
    ],
)
def test_canonical_names_and_prefixes(name, known, prefix):
    assert canonical(name) == known and prefix_of(name) == prefix
