"""Conversion between dialects: what is written, what is refused, and that nothing else on the disk changes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import packed
from hypothesis import given, settings
from hypothesis import strategies as st

from kitlib import convert as module
from kitlib.checkpoint import INDEX, Checkpoint
from kitlib.checks import check
from kitlib.contract import Contract
from kitlib.convert import Form, convert, same_meaning
from kitlib.findings import KitError
from kitlib.paths import DATA, ROOT

LAB = DATA / "lab-drafter"
H, V, VD, IDS = 64, 96, 32, "eagle_aux_hidden_state_layer_ids"
SIZES = {"hidden_size": H, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
MAP = np.arange(VD) * 3  # target id of each draft id
SPEC = {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}}
CONFIGS = {  # how each trainer would describe the same drafter, trained on boundaries 2, 8, 13
    "midlayer.": {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "rope_theta": 5e5}
    | {"eagle_config": {IDS: [1, 7, 12], "use_aux_hidden_state": True, "extra": 1}},
    "layers.0.": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
    }
    | {"draft_vocab_size": VD, "norm_before_residual": False, IDS: [2, 8, 13], "speculators_config": SPEC}
    | {"transformer_layer_config": {**SIZES, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
    "model.layers.0.": {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, IDS: [1, 7, 12]}
    | {"rope_theta": 5e5},
}


def shapes(layer: str, layers: int = 1, states: int = 3) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape, under the names of one trainer."""
    outer = "model." if layer.startswith("model.") else ""
    found = {
        f"{outer}fc.weight": ("BF16", (H, states * H)),
        f"{outer}norm.weight": ("F32", (H,)),
        "lm_head.weight": ("BF16", (VD, H)),
    }
    for i in range(layers):
        name = layer if i == 0 else f"layers.{i}."
        width = H if i else 2 * H
        for part, rows in (("q", H), ("k", 32), ("v", 32)):
            found[f"{name}self_attn.{part}_proj.weight"] = ("BF16", (rows, width))
        found[f"{name}self_attn.o_proj.weight"] = ("BF16", (H, H))
        for part, shape in (("gate", (96, H)), ("up", (96, H)), ("down", (H, 96))):
            found[f"{name}mlp.{part}_proj.weight"] = ("BF16", shape)
        for part in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])):
            found[f"{name}{part}.weight"] = ("F32", (H,))
    return found


def normal(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Random finite values as F32 or BF16."""
    wide = rng.normal(0, 0.3, shape).astype("<f4")
    return wide.tobytes() if dtype == "F32" else (wide.view("<u4") >> 16).astype("<u2").tobytes()


def drafter(
    folder: Path,
    layer: str = "midlayer.",
    *,
    config: dict | None = None,
    d2t: np.ndarray | None = None,
    shards: int = 1,
    **kind,
) -> Path:
    """A drafter of random values in the dialect of `layer`; d2t holds offsets unless given."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    d2t = MAP - np.arange(VD) if d2t is None else d2t
    t2d = np.isin(np.arange(V), MAP)
    tensors = {n: (t, s, normal(rng, t, s)) for n, (t, s) in shapes(layer, **kind).items()}
    tensors |= {"d2t": ("I64", (VD,), d2t.astype("<i8").tobytes()), "t2d": ("BOOL", (V,), t2d.tobytes())}
    names, where = sorted(tensors), {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        header, data = {"__metadata__": {"format": "pt", "made": "by hand"}}, b""
        for name in names[i::shards]:
            dtype, shape, raw = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data, where[name] = data + raw, file
        (folder / file).write_bytes(packed(header, data))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIGS[layer] if config is None else config))
    return folder


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """What must not change: modification time and SHA-256 of every file."""
    files = {p.name: p for p in folder.iterdir()}
    return {n: (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for n, p in sorted(files.items())}


def contents(checkpoint: Checkpoint) -> dict[str, tuple]:
    """Canonical name -> dtype, shape and bytes."""
    found = {}
    for name, t in checkpoint.tensors.items():
        raw = t.file.read_bytes()[t.start : t.start + t.nbytes]
        found[checkpoint.canonical(name) or name] = (t.dtype, t.shape, raw)
    return found


@pytest.mark.parametrize("release", ["0.5.9", "0.5.20"])
def test_the_lab_drafter_is_clean_for_the_release_it_was_converted_to(tmp_path, release):
    before, engine = state(LAB), f"sglang=={release}"
    assert {f.code for f in check(LAB, engines=(engine,)).errors} >= {"K120"}
    report = convert(LAB, tmp_path / "out", engine)
    assert report.exit_code == 0 and not report.warnings
    assert not check(tmp_path / "out", engines=(engine,)).errors
    assert state(LAB) == before
    result = Checkpoint.open(tmp_path / "out")
    block = "midlayer." if release == "0.5.9" else "layers.0."
    assert sum(n.startswith(block) for n in result.tensors) == 10
    assert result.config["eagle_config"][IDS] == [1, 14, 26]  # boundaries 2, 15, 27 as layer-output ids
    assert contents(result) == contents(Checkpoint.open(LAB))


@pytest.mark.parametrize("to", ["sglang==0.5.9", "sglang==0.5.20", "vllm==0.20.0", "specforge", "speculators"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layer", CONFIGS)
def test_there_and_back_again_keeps_names_bytes_and_meaning(tmp_path, layer, shards, to):
    source = drafter(tmp_path / "in", layer, shards=shards)
    before = state(source)
    there = convert(source, tmp_path / "there", to)
    assert there.exit_code == 0, str(there)
    assert state(source) == before
    assert len(list((tmp_path / "there").glob("*.safetensors"))) == shards
    original, middle = Checkpoint.open(source), Checkpoint.open(tmp_path / "there")
    meant = Contract.of(original)
    assert contents(middle) == contents(original)
    assert set(middle.metadata.values().__iter__().__next__()) == {"format", "made"}
    assert there.extra["conversion"]["sha256"] == {
        n: hashlib.sha256(t.file.read_bytes()[t.start : t.start + t.nbytes]).hexdigest()
        for n, t in middle.tensors.items()
    }
    convert(tmp_path / "there", tmp_path / "back", "speculators" if layer == "layers.0." else "specforge")
    again = Checkpoint.open(tmp_path / "back")
    assert same_meaning(meant, Contract.of(again)) == {}
    if layer != "model.layers.0.":  # NeMo's own names are no target of a conversion
        assert list(again.tensors) == list(original.tensors)
    if layer == "layers.0.":
        assert again.config["speculators_config"] == SPEC and again.config["speculators_version"] == "0.9.0"


def test_ids_are_written_where_and_as_each_reader_reads_them(tmp_path):
    source = drafter(tmp_path / "in", "layers.0.")
    for to, place, ids in (
        ("sglang==0.5.9", "eagle_config", [1, 7, 12]),
        ("specforge", "eagle_config", [1, 7, 12]),
        ("vllm==0.20.0", "", [2, 8, 13]),
        ("speculators", "", [2, 8, 13]),
    ):
        convert(source, out := tmp_path / to, to)
        config = Checkpoint.open(out).config
        assert (config[place] if place else config)[IDS] == ids
        assert (IDS in config) == (not place)
    flat = Checkpoint.open(tmp_path / "vllm==0.20.0").config
    assert flat["architectures"] == ["Eagle3LlamaForCausalLM"] and flat["norm_before_residual"] is False
    assert flat["rope_theta"] == flat["rope_parameters"]["rope_theta"] == 5e5


def test_rope_scaling_is_spelled_for_both_generations_of_transformers(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = {**CONFIGS["midlayer."], "rope_scaling": scaling}
    source = drafter(tmp_path / "in", config=config)
    convert(source, tmp_path / "out", "sglang==0.5.20")
    new = Checkpoint.open(tmp_path / "out").config
    assert new["rope_scaling"] == scaling and new["rope_parameters"] == {**scaling, "rope_theta": 5e5}
    assert same_meaning(Contract.of(Checkpoint.open(source)), Contract.of(Checkpoint.open(tmp_path / "out"))) == {}


def test_absolute_d2t_becomes_offsets_and_everything_else_stays(tmp_path):
    source = drafter(tmp_path / "in", d2t=MAP)
    assert "K110" in {f.code for f in check(source, engines=("sglang==0.5.9",)).errors}
    report = convert(source, tmp_path / "out", "sglang==0.5.9")
    assert report.extra["conversion"]["rewritten"] == ["d2t"] and report.exit_code == 0
    old, new = contents(Checkpoint.open(source)), contents(Checkpoint.open(tmp_path / "out"))
    assert np.array_equal(Checkpoint.open(tmp_path / "out").read("d2t"), MAP - np.arange(VD))
    assert {n for n in old if old[n] != new[n]} == {"d2t"}


@pytest.mark.parametrize("d2t", [np.zeros(VD), np.full(VD, 5), MAP + 70])
def test_a_map_that_is_neither_is_refused(tmp_path, d2t):
    with pytest.raises(KitError, match="K110"):
        convert(drafter(tmp_path / "in", d2t=d2t), tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def speculators(**more) -> dict:
    return {**CONFIGS["layers.0."], **more}


TWO_LAYERS = speculators(
    transformer_layer_config={**CONFIGS["layers.0."]["transformer_layer_config"], "num_hidden_layers": 2}
)


@pytest.mark.parametrize(
    ("config", "kind", "to", "code", "says"),
    [
        (speculators(norm_before_residual=True), {}, "sglang==0.5.20", "K123", "no later release"),
        (speculators(norm_before_residual=True), {}, "vllm==0.10.0", "K123", "--to vllm==0.13.0"),
        (speculators(norm_before_residual=True), {}, "specforge", "K123", "cannot do norm_before_residual"),
        (speculators(norm_output=True), {}, "sglang==0.5.9", "K123", "--to sglang==0.5.12"),
        (speculators(norm_output=True), {}, "vllm==0.20.0", "K123", "0.22.1"),
        (TWO_LAYERS, {"layers": 2}, "sglang==0.5.9", "K120", "builds exactly one"),
        (TWO_LAYERS, {"layers": 2}, "specforge", "K120", "several layers"),
        (speculators(**{IDS: [2, 5, 8, 13]}), {"states": 4}, "sglang==0.5.9", "K106", "0.5.12"),
        (speculators(**{IDS: [2, 5, 8, 13]}), {"states": 4}, "vllm==0.20.0", "K106", "0.22.1"),
        (speculators(), {}, "sglang==0.4.6", "K132", "layer ids"),
        (speculators(), {}, "vllm==0.11.0", "K132", "0.13"),
        (speculators(**{IDS: [0, 8, 13]}), {}, "sglang==0.5.9", "K132", "boundaries None"),
        (speculators(draft_vocab_size=VD + 1), {}, "sglang==0.5.9", "K106", "repair the source"),
    ],
)
def test_what_the_reader_cannot_express_is_refused_unless_forced(tmp_path, config, kind, to, code, says):
    source = drafter(tmp_path / "in", "layers.0.", config=config, **kind)
    with pytest.raises(KitError, match=code) as refused:
        convert(source, tmp_path / "out", to)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["in"]
    report = convert(source, tmp_path / "out", to, force=True)
    assert report.exit_code == 1 and code in {f.code for f in report.errors}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_the_last_layer_is_out_of_reach_for_most_targets(tmp_path, architecture):
    target = tmp_path / "config.json"
    sizes = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 13, "architectures": [architecture]}
    target.write_text(json.dumps(sizes))
    source = drafter(tmp_path / "in", "layers.0.")
    if architecture == "Gemma3ForCausalLM":
        assert convert(source, tmp_path / "out", "sglang==0.5.12", target=target).exit_code == 0
        return
    with pytest.raises(KitError, match=r"K132 .* cannot do the state after the last layer"):
        convert(source, tmp_path / "out", "sglang==0.5.12", target=target)


def test_ids_that_equal_the_default_suit_a_release_that_reads_none(tmp_path, monkeypatch):
    target = tmp_path / "config.json"
    target.write_text(json.dumps({"hidden_size": H, "vocab_size": V, "num_hidden_layers": 16}))  # default: 2, 8, 13
    whole = {**shapes("midlayer."), "fc.bias": ("BF16", (H,))}  # releases before 0.4.9 build fc with a bias
    monkeypatch.setitem(globals(), "shapes", lambda *_args, **_kind: whole)
    assert convert(drafter(tmp_path / "in"), tmp_path / "out", "sglang==0.4.6", target=target).exit_code == 0


def test_what_no_tensor_fills_is_refused_before_anything_is_copied(tmp_path, monkeypatch):
    whole = {n: s for n, s in shapes("midlayer.").items() if n != "midlayer.mlp.up_proj.weight"}
    monkeypatch.setitem(globals(), "shapes", lambda *_args, **_kind: whole)
    phases = []
    with pytest.raises(KitError, match=r"K103 .*layers\.0\.mlp\.up_proj"):
        convert(drafter(tmp_path / "in"), tmp_path / "out", progress=lambda *now: phases.append(now))
    assert not phases and os.listdir(tmp_path) == ["in"]


def test_a_trained_tensor_that_would_be_dropped_is_refused(tmp_path, monkeypatch):
    whole = {**shapes("midlayer."), "midlayer.self_attn.q_norm.weight": ("BF16", (16,))}
    monkeypatch.setitem(globals(), "shapes", lambda *_args, **_kind: whole)
    with pytest.raises(KitError, match=r"K104 .*layers\.0\.self_attn\.q_norm"):
        convert(drafter(tmp_path / "in"), tmp_path / "out", "sglang==0.5.20")


def test_later_layers_get_the_norm_their_reader_runs(tmp_path):
    source = drafter(tmp_path / "in", "layers.0.", config=TWO_LAYERS, layers=2)
    report = convert(source, tmp_path / "out", "sglang==0.5.20")
    renamed = report.extra["conversion"]["renamed"]
    assert renamed == {"layers.1.input_layernorm.weight": "layers.1.hidden_norm.weight"} and report.exit_code == 0
    convert(tmp_path / "out", tmp_path / "back", "speculators")
    assert list(Checkpoint.open(tmp_path / "back").tensors) == list(Checkpoint.open(source).tensors)


def test_boundaries_that_were_never_stored_stay_a_warning(tmp_path):
    config = {k: v for k, v in speculators(speculators_version="0.3.0").items() if k != IDS}
    report = convert(drafter(tmp_path / "in", "layers.0.", config=config), tmp_path / "out", "sglang==0.5.9")
    assert report.exit_code == 0 and [f.code for f in report.warnings] == ["K132"]
    assert IDS not in Checkpoint.open(tmp_path / "out").config["eagle_config"]


def test_two_tensors_with_one_new_name_are_refused(tmp_path):
    folder = drafter(tmp_path / "in")
    header = {"__metadata__": {"format": "pt"}}
    for i, name in enumerate(("norm.weight", "model.norm.weight", "fc.weight")):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
    (folder / "model.safetensors").write_bytes(packed(header, bytes(12)))
    with pytest.raises(KitError, match=r"would all be called norm\.weight"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("sglang>=0.5.6,<=0.5.9", "4 releases"),
        ("sglang==0.1", "older"),
        ("vllm==0.9", "older"),
        ("vllm>=0.11", "10 releases"),
        ("trtllm", "Cannot convert to"),
        ("specforge==1", "Cannot convert to"),
    ],
)
def test_an_unclear_reader_is_refused(to, says):
    with pytest.raises(KitError, match=says):
        Form.of(to)


def test_nothing_is_overwritten_and_nothing_written_inside_the_source(tmp_path):
    source = drafter(tmp_path / "in")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(source)
    for out, says in (
        *((tmp_path / name, "exists and is never overwritten") for name in ("in", "file", "empty", "dangling")),
        (source / "out", "lies inside the checkpoint"),
        (tmp_path / "link" / "out", "lies inside the checkpoint"),
        (tmp_path / "no" / "out", "is no folder"),
    ):
        with pytest.raises(KitError, match=says):
            convert(source, out)
    with pytest.raises(KitError, match="lies inside the checkpoint"):  # the file alone is named, its folder is meant
        convert(source / "model.safetensors", source / "out")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "empty", "file", "in", "link"]
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]
    with pytest.raises(KitError, match=r"no config\.json"):
        (source / "config.json").unlink()
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("call", ["copy_file_range", "pwrite", "fsync", "rename"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, call):
    source = drafter(tmp_path / "in", shards=2)
    before = state(source)

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(KitError, match="No space left on device"):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"] and state(source) == before


@pytest.mark.parametrize("phase", ["write", "verify"])
def test_an_interruption_leaves_nothing_behind(tmp_path, phase):
    def stop(now, done, total):
        assert 0 < done <= total
        if now == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(drafter(tmp_path / "in"), tmp_path / "out", progress=stop)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_one_sentence(tmp_path):
    source = drafter(tmp_path / "in")
    (place := tmp_path / "place").mkdir(mode=0o500)
    with pytest.raises(KitError, match="Permission denied"):
        convert(source, place / "out")


def test_a_place_that_refuses_a_folder_is_one_sentence(tmp_path):
    with pytest.raises(KitError, match="Cannot write /proc/out"):
        convert(drafter(tmp_path / "in"), "/proc/out")


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EOPNOTSUPP, None])
def test_bytes_are_the_same_where_the_kernel_cannot_copy(tmp_path, monkeypatch, error):
    def refuse(*_args):
        if error is None:  # some file systems copy nothing and say so
            return 0
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = drafter(tmp_path / "in")
    convert(source, tmp_path / "out", "sglang==0.5.9")
    assert contents(Checkpoint.open(tmp_path / "out")) == contents(Checkpoint.open(source))


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    source = drafter(tmp_path / "in")

    def change(phase, done, total):
        if phase == "write" and done == total:
            with open(source / "model.safetensors", "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x05")

    with pytest.raises(KitError, match="t2d is not as in"):
        convert(source, tmp_path / "out", progress=change)
    assert os.listdir(tmp_path) == ["in"]


def test_a_hostile_index_is_refused_before_anything_is_written(tmp_path):
    source = drafter(tmp_path / "in", shards=2)
    listed = json.loads((source / INDEX).read_text())
    listed["weight_map"]["d2t"] = "../../model.safetensors"
    (source / INDEX).write_text(json.dumps(listed))
    with pytest.raises(KitError, match="is not followed"):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_the_result_opens_in_the_safetensors_library_and_shares_pages_with_the_source(tmp_path):
    from safetensors import safe_open

    source = drafter(tmp_path / "in")
    convert(source, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert "midlayer.mlp.down_proj.weight" in file.keys()  # noqa: SIM118 (not a dict)
        assert file.metadata() == {"format": "pt", "made": "by hand"}
    old, new = (Checkpoint.open(tmp_path / d).tensors["d2t"].start for d in ("in", "out"))
    assert old % 8 or old % 4096 == new % 4096


PLACES = [(k,) for k in CONFIGS["midlayer."]] + [
    ("eagle_config", IDS),
    ("eagle_config", "use_aux_hidden_state"),
    ("kitlib",),
]
PLACES += [("rope_parameters",), ("rope_scaling",), (IDS,), ("transformer_layer_config",), ("speculators_config",)]
PLACES += [("target_hidden_size",), ("norm_before_residual",), ("norm_before_fc",), ("fc_norm",), ("kitlib", "kept")]
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ODD = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["kept", "type", "x"]), inner)
)


@settings(max_examples=60, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    value=ODD,
    to=st.sampled_from(["sglang==0.5.9", "sglang==0.5.20", "vllm", "speculators"]),
)
def test_an_odd_config_is_a_sentence_or_a_finding(place, value, to):
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(json.dumps(CONFIGS["midlayer."]))
        inner = config
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = value
        source = drafter(Path(folder, "in"), config=config)
        try:
            convert(source, Path(folder, "out"), to)
        except KitError as error:
            assert "\n" not in str(error)
            assert os.listdir(folder) == ["in"]


def test_the_drafters_own_embedding_is_a_warning_where_the_target_s_is_used(tmp_path, monkeypatch):
    whole = {**shapes("layers.0."), "embed_tokens.weight": ("BF16", (V, H))}
    monkeypatch.setitem(globals(), "shapes", lambda *_args, **_kind: whole)
    report = convert(drafter(tmp_path / "in", "layers.0."), tmp_path / "out", "sglang==0.5.9")
    assert report.exit_code == 0 and "K111" in {f.code for f in report.warnings}


def test_conversion_imports_no_torch():
    code = "import sys, kitlib.convert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_killed_conversion_leaves_nothing(tmp_path):
    source = drafter(tmp_path / "in")
    code = f"""
import os, signal, sys
from kitlib import convert, __main__
real = convert._hashes
convert._hashes = lambda *a: (os.kill(os.getpid(), signal.SIGTERM), real(*a))[1]
sys.exit(__main__.main(["convert", {str(source)!r}, {str(tmp_path / "out")!r}, "--to", "sglang==0.5.9"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143 and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["in"]
