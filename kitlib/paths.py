"""Where things are; never the working directory."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"


def cache() -> Path:
    """The cache folder: $KITLIB_CACHE, else `.cache` in the repository, else the user's own cache."""
    if chosen := os.environ.get("KITLIB_CACHE"):
        return Path(chosen)
    return ROOT / ".cache" if (ROOT / "pyproject.toml").exists() else Path.home() / ".cache" / "eagle3-kit"
