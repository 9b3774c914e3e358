"""Modules that can be imported from but not used, for packages that a text server imports and never calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


def refuse(name: str):
    """Raise NotImplementedError for the use of `name`."""
    raise NotImplementedError(f"{name}: the kit's CPU engine has only an import stub of it")


class Refusing(type):
    """Metaclass of stand-in classes: to be subclassed, named or asked for members, not to be instantiated."""

    def __getattr__(cls, name: str):
        if name[0].isupper():
            return stand_in(f"{cls.__qualname__}.{name}", cls.__module__)
        raise AttributeError(name)

    def __call__(cls, *args, **kwargs):
        """Refuse to make an instance."""
        refuse(f"{cls.__module__}.{cls.__qualname__}")


def stand_in(name: str, module: str) -> Refusing:
    """Return a class for a capitalised name."""
    return Refusing(name, (), {"__module__": module})


class Stub(types.ModuleType):
    """A module that makes up what it is asked for: classes for capitalised names, else submodules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        is_class = name[0].isupper()
        value = stand_in(name, self.__name__) if is_class else sys.modules.get(full) or Stub(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """Refuse to be called as a function."""
        refuse(self.__name__)

    def __getitem__(self, key):
        refuse(self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package as a Stub, unless the package has a file for it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.package + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def install(package: str) -> Stub:
    """Make `import package.anything` give stubs, and return one whose attributes `package` can hand out."""
    sys.meta_path.append(_Finder(package))  # last, so that a file of the package wins
    return Stub(package)
