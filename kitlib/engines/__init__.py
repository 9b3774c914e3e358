"""Engine knowledge as data (`*.toml`, one file an engine) and the rules that read it."""

from __future__ import annotations

from .data import Engine, accept_rate
from .rules import Fate, Served, served

__all__ = ["Engine", "Fate", "Served", "accept_rate", "served"]
