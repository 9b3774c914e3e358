"""Plain-torch stand-in for the CPU build of SGLang's `sgl_kernel`, for the server process only.

Upstream's CPU kernels (sgl-project/sglang, sgl-kernel/csrc/cpu, Apache-2.0) are in no installable package.
This one registers, under the same names and signatures, the ops that unmodified sglang 0.5.20 reaches with
`--device cpu` for a dense Llama in fp32 or bf16, with or without speculation. Made to be right, not fast.
"""

from __future__ import annotations

import torch

from . import attention, layers, process
from .missing import MissingOp, Ops, missing_op
from .slots import (  # noqa: F401  SGLang imports these by name
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu  # noqa: F401

__version__ = "0.5.20+kitlib"

# Schema of each op as upstream defines it (torch_extension_cpu.cpp), and the module that has the function of
# the same name. `(a!)` marks what an op writes.
OPS = {
    "init_cpu_threads_env(str cpu_ids) -> str": process,
    "initialize(int size, int rank) -> ()": process,
    "convert_weight_packed(Tensor weight) -> Tensor": layers,
    "weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor": layers,
    "rmsnorm_cpu(Tensor input, Tensor weight, float eps) -> Tensor": layers,
    "fused_add_rmsnorm_cpu(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()": layers,
    "silu_and_mul_cpu(Tensor input) -> Tensor": layers,
    "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)": layers,
    "store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor indices, int row_dim) -> ()": attention,
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()": attention,
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, "
    "Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()": attention,
}

# Names that SGLang binds when it is imported, though no dense Llama calls them.
BOUND_AT_IMPORT = (
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
)


def _register() -> torch.library.Library:
    library = torch.library.Library("sgl_kernel", "DEF")
    for schema, module in OPS.items():
        name = schema.partition("(")[0]
        library.define(schema)
        dispatch = "CPU" if "Tensor" in schema else "CompositeExplicitAutograd"  # no tensor, no device
        library.impl(name, getattr(module, name), dispatch)
    torch.ops.sgl_kernel = Ops("sgl_kernel")
    for name in BOUND_AT_IMPORT:
        setattr(torch.ops.sgl_kernel, name, missing_op(name))
    return library


_library = _register()  # the ops live as long as this object


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    raise MissingOp(f"sgl_kernel.{name}")
