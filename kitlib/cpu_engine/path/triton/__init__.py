"""Import stub of triton: kernels can be defined, as SGLang does on import, but none can be launched."""

from __future__ import annotations

import kitlib_stub

__version__ = "0.0.0+kitlib"

_stub = kitlib_stub.install(__name__)


class Kernel:
    """A kernel that was defined and cannot be launched."""

    def __init__(self, function) -> None:
        self.name = f"triton kernel {function.__module__}.{function.__qualname__}"

    def __call__(self, *args, **kwargs):
        """Refuse to run."""
        kitlib_stub.refuse(self.name)

    def __getitem__(self, grid):
        kitlib_stub.refuse(self.name)


def jit(function=None, **options):
    """Wrap a function as a Kernel; takes `@jit` and `@jit(...)`."""
    return jit if function is None else Kernel(function)


def _decorator(*args, **kwargs):
    return lambda kernel: kernel


autotune = heuristics = _decorator


class Config:
    """A tuning configuration; only ever stored."""

    def __init__(self, *args, **kwargs) -> None:
        pass


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def __getattr__(name: str):
    return getattr(_stub, name)
