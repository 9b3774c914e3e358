"""Random changes to what the kit reads: JSON, configs, tensors, bytes and command lines."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

from checkpoint_files import packed

from kitlib.checkpoint import INDEX, Checkpoint
from kitlib.contract.dialects import PLACES

NUMBERS = (0, 1, -1, 3, 7, 128, 2**31, 2**63, 10**18, 10**20, -(10**40), 10**400)
NUMBERS += (0.5, -2.5, 32.0, 1e300, 5e-324, True, False, None)
TEXTS = ("", " ", "0", "32", "1e3", "a\nb\x1b[2J", "\ud800", "é" * 40, "x" * 100_000, "../../x", "/etc/passwd", "NaN")
NESTED = ([], {}, [[]], [{}], [None], ["a"], [1, 2, 3], [-1, 10**30, 2], [2.0, 3], [1] * 500, [10**400])
NESTED += ({"": 1}, {"type": []}, {"rope_type": {}, "factor": [1]}, {"a": {"b": [1]}}, {"rope_theta": "1e4", "type": 1})
ENDLESS = (float("nan"), float("inf"), -float("inf"))  # JSON has none, Python writes them
VALUES = (*NUMBERS, *TEXTS, *NESTED)
NAMES = ["fc.weight", "fc.bias", "lm_head.weight", "d2t", "t2d", "norm.weight", "embed_tokens.weight", "x", "", "\n"]
NAMES += ["layers.1.hidden_norm.weight", f"layers.{'9' * 30}.mlp.up_proj.weight", "midlayer.3.hidden_norm.weight"]
NAMES += ["layers.0.self_attn.kv_a_proj_with_mqa.weight", "layers.0.self_attn.o_proj.bias", "fc_norm.7.weight"]
NAMES += ["model.model.input_norm.weight", "y" * 5000, f"layers.{'1' * 5000}.mlp.up_proj.weight", "a d2t b", "\ud7ff"]
KEYS = [p for places in PLACES.values() for p in places] + ["rope_parameters.rope_type", "rope_scaling.factor"]
KEYS += ["architectures", "quantization_config", "initializer_range", "bias", "attention_bias", "kitlib.kept"]
KEYS += ["transformer_layer_config", "eagle_config", "rope_theta", "rope_parameters", "rope_scaling", "model_type"]
KEYS += ["speculators_config", "text_config", "partial_rotary_factor", "kitlib.kept.eagle_config", "auto_map"]
KEYS += ["rope_parameters.partial_rotary_factor", "rope_scaling.original_max_position_embeddings", "kitlib", "dtype"]
WORDS = ["--speculative-num-steps", "--speculative-eagle-topk=4", "--context-length", "--speculative-algorithm"]
WORDS += ["EAGLE", "--speculative-config", "{}", '{"model": [1], "method": {}}', "vllm", "serve", "-m", "--", "1e9"]
WORDS += ["sglang.launch_server", "SGLANG_SIMULATE_ACC_LEN=x", "A=", "--quantization", "--=", "--model-path", "&&"]
WORDS += ["#", "--tp", "--x=\ud800", "-", "9" * 5000, "/", "..", "~", "--speculative-draft-model-path"]
LETTERS = ["'", '"', "\\", "\n", "\\\n", "$", ";", "\0", " ", "=", "{", "}", "#", "\x1b[2J", "\ud800", "x" * 100_000]
FIT = {
    1: ["U8", "I8", "BOOL", "F8_E4M3"],
    2: ["F16", "BF16", "I16"],
    4: ["F32", "I32", "U32"],
    8: ["F64", "I64", "C64"],
}
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, data


def some_value(rng: random.Random) -> object:
    return rng.choice(ENDLESS if rng.random() < 0.02 else VALUES)


def changed(value: object, rng: random.Random) -> object:
    """JSON with one place of it, any as likely as any other, replaced, wrapped, dropped, renamed or doubled."""
    copy, places = json.loads(json.dumps(value)), []
    todo = [copy] if isinstance(copy, (dict, list)) else []
    while todo:
        here = todo.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        places += [(here, key) for key in keys]
        todo += [here[key] for key in keys if isinstance(here[key], (dict, list))]
    if not places or rng.random() < 0.02:
        return some_value(rng)
    here, key = rng.choice(places)
    kind = rng.choice(["replace", "replace", "replace", "drop", "rename", "wrap"])
    if kind == "replace":
        here[key] = some_value(rng)
    elif kind == "wrap":
        here[key] = rng.choice([[here[key]], {"a": here[key]}, str(here[key])])
    elif kind == "drop":
        del here[key]
    elif isinstance(here, dict):
        here[rng.choice([*here, "hidden_size", "", "a\nb"])] = here.pop(key)
    else:
        here.append(here[key])
    return copy


def known_key(config: object, rng: random.Random) -> object:
    """The config with some odd value in a field that the kit reads."""
    config = json.loads(json.dumps(config))
    if not isinstance(config, dict):
        return config
    *folders, last = rng.choice(KEYS).split(".")
    here = config
    for name in folders:
        here[name] = here[name] if isinstance(here.get(name), dict) else {}
        here = here[name]
    here[last] = some_value(rng)
    return config


def tensors_of(folder: Path) -> Tensors:
    found = {}
    for name, t in Checkpoint.open(folder).tensors.items():
        found[name] = (t.dtype, list(t.shape), t.file.read_bytes()[t.start : t.start + t.nbytes])
    return found


def other_tensors(tensors: Tensors, rng: random.Random) -> Tensors:
    """One tensor of another name, shape, type or content, or absent: still a sound file."""
    tensors = dict(tensors)
    name = rng.choice(sorted(tensors))
    dtype, shape, data = tensors.pop(name)
    kind = rng.choice(["drop", "rename", "shape", "dtype", "fill", "twice", "few"])
    if kind == "few":
        tensors = dict(rng.sample(sorted(tensors.items()), min(3, len(tensors))))
    if kind == "shape":
        n = math.prod(shape)
        shape = rng.choice([[n], [1, n], [n, 1], [1] * 20 + [n], shape[::-1], [n // 4, 4] if n % 4 == 0 else [n]])
        shape, data = rng.choice([(shape, data), (shape, data), ([0], b""), ([0, 2**40], b""), ([5, 0], b"")])
    if kind == "dtype":
        dtype = rng.choice(FIT[len(data) // math.prod(shape)]) if data else rng.choice(FIT[8])
    if kind == "fill":
        data = rng.choice([b"\0", b"\xff", b"\x7f", b"\x01"]) * len(data)
    if kind != "drop":
        tensors[rng.choice(NAMES) if kind == "rename" else name] = (dtype, shape, data)
    if kind == "twice":
        tensors[rng.choice(NAMES)] = (dtype, shape, data)
    return tensors


def save(folder: Path, tensors: Tensors, shards: int = 1, odd: Callable = lambda header: header, **more) -> None:
    """A checkpoint of one file, or of several and their index; `odd` changes each header."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    where: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i}.safetensors" if shards > 1 else "model.safetensors"
        header, whole = {}, b""
        for name in sorted(tensors)[i::shards]:
            dtype, shape, data = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(whole), len(whole) + len(data)]}
            whole, where[name] = whole + data, file
        (folder / file).write_bytes(packed(odd(header), whole, **more))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def write_tensors(folder: Path, tensors: Tensors, rng: random.Random) -> None:
    """`save`; now and then a header, its declared length or the index is changed as well."""
    odd = (lambda header: changed(header, rng)) if rng.random() < 0.1 else lambda header: header
    length = rng.choice([0, 8, 2**63, 100 * 2**30]) if rng.random() < 0.05 else None
    save(folder, tensors, rng.choice([1, 1, 2]), odd, length=length)
    if (folder / INDEX).exists() and rng.random() < 0.3:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(changed(index, rng)))


def other_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, cut out, put in or cut off."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(data) + 1)
        kind = rng.choice(["flip", "flip", "insert", "cut", "end"])
        if kind == "flip":
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == "insert":
            data[at:at] = rng.choice([b"\xff\xfe", b"\xc3(", b"\0" * 9, b"[" * 5000, b'"', b"NaN", b"9" * 30, b"1e999"])
        else:
            del data[at : at + (rng.choice([1, 8, 100]) if kind == "cut" else len(data))]
    return bytes(data)


def other_command(text: str, rng: random.Random) -> str:
    """A launch line with words changed, dropped or put in, letters put in, or its JSON changed."""
    for _ in range(rng.choice([1, 2, 4])):
        kind = rng.choice(["word", "word", "drop", "put", "letter", "json", "cut"])
        words = text.split(" ")
        at = rng.randrange(len(words))
        if kind == "json" and (found := re.search(r"\{.*\}", text, re.DOTALL)):
            with contextlib.suppress(ValueError):
                text = text.replace(found[0], json.dumps(changed(json.loads(found[0]), rng)))
        elif kind == "letter":
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(LETTERS) + text[place:]
        elif kind == "cut":
            text = text[: rng.randrange(len(text) + 1)]
        elif kind == "drop":
            text = " ".join(words[:at] + words[at + 1 :])
        else:
            words[at : at + (kind == "word")] = [rng.choice(WORDS)]
            text = " ".join(words)
    return text
