"""What the trainer meant: sizes, boundaries, norms and maps of a drafter, from any config dialect and the shapes.

What the shapes say wins over what the config says; a contradiction is kept for `checks` to report. Every field
carries its provenance in `Contract.sources`.
"""

from __future__ import annotations

from .contract import Contract, parameter_shapes
from .dialects import lookup
from .target import TargetInfo
from .wiring import Rope, Wiring, default_boundaries

__all__ = ["Contract", "Rope", "TargetInfo", "Wiring", "default_boundaries", "lookup", "parameter_shapes"]
