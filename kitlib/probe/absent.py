"""Stand-ins for packages of a GPU machine: SGLang imports them when it starts and the probe never calls them.

One import hook for every release: any submodule and any name of a listed package can be imported, used as a decorator,
a base class or an annotation. Once `seal` was called, calling one raises NotImplementedError with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = frozenset({"decord", "flashinfer", "sgl_kernel", "torchvision", "triton", "vllm"})
used: set[str] = set()
sealed = False


class StandIn(type):
    """Metaclass of what an absent package hands out."""

    def __getattr__(cls, name: str):
        if name.startswith("__") or name == "active":  # triton.runtime.driver.active: there is no driver
            raise AttributeError(name)
        return _stand_in(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args, **kwargs):
        """Decorate, or make one more stand-in; a class of the engine's own is made as usual."""
        if "_absent" not in cls.__dict__:
            return super().__call__(*args, **kwargs)
        if sealed:
            raise NotImplementedError(
                f"{cls.__module__}.{cls.__qualname__} is absent here; the probe only stands in for it"
            )
        if len(args) != 1 or not callable(args[0]) or kwargs:
            return cls
        if isinstance(args[0], types.FunctionType):
            args[0].fn = args[0]  # what triton.jit makes has the function in `fn`
        return args[0]

    def __instancecheck__(cls, instance):
        """A function that a stand-in decorated counts as what the real decorator makes of it."""
        return super().__instancecheck__(instance) or (
            "_absent" in cls.__dict__ and isinstance(instance, types.FunctionType)
        )

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())


def _stand_in(module: str, name: str) -> StandIn:
    return StandIn(name, (), {"__module__": module, "_absent": True})


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if module := sys.modules.get(f"{self.__name__}.{name}"):
            return module
        return _importers(name) or _stand_in(self.__name__, name)


def _importers(name: str) -> type | None:
    """A class of that name that the importing module has already defined: `from vllm import RMSNorm` keeps its own."""
    frame = sys._getframe(2)
    while frame and frame.f_globals["__name__"].startswith("importlib"):
        frame = frame.f_back
    own = frame and frame.f_globals.get(name)
    return own if isinstance(own, type) else None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in PACKAGES:
            return None
        used.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Put the stand-ins before whatever is installed, so that a machine with a GPU gives the same answer."""
    sys.meta_path.insert(0, _Finder())


def seal() -> None:
    """From here on a call of a stand-in fails loudly."""
    global sealed
    sealed = True
