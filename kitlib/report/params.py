"""Parameters of a report: read as written, refused when unknown, typed by the notebook that takes them."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..findings import KitError

PATHS = ("drafter", "target", "features", "prompts", "log", "train_metrics", "train_rows")  # may be a file or folder
TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "None": type(None)}


def parse_params(pairs: Iterable[str], file: str | Path | None = None) -> dict[str, Any]:
    """Parameters from a YAML or JSON file and from `name=value` pairs, which win.

    Values stay as written (`007` is "007"); `assign` types each by the notebook that takes it.
    """
    params: dict[str, Any] = {}
    if file is not None:
        import yaml

        try:
            text = Path(file).read_text(encoding="utf-8")
            params = yaml.load(text, Loader=yaml.BaseLoader) or {}  # noqa: S506 - makes strings and nothing else
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise KitError(f"Cannot read parameters from {file}: {' '.join(str(error).split())}.") from None
        if not isinstance(params, dict):
            raise KitError(f"{file} holds no parameters; write one `name: value` a line.")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise KitError(f"-p takes name=value, not {pair!r}.")
        params[name.strip()] = value
    return params


def parameters(notebook: Path) -> dict[str, set[type]]:
    """Every parameter of a notebook with the types it accepts, from the cell tagged `parameters`.

    The cell is read as Python: papermill's reader loses a line whose comment holds `=` and a line annotated
    `str | None`. A value that is no literal is refused, because it would not follow the parameters.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        found = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        known = {}
        for line in ast.parse("".join(found[0]["source"]) if found else "").body:
            annotated = isinstance(line, ast.AnnAssign)
            name = line.target if annotated else line.targets[0]
            said = re.sub(r"\[.*\]", "", ast.unparse(line.annotation)) if annotated else ""
            kinds = {TYPES[word] for word in re.findall(r"\w+", said) if word in TYPES}
            known[name.id] = kinds | {type(ast.literal_eval(line.value))}
        return known
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        why = f"its parameters cell must hold `name: type = literal` lines only ({error})"
        raise KitError(f"Cannot run {notebook}: {why}.") from None


def assign(params: Mapping[str, Any], books: list[Path]) -> dict[Path, dict[str, Any]]:
    """What each notebook gets: the parameters it knows, in its types; KitError for one that none knows."""
    known = {book: parameters(book) for book in books}
    names = sorted({name for types in known.values() for name in types} - {"out"})
    for name in params:
        if name == "out":
            raise KitError("The folder of a report is set with --out, not with -p out=….")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"they know {', '.join(names)}."
            raise KitError(f"No notebook has a parameter {name!r}; {hint}")
    return {b: {n: _typed(n, v, known[b][n]) for n, v in params.items() if n in known[b]} for b in books}


def _typed(name: str, value: Any, types: set[type]) -> Any:
    """The value in one of the types; what is a path is resolved against the caller's folder."""
    if isinstance(value, str) and str in types:
        path = os.path.expanduser(value)
        located = name in PATHS and value and (os.path.exists(path) or value.startswith((".", "~")))
        return os.path.abspath(path) if located else value
    given = value
    value = [_literal(item) for item in value] if isinstance(value, list) else _literal(value)
    if type(value) is int and float in types and int not in types:
        value = float(value)
    if type(value) not in types:
        wanted = " or ".join(sorted(kind.__name__ for kind in types))
        raise KitError(f"Parameter {name!r} takes {wanted}, not {given!r}.")
    return value


def _literal(value: Any) -> Any:
    try:
        text = str(value)
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
