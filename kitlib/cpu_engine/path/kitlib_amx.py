"""Lets SGLang serve on CPUs with and without AMX alike.

SGLang 0.5.20 reaches the ops of `sgl_kernel` only where `torch.cpu._is_amx_tile_supported()` says yes;
elsewhere it falls back to an attention backend that refuses EAGLE. The kit's ops are plain torch and need no
AMX, so the answer is yes whatever the CPU. SGLang asks once in each process, in `sglang/srt/utils/common.py`,
after it has imported torchvision: the torchvision stub beside this file calls `answer`.
"""

from __future__ import annotations

import os

import torch


def answer() -> None:
    """Make torch say that the CPU has AMX, or not if KITLIB_CPU_AMX is 0 (then SGLang falls back by itself).

    Raises ValueError for a value other than 0 and 1.
    """
    setting = os.environ.get("KITLIB_CPU_AMX", "1")
    if setting not in ("0", "1"):
        raise ValueError(f"KITLIB_CPU_AMX is {setting!r}; it must be 0 or 1, or absent (which means 1)")
    torch.cpu._is_amx_tile_supported = lambda: setting == "1"
