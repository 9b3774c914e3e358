"""Import stub of torchvision: SGLang imports it for images, which a text server never sees."""

from __future__ import annotations

import kitlib_amx
import kitlib_stub

__version__ = "0.0.0+kitlib"

kitlib_amx.answer()
_stub = kitlib_stub.install(__name__)


def __getattr__(name: str):
    return getattr(_stub, name)
