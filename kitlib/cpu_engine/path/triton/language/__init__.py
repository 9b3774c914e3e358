"""Import stub of triton.language: names for kernel bodies that are defined and never run."""

from __future__ import annotations

import kitlib_stub

_stub = kitlib_stub.Stub(__name__)


class constexpr:
    """A compile-time constant."""

    def __init__(self, value) -> None:
        self.value = value


def __getattr__(name: str):
    return getattr(_stub, name)
