"""What is not there fails by name."""

from __future__ import annotations

import torch


class MissingOp(NotImplementedError, AttributeError):
    """An op was asked for that the CPU engine does not implement.

    It is an AttributeError as well, so that SGLang's `hasattr` probes for optional kernels answer no.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the kit's CPU engine does not have it (it serves dense Llama models only)")


class Ops(torch._ops._OpNamespace):
    """`torch.ops.sgl_kernel`, with names that are not there refused as MissingOp."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise MissingOp(f"torch.ops.sgl_kernel.{name}") from None


def missing_op(name: str):
    """Return a function that stands for an absent op and raises MissingOp when it is called."""

    def refuse(*args, **kwargs):
        raise MissingOp(f"torch.ops.sgl_kernel.{name}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
