"""kitlib: find out why a trained EAGLE-3 drafter is rejected when it is served."""

from __future__ import annotations

__version__ = "0.1.0"
