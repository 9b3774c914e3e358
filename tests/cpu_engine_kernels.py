"""The CPU engine's kernels under a private name, and how their results are compared.

No test may see an `sgl_kernel` that is not the real one, so the folder's modules are imported as a package of
another name, without the `__init__` that registers them.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch

PATH = Path(__file__).parent.parent / "kitlib" / "cpu_engine" / "path"

_package = types.ModuleType("_cpu_engine_kernels")
_package.__path__ = [str(PATH / "sgl_kernel")]
sys.modules.setdefault(_package.__name__, _package)
layers, attention, slots, trees, process = (
    importlib.import_module(f"_cpu_engine_kernels.{name}")
    for name in ("layers", "attention", "slots", "trees", "process")
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a result with a float64 reference at the precision of the result's own type."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
