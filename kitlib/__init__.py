"""kitlib: find out why a trained EAGLE-3 drafter is rejected when it is served."""

from __future__ import annotations

__version__ = "0.1.0"

# The names notebooks use, and the module of each. Importing kitlib imports none of them, and no torch.
_FRONT_DOOR = {
    "WIDTH_COLUMNS": "comparison",
    "Checkpoint": "checkpoint",
    "Contract": "contract",
    "KitError": "findings",
    "Report": "findings",
    "Serving": "serving",
    "Session": "diagnose",
    "Wiring": "contract",
    "Workbench": "workbench",
    "accept_row": "rows",
    "check": "checks",
    "diverge": "divergence",
    "environment": "workbench",
    "feature_findings": "comparison",
    "fit_findings": "comparison",
    "fit_wirings": "comparison",
    "flag_matrix": "matrix",
    "layer_findings": "comparison",
    "load_findings": "diagnose",
    "load_rows": "rows",
    "matrix_findings": "matrix",
    "wiring_rows": "rows",
}
_MODULES = ("show", "lab")
__all__ = sorted((*_FRONT_DOOR, *_MODULES))


def __getattr__(name: str):
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _FRONT_DOOR:
        return getattr(import_module(f".{_FRONT_DOOR[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
