"""The CPU engine under the names SGLang imports, in a process of its own: what is there, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from cpu_engine_kernels import PATH, process

IN_PROCESS = """
import inspect, json, os, torch

def error(do):
    try:
        do()
    except Exception as e:
        return [type(e).__name__, str(e), isinstance(e, NotImplementedError)]
    return None

os.environ.pop("KITLIB_CPU_AMX", None)
import torchvision
from torchvision.io import decode_jpeg
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
import sgl_kernel, triton, triton.language as tl, kitlib_amx
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
import triton.runtime.jit

@triton.autotune(configs=[triton.Config({})], key=[])
@triton.jit
def kernel(x: tl.constexpr):
    pass

@triton.jit(do_not_specialize=["x"])
def other(x):
    pass

amx = {"default": torch.cpu._is_amx_tile_supported()}
for setting in ("0", "1"):
    os.environ["KITLIB_CPU_AMX"] = setting
    kitlib_amx.answer()
    amx[setting] = torch.cpu._is_amx_tile_supported()
os.environ["KITLIB_CPU_AMX"] = "maybe"

ops = torch.ops.sgl_kernel
signatures = {}
for schema, module in sgl_kernel.OPS.items():
    name = schema.partition("(")[0]
    arguments = [a.name for a in getattr(ops, name).default._schema.arguments]
    signatures[name] = [arguments, list(inspect.signature(getattr(module, name)).parameters)]
x, r, w = torch.ones(2, 4), torch.ones(2, 4), torch.ones(4)
ops.fused_add_rmsnorm_cpu(x, r, w, 0.0)
print(json.dumps({
    "amx": amx,
    "signatures": signatures,
    "fused": [x.tolist(), r.tolist()],
    "threads": ops.init_cpu_threads_env("0"),
    "probe": [hasattr(ops, "convert_weight_packed"), hasattr(ops, "fused_qk_norm_cpu")],
    "numbers": [triton.cdiv(7, 2), *map(triton.next_power_of_2, (1, 5, 8)), tl.constexpr(3).value],
    "errors": {
        "op": error(lambda: ops.fused_experts_cpu(x)),
        "overload": error(lambda: ops.murmur_hash32_cpu.default(x)),
        "bound op": error(lambda: ops.flash_attn_varlen_func(x)),
        "function": error(lambda: sgl_kernel.top_k_renorm_prob),
        "image": error(lambda: decode_jpeg(b"")),
        "transform": error(lambda: torchvision.transforms.Resize(3)),
        "functional": error(lambda: functional.resize(x)),
        "launch": error(lambda: kernel[(1,)](x)),
        "call": error(lambda: other(x)),
        "language": error(lambda: tl.load(x)),
        "amx": error(kitlib_amx.answer),
    },
}))
"""


@pytest.fixture(scope="module")
def real_names() -> dict:
    env = os.environ | {"PYTHONPATH": str(PATH), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ops_are_registered_with_the_functions_own_arguments(real_names):
    assert len(real_names["signatures"]) == 11
    for name, (schema, function) in real_names["signatures"].items():
        assert schema == function, name
    assert real_names["fused"] == [
        [[1.0] * 4] * 2,
        [[2.0] * 4] * 2,
    ]  # written in place through the dispatcher
    assert real_names["threads"].startswith("kitlib CPU engine: 1 threads")


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("op", "torch.ops.sgl_kernel.fused_experts_cpu"),
        ("overload", "torch.ops.sgl_kernel.murmur_hash32_cpu"),
        ("bound op", "torch.ops.sgl_kernel.flash_attn_varlen_func"),
        ("function", "sgl_kernel.top_k_renorm_prob"),
        ("image", "torchvision.io.decode_jpeg"),
        ("transform", "torchvision.transforms.Resize"),
        ("functional", "torchvision.transforms.v2.functional.resize"),
        ("launch", "triton kernel __main__.kernel"),
        ("call", "triton kernel __main__.other"),
        ("language", "triton.language.load"),
    ],
)
def test_what_is_not_there_fails_by_name(real_names, what, name):
    kind, message, is_not_implemented = real_names["errors"][what]
    assert is_not_implemented, kind
    assert message.startswith(f"{name}: the kit's CPU engine "), message


def test_probes_for_optional_ops_answer_no(real_names):
    assert real_names["probe"] == [True, False]


def test_amx_is_answered_yes_unless_told_otherwise(real_names):
    assert real_names["amx"] == {"default": True, "0": False, "1": True}
    assert real_names["errors"]["amx"][0] == "ValueError"
    assert "'maybe'" in real_names["errors"]["amx"][1]


def test_triton_arithmetic(real_names):
    assert real_names["numbers"] == [4, 1, 8, 8, 3]


def test_nothing_leaks_into_this_process():
    assert not str(sys.modules.get("sgl_kernel", "")).count("cpu_engine")
    assert not any(str(PATH) in str(sys.modules.get(name, "")) for name in ("torchvision", "triton", "kitlib_stub"))
    assert str(PATH) not in sys.path


def test_process_refuses_more_than_one_worker():
    process.initialize(1, 0)
    assert f"{torch.get_num_threads()} threads" in process.init_cpu_threads_env("0,1")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.initialize.*tensor parallelism"):
        process.initialize(2, 0)
