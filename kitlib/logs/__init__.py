"""What an engine says about itself: its log, `/server_info`, `meta_info` and `/metrics`, as rows and counts.

Names, patterns and formulas of every release are data in `engines/sglang.toml`. Broken text never raises, and
secrets are redacted before anything is kept.
"""

from __future__ import annotations

from .counts import Counts, Speculation, invert, metrics_counts, request_counts, server_counts, speculation
from .lines import Event, Log, Tail, decode_row, flags, reason, redact

__all__ = [
    "Counts", "Event", "Log", "Speculation", "Tail", "decode_row", "flags", "invert", "metrics_counts", "reason",
    "redact", "request_counts", "server_counts", "speculation",
]  # fmt: skip
